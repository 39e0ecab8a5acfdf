"""Noise of a tree in the iterates of any workload, exactly, in O(n·log² n).

    m_t = β·m_{t−1} + (P_t − P_{t−1}),      B_t = B_{t−1} + η_t·m_t

P_t, the noise on the prefix sum, is a weighted sum of the nodes on the stack, at most one of every
height. All of it is linear in independent draws, so the covariance of (B, m, P, nodes) after a step
follows from the one before: two equal nodes become one, v = z + (left + right)/2 (Honaker) or v = z
(plain), and B, m, P take their new values. A tree that restarts leaves B and m as they are and
starts P and the stack anew.

State kept: one covariance matrix of the size of the stack. The slow twin is the explicit matrix,
‖row t of A·C⁻¹‖².

>>> from noshuffle.strategies.workload import prefix
>>> workload_variance(Forest("honaker", 4, 0, False), prefix())
array([1.        , 0.66666667, 1.66666667, 0.57142857])
"""

from __future__ import annotations

import numpy as np

from noshuffle.strategies.recipe import Array, Forest, forest_blocks
from noshuffle.strategies.workload import Workload

#: Longest run whose error is computed: some microseconds a step.
MOST_STEPS = 2**17

#: Places of B, m, P and of the node that is being merged; the stack lies behind them.
_B, _M, _P, _NEW, _STACK = range(5)


def workload_variance(forest: Forest, workload: Workload) -> Array:
    """‖row t of A·C⁻¹‖² for every step t, for unit draws; plain and Honaker trees."""
    is_honaker = forest.variant == "honaker"
    n = forest.steps
    blocks = list(forest_blocks(forest))
    heights = max(full for _, _, full in blocks).bit_length()
    weights = np.array([1 / (2 - 2.0**-h) if is_honaker else 1.0 for h in range(heights)])
    rates = workload.rates(n)
    K = np.zeros((_STACK + heights, _STACK + heights))
    out = np.zeros(n)
    for first, real, full in blocks:
        K[_P:], K[:, _P:] = 0.0, 0.0
        for leaf in range(full):
            _push(K, leaf, is_honaker=is_honaker)
            step = leaf if leaf < real - 1 else real - 1
            if leaf < real - 1 or leaf == full - 1:
                _read(K, leaf + 1, weights, beta=workload.beta, rate=float(rates[first + step]))
                out[first + step] = K[_B, _B]
    return out


def _push(K: Array, leaf: int, *, is_honaker: bool) -> None:
    """One more leaf on a stack that holds `leaf` of them."""
    K[_NEW], K[:, _NEW] = 0.0, 0.0
    K[_NEW, _NEW] = 1.0
    height = 0
    while leaf >> height & 1:
        left = _STACK + height
        with_all = (K[left] + K[_NEW]) / 2 if is_honaker else np.zeros(len(K))
        fresh = 1.0 + (with_all[left] + with_all[_NEW]) / 2
        K[_NEW], K[:, _NEW] = with_all, with_all
        K[_NEW, _NEW] = fresh
        K[left], K[:, left] = 0.0, 0.0
        height += 1
    own, place = K[_NEW, _NEW], _STACK + height
    K[place], K[:, place] = K[_NEW], K[_NEW]
    K[place, place] = own
    K[_NEW], K[:, _NEW] = 0.0, 0.0


def _read(K: Array, leaves: int, weights: Array, *, beta: float, rate: float) -> None:
    """Bring B, m and P to a stack of so many leaves."""
    rows = np.zeros((3, len(K)))
    heights = np.arange(len(weights))
    rows[_P, _STACK:] = weights * (leaves >> heights & 1)
    rows[_M] = rows[_P]
    rows[_M, _P] -= 1.0
    rows[_M, _M] += beta
    rows[_B] = rate * rows[_M]
    rows[_B, _B] += 1.0
    new = rows @ K
    K[:3, :3] = new @ rows.T
    K[:3, _NEW:] = new[:, _NEW:]
    K[_NEW:, :3] = new[:, _NEW:].T
