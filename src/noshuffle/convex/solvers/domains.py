"""The sets of `optim.constraints` under the names that solvers give them.

>>> Ball(1.0).project(np.array([3.0, 4.0]))
array([0.6, 0.8])
>>> Box(0.5)
Box(low=-0.5, high=0.5)
>>> ball(2.0, 1), ball(2.0, 3), ball(2.0, math.inf)
(L1Ball(radius=2.0), LpBall(radius=2.0, p=3), Box(low=-2.0, high=2.0))
"""

from __future__ import annotations

import math

import numpy as np  # noqa: F401  (the doctest uses it)

from noshuffle.errors import positive
from noshuffle.optim import constraints
from noshuffle.optim.constraints import Constraint as Domain
from noshuffle.optim.constraints import Everywhere, L1Ball, Simplex
from noshuffle.optim.constraints import L2Ball as Ball
from noshuffle.optim.lp_ball import LpBall

__all__ = ["Ball", "Box", "Domain", "Everywhere", "L1Ball", "LpBall", "Simplex", "ball"]


def Box(radius: float) -> constraints.Box:
    """|w_i| ≤ radius for every coordinate."""
    positive(radius=radius)
    return constraints.Box(-radius, radius)


def ball(radius: float, p: float) -> Domain:
    """‖w‖_p ≤ radius for any 1 ≤ p ≤ ∞."""
    if p == 1 or p == 2:
        return L1Ball(radius) if p == 1 else Ball(radius)
    return Box(radius) if p == math.inf else LpBall(radius, p)
