"""Penalties and constraint sets by name, as estimators take them.

>>> composite_of("elasticnet", alpha=0.1, l1_ratio=0.5)
ElasticNet(l1=0.05, l2=0.05)
>>> constraint_of("l1_ball", radius=3.0)
L1Ball(radius=3.0)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noshuffle.convex.rows import by_column
from noshuffle.errors import InvalidInput, non_negative, one_of, positive
from noshuffle.optim.composite import Composite, ElasticNet, GroupLasso
from noshuffle.optim.constraints import Box, Constraint, L1Ball, L2Ball, Simplex

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
    if penalty == "group":
        return GroupLasso(alpha)
    share = {"l1": 1.0, "l2": 0.0}.get(penalty, l1_ratio)
    if not 0 <= share <= 1:
        raise InvalidInput(f"l1_ratio must lie in [0, 1], got {l1_ratio!r}")
    return ElasticNet(alpha * share, alpha * (1 - share))


def makes_zeros(composite: Composite | None) -> bool:
    """Whether a regularizer sets weights to exactly zero."""
    return composite.l1 > 0 if isinstance(composite, ElasticNet) else composite is not None


def constraint_of(constraint: str | Constraint | None, *, radius: float) -> Constraint | None:
    """The set of that name and size; a record passes through."""
    if constraint is None or isinstance(constraint, Constraint):
        return constraint
    one_of(CONSTRAINTS, constraint=constraint)
    positive(radius=radius)
    made = L2Ball(radius), Box(-radius, radius), Simplex(radius), L1Ball(radius)
    return made[CONSTRAINTS.index(constraint)]


def groups_of(
    groups: Any, *, features: int, names: Any = None
) -> tuple[NDArray[np.int64], ...] | None:
    """Indices of the features of each group, from one label per feature or {column: label}."""
    if groups is None:
        return None
    if isinstance(groups, Mapping):
        groups = by_column(list(range(features)) if names is None else list(names), groups=groups)
    labels = np.asarray(groups)
    if labels.shape != (features,):
        raise InvalidInput(
            f"groups must hold one label for each of {features} features, got {labels.shape}"
        )
    return tuple(np.flatnonzero(labels == label) for label in np.unique(labels))
