"""Decayed sums s_t = Σ_{r≤t} a^{t−r} w_r of vectors that each row joins once, released at every t.

    root    w_t with row t of σC⁻¹Z, C the square root of the workload A = 1/(1 − ax), c_k =
            (2k choose k)(a/4)^k; the released s is A C⁻¹Z = C Z on top of the true one: its noise
            and the sensitivity are both ‖c‖, so σ_s = ‖c‖²·Δ/μ. Normal noise only (r = 2)
    steps   every w_t with noise of its own, added up afterwards: σ_s = Δ/(μ√(1 − a²))
    tree    nodes [l, m] of a binary tree hold Σ a^{m−r} w_r; a row sits in ⌊lg T⌋ + 1 of them
    naive   every s_t with noise of its own: a row counts Σ a^{2t} times in squares

‖c‖² = Σ c_k² = (2/π)·K(a) grows like ln(1/(1−a))/π, and (Σ c_k²)² ≤ Σ a^{2k} (c_k ≤ 1 and c·c =
1/(1 − ax)), so that root is never above steps. `factor` is σ_s·μ/Δ at its worst t, for all of
them. C is cut to `bands` where a per cent is lost by it: that many vectors are kept, and
sensitivity and noise are those of the cut C. Noise that is no sum of normals is not stable under
sums: "steps" and "tree" add up released values only, so they serve l_p too. State: the released sum
and the noise stream, or a stack of lg T + 1 nodes.

>>> [round(factor(kind, steps=128, decay=0.9), 2) for kind in ("root", "steps", "tree", "naive")]
[1.45, 2.29, 4.57, 2.29]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
from scipy.signal import lfilter

from noshuffle.convex.arrays import Array
from noshuffle.convex.solvers.generalized_gaussian import Releaser
from noshuffle.convex.solvers.problem import Problem
from noshuffle.strategies.toeplitz import SqrtToeplitz, sqrt_toeplitz

AGGREGATIONS = ("root", "steps", "tree", "naive")
#: What cutting the square root to a band may cost.
_LOST = 1.01


class DecayedTree:
    """Σ_{s≤t} decay^{t−s} w_s from noisy dyadic nodes; push one w at a time.

    Guarantees: every node goes through `release_fn` once; a leaf is in
    ⌊lg T⌋ + 1 nodes at most, with weights at most one. Raw node sums never leave.
    """

    def __init__(self, release_fn: Callable[[Array], Array], *, decay: float) -> None:
        self.decay, self._release = decay, release_fn
        self._stack: list[tuple[int, Array, Array]] = []  # length, raw sum, released sum

    def push(self, w: Array) -> Array:
        """Take in w_t and return the released decayed prefix sum."""
        length, raw = 1, w
        released = self._release(raw)
        while self._stack and self._stack[-1][0] == length:
            _, left, _ = self._stack.pop()
            raw = left * self.decay**length + raw
            length *= 2
            released = self._release(raw)
        self._stack.append((length, raw, released))
        total = np.zeros_like(w)
        for size, _, value in self._stack:  # oldest first: decay over each newer block
            total = total * self.decay**size + value
        return total


def squares(*, steps: int, decay: float) -> float:
    """Σ_{t<steps} decay^{2t}."""
    ratio = decay * decay
    return float((1 - ratio**steps) / (1 - ratio)) if ratio < 1 else float(steps)


@lru_cache(maxsize=64)
def root(steps: int, decay: float) -> tuple[SqrtToeplitz, float, float]:
    """The square root, cut to as few bands as cost a per cent; its sensitivity and its noise."""
    bands = 1
    least = math.inf
    while True:
        made = sqrt_toeplitz(min(bands, steps), decay=decay)
        reach = float(np.linalg.norm(made.coefficients(steps)))
        noise = lfilter([1.0], [1.0, -decay], made.noising_coefficients(steps))
        found = made, reach, float(np.linalg.norm(noise))
        if bands >= steps:
            return found
        least = least if least < math.inf else _full(steps, decay)
        if found[1] * found[2] <= _LOST * least:
            return found
        bands *= 2


def _full(steps: int, decay: float) -> float:
    return float(np.sum(sqrt_toeplitz(decay=decay).coefficients(steps) ** 2))


def factor(kind: str, *, steps: int, decay: float) -> float:
    """Deviation of the noisiest released sum, for unit sensitivity and μ = 1."""
    if kind == "root":
        _, reach, noise = root(steps, decay)
        return reach * noise
    if kind == "steps":
        return math.sqrt(squares(steps=steps, decay=decay))
    if kind == "naive":
        return math.sqrt(squares(steps=steps + 1, decay=decay))
    worst = 0.0
    for t in range(1, steps + 1):
        # The blocks of t are its binary digits, the largest one oldest; all newer ones decay it.
        sizes = [1 << k for k in range(t.bit_length()) if t >> k & 1]
        newer = np.cumsum([0, *sizes[:-1]])
        worst = max(worst, float(np.sum(decay ** (2.0 * newer))))
    return math.sqrt(worst * steps.bit_length())


def smallest(*, steps: int, decay: float, is_normal: bool) -> str:
    """The kind with the least noise in its worst sum."""
    kinds = ("root",) if is_normal else ("steps", "tree")
    return min(kinds, key=lambda kind: factor(kind, steps=steps, decay=decay))


def push_with(
    kind: str, problem: Problem, release: Releaser, *, sigma: float, steps: int, decay: float
) -> Callable[[Array], Array]:
    """A function that takes w_t in and returns the released s_t; σ is that of one release."""
    if kind == "tree":
        return DecayedTree(partial(release, scale=sigma), decay=decay).push
    if kind == "root":
        one: Callable[[Array], Array] = problem.sums(
            root(steps, decay)[0], steps=steps, scale=sigma
        )
    else:
        one = partial(release, scale=sigma)
    total = np.zeros(problem.d)

    def push(w: Array) -> Array:
        nonlocal total
        total = decay * total + one(w)
        return total

    return push
