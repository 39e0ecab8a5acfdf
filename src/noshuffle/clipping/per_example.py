"""Per-example gradients of any model, by vmap of its gradient.

    g_i = ∇_θ ℓ_i(θ),  all i at once:  vmap(grad(ℓ), in_dims=(None, 0))(θ, batch)

Memory is one gradient per example of a microbatch (per unit, with units). What vmap cannot do
(data-dependent control flow, a layer without a batching rule) is done one example at a time, and
`fallbacks` says so. State: none that matters; `fallbacks` is a log.

>>> import torch
>>> from noshuffle.clipping.factor import Flat
>>> model, x, y = torch.nn.Linear(2, 1), torch.randn(5, 2), torch.randn(5, 1)
>>> got = PerExample().clipped_sum(model, torch.nn.MSELoss(), (x, y), clip=Flat(0.1))
>>> got.units, got.bound, bool(got.values["weight"].norm() <= 0.5)
(5, 0.1, True)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from noshuffle.clipping.captured import CapturedTensors
from noshuffle.clipping.check import UNCOMPILED, as_written, original, refuse_reentrant, trainable
from noshuffle.clipping.factor import Clip, ClippedSum
from noshuffle.clipping.forms import DenseGradient, GradientForm
from noshuffle.clipping.isolation_check import REFUSALS
from noshuffle.clipping.layers import NotNow
from noshuffle.clipping.objective import (
    Batch,
    Loss,
    _is_vmap_limit,
    batch_axes,
    batch_losses,
    batch_size,
    cuttable,
    identity_of,
    is_rowwise,
    must_depend,
    one,
    single_loss,
    take,
)
from noshuffle.clipping.products import exactly, sum_dtype, wide
from noshuffle.clipping.snapshot import SMALL, Snapshot
from noshuffle.clipping.statefulness import (
    Findings,
    put_back_after,
    refuse_memory,
    refuse_written,
    same,
)
from noshuffle.clipping.stateless import call_with
from noshuffle.clipping.tape import GradientTape, rewritten, with_rewrite
from noshuffle.clipping.trial_rows import EXTREMES, extremes, unlike_pair
from noshuffle.clipping.trial_runs import with_same_rng
from noshuffle.clipping.units import Members, SumPart, by_unit, finish, joined, members
from noshuffle.errors import Unsupported, one_of, whole

#: What becomes of the gradients of one unit's examples.
REDUCTIONS = ("sum", "mean")


class _Bound(nn.Module):
    """The model and its loss as one module, so that the loss may call any part of the model."""

    def __init__(self, model: nn.Module, loss_fn: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, *single: Any) -> Tensor:
        return single_loss(self.model, self.loss_fn, single)


def per_example_gradients(
    model: nn.Module, loss_fn: Loss, batch: Batch
) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients [B, *shape] by parameter name, and losses [B]; every example is a batch of one."""
    bound = _Bound(model, loss_fn)
    params = {f"model.{n}": p.detach() for n, p in trainable(model).items()}

    def loss(theta: dict[str, Tensor], example: Batch) -> Tensor:
        value: Tensor = call_with(bound, theta, one(example))
        must_depend(value)
        return value

    mapped = vmap(grad_and_value(loss), in_dims=(None, batch_axes(batch)), randomness="different")
    # Fused attention has no batching rule and would be run example by example.
    with rewritten(model, GradientTape(1, is_on=False)), sdpa_kernel(SDPBackend.MATH):
        grads, losses = mapped(params, batch)
    return {n.removeprefix("model."): g for n, g in grads.items()}, losses


