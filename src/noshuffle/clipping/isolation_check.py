"""Try the layer rules on two examples before they are trusted with a model.

Two facts are checked on real rows of the first batch, under the same random numbers:

    alone     the loss of each and its gradient are the same whoever stands beside it, and the loss
              also with a third example in the batch, and with up to twelve
    exact     per parameter, the squared norms of both examples and the sum of their gradients
              equal those of plain autograd

A weight used outside its layer, a hook that changes an output, a batch flattened the other way or
examples that mix all fail here, and the caller then writes gradients out instead. No state.

>>> close(1.0, 1.0005, low=False), close(1.0, 1.2, low=False)
(True, False)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from noshuffle.clipping.check import as_written, trainable
from noshuffle.clipping.forms import GradientForm, merge, squares
from noshuffle.clipping.layers import NotByLayer, NotNow, without_gradient
from noshuffle.clipping.objective import Batch, Loss, _is_vmap_limit, batch_losses, batch_size, take
from noshuffle.clipping.products import HALF, roundoff, sum_dtype, wide
from noshuffle.clipping.tape import GradientTape, rewritten
from noshuffle.clipping.trial_rows import finite_rows, rounded, unlike_pair
from noshuffle.errors import InvalidInput

#: Numbers of a gradient that are compared at a time.
PIECE = 1 << 18
#: Examples that stand beside each other in the trial, at most; from sixteen on a CPU packs weights,
#: which takes megabytes.
TRIAL_ROWS = 12
#: What `tried` says of a model that passed by the allowance for TF32.
LOOSE = "with TF32 a gradient moves by up to 0.5 % with its batch, as it does from run to run"


def close(found: float, truth: float, *, low: bool, whole: float = 0.0) -> bool:
    """Whether a norm agrees with the true one as far as the precision allows (`low`: half).

    `whole` is the norm of the whole gradient: a part that is pure rounding error has no digits to
    agree on. A norm that is somewhat too large (steps that nearly cancel) is safe, one that is too
    small is not.
    """
    tolerance = 0.05 if low else 1e-3
    below = found >= truth * (1.0 - tolerance) - 1e-5 * whole - 1e-12
    return below and found <= truth * (1.0 + 10.0 * tolerance) + 0.1 * whole + 1e-12


def _alone(
    run: Callable[[tuple[Any, ...]], Tensor],
    pair: Batch,
    losses: Tensor,
    truth: Sequence[Sequence[Tensor | None]],
    params: list[nn.Parameter],
    *,
    low: bool,
) -> bool:
    """Raise NotByLayer unless each example has the same loss and gradient beside its copy.

    Shapes are the same and so are the operations on each row: hardly a bit should differ. The
    gradient shows what a gate that is still zero hides from the loss. Tells whether a gradient
    moved by more than that and passed since it moves from run to run too.
    """
    is_loose = False
    for i, own in enumerate(truth or ((), ())):
        with torch.enable_grad():
            again = run(take(pair, torch.tensor([i, i])))[i]
        gap = abs(float(again.detach()) - float(losses[i].detach()))
        if not gap <= (2e-3 if low else 1e-4) * max(abs(float(losses[i].detach())), 1e-6):
            raise NotByLayer("the loss of an example changes with the other examples of its batch")
        if not own:
            continue
        there = torch.autograd.grad(again, params, allow_unused=True)
        size, moved = _length(own), _length(own, there)
        tolerance = (2e-2 if low else 1e-4) * size + 1e-12
        if not moved <= tolerance and not low and roundoff(params[0]) > 0.0:
            # Attention on a GPU adds up in any order, and TF32 makes that a matter of 1e-4.
            with torch.enable_grad():
                same = torch.autograd.grad(run(pair)[i], params, allow_unused=True)
            tolerance = max(tolerance, min(3.0 * _length(own, same), 5e-3 * size))
            is_loose = True
        if not moved <= tolerance:
            raise NotByLayer(
                "the gradient of an example changes with the other examples of its batch"
            )
    return is_loose


def _length(tree: Iterable[Tensor | None], other: Iterable[Tensor | None] = ()) -> float:
    """The length of gradients less other ones; None counts as zero.

    Taken piece by piece, so that copies in double precision are small.
    """
    total = 0.0
    for pair in zip_longest(tree, other):
        own = [t.reshape(-1).split(PIECE) for t in pair if t is not None]
        gaps = (wide(a) - b[0] if b else a for a, *b in zip(*own))
        total += float(sum(gap.double().square().sum() for gap in gaps))
    return math.sqrt(total)


def _beside(run: Callable[..., Tensor], pair: Batch, batch: Batch) -> Tensor:
    """The losses of the pair beside further examples of its batch, as many as fit the device.

    What mixes large batches only, or such as are divided by four, is not seen in two.
    """
    rows, size = pair, min(batch_size(batch), TRIAL_ROWS)
    if size > 2:
        rest = finite_rows(batch, *range(2, size))
        rows = tree_map(lambda a, b: torch.cat([a, b]) if isinstance(a, Tensor) else a, pair, rest)
    while True:
        try:
            return run(rows)
        except torch.OutOfMemoryError:
            if batch_size(rows) <= 3:
                raise
        rows = take(rows, slice(max(2, batch_size(rows) // 2)))


def _counted(
    model: nn.Module,
    run: Callable[..., Tensor],
    pair: Batch,
    batch: Batch,
    *,
    low: bool,
    is_later: bool = False,
) -> None:
    """Raise NotByLayer if the loss of an example depends on how many there are (a batch mean).

    `is_later`: the model was tried before; a loss that is all but cancelled may move as far as
    rounding of its inputs moves it.
    """
    with without_gradient(), ExitStack() as stack:
        if not torch.equal(run(pair), run(pair, seed=1)):  # masks of dropout would differ
            for module in model.modules():
                stack.callback(setattr, module, "training", module.training)
                module.training = False
            if not torch.equal(run(pair), run(pair, seed=1)):
                return
        two, three = run(pair), run(take(pair, torch.tensor([0, 1, 1])))
        more = _beside(run, pair, batch)
        moved = (run(tree_map(rounded, pair)) - two).abs() if is_later else torch.zeros_like(two)
    for a, room, *others in zip(two.tolist(), moved.tolist(), three.tolist(), more.tolist()):
        tolerance = 5e-2 * max(abs(a), 0.2) if low else 1e-3 * max(abs(a), 1e-3)
        tolerance += room
        if not all(abs(a - b) <= tolerance for b in others):
            raise NotByLayer("the loss of an example changes with the number of examples")


@contextmanager
def with_same_rng(model: nn.Module, seed: int = 0) -> Iterator[None]:
    """Random numbers that leave the user's generators as they were, the same in every block."""
    devices = {p.device.index or 0 for p in model.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices=sorted(devices)):
        if any(p.device.type != "cpu" for p in model.parameters()):
            torch.manual_seed(seed)
        else:  # torch 2.13 writes the call stack down for every kind of device that is missing
            torch.default_generator.manual_seed(seed)
        yield


