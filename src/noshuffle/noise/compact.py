"""Noise buffers of 16 bits: their rounding is noise of its own, by subtractive dither.

A buffer S ← θS + u of BLT noise is kept as a whole number k beside its spacing q, a power of two:

    k = round(S/q + D)        Ŝ = q·(k − D)        D uniform on (−½, ½), drawn and not stored

D is drawn again from (row, name, element) when the buffer is read. Whatever S is, Ŝ − S is uniform
on (−q/2, q/2) (Schuchman 1964), so the rounding errors R of all steps are independent of all draws
z and of the data. The noise of a run is then C⁻¹Z + LR, linear in both; given R it is C⁻¹Z around a
path that the data did not choose, and the guarantee is that of C⁻¹Z (docs/proofs.md, "Buffers of 16
bits"). To round without D would not do: errors that depend on z must be charged, and add up over
all parameters.

The price is the noise LR. With p_b(t) = c_b Σ_{s>t} a_s θ_b^{s−t−1}, the weight that an error of
step t has in the last running sum (a_s: the gains),

    var(LR) = Σ_b q_b²/12 · Σ_t p_b(t)²,        32,767 q_b ≥ 16 deviations of S_b

`added` gives its deviation as a share of that of the noise. A number beyond the range, which 16
deviations of a normal let happen once in 10⁵⁶ draws, becomes NaN and stays it. The words of D come
from rows 2³¹ and up of the same generators, 16 rows a draw and half a word a buffer: D is a
function of (draw, buffer, name, element), whatever else the plan has, or gets when it is extended.

State: the buffers that are given. The C loop (`native`) and the kernel (`triton_kernels`) have the
same operations.

>>> recipe = Buffered((0.9, 0.5), (-0.1, -0.2))
>>> spacings(recipe) == (2.0**-9, 2.0**-10), round(added(recipe, steps=100), 4)
(True, 0.0014)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.noise.step_plan import StepPlan, StepPlans
from noshuffle.strategies.recipe import Buffered, FeedForward, Recipe

#: Deviations of a buffer that the range holds, and the largest number; one below it means NaN.
REACH, MOST, NOT_A_NUMBER = 16.0, 32767, -32768
#: First row of dithers: rows of draws stay below it. Rows that belong to one draw, the same number
#: under every plan: two draws never share one, also where a run is extended by more buffers.
FIRST_ROW, ROWS = 2**31, 16
#: A sum with it has no place for less than one.
_MIDDLE = 1.5 * 2.0**23
#: Least 1 − θ² that the range is made for.
_SLOWEST = 2.0**-40


def spacings(recipe: Recipe) -> tuple[float, ...]:
    """q of every buffer of one phase, for a run of any length.

    A tap draws again what an earlier step has drawn: deviations are added, which is safe.
    """
    if isinstance(recipe, FeedForward):
        return ()
    if not isinstance(recipe, Buffered):
        raise Unsupported(
            "noise_memory='compact' is for buffers that decay (mechanism 'blt'), this plan has "
            f"{type(recipe).__name__}; use 'device' or 'host'"
        )
    drawn = sum(abs(w) for _, w in recipe.taps) * max(map(abs, recipe.draw_scale), default=1.0)
    spreads = (drawn / math.sqrt(max(1.0 - theta**2, _SLOWEST)) for theta in recipe.decays)
    return tuple(2.0 ** math.ceil(math.log2(REACH * spread / MOST)) for spread in spreads)


def added(recipe: Buffered, *, steps: int) -> float:
    """Deviation of LR in the last running sum, as a share of that of the noise."""
    from scipy.signal import lfilter  # a second to import: not for a stream

    gains = np.asarray(recipe.scale[:steps] or (1.0,) * steps)
    whole, rounding = gains.copy(), 0.0
    for q, theta, c in zip(spacings(recipe), recipe.decays, recipe.scales):
        ahead = c * lfilter([1.0], [1.0, -theta], gains[:0:-1])[::-1]  # p(t); nothing of the last
        whole[:-1] += ahead
        rounding += q**2 / 12 * float(np.square(ahead).sum())
    response = np.zeros(steps)
    for lag, weight in recipe.taps:
        response[: max(steps - lag, 0)] += weight * whole[lag:]
    drawn = response * np.asarray(recipe.draw_scale[:steps] or 1.0)
    return math.sqrt(rounding / float(np.square(drawn).sum()))


@dataclass(frozen=True)
class Dithering:
    """What a step needs beside its plan: q of every buffer, and the draws of the step before and
    of this one, which number the rows of dithers that buffers are read and written with.
    """

    spacing: tuple[float, ...]
    before: int
    after: int

    @property
    def rows(self) -> int:
        """Rows of words that the dithers of one step take."""
        return -(-len(self.spacing) // 2)

    def row(self, draw: int) -> int:
        """The first row of the dithers that belong to a draw."""
        found = FIRST_ROW + draw * ROWS
        if found + ROWS > 2 * FIRST_ROW:
            raise InvalidInput(
                f"noise_memory='compact' has dithers for {FIRST_ROW // ROWS} draws, and this is "
                f"draw {draw}; use 'device'"
            )
        return found


@dataclass(frozen=True)
class CompactPlans:
    """The plans of a recipe, and the dithering of each step."""

    plans: StepPlans
    starts: tuple[int, ...]
    spacings: tuple[tuple[float, ...], ...]

    @staticmethod
    def of(recipe: Recipe, plans: StepPlans) -> CompactPlans:
        """For recipes whose buffers decay; refuses others."""
        if plans.buffers > 2 * ROWS:
            raise Unsupported(
                f"noise_memory='compact' is for at most {2 * ROWS} buffers, this plan has "
                f"{plans.buffers}; use 'device' or 'host'"
            )
        parts = ((recipe, 0, 1.0),)
        starts = tuple(accumulate((used for _, used, _ in parts[:-1]), initial=0))
        own = [spacings(part) for part, _, _ in parts]
        # Buffers that a phase lacks hold its last draw, for which the widest range is wide enough.
        full = tuple(q + (max(q, default=1.0),) * (plans.buffers - len(q)) for q in own)

        def at(step: int) -> StepPlan:
            plan = plans.at(step)
            # Before the first step nothing was written that a dither would belong to.
            return plan if step else replace(plan, decays=(0.0,) * plans.buffers)

        return CompactPlans(replace(plans, at=at), starts, full)

    def dithering(self, step: int) -> Dithering:
        """Of the step with this number."""
        spacing = self.spacings[bisect_right(self.starts, step) - 1]
        before, after = (self.plans.at(s).draws[-1][0] for s in (max(step - 1, 0), step))
        return Dithering(spacing, before, after)


def dither(words: Tensor, *, buffer: int) -> Tensor:
    """D of one buffer from the words of its row, the low or the high half of each; exact."""
    half = words >> 16 if buffer % 2 else words
    return ((half & 0xFFFF).to(torch.float32) - 32767.5) * 2.0**-16


def unpacked(k: Tensor, *, words: Tensor, buffer: int, spacing: float) -> Tensor:
    """Ŝ = q·(k − D)."""
    s = (k.to(torch.float32) - dither(words, buffer=buffer)).mul_(spacing)
    return s.masked_fill_(k == NOT_A_NUMBER, math.nan)


def pack_(k: Tensor, s: Tensor, *, words: Tensor, buffer: int, spacing: float) -> None:
    """k ← round(S/q + D); `s` is overwritten."""
    s.mul_(1.0 / spacing).add_(dither(words, buffer=buffer)).add_(_MIDDLE).sub_(_MIDDLE)
    k.copy_(torch.where(s.abs() <= MOST, s, NOT_A_NUMBER))


def correlate_compact_in_torch_(
    y: Tensor,
    *,
    u: Tensor,
    plan: StepPlan,
    state: Sequence[Tensor],
    scale: float,
    spacing: Sequence[float],
    before: Sequence[Tensor],
    after: Sequence[Tensor],
) -> None:
    """`native.correlate_` on 16-bit buffers, with the words of their dithers before and after.

    In torch operations, for every device; `native.correlate_compact_` takes the C loop where there
    is one. Guarantees: what is read is what was to be written plus a uniform number that depends on
    no draw. NaN, infinity and what lies beyond the range become NaN for good.
    """
    inner = dict(plan.inner)
    y.copy_(u)
    for b, (k, theta, q) in enumerate(zip(state, plan.decays, spacing)):
        s = unpacked(k, words=before[b // 2], buffer=b, spacing=q)
        y.add_(s * inner.get(b, 0.0))
        pack_(k, s.mul_(theta).add_(u), words=after[b // 2], buffer=b, spacing=q)
    y.mul_(plan.gain * scale)
