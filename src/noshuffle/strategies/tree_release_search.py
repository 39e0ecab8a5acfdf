"""The worst min-separation pattern for what a tree releases: a dynamic program on its nodes.

    S² = max over patterns of Σ_rows r(node)² / σ²       (`tree_factor`; all weights are ≥ 0)

The rows of a subtree's nodes depend on its own steps alone, and the parent needs to know two more
numbers, the count and the row r of the subtree's root:

    r(node) = count(node) + carry · r(right child),      carry 1/2 (Honaker) or 0 (plain).

A left child adds r²/σ² to the value and is done; a right child hands its r upwards. So a way to
spread c participations over a subtree is (value, row, latest entry, earliest exit), two subtrees in
a row join as in `tree_search`, and a way that another one with the same count beats in all four is
dropped. What is left is a few hundred ways, unless a unit takes part very often; then the search
ends with `SearchTooLong`, and the node count has to serve.

>>> search = ReleaseSearch(separation=314, most=6, is_limited=True, carry=0.5)
>>> round(float(search.best([Part(2000, 2000, 2000)]).max()), 3)        # the node count is 79
70.301
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from noshuffle.strategies.recipe import Array
from noshuffle.strategies.tree_factor import Part, root_variance

#: Most pairs of ways that one join may look at, and most ways that it may keep.
MOST_PAIRS = 1 << 19
MOST_WAYS = 1500
#: Values are rounded to multiples of this, so that equal ways are seen to be equal.
_GRID = 2.0**-44

_Row = Callable[[Array, Array, Array, Array], Array]


class SearchTooLong(Exception):
    """A join would look at more pairs, or keep more ways, than the search allows itself."""


@dataclass
class ReleaseSearch:
    """The dynamic program for one separation and one largest count; keeps a table per height.

    A table has one line (count, value, row, latest entry, earliest exit) per way worth keeping.
    """

    separation: int
    most: int
    is_limited: bool  # whether `most` can be less than what fits
    carry: float
    _tables: dict[tuple[int, bool], Array | None] = field(default_factory=dict)  # None: too long

    def best(self, parts: list[Part]) -> Array:
        """S² for every count over the trees in a row; if it is not limited, only their maximum
        counts. Raises `SearchTooLong` where the tables grow too large."""
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
        count = table[:, 0].astype(np.int64)
        out = np.zeros(int(count.max()) + 1)
        np.maximum.at(out, count, table[:, 1])
        return out

    def _part(self, part: Part, *, is_first: bool = False) -> Array:
        """The table of one tree: its maximal nodes in a row, and the root of a completed one."""
        if not part.is_completed:
            return self._chain(part.used, is_first, weight=lambda height: 0.0)[0]
        top = part.full.bit_length() - 1

        def weight(height: int) -> float:  # of a finished node in the row of the root
            return sum(self.carry**d for d in range(top - height))

        table, length = self._chain(part.real - 1, is_first, weight)
        of_last = sum(self.carry**d for d in range(top + 1))
        row: _Row = lambda c1, r1, c2, r2: r1 + of_last * c2  # noqa: E731
        table = self._join(table, self._node(0), (length, 1), row, is_first=is_first)
        return _closed(table, root_variance(part, carry=self.carry))

    def _chain(
        self, leaves: int, is_first: bool, weight: Callable[[int], float]
    ) -> tuple[Array, int]:
        """Maximal nodes over the leaves, each closed; the row column is Σ weight · count."""
        table, length = np.zeros((0, 5)), 0
        for height in reversed(range(leaves.bit_length())):
            if not leaves >> height & 1:
                continue
            node, w = self._left(height, is_first and not length), weight(height)
            if length:
                row: _Row = lambda c1, r1, c2, r2, w=w: r1 + w * c2  # type: ignore[misc]  # noqa: E731
                table = self._join(table, node, (length, 1 << height), row, is_first=is_first)
            else:
                table = node.copy()
                table[:, 2] = w * table[:, 0]
            length += 1 << height
        return table, length

    def _left(self, height: int, is_first: bool = False) -> Array:
        """A node that is no right child: its own row is part of the value."""
        variance = sum(self.carry ** (2 * d) for d in range(height + 1))
        return _closed(self._node(height, is_first), variance)

    def _node(self, height: int, is_first: bool = False) -> Array:
        """A complete node, its own row left open; `is_first`: no step before it counts."""
        key = height, is_first
        if key not in self._tables:
            self._tables[key] = None
            self._tables[key] = self._made(height, is_first)
        table = self._tables[key]
        if table is None:
            raise SearchTooLong
        return table

    def _made(self, height: int, is_first: bool) -> Array:
        if height == 0:
            b = self.separation
            return np.array([[0, 0, 0, b - 1, 0], [1, 0, 1, 0, b - 1]], dtype=np.float64)
        half = 1 << height >> 1
        row: _Row = lambda c1, r1, c2, r2: c1 + c2 + self.carry * r2  # noqa: E731
        left, right = self._left(height - 1, is_first), self._node(height - 1)
        return self._join(left, right, (half, half), row, is_first=is_first)

    def _join(
        self,
        left: Array,
        right: Array,
        lengths: tuple[int, int],
        row: _Row = lambda c1, r1, c2, r2: 0.0 * c2,
        *,
        is_first: bool = False,
    ) -> Array:
        """The ways over two stretches of steps in a row (`tree_search` derives entry and exit)."""
        if len(left) * len(right) > MOST_PAIRS:
            raise SearchTooLong
        b = self.separation
        c1, v1, r1, d1, a1 = left.T[:, :, None]
        c2, v2, r2, d2, a2 = right.T
        count, value = c1 + c2, v1 + v2
        entry = np.minimum(d1, d2 - (c1 * b - lengths[0]))
        leave = np.maximum(a2, a1 + (c2 * b - lengths[1]))
        fits = (a1 <= d2) & (entry >= 0) & (count <= self.most)
        if is_first:  # entered at its first step: the exit is settled, the entry never asked for
            leave = np.maximum(leave, count * b - sum(lengths))
            entry = np.full_like(entry, b - 1)
        rows = np.broadcast_to(row(c1, r1, c2, r2), count.shape)
        table = np.stack([x[fits] for x in (count, value, rows, entry, leave)], axis=1)
        table = _undominated(table)
        if not self.is_limited:
            table = self._without_fewer(table, sum(lengths))
        if len(table) > MOST_WAYS:
            raise SearchTooLong
        return table

    def _without_fewer(self, table: Array, length: int) -> Array:
        """Less the ways with fewer participations, and no more value, than a way that restricts
        no neighbour: where the limit on the count cannot bind, they are never better."""
        b = self.separation
        is_free = (table[:, 3] == b - 1) & (table[:, 4] == 0) & (table[:, 0] * b <= length - b + 1)
        if not is_free.any():
            return table
        free = table[is_free]
        count, value, row = free[np.lexsort((free[:, 2], free[:, 1], free[:, 0]))[-1], :3]
        keeps = (table[:, 0] >= count) | (table[:, 1] > value) | (table[:, 2] > row)
        return np.asarray(table[keeps])


def _closed(table: Array, variance: float) -> Array:
    """The node's own row, squared, joins the value."""
    out = table.copy()
    out[:, 1] += out[:, 2] ** 2 / variance
    out[:, 2] = 0.0
    return _undominated(out)


def _undominated(table: Array) -> Array:
    """Per count, the ways that no other beats in value, row, entry and exit."""
    table[:, 1] = np.round(table[:, 1] / _GRID) * _GRID
    table = table[np.lexsort((table[:, 4], -table[:, 3], -table[:, 2], -table[:, 1], table[:, 0]))]
    kept: list[Array] = []
    for group in np.split(table, np.flatnonzero(np.diff(table[:, 0])) + 1):
        index, (row, entry, leave) = np.arange(len(group)), np.ascontiguousarray(group[:, 2:].T)
        while len(index):  # the first of those left has the most value: nothing beats it
            kept.append(group[index[0]])
            if len(kept) > MOST_WAYS:
                raise SearchTooLong
            stays = (row > row[0]) | (entry > entry[0]) | (leave < leave[0])
            row, entry, leave, index = row[stays], entry[stays], leave[stays], index[stays]
    return np.array(kept)
