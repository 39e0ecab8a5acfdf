"""The digest of `digest` on a CPU, in C: a batch of a megabyte in a tenth of a millisecond.

    d[b, l] = (Σ_i k[l, i] · m[b, i]) >> 32            D[o] = Σ_b Σ_l κ[b, l, o] · d[b, l]

modulo 2⁶⁴, as `digest` defines it; `native/digest.c` says how it is computed. All arithmetic is
exact, so the digest is the same with and without a compiler, on a CPU and on a GPU, and for any
number of threads. No state but the keys of the last few secrets.

>>> of_tensor(torch.arange(5.0), b"secret") == digest.of_tensor(torch.arange(5.0), b"secret")
True
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from noshuffle.c_library import build, text_of, together
from noshuffle.release import digest
from noshuffle.release.digest import BLOCK, LANES, Keys, width

#: Words below which a second thread costs more than it saves.
_ALONE = 1 << 16
#: Elements that a process digests by torch before it is worth a compiler's time; how many it has.
_SOON, _seen = 1 << 20, [0]


class DigestJob(ctypes.Structure):
    """A job as `native/digest.c` declares it."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("next", "words", "size")),
        *((name, ctypes.c_void_p) for name in ("data", "first", "second", "out")),
    )


def of_tensor(value: Tensor, secret: bytes) -> bytes:
    """The 32 bytes of D of one tensor in ordinary memory.

    Guarantees: a function of the secret and the bytes of the tensor alone; see `digest` for
    how rarely two tensors of one type and shape can share it.
    """
    keys, value = _keys(secret), value.detach()
    flat = value if value.is_contiguous() else value.contiguous()
    _seen[0] += flat.numel()
    built = library() if _seen[0] > _SOON else None
    if built is None:
        found: bytes = digest.plain(keys, [flat]).numpy().tobytes()
        return found
    return _digest(built, keys, flat)


def _digest(built: ctypes.CDLL, keys: Keys, flat: Tensor) -> bytes:
    size = width(flat.real if flat.is_complex() else flat)
    words = flat.numel() * flat.element_size() // size
    second = keys.second(max(1, -(-words // BLOCK)))
    out = (ctypes.c_uint64 * LANES)()
    places = (flat.data_ptr(), keys.first.data_ptr(), second.data_ptr(), ctypes.addressof(out))
    threads = torch.get_num_threads() if words >= _ALONE else 1
    together(built.digest, DigestJob(0, words, size, *places), threads=threads)
    return bytes(out)


@lru_cache(maxsize=4)
def _keys(secret: bytes) -> Keys:
    return Keys(secret, device="cpu")


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled loop, or None where it cannot be built or is switched off.

    Guarantees: handed out only after it gave the digests of `digest.plain`.
    """
    built = _build(text_of("digest.c"))
    return built if built is not None and _agrees(built) else None


def _build(text: str) -> ctypes.CDLL | None:
    built = build(text)
    if built is not None:
        built.digest.argtypes, built.digest.restype = [ctypes.c_void_p], None
    return built


def _agrees(built: ctypes.CDLL) -> bool:
    keys = Keys(b"trial", device="cpu")
    draw = torch.Generator().manual_seed(0)
    row = torch.randint(-(2**31), 2**31, (3 * BLOCK + 5,), generator=draw).to(torch.int32)
    trials = [row, row[:7], row[: 2 * BLOCK], row.to(torch.int16), row.to(torch.uint8), row.long()]
    return all(
        _digest(built, keys, trial) == digest.plain(keys, [trial]).numpy().tobytes()
        for trial in trials
    )
