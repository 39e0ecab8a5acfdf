"""How much noise a workload sees: the rows of B = A·C⁻¹ for unit noise.

    per_step[t] = ‖B_t‖₂,   max = max_t ‖B_t‖₂,   rms = ‖B‖_F / √n

Multiply by the sensitivity to compare mechanisms at equal privacy (`fit_forms.cost` does).

A Toeplitz strategy under a Toeplitz workload (no gains, no schedule) has B = T(a/c), so ‖B_t‖² is
the running sum of squares of one sequence: O(n). So have BLTs with gains but no taps, under prefix
sums with any learning rates (`buffered_squared`). Trees know the variance of their prefix sums, and
carry a small covariance matrix along for other workloads: O(n·log² n).
Everything else is computed from the rows of C⁻¹, one at a time: exact, in O(n²).

>>> from noshuffle.strategies.identity import identity
>>> error(identity(), 4).per_step
array([1.        , 1.41421356, 1.73205081, 2.        ])
>>> round(error(identity(), 1024).rms, 2)
22.64
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from noshuffle.errors import Unsupported, instance_of, whole
from noshuffle.strategies.base import DENSE_LIMIT, Strategy, ToeplitzStrategy
from noshuffle.strategies.blt import Blt, inverse_parameters
from noshuffle.strategies.recipe import Array, Forest, forest_blocks, node_weight
from noshuffle.strategies.recursions import decaying
from noshuffle.strategies.sensitivity import MAX_COEFFICIENTS
from noshuffle.strategies.tree import Tree
from noshuffle.strategies.workload import Workload, checked_workload, prefix

#: Longest run of a Toeplitz strategy whose error is computed row by row, and of a tree.
ROW_STEPS = 2**15
TREE_STEPS = 2**17


@dataclass(frozen=True)
class Error:
    """Standard deviation of the noise in the workload's output, for unit noise Z."""

    max: float
    rms: float
    per_step: Array = field(repr=False, compare=False)


