"""Keyed digests of tensors in ordinary memory, at the speed of memory.

    tag = GHASH_H(bytes) ⊕ AES_K(nonce)                                   GMAC, NIST SP 800-38D

under a key derived from the secret of the run. Two different messages of b blocks of 16 bytes share
a tag with probability at most b·2⁻¹²⁸ for whoever does not know the key, and a ledger never holds
the tag itself but a keyed hash of it. Today's processors multiply in GF(2¹²⁸) by an instruction, so
this is several times faster than SHA-256. Types and shapes are the caller's to add. State: none.

>>> one, two = torch.arange(4.0), torch.arange(4.0)
>>> of_group([one], b"secret") == of_group([two], b"secret")
True
>>> two[3] = torch.nextafter(two[3], torch.tensor(9.0))
>>> of_group([one], b"secret") == of_group([two], b"secret")
False
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_NONCE = bytes(12)  # one for all: tags are compared, never shown


def of_group(values: Iterable[Tensor], secret: bytes) -> bytes:
    """16 bytes that stand for what several tensors hold, in their order.

    Guarantees: a function of the secret, the number of bytes of each tensor and the bytes
    themselves.
    """
    encryptor = _cipher(secret).encryptor()
    sizes = b""
    for value in values:
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        encryptor.authenticate_additional_data(flat.numpy().data)
        sizes += len(flat).to_bytes(8, "little")
    encryptor.authenticate_additional_data(sizes)  # or bytes could move between tensors
    encryptor.finalize()
    tag: bytes = encryptor.tag
    return tag


@lru_cache(maxsize=8)
def _cipher(secret: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    key = hashlib.blake2b(secret, person=b"ns-host-digest", digest_size=32).digest()
    return Cipher(algorithms.AES256(key), modes.GCM(_NONCE))
