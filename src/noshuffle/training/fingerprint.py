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
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from noshuffle.training.units import Ids

SIZE = 16
_SAMPLED = 4096


def secret_of(key: bytes) -> bytes:
    """The secret of a run's fingerprints, from its noise key; says nothing about the key."""
    return hashlib.blake2b(b"fingerprints", key=key, person=b"ns-secret").digest()


def of_batch(batch: tuple[Any, ...], ids: Ids | None, *, secret: bytes = b"") -> bytes:
    """Fingerprint of a batch: structure, types, shapes, bytes, ids."""
    # SHA-256 has instructions of its own in today's processors; a batch may be megabytes.
    hasher = hmac.new(secret or b"no secret", b"ns-batch", digestmod="sha256")
    leaves, structure = tree_flatten(batch)
    hasher.update(repr(structure).encode())
    for leaf in leaves:
        _feed(hasher, leaf)
    if ids is not None:
        hasher.update(np.ascontiguousarray(ids).tobytes())
    return hasher.digest()[:SIZE]


def of_state(settings: Mapping[str, Any], parameters: Iterable[Tensor]) -> bytes:
    """Fingerprint of everything but the batch that a step's gradient and update depend on."""
    hasher = hashlib.blake2b(digest_size=SIZE, person=b"ns-state")
    hasher.update(json.dumps(settings, sort_keys=True, default=repr).encode())
    for value in parameters:
        if value.device.type == "cpu":
            flat = value.detach().reshape(-1)
            _feed(hasher, flat[:: max(1, -(-flat.numel() // _SAMPLED))])
    return hasher.digest()


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Learning rates and the like, without the parameters themselves."""
    return [
        {k: _plain(v) for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _feed(hasher: hmac.HMAC | hashlib.blake2b, leaf: Any) -> None:
    if isinstance(leaf, Tensor):
        value = leaf.detach().cpu().contiguous()
        hasher.update(f"{value.dtype}{tuple(value.shape)}".encode())
        if value.numel():
            hasher.update(value.reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(leaf, np.ndarray):
        hasher.update(f"{leaf.dtype}{leaf.shape}".encode())
        hasher.update(np.ascontiguousarray(leaf).tobytes())
    else:
        hasher.update(repr(leaf).encode())
