"""Ids of units, integers or names, as 64-bit integers.

Names become integers through 64 bits of BLAKE2b, under the secret of a run; two that collided would
count as one unit, which is the strict side. What could count as two units where there is one (5 and
"5" in one batch) is refused. No state but a cache of names.

>>> as_ids([7, 3]).tolist(), as_ids(["a", "b"]).tolist() == [name_to_id("a"), name_to_id("b")]
([7, 3], True)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Any
from uuid import UUID

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from noshuffle.errors import InvalidInput

Ids = NDArray[np.int64]
#: Kinds of arrays that hold Python's objects: those of pandas, and NumPy's own texts.
_OBJECTS = "OT"
#: What NumPy would make two ids, or an id that is a text, of.
_NO_IDS = (tuple, UUID, type(None))


def name_to_id(name: str | bytes, *, secret: bytes = b"") -> int:
    """64 bits of BLAKE2b of a unit's name, as a signed integer.

    With a secret, nobody who reads the ledger can try out names.
    """
    return _hashed(name, secret)


@lru_cache(maxsize=2**18)  # federated users check in again in every round
def _hashed(name: str | bytes, secret: bytes) -> int:
    # Half a surrogate pair, which JSON and some file names hold, is a name like others.
    data = name.encode("utf-8", "surrogatepass") if isinstance(name, str) else name
    digest = hashlib.blake2b(data, digest_size=8, key=secret).digest()
    return int.from_bytes(digest, "little", signed=True)


def kind_of_ids(ids: Any) -> str:
    """ "integers" or "names"; "" for none at all. What is neither, `as_ids` refuses."""
    if isinstance(ids, Tensor):
        return "integers" if ids.numel() else ""
    if isinstance(ids, np.ndarray) and ids.dtype.kind not in _OBJECTS:
        return ("names" if ids.dtype.kind in "US" else "integers") if ids.size else ""
    first = next(iter(ids), None) if isinstance(ids, Iterable) else ids
    return "" if first is None else "names" if isinstance(first, str | bytes) else "integers"


def ids_and_kind(ids: Any, *, secret: bytes = b"") -> tuple[Ids, str]:
    """`as_ids` and `kind_of_ids` of ids that can be read once only (a generator), too.

    >>> ids_and_kind(iter(["7"]))[1], ids_and_kind(iter([7]))[1]
    ('names', 'integers')
    """
    if isinstance(ids, Iterable) and not isinstance(ids, Tensor | np.ndarray):
        ids = list(ids)
    return as_ids(ids, secret=secret), kind_of_ids(ids)


def as_ids(ids: Any, *, secret: bytes = b"") -> Ids:
    """Unit ids from a tensor, an array, or a list of integers or names."""
    if isinstance(ids, Tensor):
        ids = ids.detach().cpu().numpy()
    if not isinstance(ids, np.ndarray) or ids.dtype.kind in _OBJECTS:
        items = list(ids) if isinstance(ids, Iterable) else [ids]
        kinds = set(map(type, items))
        are_names = {issubclass(kind, str | bytes) for kind in kinds}
        if are_names == {True}:
            return np.array([_hashed(i, secret) for i in items], dtype=np.int64)
        if True in are_names:
            raise InvalidInput(
                "ids must all be integers or all be names, got both in one batch; 5 and '5' would "
                "count as two units"
            )
        if strange := [kind for kind in kinds if issubclass(kind, _NO_IDS)]:
            raise InvalidInput(
                "ids must be one integer or name per example, got one of type "
                f"{strange[0].__name__}; make names of them: [str(one) for one in ids]"
            )
        ids = np.array(items, dtype=np.int64) if not items else np.asarray(items)
    if ids.ndim != 1 or ids.dtype.kind not in "iuUS":
        raise InvalidInput(
            "ids must be one integer or name per example, got an array of shape "
            f"{ids.shape} and type {ids.dtype}; make names of them: [str(one) for one in ids]"
        )
    if ids.dtype.kind in "US":
        return as_ids(ids.tolist(), secret=secret)
    if ids.dtype == np.uint64 and ids.size and int(ids.max()) > np.iinfo(np.int64).max:
        raise InvalidInput("ids must fit into 64 signed bits, got a larger one; give names instead")
    return np.asarray(ids, dtype=np.int64)
