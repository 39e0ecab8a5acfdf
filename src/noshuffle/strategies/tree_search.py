"""The worst min-separation pattern for a tree: a dynamic program on its nodes.

    S² = max over patterns of Σ_rows r(node)² / σ²,   r(node) = count(node) + carry · r(right child)

with all weights ≥ 0 (`tree_factor`): carry 1/2 and only the nodes that are no right children for
Honaker's released noise, carry 0 for plain noise, carry 0 and every node for the node count.

(max, +) on dyadic blocks. Put c participations into a block of L steps whose first e steps are
still closed, b steps apart. Taken as early as possible, a way to spread them over the sub-blocks
leaves the following block closed for

    exit(e) = max(a, e + c·b − L)      if e ≤ d, impossible otherwise,

because both waiting (a) and shifting (slope 1) survive composition. So a way is (count c, value v,
row r of the root, latest entry d, earliest exit a); two blocks in a row, s = c·b − L, give

    c = c₁+c₂    v = v₁+v₂    d = min(d₁, d₂ − s₁)    a = max(a₂, a₁ + s₂),

possible if a₁ ≤ d₂ and d ≥ 0. A node that counts adds r²/σ² to the value and is done; another one
hands its r upwards. Only ways that no other beats in all of (v, r, d, a) are kept. With carry 0 the
row follows from the count. If the limit on the count can never bind, a way that restricts no
neighbour also beats every way with fewer participations and no more value.

>>> search = TreeSearch(separation=314, most=6, is_limited=True, counts_all=True)
>>> int(search.best([Part(2000, 2000, 2000)]).max())
79
>>> search = TreeSearch(separation=314, most=6, is_limited=True, carry=0.5)
>>> round(float(search.best([Part(2000, 2000, 2000)]).max()), 3)
70.301
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from noshuffle.strategies.recipe import Array
from noshuffle.strategies.tree_factor import Part, root_variance

#: Most pairs of ways that one join of a bounded search may look at, and most ways that it may keep.
MOST_PAIRS = 1 << 19
MOST_WAYS = 1500
#: Pairs that are looked at in one piece: bounds the memory.
_CHUNK = 1 << 21
#: Values are rounded to multiples of this, so that equal ways are seen to be equal.
_GRID = 2.0**-44

_COUNT, _VALUE, _ROW, _ENTRY, _EXIT = range(5)
_Row = Callable[[Array, Array, Array, Array], Array]


class SearchTooLong(Exception):
    """A join would look at more pairs, or keep more ways, than the search allows itself."""


@dataclass
class TreeSearch:
    """The dynamic program for one separation and one largest count; keeps a table per node.

    A table has one line (count, value, row, latest entry, earliest exit) per way worth keeping;
    whole numbers in it are exact up to 2⁵³.
    """

    separation: int
    most: int
    is_limited: bool  # whether `most` can be less than what fits
    carry: float = 0.0
    counts_all: bool = False  # right children too; with carry 0
    is_bounded: bool = False  # whether it may end with SearchTooLong
    _tables: dict[tuple[int, int, bool], Array | None] = field(default_factory=dict)

    def best(self, parts: list[Part]) -> Array:
        """S² for every count over the trees in a row; if it is not limited, only their maximum
        counts. Raises `SearchTooLong` where the tables of a bounded search grow too large."""
        table, length = self._part(parts[0], is_first=True), parts[0].used
        for part, equal in groupby(parts[1:]):
            times = len(list(equal))
            more, size = self._part(part), part.used
            while times:
                if times & 1:
                    table = self._join(table, more, (length, size), is_first=True)
                    length += size
                times >>= 1
                if times:
                    more = self._join(more, more, (size, size))
                    size *= 2
        count = table[:, _COUNT].astype(np.int64)
        out = np.zeros(int(count.max()) + 1)
        np.maximum.at(out, count, table[:, _VALUE])
        return out

    def _part(self, part: Part, *, is_first: bool = False) -> Array:
        """The table of one tree: its maximal nodes in a row, and the root of a completed one."""
        if not part.is_completed:
            return self._chain(part.used, is_first, weight=lambda height: 0.0)[0]
        top = part.full.bit_length() - 1
        if self.counts_all:
            return self._closed(self._node(part.real, top, is_first), 1.0)

        def weight(height: int) -> float:  # of a finished node in the row of the root
            return sum(self.carry**d for d in range(top - height))

        table, length = self._chain(part.real - 1, is_first, weight)
        of_last = sum(self.carry**d for d in range(top + 1))
        row: _Row = lambda c1, r1, c2, r2: r1 + of_last * c2  # noqa: E731
        table = self._join(table, self._node(1, 0), (length, 1), row, is_first=is_first)
        return self._closed(table, root_variance(part, carry=self.carry))

    def _chain(
        self, leaves: int, is_first: bool, weight: Callable[[int], float]
    ) -> tuple[Array, int]:
        """Maximal nodes over the leaves, each closed; the row column is Σ weight · count."""
        table, length = np.zeros((0, 5)), 0
        for height in reversed(range(leaves.bit_length())):
            if not leaves >> height & 1:
                continue
            node, w = self._left(1 << height, height, is_first and not length), weight(height)
            if length:
                row: _Row = lambda c1, r1, c2, r2, w=w: r1 + w * c2  # type: ignore[misc]  # noqa: E731
                table = self._join(table, node, (length, 1 << height), row, is_first=is_first)
            else:
                table = node.copy()
                table[:, _ROW] = w * table[:, _COUNT]
            length += 1 << height
        return table, length

    def _left(self, real: int, height: int, is_first: bool = False) -> Array:
        """A node whose own row is part of the value."""
        variance = sum(self.carry ** (2 * d) for d in range(height + 1))
        return self._closed(self._node(real, height, is_first), variance)

    def _node(self, real: int, height: int, is_first: bool = False) -> Array:
        """A node of 2^height leaves, the first `real` of them real, its own row left open;
        `is_first`: no step before it counts."""
        key = real, height, is_first
        if key not in self._tables:
            self._tables[key] = None
            self._tables[key] = self._made(real, height, is_first)
        table = self._tables[key]
        if table is None:
            raise SearchTooLong
        return table

    def _made(self, real: int, height: int, is_first: bool) -> Array:
        b, half = self.separation, 1 << height >> 1
        if height == 0 or (self.counts_all and real <= b):  # one fits, wherever it is
            return np.array([[0, 0, 0, b - 1, 0], [1, height, 1, real - 1, b - real]], dtype=float)
        if real <= half:
            table = self._left(real, height - 1, is_first).copy()
            table[:, _ROW] = table[:, _COUNT]
            return table
        child = self._left if self.counts_all else self._node
        left, right = self._left(half, height - 1, is_first), child(real - half, height - 1)
        row: _Row = lambda c1, r1, c2, r2: c1 + c2 + self.carry * r2  # noqa: E731
        return self._join(left, right, (half, real - half), row, is_first=is_first)

    def _join(
        self,
        left: Array,
        right: Array,
        lengths: tuple[int, int],
        row: _Row = lambda c1, r1, c2, r2: 0.0 * c2,
        *,
        is_first: bool = False,
    ) -> Array:
        """The ways over two stretches of steps in a row."""
        if self.is_bounded and len(left) * len(right) > MOST_PAIRS:
            raise SearchTooLong
        b, size = self.separation, max(1, _CHUNK // len(right))
        c2, v2, r2, d2, a2 = right.T
        found = []
        for first in range(0, len(left), size):
            c1, v1, r1, d1, a1 = left[first : first + size].T[:, :, None]
            count, value = c1 + c2, v1 + v2
            entry = np.minimum(d1, d2 - (c1 * b - lengths[0]))
            leave = np.maximum(a2, a1 + (c2 * b - lengths[1]))
            fits = (a1 <= d2) & (entry >= 0) & (count <= self.most)
            if is_first:  # entered at its first step: the exit is settled, the entry never asked
                leave = np.maximum(leave, count * b - sum(lengths))
                entry = np.full_like(entry, b - 1)
            rows = np.broadcast_to(row(c1, r1, c2, r2), count.shape)
            ways = [x[fits] for x in (count, value, rows, entry, leave)]
            if not self.carry:
                keeps = _worthwhile(ways, b)
                ways = [column[keeps] for column in ways]
            found.append(self._undominated(np.stack(ways, axis=1)))
        table = found[0] if len(found) == 1 else self._undominated(np.concatenate(found))
        if not self.is_limited:
            table = self._without_fewer(table, sum(lengths), is_first)
        if self.is_bounded and len(table) > MOST_WAYS:
            raise SearchTooLong
        return table

    def _closed(self, table: Array, variance: float) -> Array:
        """The node's own row, squared, joins the value."""
        out = table.copy()
        out[:, _VALUE] += out[:, _ROW] ** 2 / variance
        out[:, _ROW] = 0.0
        return self._undominated(out) if self.carry else out

    def _without_fewer(self, table: Array, length: int, is_first: bool) -> Array:
        """Less the ways with fewer participations, and no more value, than a way that restricts
        no neighbour: where the limit on the count cannot bind, they are never better."""
        b = self.separation
        is_free = (table[:, _ENTRY] == b - 1) & (table[:, _EXIT] == 0)
        if not is_first:
            is_free &= table[:, _COUNT] * b <= length - b + 1
        if not is_free.any():
            return table
        free = table[is_free]
        best = free[np.lexsort((free[:, _ROW], free[:, _VALUE], free[:, _COUNT]))[-1]]
        keeps = (table[:, _COUNT] >= best[_COUNT]) | (table[:, _VALUE] > best[_VALUE])
        if self.carry:
            keeps |= table[:, _ROW] > best[_ROW]
        return np.asarray(table[keeps])

    def _undominated(self, table: Array) -> Array:
        """Per count, the ways that no other beats in value, row, entry and exit."""
        if not self.carry:
            return _undominated_by_three(table)
        table[:, _VALUE] = np.round(table[:, _VALUE] / _GRID) * _GRID
        order = (table[:, _EXIT], -table[:, _ENTRY], -table[:, _ROW], -table[:, _VALUE])
        table = table[np.lexsort((*order, table[:, _COUNT]))]
        kept: list[Array] = []
        for group in np.split(table, np.flatnonzero(np.diff(table[:, _COUNT])) + 1):
            index, (row, entry, leave) = np.arange(len(group)), np.ascontiguousarray(group[:, 2:].T)
            while len(index):  # the first of those left has the most value: nothing beats it
                kept.append(group[index[0]])
                if len(kept) > MOST_WAYS:
                    raise SearchTooLong
                stays = (row > row[0]) | (entry > entry[0]) | (leave < leave[0])
                row, entry, leave, index = row[stays], entry[stays], leave[stays], index[stays]
        return np.array(kept)


