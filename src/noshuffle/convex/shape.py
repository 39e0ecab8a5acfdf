"""Penalties and constraint sets by name, as estimators take them.

>>> composite_of("elasticnet", alpha=0.1, l1_ratio=0.5)
ElasticNet(l1=0.05, l2=0.05)
>>> constraint_of("l1_ball", radius=3.0)
L1Ball(radius=3.0)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from noshuffle.errors import InvalidInput, non_negative, one_of, positive
from noshuffle.optim.composite import Composite, ElasticNet, elastic_net, group_lasso, lasso
from noshuffle.optim.constraints import Constraint, box, l1_ball, l2_ball, simplex

PENALTIES = ("l1", "l2", "elasticnet", "group")
CONSTRAINTS = ("ball", "box", "simplex", "l1_ball")


def composite_of(
    penalty: str | Composite | None, *, alpha: float, l1_ratio: float
) -> Composite | None:
    """The regularizer that every round adds; a record passes through."""
    if penalty is None or isinstance(penalty, Composite):
        return penalty
    one_of(PENALTIES, penalty=penalty)
    non_negative(alpha=alpha)
    if penalty == "l1":
        return lasso(alpha)
    if penalty == "l2":
        return elastic_net(0.0, alpha)
    if penalty == "group":
        return group_lasso(alpha)
    if not 0 <= l1_ratio <= 1:
        raise InvalidInput(f"l1_ratio must lie in [0, 1], got {l1_ratio!r}")
    return elastic_net(alpha * l1_ratio, alpha * (1 - l1_ratio))


def makes_zeros(composite: Composite | None) -> bool:
    """Whether a regularizer sets weights to exactly zero."""
    if isinstance(composite, ElasticNet):
        return composite.l1 > 0
    return composite is not None


def constraint_of(constraint: str | Constraint | None, *, radius: float) -> Constraint | None:
    """The set of that name and size; a record passes through."""
    if constraint is None or isinstance(constraint, Constraint):
        return constraint
    one_of(CONSTRAINTS, constraint=constraint)
    positive(radius=radius)
    if constraint == "ball":
        return l2_ball(radius)
    if constraint == "box":
        return box(-radius, radius)
    return simplex(radius) if constraint == "simplex" else l1_ball(radius)


def groups_of(groups: Any, *, features: int) -> tuple[NDArray[np.int64], ...] | None:
    """Indices of the features of each group, from one label per feature."""
    if groups is None:
        return None
    labels = np.asarray(groups)
    if labels.shape != (features,):
        raise InvalidInput(
            f"groups must hold one label for each of {features} features, got {labels.shape}"
        )
    return tuple(np.flatnonzero(labels == label) for label in np.unique(labels))
