"""Bounds of a mean from draws that fail with a probability that is stated.

For λ ≤ 1/R fixed beforehand (by the pilot), Π(1 + λ(m − Y_i)) has mean at most 1 if the
mean of Y is m or more, so by Markov's inequality it exceeds 1/β with probability at most β
(Waudby-Smith and Ramdas 2024). Solved for m that is an upper bound; the mirrored product is a lower
one. For ε at δ a fixed list of falling ε is tested until the first failure, which needs no
correction: the first wrong one has to pass. The list is coarse, then fine within the last coarse
step, each with half of β. No state.

>>> round(lowest(lambda epsilon: epsilon > 0.5, 1.0), 3)
0.502
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from noshuffle.accounting.bisection import ratio_bracket
from noshuffle.accounting.moved_draws import WeightedDraws

#: Relative steps of the ε that are tested.
COARSE, FINE = 0.04, 0.005
#: Part of the first ε at which the list ends.
LEAST = 0.02


@dataclass(frozen=True)
class MeanTest:
    """One-sided bounds of a mean of values in [0, reach], by products fixed beforehand."""

    side: str
    epsilon: float
    top: float
    reach: float
    charge: float
    second_moment: float

    def is_below(self, drawn: WeightedDraws, mean: float, failure: float) -> bool:
        """Whether the true mean is surely below this one."""
        if mean <= self.charge:
            return False
        bet = min(self._rate(drawn, failure), (1 - 1e-9) / max(self.reach, 1e-300))
        return self._wealth(drawn, bet, mean - self.charge) > -math.log(failure)

    def is_above(self, drawn: WeightedDraws, mean: float, failure: float) -> bool:
        """Whether the true mean is surely above this one."""
        bet = min(self._rate(drawn, failure), 1 / mean)
        return self._wealth(drawn, -bet, mean) > -math.log(failure)

    def bounds(self, drawn: WeightedDraws, failure: float) -> tuple[float, float]:
        upper = _rising(lambda mean: self.is_below(drawn, mean, failure))
        lower = _rising(lambda mean: not self.is_above(drawn, mean, failure))
        return lower * (1 - 1e-5), upper

    def _rate(self, drawn: WeightedDraws, failure: float) -> float:
        square = len(drawn.share) * max(self.second_moment, 1e-300)
        return math.sqrt(-2 * math.log(failure) / square)

    def _wealth(self, drawn: WeightedDraws, bet: float, mean: float) -> float:
        values = drawn.values(self.side, self.epsilon, self.top)
        seen = values[values > 0]
        zeros = len(values) - len(seen)
        one = 1 + bet * mean
        if one <= 0 and zeros:
            return -math.inf
        return zeros * math.log(one) + float(np.log1p(bet * (mean - seen)).sum())


def _rising(is_reached: Callable[[float], bool]) -> float:
    """Where a statement becomes true, to 1e-5, relative, on its far side; 1 where it never does."""
    return ratio_bracket(is_reached, 1e-18, 1.0, tolerance=1e-5)[1]


def lowest(holds: Callable[[float], bool], start: float) -> float:
    """The last of a falling list, in coarse and then in fine steps, before the first failure.

    Fine steps end within the coarse one that failed: beyond it the list would follow from the
    draws, and its first wrong entry would not be one that was fixed beforehand.
    """
    found = start
    while found > LEAST * start and holds(found * (1 - COARSE)):
        found *= 1 - COARSE
    for _ in range(int(math.log1p(-COARSE) / math.log1p(-FINE))):
        if not holds(found * (1 - FINE)):
            break
        found *= 1 - FINE
    return found
