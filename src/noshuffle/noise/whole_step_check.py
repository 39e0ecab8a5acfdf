"""Whether a whole step of noise can be left to the C loop: only after it did as the chunks do.

A few steps of a mechanism with decaying buffers, of one without buffers and of a tree are made by
`whole_step` and by its slow twin `chunk_step`, on tensors that do not end where a tile does; values
and buffers must come out equal, bit for bit. State: the outcome, found once in a process.

>>> is_ready() <= native.has_aes()                # never without AES that was itself found right
True
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from noshuffle.noise import native
from noshuffle.noise.chunk_step import ChunkStep
from noshuffle.noise.constants import CPU_CHUNK, TILE
from noshuffle.noise.layout import Layout
from noshuffle.noise.source import test_source
from noshuffle.noise.step_plan import StepPlans
from noshuffle.noise.whole_step import WholeStep
from noshuffle.strategies.recipe import Buffered, FeedForward, Forest, Recipe

#: Every kind of move: decays with taps and gains, no buffers, stores and outer buffers.
RECIPES: tuple[Recipe, ...] = (
    Buffered(
        (0.9, 0.5), (-0.2, -0.1), ((0, 1.0), (1, 0.3)), (1.0, 1.2, 0.7), draw_scale=(1.5,) * 3
    ),
    FeedForward((1.0, -0.5), scale=(1.0, 1.2, 0.7)),
    Forest("honaker", 3),
)
SHAPES, SCALE, TIMES = {"w": (2 * (TILE + 9),), "b": (3,)}, 0.3, (1.0, 1 / 7, 1.0)


def is_ready() -> bool:
    """Whether this machine can do a whole step of AES noise in C.

    Guarantees: only after the cipher gave the answer of its standard (`native.has_aes`), and after
    some whole steps were found equal to the chunk by chunk form, bit for bit.
    """
    return native.has_aes() and _does_steps()


@lru_cache(maxsize=1)
def _does_steps() -> bool:
    """Whether the whole step in C leaves the values and buffers that the chunks do."""
    cases = [(recipe, kind) for recipe in RECIPES for kind in (torch.float32, torch.float64)]
    return all(torch.equal(_left(*case, False), _left(*case, True)) for case in cases)


def _left(recipe: Recipe, kind: torch.dtype, is_whole: bool) -> Tensor:
    """Values and buffers after three steps, end to end."""
    moves, source = StepPlans.of(recipe), test_source(seed="native", kind="aes")
    layout = Layout.of(SHAPES, chunk_tiles=CPU_CHUNK)
    # Types and device are named, since the defaults may be others.
    shape = (moves.buffers, layout.tiles, TILE)
    state = torch.zeros(shape, dtype=torch.float32, device="cpu")
    start = torch.linspace(-1.0, 1.0, SHAPES["w"][0], dtype=kind, device="cpu")
    values = {"w": start.clone(), "b": start[:3].clone()}
    if is_whole:
        whole = WholeStep(layout, source=source, state=state, workers=1)
        for step, times in enumerate(TIMES):
            whole.add_(values, move=moves.at(step), scale=SCALE, times=times)
    else:
        chunks = ChunkStep(layout, source=source, state=state, workers=1)
        for step, times in enumerate(TIMES):
            chunks.add_(values, move=moves.at(step), scale=SCALE)
            for value in values.values():
                value.mul_(times)
    kept = [piece for pieces in layout.views(state).values() for piece in pieces]
    return torch.cat([part.flatten() for part in (*values.values(), *kept)])
