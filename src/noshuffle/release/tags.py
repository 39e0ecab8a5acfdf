"""Keyed digests of tensors in ordinary memory, at the speed of memory.

    tag = GHASH_H(bytes) ⊕ AES_K(nonce),      H = AES_K(0)                GMAC, NIST SP 800-38D

under a key derived from the secret of the run. Two different messages of b blocks of 16 bytes share
a tag with probability at most b·2⁻¹²⁸ for whoever does not know the key, and a ledger holds a keyed
hash of it only. Types and shapes are the caller's to add. `native/ghash.c` multiplies in GF(2¹²⁸)
on torch's threads, the `cryptography` package elsewhere, with the same tags: they are compared
before the first use in a process. State: none.

>>> zeros = torch.zeros(2)
>>> of_group([zeros], b"secret") == of_group([-zeros], b"secret")
False
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from noshuffle.c_library import build, text_of, together

_NONCE = bytes(12)  # one for all: tags are compared, never shown
#: Blocks that a thread takes at a time, and below which a second thread costs more than it saves.
PIECE, _LONG = 4096, 8192


#: Where bytes lie (an address, or they themselves), and how many.
Part = tuple[int | bytes, int]


class Hash(ctypes.Structure):
    """GHASH so far, as `native/ghash.c` declares it."""

    _fields_ = (
        *((name, ctypes.c_uint8 * 16) for name in ("key", "sum", "rest")),
        ("held", ctypes.c_int64),
    )


class HashJob(ctypes.Structure):
    """Blocks for several threads, as `native/ghash.c` declares them."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("next", "blocks")),
        *((name, ctypes.c_void_p) for name in ("data", "key", "sums")),
    )


def of_group(values: Iterable[Tensor], secret: bytes) -> bytes:
    """16 bytes that stand for what several tensors hold, in their order.

    Guarantees: a function of the secret, the number of bytes of each tensor and the bytes
    themselves.
    """
    held = [
        # Mostly its bytes are its numbers, in order: nothing to be copied.
        value
        if value.is_contiguous() and not (value.is_conj() or value.is_neg())
        else value.detach().resolve_conj().resolve_neg().contiguous()
        for value in values
    ]
    sizes = [value.numel() * value.element_size() for value in held]
    # The sizes go in too, or bytes could move between tensors.
    end = struct.pack(f"<{len(sizes)}q", *sizes)
    loops, key = library(), _key(secret)
    if loops is None:
        views = [value.detach().reshape(-1).view(torch.uint8).numpy().data for value in held]
        return tag_by_library([*views, end], key)
    places = [value.data_ptr() for value in held]
    return tag_in_c(loops, [*zip(places, sizes), (end, len(end))], key)


def tag_by_library(parts: Sequence[bytes | memoryview], key: bytes) -> bytes:
    """GMAC of bytes that follow one another, by the `cryptography` package."""
    from cryptography.hazmat.primitives.ciphers import modes

    encryptor = _encryptor(key, modes.GCM(_NONCE))
    for part in parts:
        encryptor.authenticate_additional_data(part)
    encryptor.finalize()
    tag: bytes = encryptor.tag
    return tag


def tag_in_c(loops: ctypes.CDLL, parts: Sequence[Part], key: bytes, threads: int = 0) -> bytes:
    """The same by the compiled loop, on torch's threads or as many as are given."""
    threads = threads or torch.get_num_threads()
    multiplier, mask = _blocks(key)
    state = Hash(key=(ctypes.c_uint8 * 16)(*multiplier))
    here, total = ctypes.addressof(state), 0
    for place, size in parts:
        total += size
        if threads > 1 and size >= 16 * _LONG and isinstance(place, int):
            lead = -state.held % 16
            loops.ghash(here, place, lead)
            blocks = (size - lead) // 16
            sums = (ctypes.c_uint8 * (16 * -(-blocks // PIECE)))()
            job = HashJob(0, blocks, place + lead, here, ctypes.addressof(sums))
            together(loops.ghash_pieces, job, threads=threads)
            loops.ghash_gather(here, ctypes.addressof(job))
            place, size = place + lead + 16 * blocks, size - lead - 16 * blocks
        loops.ghash(here, place, size)
    end = bytes(-total % 16) + (8 * total).to_bytes(8, "big") + bytes(8)
    loops.ghash(here, end, len(end))
    tag = int.from_bytes(bytes(state.sum), "little") ^ int.from_bytes(mask, "little")
    return tag.to_bytes(16, "little")


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled loop, or None where it cannot be built or is switched off.

    Guarantees: it is handed out only after its tags were found equal to those of another library.
    """
    built = build(text_of("ghash.c"))
    return built if built is not None and agrees(built) else None


def agrees(built: ctypes.CDLL) -> bool:
    """Whether this processor has the instruction, and the loop gives the tags of the standard."""
    if not built.ghash_ready():
        return False
    for name, types in (("ghash", "PPN"), ("ghash_pieces", "P"), ("ghash_gather", "PP")):
        kinds = {"P": ctypes.c_void_p, "N": ctypes.c_int64}
        getattr(built, name).argtypes = [kinds[kind] for kind in types]
        getattr(built, name).restype = None
    key, long = bytes(range(32)), 16 * (_LONG + PIECE) + 5
    text = hashlib.shake_256(b"ghash").digest(long)
    memory = ctypes.create_string_buffer(text, long)
    place = ctypes.addressof(memory)
    for sizes in ((1, 16), (7, 9, 40), (255, 258), (3, long, 11)):
        wanted = tag_by_library([text[:size] for size in sizes], key)
        parts = [(place, size) for size in sizes]
        if any(tag_in_c(built, parts, key, threads) != wanted for threads in (1, 2)):
            return False
    return True


@lru_cache(maxsize=8)
def _key(secret: bytes) -> bytes:
    return hashlib.blake2b(secret, person=b"ns-host-digest", digest_size=32).digest()


@lru_cache(maxsize=8)
def _blocks(key: bytes) -> tuple[bytes, bytes]:
    """H, and AES of the first counter, which goes onto the sum."""
    from cryptography.hazmat.primitives.ciphers import modes

    encryptor = _encryptor(key, modes.ECB())
    return encryptor.update(bytes(16)), encryptor.update(_NONCE + bytes((0, 0, 0, 1)))


def _encryptor(key: bytes, mode: Any) -> Any:
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    return Cipher(algorithms.AES256(key), mode).encryptor()
