"""Arrays of real numbers: the types of this part of the library, and the one check of them.

Complex numbers would pass every bound (a norm looks at their size, and a cast drops what is
imaginary) and leave with an imaginary part that no noise covers; arrays of Python objects can hold
anything. Both are refused before a number of them is read.

>>> real_array(rows=[[1, 2]])
array([[1., 2.]])
>>> real_array(labels=[1j])
Traceback (most recent call last):
    ...
noshuffle.errors.InvalidInput: labels must hold real numbers, got complex128; Complex data not \
supported
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noshuffle.errors import InvalidInput

#: Bounds of columns and targets beyond this are refused.
WIDEST = 1e150
#: Clipped norms stay this far below their bound, more than float64 can lose.
CLIP_SLACK = 2.0**-40

Array = NDArray[np.float64]
Targets = NDArray[np.int64] | Array


def real_array(**values: Any) -> Array:
    """The one array that is given as float64; a row seen many times (stride 0) stays one row."""
    ((name, value),) = values.items()
    try:
        found = np.asarray(value)
    except (TypeError, ValueError):  # rows of different lengths
        found = np.asarray(None)
    refuse_complex(**{name: found})
    if found.dtype.kind not in "biuf":
        raise InvalidInput(
            f"{name} must be an array of numbers, got dtype {found.dtype}; convert it with "
            "np.asarray(..., dtype=float)"
        )
    if found.ndim and len(found) and found.strides[0] == 0 and found.dtype != np.float64:
        return np.broadcast_to(found[0].astype(np.float64), found.shape)
    return found.astype(np.float64, copy=False)


def real_targets(y: Any) -> Array:
    """Targets as float64; one that is missing in an array of objects (None) is refused, too.

    scikit-learn looks for NaN before None becomes one, and one NaN would go into every sum.
    """
    try:
        found = np.asarray(y, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidInput("y must hold numbers, got others; leave out such rows") from None
    if np.isnan(found).any():
        raise InvalidInput("y must hold numbers, got missing ones; leave out such rows")
    return found


def check_ranges(**values: Any) -> None:
    """Refuse ranges, pairs (low, high) in rows, that are empty or that float64 cannot scale.

    Coefficients are quotients of widths of two of them, so that 1e±150 is as far as it goes.
    """
    ((name, value),) = values.items()
    for low, high in np.asarray(value, dtype=np.float64).tolist():
        if not -math.inf < low < high < math.inf:
            raise InvalidInput(f"{name} must be finite with low < high, got {(low, high)}")
        if max(-low, high) > WIDEST or high - low < 1 / WIDEST:
            raise InvalidInput(
                f"{name} must lie within ±{WIDEST:g} and be {1 / WIDEST:g} apart at least, got "
                f"{(low, high)}; use other units"
            )


def refuse_complex(**values: Any) -> None:
    """Raise for complex arrays, frames and sparse matrices, and for objects that are complex."""
    for name, value in values.items():
        if not hasattr(value, "dtype") and not hasattr(value, "dtypes"):
            try:
                value = np.asarray(value)
            except (TypeError, ValueError):  # no table at all, which others say better
                continue
        kinds = getattr(value, "dtypes", None)  # of a frame, one for each column
        dtypes = [getattr(value, "dtype", None)] if kinds is None else list(np.ravel(kinds))
        found = [str(dtype) for dtype in dtypes if getattr(dtype, "kind", "") == "c"]
        if any(getattr(dtype, "kind", "") == "O" for dtype in dtypes) and any(
            isinstance(one, complex | np.complexfloating) for one in np.ravel(np.asarray(value))
        ):
            found.append("objects that are complex")
        if found:
            raise InvalidInput(
                f"{name} must hold real numbers, got {found[0]}; Complex data not supported"
            )
