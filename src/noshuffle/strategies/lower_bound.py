"""What no strategy can beat: certified lower bounds on rms error × sensitivity.

Let X = CᵀC and U a positive semidefinite matrix with tr(UX) <= sensitivity² for every C. Then

    n·rms² · sensitivity² >= tr(AᵀA X⁻¹)·tr(UX) >= ‖A U^{1/2}‖²_tr        (Cauchy–Schwarz),

so every such U is a certificate. One is had by taking an allowed pattern of steps at random and
giving its steps random signs: the average of ‖C u‖² is tr(UX) and cannot exceed the maximum. Here

    U = Σ_{r,π} w_{rπ} E_π M_r E_πᵀ,     w >= 0,  Σ w = 1,

E_π the columns of the identity at the steps of π and M_r = a_r^{|l−m|} the correlation of the
signs of a two-state Markov chain (a = 0 independent, a = 1 all equal). The bound is concave in w;
it is raised by w ← w·g^1.6, g_{rπ} = tr(X E_π M_r E_πᵀ) / tr(UX), which for one participation is
the fixed point of Denisov et al. (arXiv 2202.08312). Several M_r together, weighted pattern by
pattern, are ours; the patterns used are those with equal gaps.

>>> from noshuffle.participation import SinglePass
>>> round(rms_lower_bound(SinglePass(64)), 3)
2.099
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from noshuffle.errors import InvalidInput, Unsupported, positive
from noshuffle.participation import Participation
from noshuffle.strategies.fit_forms import FitLayout, coarser, layout
from noshuffle.strategies.recipe import Array
from noshuffle.strategies.workload import Workload, prefix

#: Largest run for one participation, and for several.
SINGLE_STEPS = 4096
SEVERAL_STEPS = 512
#: Correlations of neighbouring signs that are mixed.
SIGNS = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0)
#: Over-relaxation of the fixed point; one would be the plain iteration.
POWER = 1.6
#: Rounds of it for several participations, at most.
_ROUNDS = 150


class Dual(NamedTuple):
    """One diagonal certificate: weights q, eigenvectors and roots of (Q^{1/2}AᵀAQ^{1/2})^{1/2}."""

    weights: Array
    vectors: Array
    roots: Array
    diagonal: Array
    bound: float


def _roots(matrix: Array) -> tuple[Array, Array, float]:
    """Eigenvectors, roots of eigenvalues, and a sum of the roots that rounding cannot inflate."""
    from scipy.linalg import eigh

    values, vectors = eigh(matrix, check_finite=False, driver="evd")
    slack = 4 * len(values) * np.finfo(np.float64).eps * values[-1]
    safe = float(np.sqrt(np.maximum(values - slack, 0.0)).sum())
    roots = np.sqrt(np.maximum(values, slack))  # never zero: they are divided by
    return np.asarray(vectors), np.asarray(roots), safe


def dual_step(A: Array, weights: Array) -> Dual:
    """The certificate of the given weights, and diag X of the strategy that goes with it."""
    q = weights / weights.sum()
    scaled = A * np.sqrt(q)
    vectors, roots, safe = _roots(scaled.T @ scaled)
    return Dual(q, vectors, roots, (vectors**2 @ roots) / q, safe / math.sqrt(len(q)))


def normalized_rms(A: Array, dual: Dual) -> float:
    """rms error of the dual's X scaled to unit diagonal: what can be had, with sensitivity one."""
    scale = np.sqrt(dual.weights * dual.diagonal)
    columns = A @ (scale[:, None] * dual.vectors)
    return float(np.sqrt((np.einsum("ij,ij->j", columns, columns) / dual.roots).sum() / len(A)))


