"""The inner loops in C, and their comparison with what they repeat, before anyone draws with them.

Torch runs one pass over memory per operation; the transform to normals has about fifty. The same
operations as one loop are several times faster on a CPU. `native/noise.c` repeats, operation by
operation, what the torch forms say, each exactly rounded (contraction is switched off):

    words, normals, a correlated step, rounded values      the torch forms, bit for bit
    AES                                                    the example of its standard (FIPS 197)

So both give the same bits, and a machine without a compiler computes the same noise, only slower. A
compiler that contracts a product and a sum, an instruction set that rounds in another way, a slip
in the C text: each would give noise that such a machine could not continue. It shows on two tiles,
with the extreme words among them. NOSHUFFLE_NATIVE=off in the environment switches the C loops off.

>>> library() is library()
True
>>> words, normals, noise, rounded = _in_torch()
>>> normals.shape, bool(torch.isfinite(normals).all()), bool((rounded % GRID == 0).all())
(torch.Size([3, 2, 1024]), True, True)
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from noshuffle.c_library import build, text_of
from noshuffle.noise.constants import HALF, TILE
from noshuffle.noise.correlate import Buffers, correlate_in_c_, correlate_in_torch_
from noshuffle.noise.gaussian import normals_in_torch_
from noshuffle.noise.grid import add_on_grid_, jitters_
from noshuffle.noise.philox import words_in_torch_
from noshuffle.noise.step_plan import StepPlan

#: The step that is tried: row, first block, key and tag of two tiles of Philox; the weights of
#: what is drawn first, and the one of what is added to it; a plan with everything that one can
#: have, and its scale; the grid.
ROW, COLUMNS = 11, ((0, 7 * TILE), (1, 2**32 - 1), (2, 5), (3, 2**31), (4, 0))
WEIGHTS, MORE = (0.7, -1.9, 1.0), 0.1
PLAN = StepPlan((), ((0, 0.3), (1, -0.7)), 1.3, ((1, 0.9),), store=0, decays=(0.6, 0.8))
SCALE, GRID = 0.5, 0.25


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled loops, or None where they cannot be built or are switched off.

    Guarantees: a library is handed out only after its words, normals, correlated noise and rounded
    values were found equal to the torch forms, bit for bit; `has_aes` says whether its AES gave the
    answer of the standard, `whole_step.is_ready` whether its whole steps are right.
    """
    built = build_loops(text_of("noise.c"))
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


def agrees(built: ctypes.CDLL) -> bool:
    """Whether the C loops and the torch forms give the same bits; each is run on two tiles."""
    return all(torch.equal(slow, fast) for slow, fast in zip(_in_torch(), _in_c(built)))


def _in_torch() -> tuple[Tensor, ...]:
    """Words, normals (two of them are now buffers), the noise of the plan, and it on the grid."""
    columns, words, z, y, value = _scratch()
    words_in_torch_(words, columns=columns.unsqueeze(-1), row=ROW)
    _put_extremes_(words)
    for out, weight in zip(z, WEIGHTS):
        normals_in_torch_(out, words=words, weight=weight)
        normals_in_torch_(out, words=words, weight=MORE, accumulate=True)
    correlate_in_torch_(y, u=z[0], plan=PLAN, state=Buffers([z[1], z[2]]), scale=SCALE)
    coins = torch.empty_like(y)
    jitters_(coins, words=words, step=GRID)
    add_on_grid_(value, y, jitters=coins, step=GRID)
    return words, z, y, value


def _in_c(built: ctypes.CDLL) -> tuple[Tensor, ...]:
    """The same by the compiled loops."""
    columns, words, z, y, value = _scratch()
    built.philox(words.data_ptr(), columns.data_ptr(), 2, ROW)
    _put_extremes_(words)
    for out, weight in zip(z, WEIGHTS):
        built.normals(words.data_ptr(), out.data_ptr(), 2, weight, 0)
        built.normals(words.data_ptr(), out.data_ptr(), 2, MORE, 1)
    correlate_in_c_(built, y, u=z[0], plan=PLAN, state=Buffers([z[1], z[2]]), scale=SCALE)
    for tile in range(2):  # this loop works on one tile, and makes the coins by itself
        places = (value[tile].data_ptr(), y[tile].data_ptr(), words[tile].data_ptr())
        built.on_grid(*places, GRID, 1.0)
    return words, z, y, value


def _scratch() -> tuple[Tensor, ...]:
    """The columns, and memory for the results, whatever types and devices are the default."""
    cpu = torch.device("cpu")
    words = torch.empty((2, TILE), dtype=torch.int32, device=cpu)
    found = torch.zeros((5, 2, TILE), dtype=torch.float32, device=cpu)
    return torch.tensor(COLUMNS, device=cpu), words, found[:3], found[3], found[4]


def _put_extremes_(words: Tensor) -> None:
    """The words at the ends of their range and around zero, as radii and as angles."""
    extremes = words.new_tensor([0, -1, 1, 2**31 - 1, -(2**31)])
    words[0, :5] = extremes
    words[1, HALF : HALF + 5] = extremes


@lru_cache(maxsize=4)
def knows_aes(built: ctypes.CDLL) -> bool:
    """Whether the processor has AES and the loop gives the answer of the standard, and counts."""
    if not built.aes_ready():
        return False
    key, schedule = ctypes.create_string_buffer(bytes(range(32)), 32), (ctypes.c_uint8 * 240)()
    built.aes_schedule(key, schedule)
    words, again = torch.empty((2, TILE), dtype=torch.int32, device="cpu")
    row, block = 0x0011223344556677, 0x8899AABBCCDDEEFF  # the example's plaintext
    built.aes_tile(words.data_ptr(), schedule, row, block)
    built.aes_tile(again.data_ptr(), schedule, row, block - 200)
    is_counting = torch.equal(words[: TILE - 800], again[800:])
    return is_counting and words.numpy().tobytes()[:16].hex() == "8ea2b7ca516745bfeafc49904b496089"
