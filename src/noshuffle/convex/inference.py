"""Confidence intervals of a linear model that full-batch descent released: noise and sampling.

Beside its gradients, "gd" releases in its last readings (`inference=True`), as one more vector of
norm at most the clip norm and covered by the same statement, per row

    (svec(H_i)/C_H, svec(J_i)/C_J, [clipped])·c/√2
    H_i = w_i φ''(s_i)[not clipped]·x̃x̃ᵀ,    J_i = c_i c_iᵀ,    w_i = min(1, `reach`/‖x̃‖²)

at the answer, x̃ = (x', 1) the standardised row and c_i its clipped gradient; a row that is clipped
has no H_i, so that its mark costs nothing. Rows longer than `reach` weigh less in gradients, H and
J alike: a weight by x alone leaves the coefficients of a model that is right where they are, and
nothing is cut off H, whose inverse makes the widths. There are also m noisy gradients
g̃_t = ∇F(θ̄) + ξ_t at the point θ̄ that the descent (with half of the gradients) ended at. To first
order ∇F(θ) = H(θ − θ*), so

    θ̃ = θ̄ − Ĥ⁻¹·mean g̃_t = θ* − H⁻¹·mean ξ_t

whatever the path was: one Newton step takes out what the descent has not reached yet, and the law
of the rest is known. θ̃ is the answer then (`coef_`). With F the mean over n rows, θ* scatters
around the population's minimiser:

    cov(θ̃) = Ĥ⁻¹(σ²/m·I)Ĥ⁻¹   (noise)   +   Ĥ⁻¹(Ĵ/n)Ĥ⁻¹   (sampling, Huber's sandwich)

Noise N of Ĥ moves θ̃ by Ĥ⁻¹N(θ̄ − θ*), whose size is estimated by Ĥ⁻¹·mean g̃_t and put into the
first part. "sampling=False" leaves the second part out: then the interval is about the answer that
this table would give without noise.

Ĵ is noisy, too. Along a, with u = Ĥ⁻¹a, the sampling part uᵀĴu/n has a deviation of s = e_J‖u‖²/n
for noise of e_J in an entry of svec(Ĵ), and a variance v that is too small misses more than one
that is too large gains. So v counts as an estimate of ν = 2v²/s² degrees of freedom (Satterthwaite
1946) and quantiles are Student's: the coverage is right again to second order in s/v. Noise of Ĥ
moves v less (CLEAR), and makes Ĥ⁻¹ too large on average.

A ridge (penalty="l2") is part of gradients and of Ĥ, and then
of the target. The target is the minimiser of the risk as it is clipped: where gradients are clipped
often, it is not the maximum of the likelihood. Classifiers clip at no less than `free_clip` then,
which no row of usual length meets; where the released share of clipped rows is above `FEW` beyond
its noise, `ClippedRows` warns: then intervals are right of errors that are symmetric around their
mean, and of no others. Where noise reaches a third of the least eigenvalue of Ĥ, there is no
interval. Measured coverage: benchmarks/convex_intervals.py. No state.

>>> one, limits = np.ones((1, 1)), {"limit": 4.0, "outer_limit": 1.0}
>>> spread_sum(one, one, np.ones(1), clip=1.0, **limits).round(3).tolist()
[0.177, 0.707, 0.0]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.stats import t as student
from sklearn.utils.validation import check_is_fitted

from noshuffle.convex.arrays import Array
from noshuffle.convex.moments import noise_norm, pack, unpack_square
from noshuffle.errors import InvalidInput, Unsupported, open_unit
from noshuffle.user_warnings import warn_user

#: How far the least eigenvalue of the curvature must lie above its noise.
CLEAR = 3.0
NOISE, BOTH = "noise", "noise and sampling"
#: Share of clipped rows up to which nothing is said of them.
FEW = 0.01


class ClippedRows(UserWarning):
    """Many gradients were clipped: intervals are of the minimiser of the clipped risk."""


def reach(columns: int) -> float:
    """Squared length of a standardised row (10 on average) up to which curvature counts in full:
    two deviations of normal columns more."""
    return 10.0 + 18.0 * math.sqrt(2.0 / columns)


def free_clip(slope: float, columns: int) -> float:
    """Clip norm that leaves gradients of rows up to `reach` alone, for slopes up to `slope`."""
    return slope * math.sqrt(reach(columns))


def spread_sum(
    rows: Array,
    gradients: Array,
    bends: Array,
    *,
    clip: float,
    limit: float,
    outer_limit: float,
    is_clipped: Array | None = None,
) -> Array:
    """Σ (svec(H_i)/C_H, svec(J_i)/C_J, [clipped])·c/√2, with C_H = `limit`, C_J = `outer_limit`.

    Guarantees: each row's part is at most c = `clip` for `gradients` that are; a row whose
    curvature (or square of the gradient) is above its limit is scaled down to it, and only rows
    without curvature (bends = 0) count as clipped, so that two of the three parts are not zero.
    """
    sizes = bends * np.einsum("ij,ij->i", rows, rows)
    with np.errstate(divide="ignore", invalid="ignore"):
        kept = np.where(sizes > limit, limit / sizes, 1.0)
    curved = (rows * (bends * kept)[:, None]).T @ rows
    squares, most = np.einsum("ij,ij->i", gradients, gradients), outer_limit
    short = gradients * np.sqrt(np.minimum(1.0, most / np.maximum(squares, most)))[:, None]
    outer = short.T @ short
    share = clip / math.sqrt(2.0) * (1 - 2.0**-40)
    clipped = 0.0 if is_clipped is None else float(np.sum(is_clipped & (bends == 0)))
    return np.concatenate([pack(curved) / limit, pack(outer) / most, [clipped]]) * share


@dataclass(frozen=True, eq=False)
class Law:
    """θ̃ and the two parts of its covariance; `error` says why there is none.

    `sampling` is None where nothing that was released tells it ("sums"). `unsure`: aᵀ(unsure)a is
    the deviation of aᵀ(sampling)a. `clipped` is the share of clipped rows, less twice its noise.
    """

    centre: Array
    noise: Array
    sampling: Array | None
    error: str = ""
    clipped: float = 0.0
    unsure: Array | None = None

    def mapped(self, matrix: Array) -> Law:
        """The law of matrix @ θ̃."""
        noise, sampling, unsure = (
            None if part is None else matrix @ part @ matrix.T
            for part in (self.noise, self.sampling, self.unsure)
        )
        assert noise is not None
        return Law(matrix @ self.centre, noise, sampling, self.error, self.clipped, unsure)

    def covariance(self, sampling: bool) -> Array:
        """Of noise, or of both."""
        if not sampling:
            return self.noise
        if self.sampling is None:
            raise Unsupported(
                "solver 'sums' releases nothing of the residuals, so that sampling errors are not "
                "known; give sampling=False, or fit with solver='gd'"
            )
        return np.asarray(self.noise + self.sampling)

    def along(self, rows: Array, *, level: float, sampling: bool) -> tuple[Array, Array]:
        """Deviations of rows @ θ̃, and what they are multiplied by for intervals of that level."""

        def form(part: Array) -> Array:
            return np.asarray(np.maximum(np.einsum("ij,jk,ik->i", rows, part, rows), 0.0))

        variance, freedom = form(self.covariance(sampling)), np.full(len(rows), math.inf)
        if sampling and self.unsure is not None:
            with np.errstate(divide="ignore", invalid="ignore"):
                known = 2.0 * (variance / form(self.unsure)) ** 2
            freedom = np.where(np.isnan(known), math.inf, known)
        return np.sqrt(variance), np.asarray(student.ppf(0.5 + level / 2, freedom))


def hidden_words(least: float, hidden: float) -> str:
    """Why there is no interval."""
    return (
        f"the noise hides the curvature of some direction (least eigenvalue {least:.2g}, "
        f"noise {hidden:.2g}); use more rows, fewer columns or a larger epsilon"
    )


def law_of(
    released: Array,
    *,
    q: int,
    clip: float,
    limit: float,
    outer_limit: float,
    deviation: float,
    point: Array,
    gradient: Array,
    gradient_deviation: float,
    rows: int,
    gain: float,
    ridge: Array | float = 0.0,
) -> Law:
    """From released means: of `spread_sum` (noise of `deviation` in an entry), of gradients.

    `ridge`: strength of the penalty along every coordinate; `gradient` has its part already.
    """
    half, unit = q * (q + 1) // 2, math.sqrt(2.0) / clip
    curved = unpack_square(released[:half], q) * unit * limit * gain
    curved += np.diag(np.broadcast_to(ridge, q))
    outer = unpack_square(released[half : 2 * half], q) * unit * outer_limit * gain**2
    clipped = max(0.0, float(released[2 * half]) - 2.0 * deviation) * unit
    entry = deviation * unit * limit * gain
    hidden = noise_norm(entry, q)
    values, basis = np.linalg.eigh(curved)
    if not values[0] > CLEAR * hidden:
        why = hidden_words(values[0], hidden)
        if clipped > 0.5:
            why += f"; {clipped:.0%} of the rows are clipped and have none: use a larger clip_norm"
        return Law(point, np.zeros((q, q)), np.zeros((q, q)), why)
    inverse = (basis / values) @ basis.T
    spread, axes = np.linalg.eigh(outer)
    outer = (axes * np.maximum(spread, 0.0)) @ axes.T
    step = inverse @ gradient
    variance = gradient_deviation**2 + entry**2 * float(step @ step)
    return Law(
        point - step,
        variance * inverse @ inverse,
        inverse @ outer @ inverse / rows,
        clipped=clipped,
        unsure=deviation * unit * outer_limit * gain**2 / rows * inverse @ inverse,
    )


class Intervals(NamedTuple):
    """Of every coefficient, the intercept last; `covers` says which errors are in the width."""

    estimate: Array
    low: Array
    high: Array
    deviation: Array
    covers: str


class Inference:
    """`intervals` and `predict_interval` of estimators that were fitted with inference=True."""

    if TYPE_CHECKING:
        inference: bool
        _law: Law
        _rows: Any

        def _in_data_units(self, weights: Array) -> tuple[Array, Any]: ...
        def _link(self, margins: Array) -> Array: ...
        def _rows_of(self, X: Any) -> Any: ...

    def intervals(self, level: float = 0.95, *, sampling: bool = True) -> Intervals:
        """Confidence intervals of coefficients and intercept, from released numbers alone.

        `sampling`: cover the population's coefficients (noise and sampling), or with False those
        that this table has without noise.
        """
        law = self._fitted_law(level)
        zero = self._flat(np.zeros((1, len(law.centre))))
        ones = np.eye(len(law.centre))
        matrix = np.column_stack([self._flat(one[None]) - zero for one in ones])
        deviation, factor = law.along(matrix, level=level, sampling=sampling)
        estimate, reach = zero + matrix @ law.centre, factor * deviation
        return Intervals(
            estimate, estimate - reach, estimate + reach, deviation, BOTH if sampling else NOISE
        )

    def predict_interval(self, X: Any, level: float = 0.95, *, sampling: bool = True) -> Array:
        """(low, high) for what is expected of every row: a mean, or the second class's chance."""
        law = self._fitted_law(level)
        rows = np.hstack([x := self._rows_of(X), np.ones((x.shape[0], 1))])
        deviation, factor = law.along(rows, level=level, sampling=sampling)
        middle, reach = rows @ law.centre, factor * deviation
        return np.column_stack([self._link(middle - reach), self._link(middle + reach)])

    def _fitted_law(self, level: float) -> Law:
        check_is_fitted(self, "privacy_")
        open_unit(level=level)
        if not hasattr(self, "_law"):
            raise InvalidInput("intervals need inference=True, given before fit")
        if self._law.error:
            raise Unsupported(f"there is no interval: {self._law.error}")
        if self._law.clipped > FEW:
            warn_user(
                f"{self._law.clipped:.1%} of the rows are clipped: intervals are of the minimiser "
                "of the clipped risk, the population's where errors are symmetric around their "
                "mean; otherwise give a larger clip_norm",
                ClippedRows,
            )
        return self._law

    def _flat(self, weights: Array) -> Array:
        coef, intercept = self._in_data_units(weights)
        return np.append(np.ravel(coef), intercept)
