"""Update rules on a private gradient: SGD with momentum, Adam, AdamW, Adafactor in numpy.

All are post-processing: they read released gradients only and cost no privacy. State is a value:

    init(d) -> state            update(gradient, state, weights) -> (step, state)

    Sgd         m ← βm + g                                 step = −ηm
    Adam        m ← β₁m + (1−β₁)g, v ← β₂v + (1−β₂)g²      step = −η m̂/(√v̂ + ϵ)
    AdamW       the same, and weights shrink by η·decay    step = Adam − η·decay·w
    Adafactor   v as row and column means of a matrix view of g, update clipped to rms 1
                (Shazeer, Stern 2018): √d numbers instead of d

>>> rule = Sgd(0.1)
>>> rule.update(np.ones(2), rule.init(2), np.zeros(2))[0]
array([-0.1, -0.1])
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from noshuffle.convex.arrays import Array
from noshuffle.errors import InvalidInput, non_negative, positive

State = tuple[Array, ...]


class UpdateRule(Protocol):
    """What a solver asks of an update rule."""

    def init(self, d: int) -> State: ...
    def update(self, g: Array, state: State, w: Array) -> tuple[Array, State]: ...


def check_rule(rule: UpdateRule) -> None:
    """Refuse what is no update rule."""
    if not all(callable(getattr(rule, name, None)) for name in ("init", "update")):
        raise InvalidInput(
            f"rule must have the methods init and update, got {type(rule).__name__}; take one of "
            "noshuffle.convex.solvers.updates, as in Sgd(0.1)"
        )


@dataclass(frozen=True)
class Sgd:
    """Heavy-ball SGD."""

    learning_rate: float
    momentum: float = 0.0

    def __post_init__(self) -> None:
        positive(learning_rate=self.learning_rate)
        if not 0 <= self.momentum < 1:
            raise InvalidInput(f"momentum must lie in [0, 1), got {self.momentum!r}")

    def init(self, d: int) -> State:
        return (np.zeros(d),)

    def update(self, g: Array, state: State, w: Array) -> tuple[Array, State]:
        velocity = self.momentum * state[0] + g
        return -self.learning_rate * velocity, (velocity,)


@dataclass(frozen=True)
class Adam:
    """Adam; with `decay` > 0 it is AdamW (decoupled weight decay)."""

    learning_rate: float
    first: float = 0.9
    second: float = 0.999
    floor: float = 1e-8
    decay: float = 0.0

    def __post_init__(self) -> None:
        positive(learning_rate=self.learning_rate, floor=self.floor)
        non_negative(decay=self.decay)
        if not (0 <= self.first < 1 and 0 <= self.second < 1):
            raise InvalidInput(f"betas must lie in [0, 1), got {self.first!r}, {self.second!r}")

    def init(self, d: int) -> State:
        return np.zeros(d), np.zeros(d), np.zeros(1)

    def update(self, g: Array, state: State, w: Array) -> tuple[Array, State]:
        m, v, count = state
        t = float(count[0]) + 1
        m = self.first * m + (1 - self.first) * g
        v = self.second * v + (1 - self.second) * g * g
        scale = np.sqrt(v / (1 - self.second**t)) + self.floor
        step = -self.learning_rate * (m / (1 - self.first**t) / scale + self.decay * w)
        return step, (m, v, np.full(1, t))


def adamw(learning_rate: float, *, decay: float = 0.01) -> Adam:
    """Adam with decoupled weight decay (Loshchilov, Hutter 2019)."""
    return Adam(learning_rate, decay=decay)


@dataclass(frozen=True)
class Adafactor:
    """Adafactor without momentum on a near-square matrix view of the vector."""

    learning_rate: float
    exponent: float = 0.8
    floor: float = 1e-30
    clip: float = 1.0

    def __post_init__(self) -> None:
        positive(learning_rate=self.learning_rate, exponent=self.exponent, clip=self.clip)

    def init(self, d: int) -> State:
        height, width = _shape(d)
        return np.zeros(height), np.zeros(width), np.zeros(1)

    def update(self, g: Array, state: State, w: Array) -> tuple[Array, State]:
        row, column, count = state
        t = float(count[0]) + 1
        beta = 1 - t**-self.exponent
        height, width = len(row), len(column)
        padded = np.zeros(height * width)
        padded[: len(g)] = g * g + self.floor
        square = padded.reshape(height, width)
        row = beta * row + (1 - beta) * square.mean(axis=1)
        column = beta * column + (1 - beta) * square.mean(axis=0)
        second = (row[:, None] * column[None, :] / row.mean()).ravel()[: len(g)]
        step = g / np.sqrt(np.maximum(second, self.floor))
        rms = math.sqrt(float(np.mean(step * step)))
        return -self.learning_rate * step / max(1.0, rms / self.clip), (row, column, np.full(1, t))


def _shape(d: int) -> tuple[int, int]:
    height = max(1, math.isqrt(d))
    return height, -(-d // height)
