"""The C loops held against what they repeat, before anyone draws with them.

    words, normals, a correlated move, rounded values      the torch forms, bit for bit
    AES                                                    the example of its standard (FIPS 197)

A compiler that contracts a product and a sum, an instruction set that rounds in another way, a
slip in the C text: each would give noise that a machine without a compiler could not continue.
It shows on two tiles, with the extreme words among them. No state.

>>> words, normals, move, rounded = _in_torch()
>>> normals.shape, bool(torch.isfinite(normals).all()), bool((rounded % GRID == 0).all())
(torch.Size([3, 2, 1024]), True, True)
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from noshuffle.noise.constants import HALF, TILE
from noshuffle.noise.correlate import Buffers, correlate_in_c_, correlate_in_torch_
from noshuffle.noise.gaussian import normals_in_torch_
from noshuffle.noise.grid import add_on_grid_, jitters_
from noshuffle.noise.philox import words_in_torch_
from noshuffle.noise.step_plan import StepPlan

#: The step that is tried: row, first block, key and tag of two tiles of Philox; the weights of
#: what is drawn first, and the one of what is added to it; a move with everything that one can
#: have, and its scale; the grid.
ROW, COLUMNS = 11, ((0, 7 * TILE), (1, 2**32 - 1), (2, 5), (3, 2**31), (4, 0))
WEIGHTS, MORE = (0.7, -1.9, 1.0), 0.1
MOVE = StepPlan((), ((0, 0.3), (1, -0.7)), 1.3, ((1, 0.9),), store=0, decays=(0.6, 0.8))
SCALE, GRID = 0.5, 0.25


def agrees(built: ctypes.CDLL) -> bool:
    """Whether the C loops and the torch forms give the same bits; each is run on two tiles."""
    return all(torch.equal(slow, fast) for slow, fast in zip(_in_torch(), _in_c(built)))


def _in_torch() -> tuple[Tensor, ...]:
    """Words, normals (two of them are now buffers), the noise of the move, and it on the grid."""
    columns, words, z, y, value = _room()
    words_in_torch_(words, columns=columns.unsqueeze(-1), row=ROW)
    _put_extremes_(words)
    for out, weight in zip(z, WEIGHTS):
        normals_in_torch_(out, words=words, weight=weight)
        normals_in_torch_(out, words=words, weight=MORE, accumulate=True)
    correlate_in_torch_(y, u=z[0], move=MOVE, state=Buffers([z[1], z[2]]), scale=SCALE)
    coins = torch.empty_like(y)
    jitters_(coins, words=words, step=GRID)
    add_on_grid_(value, y, jitters=coins, step=GRID)
    return words, z, y, value


def _in_c(built: ctypes.CDLL) -> tuple[Tensor, ...]:
    """The same by the compiled loops."""
    columns, words, z, y, value = _room()
    built.philox(words.data_ptr(), columns.data_ptr(), 2, ROW)
    _put_extremes_(words)
    for out, weight in zip(z, WEIGHTS):
        built.normals(words.data_ptr(), out.data_ptr(), 2, weight, 0)
        built.normals(words.data_ptr(), out.data_ptr(), 2, MORE, 1)
    correlate_in_c_(built, y, u=z[0], move=MOVE, state=Buffers([z[1], z[2]]), scale=SCALE)
    for tile in range(2):  # this loop works on one tile, and makes the coins by itself
        places = (value[tile].data_ptr(), y[tile].data_ptr(), words[tile].data_ptr())
        built.on_grid(*places, GRID, 1.0)
    return words, z, y, value


def _room() -> tuple[Tensor, ...]:
    """The columns, and room for the results, whatever types and devices are the default."""
    cpu = torch.device("cpu")
    words = torch.empty((2, TILE), dtype=torch.int32, device=cpu)
    room = torch.zeros((5, 2, TILE), dtype=torch.float32, device=cpu)
    return torch.tensor(COLUMNS, device=cpu), words, room[:3], room[3], room[4]


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
