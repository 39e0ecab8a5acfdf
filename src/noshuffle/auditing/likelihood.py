"""An interval for ε from samples of an attacker's loss, drawn from another law and weighed.

    δ(ε) = E_P (1 − e^{ε − loss})₊ ≈ mean of (1 − e^{ε − loss})₊ · dP/d(law),      loss = log dP/dQ

The mean falls in ε. Two limits that its normal error passes once in a million turn a given δ into
an interval for ε. No state.

>>> x = np.random.default_rng(0).standard_normal(10**6) + 4.0      # P = N(1, 1), Q = N(0, 1)
>>> found = interval(samples(x - 0.5, 7.5 - 3 * x), 1e-5)          # from N(4, 1)
>>> found.low < 4.3772 < found.high < 4.42
True
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from noshuffle.auditing.emitted import Array

#: Normal deviations of an interval that chance passes once in a million, on each side.
_DEVIATIONS = 4.75
#: ε beyond which the answer is said to be infinite.
LARGEST = 1e4
#: Random numbers of one estimate, and its samples at most (more, where more are asked for).
NUMBERS, _MOST = 20_000_000, 500_000

#: e^{−loss} and weight of so many samples.
Samples = tuple[Array, Array]


@dataclass(frozen=True)
class EpsilonRange:
    """ε of one attack: below `low` or above `high` by chance once in a million each."""

    low: float
    high: float


def widest(found: Sequence[EpsilonRange]) -> EpsilonRange:
    """That of the better attack."""
    return EpsilonRange(max(one.low for one in found), max(one.high for one in found))


def count_of(numbers: int, each: int) -> int:
    """Samples that take about so many random numbers, `each` of them every one."""
    return max(2000, min(max(_MOST, numbers // 40), numbers // each))


def samples(losses: Array, log_weights: Array) -> Samples:
    """Of losses, and logarithms of dP over the law that they were drawn from."""
    return np.exp(np.minimum(-losses, 700.0)), np.exp(np.minimum(log_weights, 700.0))


def error(drawn: Samples, delta: float) -> float:
    """The relative deviation of δ where it is the given one."""
    mean, deviation = _delta(drawn, _root_of(drawn, delta))
    return deviation / mean if mean else math.inf


def interval(drawn: Samples, delta: float) -> EpsilonRange:
    """From where the estimate is δ outwards, to where its limits are."""

    def reach(side: float) -> float:
        def is_above(epsilon: float) -> bool:
            mean, deviation = _delta(drawn, epsilon)
            return mean + side * _DEVIATIONS * deviation > delta

        near, far, step = found, found, 1e-4 * found + 1e-6
        while is_above(far) == (side > 0):
            near, far, step = far, far + side * step, 2 * step
            if not 0 < far < LARGEST:
                return 0.0 if far <= 0 else math.inf
        for _ in range(10):
            middle = (near + far) / 2
            near, far = (middle, far) if is_above(middle) == (side > 0) else (near, middle)
        return far

    found = _root_of(drawn, delta)
    return EpsilonRange(reach(-1.0), reach(1.0))


def _delta(drawn: Samples, epsilon: float) -> tuple[float, float]:
    """δ at ε and its deviation."""
    ratios, weights = drawn
    gains = np.maximum(1 - math.exp(min(epsilon, 700.0)) * ratios, 0.0) * weights
    return float(gains.mean()), float(gains.std()) / math.sqrt(len(gains))


def _root_of(drawn: Samples, delta: float) -> float:
    """ε at which the estimate is δ; it falls in ε."""
    low, high = 0.0, 1.0
    while _delta(drawn, high)[0] > delta and high < LARGEST:
        low, high = high, 2 * high
    while high - low > 1e-5 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _delta(drawn, middle)[0] > delta else (low, middle)
    return high
