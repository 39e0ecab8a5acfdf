"""Loss: a loss of a linear model as a record, with the bounds that privacy needs.

    f(w; x, y) = φ(⟨x, w⟩, y) + (ridge/2)‖w‖²          ∇f = φ'(⟨x, w⟩, y)·x + ridge·w

B (`feature_bound`) bounds every row in the norm of order `order` (2, or infinity for the l1
geometry) of its entries, or of other `parts` (groups, singular values: `optim.norms`), Y
(`label_bound`) the labels, which begin at `least_label` where a bound on φ' needs that, R
(`radius`) the weights in the dual norm where it needs one. Then the data part of a gradient is at
most `lipschitz` = |φ'|·B in the norm of the rows, and it changes with w by at most `smoothness` =
φ''·B² per unit. The ridge is no function of the data: it cancels in every difference of neighbours
and is left out of both numbers.

`losses` has the ones that are built in; `require` is what solvers ask of them. No state.

>>> fit_into(np.array([[3.0, 4.0], [0.3, 0.4]]), bound=1.0)
array([[0.6, 0.8],
       [0.3, 0.4]])
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from noshuffle.clipping.factor import clip_factor
from noshuffle.convex.arrays import Array, real_array
from noshuffle.errors import InvalidInput, Unsupported, non_negative, positive
from noshuffle.optim.norms import ENTRIES, Decomposition, Norm

_Scalar = Callable[[Array, Array], Array]

#: Rounding that a row may exceed its bound by; ε moves by as little.
SLACK = 1e-12


@dataclass(frozen=True, kw_only=True)
class Loss:
    """φ with its first two derivatives and their bounds; the table of `losses` has them.

    Guarantees: for rows and labels that `check` accepts, and weights within `radius` where there
    is one, ‖∇f − ridge·w‖ ≤ `lipschitz` in the norm of order `order`. NaN, infinity, complex
    numbers and objects in the data are refused by `check`, and so are slopes of a loss of one's
    own that are not real numbers, one for each row. `is_monotone` says that φ' keeps its sign for
    a given label, whatever the weights; objective perturbation needs less noise then.
    """

    name: str
    slope_bound: float
    curvature_bound: float
    feature_bound: float = 1.0
    label_bound: float = 1.0
    least_label: float = -math.inf
    order: float = 2.0
    parts: Decomposition = ENTRIES
    radius: float = math.inf
    ridge: float = 0.0
    weak_curvature: float = 0.0
    is_classifier: bool = False
    is_monotone: bool = False
    value_fn: _Scalar = field(repr=False, compare=False)
    slope_fn: _Scalar = field(repr=False, compare=False)
    curvature_fn: _Scalar = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        positive(feature_bound=self.feature_bound, label_bound=self.label_bound)
        non_negative(ridge=self.ridge)
        _ = self.row_norm  # refuses an order below 1

    @property
    def row_norm(self) -> Norm:
        """The norm in which rows, and so the data part of gradients, are bounded."""
        return Norm(self.order, self.parts)

    @property
    def lipschitz(self) -> float:
        """Bound on the data part of one row's gradient."""
        return self.slope_bound * self.feature_bound

    @property
    def smoothness(self) -> float:
        """Bound on the Hessian of the data part; infinite where φ has a kink."""
        return self.curvature_bound * self.feature_bound**2

    @property
    def weak_convexity(self) -> float:
        """ϱ such that f + (ϱ/2)‖w‖² is convex; 0 for convex losses."""
        return max(0.0, self.weak_curvature * self.feature_bound**2 - self.ridge)

    @property
    def is_convex(self) -> bool:
        return self.weak_curvature == 0.0

    @property
    def is_smooth(self) -> bool:
        return math.isfinite(self.curvature_bound)

    def values(self, w: Array, rows: Array, labels: Array) -> Array:
        """f of every row."""
        penalty = 0.5 * self.ridge * float(w @ w) if self.ridge else 0.0
        return self.value_fn(_scores(rows, w), labels) + penalty

    def risk(self, w: Array, rows: Array, labels: Array) -> float:
        """The mean of f. Not private."""
        return float(np.mean(self.values(w, rows, labels)))

    def slopes(self, w: Array, rows: Array, labels: Array) -> Array:
        """φ' of every row: the data part of its gradient is slope × row."""
        return self._real(self.slope_fn(_scores(rows, w), labels), rows)

    def curvatures(self, w: Array, rows: Array, labels: Array) -> Array:
        """φ'' of every row: the data part of its Hessian is curvature × row rowᵀ."""
        return self._real(self.curvature_fn(rows @ w, labels), rows)

    def _real(self, found: Any, rows: Array) -> Array:
        """What a derivative gave for every row, refused unless it is one real number each."""
        if getattr(found, "dtype", None) != np.float64:
            found = real_array(**{f"derivatives of the loss {self.name}": found})
        if found.shape != (len(rows),):
            raise InvalidInput(
                f"the loss {self.name} must give one derivative for each of {len(rows)} rows, got "
                f"shape {found.shape}"
            )
        return np.asarray(found)

    def gradients(self, w: Array, rows: Array, labels: Array) -> Array:
        """∇f of every row, rows × dimension."""
        return self.slopes(w, rows, labels)[:, None] * rows + self.ridge * w

    def data_gradient(self, w: Array, rows: Array, labels: Array) -> Array:
        """Sum over rows of the data part of ∇f (the ridge left out): what privacy is about."""
        slopes = self.slopes(w, rows, labels)
        if len(rows) and rows.strides[0] == 0:  # one row seen many times: no copies of it
            return np.asarray(slopes.sum() * rows[0])
        return np.asarray(slopes @ rows)

    def gradient(self, w: Array, rows: Array, labels: Array) -> Array:
        """The mean of ∇f, ridge included. Not private."""
        return self.data_gradient(w, rows, labels) / len(rows) + self.ridge * w

    def check(self, rows: Any, labels: Any) -> tuple[Array, Array]:
        """Rows and labels as arrays, refused where they break a bound (no data is changed)."""
        x = real_array(rows=rows)
        if x.ndim != 2 or not len(x) or not x.shape[1]:
            raise InvalidInput(f"rows must be a table with entries, got shape {x.shape}")
        y = np.zeros(len(x)) if labels is None else real_array(labels=labels)
        if y.shape != (len(x),):
            raise InvalidInput(f"labels must be one per row ({len(x)}), got shape {y.shape}")
        distinct = x[:1] if x.strides[0] == 0 else x  # one row seen many times
        worst = float(np.max(self.row_norm.rows(distinct)))
        if not worst <= self.feature_bound * (1 + SLACK):
            raise InvalidInput(
                f"every row must have norm at most feature_bound = {self.feature_bound:g}, got "
                f"{worst:g}; scale rows with losses.fit_into, one by one"
            )
        if self.is_classifier and not np.all(np.abs(y) == 1):
            raise InvalidInput(f"labels of {self.name} must be -1 or 1, got others")
        least = max(self.least_label, -self.label_bound)
        slack = SLACK * self.label_bound
        if not np.all((least - slack <= y) & (y <= self.label_bound + slack)):
            raise InvalidInput(
                f"labels of {self.name} must lie within [{least:g}, {self.label_bound:g}], got "
                "others; clip them, one by one"
            )
        return x, y


