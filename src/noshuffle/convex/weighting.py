"""Weights of rows: given with them, and by their class.

    sum of a step = Σ_i w_i·clip(g_i),     0 ≤ w_i ≤ w_max,     so ‖one row's part‖ ≤ w_max·c

and the noise is calibrated to w_max·c. Where w_max comes from decides what is covered:

    max_weight given     a weight is part of its row: clamped to [0, max_weight], and private
    max_weight=None      the weights are taken to be public knowledge, as the number of rows is:
                         divided by their mean, w_max their largest; the statement says so
    class_weight         {class: weight} is public; the weight of a row follows from its label,
                         which is private, and w_max is the largest of the mapping

No state.

>>> weights, most, _ = given_weights([1.0, 3.0], rows=2, max_weight=None)
>>> weights.tolist(), most
([0.5, 1.5], 1.5)
>>> by_class({"no": 2.0}, np.array(["no", "yes"])).tolist()
[2.0, 1.0]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from noshuffle.convex.arrays import Array, real_array
from noshuffle.convex.stream_units import one_id_each
from noshuffle.errors import InvalidInput, positive, whole
from noshuffle.release.units import as_ids

PUBLIC_WEIGHTS = "The weights of the rows are taken to be public knowledge, their largest among it."
PRIVATE_WEIGHTS = "Weights of rows are part of them: clamped to [0, {:g}], and covered."
NEEDS_IDS = "rows_per_unit needs ids=, whose unit each row belongs to"


def given_weights(
    sample_weight: Any, *, rows: int, max_weight: float | None
) -> tuple[Array | None, float, tuple[str, ...]]:
    """One weight for every row (None: all 1), the largest possible one, and what to state."""
    if max_weight is not None:
        positive(max_weight=max_weight)
    if sample_weight is None:
        return None, float(max_weight or 1.0), ()
    values = real_array(sample_weight=sample_weight)
    if values.shape != (rows,):
        raise InvalidInput(
            f"sample_weight must hold one number for each of {rows} rows, got shape {values.shape}"
        )
    if not np.all(values >= 0) or not np.isfinite(values).all():
        raise InvalidInput("sample_weight must hold finite numbers >= 0, got others")
    if max_weight is not None:
        most = float(max_weight)
        return np.minimum(values, most), most, (PRIVATE_WEIGHTS.format(most),)
    with np.errstate(over="ignore"):
        mean = float(values.mean())
    if mean == np.inf:
        raise InvalidInput("sample_weight is too large for a mean of float64; divide it by its max")
    if not mean > 0:
        raise InvalidInput("sample_weight is zero for every row; give some row a weight > 0")
    return values / mean, float(values.max()) / mean, (PUBLIC_WEIGHTS,)


def by_class(class_weight: Any, classes: Any) -> Array | None:
    """The weight of every class, 1 where the mapping has none; None without a mapping."""
    if class_weight is None:
        return None
    if not isinstance(class_weight, Mapping):
        raise InvalidInput(
            f"class_weight must be a mapping of classes or None, got {class_weight!r}"
        )
    out, known = np.ones(len(classes)), classes.tolist()
    for label, weight in class_weight.items():
        if label not in known:
            raise InvalidInput(f"class_weight names {label!r}, which is none of the classes")
        positive(**{f"class_weight of {label!r}": weight})
        out[known.index(label)] = float(weight)
    return out


def unit_weights(ids: Any, rows_per_unit: int, *, rows: int) -> Array:
    """min(1, k/m) for each row of a unit that has m of them: together at most k = rows_per_unit.

    A row's weight depends on the rows of its own unit alone, so it is part of what is covered.
    """
    whole(rows_per_unit=rows_per_unit)
    if ids is None:
        raise InvalidInput(NEEDS_IDS)
    one_id_each(ids, rows)
    _, place, many = np.unique(as_ids(ids), return_inverse=True, return_counts=True)
    return np.asarray(np.minimum(1.0, rows_per_unit / many[place]))
