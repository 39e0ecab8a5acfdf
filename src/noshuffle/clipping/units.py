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

from noshuffle.clipping.factor import Clip, ClippedSum, clip_factors, slack
from noshuffle.clipping.forms import (
    Bundle,
    GradientForm,
    Units,
    bundled,
    merge,
    squares,
    take_squares_of_rows,
)
from noshuffle.clipping.products import HALF
from noshuffle.device_copy import DeviceCopy, on_its_way
from noshuffle.errors import InvalidInput
from noshuffle.triton_shim import is_capturing


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
    live = counts if keep is None else torch.bincount(of[keep], minlength=len(counts))
    order, slot = torch.argsort(of, stable=True), torch.empty_like(of)
    slot[order] = torch.arange(size, device=device) - (counts.cumsum(0) - counts)[of[order]]
    widest = int(counts.max()) if size else 0
    return Members(size, keep, Units(of, slot, len(counts), widest), live)


def by_unit(forms: Sequence[GradientForm], who: Members, *, reduce: str) -> list[GradientForm]:
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
    """A sum holds a bad unit (NaN or infinite) and is worthless. Never leaves the package."""


@dataclass(frozen=True)
class SumPart:
    """How one part of a sum is finished: what it is added to, and when one asks for bad units.

    A GPU works behind the host, and to ask it whether a unit is bad is to wait for it. `ask`:

        "before"   the sum; bad units are replaced by zeros in it
        "after"    the sum was begun; a bad unit then raises `BadUnitFound`
        "never"    the caller asks about all parts together, and must: the sum may be worthless
    """

    ask: str = "before"
    onto: Mapping[str, Tensor] | None = None  # sums of earlier parts, to which these are added
    earlier_bad: Tensor | None = None  # whether one of those has a bad unit: `BadUnitFound`, too


WHOLE = SumPart()


def finish(
    forms: dict[str, list[GradientForm]],
    like: Mapping[str, Tensor],
    losses: Tensor,
    who: Members,
    *,
    clip: Clip,
    part: SumPart = WHOLE,
) -> ClippedSum:
    """Clip every unit and sum. `forms` are per unit, by parameter name; `like` gives the shapes.

    `forms` is used up, so that memory is given back parameter by parameter. Sums of parameters in
    half precision are float32: rounding a sum would let one unit move it by more than `bound`.

    Guarantees: one unit moves `values` by at most `bound` in L2 norm, whatever the other units
    are; a unit with a NaN or an infinity in its loss or gradient contributes exactly zero and is
    counted; a parameter that no example reached has a zero gradient.
    """
    device, losses, names = losses.device, losses.detach(), tuple(like)
    ok, present = _finite_and_present(losses, who)
    gradients = _Gradients(forms, like, clip=clip, count=len(ok), device=device)
    squared = gradients.squared_norms()
    factors, norms, bad = clip_factors(squared, ok, present, clip=clip, slack=slack(*like.values()))
    is_behind = device.type == "cuda" and len(ok) > 0 and not is_capturing(device)
    shown = on_its_way(losses) if is_behind else None  # the device is asked soon anyway
    has_bad, answer = _ask(bad, part, device=device)
    if has_bad:
        gradients.leave_out(bad)
    values: dict[str, Tensor] = {}
    for group, factor in factors:
        gradients.add_up(values, group, factor, onto=part.onto)
    if answer is not None and bool(answer.read()):
        raise BadUnitFound
    values = {name: values[name] for name in names} if len(factors) > 1 else values
    present = torch.ones_like(ok) if present is None else present
    return ClippedSum(values, clip.bound(names), norms, losses, bad, present, shown)


def joined(done: Sequence[ClippedSum]) -> ClippedSum:
    """Sums of parts, each of which was added onto the first one, as one sum."""
    fields = ("norms", "losses", "bad", "present")
    lists: dict[str, Any] = {f: torch.cat([getattr(part, f) for part in done]) for f in fields}
    # The last part has waited for the device, hence for the losses of all before it too.
    shown = [part.shown for part in done if part.shown is not None]
    return replace(done[0], **lists, shown=torch.cat(shown) if len(shown) == len(done) else None)


