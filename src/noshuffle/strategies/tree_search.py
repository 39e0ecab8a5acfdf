"""The worst pattern for a tree when participations keep their distance: a dynamic program.

    S² = max over patterns of Σ_nodes (number of participations inside the node)²

(max, +) on dyadic blocks. Put c participations into a block of L steps whose first e steps are
still closed, b steps apart. Taken as early as possible, a way to spread them over the sub-blocks
leaves the following block closed for

    exit(e) = max(a, e + c·b − L)      if e ≤ d, impossible otherwise,

because both waiting (a) and shifting (slope 1) survive composition. So a way is a triple (value v,
latest entry d, earliest exit a); two blocks in a row give

    c = c₁+c₂   v = v₁+v₂ (+ c² for the node)   d = min(d₁, d₂ − s₁)   a = max(a₂, a₁ + s₂)

with s = c·b − L, possible if a₁ ≤ d₂ and d ≥ 0. Only triples that no other beats in all three of
(v, d, a) are kept, and a block of at most b steps has only two: nobody (0, b−1, 0), or one
participation (levels, L−1, b−L). If the limit on the count can never bind, a triple that restricts
no neighbour also beats every triple with fewer participations and no more value. Milliseconds for
2000 steps, where a table over all gaps takes minutes.

>>> promise = MinSeparation(2000, separation=314, max_participations=6)
>>> int(TreeSearch.under(promise).best([(0, 2000, 2000)]).max())
79
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from noshuffle.participation import MinSeparation

Integers = NDArray[np.int64]
Block = tuple[int, int, int]  # first step, real leaves, leaves with virtual ones

#: Pairs of triples that are looked at in one piece: bounds the memory.
_CHUNK = 1 << 21


@dataclass
class TreeSearch:
    """The dynamic program for one separation and one largest count; keeps a table per block.

    A table has one row (count, value, latest entry, earliest exit) per way worth keeping; a state
    has one row (count, value, steps still closed) for what came before.
    """

    separation: int
    most: int
    is_limited: bool  # whether `most` is less than what fits
    skips_right: bool = False
    _tables: dict[tuple[int, int, bool], Integers] = field(default_factory=dict)

    @classmethod
    def under(cls, promise: MinSeparation, *, skips_right: bool = False) -> TreeSearch:
        b, most = promise.separation, promise.most
        return cls(b, most, is_limited=most < -(-promise.steps // b), skips_right=skips_right)

    def best(self, blocks: list[Block]) -> Integers:
        """Largest value for every count; if the count is not limited, only their maximum counts."""
        shapes = [(real, full) for _, real, full in blocks]
        first, *others = _roots(*shapes[0])
        state = self._state(*first)
        for node in others:
            state = self._follow(state, self._table(*node), length=node[0])
        repeats = Counter(shapes[1:-1])  # every tree but the run's last has the same shape
        for (real, full), times in repeats.items():
            table = self._block(real, full)
            while times:
                state = self._follow(state, table, length=real) if times & 1 else state
                times >>= 1
                table = self._join(table, table, lengths=(real, real)) if times else table
                real *= 2
        if len(shapes) > 1:
            for node in _roots(*shapes[-1]):
                state = self._follow(state, self._table(*node), length=node[0])
        out = np.zeros(int(state[:, 0].max()) + 1, dtype=np.int64)
        np.maximum.at(out, state[:, 0], state[:, 1])
        return out

    def _block(self, real: int, full: int) -> Integers:
        """The table of a whole block: its trees in a row."""
        roots = _roots(real, full)
        table, length = self._table(*roots[0]), roots[0][0]
        for node in roots[1:]:
            table = self._join(table, self._table(*node), lengths=(length, node[0]))
            length += node[0]
        return table

    def _has_one_way(self, real: int) -> bool:
        """Whether at most one participation fits and its value does not depend on the place."""
        return real <= self.separation and (real == 1 or not self.skips_right)

    def _table(self, real: int, height: int, is_right: bool = False) -> Integers:
        """A node of 2^height leaves, the first `real` of them real."""
        key = real, height, is_right and self.skips_right
        if key in self._tables:
            return self._tables[key]
        counted, b, half = not key[2], self.separation, 1 << height >> 1
        if self._has_one_way(real):
            levels = height + counted
            table = np.array([[0, 0, b - 1, 0], [1, levels, real - 1, b - real]], dtype=np.int64)
        elif real <= half:
            table = self._table(real, height - 1).copy()
            table[:, 1] += table[:, 0] ** 2
        else:
            left, right = self._table(half, height - 1), self._table(real - half, height - 1, True)
            table = self._join(left, right, lengths=(half, real - half))
            table[:, 1] += counted * table[:, 0] ** 2
        self._tables[key] = table
        return table

    def _state(self, real: int, height: int) -> Integers:
        """What a first node leaves behind when nothing is closed at its first step."""
        half = 1 << height >> 1
        if self._has_one_way(real):
            nobody = np.zeros((1, 3), dtype=np.int64)
            return self._follow(nobody, self._table(real, height), length=real)
        if real <= half:
            state = self._state(real, height - 1)
        else:
            right = self._table(real - half, height - 1, True)
            state = self._follow(self._state(half, height - 1), right, length=real - half)
        state[:, 1] += state[:, 0] ** 2
        return state

    def _join(self, left: Integers, right: Integers, *, lengths: tuple[int, int]) -> Integers:
        """The table of two blocks in a row, without the node above them."""
        c2, v2, d2, a2 = right.T
        shift2 = c2 * self.separation - lengths[1]
        found = []
        for part in _pieces(left, len(right)):
            c1, v1, d1, a1 = part.T[:, :, None]
            count = c1 + c2
            entry = np.minimum(d1, d2 - (c1 * self.separation - lengths[0]))
            leave = np.maximum(a2, a1 + shift2)
            fits = (a1 <= d2) & (entry >= 0) & (count <= self.most)
            columns = (count[fits], (v1 + v2)[fits], entry[fits], leave[fits])
            is_free = (columns[2] == self.separation - 1) & (columns[3] == 0)
            found.append(_undominated(_worthwhile(columns, is_free)))
        table = found[0] if len(found) == 1 else _undominated(np.concatenate(found))
        open_anyway = table[:, 0] * self.separation <= sum(lengths) - self.separation + 1
        is_free = open_anyway & (table[:, 2] == self.separation - 1) & (table[:, 3] == 0)
        return table if self.is_limited else _without_fewer(table, is_free)

    def _follow(self, state: Integers, table: Integers, *, length: int) -> Integers:
        """The state after one more block."""
        c2, v2, d2, a2 = table.T
        shift = c2 * self.separation - length
        found = []
        for part in _pieces(state, len(table)):
            c1, v1, x1 = part.T[:, :, None]
            count = c1 + c2
            fits = (x1 <= d2) & (count <= self.most)
            columns = (count[fits], (v1 + v2)[fits], np.maximum(a2, x1 + shift)[fits])
            found.append(_earliest(_worthwhile(columns, columns[2] == 0)))
        after = found[0] if len(found) == 1 else _earliest(np.concatenate(found))
        return after if self.is_limited else _without_fewer(after, after[:, 2] == 0)


def _roots(real: int, full: int) -> list[tuple[int, int]]:
    """(real leaves, height) of the maximal nodes of a block; a completed block has one."""
    if full > real:
        return [(real, full.bit_length() - 1)]
    return [(1 << h, h) for h in reversed(range(real.bit_length())) if real >> h & 1]


def _pieces(rows: Integers, partners: int) -> list[Integers]:
    size = max(1, _CHUNK // partners)
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def _worthwhile(columns: tuple[Integers, ...], is_free: NDArray[np.bool_]) -> Integers:
    """As rows, less those that an unrestricted row matches in value: a quick first cut."""
    count, value = columns[:2]
    best = np.full(int(count.max()) + 1, -1, dtype=np.int64)
    np.maximum.at(best, count[is_free], value[is_free])
    keeps = value > best[count]
    keeps |= is_free & (value == best[count])
    return np.stack([column[keeps] for column in columns], axis=1)


def _without_fewer(rows: Integers, is_free: NDArray[np.bool_]) -> Integers:
    """Rows, less those with fewer participations and no more value than the fullest free row."""
    free = rows[is_free]
    if not len(free):
        return rows
    count, value = free[np.lexsort((free[:, 1], free[:, 0]))[-1], :2]
    return np.asarray(rows[(rows[:, 0] >= count) | (rows[:, 1] > value)], dtype=np.int64)


def _earliest(rows: Integers) -> Integers:
    """Per count, the rows (count, value, closed) that no other beats in value and closed steps."""
    rows = rows[np.lexsort((rows[:, 2], -rows[:, 1], rows[:, 0]))]
    # a later count starts below every earlier one, so one running minimum serves all counts
    closed = rows[:, 2] - rows[:, 0] * (int(rows[:, 2].max()) + 1)
    least = np.minimum.accumulate(closed)
    is_better = np.append(True, least[1:] < least[:-1])
    return np.asarray(rows[is_better], dtype=np.int64)


def _undominated(rows: Integers) -> Integers:
    """Per count, the rows (count, value, entry, exit) that no other beats in all three."""
    rows = rows[np.lexsort((rows[:, 3], -rows[:, 2], -rows[:, 1], rows[:, 0]))]
    rows = rows[np.append(True, (rows[1:, :3] != rows[:-1, :3]).any(axis=1))]
    kept = []
    for group in np.split(rows, np.flatnonzero(np.diff(rows[:, 0])) + 1):
        values, v = np.unique(-group[:, 1], return_inverse=True)
        entries, d = np.unique(-group[:, 2], return_inverse=True)
        least = np.full((len(values) + 1, len(entries) + 1), np.iinfo(np.int64).max)
        least[v + 1, d + 1] = group[:, 3]
        least = np.minimum.accumulate(np.minimum.accumulate(least, axis=0), axis=1)
        kept.append(group[group[:, 3] < np.minimum(least[v, d + 1], least[v + 1, d])])
    return np.concatenate(kept)
