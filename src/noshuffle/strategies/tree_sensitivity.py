"""Exact squared sensitivity of tree aggregation, as an integer.

Every entry of CᵀC is ≥ 0, so equal contributions are worst and, over the allowed patterns π,

    S² = max_π Σ_nodes (number of participations of π inside the node)²

**Epochs, by counting.** The class j, j+b, j+2b, … has q₂ − q₁ + [j < r₂] − [j < r₁] members in
[lo, hi) with hi = q₂b + r₂, lo = q₁b + r₁: a constant plus one bump in j. The bumps of all nodes
are summed as a difference array; nodes repeat with period b, levels up to b need no squares. The
work is about the number of epochs, whatever the number of steps.

**MinSeparation, by a (max, +) dynamic program on dyadic blocks.** Put c participations into a block
of L steps whose first e steps are still closed. Taken as early as possible, a way to spread them
over the sub-blocks leaves the following block closed for

    exit(e) = max(a, e + c·b − L)      if e ≤ d, impossible otherwise,

because both waiting (a) and shifting (slope 1) survive composition. So a way is a triple (value v,
latest entry d, earliest exit a); two blocks in a row give

    c = c₁+c₂   v = v₁+v₂ (+ c² for the node)   d = min(d₁, d₂ − s₁)   a = max(a₂, a₁ + s₂)

with s = c·b − L, possible if a₁ ≤ d₂ and d ≥ 0. Only triples that no other beats in all three of
(v, d, a) are kept, and a block of at most b steps has only two: nobody (0, b−1, 0), or one
participation (levels, L−1, b−L). If the limit on the count can never bind, a triple that restricts
no neighbour also beats every triple with fewer participations and no more value. Milliseconds for
2000 steps, where a table over all gaps takes minutes. Node sets: Kairouz et al. 2021, appendix D
(arXiv 2103.00039).

>>> forest_squared_sensitivity(2000, separation=314, max_participations=6)
79
>>> fixed_order_squared_sensitivity(100, 100)
14349
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from noshuffle.errors import InvalidInput, Unsupported, one_of
from noshuffle.participation import Epochs, MinSeparation, Participation, Restarted, SinglePass
from noshuffle.strategies.tree import Tree

Integers = NDArray[np.int64]
Block = tuple[int, int, int]  # first step, real leaves, leaves with virtual ones

#: Pairs of triples that are looked at in one piece: bounds the memory of the dynamic program.
_CHUNK = 1 << 21


def tree_squared_sensitivity(strategy: Tree, participation: Participation) -> int:
    """S² of a tree strategy under a participation, for zero-out neighbours and clip norm one.

    Guarantees: exact (every variant releases no more than the nodes counted here, and `full` has
    the same CᵀC). Only `Restarted(MinSeparation)` is an upper value: it does not use that
    participations on both sides of a block's end are separated. Sampled participations are
    refused: sampling amplifies independent noise only.
    """
    if isinstance(participation, Restarted):
        return _restarted(strategy, participation)
    if isinstance(participation, SinglePass):
        _, _, leaves = next(strategy.blocks(participation.steps))  # no later tree is larger
        return leaves.bit_length()  # leaf 0 is in [0, 2^h) for every 2^h <= leaves
    if isinstance(participation, Epochs):
        blocks = strategy.blocks(participation.steps)
        return _best_class(blocks, participation.steps_per_epoch)
    if isinstance(participation, MinSeparation):
        search = _Search.under(participation)
        return int(search.best(list(strategy.blocks(participation.steps))).max())
    raise Unsupported(
        "a tree is accounted under SinglePass, Epochs, MinSeparation or Restarted, got "
        f"{type(participation).__name__}; sampled participations need independent noise"
    )


def forest_squared_sensitivity(
    steps: int, *, separation: int, max_participations: int, nodes: str = "forest"
) -> int:
    """S² of one tree when participations are at least `separation` apart, at most so many.

    `nodes`: "forest" (all that `steps` leaves complete), "completed" (virtual leaves up to a power
    of two), "prefix" (no right children: what plain prefix sums read, nothing else released).
    """
    one_of(("forest", "completed", "prefix"), nodes=nodes)
    promise = MinSeparation(steps, separation, max_participations)
    steps = int(steps)
    full = 1 << (steps - 1).bit_length() if nodes == "completed" else steps
    search = _Search.under(promise, skips_right=nodes == "prefix")
    return int(search.best([(0, steps, full)]).max())


def fixed_order_squared_sensitivity(
    epochs: int, steps_per_epoch: int, *, completion: bool = False
) -> int:
    """S² of one tree over epochs in the same order, optionally completed to a power of two."""
    steps = int(Epochs(epochs, steps_per_epoch).steps)
    full = 1 << (steps - 1).bit_length() if completion else steps
    return _best_class([(0, steps, full)], steps_per_epoch)


def _restarted(strategy: Tree, participation: Restarted) -> int:
    """Blocks of `every` steps are free of each other; all but the last look the same."""
    steps, every, base = participation.steps, participation.every, participation.participation
    if every < steps and (strategy.restart_every is None or every % strategy.restart_every):
        raise InvalidInput(
            f"every must be a multiple of the tree's restart_every, got every={every} and "
            f"restart_every={strategy.restart_every}; a new order needs a new tree"
        )
    if isinstance(base, SinglePass):
        return tree_squared_sensitivity(strategy, base)
    blocks = list(strategy.blocks(steps))
    finished = (steps - 1) // every
    first = [block for block in blocks if block[0] < every]
    last = [(s - finished * every, r, f) for s, r, f in blocks if s >= finished * every]
    if isinstance(base, Epochs):
        b = base.steps_per_epoch
        return finished * (_best_class(first, b) if finished else 0) + _best_class(last, b)
    # base.most takes the separation to hold over the ends of blocks, which is not assumed here
    fitting = sum(-(-length // base.separation) for length in participation.blocks)
    most = min(base.max_participations, fitting)
    search = _Search(base.separation, most, is_limited=most < fitting)
    total = np.asarray(search.best(last))
    if finished:
        gain = search.best(first)
        for bit in reversed(bin(finished)[2:]):
            total = _convolve(total, gain, search.most) if bit == "1" else total
            gain = _convolve(gain, gain, search.most)
    return int(total.max())


def _convolve(left: Integers, right: Integers, most: int) -> Integers:
    """(max, +): the best value of every total count, the counts being split at will."""
    out = np.full(min(len(left) + len(right) - 1, most + 1), -1, dtype=np.int64)
    for count, value in enumerate(left[: most + 1]):
        part = right[: len(out) - count]
        np.maximum(out[count : count + len(part)], value + part, out=out[count : count + len(part)])
    return out


def _best_class(blocks: Iterable[Block], b: int) -> int:
    """max over classes j of Σ_nodes (members of j, j+b, … inside)², the order never changing."""
    base = 0
    where: list[Integers] = []
    bumps: list[Integers] = []
    for (shift, real, full), times in Counter((s % b, r, f) for s, r, f in blocks).items():
        for height in range(full.bit_length()):
            width = 1 << height
            reach = min(real, full // width * width)  # real steps inside complete nodes
            if width <= b:  # at most one member per node: the squares add up to the members
                ends, power = np.array([[0], [reach]], dtype=np.int64), 1
                often = np.ones(1, dtype=np.int64)
            else:
                whole_nodes, period = reach // width, b // math.gcd(b, width)
                index = np.arange(min(whole_nodes, period), dtype=np.int64)
                ends = np.stack([index * width, index * width + width])
                often, power = -(-(whole_nodes - index) // period), 2
                if reach % width:  # the node that ends in virtual leaves
                    ends = np.append(ends, [[whole_nodes * width], [reach]], axis=1)
                    often = np.append(often, 1)
            often = times * often
            quotient, rest = np.divmod(shift + ends, b)
            members = quotient[1] - quotient[0]
            bump = ((members + np.sign(rest[1] - rest[0])) ** power - members**power) * often
            base += int((members**power * often).sum())
            where += [rest.min(axis=0), rest.max(axis=0)]
            bumps += [bump, -bump]
    position, bump = np.concatenate(where), np.concatenate(bumps)
    order = np.argsort(position)
    position, running = position[order], np.cumsum(bump[order])
    is_end = np.append(position[1:] != position[:-1], True)  # all bumps of a class are in
    return base + max(0, int(running[is_end].max()))


@dataclass
class _Search:
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
    def under(cls, promise: MinSeparation, *, skips_right: bool = False) -> _Search:
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
