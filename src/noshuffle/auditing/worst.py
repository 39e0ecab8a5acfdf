"""How far one unit can move the released rows: the worst pattern, and the directions of its steps.

    m² = max Σ_{i,j∈π} X_ij ⟨u_i, u_j⟩,      X = Σ⁻¹ of the steps released so far,

over the patterns π that the participation allows and vectors ‖u_i‖ ≤ 1.

Patterns, by participation (written anew here, so that a wrong reading elsewhere shows):

    SinglePass                  {i}
    Epochs                      {j, j+b, j+2b, …}                               all b of them
    AnyOrderEpochs              one step of every epoch, chosen freely          `_blocks`
    Restarted(Epochs)           such a class in every block, chosen freely      `_blocks`
    MinSeparation, Restarted    increasing steps, each at least `after(i)`, at most k of them; level
                                by level, dropping what provably cannot reach the best found

Directions of one pattern: Σ|X_ij| is proved for all of them, and sᵀXs is reached by signs s. Every
answer is an interval: `low` belongs to a pattern and signs that are named (an attack), `high` is
proved for all. They meet where X ≥ 0 or signs can be set apart, unless the search was cut off.

>>> X = np.linalg.inv(np.array([[1.0, -0.4, 0.0], [-0.4, 1.2, -0.4], [0.0, -0.4, 1.2]]))
>>> found = worst(X, MinSeparation(steps=3, separation=2, max_participations=2))
>>> found.pattern, bool(found.low == found.high)
((0, 2), True)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from noshuffle.auditing.emitted import Array
from noshuffle.errors import Unsupported
from noshuffle.participation import (
    AnyOrderEpochs,
    Epochs,
    MinSeparation,
    Participation,
    Restarted,
    SinglePass,
)

#: Partial patterns that are kept in one level of the search, and in the first look for a good one.
_KEPT, _FEW = 4_000, 8

Pattern = tuple[int, ...]


@dataclass(frozen=True)
class Worst:
    """Squared shift of the worst unit: at least `low` (by this pattern), at most `high`."""

    low: float
    high: float
    pattern: Pattern


def worst(X: Array, participation: Participation) -> Worst:
    """The worst unit of the first len(X) steps. X must be symmetric, of those steps."""
    part, n = participation.base, len(X)
    every = participation.every if isinstance(participation, Restarted) else participation.steps
    if isinstance(part, SinglePass):
        at = int(np.argmax(np.diag(X)))
        return Worst(float(X[at, at]), float(X[at, at]), (at,))
    if isinstance(part, Epochs | AnyOrderEpochs):
        gap = part.steps_per_epoch
        every = gap if isinstance(part, AnyOrderEpochs) else every
        choices = [_classes(s, min(s + every, n), gap) for s in range(0, n, every)]
        return _best_of(X, choices[0]) if len(choices) == 1 else _blocks(X, choices)
    if isinstance(part, MinSeparation):
        return _search(X, gap=part.separation, every=every, most=part.max_participations)
    raise Unsupported(f"the worst unit is searched for without sampling, got {part.kind!r}")


def _classes(start: int, stop: int, gap: int) -> list[Pattern]:
    return [tuple(range(j, stop, gap)) for j in range(start, min(start + gap, stop))]


def _of_pattern(X: Array, pattern: Pattern) -> Worst:
    """The shift of one pattern: Σ|X| at most; at least that of signs set one after the other."""
    own = X[np.ix_(pattern, pattern)]
    total, most = float(own.sum()), float(np.abs(own).sum())
    if total < most:
        signs = np.ones(len(own))
        for i in range(1, len(own)):
            signs[i] = 1.0 if own[i, :i] @ signs[:i] >= 0 else -1.0
        total = min(max(total, float(signs @ own @ signs)), most)
    return Worst(total, most, pattern)


def _best_of(X: Array, patterns: Iterable[Pattern]) -> Worst:
    """The worst of listed patterns."""
    found = [_of_pattern(X, pattern) for pattern in patterns]
    best = max(found, key=lambda one: one.low)
    return Worst(best.low, max(one.high for one in found), best.pattern)


def _blocks(X: Array, choices: list[list[Pattern]]) -> Worst:
    """One class in every block: the largest of each, and a bound by the largest of every pair.

    They meet where blocks share nothing, as after restarts.
    """
    classes = [own for block in choices for own in block]
    order = np.concatenate(classes).astype(int)
    starts = np.cumsum([0, *map(len, classes)])[:-1]
    sums = np.abs(X)[np.ix_(order, order)]
    sums = np.add.reduceat(np.add.reduceat(sums, starts), starts, axis=1)
    blocks = np.cumsum([0, *map(len, choices)])
    pairs = np.maximum.reduceat(np.maximum.reduceat(sums, blocks[:-1]), blocks[:-1], axis=1)
    own = np.diag(sums)
    picked = [i + int(np.argmax(own[i:j])) for i, j in pairwise(blocks)]
    bound = float(pairs.sum() - np.trace(pairs) + own[picked].sum())
    found = _of_pattern(X, sum((classes[i] for i in picked), ()))
    return Worst(found.low, max(bound, found.high), found.pattern)


def _search(X: Array, *, gap: int, every: int, most: int) -> Worst:
    """Increasing steps, at least `gap` apart inside a block of `every`, at most `most` of them.

    A first look follows the few patterns of the largest bounds; what it finds cuts off the rest.
    """
    W, steps = np.abs(X), np.arange(len(X))
    after = np.minimum(np.minimum(steps + gap, (steps // every + 1) * every), len(X))
    first = _levels(W, after, most, best=(int(np.argmax(np.diag(W))),), kept=_FEW)[0]
    best, above = _levels(W, after, most, best=first, kept=_KEPT)
    found = _of_pattern(X, best)
    return Worst(found.low, max(found.high, above), best)


def _levels(
    W: Array, after: NDArray[np.int64], most: int, *, best: Pattern, kept: int
) -> tuple[Pattern, float]:
    """All patterns of one step, of two, …: the one with the largest sum of W, and a bound for all.

    A pattern is dropped when its sum and the most that further steps can add stay below the best
    sum so far; of more than `kept` patterns the lower ones are dropped, and the bound tells.
    """
    n = len(W)
    # jumps[r, i]: the earliest step that can be the r-th one after i; n stands for none.
    jumps = [np.arange(n)]
    while len(jumps) <= most and (jumps[-1] < n).any():
        jumps.append(np.append(after, n)[jumps[-1]])
    among = _shared(W, jumps, most)
    low, dropped = float(W[np.ix_(best, best)].sum()), 0.0
    level: list[tuple[float, Pattern]] = [(np.inf, ())]
    for left in reversed(range(most)):  # how many may still be added behind the next one
        grown: list[tuple[float, Pattern]] = []
        for bound, pattern in level:
            if bound <= low * (1 + 1e-12):
                continue
            last = int(after[pattern[-1]]) if pattern else 0
            gains = np.diag(W) + 2 * W[list(pattern)].sum(axis=0)
            values = float(W[np.ix_(pattern, pattern)].sum()) + gains[last:]
            if len(values) and values.max() > low:
                low, best = float(values.max()), (*pattern, last + int(values.argmax()))
            if not left:
                continue
            more = gains + 2 * W[last:] + among[min(left, len(among)) - 1]
            tops, rows = _from_here_on(more), np.arange(n - last)
            bounds = values + sum(tops[rows, np.append(j, n)[after[last:]]] for j in jumps[:left])
            grown += [
                (float(bounds[i]), (*pattern, last + int(i)))
                for i in np.flatnonzero(bounds > low * (1 + 1e-12))
            ]
            if len(grown) > kept:
                grown.sort(reverse=True)
                dropped = max(dropped, grown[kept][0])
                del grown[kept:]
        level = grown
    return best, max(low, dropped)


def _shared(W: Array, jumps: list[NDArray[np.int64]], most: int) -> Array:
    """among[q, i]: at most what step i of a pattern shares with q others, Σ W_ij over them.

    The r-th step after i is jumps[r, i] or later, and so on the other side, so its share is at most
    the largest from there on; the q largest of both sides bound the sum.
    """
    n = len(W)
    right = _from_here_on(W)
    shares = [right[np.arange(n), jump] for jump in jumps[1:]]
    for jump in jumps[1:]:  # on the left: the last step whose r-th follower can be i
        last = np.searchsorted(jump, np.arange(n), side="right")
        left = np.pad(np.maximum.accumulate(W, axis=1), ((0, 0), (1, 0)))
        shares.append(left[np.arange(n), last])
    tops = -np.sort(-np.array(shares).reshape(-1, n), axis=0)[:most]
    return np.vstack([np.zeros(n), np.cumsum(tops, axis=0)])


def _from_here_on(rows: Array) -> Array:
    """The largest entry from every column on; zero beyond the last."""
    tops = np.maximum.accumulate(rows[:, ::-1], axis=1)[:, ::-1]
    return np.pad(tops, ((0, 0), (0, 1)))