def _scores(rows: Array, w: Array) -> Array:
    if len(rows) and rows.strides[0] == 0:
        return np.full(len(rows), float(rows[0] @ w))
    return np.asarray(rows @ w)


def fit_into(
    rows: Array, *, bound: float, order: float = 2.0, parts: Decomposition = ENTRIES
) -> Array:
    """Each row shrunk on its own to norm at most `bound`: costs no privacy, measures nothing.

    A row that is too long for a number becomes zero; one with a NaN keeps it.
    """
    positive(bound=bound)
    norms = Norm(order, parts).rows(rows)[:, None]
    with np.errstate(invalid="ignore"):
        short = rows * clip_factor(norms, bound, slack=0.0)
    return np.where(np.isinf(norms), 0.0, short)


def require(
    loss: Loss,
    solver: str,
    *,
    convex: bool = True,
    smooth: bool = False,
    radius: float = 0.0,
    everywhere: bool = False,
    norm: Norm | None = None,
    d: int = 1,
) -> None:
    """Refuse a loss that misses a condition of a solver's proof."""
    if not math.isfinite(loss.lipschitz):
        raise InvalidInput(f"{solver} needs a Lipschitz loss; build {loss.name} with a radius")
    if convex and not loss.is_convex:
        raise Unsupported(f"{solver} needs a convex loss, got {loss.name}; use weakly_convex")
    if smooth and not loss.is_smooth:
        raise Unsupported(
            f"{solver} needs a smooth loss, got {loss.name}; use smoothed_hinge or huber"
        )
    if everywhere and not math.isinf(loss.radius):
        raise Unsupported(
            f"{solver} leaves every ball, and {loss.name} is Lipschitz only within one; "
            "use huber or logistic, or a bounded domain"
        )
    if radius > loss.radius * (1 + SLACK):
        raise InvalidInput(
            f"the loss is Lipschitz within radius {loss.radius:g}, the domain has {radius:g}; "
            f"build {loss.name} with radius={radius:g}"
        )
    if norm is not None and loss.row_norm.times(norm, d) > 1 + SLACK:
        raise InvalidInput(
            f"{solver} needs rows bounded in the norm of order {norm.p:g} or less of "
            f"{norm.parts!r}, the loss bounds order {loss.order:g} of {loss.parts!r}; build it "
            f"with order={norm.p:g} and the same parts"
        )