def _finite_and_present(losses: Tensor, who: Members) -> tuple[Tensor, Tensor | None]:
    """Per unit, whether all losses of its present examples are finite, and whether it has any
    (None: every one has)."""
    if losses.device.type == "cpu" and losses.dtype in (torch.float32, torch.float64):
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


def _ask(bad: Tensor, part: SumPart, *, device: torch.device) -> tuple[bool, DeviceCopy | None]:
    """Whether bad units must be replaced by zeros, or where the answer will be after the sum.

    While a graph is captured nobody can be asked: they are replaced in any case.
    """
    if is_capturing(device) or part.ask == "never":
        return is_capturing(device), None
    any_bad = bad.any() if part.earlier_bad is None else bad.any() | part.earlier_bad
    if part.ask == "after" and device.type == "cuda":
        return False, DeviceCopy(any_bad)
    has_bad = bool(any_bad)
    if has_bad and part.earlier_bad is not None and bool(part.earlier_bad):
        raise BadUnitFound
    return has_bad, None


class _Gradients:
    """The gradients of all units, used up by the sums; a GPU has small ones bundled."""

    bundling = ("cuda",)

    def __init__(
        self,
        forms: dict[str, list[GradientForm]],
        like: Mapping[str, Tensor],
        *,
        clip: Clip,
        count: int,
        device: torch.device,
    ) -> None:
        self._forms, self._like, self._count, self._device = forms, like, count, device
        self._on_gpu = device.type in self.bundling and count > 0
        self._bundles: dict[tuple[str, ...], Bundle] = {}
        self._bad: Tensor | None = None
        if self._on_gpu:
            for group, _ in clip.groups(tuple(like)):
                bundle = bundled(forms, group)
                if bundle is not None:
                    self._bundles[group] = bundle

    def squared_norms(self) -> dict[str, Tensor]:
        """Squared norm per unit, by parameter; that of a bundle stands at its first name."""
        if self._on_gpu:
            take_squares_of_rows(self._forms.values())
        found, zeros = {}, None
        for name in self._like:
            own = self._forms.get(name)
            if not own:
                if zeros is None:
                    zeros = torch.zeros(self._count, device=self._device)
                found[name] = zeros
            elif len(own) > 1:
                found[name] = squares(own)
            else:
                square = own[0].__dict__.get("square")  # taken before, with others
                found[name] = own[0].squares() if square is None else square
        for bundle in self._bundles.values():
            found[bundle.names[0]] = bundle.form.squares()
        return found

    def leave_out(self, bad: Tensor) -> None:
        """Bad units are replaced by zeros: 0·∞ is not 0."""
        own = self._forms
        own.update({name: [form.kept(~bad) for form in forms] for name, forms in own.items()})
        self._bad = bad

    def add_up(
        self,
        values: dict[str, Tensor],
        names: tuple[str, ...],
        factor: Tensor,
        *,
        onto: Mapping[str, Tensor] | None,
    ) -> None:
        """Put the sums of one group of parameters into `values`, or add them to `onto`."""
        if self._on_gpu and not any(self._like[n].dtype is torch.float64 for n in names):
            factor = factor.float()  # once, and not for each of them
        together: dict[str, Tensor] = {}
        if names in self._bundles:
            together = self._bundles[names].totals(factor, self._bad)
        if onto is not None and together:
            torch._foreach_add_([onto[name] for name in together], list(together.values()))
            together = {name: onto[name] for name in together}
        for name in names:
            own = self._forms.pop(name, ())
            if name in together:
                values[name] = together[name]
                continue
            like, total = self._like[name], None
            kind = torch.float32 if like.dtype in HALF else like.dtype
            for form in own:
                more = form.total(factor).to(kind)
                total = more if total is None else total.add_(more)
            if total is None:
                total = torch.zeros_like(like, dtype=kind)
            values[name] = total if onto is None else onto[name].add_(total)
