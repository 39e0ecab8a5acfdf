"""One trial at the first batch of a kind: are examples apart, and are the layer rules right?

The engine computes the loss and the per-parameter norms of every example anyway, so the question
is put to the engine itself, on the real batch and on one that is filled up to a planned size:

    exchanged    some rows keep losses and norms when all others become copies of one, made-up rows,
                 zeros, and, on a CPU, far values, NaN and labels that losses leave out
    by autograd  a few rows have, alone and among all, the losses and norms of plain autograd, one
                 at a time
    summed       the sum of their gradients by rules is that of autograd

Runs that are compared have the same random numbers. Everything is float32 without TF32 and with the
plain attention kernel; low precision is compared as far as its unit roundoff allows, and what
differs from run to run, that far: what rounding leaves open counts as passed. Nothing is checked
again after the first batch of a kind. The bound of a clip never rests on this: what is normed is
what is summed. No state.

>>> model, batch = nn.Linear(2, 3), (torch.randn(5, 2), torch.randint(3, (5,)))
>>> reading = trial(model, nn.CrossEntropyLoss(), batch, least=8)
>>> sorted(reading.layers.ruled)
['']
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from noshuffle.clipping.captured import CapturedTensors
from noshuffle.clipping.check import as_written, evaluated, trainable
from noshuffle.clipping.forms import merge, squares
from noshuffle.clipping.ghost_forms import Reading
from noshuffle.clipping.layers import Layers, Mixes, NotByLayer, find_layout, read, tensors
from noshuffle.clipping.objective import (
    Batch,
    Loss,
    batch_losses,
    batch_size,
    is_vmap_limit,
    of_each,
    shape_of,
    single_loss,
    take,
)
from noshuffle.clipping.products import HALF, exactly, full_precision
from noshuffle.clipping.state import restored
from noshuffle.clipping.tape import GradientTape, rewritten
from noshuffle.errors import InvalidInput

#: How far losses and norms may move where shapes are the same, and where they are not.
BESIDE, ALONE = 1e-3, 2e-2
#: Examples that are also done one at a time.
FEW = 6
#: Examples with a number so many times as large as is usual are not among them.
UNUSUAL = 100.0
#: Labels that losses leave out: torch's `ignore_index`, and what many write for "unknown".
IGNORED = (-100, -1)
#: How code refuses numbers that it does not take.
_REFUSALS = (RuntimeError, ValueError, LookupError, ArithmeticError, AssertionError)


@contextmanager
def same_rng(model: nn.Module, seed: int) -> Iterator[Callable[[], bool]]:
    """Random numbers that are the same in every block and leave the user's generators as they were.

    Yields a function: whether any were drawn.
    """
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    with torch.random.fork_rng(devices=devices):
        # torch 2.13 writes the call stack down in torch.manual_seed
        used = [torch.default_generator, *(torch.cuda.default_generators[d] for d in devices)]
        began = [generator.manual_seed(seed).get_state() for generator in used]
        yield lambda: not all(torch.equal(g.get_state(), s) for g, s in zip(used, began))


def first_pass(model: nn.Module, loss_fn: Loss, batch: Batch) -> set[str]:
    """Run one example, and give the names of what that wrote into the model and was restored.

    Raises Unsupported if a trained parameter was written to, InvalidInput if the loss takes a
    tensor of the whole batch from around it.
    """
    changed: set[str] = set()
    tape, single = GradientTape(1, is_on=False), take(batch, torch.tensor([0], device="cpu"))
    with (
        same_rng(model, 0), restored(model, loss_fn, changed=changed), as_written(model),
        rewritten(model, tape), CapturedTensors(batch, modules=(model, loss_fn)) as captured,
    ):  # fmt: skip
        single_loss(model, loss_fn, single)
    captured.refuse()
    return changed


def trial(model: nn.Module, loss_fn: Loss, batch: Batch, *, least: int) -> Reading | None:
    """How to clip this model by its layers; None if this batch decides nothing.

    Raises NotByLayer where rules are not right, Mixes where an example changes another one; the
    text names the layer. A batch that does not fit the device so often is halved until it does.
    """
    rows = batch
    while True:
        try:
            with _plain_arithmetic(), as_written(model):
                return _Trial(model, loss_fn, rows).run(max(least, batch_size(rows)))
        except torch.OutOfMemoryError:
            if batch_size(rows) == 1:
                raise
        rows, least = take(rows, slice(batch_size(rows) // 2)), 0


def rules_hold(model: nn.Module, loss_fn: Loss, batch: Batch, layers: Layers) -> None:
    """Raise NotByLayer unless the rules give what autograd gives, with examples kept apart."""
    with _plain_arithmetic(), as_written(model):
        found = _Trial(model, loss_fn, batch)
        found.reading = Reading(layers, None)
        found.by_autograd(batch, None)


@contextmanager
def _plain_arithmetic() -> Iterator[None]:
    with full_precision(), sdpa_kernel(SDPBackend.MATH), torch.random.fork_rng(devices=[]):
        torch.default_generator.seed()  # of the operating system: nothing in a model can know it
        yield


class _Seen(NamedTuple):
    """What clipping sees of some rows: losses [B], and norms [P, B] by parameter."""

    losses: Tensor
    norms: Tensor

    def rows(self, index: Tensor) -> _Seen:
        return _Seen(self.losses[index], self.norms[:, index])


class _Trial:
    """The runs of one trial."""

    def __init__(self, model: nn.Module, loss_fn: Loss, batch: Batch) -> None:
        self.model, self.loss_fn, self.batch = model, loss_fn, batch
        self.params = trainable(model)
        self.seed, self.has_drawn = secrets.randbits(62), False
        self.reading: Reading
        self.on_host = next(iter(self.params.values())).device.type == "cpu"
        self.unit = 0.0  # roundoff of the lowest precision that was seen
        self._note([*model.parameters(), *tensors(batch)])
        kind = "cpu" if self.on_host else "cuda"
        if torch.is_autocast_enabled(kind):
            self._note([torch.zeros(0, dtype=torch.get_autocast_dtype(kind), device="cpu")])

    def _note(self, seen: list[Tensor]) -> None:
        """Note the precision of some tensors."""
        self.unit = max(
            [self.unit, *(torch.finfo(t.dtype).eps / 2 for t in seen if t.dtype in HALF)]
        )

    def run(self, size: int) -> Reading | None:
        """All of it; `size`: that of the batch that is filled up."""
        own = batch_size(self.batch)
        full = filled(self.batch, size)
        layers = read(self.model)
        layout = find_layout(self.model, layers, partial(self._losses_of, full))
        self.reading = Reading(layers, replace(layout, inner=shape_of(self.batch).inner))
        keeps = torch.rand(own, device="cpu").argsort() < max(1, own // 2)
        more = torch.rand(size - own, device="cpu").argsort() < max(1, (size - own) // 2)
        told = self._exchanged(self.batch, keeps) + self._exchanged(full, torch.cat([~keeps, more]))
        if told < 2:
            return None
        self.by_autograd(full, own)
        return self.reading

    def _losses_of(self, rows: Batch, count: int) -> Tensor:
        """The losses of the first rows, with everything non-finite replaced."""

        def clean(t: Tensor) -> Tensor:
            return t.nan_to_num(posinf=1.0, neginf=-1.0) if t.is_floating_point() else t

        index = torch.arange(count, device="cpu") % batch_size(rows)
        with same_rng(self.model, 0), restored(self.model, self.loss_fn):
            try:
                return batch_losses(self.model, self.loss_fn, of_each(clean, take(rows, index)))
            except InvalidInput as error:
                raise NotByLayer(str(error)) from error

    def _seen(self, rows: Batch) -> _Seen:
        size = batch_size(rows)
        with same_rng(self.model, self.seed) as has_drawn:
            try:
                forms, losses = self.reading.forms(self.model, self.loss_fn, rows)
            except RuntimeError as error:
                if not is_vmap_limit(error):
                    raise
                raise NotByLayer(f"a layer does not run under vmap ({error})") from error
            self.has_drawn = self.has_drawn or has_drawn()
        norms = torch.zeros(len(self.params), size, dtype=torch.float64, device="cpu")
        with exactly(losses.device):
            for i, name in enumerate(self.params):
                for form in forms.get(name, ()):  # autocast may be the model's own
                    self._note([t for t in vars(form).values() if isinstance(t, Tensor)])
                if own := merge(forms.pop(name, [])):
                    found = squares(own).double().sqrt().cpu()
                    if len(found) != size:
                        raise NotByLayer(f"the layer of {name!r} sees more rows than examples")
                    norms[i] = found
        return _Seen(losses.double().cpu(), norms)

    def _exchanged(self, rows: Batch, keeps: Tensor) -> int:
        """Raise Mixes unless some rows are as they were where all others are exchanged; how many of
        them had a finite gradient that is not zero."""
        kept, rest = keeps.nonzero()[:, 0], (~keeps).nonzero()[:, 0]
        if not len(kept) or not len(rest):
            return 0
        first = self._seen(rows).rows(kept)
        again = self._seen(rows).rows(kept)
        sizes = first.norms.square().sum(0)
        told = int((sizes.isfinite() & (sizes > 0) & first.losses.isfinite()).sum())
        is_done = False
        for other in _exchanges(rows, rest, on_host=self.on_host):
            try:
                moved = self._seen(other).rows(kept)
            except (NotByLayer, torch.OutOfMemoryError):
                raise
            except _REFUSALS:  # numbers that the model does not take
                continue
            is_done = True
            room = max(BESIDE, 2.0 * self.unit)
            self._compare(first, moved, room, twin=again, why="beside other examples")
        return told if is_done else 0

    def by_autograd(self, rows: Batch, own: int | None) -> None:
        """Raise unless a few rows have the losses, the norms and the sum that autograd gives them;
        not asked where random numbers show in eval mode, too."""
        usual = _usual(take(rows, slice(own)))
        order = torch.randperm(len(usual) - 1, device="cpu")[: FEW - 1]
        # the last, too: what has room for so many takes none of those at the end
        picks = torch.cat([usual[-1:], usual[order]])
        few = take(rows, picks)
        with ExitStack() as stack:
            self.has_drawn = False
            among = self._seen(rows).rows(picks)
            if self.has_drawn:
                stack.enter_context(evaluated(self.model))
                self.has_drawn = False
                among = self._seen(rows).rows(picks)
                if self.has_drawn:
                    return
            truth, total = self._one_at_a_time(few)
            alone = self._seen(few)
            room = max(ALONE, 16.0 * self.unit)
            for found in (alone, among):
                self._compare(truth, found, room, why="with the number of examples, or by rules")
            self._sums_up(few, truth, total, room)

    def _one_at_a_time(self, rows: Batch) -> tuple[_Seen, list[Tensor]]:
        """Losses and norms by plain autograd, and the sum of the gradients."""
        own, seen = list(self.params.values()), []
        total = [
            torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in own
        ]
        for i in range(batch_size(rows)):
            tape, single = GradientTape(1, is_on=False), take(rows, slice(i, i + 1))
            back = restored(self.model, self.loss_fn)
            with same_rng(self.model, self.seed), back, rewritten(self.model, tape):
                with torch.enable_grad():
                    loss = single_loss(self.model, self.loss_fn, single)
                grads: Sequence[Tensor | None] = [None] * len(own)
                if loss.requires_grad:
                    grads = torch.autograd.grad(loss, own, allow_unused=True)
            lengths = [0.0 if g is None else float(g.detach().double().norm()) for g in grads]
            seen.append((float(loss.detach()), lengths))
            if all(length < float("inf") for length in lengths):
                for whole, g in zip(total, grads):
                    if g is not None:
                        whole += g
        table = torch.tensor(
            [[loss, *own] for loss, own in seen], dtype=torch.float64, device="cpu"
        )
        return _Seen(table[:, 0], table[:, 1:].mT), total

    def _sums_up(self, rows: Batch, truth: _Seen, total: list[Tensor], room: float) -> None:
        """Raise unless the rules' sum of these rows is autograd's; of finite ones alone."""
        fine = truth.norms.isfinite().all(0)
        whole = float(truth.norms[:, fine].square().sum(0).sqrt().max()) if bool(fine.any()) else 0
        with same_rng(self.model, self.seed):
            forms, losses = self.reading.forms(self.model, self.loss_fn, rows)
        factors = fine.to(losses.device, losses.dtype)
        with exactly(losses.device), torch.no_grad():
            for name, due in zip(self.params, total):
                gap = due.double().clone()
                for form in merge(forms.pop(name, [])):
                    gap -= form.spent(factors).reshape(due.shape)
                share = room if self.unit else 0.1 * room
                if float(gap.norm()) > share * max(whole, float(due.norm())) + 1e-7:
                    raise NotByLayer(f"{_layer(name)}: the sum of gradients is not autograd's")

    def _compare(
        self, truth: _Seen, found: _Seen, rel: float, *, why: str, twin: _Seen | None = None
    ) -> None:
        """Raise Mixes unless losses and norms are the same, up to rounding and to what two equal
        runs, `truth` and its `twin`, differ by."""
        twin = twin or truth
        whole = truth.norms.square().sum(0).sqrt().nan_to_num(0.0, 0.0, 0.0).max()
        pairs = [*zip(self.params, truth.norms, found.norms, twin.norms)]
        for name, a, b, c in (*pairs, ("", truth.losses, found.losses, twin.losses)):
            fine = a.isfinite() & b.isfinite()
            floor = rel * (1e-2 * float(whole) if name else 2e-2) + 1e-9
            room = rel * torch.maximum(a.abs(), b.abs()) + floor + 4.0 * (a - c).abs().nan_to_num()
            if bool(((a - b).abs() > room)[fine].any()) or bool(
                (a.isfinite() != b.isfinite()).any()
            ):
                what = f"{_layer(name)}: the gradient" if name else "the loss"
                raise Mixes(f"{what} of an example changes {why}")


def _layer(name: str) -> str:
    return f"layer {name.rpartition('.')[0]!r} ({name!r})"


def _usual(rows: Batch) -> Tensor:
    """The rows without a number far larger than most have; all, where none is left.

    Norms by rules have room for what may have vanished beside such a number, and are too large.
    """
    fine = torch.ones(batch_size(rows), dtype=torch.bool, device="cpu")
    for t in tensors(rows):
        if t.is_floating_point() and t.numel():
            largest = t.detach().reshape(len(t), -1).abs().amax(1).double().cpu()
            fine &= largest <= UNUSUAL * largest.nanmedian().clamp(min=1.0)
    return (fine if bool(fine.any()) else ~fine).nonzero()[:, 0]


def _made_up(t: Tensor, count: int) -> Tensor:
    """Rows of entries drawn from all of a tensor: values that its model takes."""
    flat = t.reshape(-1)
    index = torch.randint(max(1, len(flat)), (count, *t.shape[1:]), device="cpu")
    return flat[index.to(t.device)] if len(flat) else t.new_zeros((count, *t.shape[1:]))


def filled(batch: Batch, size: int) -> Batch:
    """The batch filled up to a size, with rows of it and made-up ones in turn."""
    own = batch_size(batch)
    numbers = torch.arange(size, device="cpu")
    index, is_new = numbers % own, ((numbers >= own) & (numbers % 2 == 0)).nonzero()

    def fill(t: Tensor) -> Tensor:
        full = t.detach()[index]
        full[is_new[:, 0]] = _made_up(t.detach(), len(is_new))
        return full

    return batch if size == own else of_each(fill, batch)


def _exchanges(batch: Batch, rest: Tensor, *, on_host: bool) -> Iterator[Batch]:
    """The batch with other rows in the place of `rest`.

    On a GPU a number that an operation refuses ends the process: values there are those of the
    batch, and zeros that are no labels.
    """
    drawn = rest[secrets.randbelow(len(rest))]

    def with_rows(new: Callable[[Tensor], Tensor | float], t: Tensor) -> Tensor:
        full = t.detach().clone()
        full[rest.to(t.device)] = torch.as_tensor(new(t), dtype=t.dtype, device=t.device)
        return full

    def zeros(t: Tensor) -> Tensor | float:
        is_number = t.dim() == 1 and not t.is_floating_point() and t.dtype != torch.bool
        return t.min() if is_number and len(t) else 0.0

    def scaled(t: Tensor, by: float) -> Tensor:
        return t[rest.to(t.device)] * by if t.is_floating_point() else t[rest.to(t.device)]

    def made_up(t: Tensor) -> Tensor:
        return _made_up(t.detach(), len(rest))

    ways: list[Callable[[Tensor], Tensor | float]] = [lambda t: t[drawn], made_up, zeros]
    if on_host:
        ways += [partial(scaled, by=by) for by in (1e4, -1e4, float("nan"))]
    for way in ways:
        yield of_each(partial(with_rows, way), batch)
    whole = [t for t in tensors(batch) if not t.is_floating_point() and t.dtype != torch.bool]
    for only in whole if on_host else ():
        for value in IGNORED:

            def ignored(t: Tensor, value: int = value, only: Tensor = only) -> Tensor:
                return with_rows(lambda _: float(value), t) if t is only else t

            yield of_each(ignored, batch)
