"""GradientReadings: which reading of "gd" is about what, in order, and how much noise it has.

    rows · windows of targets · columns · means or quantiles of targets · how far they lie apart
    · gradients · calibration (models of log y)

Sizes and places follow from the settings alone. `gradient_rule` says what is done with them.
State: what the first readings released, iterate, velocity and sums of the descent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from noshuffle.convex.arrays import CLIP_SLACK
from noshuffle.convex.calibration import LARGEST
from noshuffle.convex.margins import MarginLoss
from noshuffle.convex.phases import Phase
from noshuffle.convex.rule import Rule, Watch
from noshuffle.convex.schedule import LENGTH
from noshuffle.convex.target_window import BINS
from noshuffle.errors import non_negative, positive


@dataclass(eq=False, kw_only=True)
class GradientReadings(Rule):
    """Settings of the readings, and where each begins."""

    loss: MarginLoss
    features: int
    outputs: int
    clip_norm: float
    rate: float
    readings: int
    length: float = LENGTH
    eases: bool = False
    ridge: float = 0.0
    fit_intercept: bool = True
    most_weight: float = 1.0
    #: Whether a unit has several rows, whose weights add up to `most_weight` at most. The first
    #: reading then counts rows; counts and sums of columns are of weighted rows, as gradients are.
    has_many_rows: bool = False
    #: Of regressions: whether predictions are e^s, and the lowest target (the largest is 1).
    is_log: bool = False
    lowest: float = -1.0
    #: Readings before those of the columns that count targets (regressions: see `target_window`),
    #: and R = nμ/√(p + 1).
    windows: int = 0
    worth: float = 0.0
    #: The quantile of a quantile regression, which the intercept is found by (`quantile_search`).
    level: float | None = None
    #: Steps that move the intercept alone, before all others; with them the intercept is a running
    #: mean (regressions: see `mean_first`). 0: it is a coordinate.
    means: int = 0
    #: Readings after them that ask whether most targets lie near by (0 or 1: see `target_window`).
    halvings: int = 0
    #: Readings at the end that compare means of y and of predictions (models of log y).
    balances: int = 0
    #: Readings of the run that come before those of this rule (`ranges`).
    lead: int = 0
    watch: Watch | None = None

    _STATE: ClassVar[tuple[str, ...]] = ("_theta", "_velocity", "_average", "_moments", "_centre")
    _STATE += ("_scale", "_count", "_taken", "_counted", "_gain")
    _STATE += ("learning_rate", "_row_length", "_shift", "_gap")
    _STATE += ("_bins", "_middle", "_unit", "_is_scarce", "_origin", "_stretch", "_steep", "_asked")
    _STATE += ("_discount", "_highest")

    def __post_init__(self) -> None:
        positive(clip_norm=self.clip_norm, learning_rate=self.rate)
        non_negative(alpha=self.ridge)
        k, p = self.outputs, self.features
        self._columns = 2 * p if self.readings else 0
        self.size = max(k * (p + 1), self._columns, BINS if self.windows else 0)
        self._counting = int(self.has_many_rows)
        self._lead_in = self._counting + self.windows  # readings before the first of the columns
        self._begin = self._lead_in + self.readings  # readings before the first of the intercept
        self._before = self._begin + self.means + self.halvings  # readings before the gradients
        self._bins, self._asked = np.zeros(BINS if self.windows else 0), np.zeros((0, 2))
        #: Where targets lie, and coordinates of the descent (`target_units`).
        self._middle, self._unit = (1.0 + self.lowest) / 2, (1.0 - self.lowest) / 2
        self._origin, self._stretch, self._steep = 0.0, 1.0, 1.0
        self._highest = self.lowest  # targets that were seen for sure
        self._discount = 0.0  # steps that earlier ones are worth less, whose unit was larger
        #: Released number of rows, and by what means are multiplied.
        self._counted, self._gain = 0.0, 1.0
        self._shift, self._gap = 0.0, np.zeros(2)
        self._balance_unit = self.clip_norm * (1 - CLIP_SLACK) / LARGEST
        self._theta, self._velocity, self._average = (np.zeros((k, p + 1)) for _ in range(3))
        self._moments = np.zeros(self._columns)
        self._centre, self._scale = np.zeros(p), np.full(p, float(self.length > 0))
        self._count, self._taken = 0, 0
        self._is_scarce = False
        self.learning_rate, self._row_length = self.rate, self.length

    def start(self, phase: Phase) -> None:
        self._phase = phase

    @property
    def _steps(self) -> int:
        """Readings of this rule."""
        return self._phase.plan.steps - self.lead

    @property
    def _is_alone(self) -> bool:
        """Whether the next reading is of targets without columns (not counted: `windows`)."""
        return self._begin <= self._count < self._before

    @property
    def _is_mean(self) -> bool:
        """Whether it moves the intercept; the others ask how far targets lie apart."""
        return self._begin <= self._count < self._before - self.halvings

    @property
    def _is_running(self) -> bool:
        """Whether the intercept goes on as a running mean, or quantile."""
        return self.means > 0 and self.fit_intercept

    @property
    def _descents(self) -> int:
        """Steps, those of the intercept alone among them."""
        return self._steps - self.balances - self._begin - self.halvings

    @property
    def _taken_steps(self) -> int:
        """How many of them were taken."""
        taken = self._count - self._before
        return taken + self.means + int(taken < 0) * self.halvings

    @property
    def _deviation(self) -> float:
        """Of the noise of an entry of a released mean."""
        return self._phase.plan.noise_multiplier * self.clip_norm / self._phase.batch_size

    @property
    def _share(self) -> float:
        """What counts and sums of columns were divided by, so that a unit adds at most one row."""
        return self.most_weight if self.has_many_rows else 1.0

    @property
    def _filled(self) -> float:
        """Rows for each row that was counted; between 1 and 1,000 whatever the noise says."""
        if not self.has_many_rows:
            return 1.0
        rows = float(self._phase.batch_size)
        # Of units with a hundred rows each, one counts.
        least = min(0.1 * rows, max(1e-3 * rows, 4.0 * self._phase.plan.noise_multiplier))
        return rows / min(max(self._counted, least), rows)
