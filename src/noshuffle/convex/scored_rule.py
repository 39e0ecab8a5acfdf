"""ScoredRule: the progressive score as part of the release, so that it may be published.

A row contributes its clipped vector and, as one more coordinate, w·s with s ∈ [0, 1] the score of
its prediction before it was learned from (1 for a class told right; half of the absolute error of
targets scaled to [−1, 1]). Both together have norm at most

    √(clip² + w²),      w = clip/4,

to which the noise is calibrated: 3 % more of it for the model buys the curve

    score_t = (Σ_{i≤t} s_i + noise_t) / rows_t,    deviation E_t·z·√(clip² + w²) / (w·rows_t)

with E_t the error of the mechanism on running sums. No budget is set apart, and the curve is
covered by the same statement as the model. Only the first pass is scored. State: the running sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from noshuffle.convex.arrays import Array, Targets
from noshuffle.convex.phases import Phase
from noshuffle.convex.stream import Rule

#: Weight of the score beside the gradient, in clip norms.
SHARE = 0.25
#: Scores of rows, each in [0, 1], from margins and targets.
Score = Callable[[Array, Targets], Array]


class ScoredRule(Rule):
    """A rule with one more coordinate.

    Guarantees: one row's contribution has norm at most `clip_norm` (this one's, not the inner
    rule's), since scores are clamped to [0, 1] and scores that are not numbers count as 0.
    """

    _STATE: ClassVar[tuple[str, ...]] = ("_total", "_rows", "_finished", "_noise", "curve")

    def __init__(self, rule: Rule, score_fn: Score) -> None:
        self.inner, self._score_fn = rule, score_fn
        self.watch, rule.watch = rule.watch, self._saw
        self.size = rule.size + 1
        self._weight = SHARE * rule.clip_norm
        self.clip_norm = math.hypot(rule.clip_norm, self._weight)
        self._raw = self._total = self._finished = self._noise = 0.0
        self._rows = 0
        self.curve: list[tuple[float, float, float]] = []

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

    def clipped_sum(self, x: Any, y: Targets) -> Array:
        self._raw = 0.0
        inner = self.inner.clipped_sum(x, y)
        return np.append(inner, self._weight * self._raw)

    def update(self, mean: Array, *, step: int) -> None:
        self.inner.update(mean[:-1], step=step)
        if self.watch is None:
            return
        self._total += float(mean[-1]) * self._phase.batch_size / self._weight
        self._noise = float(self._phase.error[step]) * self.clip_norm / self._weight
        deviation = math.sqrt(self._finished + self._noise**2)
        self.curve.append((float(self._rows), self._total / self._rows, deviation / self._rows))

    def state(self) -> dict[str, Any]:
        return {**super().state(), "inner": self.inner.state()}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.inner.load(state["inner"])
