"""Progressive validation: every row is predicted before it is learned from.

The margins at which a row's gradient is taken are its prediction by a model that has never seen it,
so a running score costs nothing. `Accuracy` and `RSquared` are NOT private: they are computed from
raw targets without noise, and stay where the data is. Only the first pass is scored. State: the
running sums.

>>> score = Accuracy()
>>> score(np.array([[1.0], [-1.0], [2.0]]), np.array([1, 0, 0]))
>>> round(score.value, 3)
0.667
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from noshuffle.convex.arrays import Array, Targets
from noshuffle.convex.margins import told

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
