"""How much noise a workload sees: the rows of B = A·C⁻¹ for unit noise.

    per_step[t] = ‖B_t‖₂,   max = max_t ‖B_t‖₂,   rms = ‖B‖_F / √n

Multiply by the sensitivity to compare mechanisms at equal privacy; `normalized_error` does.

A Toeplitz strategy under a Toeplitz workload (no gains, no schedule) has B = T(a/c), so ‖B_t‖² is
the running sum of squares of one sequence: O(n). Trees know the variance of their prefix sums, and
carry a small covariance matrix along for other workloads (`tree_error`): O(n·log² n).
Everything else is computed from the rows of C⁻¹, one at a time: exact, in O(n²).

>>> from noshuffle.strategies.identity import identity
>>> error(identity(), 4).per_step
array([1.        , 1.41421356, 1.73205081, 2.        ])
>>> round(error(identity(), 1024).rms, 2)
22.64
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from noshuffle.errors import Unsupported, instance_of, whole
from noshuffle.participation import Participation
from noshuffle.strategies.base import DENSE_LIMIT, Strategy, ToeplitzStrategy
from noshuffle.strategies.recipe import Array, Forest
from noshuffle.strategies.sensitivity import MAX_COEFFICIENTS, sensitivity
from noshuffle.strategies.tree import Tree
from noshuffle.strategies.tree_error import MOST_STEPS, workload_variance
from noshuffle.strategies.two_sided import TwoSidedBlt
from noshuffle.strategies.workload import Workload, checked_workload, prefix

#: Longest run of a Toeplitz strategy whose error is computed row by row.
ROW_STEPS = 2**15


@dataclass(frozen=True)
class Error:
    """Standard deviation of the noise in the workload's output, for unit noise Z."""

    max: float
    rms: float
    per_step: Array = field(repr=False, compare=False)


@dataclass(frozen=True)
class NormalizedError:
    """Error times sensitivity; `exact` says whether the sensitivity is."""

    max: float
    rms: float
    sensitivity: float
    exact: bool


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


def normalized_error(
    strategy: Strategy,
    participation: Participation,
    *,
    workload: Workload | None = None,
    tree_accounting: str = "tight",
) -> NormalizedError:
    """Error times sensitivity: the figure by which mechanisms compare at equal privacy."""
    reach = sensitivity(strategy, participation, tree_accounting=tree_accounting)
    plain = error(strategy, participation.steps, workload=workload)
    return NormalizedError(
        max=plain.max * reach.value,
        rms=plain.rms * reach.value,
        sensitivity=reach.value,
        exact=reach.exact,
    )


def _squared(strategy: Strategy, n: int, workload: Workload) -> Array:
    """‖B_t‖² for every step, by the cheapest exact way there is."""
    if isinstance(strategy, ToeplitzStrategy | TwoSidedBlt):
        if isinstance(strategy, TwoSidedBlt):
            rows = strategy.noising_rows(n)
        elif workload.is_toeplitz and not strategy.has_gains:
            b = workload.apply(strategy.noising_coefficients(n))
            return np.asarray(np.cumsum(b * b), dtype=np.float64)
        else:
            rows = _toeplitz_rows(strategy, n)
        if n > ROW_STEPS:
            raise Unsupported(
                f"the error with gains or a schedule is computed for at most {ROW_STEPS:,} "
                f"steps, got {n:,}; compare on a shorter run, or without gains and schedule"
            )
        return _by_rows(rows, n, workload, n)
    if isinstance(strategy, Tree) and workload == prefix():
        return np.asarray(strategy.prefix_variance(n), dtype=np.float64)
    if isinstance(strategy, Tree) and strategy.variant != "full" and n <= MOST_STEPS:
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


def _toeplitz_rows(strategy: ToeplitzStrategy, n: int) -> Iterator[Array]:
    """Row t is d_t, d_{t−1}, …, d_0, divided by its gain."""
    backwards = np.ascontiguousarray(strategy.noising_coefficients(n)[::-1])
    for t, gain in enumerate(strategy.gain_values(n).tolist()):
        yield backwards[n - 1 - t :] / gain
