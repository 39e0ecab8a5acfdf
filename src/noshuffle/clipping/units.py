"""Who takes part, and the last steps that every engine shares: unit sums, factors, the sum.

    examples --(weights)--> present examples --(units)--> unit gradients --(clip)--> one sum

An engine hands over per-example gradients as forms; `finish` adds up the examples of each unit
(or averages them), clips each unit once, and sums. No state.

>>> import torch
>>> members(torch.tensor([0, 1, 0]), None, size=3, device=torch.device("cpu")).units.widest
2
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noshuffle.clipping.factor import Clip, ClippedSum, are_plain, clip_factors, slack
from noshuffle.clipping.forms import DenseGradient, GradientForm, Units, merge, squares
from noshuffle.clipping.products import HALF
from noshuffle.errors import InvalidInput


@dataclass(frozen=True)
class Members:
    """The examples that count (`keep`, None for all) and the units they belong to (or None)."""

    size: int
    keep: Tensor | None = None
    units: Units | None = None
    examples: Tensor | None = None  # how many examples each unit has

    def rows(self, rows: slice) -> Members:
        """Those among some rows; units keep their numbers, and their means their divisors."""
        keep = None if self.keep is None else self.keep[rows]
        units = self.units
        if units is not None:
            units = replace(units, of=units.of[rows], slot=units.slot[rows])
        return Members(len(range(*rows.indices(self.size))), keep, units, self.examples)


def members(
    units: Tensor | None, weights: Tensor | None, *, size: int, device: torch.device
) -> Members:
    """Read `units` (index of the unit of each example) and `weights` (0 leaves one out)."""
    keep = None
    if weights is not None:
        if tuple(weights.shape) != (size,):
            raise InvalidInput(f"weights must have shape ({size},), got {tuple(weights.shape)}")
        keep = (weights != 0).to(device)
        is_on_host = weights.device.type == "cpu"  # a device is not asked
        if is_on_host and not bool(((weights == 0) | (weights == 1)).all()):
            raise InvalidInput("weights must be 0 (left out) or 1 (counts); scale the loss instead")
    if units is None:
        return Members(size, keep, None, None)
    if tuple(units.shape) != (size,) or units.is_floating_point() or units.dtype == torch.bool:
        raise InvalidInput(
            f"units must hold one whole number per example ({size},), got {units.dtype} "
            f"{tuple(units.shape)}"
        )
    of = units.to(dtype=torch.long)  # read where they are, which is the host for most callers
    if size and int(of.min()) < 0:
        raise InvalidInput(f"units must be numbered from 0, got {int(of.min())}")
    counts = torch.bincount(of)
    order, slot = torch.argsort(of, stable=True), torch.empty_like(of)
    slot[order] = torch.arange(size, device=of.device) - (counts.cumsum(0) - counts)[of[order]]
    widest = int(counts.max()) if size else 0
    of, slot, counts = of.to(device), slot.to(device), counts.to(device)
    live = counts
    if keep is not None:
        live = torch.zeros_like(counts).index_add_(0, of, keep.long())
    return Members(size, keep, Units(of, slot, len(counts), widest), live)


def by_unit(forms: Sequence[GradientForm], who: Members, *, reduce: str) -> list[GradientForm]:
    """The merged forms of one parameter, one gradient per unit."""
    joined = merge(forms)
    if who.units is None or who.examples is None:
        return joined  # those that are left out get the factor zero
    if who.keep is not None:
        joined = [form.kept(who.keep) for form in joined]
    if reduce == "mean":
        share = 1.0 / who.examples.clamp_min(1).double()[who.units.of]
        joined = [form.scaled(share) for form in joined]
    return [form.by_unit(who.units) for form in joined]


def finish(
    forms: dict[str, list[GradientForm]],
    like: Mapping[str, Tensor],
    losses: Tensor,
    who: Members,
    *,
    clip: Clip,
    onto: Mapping[str, Tensor] | None = None,
) -> ClippedSum:
    """Clip every unit and sum. `forms` are per unit, by parameter name; `like` gives the shapes.

    `forms` is used up, so that memory is given back parameter by parameter. `onto`: the sums of
    earlier parts, to which these are added. A device is never waited for, and
    nothing here branches on numbers that it holds. Sums of parameters in half precision are
    float32: rounding a sum would let one unit move it by more than `bound`.

    Guarantees: one unit moves `values` by at most `bound` in L2 norm, whatever the other units
    are; one that is left out, or has a NaN or an infinity in its loss or gradient, contributes
    exactly zero (the latter is counted); a parameter that no example reached has a zero gradient.
    """
    losses, names = losses.detach(), tuple(like)
    kind = torch.float64 if losses.dtype == torch.float64 else torch.float32
    ok, present = _finite_and_present(losses, who)
    zeros = torch.zeros(ok.shape, device=ok.device)
    squared = {}
    for name in names:
        own = forms.get(name)
        squared[name] = zeros if not own else own[0].square if len(own) == 1 else squares(own)
    factors, norms, bad = clip_factors(squared, ok, present, clip=clip, slack=slack(*like.values()))
    has_all = who.units is not None or present is None  # those of units are masked by `by_unit`
    is_clean = has_all and are_plain((bad,)) and not bool(bad.any())
    values: dict[str, Tensor] = {}
    for group, factor in factors:
        for name in group:
            total = _total(forms.pop(name, []), factor, like[name], kind, is_clean=is_clean)
            values[name] = total if onto is None else onto[name].add_(total)
    present = torch.ones_like(ok) if present is None else present
    values = {name: values[name] for name in names}
    return ClippedSum(values, clip.bound(names), norms, losses, bad, present)


def _total(
    forms: Sequence[GradientForm],
    factor: Tensor,
    like: Tensor,
    kind: torch.dtype,
    *,
    is_clean: bool,
) -> Tensor:
    """Σ_u factor_u · gradient_u of one parameter; of factor zero nothing is multiplied, unless
    `is_clean` says that all is finite: 0·∞ is not 0."""
    factor = factor.to(torch.float64 if like.dtype == torch.float64 else kind)
    dtype, total = torch.float32 if like.dtype in HALF else like.dtype, None
    for form in forms:
        held = getattr(form, "written", ())  # for the norm: it is not computed a second time
        used = DenseGradient(held[0]) if held else form
        more = (used.total(factor) if is_clean else used.spent(factor)).to(dtype)
        total = more if total is None else total.add_(more)
    return torch.zeros_like(like, dtype=dtype) if total is None else total.reshape(like.shape)


def joined(done: Sequence[ClippedSum]) -> ClippedSum:
    """Sums of parts, each of which was added onto the first one, as one sum."""
    fields = ("norms", "losses", "bad", "present")
    lists: dict[str, Any] = {f: torch.cat([getattr(part, f) for part in done]) for f in fields}
    return replace(done[0], **lists)


def _finite_and_present(losses: Tensor, who: Members) -> tuple[Tensor, Tensor | None]:
    """Per unit, whether all losses of its present examples are finite, and whether it has any
    (None: every one has)."""
    if are_plain((losses,)):
        # NumPy takes one pass over a few hundred numbers, torch four.
        ok = torch.from_numpy(np.isfinite(losses.numpy()))
    else:
        ok = losses.abs() < math.inf  # false for NaN; `isfinite` is twice as many operations
    if who.units is None or who.examples is None:
        return ok, who.keep
    broken = torch.zeros(who.units.count, dtype=torch.long, device=losses.device)
    missed = ~ok if who.keep is None else ~ok & who.keep
    broken.index_add_(0, who.units.of, missed.long())
    return broken == 0, who.examples > 0
