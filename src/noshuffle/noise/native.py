"""The inner loops of the noise: in C where that was built and found equal, in torch elsewhere.

    words of Philox  ──►  normals  ──►  one `StepPlan` on a chunk

Torch runs one pass over memory per operation; the transform to normals has about fifty. As one loop
the same operations are several times faster on a CPU. `native/noise.c` repeats, operation by
operation and each exactly rounded (contraction is switched off), what the torch forms say
(`philox`, `gaussian`, `correlate_in_torch_`); its AES gives the example of the standard (FIPS 197).
So both give the same bits, and a machine without a compiler computes the same noise, only slower.
A compiler that contracts a product and a sum, an instruction set that rounds in another way, a slip
in the C text would give noise that such a machine could not continue; it shows on two tiles, with
the extreme words among them. NOSHUFFLE_NATIVE=off in the environment switches the C loops off.

`correlate_` is one step on one chunk, with u = Σ w·z drawn before and the buffers S as its state:

    v = u + Σ_inner c·S_b        y = scale·gain·v + Σ_outer scale·d·S_b
    S_b ← θ_b·S_b + u            or      S_store ← v

>>> state = Buffers([torch.full((1, TILE), 3.0)])
>>> y, u = torch.empty(1, TILE), torch.ones(1, TILE)
>>> plan = StepPlan(draws=((0, 1.0),), inner=((0, 0.5),), gain=2.0, decays=(0.1,))
>>> correlate_(y, u=u, plan=plan, state=state, scale=1.0)
>>> y[0, 0].item(), round(state.tensors[0][0, 0].item(), 3)
(5.0, 1.3)
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from noshuffle.c_library import build, text_of
from noshuffle.noise.gaussian import HALF, TILE, normals_in_torch_
from noshuffle.noise.grid import add_on_grid_, jitters_
from noshuffle.noise.philox import words_in_torch_
from noshuffle.noise.step_plan import StepPlan, dense


def philox_words_(words: Tensor, *, columns: Tensor, row: int) -> None:
    """Fill tiles with words; `columns` is (5, tiles, 1): first block, key and tag of each tile."""
    loops = _library(words)
    if loops is None:
        words_in_torch_(words, columns=columns, row=row)
    else:
        loops.philox(words.data_ptr(), columns.data_ptr(), columns.shape[1], row)


def normals_(out: Tensor, *, words: Tensor, weight: float = 1.0, accumulate: bool = False) -> None:
    """out = weight·z, or out += weight·z, with z the normals of `words` (both tiles × 1024).

    Both tensors are contiguous.
    """
    loops = _library(out)
    if loops is None:
        normals_in_torch_(out, words=words, weight=weight, accumulate=accumulate)
    else:
        loops.normals(words.data_ptr(), out.data_ptr(), out.shape[0], weight, accumulate)


class Buffers:
    """The buffers of one chunk, each a contiguous view of tiles × 1024, and their addresses."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tuple(tensors)
        pointers = [tensor.data_ptr() for tensor in self.tensors]
        self.addresses = (ctypes.c_void_p * len(pointers))(*pointers)


def correlate_(y: Tensor, *, u: Tensor, plan: StepPlan, state: Buffers, scale: float) -> None:
    """Write scale times the noise of a step into `y` and bring the buffers forward.

    `u` holds the drawn sum. A buffer that is stored to is not among the outer ones.
    """
    loops = _library(y)
    if loops is None:
        _correlate_in_torch_(y, u=u, plan=plan, state=state, scale=scale)
    else:
        _correlate_in_c_(loops, y, u=u, plan=plan, state=state, scale=scale)


def _library(worked_on: Tensor) -> ctypes.CDLL | None:
    return library() if worked_on.device.type == "cpu" else None


