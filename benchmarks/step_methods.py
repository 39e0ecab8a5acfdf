"""The steps that `step_gpu` times: plain SGD, eager and as a graph, and ours; the CNN they train.

Each method is made from a list of batches and gives a function that does step number i. What a
function needs beyond its call hangs on it: `private` of ours, `keeps` of a graph.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from noshuffle.participation import Epochs
from noshuffle.plan import Plan
from noshuffle.strategies import blt, identity, tree
from noshuffle.training import Batch, privatize
from noshuffle.training.models import build

BATCH = 250
DEVICE = torch.device("cuda")
LOSS = nn.CrossEntropyLoss()
Step = Callable[[int], object]
Optimizes = Callable[[nn.Module], torch.optim.Optimizer]
STRATEGIES = {
    "independent": identity(),
    "Honaker tree": tree(),
    "BLT, 4 buffers": blt((0.999, 0.98, 0.85, 0.4), (0.05, 0.1, 0.15, 0.2)),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return build("tanh_cnn", (1, 28, 28), 10).to(DEVICE)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)


def usual_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def random_batches(count: int = 48) -> list[Batch]:
    """Some batches of one epoch, each with the ids of its rows."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(count * BATCH, 1, 28, 28, generator=g).to(DEVICE)
    y = torch.randint(10, (count * BATCH,), generator=g).to(DEVICE)
    return cut(x, y)


def cut(x: torch.Tensor, y: torch.Tensor) -> list[Batch]:
    spans = [slice(i, i + BATCH) for i in range(0, len(x) - BATCH + 1, BATCH)]
    return [Batch((x[s], y[s]), np.arange(s.start, s.stop)) for s in spans]


def plain_eager(batches: list[Batch]) -> Step:
    model = network()
    optimizer = sgd(model)

    def step(i: int) -> None:
        x, y = batches[i % len(batches)].data
        optimizer.zero_grad(set_to_none=True)
        LOSS(model(x), y).backward()
        optimizer.step()

    return step


def captured(once: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A step as a CUDA graph, after three to warm up."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            once()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    return graph


def plain_graph(batches: list[Batch], optimizes: Optimizes = sgd) -> Step:
    model = network()
    optimizer = optimizes(model)
    x, y = (t.clone() for t in batches[0].data)

    def once() -> None:
        optimizer.zero_grad(set_to_none=True)
        LOSS(model(x), y).backward()
        optimizer.step()

    graph = captured(once)

    def step(i: int) -> None:
        for buffer, value in zip((x, y), batches[i % len(batches)].data):
            buffer.copy_(value)
        graph.replay()

    step.keeps = (model, optimizer)  # type: ignore[attr-defined]  # a graph does not hold them
    return step


def ours(
    batches: list[Batch],
    strategy: str,
    *,
    compile: bool | str,
    reads_loss: bool = True,
    has_ids: bool = True,
    run: str | None = None,
    optimizes: Optimizes = sgd,
) -> Step:
    model = network()
    rule = Epochs(200, len(batches))
    plan = Plan(participation=rule, strategy=STRATEGIES[strategy], noise_multiplier=1.0)
    settings = {"clip_norm": 1.0, "batch_size": BATCH, "compile": compile, "run": run}
    private = privatize(model, optimizes(model), plan, **settings)

    def step(i: int) -> None:
        batch = batches[private.steps_released % len(batches)]
        ids = batch.ids if has_ids else None
        if reads_loss:
            private.step(LOSS, *batch.data, ids=ids)
        else:
            private.advance(LOSS, batch.data, ids=ids)

    step.private = private  # type: ignore[attr-defined]
    return step
