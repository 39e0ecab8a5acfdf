"""Fingerprints of batches: by what a batch is known where its examples have no ids.

A batch without ids is its own unit, and must come again at its place in every epoch; so the ledger
keeps a hash of it (every tensor's type, shape and bytes). They are keyed by a secret of the run:
who reads the ledger cannot try out guesses of what a batch held. What was released of a batch is
not inferred from it: that is the digest of the clipped sum (`release`).

>>> import torch
>>> one = of_batch((torch.arange(3),), None)
>>> one == of_batch((torch.arange(3),), None), one == of_batch((torch.arange(3.0),), None)
(True, False)
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from noshuffle.release import digest, tags
from noshuffle.release.unit_ids import Ids

SIZE = 16
#: The form of these fingerprints; those of another form cannot be compared with them.
FORM = "2"


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

    Tensors are digested where they lie. `digests` gives the digests of all tensors where they are
    known already, `flat` what `flattened` says of the batch, `words` what `_words` said of each
    leaf.
    """
    leaves, structure = flattened(batch) if flat is None else flat
    parts = [b"ns-batch", structure]
    known = None if digests is None else iter(digests)
    for leaf, own in zip(leaves, map(_words, leaves) if words is None else words):
        parts.append(own)
        if isinstance(leaf, Tensor):
            parts.append(_digest(leaf, secret) if known is None else next(known))
    if ids is not None:
        parts.append(np.ascontiguousarray(ids).tobytes())
    return hmac.digest(secret or b"no secret", b"".join(parts), "sha256")[:SIZE]


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
    return f"{dtype}{tuple(shape)}".encode()


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
        return tags.of_group([value], secret)
    return digest.of_tensors([value], secret)[0]


def _words(leaf: Any) -> bytes:
    """All of a leaf that lies in ordinary memory: of a tensor, its type and shape."""
    if isinstance(leaf, Tensor):
        return _header(leaf.dtype, leaf.shape)
    if isinstance(leaf, np.ndarray):
        return f"{leaf.dtype}{leaf.shape}".encode() + np.ascontiguousarray(leaf).tobytes()
    text = repr(leaf).encode()
    return f"{len(text)}:".encode() + text  # or (1, 23) would be (12, 3)
