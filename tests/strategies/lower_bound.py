"""What no strategy can beat: certified lower bounds on rms error × sensitivity.

Let X = CᵀC and U a positive semidefinite matrix with tr(UX) <= sensitivity² for every C. Then

    n·rms² · sensitivity² >= tr(AᵀA X⁻¹)·tr(UX) >= ‖A U^{1/2}‖²_tr        (Cauchy–Schwarz),

so every such U is a certificate. One is had by taking an allowed pattern of steps at random and
giving its steps random signs: the average of ‖C u‖² is tr(UX) and cannot exceed the maximum. Here

    U = Σ_{r,π} w_{rπ} E_π M_r E_πᵀ,     w >= 0,  Σ w = 1,

E_π the columns of the identity at the steps of π and M_r = a_r^{|l−m|} the correlation of the
signs of a two-state Markov chain (a = 0 independent, a = 1 all equal). The bound is concave in w;
it is raised by w ← w·g^1.6, g_{rπ} = tr(X E_π M_r E_πᵀ) / tr(UX). Patterns have equal gaps. For one
participation it is the certificate of `fit_dense`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh

from noshuffle.participation import Participation
from noshuffle.strategies.fit_dense import POWER, fit_dense
from noshuffle.strategies.fit_forms import layout
from noshuffle.strategies.recipe import Array
from noshuffle.strategies.workload import Workload, prefix

#: Correlations of neighbouring signs that are mixed.
SIGNS = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0)
#: Rounds of the fixed point for several participations, at most.
_ROUNDS = 150


def patterns(steps: int, *, separation: int, most: int) -> NDArray[np.intp]:
    """Patterns with equal gaps, one a row, as long as possible; `steps` stands for no step."""
    starts = np.arange(max(separation, steps - (most - 1) * separation))
    grid = starts[:, None] + separation * np.arange(most)
    return np.asarray(np.minimum(grid[starts < steps], steps), dtype=np.intp)


def rms_lower_bound(
    participation: Participation, *, workload: Workload | None = None, tolerance: float = 5e-4
) -> float:
    """A number that rms error × sensitivity of no strategy, of any form, can be below."""
    workload = workload or prefix()
    n, separation, most = layout(participation)
    if most == 1:
        return fit_dense(participation, workload=workload, tolerance=2 * tolerance).bound
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
        values, vectors = eigh(A @ U @ A.T, check_finite=False, driver="evd")
        slack = 4 * n * np.finfo(np.float64).eps * values[-1]
        safe = float(np.sqrt(np.maximum(values - slack, 0.0)).sum())
        roots = np.sqrt(np.maximum(values, slack))
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
