"""Who takes part, and the last steps that every engine shares: unit sums, factors, the sum.

    examples --(weights)--> present examples --(units)--> unit gradients --(clip)--> one sum

An engine hands over per-example gradients as forms; `finish` adds up the examples of each unit
(or averages them), clips each unit once, and sums. No state.

>>> import torch
>>> members(torch.tensor([0, 1, 0]), None, size=3, device=torch.device("cpu")).units.widest
2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from noshuffle.clipping.bundle import bundled
from noshuffle.clipping.clipped import Clip, ClippedSum, clip_factors
from noshuffle.clipping.factor import slack
from noshuffle.clipping.forms import Form, Units, merge, squares
from noshuffle.clipping.products import sum_dtype
from noshuffle.clipping.rowwise import Rowwise
from noshuffle.device_copy import DeviceCopy
from noshuffle.errors import InvalidInput


@dataclass(frozen=True)
class Members:
    """The examples that count (`keep`, None for all) and the units they belong to (or None)."""

    size: int
    keep: Tensor | None
    units: Units | None
    examples: Tensor | None  # how many examples each unit has

    @property
    def count(self) -> int:
        return self.size if self.units is None else self.units.count


def members(
    units: Tensor | None, weights: Tensor | None, *, size: int, device: torch.device
) -> Members:
    """Read `units` (index of the unit of each example) and `weights` (0 leaves one out)."""
    keep = None
    if weights is not None:
        if tuple(weights.shape) != (size,):
            raise InvalidInput(f"weights must have shape ({size},), got {tuple(weights.shape)}")
        keep = (weights != 0).to(device)
        if not is_capturing(weights.device) and not bool(((weights == 0) | (weights == 1)).all()):
            raise InvalidInput("weights must be 0 (left out) or 1 (counts); scale the loss instead")
    if units is None:
        return Members(size, keep, None, None)
    if tuple(units.shape) != (size,) or units.is_floating_point() or units.dtype == torch.bool:
        raise InvalidInput(
            f"units must hold one whole number per example ({size},), got {units.dtype} "
            f"{tuple(units.shape)}"
        )
    of = units.to(device=device, dtype=torch.long)
    if size and int(of.min()) < 0:
        raise InvalidInput(f"units must be numbered from 0, got {int(of.min())}")
    counts = torch.bincount(of)
    order = torch.argsort(of, stable=True)
    slot = torch.empty_like(of)
    first = torch.cumsum(counts, 0) - counts
    slot[order] = torch.arange(size, device=device) - first[of[order]]
    widest = int(counts.max()) if size else 0
    live = counts if keep is None else torch.bincount(of[keep], minlength=len(counts))
    return Members(size, keep, Units(of, slot, len(counts), widest), live)


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, so that nothing may wait for the device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def by_unit(forms: Sequence[Form], who: Members, *, reduce: str) -> list[Form]:
    """The merged forms of one parameter, one gradient per unit."""
    joined = merge(forms)
    if who.keep is not None:
        joined = [form.kept(who.keep) for form in joined]
    if who.units is None or who.examples is None:
        return joined
    if reduce == "mean":
        share = 1.0 / who.examples.clamp_min(1).double()[who.units.of]
        joined = [form.scaled(share) for form in joined]
    return [form.by_unit(who.units) for form in joined]


class BadUnitFound(Exception):
    """What was taken for good held a bad unit. Never leaves the package."""


def _sum_of(forms: Sequence[Form], factors: Tensor, like: Tensor) -> Tensor:
    dtype = sum_dtype(like.dtype)
    totals = [form.total(factors).to(dtype) for form in forms]
    if not totals:
        return torch.zeros_like(like, dtype=dtype)
    for more in totals[1:]:
        totals[0].add_(more)
    return totals[0]


def _is_finite(losses: Tensor) -> Tensor:
    """Truth value per loss; NumPy takes one pass over a few hundred numbers, torch four."""
    if losses.device.type == "cpu" and losses.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(np.isfinite(losses.detach().numpy()))
    return torch.isfinite(losses)


def finish(
    forms: dict[str, list[Form]],
    like: Mapping[str, Tensor],
    losses: Tensor,
    who: Members,
    *,
    clip: Clip,
    onto: Mapping[str, Tensor] | None = None,
    is_sure: bool = False,
    is_hopeful: bool = False,
    doubt: Tensor | None = None,
) -> ClippedSum:
    """Clip every unit and sum. `forms` are per unit, by parameter name; `like` gives the shapes.

    `forms` is used up, so that memory is given back parameter by parameter. Sums of parameters in
    half precision are float32: rounding a sum would let one unit move it by more than `bound`.
    `onto`: sums of other units that these are added to, in place. `is_sure` does not ask the
    device whether a unit is bad: the caller must, and give the answer as `doubt` to the last
    part of the same sum, which raises `BadUnitFound` if anything in `onto` is worthless.
    `is_hopeful` lets a GPU go on meanwhile: the sum is begun, the answer read after it, and a bad
    unit raises `BadUnitFound` too.

    Guarantees: one unit moves `values` by at most `bound` in L2 norm, whatever the other units
    are; a unit with a NaN or an infinity in its loss or gradient contributes exactly zero and is
    counted; a parameter that no example reached has a zero gradient.
    """
    device = losses.device
    ok = _is_finite(losses)
    present = torch.ones_like(ok) if who.keep is None else who.keep
    if who.units is not None and who.examples is not None:
        broken = torch.zeros(who.count, dtype=torch.long, device=device)
        ok = broken.index_add_(0, who.units.of, (~ok & present).long()) == 0
        present = who.examples > 0
    zeros = torch.zeros(who.count, device=device)
    on_gpu = device.type == "cuda" and who.count > 0
    packs = [bundled(forms, names, is_wanted=on_gpu) for names, _ in clip.groups(tuple(like))]
    rows = Rowwise({} if on_gpu else forms)
    rows.take_squares()
    norms2 = {name: squares(forms[name]) if forms.get(name) else zeros for name in like}
    norms2.update({pack.names[0]: pack.form.squares() for pack in packs if pack is not None})
    aim = max(map(slack, {(t.dtype, t.dim() > 2): t for t in like.values()}.values()))
    factors, norms, bad = clip_factors(norms2, ok, present, clip=clip, slack=aim)
    spoiled = is_capturing(device)
    # Sent along now, losses cost nobody a wait: the device is about to be asked anyway.
    shown = None if spoiled or not on_gpu else DeviceCopy(losses).values
    answer = None
    if not spoiled and not is_sure:
        any_bad = bad.any() if doubt is None else bad.any() | doubt
        if is_hopeful and on_gpu:
            answer = DeviceCopy(any_bad)
        else:
            spoiled = bool(any_bad)
            if spoiled and doubt is not None and bool(doubt):
                raise BadUnitFound
    if spoiled:
        forms.update({name: [form.kept(~bad) for form in own] for name, own in forms.items()})
        rows = Rowwise({} if on_gpu else forms)
    values: dict[str, Tensor] = {}
    is_single = {sum_dtype(t.dtype) for t in like.values()} == {torch.float32}
    for (names, exact), pack in zip(factors, packs):
        factor = exact.float() if on_gpu and is_single else exact  # once, and not for each of them
        small = {} if pack is None else pack.totals(factor, bad if spoiled else None)
        small.update(rows.totals(names, factor))
        if onto is not None and small:
            torch._foreach_add_([onto[name] for name in small], list(small.values()))
            small = {name: onto[name] for name in small}
        values.update(small)
        for name in names:
            own = forms.pop(name, [])
            if name not in small:
                value = _sum_of(own, factor, like[name])
                values[name] = value if onto is None else onto[name].add_(value)
    if answer is not None and bool(answer.read()):
        raise BadUnitFound
    bound = clip.bound(tuple(like))
    values = {name: values[name] for name in like}
    return ClippedSum(values, bound, norms, losses.detach(), bad, present, shown)
