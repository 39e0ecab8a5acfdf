"""The best strategy among all matrices, for small runs: the reference the others are held to.

One participation (Denisov et al., arXiv 2202.08312): minimize tr(AᵀA X⁻¹) over X = CᵀC with
diag X <= 1. For weights q >= 0, Σ q = 1, and Q = diag(q) Cauchy–Schwarz certifies

    n·rms²·sensitivity² >= tr(AᵀA X⁻¹)·tr(Q X) >= ‖A Q^{1/2}‖²_tr       for every C.

It is raised by q ← q·(diag X)^1.6 (a power of one is the fixed point of the paper), with

    X = Q^{−1/2} (Q^{1/2} AᵀA Q^{1/2})^{1/2} Q^{−1/2},

which, scaled to unit diagonal, is the strategy.

Several participations: columns that one unit may meet together are kept orthogonal,

    Epochs          X_{j,j+lb} = 0 for l ≠ 0 and Σ_l X_{j+lb,j+lb} = 1    sensitivity 1
    MinSeparation   X_{ij} = 0 for |i−j| >= b and X_ii = 1                sensitivity √k

(arXiv 2211.06530 with its practical mask; BandMF, arXiv 2306.08153), by L-BFGS on the free entries
of Y, X = D Y D, with D the scaling that meets the sums. The certificate then speaks of strategies
with the same mask: for U zero on the free off-diagonal entries and constant v_c on the diagonal of
each sum, rms² n >= ‖A U^{1/2}‖²_tr / Σ_c v_c; U is read off X⁻¹AᵀAX⁻¹, to which it is equal at the
optimum.

>>> from noshuffle.participation import SinglePass
>>> found = fit_dense(SinglePass(16))
>>> round(found.objective, 2), found.gap < 1e-3
(1.69, True)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from noshuffle.errors import InvalidInput, Unsupported, positive
from noshuffle.participation import Epochs, Participation
from noshuffle.strategies.dense import dense
from noshuffle.strategies.fit_banded import fit_banded
from noshuffle.strategies.fit_forms import WALL, Fit, FitLayout, coarser, cost, descend, layout
from noshuffle.strategies.recipe import Array
from noshuffle.strategies.toeplitz import sqrt_toeplitz
from noshuffle.strategies.workload import Workload, prefix

#: Largest run for one participation, and for several.
SINGLE_STEPS = 4096
SEVERAL_STEPS = 512
#: Over-relaxation of the fixed point (one would be the plain iteration), and its most steps.
POWER, MOST_STEPS = 1.6, 100


@dataclass(frozen=True)
class CertifiedFit(Fit):
    """A fit with a proved lower bound on what any strategy of the same family can reach."""

    bound: float

    @property
    def gap(self) -> float:
        """How far, relatively, the objective can be above the optimum of its family."""
        return self.objective / self.bound - 1


def triangular(X: Array) -> Array:
    """The lower-triangular C with CᵀC = X: Cholesky with time reversed."""
    from scipy.linalg import cholesky

    reverse = cholesky(X[::-1, ::-1], lower=True, check_finite=False)
    return np.asarray(reverse.T[::-1, ::-1])


def fit_dense(
    participation: Participation, *, workload: Workload | None = None, tolerance: float = 1e-3
) -> CertifiedFit:
    """The least rms error × sensitivity over all matrices (one participation) or masked ones.

    Guarantees: deterministic; `bound` is proved and `gap` says what may be missing, at most
    `tolerance` when `converged`; never worse than the square root (banded, for several
    participations) of the workload. At most 4096 steps for one participation, 512 for several.
    """
    workload = workload or prefix()
    n, separation, most = _checked_layout(participation, workload, tolerance=tolerance)
    root = sqrt_toeplitz(min(separation, n), momentum=workload.beta)
    if most == 1:
        dual = solve_single(n, workload=workload, tolerance=tolerance / 2)
        half = dual.vectors * np.sqrt(dual.roots)
        half /= np.sqrt(np.einsum("ij,ij->i", half, half))[:, None]
        X, bound = half @ half.T, dual.bound
    else:
        X, bound = _masked(
            participation, workload=workload, tolerance=tolerance, separation=separation
        )
        bound *= 1.0 if isinstance(participation, Epochs) else float(np.sqrt(most))
    found = dense(triangular(X))
    reached = cost(found, participation, workload=workload)
    start = cost(root, participation, workload=workload)
    if not reached <= start:
        found, reached = dense(root.encoder(n)), start
    return CertifiedFit(found, reached, reached <= bound * (1 + tolerance), bound)


class Dual(NamedTuple):
    """One diagonal certificate: weights q, eigenvectors and roots of (Q^{1/2}AᵀAQ^{1/2})^{1/2}."""

    weights: Array
    vectors: Array
    roots: Array
    diagonal: Array
    bound: float


def _dual_step(A: Array, weights: Array) -> Dual:
    """The certificate of the given weights, and diag X of the strategy that goes with it."""
    from scipy.linalg import eigh

    q = weights / weights.sum()
    scaled = A * np.sqrt(q)
    values, vectors = eigh(scaled.T @ scaled, check_finite=False, driver="evd")
    slack = 4 * len(values) * np.finfo(np.float64).eps * values[-1]
    safe = float(np.sqrt(np.maximum(values - slack, 0.0)).sum())  # rounding cannot inflate it
    roots = np.sqrt(np.maximum(values, slack))  # never zero: they are divided by
    return Dual(q, vectors, roots, (vectors**2 @ roots) / q, safe / math.sqrt(len(q)))


def _normalized_rms(A: Array, dual: Dual) -> float:
    """rms error of the dual's X scaled to unit diagonal: what can be had, with sensitivity one."""
    scale = np.sqrt(dual.weights * dual.diagonal)
    columns = A @ (scale[:, None] * dual.vectors)
    return float(np.sqrt((np.einsum("ij,ij->j", columns, columns) / dual.roots).sum() / len(A)))


