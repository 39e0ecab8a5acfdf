"""Does the fused kernel give the bits of the torch form on the CPU? Part of `noise_gpu.py`.

Every recipe over a few steps, eager and as replays of a CUDA graph, and some recipes with
low-precision gradients.
"""

from __future__ import annotations

import numpy as np
import torch
from noise_kernels import BLT_4, DEVICE, SCALE, fused_of

from noshuffle.noise import NoiseStream, test_source
from noshuffle.noise.fused import Fused
from noshuffle.strategies.recipe import Buffered, FeedForward, Forest, Recipe, Recursive, Rows

N = 12
GAINS = tuple(1.0 / (1 + 0.1 * t) for t in range(N))
CHECKS: dict[str, Recipe] = {
    "independent": FeedForward((1.0,)),
    "independent, gains": FeedForward((1.0,), scale=GAINS),
    "banded inverse": FeedForward((1.0, -0.5, 0.0, -0.1), scale=GAINS),
    "recursive": Recursive((0.8, -0.4, 0.2, 0.1)),
    "BLT": BLT_4,
    "BLT, taps, gains": Buffered((0.95, 0.6), (-0.1, -0.3), ((0, 1.0), (3, -0.2)), GAINS),
    "plain tree": Forest("plain", N),
    "Honaker": Forest("honaker", N),
    "Honaker, completed": Forest("honaker", N, 5, True),
    "dense": Rows(np.tril(np.random.default_rng(0).standard_normal((N, N)))),
}
WAYS = (
    ("float32", torch.float32, False),
    ("float32, graph", torch.float32, True),
    ("bf16", torch.bfloat16, False),
    ("fp16", torch.float16, False),
)
#: Every kernel of a new kind has to be compiled, so the rare ways are for these only.
COMMON = ("independent", "banded inverse", "BLT", "Honaker")
SHAPES: dict[str, tuple[int, ...]] = {
    "w": (7, 300),
    "b": (3,),
    "big": (130, 1025),
    "none": (0, 2),
    "scalar": (),
}
STARTS = {"w": 700}


def run() -> None:
    """Print, for every way, how many recipes have the CPU's bits, and the largest difference."""
    print("\nThe kernel against the torch form on the CPU (philox), all steps and tensors\n")
    print("| way | recipes | same bits | largest difference |\n|---|---|---|---|")
    for label, dtype, is_graph in WAYS:
        names = tuple(CHECKS) if dtype == torch.float32 else COMMON
        found, failed = [], []
        for name in names:
            try:
                found.append(compare(CHECKS[name], dtype, is_graph=is_graph))
            except Exception as error:
                failed.append(
                    f"{name}: {type(error).__name__} {' '.join(str(error).split())[:120]}"
                )
        worst = max((difference for difference, _ in found), default=float("nan"))
        same = sum(is_same for _, is_same in found)
        print(f"| {label} | {len(names)} | {same} | {worst:.1e} {'; '.join(failed)} |", flush=True)


def compare(recipe: Recipe, dtype: torch.dtype, *, is_graph: bool) -> tuple[float, bool]:
    """The largest difference over all steps, and whether every bit was the same."""
    source = test_source(seed="bench", kind="philox")
    twin = NoiseStream(recipe, source, SHAPES, scale=SCALE, steps=N, starts=STARTS)
    fused = fused_of(recipe, SHAPES, steps=N, starts=STARTS)
    generator = torch.Generator().manual_seed(0)
    values = {n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()}
    got = {n: v.to(DEVICE) for n, v in values.items()}
    flat = {n: v.view(-1) for n, v in got.items()}
    graph = captured(fused, flat) if is_graph else None
    worst, is_same = 0.0, True
    for step in range(N):
        twin.add_(values)
        if graph is not None:
            fused.announce(step=step, count=1)
            graph.replay()
        else:
            fused.add_(flat, step=step)
        for name, value in values.items():
            other = got[name].cpu()
            is_same &= torch.equal(value, other)
            if value.numel():
                worst = max(worst, float((value.double() - other.double()).abs().max()))
    return worst, is_same


def captured(fused: Fused, flat: dict[str, torch.Tensor]) -> torch.cuda.CUDAGraph:
    """One step as a graph."""
    fused.prepare(flat)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fused.add_(flat, step=0)
    return graph