def _worthwhile(ways: list[Array], b: int) -> NDArray[np.bool_]:
    """A quick first cut: whether no unrestricted way has the same count and as much value."""
    count, value = ways[_COUNT].astype(np.int64), ways[_VALUE]
    is_free = (ways[_ENTRY] == b - 1) & (ways[_EXIT] == 0)
    best = np.full(int(count.max()) + 1, -1.0)
    np.maximum.at(best, count[is_free], value[is_free])
    return np.asarray((value > best[count]) | (is_free & (value == best[count])))


def _undominated_by_three(table: Array) -> Array:
    """Per count, the ways that no other beats in value, entry and exit; rows are equal."""
    criteria = [_COUNT, _VALUE, _ENTRY]
    order = (table[:, _EXIT], -table[:, _ENTRY], -table[:, _VALUE], table[:, _COUNT])
    table = table[np.lexsort(order)]
    if np.all(table[:, _ENTRY] == table[0, _ENTRY]):  # as in all tables that begin the run
        # a later count starts below every earlier one, so one running minimum serves all counts
        least = np.minimum.accumulate(
            table[:, _EXIT] - table[:, _COUNT] * (table[:, _EXIT].max() + 1)
        )
        return np.asarray(table[np.append(True, least[1:] < least[:-1])])
    table = table[np.append(True, (table[1:, criteria] != table[:-1, criteria]).any(axis=1))]
    kept = []
    for group in np.split(table, np.flatnonzero(np.diff(table[:, _COUNT])) + 1):
        values, v = np.unique(-group[:, _VALUE], return_inverse=True)
        entries, d = np.unique(-group[:, _ENTRY], return_inverse=True)
        least = np.full((len(values) + 1, len(entries) + 1), np.inf)
        least[v + 1, d + 1] = group[:, _EXIT]
        least = np.minimum.accumulate(np.minimum.accumulate(least, axis=0), axis=1)
        kept.append(group[group[:, _EXIT] < np.minimum(least[v, d + 1], least[v + 1, d])])
    return np.concatenate(kept)
