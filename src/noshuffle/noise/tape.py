"""Step plans as numbers on a tape, so that a device can run many steps without being told each.

The record of one step is a run of 32-bit words, integers and float32 numbers side by side,

    [draws, inner, outer, store, gain·scale, grid]   draws × [row, weight(, segment)]
    with decays:     buffers × [inner weight, θ]
    with lists:      inner × [buffer, weight]   outer × [buffer, weight·scale]

with the products made in float64 and rounded once, as `torch_step` does. The segment,
which key of a ring the row is drawn under, is there only if the source has several keys (`source`).
A tape holds the records of consecutive steps and where each begins. Everything else on it leads to
a record of NaN: a step that nobody loaded destroys its result instead of repeating the noise of
another one.

>>> from noshuffle.strategies.recipe import FeedForward
>>> words = record(StepPlans.of(FeedForward(weights=(1.0, -0.5))).at(7), buffers=0, scale=2.0)
>>> words[HEAD::2].tolist(), words[HEAD + 1 :: 2].view(np.float32).tolist()
([6, 7], [-1.0, 2.0])
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noshuffle.noise.philox import address
from noshuffle.noise.step_plan import StepPlan, StepPlans, grid_of

#: Most steps on one tape, and the words that it should not exceed (a single record may).
STEPS, WORDS = 1024, 2**18
#: Words before the draws of a record.
HEAD = 6

Words = NDArray[np.uint32]
#: Which key of a ring a row is drawn under; None for a source with one key.
SegmentFn = Callable[[int], int] | None


@dataclass(frozen=True)
class StepTape:
    """Records of the steps [first, first + count); entry `STEPS` of the offsets says NaN."""

    words: Words
    offsets: NDArray[np.int32]
    first: int
    count: int


def record(plan: StepPlan, *, buffers: int, scale: float, segment_fn: SegmentFn = None) -> Words:
    """The plan of one step as words; refuses rows beyond the counter of the generator."""
    draws, inner, outer = len(plan.draws), sorted(plan.inner), sorted(plan.outer)
    entry = 2 if segment_fn is None else 3
    rest = 2 * buffers if plan.decays else 2 * (len(inner) + len(outer))
    words = np.zeros(HEAD + entry * draws + rest, dtype=np.uint32)
    reals = words.view(np.float32)
    words[:4] = draws, len(inner), len(outer), plan.store % 2**32
    reals[4:HEAD] = plan.gain * scale, grid_of(plan, scale=scale)
    # Without buffers the weights carry gain and scale.
    factor = 1.0 if buffers else plan.gain * scale
    rows = [address(row=row, tile=0)[1] for row, _ in plan.draws]
    body, real = words[HEAD:], reals[HEAD:]
    drawn = entry * draws
    body[:drawn:entry] = rows
    real[1:drawn:entry] = [weight * factor for _, weight in plan.draws]
    if segment_fn is not None:
        body[2:drawn:entry] = [segment_fn(row) for row in rows]
    body, real = body[drawn:], real[drawn:]
    if plan.decays:
        for b, weight in inner:
            real[2 * b] = weight
        real[1::2] = plan.decays
        return words
    body[::2] = [b for b, _ in inner] + [b for b, _ in outer]
    real[1::2] = [c for _, c in inner] + [d * scale for _, d in outer]
    return words


def record_of_nothing(*, buffers: int, has_ring: bool = False) -> Words:
    """One draw of weight NaN: whatever it touches, values and decaying buffers, becomes NaN."""
    words = np.zeros(HEAD + 2 + has_ring + 2 * buffers, dtype=np.uint32)
    words.view(np.float32)[4:] = np.nan
    words[[0, 3, HEAD]] = 1, 2**32 - 1, 0
    if has_ring:
        words[HEAD + 2] = 0
    return words


def record_tape(
    plans: StepPlans,
    *,
    scale: float,
    first: int,
    steps: int,
    segment_fn: SegmentFn = None,
) -> StepTape:
    """The records from step `first` on, as many as fit and at most up to step `steps`."""
    nothing = record_of_nothing(buffers=plans.buffers, has_ring=segment_fn is not None)
    form: dict[str, Any] = {"buffers": plans.buffers, "scale": scale, "segment_fn": segment_fn}
    offsets = np.zeros(STEPS + 1, dtype=np.int32)
    parts, used, count = [nothing], len(nothing), 0
    while count < min(STEPS, steps - first):
        words = record(plans.at(first + count), **form)
        if count and used + len(words) > WORDS:
            break
        offsets[count] = used
        parts.append(words)
        used, count = used + len(words), count + 1
    return StepTape(np.concatenate(parts), offsets, first, count)
