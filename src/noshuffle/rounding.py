"""How a privacy cost is printed: rounded up at its last digit, and what remains rounded down.

A cost that is printed to the nearest digit is half the time smaller than it is: ε = 8.0004 is no
ε = 8. So whatever states ε, δ, μ or a factor e^ε prints `up`, and whatever says how much may still
be spent, or how much an attacker is sure to have found, prints `down`. Numbers that a user gave
stay as they are, and so does a target: a plan that was made for ε ≤ 1 has 0.9999999, which is 1.

>>> up(8.0004, digits=4), up(0.99999997, digits=4), up(1.0), up(1e-5)
('8.001', '1', '1', '1e-05')
>>> up(2.0001, places=3), down(2.0009, places=3), down(0.52349, digits=4)
('2.001', '2.000', '0.5234')
>>> up(math.inf), up(0.1 + 0.2)
('inf', '0.3')
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal

#: Sums of floats are off by a few units in the last place (0.1 + 0.2): these are no cost.
_ROUND_OFF = 2.0**-50


def up(value: float, *, digits: int = 6, places: int | None = None) -> str:
    """The least number of so many digits (or places after the point) that is not below a value.

    Guarantees: what is printed is at least the value, four units in its last place aside, and
    less than one printed digit above it. Infinity and NaN are printed as they are.
    """
    return _printed(value * (1 - math.copysign(_ROUND_OFF, value)), ROUND_CEILING, digits, places)


def down(value: float, *, digits: int = 6, places: int | None = None) -> str:
    """The largest number of so many digits (or places) that is not above a value; see `up`."""
    return _printed(value * (1 + math.copysign(_ROUND_OFF, value)), ROUND_FLOOR, digits, places)


def factor_up(factor: float) -> str:
    """A factor e^ε for a sentence: two digits, from ten to a million whole, and not below it.

    >>> factor_up(2.71), factor_up(2.8), factor_up(33.01), factor_up(1.21e6), factor_up(99999.5)
    ('2.8', '2.8', '34', '1.3e+06', '100,000')
    """
    return up(factor, places=0) if 10 <= factor < 1e6 else up(factor, digits=2)


def _printed(value: float, rounding: str, digits: int, places: int | None) -> str:
    value = float(value)
    if not math.isfinite(value):
        return f"{value:g}"
    exact = Decimal(value)
    if places is None:
        return f"{float(Context(prec=digits, rounding=rounding).plus(exact)):.{digits}g}"
    context = Context(prec=400, rounding=rounding)
    return f"{exact.quantize(Decimal(1).scaleb(-places), context=context):,f}"
