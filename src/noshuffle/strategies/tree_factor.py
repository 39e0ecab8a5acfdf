"""The encoder that a tree's released noise amounts to, in closed form.

A tree draws one number per node, more than it has steps, but only the noise of the steps is
released. Its law is that of the square lower-triangular encoder C with CᵀC = Σ⁻¹, Σ = N·Nᵀ and N
the rows in use, and ‖C u‖² = uᵀΣ⁻¹u is what a unit with contributions u is charged. Written for
running sums the noise is a random walk whose steps can be told apart, so C needs no factorization.
For one tree, u(node) being the sum of u over the steps of a node:

    plain     W_t = W_{t−2^h} + fresh: one row per step t, the largest node that ends there,
              C_t u = u(node). These are the nodes that are no right children.
    Honaker   the same nodes. What V_node averages is the left children down its right edge, which
              earlier differences of W show, and fresh draws of variance σ² = Σ_{d≤h} 4^{−d}. So
              C_t u = r(node)/σ,   r(node) = u(node) + r(right child)/2,   r(leaf) = u(leaf).
    full      Σ⁻¹ of the first t steps is a Schur complement of the node count: nodes inside count
              u(node)², the nested nodes S_1 ⊂ S_2 ⊂ … across the end of step t count
              min over v of Σ_a k_a v_a² + Σ_a (u(S_a) + v_1 + … + v_a)²  =  δᵀ(K⁻¹ + D·Dᵀ)⁻¹δ,
              where v_a is what later steps could add in S_a outside S_{a−1}, k_a = 2 − 2^{−h} the
              cost of doing so in a subtree of height h, δ_a = u(S_a) − u(S_{a−1}), D differences.

The last step of a completed block reads the whole tree: C_t u = r(root)/σ with r following the
child that holds the last step, and σ² = Σ 4^{−depth} over the nodes that the earlier steps left
unfinished. All entries of C (and, for full, of Σ⁻¹, because K⁻¹ + D·Dᵀ is a Stieltjes matrix) are
≥ 0, so equal contributions are the worst, and the values here are exact.

If every node were released, its 0/1 row would count: Σ_nodes (participations inside)², an integer,
never less, which is what TensorFlow Privacy and Kairouz et al. state (arXiv 2103.00039, D).

>>> one = Part(used=1024, real=1024, full=1024)
>>> round(float(energies("honaker", one, period=1024).max()), 3)       # the node count is 11
9.466
>>> float(energies("plain", Part(256, 256, 256), period=16).max())     # the node count is 560
440.0
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from noshuffle.strategies.base import padded
from noshuffle.strategies.recipe import Array


class Part(NamedTuple):
    """The first `used` steps of a tree with `real` steps and `full` leaves (virtual ones too)."""

    used: int
    real: int
    full: int

    @property
    def is_completed(self) -> bool:
        """Whether the step that reads the virtual leaves is among the steps in use."""
        return self.used == self.real < self.full


def energies(variant: str, part: Part, *, period: int) -> Array:
    """‖C u‖² of the units that join steps c, c + period, … of the tree, for every c.

    Guarantees: exact up to rounding, in O(n log n) time and O(n) memory for n steps in use.
    """
    out = np.zeros(min(period, part.used))
    is_completed = variant != "full" and part.is_completed
    inside = _nodes(variant, part.used - is_completed, period)
    out[: len(inside)] += inside
    if variant == "full":
        out += _straddling(part, period)
    elif is_completed:
        weights, variance = _root_row(part, carry=carry_of(variant))
        out += _fold(weights, period) ** 2 / variance
    return out


def carry_of(variant: str) -> float:
    """How much of a right child's row enters the row of its parent."""
    return 0.5 if variant == "honaker" else 0.0


