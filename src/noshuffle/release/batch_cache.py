"""Batches that came before: the units of each, in order, by the bytes of its ids.

To find the distinct units of a batch is a sort, and an epoch brings the same batches again. State:
the batches, as many as hold two million rows; when there are more it starts anew.

>>> import numpy as np
>>> cache = BatchCache()
>>> cache.add(np.array([7, 3]).tobytes(), np.array([3, 7]))
>>> cache.get(np.array([7, 3]).tobytes())[0].tolist(), cache.get(b"")
([3, 7], None)
"""

from __future__ import annotations

from noshuffle.release.units import Ids

_MOST_ROWS = 2**21


class BatchCache:
    """Batches in which every row counts: distinct units (not to be written to), and their bytes."""

    def __init__(self) -> None:
        self._batches: dict[bytes, tuple[Ids, bytes]] = {}
        self._rows = 0

    def get(self, ids: bytes) -> tuple[Ids, bytes] | None:
        """Of the batch whose ids have these bytes."""
        return self._batches.get(ids)

    def add(self, ids: bytes, units: Ids) -> None:
        """Remember a batch, and keep its units from being changed."""
        rows = len(ids) // 8
        if self._rows + rows > _MOST_ROWS:
            self._batches, self._rows = {}, 0
        units.flags.writeable = False
        key = units.tobytes()
        self._batches[ids] = (units, ids if key == ids else key)
        self._rows += rows
