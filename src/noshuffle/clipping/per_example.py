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
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from noshuffle.clipping.check import (
    UNCOMPILED,
    as_written,
    original,
    refuse_reentrant,
    trainable,
    validate,
)
from noshuffle.clipping.factor import Clip, ClippedSum
from noshuffle.clipping.forms import DenseGradient, GradientForm
from noshuffle.clipping.isolated import Bound
from noshuffle.clipping.objective import (
    Batch,
    Loss,
    batch_axes,
    batch_size,
    cuttable,
    identity_of,
    is_vmap_limit,
    must_depend,
    one,
    single_loss,
    take,
)
from noshuffle.clipping.products import exactly, sum_dtype, wide
from noshuffle.clipping.state import restored, warn_of_restored
from noshuffle.clipping.stateless import call_with
from noshuffle.clipping.tape import GradientTape, rewritten
from noshuffle.clipping.trial import first_pass
from noshuffle.clipping.units import Members, by_unit, finish, joined, members
from noshuffle.errors import one_of, whole

#: What becomes of the gradients of one unit's examples.
REDUCTIONS = ("sum", "mean")


def per_example_gradients(
    model: nn.Module, loss_fn: Loss, batch: Batch
) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients [B, *shape] by parameter name, and losses [B]; every example is a batch of one."""
    bound = Bound(model, loss_fn)
    params = {f"model.{n}": p.detach() for n, p in trainable(model).items()}

    def loss(theta: dict[str, Tensor], example: Batch) -> Tensor:
        value: Tensor = call_with(bound, theta, one(example))
        must_depend(value)
        return value

    mapped = vmap(grad_and_value(loss), in_dims=(None, batch_axes(batch)), randomness="different")
    # Fused attention has no batching rule and would be run example by example.
    tape, math = GradientTape(1, is_on=False), sdpa_kernel(SDPBackend.MATH)
    with restored(model, loss_fn), as_written(model), rewritten(model, tape), math:
        grads, losses = mapped(params, batch)
    return {n.removeprefix("model."): g for n, g in grads.items()}, losses


def one_at_a_time(
    model: nn.Module, loss_fn: Loss, batch: Batch
) -> tuple[dict[str, Tensor], Tensor]:
    """The same by plain autograd, one example after the other: slow, and for every model.

    What an example writes into the model, none after it sees.
    """
    params = trainable(model)
    own = list(params.values())
    rows, losses = [], []
    for i in range(batch_size(batch)):
        with restored(model, loss_fn), as_written(model):
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
    _tried: WeakKeyDictionary[nn.Module, set[Any]] = field(
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
        validate(model)
        like = trainable(model)
        device = next(iter(like.values())).device
        batch = cuttable(batch)
        size = batch_size(batch)
        if size == 0:
            return empty_sum(like, clip=clip, device=device)
        who = members(units, weights, size=size, device=device)
        self.check_first(model, loss_fn, batch)
        return self._sum(model, loss_fn, batch, who, like=like, clip=clip, reduce=reduce)

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
            part, onto = who.rows(rows), done[0].values if done else None
            with exactly(device):
                forms = {
                    name: by_unit([DenseGradient(wide(g))], part, reduce=reduce)
                    for name, g in grads.items()
                }
                if who.units is None:
                    done.append(finish(forms, like, values, part, clip=clip, onto=onto))
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
            if not is_vmap_limit(error):
                raise
            self.say(f"one example at a time, since vmap gave up: {str(error).splitlines()[0]}")
            return one_at_a_time(model, loss_fn, batch)

    def check_first(self, model: nn.Module, loss_fn: Loss, batch: Batch) -> None:
        """At the first batch of a mode and a loss: run one example, and name what it changes."""
        key = tuple(m.training for m in model.modules()), identity_of(loss_fn)
        tried = self._tried.setdefault(model, set())
        if key not in tried:
            changed = first_pass(model, loss_fn, batch)
            tried.add(key)
            warn_of_restored(changed)

    def say(self, note: str) -> None:
        """Add a note to `fallbacks`, once."""
        if note not in self.fallbacks:
            self.fallbacks.append(note)


def empty_sum(like: dict[str, nn.Parameter], *, clip: Clip, device: torch.device) -> ClippedSum:
    """The clipped sum of nobody: zeros of the right shapes."""
    none, nobody = torch.zeros(0, device=device), torch.zeros(0, dtype=torch.bool, device=device)
    values = {n: torch.zeros_like(p, dtype=sum_dtype(p.dtype)) for n, p in like.items()}
    return ClippedSum(values, clip.bound(tuple(like)), none, none, nobody, nobody)