def one_at_a_time(
    model: nn.Module, loss_fn: Loss, batch: Batch
) -> tuple[dict[str, Tensor], Tensor]:
    """The same by plain autograd, one example after the other: slow, and for every model.

    Buffers and frozen parameters are as before the first one for each: what an example writes
    there, none after it sees. (A large frozen one is refused by the watch of the step instead.)
    """
    frozen = [p for p in model.parameters() if not p.requires_grad and p.numel() <= SMALL]
    kept = [(t, t.detach().clone()) for t in (*model.buffers(), *frozen)]
    params = trainable(model)
    own = list(params.values())
    rows, losses = [], []
    for i in range(batch_size(batch)):
        with torch.no_grad():
            for tensor, value in kept if i else ():
                if not same(tensor.detach(), value):
                    tensor.copy_(value)
        with torch.enable_grad():
            loss = single_loss(model, loss_fn, take(batch, slice(i, i + 1)))
        losses.append(loss.detach())
        grads: Sequence[Tensor | None] = [None] * len(own)
        if loss.requires_grad:
            try:
                grads = torch.autograd.grad(loss, own, allow_unused=True)
            except RuntimeError as error:
                refuse_reentrant(error)
                raise
        rows.append([torch.zeros_like(p) if g is None else g for p, g in zip(own, grads)])
    return dict(zip(params, map(torch.stack, zip(*rows)))), torch.stack(losses)


