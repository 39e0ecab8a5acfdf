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
from functools import lru_cache, partial

import torch

from noshuffle.c_library import build
from noshuffle.noise.constants import HALF, TILE
from noshuffle.noise.native_text import text


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled loops, or None where they cannot be built or are switched off.

    Guarantees: a library is handed out only after a tile of its words, normals, correlated noise
    and rounded values was found equal to the torch form, bit for bit; `has_aes` says whether its
    AES gave the answer of the standard.
    """
    built = _build(text())
    return built if built is not None and _agrees(built) else None


def has_aes() -> bool:
    """Whether `library` can do a whole step of AES noise on this processor.

    Guarantees: only after FIPS 197's example of AES-256 (appendix C.3) came out, and after some
    whole steps were found equal to the chunk by chunk form, bit for bit.
    """
    built = library()
    return built is not None and _knows_aes(built) and _does_steps()


def _build(c_text: str) -> ctypes.CDLL | None:
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


@lru_cache(maxsize=4)
def _knows_aes(built: ctypes.CDLL) -> bool:
    if not built.aes_ready():
        return False
    key, schedule = ctypes.create_string_buffer(bytes(range(32)), 32), (ctypes.c_uint8 * 240)()
    built.aes_schedule(key, schedule)
    words = torch.empty(TILE, dtype=torch.int32)
    row, block = 0x0011223344556677, 0x8899AABBCCDDEEFF  # the example's plaintext
    built.aes_tile(words.data_ptr(), schedule, row, block)
    again = torch.empty(TILE, dtype=torch.int32)
    built.aes_tile(again.data_ptr(), schedule, row, block - 200)
    is_counting = torch.equal(words[: TILE - 800], again[800:])
    return is_counting and words.numpy().tobytes()[:16].hex() == "8ea2b7ca516745bfeafc49904b496089"


@lru_cache(maxsize=1)
def _does_steps() -> bool:
    """Whether the whole step in C leaves the values and buffers that the chunks do."""
    from noshuffle.noise import stream, whole_step
    from noshuffle.noise.source import test_source
    from noshuffle.strategies.recipe import Buffered, FeedForward, Forest, Recipe

    class InChunks(stream.NoiseStream):
        def _whole_step(self) -> whole_step.WholeStep | None:
            return None

    taps = ((0, 1.0), (1, 0.3))
    recipes: list[Recipe] = [
        Buffered((0.9, 0.5), (-0.2, -0.1), taps, scale=(1.0, 1.2, 0.7), draw_scale=(1.5,) * 3),
        FeedForward((1.0, -0.5), scale=(1.0, 1.2, 0.7)),
        Forest("honaker", 3),
    ]
    shapes, source = {"w": (2, TILE + 9), "b": (3,)}, test_source(seed="native", kind="aes")
    seeds = {name: source.seed(name) for name in shapes}
    start = torch.linspace(-1.0, 1.0, 2 * (TILE + 9))
    for recipe in recipes:
        left = []
        for is_whole in (False, True):
            noise = InChunks(recipe, source, shapes, scale=0.3, steps=3)
            if is_whole:
                noise._whole = whole_step.WholeStep(
                    noise._layout, seeds=seeds, state=noise._state, workers=1
                )
            values = {"w": start.clone().view(shapes["w"]), "b": start[:3].clone()}
            for times in (1.0, 1 / 7, 1.0):
                noise.add_(values, times=times)
            buffers = noise.state_dict()["buffers"].values()
            left.append(torch.cat([part.flatten() for part in (*values.values(), *buffers)]))
        if not torch.equal(*left):
            return False
    return True


def _agrees(built: ctypes.CDLL) -> bool:
    """Whether the C loops and the torch form give the same bits; each is run on two tiles."""
    # The torch forms import this module, so they can be had only now.
    from noshuffle.noise import correlate, gaussian, grid, moves, philox

    columns = torch.tensor([[0, 7 * TILE], [1, 2**32 - 1], [2, 5], [3, 2**31], [4, 0]])
    slow_words, fast_words = torch.empty(2, 2, TILE, dtype=torch.int32)
    philox.words_in_torch_(slow_words, columns=columns.unsqueeze(-1), row=11)
    built.philox(fast_words.data_ptr(), columns.data_ptr(), 2, 11)
    extremes = torch.tensor([0, -1, 1, 2**31 - 1, -(2**31)], dtype=torch.int32)
    for words in (slow_words, fast_words):
        words[0, :5] = extremes
        words[1, HALF : HALF + 5] = extremes
    slow, fast = torch.zeros(2, 5, 2, TILE)
    move = moves.Move((), ((0, 0.3), (1, -0.7)), 1.3, ((1, 0.9),), store=0, decays=(0.6, 0.8))
    for z in (slow, fast):
        form = gaussian.normals_in_torch_ if z is slow else None
        for i, weight in enumerate((0.7, -1.9, 1.0)):
            if form:
                form(z[i], words=slow_words, weight=weight)
                form(z[i], words=slow_words, weight=0.1, accumulate=True)
            else:
                built.normals(fast_words.data_ptr(), z[i].data_ptr(), 2, weight, 0)
                built.normals(fast_words.data_ptr(), z[i].data_ptr(), 2, 0.1, 1)
        step = correlate.correlate_in_torch_ if form else partial(correlate.correlate_in_c_, built)
        step(z[3], u=z[0], move=move, state=correlate.Buffers([z[1], z[2]]), scale=0.5)
        if form:
            coins = torch.empty(2, TILE)
            grid.jitters_(coins, words=slow_words, step=0.25)
            grid.add_on_grid_(z[4], z[3], jitters=coins, step=0.25)
            continue
        for tile, words in enumerate(fast_words):
            places = (z[4, tile].data_ptr(), z[3, tile].data_ptr(), words.data_ptr())
            built.on_grid(*places, 0.25, 1.0)
    return torch.equal(slow_words, fast_words) and torch.equal(slow, fast)
