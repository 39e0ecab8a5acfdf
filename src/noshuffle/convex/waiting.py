"""WaitingRows: single rows of a stream wait for the rest of their batch, and are summed together.

Between two releases the iterate does not move, so what rows add to the sum does not depend on when
it is computed; ten rows in one product cost what one does. Pieces of more than `FEW` rows are
summed as they come. Where a batch is cut depends on the pieces and on saves alone, never on who
looks. State: copies of raw rows, as secret as the unfinished sum, in memory only.

>>> rows = WaitingRows()
>>> [rows.keep(np.array([[v]]), np.array([0]), None) for v in (1.0, 2.0)]
[True, True]
>>> x, y, weight = rows.joined()
>>> x.tolist(), y.tolist(), weight
([[1.0], [2.0]], [0, 0], None)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from noshuffle.convex.arrays import Array, Targets

#: Larger pieces are summed as they come.
FEW = 8


class WaitingRows:
    """Pieces of a batch that were admitted and not summed yet."""

    def __init__(self) -> None:
        self._pieces: list[tuple[Array, Targets, Array | None]] = []

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def keep(self, x: Any, y: Targets, weight: Array | None) -> bool:
        """Copy a small dense piece; False where it is to be summed at once."""
        if x.shape[0] > FEW or type(x) is not np.ndarray:
            return False
        self._pieces.append((x.copy(), y.copy(), None if weight is None else weight.copy()))
        return True

    def joined(self) -> tuple[Array, Targets, Array | None]:
        """All of them as one piece."""
        x, y, weights = zip(*self._pieces)
        weight = None
        if any(own is not None for own in weights):
            known = (np.ones(len(t)) if w is None else w for w, t in zip(weights, y))
            weight = np.concatenate(list(known))
        return np.concatenate(x), np.concatenate(y), weight

    def take(self) -> tuple[Array, Targets, Array | None]:
        """The same, and they wait no longer."""
        found, self._pieces = self.joined(), []
        return found
