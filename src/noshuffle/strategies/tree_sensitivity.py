"""Exact squared sensitivity of tree aggregation, as an integer.

Every entry of CᵀC is ≥ 0, so equal contributions are worst and, over the allowed patterns π,

    S² = max_π Σ_nodes (number of participations of π inside the node)²

**Epochs, by counting.** The class j, j+b, j+2b, … has q₂ − q₁ + [j < r₂] − [j < r₁] members in
[lo, hi) with hi = q₂b + r₂, lo = q₁b + r₁: a constant plus one bump in j. The bumps of all nodes
are summed as a difference array; nodes repeat with period b, levels up to b need no squares. The
work is about the number of epochs, whatever the number of steps.

**MinSeparation, by a dynamic program** on dyadic blocks (`tree_search`). Node sets: Kairouz et al.
2021, appendix D (arXiv 2103.00039).

>>> forest_squared_sensitivity(2000, separation=314, max_participations=6)
79
>>> fixed_order_squared_sensitivity(100, 100)
14349
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import numpy as np

from noshuffle.errors import InvalidInput, Unsupported, one_of
from noshuffle.participation import Epochs, MinSeparation, Participation, Restarted, SinglePass
from noshuffle.strategies.tree import Tree
from noshuffle.strategies.tree_search import Block, Integers, TreeSearch


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
        search = TreeSearch.under(participation)
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
    search = TreeSearch.under(promise, skips_right=nodes == "prefix")
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
    search = TreeSearch(base.separation, most, is_limited=most < fitting)
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
