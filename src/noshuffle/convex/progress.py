"""Progressive validation: every row is predicted before it is learned from.

The margins at which a row's gradient is taken are its prediction by a model that has never seen it,
so a running score costs nothing. `Accuracy` and `RSquared` are NOT private: they are computed from
raw targets without noise, and stay where the data is. The score that may be published is part of
the release: with `ScoredRule` a row contributes its clipped vector and, as one more coordinate, w·s
with s ∈ [0, 1] its score (`each`). Both together have norm at most √(clip² + w²), w = clip/4, to
which the noise is calibrated: 3 % more of it for the model buys the curve

    score_t = (Σ_{i≤t} s_i + noise_t) / rows_t,    deviation E_t·z·√(clip² + w²) / (w·rows_t)

with E_t the error of the mechanism on running sums, covered by the same statement as the model.
Only the first pass is scored. State: the running sums.

>>> score = Accuracy()
>>> score(np.array([[1.0], [-1.0], [2.0]]), np.array([1, 0, 0]))
>>> round(score.value, 3)
0.667
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from noshuffle.convex.arrays import Array, Targets
from noshuffle.convex.margins import told
from noshuffle.convex.phases import Phase
from noshuffle.convex.rule import Rule

#: Weight of the score beside the gradient, in clip norms.
SHARE = 0.25
NOT_COVERED = (
    "progressive_score_ is computed from raw targets, is not covered by the guarantee, and is left "
    "out when the model is pickled."
)


@dataclass
class Accuracy:
    """Share of rows whose class was predicted."""

    rows: int = 0
    right: int = 0

    def __call__(self, margins: Array, y: Targets) -> None:
        self.rows += len(y)
        self.right += int(np.count_nonzero(told(margins) == y))

    @property
    def value(self) -> float:
        return self.right / self.rows if self.rows else float("nan")

    @staticmethod
    def each(margins: Array, y: Targets) -> Array:
        """1 for a class told right, else 0."""
        return np.asarray(told(margins) == y, dtype=np.float64)


@dataclass
class RSquared:
    """1 − Σ(y − ŷ)² / Σ(y − ȳ)²."""

    rows: int = 0
    errors: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def __call__(self, margins: Array, y: Targets) -> None:
        self.rows += len(y)
        self.errors += float(np.square(margins[:, 0] - y).sum())
        self.total += float(y.sum())
        self.squares += float(np.square(y).sum())

    @property
    def value(self) -> float:
        spread = self.squares - self.total**2 / self.rows if self.rows else 0.0
        return 1.0 - self.errors / spread if spread > 0 else float("nan")

    @staticmethod
    def each(margins: Array, y: Targets) -> Array:
        """Half of the absolute error: both numbers lie within ±1 here."""
        return np.asarray(np.abs(np.clip(margins[:, 0], -1.0, 1.0) - y) / 2.0)


class ScoredRule(Rule):
    """A rule with one more coordinate.

    Guarantees: one row's contribution has norm at most `clip_norm` (this one's, not the inner
    rule's), since scores are clamped to [0, 1] and scores that are not numbers count as 0.
    """

    _STATE: ClassVar[tuple[str, ...]] = ("_total", "_rows", "_finished", "_noise", "curve")

    def __init__(self, rule: Rule, score_fn: Callable[[Array, Targets], Array]) -> None:
        self.inner, self._score_fn = rule, score_fn
        self.watch, rule.watch = rule.watch, self._saw
        self.size = rule.size + 1
        self._weight = SHARE * rule.clip_norm
        self.clip_norm = math.hypot(rule.clip_norm, self._weight)
        self._raw = self._total = self._finished = self._noise = 0.0
        self._rows = 0
        self.curve: list[tuple[float, float, float]] = []
        self._shown, self._unit, self._count = np.empty((0, 3)), 1.0, 0

    @property
    def learning_rate(self) -> float:  # type: ignore[override]
        return self.inner.learning_rate

    @property
    def weights(self) -> Array:
        return self.inner.weights

    def start(self, phase: Phase) -> None:
        self._finished += self._noise**2
        self._phase = phase
        self.inner.start(phase)

    def _saw(self, margins: Array, y: Targets) -> None:
        if self.watch is not None:
            self.watch(margins, y)
            scores = np.nan_to_num(self._score_fn(margins, y), nan=0.0)
            self._raw += float(np.clip(scores, 0.0, 1.0).sum())
            self._rows += len(y)

    def clipped_sum(self, x: Any, y: Targets, weight: Array | None = None) -> Array:
        self._raw = 0.0
        inner = self.inner.clipped_sum(x, y, weight)
        return np.append(inner, self._weight * self._raw)

    def update(self, mean: Array, *, step: int) -> None:
        self.inner.update(mean[:-1], step=step)
        if self.watch is None:
            return
        self._total += float(mean[-1]) * self._phase.batch_size / self._weight
        self._noise = float(self._phase.error[step]) * self.clip_norm / self._weight
        deviation = math.sqrt(self._finished + self._noise**2)
        self.curve.append((float(self._rows), self._total / self._rows, deviation / self._rows))

    def shown(self, unit: float) -> Array:
        """The curve so far, scores and deviations in this unit, not to be written to.

        Only points that are new since the last call are converted: a stream that is fed row by row
        asks after every step. What was returned before stays as it was.
        """
        if unit != self._unit:
            self._shown, self._unit, self._count = np.empty((0, 3)), unit, 0
        count, self._count = self._count, len(self.curve)
        if self._count > len(self._shown):
            room = np.empty((2 * self._count, 3))
            room[:count] = self._shown[:count]
            self._shown = room
        new = np.array(self.curve[count:]).reshape(-1, 3)
        self._shown[count : self._count] = new * [1.0, unit, unit]
        found = self._shown[: self._count]
        found.flags.writeable = False
        return found

    def state(self) -> dict[str, Any]:
        return {**super().state(), "inner": self.inner.state()}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._shown, self._count = np.empty((0, 3)), 0
        self.inner.load(state["inner"])
