"""Squared sensitivity of tree aggregation: what is released, or every node that is touched.

    tight    max_π uᵀΣ⁻¹u of the released noise, by the closed forms of `tree_factor`
    nodes    max_π Σ_nodes (participations inside)², larger, the figure of the literature

over the patterns π of the first `steps` steps, with the trees of the whole run. Both are sums over
trees, and all entries are ≥ 0, so a unit that contributes equally everywhere is the worst.

    SinglePass        the worst step
    Epochs            the worst class j, j+b, j+2b, …, over all trees together
    Restarted         every block of `every` steps by itself: the order changes between them
    MinSeparation     a search (`tree_search`)

Where the tight value is out of reach (more than 2²² steps, or a unit that takes part very often at
any distance) the node count is given instead, and labelled a bound.

>>> from noshuffle.strategies.tree import tree
>>> squared, why = tree_sensitivity(tree(), Epochs(20, 60), 1200)
>>> round(squared, 3), why, tree_squared_sensitivity(tree(), Epochs(20, 60))
(727.684, '', 758)
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from noshuffle.errors import InvalidInput, Unsupported, one_of
from noshuffle.participation import Epochs, MinSeparation, Participation, Restarted, SinglePass
from noshuffle.strategies.gram import ROUNDING
from noshuffle.strategies.recipe import Array
from noshuffle.strategies.tree import Tree
from noshuffle.strategies.tree_factor import Part, carry_of, energies, largest_node_count
from noshuffle.strategies.tree_search import SearchTooLong, TreeSearch

ACCOUNTINGS = ("tight", "nodes")

#: Most steps whose tight value is computed: O(n log n) time, a few arrays of n numbers.
TIGHT_STEPS = 2**22

NODES = "upper bound: every node of the tree that a unit touches is counted, as in the literature"
ENDS = "upper bound: separation across the end of a block is not made use of"


class PatternLimits(NamedTuple):
    """Distance and number of participations; `is_limited`: more would fit into the run."""

    separation: int
    most: int
    is_limited: bool

    @classmethod
    def of(cls, participation: MinSeparation | Restarted) -> PatternLimits:
        """Of the whole run, so that the tables of a search serve every prefix."""
        base = participation.base
        assert isinstance(base, MinSeparation)
        free = replace(base, max_participations=base.steps)
        if isinstance(participation, Restarted):
            fitting = Restarted(free, participation.every).most
        else:
            fitting = free.most
        return cls(base.separation, participation.most, participation.most < fitting)


@lru_cache(maxsize=4096)
def tree_sensitivity(
    strategy: Tree, participation: Participation, steps: int, *, accounting: str = "tight"
) -> tuple[float, str]:
    """S² of the first `steps` steps of a run, and why it is only a bound (empty where it is not).

    Guarantees: never below the truth for zero-out neighbours and clip norm one. Sampled
    participations are refused: sampling amplifies independent noise only.
    """
    one_of(ACCOUNTINGS, tree_accounting=accounting)
    _check(strategy, participation)
    is_searched = isinstance(participation.base, MinSeparation)
    is_loose = is_searched and isinstance(participation, Restarted) and participation.every < steps
    tight = None
    # no search to label a node count
    if steps <= TIGHT_STEPS and (accounting == "tight" or not is_searched):
        with suppress(SearchTooLong):
            tight = float(_largest(_Released(strategy.variant), strategy, participation, steps))
    if accounting == "tight" and tight is not None:
        return tight, ENDS if is_loose else ""
    counted = tree_squared_sensitivity(strategy, participation, steps)
    is_reached = tight is not None and tight >= counted * (1 - ROUNDING)
    return float(counted), "" if is_reached else NODES


def tree_squared_sensitivity(
    strategy: Tree, participation: Participation, steps: int | None = None
) -> int:
    """The node count: S² if every node that the first `steps` steps read were released."""
    _check(strategy, participation)
    return int(_largest(_Nodes(strategy.variant), strategy, participation, steps))


def _check(strategy: Tree, participation: Participation) -> None:
    if not isinstance(participation, SinglePass | Epochs | MinSeparation | Restarted):
        raise Unsupported(
            "a tree is accounted under SinglePass, Epochs, MinSeparation or Restarted, got "
            f"{type(participation).__name__}; sampled participations need independent noise"
        )
    if isinstance(participation, Restarted) and participation.every < participation.steps:
        every, own = participation.every, strategy.restart_every
        if own is None or every % own:
            raise InvalidInput(
                f"every must be a multiple of the tree's restart_every, got every={every} and "
                f"restart_every={own}; a new order needs a new tree"
            )


def _in_use(strategy: Tree, horizon: int, steps: int) -> tuple[Part, int, Part]:
    """What the first `steps` of `horizon` steps read: a finished tree, how many of them, the last.

    All trees but the run's last are equal.
    """
    _, real, full = next(strategy.blocks(horizon))
    finished = (steps - 1) // real
    first, start = Part(real, real, full), finished * real
    rest = horizon - start
    last = first._replace(used=steps - start) if rest > real else Part(steps - start, rest, rest)
    return first, finished, last


def _largest(
    measure: _Nodes | _Released, strategy: Tree, participation: Participation, steps: int | None
) -> float:
    horizon = int(participation.steps)
    tree, times, last = _in_use(strategy, horizon, horizon if steps is None else int(steps))
    base = participation.base
    if isinstance(base, SinglePass):
        kinds = {tree, last} if times else {last}  # one participation meets one tree
        return max(measure.by_class([kind], kind.used) for kind in kinds)
    trees = [tree] * times + [last]
    if not isinstance(participation, Restarted):
        return _over(measure, participation, trees)
    size = -(-participation.every // (strategy.restart_every or horizon))
    finished = (len(trees) - 1) // size
    first, rest = trees[:size], trees[finished * size :]
    if isinstance(base, Epochs):
        total = _over(measure, base, rest)
        return total + (finished * _over(measure, base, first) if finished else 0)
    limits = PatternLimits.of(participation)
    counts = measure.by_count(rest, limits)
    if finished:
        gain = measure.by_count(first, limits)
        for bit in reversed(bin(finished)[2:]):
            counts = _convolve(counts, gain, limits.most) if bit == "1" else counts
            gain = _convolve(gain, gain, limits.most)
    return float(counts.max())


def _over(measure: _Nodes | _Released, part: Participation, trees: list[Part]) -> float:
    """One order for all of these trees."""
    if isinstance(part, Epochs):
        return measure.by_class(trees, int(part.steps_per_epoch))
    assert isinstance(part, MinSeparation)
    return float(measure.by_count(trees, PatternLimits.of(part)).max())


@dataclass(frozen=True)
class _Nodes:
    """Every node that the steps in use read counts."""

    variant: str

    def _shape(self, tree: Part) -> tuple[int, int]:
        """Real leaves and leaves of the nodes that were drawn: `full` reads later ones too."""
        if tree.used == tree.real:
            return tree.real, tree.full
        return (tree.used, tree.full) if self.variant == "full" else (tree.used, tree.used)

    def by_class(self, trees: list[Part], b: int) -> float:
        """S² of the worst class j, j+b, …"""
        starts = np.cumsum([0, *(tree.used for tree in trees[:-1])]).tolist()
        return largest_node_count(((s, *self._shape(tree)) for s, tree in zip(starts, trees)), b)

    def by_count(self, trees: list[Part], limits: PatternLimits) -> Array:
        """S² of the worst pattern for every number of participations."""
        drawn = {}
        for tree in set(trees):  # of millions of trees a few are different
            real, full = self._shape(tree)
            drawn[tree] = Part(real, real, 1 << (full - 1).bit_length() if full > real else full)
        return _search(limits, counts_all=True).best([drawn[tree] for tree in trees])


@dataclass(frozen=True)
class _Released:
    """Only the noise of the steps in use counts."""

    variant: str

    def by_class(self, trees: list[Part], b: int) -> float:
        total = np.zeros(b)
        shifts = Counter[tuple[Part, int]]()
        start = 0
        for tree in trees:
            shifts[tree, start % b] += 1
            start += tree.used
        found: dict[Part, Array] = {}
        for (tree, shift), times in shifts.items():
            if tree not in found:
                found[tree] = energies(self.variant, tree, period=b)
            at = (shift + np.arange(len(found[tree]))) % b
            total[at] += times * found[tree]
        return float(total.max())

    def by_count(self, trees: list[Part], limits: PatternLimits) -> Array:
        if self.variant == "full":
            if any(tree.used < tree.real for tree in trees):
                raise SearchTooLong  # part of a least-squares tree: there is no search for it
            return _Nodes("full").by_count(trees, limits)
        is_plain = self.variant == "plain" and not any(tree.is_completed for tree in trees)
        return _search(limits, carry_of(self.variant), is_bounded=not is_plain).best(trees)


@lru_cache(maxsize=64)
def _search(
    limits: PatternLimits, carry: float = 0.0, *, counts_all: bool = False, is_bounded: bool = False
) -> TreeSearch:
    return TreeSearch(*limits, carry, counts_all, is_bounded)


def _convolve(left: Array, right: Array, most: int) -> Array:
    """(max, +): the best value of every total count, the counts being split at will."""
    size = min(len(left) + len(right) - 1, most + 1)
    out = np.full(size, -1.0)  # whole numbers up to 2⁵³ stay exact
    for count, value in enumerate(left[: most + 1]):
        part = right[: len(out) - count]
        np.maximum(out[count : count + len(part)], value + part, out=out[count : count + len(part)])
    return out
