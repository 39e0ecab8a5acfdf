"""A warning where rows are fitted (trained on) again in one process, and no budget counts that.

Every fit has a sketch: the smallest of its rows' hashes, by a random vector of this process. Two
tables that share many rows share many of their smallest hashes (Broder 1997), so the folds of a
cross-validation are known for the same data, and tables that merely look alike are not. Nothing
leaves the process, and the sketches say nothing of a row to whoever lacks the vector. A fit warns
before it releases something, and counts once it has.

State: the sketches of the last fits of this process.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noshuffle.user_warnings import warn_user

_SIZE, _FITS, _BLOCK, _FIRST = 64, 256, 4096, 1024
#: Share of a sketch from which on two tables count as the same data.
_ALIKE = 0.25
_SEED = int.from_bytes(os.urandom(8), "little")
_SEEN: deque[frozenset[int]] = deque(maxlen=_FITS)


class RepeatedFit(UserWarning):
    """The same rows were fitted before, and their privacy costs add up uncounted."""


def sketch(x: Any) -> frozenset[int]:
    """The hashes of the first rows in a random order; empty where most rows stand several times.

    Rows are ordered by a hash of two columns, then by one of the whole row, which only those at
    the beginning need: the same ones wherever in a table they stand.
    """
    random = np.random.default_rng((_SEED, x.shape[1]))
    draws, columns = random.standard_normal(x.shape[1]), random.permutation(x.shape[1])[:2]
    short = np.zeros(x.shape[0], dtype=np.uint64)
    if isinstance(x, np.ndarray):
        short = _hashes(x[:, columns], draws[columns])
    if len(short) > _FIRST:
        chosen = np.flatnonzero(short <= np.partition(short, _FIRST)[_FIRST])
        x, short = x[chosen], short[chosen]
    with np.errstate(invalid="ignore"):  # rows with infinities are hashed like others
        whole = _hashes(x, draws)
    whole = whole[np.lexsort((whole, short))]
    distinct = whole[np.flatnonzero(np.diff(whole, prepend=~whole[:1]))]
    return frozenset(distinct[:_SIZE].tolist() if 2 * len(distinct) >= len(whole) else ())


def _hashes(x: Any, draws: NDArray[np.float64]) -> NDArray[np.uint64]:
    hashes = np.empty(x.shape[0], dtype=np.uint64)
    for first in range(0, x.shape[0], _BLOCK):
        block = x[first : first + _BLOCK]
        # Row by row the same sum, to the last bit, wherever in a table a row stands.
        dense = np.multiply(block, draws).sum(1) if isinstance(x, np.ndarray) else block @ draws
        bits = np.asarray(dense, dtype=np.float64).ravel().view(np.uint64)
        bits = (bits ^ (bits >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
        hashes[first : first + _BLOCK] = bits ^ (bits >> np.uint64(29))
    return hashes


def warn_if_fitted_before(x: Any, *, what: str = "fit") -> frozenset[int]:
    """Warn if many of these rows were fitted before; returns what to `remember` them by."""
    own = sketch(x)
    before = sum(len(own & other) > _ALIKE * min(len(own), len(other)) for other in _SEEN)
    if before:
        warn_user(
            f"{what} {before + 1} of the same rows in this process: the privacy costs add up, and "
            f"the ε of a statement is that of one {what}; give every {what} the same "
            "budget=noshuffle.Budget(folder, epsilon=…, delta=…) to have them counted",
            RepeatedFit,
        )
    return own


def remember(own: frozenset[int]) -> None:
    """Count a fit that has released something; one that was refused costs nothing."""
    if own:
        _SEEN.append(own)
