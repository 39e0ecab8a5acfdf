"""Solvers that answer once, behind an estimator: objective perturbation and Frank–Wolfe.

Rows come as the estimator's row map left them. For objective perturbation each is put beside its
constant, (x·3/√p, 1), and shortened on its own to the bound of the loss; for Frank–Wolfe on the l1
ball of the estimator's radius it is clamped entry by entry to [−1, 1]. The answer is told in the
row map's units. Shortening to norm 1 keeps the sign of a margin, hence the class; regressions have
the bound √10, which no row within [−1, 1]^p reaches. The ridge of objective perturbation is the one
at which its determinant costs a share θ of ε,

    Λ = β/(n(e^{θε} − 1)),     θ = 1/10 while R = nμ/√d < 100, 4/10 beyond,

chosen on three tables (breast cancer, make_classification, Elec2); it moves accuracy. θε counts up
to 8: the noise that covers the distance to the exact minimiser grows by 1/Λ. No state.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy import sparse

from noshuffle.convex.arrays import Array
from noshuffle.convex.loss_record import Loss, fit_into
from noshuffle.convex.schedule import LENGTH
from noshuffle.convex.solvers.base import Solution
from noshuffle.convex.solvers.domains import L1Ball
from noshuffle.convex.solvers.frank_wolfe_full import frank_wolfe_full
from noshuffle.convex.solvers.objective_perturbation import objective_perturbation
from noshuffle.errors import Unsupported

#: Above this, Newton's method on a dense Hessian is no longer reasonable.
MOST_COLUMNS = 2000
#: What the determinant costs at most: a smaller ridge gains nothing.
_MOST_SHARE = 8.0


def share_of_epsilon(*, rows: int, size: int, mu: float) -> float:
    """θ of the docstring."""
    return 0.1 if rows * mu / math.sqrt(size) < 100 else 0.4


def tilted(
    loss: Loss,
    rows: Any,
    labels: Array,
    *,
    fit_intercept: bool,
    mu: float,
    **settings: Any,
) -> tuple[Array, Solution]:
    """(coefficients, intercept last) by objective perturbation."""
    x = rows.toarray() if sparse.issparse(rows) else rows
    n, p = x.shape
    if p > MOST_COLUMNS:
        raise Unsupported(
            f"solver='objective' has at most {MOST_COLUMNS} columns, got {p}; use solver='gd'"
        )
    scale = LENGTH / math.sqrt(p)
    unit = fit_into(_beside_one(x * scale, fit_intercept), bound=loss.feature_bound) * (1 - 1e-12)
    share = share_of_epsilon(rows=n, size=unit.shape[1], mu=mu) * settings["epsilon"]
    ridge = loss.smoothness / (n * math.expm1(min(share, _MOST_SHARE)))
    found = objective_perturbation(loss, unit, labels, ridge=ridge, **settings)
    return _told(found.weights, p, scale, fit_intercept), found


def chosen_vertices(
    loss: Loss,
    rows: Any,
    labels: Array,
    *,
    fit_intercept: bool,
    radius: float,
    **settings: Any,
) -> tuple[Array, Solution]:
    """(coefficients, intercept last) of l1 norm at most `radius` by private Frank–Wolfe."""
    x = rows.toarray() if sparse.issparse(rows) else rows
    table = np.clip(_beside_one(x, fit_intercept), -1.0, 1.0)
    found = frank_wolfe_full(loss, table, labels, domain=L1Ball(radius), **settings)
    return _told(found.weights, x.shape[1], 1.0, fit_intercept), found


def _beside_one(x: Array, fit_intercept: bool) -> Array:
    """Rows beside their constant."""
    out: Array = np.asarray(x, dtype=np.float64)
    return np.hstack([out, np.ones((len(x), 1))]) if fit_intercept else out


def _told(w: Array, p: int, scale: float, fit_intercept: bool) -> Array:
    return np.append(w[:p] * scale, w[p] if fit_intercept else 0.0)[None, :]