def _correlate_in_torch_(
    y: Tensor, *, u: Tensor, plan: StepPlan, state: Buffers, scale: float
) -> None:
    """Products and sums are rounded one by one, never fused."""
    buffers = state.tensors
    y.copy_(u)
    for b, c in sorted(plan.inner):
        y.add_(buffers[b] * c)
    for b, theta in enumerate(plan.decays):
        buffers[b].mul_(theta).add_(u)
    if plan.store >= 0:
        buffers[plan.store].copy_(y)
    y.mul_(plan.gain * scale)
    for b, d in sorted(plan.outer):
        y.add_(buffers[b] * (d * scale))


def _correlate_in_c_(
    library: ctypes.CDLL, y: Tensor, *, u: Tensor, plan: StepPlan, state: Buffers, scale: float
) -> None:
    count = len(state.tensors)
    decays = (ctypes.c_float * count)(*plan.decays) if plan.decays else None
    library.correlate(
        y.data_ptr(),
        u.data_ptr(),
        state.addresses,
        count,
        dense(plan.inner, count, 1.0),
        decays,
        dense(plan.outer, count, scale),
        plan.store,
        plan.gain * scale,
        y.shape[0],
    )


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
    values were found equal to the torch forms, bit for bit.
    """
    built = build_loops(text_of("noise.c"))
    return built if built is not None and agrees(built) else None


def has_aes() -> bool:
    """Whether `library` can encrypt here, and FIPS 197's example of AES-256 (C.3) came out."""
    built = library()
    return built is not None and knows_aes(built)


def build_loops(c_text: str) -> ctypes.CDLL | None:
    """The loops of a C text with the types of their arguments, not yet held against anything."""
    built = build(c_text)
    if built is None:
        return None
    pointer, real, whole, long = ctypes.c_void_p, ctypes.c_float, ctypes.c_int, ctypes.c_int64
    arguments = {
        "normals": [pointer, pointer, long, real, whole],
        "philox": [pointer, pointer, long, ctypes.c_uint32],
        "on_grid": [pointer, pointer, pointer, real, real],
        "correlate": [pointer] * 3 + [whole] + [pointer] * 3 + [whole, real, long],
        "aes_schedule": [pointer, pointer],
        "aes_tile": [pointer, pointer, ctypes.c_uint64, ctypes.c_uint64],
        "add_noise": [pointer],
    }
    for loop, types in arguments.items():
        getattr(built, loop).argtypes, getattr(built, loop).restype = types, None
    return built


def agrees(built: ctypes.CDLL) -> bool:
    """Whether the C loops and the torch forms give the same bits; each is run on two tiles."""
    pairs = zip(_in_torch(), _in_c(built))
    return all(torch.equal(slow.nan_to_num(), fast.nan_to_num()) for slow, fast in pairs)


def _in_torch() -> tuple[Tensor, ...]:
    """Words, normals (two of them are now buffers), the noise of the plan, and it on the grid."""
    columns, words, z, y, value = _scratch()
    words_in_torch_(words, columns=columns.unsqueeze(-1), row=ROW)
    _put_extremes_(words)
    for out, weight in zip(z, WEIGHTS):
        normals_in_torch_(out, words=words, weight=weight)
        normals_in_torch_(out, words=words, weight=MORE, accumulate=True)
    _correlate_in_torch_(y, u=z[0], plan=PLAN, state=Buffers([z[1], z[2]]), scale=SCALE)
    coins = torch.empty_like(y)
    jitters_(coins, words=words, step=GRID)
    add_on_grid_(value, y, jitters=coins, step=GRID)
    return words, z, y, value


def _in_c(built: ctypes.CDLL) -> tuple[Tensor, ...]:
    columns, words, z, y, value = _scratch()
    built.philox(words.data_ptr(), columns.data_ptr(), 2, ROW)
    _put_extremes_(words)
    for out, weight in zip(z, WEIGHTS):
        built.normals(words.data_ptr(), out.data_ptr(), 2, weight, 0)
        built.normals(words.data_ptr(), out.data_ptr(), 2, MORE, 1)
    _correlate_in_c_(built, y, u=z[0], plan=PLAN, state=Buffers([z[1], z[2]]), scale=SCALE)
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
