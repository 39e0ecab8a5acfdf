"""Rule: what an estimator learns by, told of rows as sums and of the released mean of each step.

A `LearningStream` asks a rule for the clipped sum of some rows at the current iterate, and hands it
the noisy mean when it has left. What a rule keeps (`_STATE`) is made of released numbers only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch

from noshuffle.convex.arrays import Array, Targets
from noshuffle.convex.phases import Phase

#: Is shown the margins and targets of rows before they are learned from.
Watch = Callable[[Array, Targets], None]


class Rule:
    """What is summed about a row (`size` numbers), and what a noisy mean does to the iterate."""

    size: int
    clip_norm: float
    learning_rate: float
    watch: Watch | None = None

    #: Attributes that change as rows come: arrays and plain values.
    _STATE: ClassVar[tuple[str, ...]] = ()

    @property
    def weights(self) -> Array:
        """The released answer, outputs × (features + 1), the intercept last."""
        raise NotImplementedError

    def start(self, phase: Phase) -> None:
        """A phase begins: set the learning rate."""
        raise NotImplementedError

    def clipped_sum(self, x: Any, y: Targets, weight: Array | None = None) -> Array:
        """Predict these rows, then the sum of contributions, each of norm ≤ clip_norm.

        Weights lie within [0, most_weight]; a row's own part is clipped to clip_norm/most_weight.
        """
        raise NotImplementedError

    def _show(self, margins: Array, y: Targets, weight: Array | None) -> None:
        """Margins and targets before they are learned from, but for rows of weight 0."""
        if self.watch is not None:
            there = slice(None) if weight is None else weight > 0
            self.watch(margins[there], y[there])

    def update(self, mean: Array, *, step: int) -> None:
        """Take in the released mean of a step of the current phase."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Everything that changes as rows come, as tensors and plain values."""
        values = {name: getattr(self, name) for name in self._STATE}
        return {
            name: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value
            for name, value in values.items()
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        for name in self._STATE:
            value = state[name]
            setattr(self, name, value.numpy().copy() if torch.is_tensor(value) else value)
