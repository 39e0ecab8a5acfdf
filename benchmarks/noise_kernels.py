"""What the noise benchmarks on a GPU share: recipes, a fused step, clocks and the memory limit.

Times are medians of CUDA-event times. The limit of a step is the time in which a copy at the
measured bandwidth moves the bytes that the step has to read and write: gradient and buffers, once.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from noshuffle.noise import test_source
from noshuffle.noise.fused import Fused
from noshuffle.noise.gaussian import DEVICE_CHUNK, TILE
from noshuffle.noise.layout import Layout
from noshuffle.noise.step_plan import StepPlan, StepPlans
from noshuffle.strategies.recipe import Buffered, FeedForward, Forest, Recipe, Recursive

DEVICE = torch.device("cuda")
SCALE = 0.8
INVERSE_16 = tuple([1.0] + [-0.5 / (i + 1) ** 1.5 for i in range(15)])
BANDS_16 = tuple([1.0] + [-0.3 / (i + 1) for i in range(15)])
BLT_4 = Buffered((0.999, 0.98, 0.85, 0.4), (-0.01, -0.04, -0.12, -0.25))
EPOCH_TAPS = ((0, 1.0), *((240 * (i + 1), -0.1) for i in range(6)))
BLT_2_TAPS = Buffered((0.99, 0.7), (-0.05, -0.2), EPOCH_TAPS)

RECIPES: dict[str, Recipe] = {
    "independent": FeedForward((1.0,)),
    "BLT, 4 buffers": BLT_4,
    "BLT, 2 buffers, 6 taps": BLT_2_TAPS,
    "banded inverse, 16 rows": FeedForward(INVERSE_16),
    "Honaker tree, 1024 steps": Forest("honaker", 1024),
    "16 bands, recursive": Recursive(BANDS_16),
}


def blt_of(buffers: int) -> Recipe:
    """A BLT with any number of buffers, for the cost of one more."""
    if not buffers:
        return FeedForward((1.0,))
    decays = tuple(0.99 * (i + 1) / buffers for i in range(buffers))
    return Buffered(decays, tuple(-0.3 / buffers for _ in range(buffers)))


def fused_of(
    recipe: Recipe,
    shapes: dict[str, tuple[int, ...]],
    *,
    steps: int,
    tiles: int | None = None,
    warps: int = 4,
) -> Fused:
    """The kernel and its tables for tensors of these shapes."""
    plans, source = StepPlans.of(recipe), test_source(seed="bench", kind="philox")
    layout = Layout.of(shapes, chunk_tiles=DEVICE_CHUNK)
    state = torch.zeros((plans.buffers, layout.tiles, TILE), device=DEVICE)
    return Fused(
        plans,
        layout=layout,
        source=source,
        state=state,
        scale=SCALE,
        steps=steps,
        tiles=tiles,
        warps=warps,
    )


def median_ms(do: Callable[[], object], *, repeats: int = 15, warm: int = 3) -> float:
    """Milliseconds of one call on the device."""
    for _ in range(warm):
        do()
    marks = []
    for _ in range(repeats):
        pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        pair[0].record()
        do()
        pair[1].record()
        marks.append(pair)
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks)


def copy_ms(count: int) -> float:
    """Milliseconds to copy `count` float32 numbers: 8 bytes a number are moved."""
    a, b = torch.empty(count, device=DEVICE), torch.zeros(count, device=DEVICE)
    return median_ms(lambda: a.copy_(b))


def moved(plan: StepPlan) -> int:
    """Bytes of one parameter that one step must read and write, float32 gradient included."""
    reads = {b for b, _ in plan.inner} | {b for b, _ in plan.outer}
    writes = len(plan.decays) if plan.decays else int(plan.store >= 0)
    return 8 + 4 * len(reads) + 4 * writes


def time_step(
    recipe: Recipe,
    value: Tensor,
    *,
    tiles: int | None = None,
    warps: int = 4,
    at: int | None = None,
    steps: int = 100_000,
) -> tuple[float, float, int]:
    """Milliseconds and bytes per parameter of a step (a tree: mean over 64 steps), and buffers."""
    plans, shapes = StepPlans.of(recipe), {"w": (value.numel(),)}
    horizon = plans.horizon or steps
    fused = fused_of(recipe, shapes, steps=horizon, tiles=tiles, warps=warps)
    if isinstance(recipe, Forest):
        first = 1 if at is None else at
        fused.add_({"w": value}, step=first - 1)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for step in range(first, first + 64):
            fused.add_({"w": value}, step=step)
        end.record()
        torch.cuda.synchronize()
        mean = statistics.mean(moved(plans.at(step)) for step in range(first, first + 64))
        return begin.elapsed_time(end) / 64, mean, plans.buffers
    first = min(2000, horizon // 2) if at is None else at  # by default past the lag of every tap
    step = iter(range(first, horizon))
    ms = median_ms(lambda: fused.add_({"w": value}, step=next(step)))
    return ms, moved(plans.at(first)), plans.buffers
