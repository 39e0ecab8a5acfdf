"""The digest of `digest` on a CPU, in C: a batch of a megabyte in a tenth of a millisecond.

    d[b, l] = (Σ_i k[l, i] · m[b, i]) >> 32            D[o] = Σ_b Σ_l κ[b, l, o] · d[b, l]

modulo 2⁶⁴, as `digest` defines it. Two blocks are read at a time, so that each key is loaded
once for both. All arithmetic is exact, so the digest is the same with and without a compiler, on a
CPU and on a GPU, and for any number of threads. No state but the keys of the last few secrets.

>>> of_tensor(torch.arange(5.0), b"secret") == digest.of_tensor(torch.arange(5.0), b"secret")
True
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

from noshuffle.c_library import build, together
from noshuffle.release import digest
from noshuffle.release.digest import BLOCK, LANES, Keys, width

#: Words below which a second thread costs more than it saves.
_ALONE = 1 << 16
#: Elements that a process digests by torch before it is worth a compiler's time; how many it has.
_SOON, _seen = 1 << 20, [0]

_TEXT = r"""
#include <stdint.h>

typedef struct {
    int64_t next, words, size;  /* size: bytes of a word */
    const void *data;
    const uint64_t *first, *second;
    uint64_t *out;
} Job;

/* blocks b and b + 1 of words of one type */
#define PAIR(TYPE) \
static void pair_##TYPE(const Job *job, int64_t b, uint64_t *own) { \
    const TYPE *m = (const TYPE *)job->data + b * BLOCK; \
    int64_t left = job->words - b * BLOCK; \
    int64_t one = left < BLOCK ? left : BLOCK; \
    int64_t two = left - BLOCK < 0 ? 0 : left - BLOCK < BLOCK ? left - BLOCK : BLOCK; \
    for (int l = 0; l < LANES; l++) { \
        const uint64_t *key = job->first + l * BLOCK; \
        uint64_t s = 0, t = 0; \
        for (int64_t i = 0; i < two; i++) { \
            s += key[i] * (uint64_t)m[i]; \
            t += key[i] * (uint64_t)m[BLOCK + i]; \
        } \
        for (int64_t i = two; i < one; i++) s += key[i] * (uint64_t)m[i]; \
        const uint64_t *second = job->second + (b * LANES + l) * LANES; \
        for (int o = 0; o < LANES; o++) own[o] += second[o] * (s >> 32); \
        second += two > 0 ? LANES * LANES : 0; /* without a second block t is zero */ \
        for (int o = 0; o < LANES; o++) own[o] += second[o] * (t >> 32); \
    } \
}
PAIR(uint32_t) PAIR(uint16_t) PAIR(uint8_t)

void digest(Job *job) {
    uint64_t own[LANES] = {0};
    int64_t b;
    while ((b = 2 * __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) * BLOCK < job->words)
        if (job->size == 4) pair_uint32_t(job, b, own);
        else if (job->size == 2) pair_uint16_t(job, b, own);
        else pair_uint8_t(job, b, own);
    for (int o = 0; o < LANES; o++) __atomic_fetch_add(job->out + o, own[o], __ATOMIC_RELAXED);
}
"""


class _Job(ctypes.Structure):
    """A job as the C text declares it."""

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


def of_group(values: Iterable[Tensor], secret: bytes) -> bytes:
    """The 32 bytes of D of several tensors in ordinary memory as one row of words."""
    keys, group = _keys(secret), [value.detach().contiguous() for value in values]
    built = library()
    if built is None:
        found: bytes = digest.plain(keys, group).numpy().tobytes()
        return found
    return _digest(built, keys, *group)


def _digest(built: ctypes.CDLL, keys: Keys, *group: Tensor) -> bytes:
    sizes = [width(flat.real if flat.is_complex() else flat) for flat in group]
    counts = [flat.numel() * flat.element_size() // size for flat, size in zip(group, sizes)]
    second = keys.second(max(1, sum(-(-words // BLOCK) for words in counts)))
    out, block = (ctypes.c_uint64 * LANES)(), 0
    for flat, size, words in zip(group, sizes, counts):
        own = second.data_ptr() + block * LANES * LANES * 8
        places = (flat.data_ptr(), keys.first.data_ptr(), own, ctypes.addressof(out))
        threads = torch.get_num_threads() if words >= _ALONE else 1
        together(built.digest, _Job(0, words, size, *places), threads=threads)
        block += -(-words // BLOCK)
    return bytes(out)


@lru_cache(maxsize=4)
def _keys(secret: bytes) -> Keys:
    return Keys(secret, device="cpu")


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled loop, or None where it cannot be built or is switched off.

    Guarantees: handed out only after it gave the digests of `digest.plain`.
    """
    built = _build(_TEXT)
    return built if built is not None and _agrees(built) else None


def _build(text: str) -> ctypes.CDLL | None:
    built = build(f"#define BLOCK {BLOCK}\n#define LANES {LANES}\n{text}")
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
