"""How many nodes of a tree one unit touches, squared and summed, as an integer.

Every entry of the node matrix is 0 or 1, so equal contributions are worst and, over the allowed
patterns π,

    S² = max_π Σ_nodes (number of participations of π inside the node)²

It is what the 2021 paper and TensorFlow Privacy state (node sets: Kairouz et al., appendix D, arXiv
2103.00039), and an upper bound on what a tree's released noise costs (`tree_factor`).

**Epochs, by counting.** The class j, j+b, j+2b, … has q₂ − q₁ + [j < r₂] − [j < r₁] members in
[lo, hi) with hi = q₂b + r₂, lo = q₁b + r₁: a constant plus one bump in j. The bumps of all nodes
are summed as a difference array; nodes repeat with period b, levels up to b need no squares. The
work is about the number of epochs, whatever the number of steps.

**MinSeparation, by a dynamic program** on dyadic blocks (`tree_search`).

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

from noshuffle.errors import one_of
from noshuffle.participation import Epochs, MinSeparation
from noshuffle.strategies.tree_search import Block, Integers, TreeSearch


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
    return best_class([(0, steps, full)], steps_per_epoch)


def best_class(blocks: Iterable[Block], b: int) -> int:
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
