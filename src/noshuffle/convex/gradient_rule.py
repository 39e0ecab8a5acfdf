"""GradientRule: full-batch gradient descent on columns that it standardises first, both private.

A table that is there as a whole is read T times, each time as one batch, and every reading leaves
by a release (independent noise, T releases of norm c: exactly μ = √T/z). The first s readings
release the sums of (x, x²) over the columns, by which rows are standardised to x' of norm 3 or so
(`standardise`), the others clipped gradients:

    v ← βv + ḡ,   θ ← θ − ηv,   ḡ = mean of clip(r ⊗ (x', 1)) + noise,   β = 0.9
    answer: the mean of θ over the second half of the steps

Of two classes the first released gradient tells the share π̂ of the rarer one
(`schedule.rarer_share`): where `eases`, `schedule.easing` says what follows from it.

Where units have several rows, one reading before them counts rows by their weights: of n rows n̂
were released, and means are multiplied by n/n̂.
Clipped slopes make predictions of models of log y too small: as many readings as there are of
columns correct the intercept at the end (`calibration`). Weights of rows (`weighting`) multiply
clipped gradients.

All of it is post-processing: the x' of a row depends on the row and on what was released, and its
gradient is clipped afterwards. Clipped gradients of linear models are gradients of another convex
loss (Song, Steinke, Thakkar, Thakurta 2021).
Regressions look where their targets lie, take units in which these are of order one, and have an
intercept that is a running mean, or a quantile (`target_rule`). They follow what a velocity has
beyond its noise (`shrinkage`; of deviation σ√(1 + β² + … + β^{2(t−1)})) in every step: otherwise
predictions lie far from a mean that is known, since steps that follow all of the noise add
ησ²/(2(1 − β)) to the variance of predictions for every column, whatever its curvature.

`schedule` says how many steps are worth their noise. Sparse rows are taken as they are, and models
without an intercept are scaled but not centred.

State: iterate, velocity, sum of the iterates of the second half, what the first readings released.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from noshuffle.clipping.factor import clip_factor
from noshuffle.convex.arrays import CLIP_SLACK, Array, Targets
from noshuffle.convex.calibration import calibration_sum, growth
from noshuffle.convex.rows import squared_norms
from noshuffle.convex.schedule import easing, rarer_share
from noshuffle.convex.shrinkage import kept_share
from noshuffle.convex.standardise import column_sums, scaling, typical_norm
from noshuffle.convex.target_rule import TargetRule
from noshuffle.convex.target_window import BINS, bins_of

MOMENTUM = 0.9


@dataclass(eq=False, kw_only=True)
class GradientRule(TargetRule):
    """Iterate and velocity; `readings` of the columns come first (0: rows are taken as they are).

    Guarantees: what a row adds to a sum has norm at most `clip_norm`, in readings of the columns
    and in gradients; rows that are not finite add nothing. With `has_many_rows` the same holds for
    all rows of a unit together: each adds at most its share weight/most_weight of it.
    """

    @property
    def weights(self) -> Array:
        theta = self._answer.copy()
        theta[:, -1] += self._shift / self._stretch
        return self._unscaled(theta)

    def _unscaled(self, theta: Array) -> Array:
        """Weights for rows as they come, from those for standardised ones."""
        coef = theta[:, :-1] * self._scale * self._stretch
        intercept = theta[:, -1:] * self._stretch + self._origin
        return np.hstack([coef, intercept - coef @ self._centre[:, None]])

    def clipped_sum(self, x: Any, y: Targets, weight: Array | None = None) -> Array:
        out, there = np.zeros(self.size), np.ones(x.shape[0])
        if weight is not None:
            there *= weight / self.most_weight if self.has_many_rows else weight > 0
        if self._count < self._counting:
            counted = np.bincount(np.zeros(len(y), dtype=np.int64), there, 1)
            out[:1] = self.clip_norm * (1 - CLIP_SLACK) * counted
        elif self._count < self._lead_in:
            held = np.bincount(bins_of(self._in_units(y)), there, BINS)
            out[:BINS] = self.clip_norm * (1 - CLIP_SLACK) * held
        elif self._count < self._begin:
            out[: self._columns] = column_sums(x, there, clip_norm=self.clip_norm)
        elif self.balances and self._count >= self._steps - self.balances:
            out[:2] = self._balance_sum(x, y, weight)
        else:
            gradient = self._gradient(x, y, weight)
            out[: gradient.size] = gradient.ravel()
        return out

    @property
    def _answer(self) -> Array:
        return self._average / self._taken if self._taken else self._theta

    def _gradient(self, x: Any, y: Targets, weight: Array | None) -> Array:
        rows, residual = self._residuals(x, y, weight)
        gradient = np.zeros_like(self._theta)
        gradient[:, :-1] = (rows.T @ residual).T
        if self.fit_intercept or self._is_alone:
            gradient[:, -1] = residual.sum(axis=0)
        return gradient

    def _residuals(self, x: Any, y: Targets, weight: Array | None) -> tuple[Any, Array]:
        """Standardised rows and clipped residuals."""
        with np.errstate(over="ignore", invalid="ignore"):
            rows, far = self._standardised(x)
            margins = rows @ self._theta[:, :-1].T + self._theta[:, -1]
            if self._is_alone:
                residual = self._target_slopes(y)[:, None]
            elif self.loss.is_classifier:
                residual = self.loss.residual(margins, y)
            else:
                margins = self._origin + self._stretch * margins
                residual = self._steep * self.loss.residual(margins, y)
            if self.length == 0 and self.loss.is_classifier:
                residual *= 2.0  # at weights of zero they are half of what clipping lets through
            squares = np.ones(len(y))
            if not self._is_alone:
                squares = squared_norms(rows) + float(self.fit_intercept)
            norms = np.sqrt(np.einsum("ij,ij->i", residual, residual)) * np.sqrt(squares)
            factor = clip_factor(norms, self.clip_norm / self.most_weight, slack=CLIP_SLACK)
            factor = factor if weight is None else factor * weight
            residual *= factor[:, None]
        far |= ~np.isfinite(residual).all(axis=1)
        residual[far] = 0.0
        return rows, residual

    def _standardised(self, x: Any) -> tuple[Any, Any]:
        """Rows as the descent reads them, and which of them are too long for a number."""
        far = np.zeros(x.shape[0], dtype=bool)
        if self.length == 0 or self._is_alone:
            return np.zeros((x.shape[0], self.features)), far
        rows = x
        if self.readings:
            rows = (x - self._centre) * self._scale
            far = ~np.isfinite(rows).all(axis=1)
            rows[far] = 0.0  # 0·∞ is not 0
        return rows, far

    def _balance_sum(self, x: Any, y: Targets, weight: Array | None) -> Array:
        """What `calibration` needs, a row as long as the clip norm at most."""
        with np.errstate(over="ignore", invalid="ignore"):
            rows, far = self._standardised(x)
            margins = (rows @ self._answer[:, :-1].T)[:, 0] + self._answer[0, -1]
            margins = self._origin + self._stretch * margins
        there = None if weight is None else weight / self.most_weight
        return self._balance_unit * calibration_sum(y, np.where(far, np.nan, margins), there)

    def update(self, mean: Array, *, step: int) -> None:
        self._count += 1
        if self._count <= self._counting:
            rows = mean[0] * (self._phase.batch_size * self._share / self.clip_norm)
            self._counted = float(rows)
            self._gain = self._filled
            return
        if self._count <= self._lead_in:
            self._bins += mean[:BINS] * (self._phase.batch_size * self._share / self.clip_norm)
            if self._count == self._lead_in:
                noise = self._phase.plan.noise_multiplier * self._share / math.sqrt(self.windows)
                known = {"rows": self._phase.batch_size / self._filled, "deviation": noise}
                self._use_counts(self._bins / self.windows, **known)
            return
        if self._count <= self._begin:
            unit = self._filled * self._share * typical_norm(self.features) / self.clip_norm
            self._moments += mean[: self._columns] * unit
            if self._count == self._begin:
                self._standardise()
            return
        if self.balances and self._count > self._steps - self.balances:
            self._gap = self._gap + mean[:2] / (self.balances * self._balance_unit)
            if self._count == self._steps:
                noise = self._deviation / (self._balance_unit * math.sqrt(self.balances))
                told = self._origin + self._stretch * self._answer[0, -1]
                self._shift = growth(self._gap, intercept=told, deviation=noise)
            return
        gradient = mean[: self._theta.size].reshape(self._theta.shape) * self._gain
        if self.eases and self._count == self._before + 1:
            most = {"length": self._row_length, "clip_norm": self.clip_norm / self.most_weight}
            rarer = rarer_share(float(gradient[0, -1]), **most)
            noise = 0.5 - rarer_share(self._gain * self._deviation, **most)
            part, self._is_scarce = easing(rarer, worth=self.worth, deviation=noise)
            self.learning_rate = self.rate * part
        if self._count <= self._before:
            noise = self._gain * self._deviation / self._mean_unit
            self._read_targets(float(gradient[0, -1]) / self._mean_unit, deviation=noise)
            if self._count == self._before:
                self._sum_up()
            return
        rate, own = self.learning_rate, self._ridge
        slope = float(gradient[0, -1])
        gradient += own * self._theta
        gradient[:, -1] *= float(self.fit_intercept)
        self._velocity = MOMENTUM * self._velocity + gradient
        # Steps along a column are shorter where its penalty is so large that they would diverge.
        move = self._velocity
        if self._is_scarce or not self.loss.is_classifier:
            seen = self._visible_share(self._velocity[:, :-1])
            move = move * np.append(np.full(self.features, seen), 1.0)
        if self._is_running:
            move[:, -1] = 0.0
        self._theta = self._theta - rate / np.maximum(1.0, rate * own) * move
        if self._is_running:
            self._move_intercept(slope)
        self._sum_up()

    def _sum_up(self) -> None:
        """Iterates of the second half."""
        if 2 * self._taken_steps > self._descents:
            self._average, self._taken = self._average + self._theta, self._taken + 1

    def _visible_share(self, velocity: Array) -> float:
        """What of a velocity is no noise."""
        steps = max(1, self._count - self._before)
        squares = (1 - MOMENTUM ** (2 * steps)) / (1 - MOMENTUM**2)
        deviation = self._gain * self._deviation * math.sqrt(squares)
        return kept_share(velocity, deviation)

    @property
    def _ridge(self) -> Array:
        """Strength of the penalty along standardised columns; the intercept has none."""
        own = self.ridge * self._steep * self._stretch
        return np.append(own * self._scale**2, 0.0)

    def _standardise(self) -> None:
        """Centre and scale of the columns from what was released."""
        mean, square = np.split(self._moments / self.readings, 2)
        noise = self._phase.plan.noise_multiplier * typical_norm(self.features) * self._share
        noise *= self._filled / (self._phase.batch_size * math.sqrt(self.readings))
        self._centre, self._scale, self._row_length = scaling(
            mean, square, noise=noise, length=self.length, is_centred=self.fit_intercept
        )