def error(strategy: Strategy, steps: int, *, workload: Workload | None = None) -> Error:
    """Error of the strategy under the workload (prefix sums unless given), for unit noise."""
    instance_of(Strategy, strategy=strategy)
    whole(steps=steps)
    workload = checked_workload(workload)
    if steps > MAX_COEFFICIENTS:
        raise Unsupported(
            f"the error is computed for at most {MAX_COEFFICIENTS:,} steps, got {steps:,}"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        squared = _squared(strategy, steps, workload)
    if not np.all(np.isfinite(squared)):
        raise Unsupported(
            f"the noise of {strategy.name!r} grows beyond floating point within {steps:,} steps; "
            "use other coefficients or fewer steps"
        )
    per_step = np.sqrt(squared)
    return Error(max=float(per_step.max()), rms=math.sqrt(float(squared.mean())), per_step=per_step)


def _squared(strategy: Strategy, n: int, workload: Workload) -> Array:
    """‖B_t‖² for every step, by the cheapest exact way there is."""
    if isinstance(strategy, Blt) and not strategy.taps and not workload.beta:
        return buffered_squared(strategy, workload.rates(n))
    if isinstance(strategy, ToeplitzStrategy):
        if workload.is_toeplitz and not strategy.has_gains:
            b = workload.apply(strategy.noising_coefficients(n))
            return np.asarray(np.cumsum(b * b), dtype=np.float64)
        if n > ROW_STEPS:
            raise Unsupported(
                f"the error with gains or a schedule is computed for at most {ROW_STEPS:,} "
                f"steps, got {n:,}; compare on a shorter run, or without gains and schedule"
            )
        return _by_rows(strategy.noising_rows(n), n, workload, n)
    if isinstance(strategy, Tree) and workload == prefix():
        return np.asarray(strategy.prefix_variance(n), dtype=np.float64)
    if isinstance(strategy, Tree) and strategy.variant != "full" and n <= TREE_STEPS:
        forest = strategy.recipe(n)
        assert isinstance(forest, Forest)
        return workload_variance(forest, workload)
    if n > DENSE_LIMIT:
        raise Unsupported(
            f"the error of {strategy.name!r} under this workload is computed for at most "
            f"{DENSE_LIMIT} steps, got {n}; compare on a shorter run, or on prefix sums"
        )
    matrix = strategy.noising(n)
    return _by_rows(matrix, matrix.shape[1], workload, n)


def buffered_squared(strategy: Blt, rates: Array) -> Array:
    """‖B_t‖² for C⁻¹ = diag(1/g)·T(δ + Σ_j ω_j x/(1−θ_j x))·diag(1/a) under prefix sums, in O(n).

    With v_r = 1/a_r² the step's noise m_t = z_t + Σ_j ω_j y_j and buffers y_j ← θ_j y_j + z_t,
    read before they take z_t in, inner products follow from step to step:

        q_jl(t+1) = θ_jθ_l q_jl(t) + v_t                          ⟨y_j, y_l⟩
        p_j(t+1) = θ_j p_j(t) + d_t (v_t + θ_j Σ_l ω_l q_jl(t))   ⟨B_t, y_j⟩,   d = η/g
        ‖B_t‖² = ‖B_{t−1}‖² + 2 d_t Σ_j ω_j p_j(t) + d_t² (v_t + Σ_jl ω_jω_l q_jl(t))

    each a recursion of first order.
    """
    n = len(rates)
    decays, scales = inverse_parameters(strategy.decays, strategy.scales)
    d = rates / strategy.gain_values(n)
    v = 1.0 / strategy.draw_gain_values(n) ** 2

    def before(source: Array, decay: float) -> Array:
        """x(t) of x(t+1) = decay·x(t) + source(t), x(0) = 0."""
        return np.append(0.0, decaying(source, decay)[:-1])

    power, cross = v.copy(), np.zeros(n)
    for theta, omega in zip(decays, scales):
        with_noise = np.zeros(n)
        for other, weight in zip(decays, scales):
            with_noise += weight * before(v, theta * other)
        power += omega * with_noise
        cross += omega * before(d * (v + theta * with_noise), theta)
    return np.asarray(np.cumsum(2 * d * cross + d * d * power))


def _by_rows(rows: Iterable[Array], width: int, workload: Workload, n: int) -> Array:
    """‖B_t‖² from the rows y_t of C⁻¹: m_t = β m_{t−1} + y_t and B_t = B_{t−1} + η_t m_t.

    A row may be cut off after its last entry that is not zero.
    """
    out, velocity, total = np.zeros(n), np.zeros(width), np.zeros(width)
    rates = workload.rates(n).tolist()
    for t, row in enumerate(rows):
        if workload.beta:
            velocity *= workload.beta
            velocity[: len(row)] += row
            total += rates[t] * velocity
        else:
            total[: len(row)] += rates[t] * row
        out[t] = total @ total
    return out


#: Places of B, m, P and of the node that is being merged; the stack lies behind them.
_B, _M, _P, _NEW, _STACK = range(5)


def workload_variance(forest: Forest, workload: Workload) -> Array:
    """‖row t of A·C⁻¹‖² for every step of plain and Honaker trees, exactly, in O(n·log² n).

        m_t = β·m_{t−1} + (P_t − P_{t−1}),      B_t = B_{t−1} + η_t·m_t

    P_t, the noise on the prefix sum, is a weighted sum of the nodes on the stack, at most one of
    every height. All is linear in independent draws, so the covariance of (B, m, P, nodes) follows
    from step to step: two equal nodes become one, v = z + (left + right)/2 (Honaker) or v = z
    (plain), and B, m, P take their new values. A tree that restarts starts P and the stack anew.
    """
    is_honaker = forest.variant == "honaker"
    n = forest.steps
    blocks = list(forest_blocks(forest))
    heights = max(full for _, _, full in blocks).bit_length()
    weights = np.array([node_weight(forest.variant, h) for h in range(heights)])
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
