"""The sets of `optim.constraints` under the names that solvers give them.

>>> Ball(1.0).project(np.array([3.0, 4.0]))
array([0.6, 0.8])
>>> Box(0.5)
Box(low=-0.5, high=0.5)
"""

from __future__ import annotations

import numpy as np  # noqa: F401  (the doctest uses it)

from noshuffle.errors import positive
from noshuffle.optim import constraints
from noshuffle.optim.constraints import Constraint as Domain
from noshuffle.optim.constraints import Everywhere, L1Ball, Simplex
from noshuffle.optim.constraints import L2Ball as Ball
from noshuffle.optim.lp_ball import LpBall
from noshuffle.optim.norm_ball import NormBall, ball

__all__ = ["Ball", "Box", "Domain", "Everywhere", "L1Ball", "LpBall", "NormBall", "Simplex", "ball"]


def Box(radius: float) -> constraints.Box:
    """|w_i| ≤ radius for every coordinate."""
    positive(radius=radius)
    return constraints.Box(-radius, radius)