def _fold(values: Array, period: int) -> Array:
    """Sums over c, c + period, …"""
    if len(values) <= period:
        return values
    whole = padded(values, -(-len(values) // period) * period)
    return np.asarray(whole.reshape(-1, period).sum(axis=0))


def _nodes(variant: str, n: int, period: int) -> Array:
    """Σ r(node)² / σ² over the complete nodes of n leaves; right children count for full only.

    While nodes hold at most one member of a class, every leaf has its own weight; above, every
    node has a row of sums, one per class. Either way O(n) numbers.
    """
    carry, stride = carry_of(variant), 1 if variant == "full" else 2
    steps, weight, single = np.arange(n), np.ones(n), np.zeros(n)
    height, variance = 0, 1.0
    while True:
        reach = n >> height << height
        counts = (steps[:reach] >> height) % stride == 0
        single[:reach] += counts * weight[:reach] ** 2 / variance
        if 2 << height > min(period, n):
            break
        weight = 1 + carry * weight * (steps >> height & 1)
        height, variance = height + 1, 1 + carry**2 * variance
    out, nodes = _fold(single, period), n >> height
    if nodes < 2:
        return out
    place = steps[: nodes << height] >> height, steps[: nodes << height] % period
    members, rows = np.zeros((nodes, period)), np.zeros((nodes, period))
    members[place], rows[place] = 1.0, weight[: nodes << height]
    while nodes >= 2:
        nodes, variance = nodes // 2, 1 + carry**2 * variance
        members = members[: 2 * nodes : 2] + members[1 : 2 * nodes : 2]
        rows = members + carry * rows[1 : 2 * nodes : 2]
        out += (rows[::stride] ** 2).sum(axis=0) / variance
    return out


def _root_row(part: Part, *, carry: float) -> tuple[Array, float]:
    """Weights of the row that the last step of a completed tree adds, and its variance."""
    last, top = part.real - 1, part.full.bit_length() - 1
    weights = np.zeros(part.real)
    weights[last] = 1.0
    for height in range(1, top + 1):
        held = last >> (height - 1) << (height - 1)  # the child that holds the last step
        weights[held:] = 1 + carry * weights[held:]
        weights[last >> height << height : held] = 1.0
    return weights, root_variance(part, carry=carry)


def root_variance(part: Part, *, carry: float) -> float:
    """Σ carry^{2·depth} over the nodes that all steps but the last leave unfinished."""
    last, top = part.real - 1, part.full.bit_length() - 1
    return sum(carry ** (2 * d) * ((1 << d) - (last >> (top - d))) for d in range(top + 1))


def _straddling(part: Part, period: int) -> Array:
    """δᵀ(K⁻¹ + D·Dᵀ)⁻¹δ over the nodes that hold the last step in use and end after it."""
    last, below = part.used - 1, part.used  # `below`: where the node before this one begins
    ease, changes = [], []  # 1/k_a and δ_a
    for height in range(1, part.full.bit_length()):
        first = last >> height << height
        middle, after = first + (1 << height >> 1), first + (1 << height)
        if part.used < after <= part.full:
            later = min(after, part.real) - middle if last < middle else 0
            ease.append(1 / _cost(height - 1, later) if later > 0 else 0.0)
            changes.append(_members(first, below, period, part.used))
            below = first
    if not ease:
        return np.zeros(min(period, part.used))
    difference = np.eye(len(ease)) - np.eye(len(ease), k=-1)
    inner = np.linalg.inv(np.diag(ease) + difference @ difference.T)
    delta = np.array(changes)
    return np.asarray(np.einsum("ac,ab,bc->c", delta, inner, delta))


def _members(first: int, end: int, period: int, used: int) -> Array:
    """How many of c, c + period, … lie in [first, end), for every c."""
    c = np.arange(min(period, used))
    return np.asarray((end - 1 - c) // period - (first - 1 - c) // period, dtype=np.float64)


def _cost(height: int, real: int) -> float:
    """The least Σ_nodes (sum)² of a subtree whose first `real` steps add up to one."""
    half = 1 << height >> 1
    if real == 1 << height:
        return 2 - 2.0**-height
    if real <= half:
        return 1 + _cost(height - 1, real)
    return 1 + 1 / (1 / _cost(height - 1, half) + 1 / _cost(height - 1, real - half))


def largest_node_count(blocks: Iterable[tuple[int, int, int]], b: int) -> int:
    """max over classes j of Σ_nodes (members of j, j+b, … inside)², the order never changing.

    `blocks` are trees as (first step, real leaves, leaves with virtual ones). The class has
    q₂ − q₁ + [j < r₂] − [j < r₁] members in [lo, hi) with hi = q₂b + r₂, lo = q₁b + r₁: a constant
    plus one bump in j. The bumps of all nodes are summed as a difference array; nodes repeat with
    period b, levels up to b need no squares. The work is about the number of epochs, whatever the
    number of steps.
    """
    base = 0
    where: list[NDArray[np.int64]] = []
    bumps: list[NDArray[np.int64]] = []
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
