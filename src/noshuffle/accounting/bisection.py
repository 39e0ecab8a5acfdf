"""Where a statement about a number becomes true, between two ends that are known on either side.

Every middle is evaluated, and takes the place of the end that it agrees with. So of the two ends
that come back `high` was found true and `low` was found false, unless they are those that were
given: whoever needs the safe side takes that end. No state.

>>> low, high = bracket(lambda x: x * x >= 2, 0.0, 2.0, tolerance=1e-9)
>>> low < math.sqrt(2) <= high, f"{high:.6f}"
(True, '1.414214')
>>> low, high = ratio_bracket(lambda x: x * x >= 2, 1e-18, 2.0, tolerance=1e-5)
>>> high / low <= 1 + 1e-5, f"{high:.4f}"
(True, '1.4142')
"""

from __future__ import annotations

import math
from collections.abc import Callable

Holds = Callable[[float], bool]


def bracket(
    holds: Holds, low: float, high: float, *, tolerance: float = 0.0
) -> tuple[float, float]:
    """The ends, no further apart than this part of the upper one; 0 asks for adjacent floats."""
    while high - low > tolerance * high and low < (middle := 0.5 * (low + high)) < high:
        low, high = (low, middle) if holds(middle) else (middle, high)
    return low, high


def ratio_bracket(
    holds: Holds, low: float, high: float, *, tolerance: float = 0.0
) -> tuple[float, float]:
    """The same by ratios: for ends many powers of ten apart; the lower one may be 0."""
    while high > low * (1 + tolerance):
        middle = math.sqrt(low * high) if low > 0 else high / 16
        if not low < middle < high:
            break
        low, high = (low, middle) if holds(middle) else (middle, high)
    return low, high
