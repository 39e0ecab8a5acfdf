"""How far one unit can move the released rows: the worst pattern, and the worst directions.

    m² = max Σ_{i,j∈π} X_ij ⟨u_i, u_j⟩,      X = Σ⁻¹ of the steps released so far,

over the patterns π that the participation allows and vectors ‖u_i‖ ≤ 1.

Patterns, by participation (written anew here, so that a wrong reading elsewhere shows):

    SinglePass                  {i}
    Epochs                      {j, j+b, j+2b, …}                               all b of them
    AnyOrderEpochs              one step of every epoch, chosen freely          `_blocks`
    Restarted(Epochs)           such a class in every block, chosen freely      `_blocks`
    MinSeparation, Restarted    increasing steps, each at least `after(i)`, at most k of them; level
                                by level, dropping what provably cannot reach the best found

Every answer is an interval: `low` belongs to a pattern and directions that are named (an attack),
`high` is proved for all. They meet unless the search was cut off, or no program of directions was
solved for every pattern that might matter.

>>> X = np.linalg.inv(np.array([[1.0, -0.4, 0.0], [-0.4, 1.2, -0.4], [0.0, -0.4, 1.2]]))
>>> found = worst(X, MinSeparation(steps=3, separation=2, max_participations=2))
>>> found.pattern, bool(found.low == found.high)
((0, 2), True)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from noshuffle.auditing.emitted import Array
from noshuffle.auditing.signs import directions
from noshuffle.errors import Unsupported
from noshuffle.participation import (
    AnyOrderEpochs,
    Epochs,
    MinSeparation,
    Participation,
    Restarted,
    SinglePass,
)

#: Partial patterns that are kept in one level of the search, and patterns that are listed outright.
_KEPT, _LISTED = 4_000, 5_000
#: Partial patterns that are worked on together.
_AT_ONCE = 64
#: Patterns of mixed signs whose directions are solved for.
_SOLVED = 200

Pattern = tuple[int, ...]


@dataclass(frozen=True)
class Worst:
    """Squared shift of the worst unit: at least `low` (by this pattern), at most `high`."""

    low: float
    high: float
    pattern: Pattern


def worst(X: Array, participation: Participation) -> Worst:
    """The worst unit of the first len(X) steps. X must be symmetric, of those steps."""
    part = participation
    if isinstance(part, Restarted) and isinstance(part.participation, SinglePass):
        part = part.participation
    if isinstance(part, SinglePass):
        at = int(np.argmax(np.diag(X)))
        return Worst(float(X[at, at]), float(X[at, at]), (at,))
    if isinstance(part, AnyOrderEpochs):
        b, n = part.steps_per_epoch, len(X)
        return _blocks(X, [_classes(s, min(s + b, n), b) for s in range(0, n, b)])
    if isinstance(part, Epochs):
        return _best_of(X, _classes(0, len(X), part.steps_per_epoch))
    if isinstance(part, Restarted) and isinstance(part.participation, Epochs):
        gap, every, n = part.participation.steps_per_epoch, part.every, len(X)
        return _blocks(X, [_classes(s, min(s + every, n), gap) for s in range(0, n, every)])
    if isinstance(part, MinSeparation):
        return _chains(X, gap=part.separation, every=part.steps, most=part.max_participations)
    if isinstance(part, Restarted) and isinstance(part.participation, MinSeparation):
        base = part.participation
        return _chains(X, gap=base.separation, every=part.every, most=base.max_participations)
    raise Unsupported(f"the worst unit is searched for without sampling, got {part.kind!r}")


def _classes(start: int, stop: int, gap: int) -> list[Pattern]:
    return [tuple(range(j, stop, gap)) for j in range(start, min(start + gap, stop))]


def _best_of(X: Array, patterns: Iterable[Pattern]) -> Worst:
    """The worst of listed patterns."""
    sizes = sorted(((float(np.abs(X[np.ix_(p, p)]).sum()), p) for p in patterns), reverse=True)
    low, high, best, solved = -1.0, 0.0, sizes[0][1], 0
    for size, pattern in sizes:
        if size <= low:
            break
        if solved >= _SOLVED:
            high = max(high, size)
            break
        reached, above = directions(X[np.ix_(pattern, pattern)])
        solved += reached < above
        high = max(high, above)
        if reached > low:
            low, best = reached, pattern
    return Worst(low, max(low, high), best)


def _blocks(X: Array, choices: list[list[Pattern]]) -> Worst:
    """One class in every block: by list if there are few, else ascent and a bound by pairs."""
    if math.prod(len(own) for own in choices) <= _LISTED:
        return _best_of(X, (sum(picked, ()) for picked in product(*choices)))
    # Sums of |X| between classes of two blocks; a bound takes the largest of every pair.
    W = np.abs(X)
    sums = {
        (i, j): np.array([[W[np.ix_(p, q)].sum() for q in b] for p in a])
        for i, a in enumerate(choices)
        for j, b in enumerate(choices)
        if i <= j
    }
    above = sum(
        float(np.diag(own).max() if i == j else 2 * own.max()) for (i, j), own in sums.items()
    )
    picked = [int(np.argmax(np.diag(sums[i, i]))) for i in range(len(choices))]
    for _ in range(20):
        before = list(picked)
        for i in range(len(choices)):
            gains = np.diag(sums[i, i]).copy()
            for j, other in enumerate(picked):
                if j < i:
                    gains += 2 * sums[j, i][other]
                elif j > i:
                    gains += 2 * sums[i, j][:, other]
            picked[i] = int(np.argmax(gains))
        if picked == before:
            break
    found = _best_of(X, [sum((own[c] for own, c in zip(choices, picked)), ())])
    # Where blocks do not touch, the bound is reached by the pattern itself: the same sums.
    is_all = float(W[np.ix_(found.pattern, found.pattern)].sum()) >= above * (1 - 1e-12)
    return Worst(found.low, found.high if is_all else max(above, found.low), found.pattern)


def _chains(X: Array, *, gap: int, every: int, most: int) -> Worst:
    """Increasing steps, at least `gap` apart inside a block of `every`, at most `most` of them.

    Level by level: all patterns of one step, of two, …; a pattern is dropped when its sum of |X|
    and the most that further steps can add stay below the best sum so far.
    """
    n, W, steps = len(X), np.abs(X), np.arange(len(X))
    after = np.minimum(np.minimum(steps + gap, (steps // every + 1) * every), n)
    # jumps[r, i]: the earliest step that can be the r-th one after i; n stands for none.
    jumps: list[NDArray[np.int64]] = [steps]
    while len(jumps) <= most and (jumps[-1] < n).any():
        jumps.append(np.append(after, n)[jumps[-1]])
    among = _shared(W, jumps, most)
    best = _guess(W, after, most)
    low, dropped = float(W[np.ix_(best, best)].sum()), 0.0

    def bounds(values: Array, gains: Array, first: Array, left: int) -> Array:
        """Sums that patterns can grow to by `left` further steps from `first` on."""
        tops = _from_here_on(gains + among[min(left, len(among)) - 1])
        rows, found = np.arange(len(values)), values.copy()
        for jump in jumps[:left]:
            found += tops[rows, np.append(jump, n)[first]]
        return found

    patterns, values = np.zeros((1, 0), dtype=int), np.zeros(1)
    gains, first = np.diag(W)[None].copy(), np.zeros(1, dtype=int)
    for level in range(most):
        left, kept = most - level - 1, []  # how many may still be added
        for at in range(0, len(values), _AT_ONCE):
            state, step = np.nonzero(steps >= first[at : at + _AT_ONCE, None])
            state += at
            value = values[state] + gains[state, step]
            top = int(np.argmax(value)) if len(value) else -1
            if top >= 0 and value[top] > low:
                low, best = float(value[top]), (*patterns[state[top]].tolist(), int(step[top]))
            for cut in range(0, len(state) if left else 0, _AT_ONCE * 16):
                s, t = state[cut : cut + _AT_ONCE * 16], step[cut : cut + _AT_ONCE * 16]
                above = bounds(value[cut : cut + len(s)], gains[s] + 2 * W[t], after[t], left)
                kept += [(above[i], s[i], t[i]) for i in np.flatnonzero(above > low * (1 + 1e-12))]
        kept = [one for one in kept if one[0] > low * (1 + 1e-12)]
        if len(kept) > _KEPT:
            kept.sort(key=lambda one: -one[0])
            dropped, kept = max(dropped, float(kept[_KEPT][0])), kept[:_KEPT]
        if not kept:
            break
        state, step = (np.array(own) for own in list(zip(*kept))[1:])
        patterns = np.column_stack([patterns[state], step])
        values, gains = values[state] + gains[state, step], gains[state] + 2 * W[step]
        first = after[step]
    reached, _ = directions(X[np.ix_(best, best)])
    return Worst(reached, max(reached, low, dropped), best)


def _from_here_on(rows: Array) -> Array:
    """The largest entry from every column on; zero beyond the last."""
    tops = np.maximum.accumulate(rows[:, ::-1], axis=1)[:, ::-1]
    return np.pad(tops, ((0, 0), (0, 1)))


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


def _guess(W: Array, after: Array, most: int) -> Pattern:
    """A good pattern: the best of those that take every next step, improved one step at a time."""
    n, best, found = len(W), -1.0, tuple[int, ...]()
    for start in range(min(int(after[0]), n)):
        pattern = [start]
        while len(pattern) < most and after[pattern[-1]] < n:
            pattern.append(int(after[pattern[-1]]))
        value = float(W[np.ix_(pattern, pattern)].sum())
        if value > best:
            best, found = value, tuple(pattern)
    pattern, is_better = list(found), True
    while is_better:
        is_better = False
        for i in range(len(pattern)):
            others = pattern[:i] + pattern[i + 1 :]
            gains = np.diag(W) + 2 * W[:, others].sum(axis=1)
            gains[: after[pattern[i - 1]] if i else 0] = -1.0
            if i + 1 < len(pattern):
                gains[after > pattern[i + 1]] = -1.0
            move = int(np.argmax(gains))
            if gains[move] > gains[pattern[i]] * (1 + 1e-12):
                pattern[i], is_better = move, True
    return tuple(pattern)
