"""TargetRule: what "gd" learns of the targets of a regression, before its columns and beside them.

So that a fit does not lose to a constant, whatever the loss and however small or far from the
middle of their bounds targets are:

    1  where most of them lie: counts of bins, or one question (`target_window`)
    2  their mean, or their quantile, from readings without columns (`mean_first`,
       `quantile_search`); slopes of a row lie within [−1, 1] and fill the clip norm
    3  units in which the loss is as squares are (`target_units`)
    4  in every step that follows, the intercept from what the gradient tells of it, as in 2

A mean of a model of log y is known as a number, and its logarithm is the intercept: it lies within
the target bounds, and above twice its noise. Readings of 2 in a unit that turns out twice as large
as those that follow have four times their variance, and count for a quarter.
State: middle and unit of the targets, coordinates, and questions asked (`gradient_readings`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from noshuffle.convex.arrays import Array, Targets
from noshuffle.convex.gradient_readings import GradientReadings
from noshuffle.convex.mean_first import share
from noshuffle.convex.quantile_search import next_point, sureness
from noshuffle.convex.target_units import (
    LEAST_SLOPE,
    bend_at,
    coordinates,
    mean_slopes,
    moved_log,
    unit_of_log,
)
from noshuffle.convex.target_window import BINS, far_slopes, highest, is_narrow, window

#: The mean of a model of log y is at least so many deviations of its noise, and this.
_CLEAR, _LEAST = 2.0, 1e-12
#: Steps are multiplied by at most this.
_MOST_GAIN = 4.0


@dataclass(eq=False, kw_only=True)
class TargetRule(GradientReadings):
    """Middle and unit of targets, the intercept in these, and coordinates of the descent.

    Guarantees: `_target_slopes` are at most clip_norm/most_weight, whatever the target is (or NaN,
    by which a row is left out); everything else is post-processing of released means.
    """

    @property
    def _mean_unit(self) -> float:
        """What slopes of ±1 are multiplied by in steps without columns, so that noise fits them."""
        return self.clip_norm / self.most_weight

    def _in_units(self, y: Targets) -> Array:
        return np.asarray((y - self._middle) / self._unit, dtype=np.float64)

    def _target_slopes(self, y: Targets) -> Array:
        """Of a reading without columns: about the intercept, or whether targets are far from it."""
        told, at = self._in_units(y), float(self._theta[0, -1])
        own = mean_slopes(told, at, level=self.level) if self._is_mean else far_slopes(told, at)
        return np.asarray(self._mean_unit * own)

    def _use_counts(self, held: Array, *, rows: float, deviation: float) -> None:
        least = 0
        if self.is_log:  # large targets are few, and most of the mean
            least = highest(held, rows=rows, deviation=deviation)
            self._highest = self.lowest + least / BINS * (1.0 - self.lowest)
        known = {"rows": rows, "deviation": deviation, "worth": self.worth}
        middle, unit = window(held, **known, least=least)
        self._middle += self._unit * middle
        self._unit *= unit

    def _read_targets(self, slope: float, *, deviation: float) -> None:
        """A step of the intercept alone: of its mean (`mean_first`), or its quantile; or whether
        most targets lie near it."""
        if self._count > self._before - self.halvings:
            if is_narrow((1.0 + slope) / 2, deviation=deviation / 2):
                self._halve()
        elif self.level is None:
            self._theta[:, -1] -= share(self._count - self._begin, of=self._descents) * slope
        else:
            self._ask(slope, deviation=deviation)
        if self._count == self._before:
            self._take_units(deviation)

    def _halve(self) -> None:
        self._middle += self._unit * float(self._theta[0, -1])
        self._unit /= 2.0
        self._theta[:, -1] = 0.0
        self._discount = 0.75 * self.means  # those that follow have a quarter of the variance

    def _take_units(self, deviation: float) -> None:
        """Coordinates of the descent, once the mean of the targets is known."""
        at = float(self._theta[0, -1])
        if self.is_log:
            noise = self._unit * deviation / math.sqrt(self.means - self._discount)
            least = max(self.lowest, _CLEAR * noise, _LEAST)
            mean = min(max(self._middle + self._unit * at, least), 1.0)
            self._theta[:, -1] = 0.0
            if not self.fit_intercept:
                bend = bend_at(self.loss, math.log(mean), is_log=True)
                self._gain *= min(1.0 / bend, _MOST_GAIN)
                return
            known = {"mean": mean, "highest": self._highest, "worth": self.worth}
            self._unit = unit_of_log(self._unit, **known)
            self._middle = mean
        self._origin, self._stretch, self._steep = coordinates(
            self.loss,
            middle=self._middle,
            unit=self._unit,
            is_log=self.is_log,
            clip_norm=self._mean_unit,
        )
        if self.level is not None:  # their slopes are as long as the clip norm lets them be
            self.learning_rate = self.rate / (LEAST_SLOPE * self._mean_unit)

    def _move_intercept(self, slope: float) -> None:
        """By what a gradient tells of the mean, or the quantile, of what columns leave."""
        if self.level is not None:
            self._ask(slope, deviation=self._gain * self._deviation)
            return
        at = self._within(self._origin + self._stretch * float(self._theta[0, -1]))
        bend = self._steep * self._stretch * bend_at(self.loss, at, is_log=self.is_log)
        part = share(self._taken_steps - self._discount, of=self._descents)
        down = part * slope / bend
        if self.is_log:
            at = self._within(at - moved_log(self._stretch * down))
            self._theta[:, -1] = (at - self._origin) / self._stretch
        else:
            self._theta[:, -1] -= down

    def _within(self, margin: float) -> float:
        """The logarithm of a mean, inside the target bounds; of other models, as it is."""
        least = math.log(max(self.lowest, _LEAST)) if self.is_log else -math.inf
        return min(max(margin, least), 0.0 if self.is_log else math.inf)

    def _ask(self, slope: float, *, deviation: float) -> None:
        at = self._middle + self._unit * float(self._theta[0, -1])
        self._asked = np.vstack([self._asked, [at, sureness(slope, deviation)]])
        window = (self._middle - self._unit, self._middle + self._unit)
        at = next_point(self._asked, window=window, of=self._descents)
        self._theta[:, -1] = (at - self._middle) / self._unit
