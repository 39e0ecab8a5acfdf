"""GradientFit: how "gd" reads a table: how many readings of which kind, and the rule that has them.

All of it follows from settings, the shape of the table, ε and δ. In order: two kinds that find
bounds (`ranges`), a count of rows, windows of targets, columns, gradients, and at the end what the
calibration of models of log y needs. State: the schedule of the fit.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

from noshuffle.accounting import gaussian
from noshuffle.convex.gradient_rule import GradientRule
from noshuffle.convex.margins import MarginLoss
from noshuffle.convex.mean_first import mean_steps
from noshuffle.convex.quantile_search import QUESTIONS
from noshuffle.convex.ranges import is_private
from noshuffle.convex.schedule import LENGTH, LOGISTIC_RATE, Schedule, steps_for
from noshuffle.convex.target_window import can_be_seen
from noshuffle.errors import positive, whole


class GradientFit:
    """What estimators need to learn a table by full-batch descent."""

    #: Step size of "gd"; None for regressions.
    _RATE: ClassVar[float | None] = 1.0
    #: A factor of it.
    _STEP: ClassVar[float] = 1.0
    #: Whether predictions are e^s.
    _IS_LOG: ClassVar[bool] = False

    if TYPE_CHECKING:  # of the estimator
        epsilon: float
        delta: float
        passes: int
        learning_rate: float | None
        penalty: Any
        alpha: float
        bounds: Any
        fit_intercept: bool
        rows_per_unit: int | None
        _most_weight: float

        def _loss(self, classes: int) -> MarginLoss: ...

    def _start_level(self) -> float | None:
        """The quantile that a regression is about."""
        return None

    def _lowest_target(self) -> float:
        """Of targets as the loss reads them; the largest is 1."""
        return -1.0

    def _plan_readings(self, rows: int, columns: int, *, is_sparse: bool) -> int:
        """Set the schedule; how often the table is read in all."""
        self._schedule = found = self._scheduled(rows, columns, is_sparse=is_sparse)
        self._windows, self._worth = self._looks(rows, columns)
        asked = int(self.rows_per_unit is not None) + self._windows + self._balances()
        asked += self._halvings()
        return found.readings + found.steps + asked + 2 * self._repeats()

    def _scheduled(self, rows: int, columns: int, *, is_sparse: bool) -> Schedule:
        """How "gd" reads a table: from public numbers, or from passes and learning_rate."""
        mu = math.inf
        if self.epsilon != math.inf:
            mu = gaussian.mu(epsilon=self.epsilon, delta=self.delta)
        found = steps_for(
            rows=max(1, int(rows / self._most_weight)),
            columns=columns,
            mu=mu,
            rate=self._RATE,
            fit_intercept=self.fit_intercept,
            is_sparse=is_sparse,
            classes=len(getattr(self, "classes_", ())) if self._RATE == LOGISTIC_RATE else 0,
        )
        found = found._replace(rate=found.rate * self._STEP)
        if self.passes != 1:
            whole(at_least=2, passes=self.passes)
            readings = 0 if is_sparse else max(1, round(self.passes / 10))
            found = Schedule(self.passes - readings, readings, LENGTH, found.rate)
        if self.learning_rate is not None:
            positive(learning_rate=self.learning_rate)
            found = found._replace(rate=float(self.learning_rate), eases=False)
        return self._means(rows, found, mu=mu)

    def _repeats(self) -> int:
        """Readings of each of the two kinds by which "gd" finds bounds in private."""
        return max(1, round(self._schedule.steps / 8)) if is_private(self.bounds) else 0

    def _balances(self) -> int:
        """Readings at the end in which models of log y compare means of y and of predictions."""
        if not self._IS_LOG or not self.fit_intercept:
            return 0
        return self._schedule.readings

    def _looks(self, rows: int, columns: int) -> tuple[int, float]:
        """Readings that a regression spends on where its targets are, and R, from public numbers
        (`target_window`)."""
        steps = self._schedule.steps
        if self.epsilon == math.inf or not self.fit_intercept:
            return 0, math.inf
        mu = gaussian.mu(epsilon=self.epsilon, delta=self.delta)
        rows = int(rows / self._most_weight)
        worth = rows * mu / math.sqrt(columns + 1)
        is_plain = self._RATE is None and self.passes == 1
        if not is_plain or steps == self._schedule.means:
            return 0, worth
        readings = max(1, round(steps / 16))
        noise = math.sqrt((steps + self._schedule.readings + readings) / readings) / mu
        return readings * int(can_be_seen(rows=rows, deviation=noise)), worth

    def _halvings(self) -> int:
        """Readings that ask whether targets lie close together, where windows would be hidden."""
        is_plain = self._RATE is None and self.fit_intercept
        is_hidden = self.epsilon != math.inf and self._schedule.steps > self._schedule.means
        return int(is_plain and is_hidden and self.passes == 1 and not self._windows)

    def _means(self, rows: int, found: Schedule, *, mu: float) -> Schedule:
        """With the steps that move the intercept alone, where it is a running mean, or has a
        quantile to find: in regressions."""
        if self._RATE is not None:
            return found
        if not self.fit_intercept:
            return found._replace(means=int(self._IS_LOG))
        steps = found.steps
        if self._start_level() is not None:  # one step is none where columns are hidden
            steps += QUESTIONS - int(steps == 1 and self.passes == 1)
            return found._replace(steps=steps, means=QUESTIONS)
        steps += int(self._IS_LOG and self.passes != 1)  # passes are of gradients
        means = mean_steps(steps, reach=rows / self._most_weight * mu)
        return found._replace(steps=steps, means=max(means, int(self._IS_LOG)))

    def _gradient_rule(
        self, loss: MarginLoss, features: int, outputs: int, clip_norm: float
    ) -> GradientRule:
        return GradientRule(
            loss=loss,
            features=features,
            outputs=outputs,
            clip_norm=clip_norm,
            rate=self._schedule.rate,
            readings=self._schedule.readings,
            length=self._schedule.length,
            eases=self._schedule.eases,
            ridge=self.alpha if self.penalty == "l2" else 0.0,
            fit_intercept=self.fit_intercept,
            most_weight=self._most_weight,
            has_many_rows=self.rows_per_unit is not None,
            is_log=self._IS_LOG,
            lowest=self._lowest_target(),
            balances=self._balances(),
            windows=self._windows,
            means=self._schedule.means,
            halvings=self._halvings(),
            level=self._start_level(),
            worth=self._worth,
            lead=2 * self._repeats(),
        )