def solve_single(
    n: int, *, workload: Workload, tolerance: float, most: int = 100
) -> tuple[Dual, float, int]:
    """Weights for one participation with upper / lower <= 1 + tolerance: (dual, upper, steps).

    Long runs start from the weights of a run a quarter as long. Returns after `most` steps with
    what there is; both numbers are valid bounds at any step.
    """
    weights = np.ones(n)
    if n >= 64:
        short, _, _ = solve_single(
            n // 4, workload=coarser(workload, n, size=n // 4), tolerance=tolerance, most=most
        )
        place = (np.arange(n) + 0.5) / n
        weights = np.interp(place, (np.arange(n // 4) + 0.5) / (n // 4), short.weights)
    A = workload.matrix(n)
    step = 0
    while True:
        dual = dual_step(A, weights)
        upper = normalized_rms(A, dual)
        step += 1
        if upper <= dual.bound * (1 + tolerance) or step == most:
            return dual, upper, step
        weights = dual.weights * (dual.diagonal / dual.diagonal.max()) ** POWER


def checked_layout(
    participation: Participation, workload: Workload, *, tolerance: float
) -> FitLayout:
    """The layout of a run that is short enough, in which every step counts."""
    positive(tolerance=tolerance)
    found = layout(participation)
    limit = SINGLE_STEPS if found.most == 1 else SEVERAL_STEPS
    if found.steps > limit:
        raise Unsupported(
            f"dense optima and bounds are computed for at most {limit} steps here, got "
            f"{found.steps}; use a BLT or a banded strategy"
        )
    if not np.all(workload.rates(found.steps) > 0):
        raise InvalidInput("dense fits and bounds need learning rates > 0; got one that is zero")
    return found


def patterns(steps: int, *, separation: int, most: int) -> NDArray[np.intp]:
    """Patterns with equal gaps, one a row, as long as possible; `steps` stands for no step."""
    starts = np.arange(max(separation, steps - (most - 1) * separation))
    grid = starts[:, None] + separation * np.arange(most)
    return np.asarray(np.minimum(grid[starts < steps], steps), dtype=np.intp)


def rms_lower_bound(
    participation: Participation,
    *,
    workload: Workload | None = None,
    tolerance: float = 5e-4,
) -> float:
    """A number that rms error × sensitivity of no strategy, of any form, can be below.

    Guarantees: valid for every encoder C, square or tall, whatever `tolerance` is; a smaller one
    only makes it sharper. Rounding of the eigenvalues is taken off. At most 4096 steps for one
    participation, 512 for several.
    """
    workload = workload or prefix()
    n, separation, most = checked_layout(participation, workload, tolerance=tolerance)
    if most == 1:
        return solve_single(n, workload=workload, tolerance=tolerance)[0].bound
    return _several(
        workload.matrix(n), patterns(n, separation=separation, most=most), tolerance=tolerance
    )


def _sign_correlations(turns: int) -> Array:
    """M_r of so many participations, for every r."""
    gap = np.abs(np.subtract.outer(np.arange(turns), np.arange(turns)))
    return np.array([np.where(gap == 0, 1.0, a ** np.maximum(gap, 1)) for a in SIGNS])


def _several(A: Array, steps: NDArray[np.intp], *, tolerance: float) -> float:
    """The best bound met while weights of sign correlations and patterns rise."""
    n, k = len(A), steps.shape[1]
    signs = _sign_correlations(k)
    place = (steps[:, :, None] * (n + 1) + steps[:, None, :]).ravel()
    weights = np.ones((len(SIGNS), len(steps)))
    best = 0.0
    for _ in range(_ROUNDS):
        weights /= weights.sum()
        blocks = np.einsum("rp,rlm->plm", weights, signs).ravel()
        U = np.bincount(place, weights=blocks, minlength=(n + 1) ** 2)
        U = U.reshape(n + 1, n + 1)[:n, :n]
        vectors, roots, safe = _roots(A @ U @ A.T)
        best = max(best, safe / math.sqrt(n))
        half = (vectors.T @ A) / np.sqrt(roots)[:, None]
        X = np.zeros((n + 1, n + 1))
        X[:n, :n] = half.T @ half
        gain = np.einsum("plm,rlm->rp", X.ravel()[place].reshape(-1, k, k), signs) / roots.sum()
        # Concave and homogeneous of degree ½: the optimum is at most (max gain + 1)/2 times this.
        if gain.max() <= 1 + 2 * tolerance:
            break
        weights = weights * gain**POWER
    return best