@dataclass
class PerExample:
    """Clip by writing out the gradient of every example, `microbatch` examples at a time."""

    microbatch: int | None = None
    why: str = "gradients of every example are written out: any model, memory grows with the batch"
    fallbacks: list[str] = field(default_factory=list)
    _findings: WeakKeyDictionary[nn.Module, dict[Any, Findings]] = field(
        default_factory=WeakKeyDictionary, repr=False
    )

    def __post_init__(self) -> None:
        if self.microbatch is not None:
            whole(microbatch=self.microbatch)

    def clipped_sum(
        self,
        model: nn.Module,
        loss_fn: Loss,
        batch: Batch,
        *,
        clip: Clip,
        units: Tensor | None = None,
        reduce: str = "sum",
        weights: Tensor | None = None,
    ) -> ClippedSum:
        """Σ over units of the clipped gradient; see `finish` for what is guaranteed."""
        one_of(REDUCTIONS, reduce=reduce)
        given, model = model, original(model)
        if given is not model:
            self.say(UNCOMPILED)
        shot = Snapshot(model)
        batch = cuttable(batch)
        size = batch_size(batch)
        if size == 0:
            return empty_sum(shot.like, clip=clip, device=shot.device)
        who = members(units, weights, size=size, device=shot.device)
        findings = self.check_state(model, loss_fn, batch)
        with shot.watch.around(findings, partial(self.reconsider, model, loss_fn, batch)):
            return self._sum(model, loss_fn, batch, who, like=shot.like, clip=clip, reduce=reduce)

    def _sum(
        self,
        model: nn.Module,
        loss_fn: Loss,
        batch: Batch,
        who: Members,
        *,
        like: dict[str, nn.Parameter],
        clip: Clip,
        reduce: str,
    ) -> ClippedSum:
        """The clipped sum, microbatch by microbatch; the gradient of a unit may come from many."""
        device, step = next(iter(like.values())).device, self.microbatch or who.size
        done: list[ClippedSum] = []
        totals: dict[str, list[GradientForm]] = {}
        losses = []
        for start in range(0, who.size, step):
            rows = slice(start, start + step)
            grads, values = self._gradients(model, loss_fn, take(batch, rows))
            part, onto = who.rows(rows), SumPart(onto=done[0].values if done else None)
            with exactly(device):
                forms = {
                    name: by_unit([DenseGradient(wide(g))], part, reduce=reduce)
                    for name, g in grads.items()
                }
                if who.units is None:
                    done.append(finish(forms, like, values, part, clip=clip, part=onto))
                    continue
                losses.append(values)
                for name, (new,) in forms.items():
                    both = [form.dense() for form in (*totals.get(name, ()), new)]
                    totals[name] = [DenseGradient(sum(both[1:], start=both[0]))]
        if who.units is None:
            return joined(done)
        with exactly(device):
            return finish(totals, like, torch.cat(losses), who, clip=clip)

    def _gradients(
        self, model: nn.Module, loss_fn: Loss, batch: Batch
    ) -> tuple[dict[str, Tensor], Tensor]:
        try:
            return per_example_gradients(model, loss_fn, batch)
        except RuntimeError as error:
            if not _is_vmap_limit(error):
                raise
            self.say(f"one example at a time, since vmap gave up: {str(error).splitlines()[0]}")
            return one_at_a_time(model, loss_fn, batch)

    def check_state(
        self,
        model: nn.Module,
        loss_fn: Loss,
        batch: Batch,
        *,
        in_batches: bool = False,
        is_again: bool = False,
    ) -> Findings:
        """Raise if the model keeps something of its data (`statefulness`); what it may change.

        Asked once for each of its modes and kinds of loss, or `is_again`. `in_batches`: examples
        will be run side by side.
        """
        modes = tuple(m.training for m in model.modules())
        key = (modes, identity_of(loss_fn), in_batches)
        known = self._findings.setdefault(model, {})
        if key in known and not is_again:
            return known[key]
        try:
            pair = unlike_pair(batch)
        except NotNow:
            return Findings()

        captured, inside = CapturedTensors(batch, modules=(model, loss_fn)), with_rewrite(model)

        def run(i: int, rows: Batch = pair) -> Tensor:
            single, tape = take(rows, slice(i, i + 1)), GradientTape(1, is_on=False)
            with with_same_rng(model), rewritten(model, tape, only=inside), captured:
                return single_loss(model, loss_fn, single)

        def run_two(i: int) -> None:
            # Whoever runs it in batches will say why it does not run.
            tape = GradientTape(2, is_on=False)
            with suppress(Exception), with_same_rng(model), rewritten(model, tape):
                batch_losses(model, loss_fn, take(pair, torch.tensor([0, 1 - i], device="cpu")))

        def run_far(rows: Batch) -> None:
            with suppress(*REFUSALS):  # numbers that the model does not take
                run(1, rows)

        # A loss may be a module that keeps something, too.
        both = _Bound(model, loss_fn) if isinstance(loss_fn, nn.Module) else model
        with as_written(model), put_back_after(both):
            findings = refuse_written(model, run, known.get(key))
            captured.refuse()
            if in_batches and is_rowwise(loss_fn):
                refuse_written(model, run_two, findings)
            refuse_memory(both, run, *(partial(run_far, r) for r in extremes(pair, EXTREMES[:2])))
        known[key] = findings
        return findings

    def reconsider(
        self,
        model: nn.Module,
        loss_fn: Loss,
        batch: Batch,
        changed: Sequence[str],
        *,
        in_batches: bool = False,
    ) -> None:
        """Raise unless what a step changed, for the first time, is seen not to depend on the data.

        A cache grows with the longest sequence so far; a layer may also start to keep statistics.
        """
        findings = self.check_state(model, loss_fn, batch, in_batches=in_batches, is_again=True)
        for name in changed:
            if name not in findings.may_change:
                raise Unsupported(
                    f"{name!r} of the model must not change in a step, as it did not when the "
                    "model was tried, but this forward pass wrote into it; nothing was released. "
                    "Let no layer start to keep statistics while a run lasts"
                )

    def say(self, note: str) -> None:
        """Add a note to `fallbacks`, once."""
        if note not in self.fallbacks:
            self.fallbacks.append(note)


def empty_sum(like: dict[str, nn.Parameter], *, clip: Clip, device: torch.device) -> ClippedSum:
    """The clipped sum of nobody: zeros of the right shapes."""
    none, nobody = torch.zeros(0, device=device), torch.zeros(0, dtype=torch.bool, device=device)
    values = {n: torch.zeros_like(p, dtype=sum_dtype(p.dtype)) for n, p in like.items()}
    return ClippedSum(values, clip.bound(tuple(like)), none, none, nobody, nobody)
