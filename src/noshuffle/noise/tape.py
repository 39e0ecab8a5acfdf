"""Step plans as numbers on a tape, so that a device can run many steps without being told each.

The record of one step is a run of 32-bit words, integers and float32 numbers side by side,

    [draws, inner, outer, store, gain·scale, grid]   draws × [row, weight]
    with decays:     buffers × [inner weight, θ]
    with lists:      inner × [buffer, weight]   outer × [buffer, weight·scale]

with the products made in float64 and rounded once, as `chunk_step` and `correlate` do. A tape holds
the records of consecutive steps and where each begins. Everything else on it leads to a record of
NaN: a step that nobody loaded destroys its result instead of repeating the noise of another one.

>>> from noshuffle.strategies.recipe import FeedForward
>>> words = record(StepPlans.of(FeedForward(weights=(1.0, -0.5))).at(7), buffers=0, scale=2.0)
>>> words[HEAD::2].tolist(), words[HEAD + 1 :: 2].view(np.float32).tolist()
([6, 7], [-1.0, 2.0])
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from noshuffle.noise.grid import grid_of
from noshuffle.noise.philox import address
from noshuffle.noise.step_plan import StepPlan, StepPlans

#: Most steps on one tape, and the words that it should not exceed (a single record may).
STEPS, WORDS = 1024, 2**18
#: Words before the draws of a record.
HEAD = 6

Words = NDArray[np.uint32]


@dataclass(frozen=True)
class Tape:
    """Records of the steps [first, first + count); entry `STEPS` of the offsets says NaN."""

    words: Words
    offsets: NDArray[np.int32]
    first: int
    count: int


def record(move: StepPlan, *, buffers: int, scale: float) -> Words:
    """One move as words; refuses rows that the generator has no room for."""
    draws, inner, outer = len(move.draws), sorted(move.inner), sorted(move.outer)
    rest = 2 * buffers if move.decays else 2 * (len(inner) + len(outer))
    words = np.zeros(HEAD + 2 * draws + rest, dtype=np.uint32)
    reals = words.view(np.float32)
    words[:4] = draws, len(inner), len(outer), move.store % 2**32
    reals[4:HEAD] = move.gain * scale, grid_of(move, scale=scale)
    # Without buffers the weights carry gain and scale.
    factor = 1.0 if buffers else move.gain * scale
    rows = [address(row=row, tile=0)[1] for row, _ in move.draws]
    body, real = words[HEAD:], reals[HEAD:]
    body[: 2 * draws : 2] = rows
    real[1 : 2 * draws : 2] = [weight * factor for _, weight in move.draws]
    body, real = body[2 * draws :], real[2 * draws :]
    if move.decays:
        for b, weight in inner:
            real[2 * b] = weight
        real[1::2] = move.decays
        return words
    body[::2] = [b for b, _ in inner] + [b for b, _ in outer]
    real[1::2] = [c for _, c in inner] + [d * scale for _, d in outer]
    return words


def record_of_nothing(*, buffers: int) -> Words:
    """One draw of weight NaN: whatever it touches, values and decaying buffers, becomes NaN."""
    words = np.zeros(HEAD + 2 + 2 * buffers, dtype=np.uint32)
    words.view(np.float32)[4:] = np.nan
    words[[0, 3, HEAD]] = 1, 2**32 - 1, 0
    return words


def record_tape(moves: StepPlans, *, scale: float, first: int, steps: int) -> Tape:
    """The records from step `first` on, as many as fit and at most up to step `steps`."""
    nothing = record_of_nothing(buffers=moves.buffers)
    offsets = np.zeros(STEPS + 1, dtype=np.int32)
    parts, used, count = [nothing], len(nothing), 0
    while count < min(STEPS, steps - first):
        words = record(moves.at(first + count), buffers=moves.buffers, scale=scale)
        if count and used + len(words) > WORDS:
            break
        offsets[count] = used
        parts.append(words)
        used, count = used + len(words), count + 1
    return Tape(np.concatenate(parts), offsets, first, count)
