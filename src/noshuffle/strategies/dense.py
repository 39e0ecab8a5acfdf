"""Any lower-triangular strategy, given as an explicit matrix: the reference for small n.

    C lower-triangular with a positive diagonal,   y_t = Σ_{r≤t} (C⁻¹)_{t,r} z_r

Numerical optima over all matrices arrive in this form (Denisov et al., arXiv 2202.08312; banded
ones: arXiv 2306.08153). State kept: none; step t makes its t+1 draws again, which is O(n²) draws
for the run. A run may be shorter than the matrix, because the leading block of the inverse is the
inverse of the leading block; it may not be longer.

>>> d = dense([[1.0], [0.5, 1.0]])
>>> d.encoder(2)
array([[1. , 0. ],
       [0.5, 1. ]])
>>> d.to_dict()
{'name': 'dense', 'matrix': [[1.0], [0.5, 1.0]]}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from noshuffle.errors import HorizonExceeded, InvalidInput, whole
from noshuffle.strategies.base import Strategy, dense_size
from noshuffle.strategies.recipe import Array, Recipe, Rows


def _lower_triangular(matrix: Array | Sequence[Sequence[float]]) -> Array:
    """A square matrix, or the rows of its lower triangle, as one read-only array."""
    try:
        n = len(matrix)
    except TypeError:
        raise InvalidInput(f"a dense strategy must be a matrix, got {matrix!r}") from None
    if n == 0:
        raise InvalidInput("a dense strategy needs at least one row, got none")
    dense_size(n)
    out = np.zeros((n, n))
    for t, row in enumerate(matrix):
        try:
            values = np.asarray(row, dtype=np.float64)
        except (TypeError, ValueError):
            raise InvalidInput(f"row {t} of a dense strategy must hold numbers") from None
        if values.shape not in {(n,), (t + 1,)}:
            raise InvalidInput(
                f"row {t} of a dense strategy must have {n} entries, or {t + 1} for the lower "
                f"triangle alone; got shape {values.shape}"
            )
        if np.any(values[t + 1 :] != 0):
            raise InvalidInput(f"a dense strategy must be lower-triangular; row {t} looks ahead")
        out[t, : t + 1] = values[: t + 1]
    if not np.all(np.isfinite(out)):
        raise InvalidInput("a dense strategy must hold finite numbers; got one that is not")
    if not np.all(np.diagonal(out) > 0):
        raise InvalidInput("the diagonal of a dense strategy must be > 0 to be invertible")
    out.setflags(write=False)
    return out


@dataclass(frozen=True, eq=False)
class Dense(Strategy):
    """C as a read-only matrix; two of them are equal when their entries are."""

    matrix: Array
    name: ClassVar[str] = "dense"

    def __post_init__(self) -> None:
        object.__setattr__(self, "matrix", _lower_triangular(self.matrix))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dense) and np.array_equal(self.matrix, other.matrix)

    def __hash__(self) -> int:
        return hash((self.matrix.shape, (self.matrix + 0.0).tobytes()))  # + 0.0: −0 equals 0

    def __repr__(self) -> str:
        return f"Dense({len(self.matrix)} steps)"

    def encoder(self, n: int) -> Array:
        whole(steps=n)
        if n > len(self.matrix):
            raise HorizonExceeded(
                f"the dense strategy covers {len(self.matrix)} steps, {n} were asked for; fit again"
            )
        return np.array(self.matrix[:n, :n])

    def noising(self, n: int) -> Array:
        from scipy.linalg import solve_triangular

        inverse = solve_triangular(self.encoder(n), np.eye(n), lower=True, check_finite=False)
        return np.asarray(inverse, dtype=np.float64)

    def recipe(self, n: int) -> Recipe:
        return Rows(matrix=self.noising(n))

    def buffers(self, n: int) -> int:
        return 0

    def words(self) -> str:
        return f"an explicit {len(self.matrix)}-step matrix"

    def to_dict(self) -> dict[str, Any]:
        """The lower triangle as plain rows."""
        rows = [row[: t + 1].tolist() for t, row in enumerate(self.matrix)]
        return {"name": self.name, "matrix": rows}


def dense(matrix: Array | Sequence[Sequence[float]]) -> Dense:
    """C from a square lower-triangular matrix, or from the rows of its lower triangle."""
    return Dense(matrix=matrix)  # type: ignore[arg-type]