def solve_single(n: int, *, workload: Workload, tolerance: float) -> Dual:
    """Weights for one participation whose bound is within the tolerance of what they reach.

    Long runs start from the weights of a run a quarter as long. Returns after MOST_STEPS with what
    there is; the bound is valid at any step.
    """
    weights = np.ones(n)
    if n >= 64:
        shorter = coarser(workload, n, size=n // 4)
        short = solve_single(n // 4, workload=shorter, tolerance=tolerance)
        place = (np.arange(n) + 0.5) / n
        weights = np.interp(place, (np.arange(n // 4) + 0.5) / (n // 4), short.weights)
    A = workload.matrix(n)
    for _ in range(MOST_STEPS):
        dual = _dual_step(A, weights)
        if _normalized_rms(A, dual) <= dual.bound * (1 + tolerance):
            break
        weights = dual.weights * (dual.diagonal / dual.diagonal.max()) ** POWER
    return dual


def _checked_layout(
    participation: Participation, workload: Workload, *, tolerance: float
) -> FitLayout:
    """The layout of a run that is short enough, in which every step counts."""
    positive(tolerance=tolerance)
    found = layout(participation)
    limit = SINGLE_STEPS if found.most == 1 else SEVERAL_STEPS
    if found.steps > limit:
        raise Unsupported(
            f"dense optima are computed for at most {limit} steps here, got "
            f"{found.steps}; use a BLT or a banded strategy"
        )
    if not np.all(workload.rates(found.steps) > 0):
        raise InvalidInput("dense fits need learning rates > 0; got one that is zero")
    return found


def _masked(
    participation: Participation, *, workload: Workload, tolerance: float, separation: int
) -> tuple[Array, float]:
    """(X, bound for sums of one) for columns kept orthogonal."""
    n = participation.steps
    lag = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    if isinstance(participation, Epochs):
        free = (lag % separation != 0) | (lag == 0)
        group = np.arange(n) % separation
    else:
        free = lag < separation
        group = np.arange(n)
    A = workload.matrix(n)
    G = A.T @ A
    rows, columns = np.nonzero(np.tril(free))
    # Off-diagonal entries count twice in every inner product of symmetric matrices.
    weight = np.where(rows == columns, 1.0, np.sqrt(2.0))

    def matrix(x: Array) -> Array:
        Y = np.zeros((n, n))
        Y[rows, columns] = x / weight
        Y[columns, rows] = x / weight
        return Y

    def loss(x: Array) -> tuple[float, Array]:
        Y = matrix(x)
        total = np.bincount(group, weights=np.diagonal(Y))
        try:
            inverse = _inverse(Y)
        except np.linalg.LinAlgError:
            return WALL, np.zeros(len(x))
        scale = np.sqrt(total[group])
        scaled = scale[:, None] * G * scale
        value = float(np.einsum("ij,ij->", scaled, inverse))
        slope = -inverse @ scaled @ inverse
        share = np.bincount(group, weights=np.einsum("ij,ij->i", scaled, inverse)) / total
        slope[np.diag_indices(n)] += share[group]
        return float(np.log(value)), slope[rows, columns] * weight / value

    first = fit_banded(participation, bands=separation, workload=workload).strategy.encoder(n)
    x = np.asarray((first.T @ first)[rows, columns] * weight)
    bound = 0.0
    for _ in range(20):
        x, _, steps = descend(loss, x, most=100)
        Y = matrix(x)
        scale = 1 / np.sqrt(np.bincount(group, weights=np.diagonal(Y))[group])
        X = scale[:, None] * Y * scale
        inverse = _inverse(X)
        W = inverse @ G @ inverse
        bound = max(bound, _certificate(A, W, free=free, group=group))
        upper = np.sqrt(np.einsum("ij,ij->", G, inverse) / n)
        if upper <= bound * (1 + tolerance) or steps < 100:
            break
    return X, bound


def _inverse(X: Array) -> Array:
    """X⁻¹ from its Cholesky factor; LinAlgError when X is not positive definite."""
    from scipy.linalg import cholesky
    from scipy.linalg.lapack import dpotri

    factor = cholesky(X, lower=True, check_finite=False)
    inverse, _ = dpotri(factor, lower=1)
    return np.asarray(np.tril(inverse) + np.tril(inverse, -1).T)


def _certificate(A: Array, W: Array, *, free: NDArray[np.bool_], group: NDArray[np.int_]) -> float:
    """rms of no masked strategy with unit sums is below this; W is X⁻¹AᵀAX⁻¹ near the optimum.

    U keeps W where the mask forces X to zero, and the mean of its diagonal over each sum; then
    tr(UX) = Σ_c v_c for every masked X. If U is not positive semidefinite its off-diagonal part is
    shrunk until it is.
    """
    from scipy.linalg import eigh

    n = len(A)
    mean = np.bincount(group, weights=np.diagonal(W)) / np.bincount(group)
    v = mean[group]
    off = np.where(free, 0.0, W) / np.sqrt(np.outer(v, v))
    lowest = float(eigh(off, eigvals_only=True, subset_by_index=[0, 0])[0])
    if lowest < -1:
        off = off * (1 - 1e-9) / -lowest
    U = np.sqrt(np.outer(v, v)) * (np.eye(n) + off)
    values = eigh(A @ U @ A.T, eigvals_only=True, check_finite=False)
    slack = 4 * n * np.finfo(np.float64).eps * values[-1]
    total = float(np.sqrt(np.maximum(values - slack, 0.0)).sum())
    return total / float(np.sqrt(n * mean.sum()))
