"""Fingerprints: what was in a batch, and what the release of a step was computed from.

The noise of step t depends on the key and t alone. If step t were released twice with different
gradients, the difference of the two releases would be free of noise. So the ledger keeps, for
every step, a hash of the batch (every tensor's type, shape and bytes, and the ids) and of the
state that turns it into a gradient: clipping, optimizer settings and the parameters. Parameters
are sampled (at most 4,096 entries of each tensor) and only on the CPU, where a replay with the same
number of threads is exact to the last bit; on a GPU two honest runs may differ there.

Batch fingerprints are keyed by a secret of the run: who reads the ledger cannot try out guesses of
what a batch held.

>>> import torch
>>> one = of_batch((torch.arange(3),), None)
>>> one == of_batch((torch.arange(3),), None), one == of_batch((torch.arange(3.0),), None)
(True, False)
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from noshuffle.release import digest, digest_host
from noshuffle.release.units import Ids

SIZE = 16
#: The form of these fingerprints; those of another form cannot be compared with them.
FORM = "2"
_SAMPLED = 4096
#: Whole numbers by size: the bits of any parameter as NumPy knows them.
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def secret_of(key: bytes) -> bytes:
    """The secret of a run's fingerprints, from its noise key; says nothing about the key."""
    return hashlib.blake2b(b"fingerprints", key=key, person=b"ns-secret").digest()


def of_batch(
    batch: tuple[Any, ...],
    ids: Ids | None,
    *,
    secret: bytes = b"",
    digests: Sequence[bytes] | None = None,
    flat: tuple[Sequence[Any], bytes] | None = None,
    words: Sequence[bytes] | None = None,
) -> bytes:
    """Fingerprint of a batch: structure, types, shapes, bytes, ids.

    Tensors are digested where they lie (`digest`, and `digest_host` in ordinary memory, with
    the same bits); `digests` gives the digests of all tensors where they are known already, `flat`
    what `flattened` says of the batch, `words` what `_words` said of each leaf.
    """
    hasher = _keyed(secret).copy()
    leaves, structure = flattened(batch) if flat is None else flat
    hasher.update(structure)
    known = None if digests is None else iter(digests)
    for leaf, own in zip(leaves, map(_words, leaves) if words is None else words):
        hasher.update(own)
        if isinstance(leaf, Tensor):
            hasher.update(_digest(leaf, secret) if known is None else next(known))
    if ids is not None:
        hasher.update(np.ascontiguousarray(ids).tobytes())
    return hasher.digest()[:SIZE]


def begin(batch: tuple[Any, ...], ids: Ids | None, *, secret: bytes = b"") -> Callable[[], bytes]:
    """Start the fingerprint of a batch that lies on a device; to call the result is to wait.

    It is of the batch as it is now, whatever becomes of it meanwhile.
    """
    flat = flattened(batch)
    digests = digest.begin([leaf for leaf in flat[0] if isinstance(leaf, Tensor)], secret)
    words, own = [_words(leaf) for leaf in flat[0]], None if ids is None else ids.copy()
    return lambda: of_batch(batch, own, secret=secret, digests=digests(), flat=flat, words=words)


def is_elsewhere(batch: tuple[Any, ...]) -> bool:
    """Whether the tensors of a batch lie on a device that works by itself, all on the same."""
    devices = {leaf.device for leaf in flattened(batch)[0] if isinstance(leaf, Tensor)}
    return len(devices) == 1 and devices.pop().type == "cuda"


def flattened(batch: tuple[Any, ...]) -> tuple[Sequence[Any], bytes]:
    """The leaves of a batch, and its structure in words."""
    if type(batch) is tuple and all(isinstance(leaf, Tensor) for leaf in batch):
        return batch, _tuple_of(len(batch))
    leaves, structure = tree_flatten(batch)
    return leaves, repr(structure).encode()


@lru_cache(maxsize=64)
def _tuple_of(count: int) -> bytes:
    """The structure of a tuple of so many leaves, in words: the usual batch."""
    return repr(tree_flatten((0,) * count)[1]).encode()


@lru_cache(maxsize=64)
def _header(dtype: torch.dtype, shape: torch.Size) -> bytes:
    """Type and shape of a tensor in words."""
    return f"{dtype}{tuple(shape)}".encode()


@lru_cache(maxsize=8)
def _keyed(secret: bytes) -> hmac.HMAC:
    return hmac.new(secret or b"no secret", b"ns-batch", digestmod="sha256")


@dataclass(frozen=True)
class _Sample:
    """Where the sampled entries of one parameter lie, and what is hashed before them."""

    shape: torch.Size
    dtype: torch.dtype
    place: int
    header: bytes
    row: Any
    room: Any

    def fits(self, value: Tensor) -> bool:
        """Whether these are the entries of this parameter, as it is now.

        The row keeps its memory from being given to anybody else, so that one address is one place.
        """
        is_same = value.data_ptr() == self.place and value.is_contiguous()
        return is_same and value.dtype is self.dtype and value.shape == self.shape


class Samples:
    """Remembers where the sampled entries of parameters lie, for somebody who asks in every step.

    State: a view of every parameter, and room for its entries.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Sample] = {}

    def of(self, value: Tensor) -> _Sample:
        """The sample of one parameter in ordinary memory."""
        known = self._known.get(id(value))
        if known is None or not known.fits(value):
            known = self._known[id(value)] = _sample(value)
        return known


def _sample(value: Tensor) -> _Sample:
    flat = value.detach().reshape(-1)
    row = flat.view(_WHOLE[flat.element_size()]).numpy()
    row = row[:: max(1, -(-len(row) // _SAMPLED))]
    header = f"{value.dtype}{tuple(value.shape)}".encode()
    place = value.data_ptr() if flat.data_ptr() == value.data_ptr() else -1  # -1: a copy, used once
    room = np.empty(len(row), dtype=row.dtype)
    return _Sample(value.shape, value.dtype, place, header, row, room)


def of_state(
    settings: Mapping[str, Any], parameters: Iterable[Tensor], *, samples: Samples | None = None
) -> bytes:
    """Fingerprint of everything but the batch that a step's gradient and update depend on."""
    # SHA-256 has instructions of its own in today's processors.
    hasher = hashlib.sha256(b"ns-state")
    hasher.update(json.dumps(settings, sort_keys=True, default=repr).encode())
    for value in parameters:
        if value.device.type == "cpu":
            sample = _sample(value) if samples is None else samples.of(value)
            sample.room[:] = sample.row
            hasher.update(sample.header)
            hasher.update(sample.room)
    return hasher.digest()[:SIZE]


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Learning rates and the like, without the parameters themselves."""
    return [
        {k: _plain(v) for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _digest(value: Tensor, secret: bytes) -> bytes:
    if value.device.type == "cpu":
        return digest_host.of_tensor(value, secret)
    return digest.of_tensor(value, secret)


def _words(leaf: Any) -> bytes:
    """All of a leaf that lies in ordinary memory: of a tensor, its type and shape."""
    if isinstance(leaf, Tensor):
        return _header(leaf.dtype, leaf.shape)
    if isinstance(leaf, np.ndarray):
        return f"{leaf.dtype}{leaf.shape}".encode() + np.ascontiguousarray(leaf).tobytes()
    text = repr(leaf).encode()
    return f"{len(text)}:".encode() + text  # or (1, 23) would be (12, 3)
