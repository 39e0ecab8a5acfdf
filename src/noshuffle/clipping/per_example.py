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
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from noshuffle.clipping.check import UNCOMPILED, original, refuse_reentrant, trainable, validate
from noshuffle.clipping.factor import Clip, ClippedSum
from noshuffle.clipping.forms import DenseGradient, GradientForm
from noshuffle.clipping.isolation_check import unlike_pair, with_same_rng
from noshuffle.clipping.layers import NotNow
from noshuffle.clipping.objective import (
    Criterion,
    ModelLoss,
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
from noshuffle.clipping.snapshot import SMALL, Watch
from noshuffle.clipping.statefulness import Findings, refuse_memory, refuse_written, same
from noshuffle.clipping.stateless import call_with
from noshuffle.clipping.tape import GradientTape, rewritten
from noshuffle.clipping.units import Members, by_unit, finish, members
from noshuffle.errors import Unsupported, one_of, whole


class _Bound(nn.Module):
    """The model and its loss as one module, so that the loss may call any part of the model."""

    def __init__(self, model: nn.Module, loss_fn: Criterion | ModelLoss) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, *single: Any) -> Tensor:
        return single_loss(self.model, self.loss_fn, single)


def per_example_gradients(
    model: nn.Module, loss_fn: Criterion | ModelLoss, batch: tuple[Any, ...]
) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients [B, *shape] by parameter name, and losses [B]; every example is a batch of one."""
    bound = _Bound(model, loss_fn)
    params = {f"model.{n}": p.detach() for n, p in trainable(model).items()}

    def loss(theta: dict[str, Tensor], example: tuple[Any, ...]) -> Tensor:
        value: Tensor = call_with(bound, theta, one(example))
        must_depend(value)
        return value

    mapped = vmap(grad_and_value(loss), in_dims=(None, batch_axes(batch)), randomness="different")
    # Fused attention has no batching rule and would be run example by example.
    with rewritten(model, GradientTape(1, is_on=False)), sdpa_kernel(SDPBackend.MATH):
        grads, losses = mapped(params, batch)
    return {n.removeprefix("model."): g for n, g in grads.items()}, losses


def one_at_a_time(
    model: nn.Module, loss_fn: Criterion | ModelLoss, batch: tuple[Any, ...]
) -> tuple[dict[str, Tensor], Tensor]:
    """The same by plain autograd, one example after the other: slow, and for every model.

    Buffers and frozen parameters are as before the first one for each: what an example writes
    there, none after it sees. (A large frozen one is refused by the watch of the step instead.)
    """
    frozen = [p for p in model.parameters() if not p.requires_grad and p.numel() <= SMALL]
    kept = [(t, t.detach().clone()) for t in (*model.buffers(), *frozen)]
    params = trainable(model)
    rows: list[list[Tensor]] = []
    losses = []
    for i in range(batch_size(batch)):
        with torch.no_grad():
            for tensor, value in kept if i else ():
                if not same(tensor.detach(), value):
                    tensor.copy_(value)
        with torch.enable_grad():
            loss = single_loss(model, loss_fn, take(batch, slice(i, i + 1)))
        losses.append(loss.detach())
        if not loss.requires_grad:
            rows.append([torch.zeros_like(p) for p in params.values()])
            continue
        try:
            grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        except RuntimeError as error:
            refuse_reentrant(error)
            raise
        rows.append(
            [torch.zeros_like(p) if g is None else g for p, g in zip(params.values(), grads)]
        )
    stacked = [torch.stack(column) for column in zip(*rows)]
    return dict(zip(params, stacked)), torch.stack(losses)


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
        loss_fn: Criterion | ModelLoss,
        batch: tuple[Any, ...],
        *,
        clip: Clip,
        units: Tensor | None = None,
        reduce: str = "sum",
        weights: Tensor | None = None,
    ) -> ClippedSum:
        """Σ over units of the clipped gradient; see `finish` for what is guaranteed."""
        one_of(("sum", "mean"), reduce=reduce)
        given, model = model, original(model)
        if given is not model:
            self._say(UNCOMPILED)
        validate(model)
        like = trainable(model)
        batch = cuttable(batch)
        size = batch_size(batch)
        device = next(iter(like.values())).device
        if size == 0:
            return empty_sum(like, clip=clip, device=device)
        who = members(units, weights, size=size, device=device)
        findings = self.check_state(model, loss_fn, batch)
        watch = Watch(model)
        watch.begin()
        try:
            found = self._sum(model, loss_fn, batch, who, like=like, clip=clip, reduce=reduce)
        finally:
            changed = watch.end(findings)
        self.reconsider(changed, model, loss_fn, batch)
        return found

    def _sum(
        self,
        model: nn.Module,
        loss_fn: Criterion | ModelLoss,
        batch: tuple[Any, ...],
        who: Members,
        *,
        like: dict[str, nn.Parameter],
        clip: Clip,
        reduce: str,
    ) -> ClippedSum:
        """The clipped sum, microbatch by microbatch."""
        size, device = who.size, next(iter(like.values())).device
        step = self.microbatch or size
        parts: list[ClippedSum] = []
        totals: dict[str, list[GradientForm]] = {}
        losses = []
        for start in range(0, size, step):
            rows = slice(start, start + step)
            grads, values = self._gradients(model, loss_fn, take(batch, rows))
            losses.append(values)
            part = who if step >= size else _part(who, rows)
            forms = {
                n: by_unit([DenseGradient(wide(g))], part, reduce=reduce) for n, g in grads.items()
            }
            if who.units is None:
                with exactly(device):
                    parts.append(finish(forms, like, values, part, clip=clip))
            else:
                for name, own in forms.items():
                    (new,) = own
                    old = totals.get(name, ())
                    totals[name] = [DenseGradient(old[0].dense() + new.dense()) if old else new]
        if who.units is not None:
            with exactly(device):
                return finish(totals, like, torch.cat(losses), who, clip=clip)
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _gradients(
        self, model: nn.Module, loss_fn: Criterion | ModelLoss, batch: tuple[Any, ...]
    ) -> tuple[dict[str, Tensor], Tensor]:
        try:
            return per_example_gradients(model, loss_fn, batch)
        except RuntimeError as error:
            if not _is_vmap_limit(error):
                raise
            self._say(f"one example at a time, since vmap gave up: {str(error).splitlines()[0]}")
            return one_at_a_time(model, loss_fn, batch)

    def check_state(
        self,
        model: nn.Module,
        loss_fn: Criterion | ModelLoss,
        batch: tuple[Any, ...],
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

        def run(i: int) -> Tensor:
            with with_same_rng(model), rewritten(model, GradientTape(1, is_on=False)):
                return single_loss(model, loss_fn, take(pair, slice(i, i + 1)))

        def run_two(i: int) -> None:
            # Whoever runs it in batches will say why it does not run.
            with (
                suppress(Exception),
                with_same_rng(model),
                rewritten(model, GradientTape(2, is_on=False)),
            ):
                batch_losses(model, loss_fn, take(pair, torch.tensor([0, 1 - i])))

        findings = refuse_written(model, run, known.get(key))
        if in_batches and is_rowwise(loss_fn):
            refuse_written(model, run_two, findings)
        refuse_memory(model, run)
        known[key] = findings
        return findings

    def reconsider(
        self,
        changed: Sequence[str],
        model: nn.Module,
        loss_fn: Criterion | ModelLoss,
        batch: tuple[Any, ...],
        *,
        in_batches: bool = False,
    ) -> None:
        """Raise unless what a step changed, for the first time, is seen not to depend on the data.

        A cache grows with the longest sequence so far; a layer may also start to keep statistics.
        """
        if not changed:
            return
        options = {"in_batches": in_batches, "is_again": True}
        findings = self.check_state(model, loss_fn, batch, **options)
        for name in changed:
            if name not in findings.may_change:
                raise Unsupported(
                    f"{name!r} of the model must not change in a step, as it did not when the "
                    "model was tried, but this forward pass wrote into it; nothing was released. "
                    "Let no layer start to keep statistics while a run lasts"
                )

    def _say(self, note: str) -> None:
        if note not in self.fallbacks:
            self.fallbacks.append(note)


def empty_sum(like: dict[str, nn.Parameter], *, clip: Clip, device: torch.device) -> ClippedSum:
    """The clipped sum of nobody: zeros of the right shapes."""
    none, nobody = torch.zeros(0, device=device), torch.zeros(0, dtype=torch.bool, device=device)
    values = {n: torch.zeros_like(p, dtype=sum_dtype(p.dtype)) for n, p in like.items()}
    return ClippedSum(values, clip.bound(tuple(like)), none, none, nobody, nobody)


def _part(who: Members, rows: slice) -> Members:
    """The members among some rows; units keep their numbers, and their means their divisors."""
    keep = None if who.keep is None else who.keep[rows]
    units = who.units
    if units is not None:
        units = type(units)(units.of[rows], units.slot[rows], units.count, units.widest)
    return Members(len(range(*rows.indices(who.size))), keep, units, who.examples)


def _joined(parts: list[ClippedSum]) -> ClippedSum:
    values = {name: sum(p.values[name] for p in parts) for name in parts[0].values}
    lists = ([getattr(p, field) for p in parts] for field in ("norms", "losses", "bad", "present"))
    return ClippedSum(values, parts[0].bound, *(torch.cat(items) for items in lists))  # type: ignore[arg-type]