def probe(model: nn.Module, loss_fn: Loss, batch: Batch) -> Callable[[int], Tensor]:
    """A function that runs the first n examples, for looking at shapes."""

    def run(n: int) -> Tensor:
        with with_same_rng(model):
            try:
                return batch_losses(model, loss_fn, finite_rows(batch, *range(n)))
            except InvalidInput as error:
                raise NotByLayer(str(error)) from error

    return run


def tried(
    model: nn.Module,
    loss_fn: Loss,
    batch: Batch,
    forms_of: Callable[[tuple[Any, ...]], dict[str, list[GradientForm]]],
) -> str:
    """Raise NotByLayer unless the rules agree with plain autograd on two examples.

    Returns what had to be allowed for that, in words; mostly nothing.
    """
    pair = unlike_pair(batch)
    params = trainable(model)
    tape = GradientTape(2, is_on=False)

    def run(rows: Batch, seed: int = 0) -> Tensor:
        with as_written(model), rewritten(model, tape), with_same_rng(model, seed):
            return batch_losses(model, loss_fn, rows)

    with torch.enable_grad():
        losses = run(pair)
        each = losses.unbind()
    if not bool(torch.isfinite(losses).all()):
        raise NotNow("the loss of the first two examples is not finite")
    own_params = list(params.values())
    truth = [
        torch.autograd.grad(loss, own_params, retain_graph=True, allow_unused=True)
        for loss in (each if losses.requires_grad else ())
    ]
    try:
        with with_same_rng(model):
            forms = forms_of(pair)
    except RuntimeError as error:
        if not _is_vmap_limit(error):
            raise
        raise NotByLayer(f"a layer without a rule does not run under vmap ({error})") from error
    read = [t for each in forms.values() for form in each for t in vars(form).values()]
    low = any(isinstance(t, Tensor) and t.dtype in HALF for t in (*read, *own_params))
    is_loose = _alone(run, pair, losses, truth, own_params, low=low)
    _counted(model, run, pair, batch, low=low)
    whole = [_length(t) for t in truth] or [0.0, 0.0]
    for i, (name, parameter) in enumerate(params.items()):
        blank = torch.zeros_like(parameter, dtype=sum_dtype(parameter.dtype))
        rows = [blank if t[i] is None else wide(t[i]) for t in truth] or [blank, blank]
        _exact(name, merge(forms.get(name, [])), rows, whole, low=low)
    return LOOSE if is_loose else ""


def alone_still(model: nn.Module, loss_fn: Loss, batch: Batch) -> None:
    """Raise NotByLayer if examples have come to mix since the trial: its look at losses alone."""
    pair = unlike_pair(batch)

    def run(rows: Batch, seed: int = 0) -> Tensor:
        with with_same_rng(model, seed), without_gradient():
            return batch_losses(model, loss_fn, rows)

    with as_written(model), rewritten(model, GradientTape(2, is_on=False)):
        losses = run(pair)
        if not bool(torch.isfinite(losses).all()):
            raise NotNow("the loss of the first two examples is not finite")
        low = any(p.dtype in HALF for p in model.parameters()) or losses.dtype in HALF
        low = low or torch.is_autocast_enabled(losses.device.type)
        _alone(run, pair, losses, (), [], low=low)
        _counted(model, run, pair, batch, low=low, is_later=True)


def _exact(
    name: str,
    forms: Sequence[GradientForm],
    rows: Sequence[Tensor],
    whole: Sequence[float],
    *,
    low: bool,
) -> None:
    """Raise NotByLayer unless norms and sum of a parameter's forms are those of its two `rows`."""
    found = squares(forms).double().sqrt() if forms else torch.zeros(2)
    if len(found) != 2:
        raise NotByLayer(f"the layer of {name!r} sees more rows than examples")
    exact = [_length([row]) for row in rows]
    summed = rows[0] + rows[1]
    for form in forms:
        summed -= form.total(torch.ones(2, device=summed.device)).to(summed)
    gap = _length([summed])
    fits = all(close(float(f), e, low=low, whole=w) for f, e, w in zip(found, exact, whole))
    if not fits or gap > (0.1 if low else 2e-3) * max(exact) + 1e-5 * sum(whole):
        raise NotByLayer(
            f"the gradient of {name!r} by layer rules differs from autograd's: it is used "
            "outside its own layer, or examples mix before it"
        )
