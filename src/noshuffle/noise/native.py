"""The inner loops in C, built when they are first needed and a C compiler is there.

Torch runs one pass over memory per operation; the transform to normals has about fifty. The same
operations as one loop are several times faster on a CPU. The C text (`native_text`) repeats,
operation by operation, what the torch forms say, each exactly rounded (contraction is switched
off). So both give the same bits, the torch form is the twin in the tests, and a machine without a
compiler computes the same noise, only slower. NOSHUFFLE_NATIVE=off in the environment switches
the C loops off.

>>> library() is library()
True
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

from noshuffle.c_library import build
from noshuffle.noise.native_check import agrees, knows_aes
from noshuffle.noise.native_text import text


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled loops, or None where they cannot be built or are switched off.

    Guarantees: a library is handed out only after its words, normals, correlated noise and rounded
    values were found equal to the torch forms, bit for bit (`native_check`); `has_aes` says whether
    its AES gave the answer of the standard, `whole_step_check` whether its whole steps are right.
    """
    built = build_loops(text())
    return built if built is not None and agrees(built) else None


def has_aes() -> bool:
    """Whether `library` can encrypt on this processor.

    Guarantees: only after FIPS 197's example of AES-256 (appendix C.3) came out.
    """
    built = library()
    return built is not None and knows_aes(built)


def build_loops(c_text: str) -> ctypes.CDLL | None:
    """The loops of a C text with the types of their arguments, not yet held against anything."""
    built = build(c_text)
    if built is None:
        return None
    pointer, real, whole, long = ctypes.c_void_p, ctypes.c_float, ctypes.c_int, ctypes.c_int64
    unsigned = ctypes.c_uint64
    built.normals.argtypes = [pointer, pointer, long, real, whole]
    built.philox.argtypes = [pointer, pointer, long, ctypes.c_uint32]
    built.on_grid.argtypes = [pointer, pointer, pointer, real, real]
    built.correlate.argtypes = [pointer] * 3 + [whole] + [pointer] * 3 + [whole, real, long]
    built.aes_schedule.argtypes = [pointer, pointer]
    built.aes_tile.argtypes = [pointer, pointer, unsigned, unsigned]
    built.add_noise.argtypes = [pointer]
    loops = ("normals", "philox", "on_grid", "correlate", "aes_schedule", "aes_tile", "add_noise")
    for loop in loops:
        getattr(built, loop).restype = None
    return built
