"""Residual nets with GroupNorm on one GPU: the private step beside plain SGD and Opacus.

    python benchmarks/residual_gpu.py [wrn-16-2 wrn-16-4 resnet-18] [--dtype tf32 float32 bf16]
    python benchmarks/residual_gpu.py wrn-16-4 --batch 2000 --profile

Plain SGD of the same precision, as a CUDA graph, is 1. bf16 is autocast with float32 weights and
`--channels-last` lays images out so. Medians over rounds, one method after the other in each; the
memory is the most that torch held during a step. Images are random, 3 × 32 × 32.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from step_methods import captured
from torch import Tensor, nn
from torch.nn import functional as F

from noshuffle.participation import Epochs
from noshuffle.plan import Plan
from noshuffle.strategies import blt
from noshuffle.training import privatize

LOSS = nn.CrossEntropyLoss()
BLT = blt((0.999, 0.98, 0.85, 0.4), (0.05, 0.1, 0.15, 0.2))
Step = Callable[[], object]


class Block(nn.Module):
    """Two convolutions with normalisation before them, and a way around (He et al. 2016)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(16, inside), nn.GroupNorm(16, outside)
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.around: nn.Module = nn.Identity()
        if stride > 1 or inside != outside:
            self.around = nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(x))
        return self.around(x) + self.conv2(F.relu(self.norm2(self.conv1(h))))


def residual(widths: list[tuple[int, int, int]], *, first: int) -> nn.Module:
    """Blocks (width, how many, stride), after one convolution of `first` channels."""
    parts: list[nn.Module] = [nn.Conv2d(3, first, 3, 1, 1, bias=False)]
    now = first
    for width, many, stride in widths:
        for i in range(many):
            parts.append(Block(now, width, stride if i == 0 else 1))
            now = width
    head = [nn.GroupNorm(16, now), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*parts, *head, nn.Linear(now, 10))


def wide(k: int) -> nn.Module:
    return residual([(16 * k, 2, 1), (32 * k, 2, 2), (64 * k, 2, 2)], first=16)


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "wrn-16-2": (lambda: wide(2), 500),
    "wrn-16-4": (lambda: wide(4), 500),
    "resnet-18": (
        lambda: residual([(64, 2, 1), (128, 2, 2), (256, 2, 2), (512, 2, 2)], first=64),
        250,
    ),
}


def cast(dtype: str) -> Any:
    return torch.autocast("cuda", torch.bfloat16) if dtype == "bf16" else nullcontext()


def plain(model: nn.Module, x: Tensor, y: Tensor, dtype: str) -> Step:
    """SGD as one graph."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def once() -> None:
        optimizer.zero_grad(set_to_none=True)
        with cast(dtype):
            loss = LOSS(model(x), y)
        loss.backward()
        optimizer.step()

    return captured(once).replay


def ours(model: nn.Module, x: Tensor, y: Tensor, dtype: str, *, compile: bool) -> Step:
    plan = Plan(participation=Epochs(10_000, 1), strategy=BLT, noise_multiplier=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    private = privatize(model, optimizer, plan, clip_norm=1.0, batch_size=len(x), compile=compile)
    ids = np.arange(len(x))

    def step() -> None:
        with cast(dtype):
            private.advance(LOSS, (x, y), ids=ids)

    step.private = private  # type: ignore[attr-defined]
    return step


def opacus(model: nn.Module, x: Tensor, y: Tensor, dtype: str) -> Step:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    hooked = GradSampleModule(model)
    inner = torch.optim.SGD(hooked.parameters(), lr=0.05, momentum=0.9)
    optimizer = DPOptimizer(
        inner, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=len(x)
    )

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with cast(dtype):
            loss = LOSS(hooked(x), y)
        loss.backward()
        optimizer.step()

    return step


def timed(step: Step, steps: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps * 1e3


def measure(name: str, dtype: str, given: argparse.Namespace) -> None:
    make, usual = MODELS[name]
    batch = given.batch or usual
    for backend in (torch.backends.cuda.matmul, torch.backends.cudnn):
        backend.allow_tf32 = dtype == "tf32"
    layout = torch.channels_last if given.channels_last else torch.contiguous_format
    x = torch.randn(batch, 3, 32, 32, device="cuda").to(memory_format=layout)
    y = torch.randint(10, (batch,), device="cuda")
    methods: dict[str, Callable[..., Step]] = {"SGD, graph": plain}
    methods["noshuffle, compiled"] = lambda *a: ours(*a, compile="auto")
    if given.eager:
        methods["noshuffle, eager"] = lambda *a: ours(*a, compile=False)
    if given.peers:
        methods["Opacus, hooks"] = opacus
    found: dict[str, tuple[float, float, str]] = {}
    for title, method in methods.items():
        torch.manual_seed(0)
        model = make().to("cuda", memory_format=layout)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        try:
            began = time.perf_counter()
            step = method(model, x, y, dtype)
            timed(step, 4)
            start = time.perf_counter() - began
            each = statistics.median(timed(step, given.steps) for _ in range(given.rounds))
        except Exception as error:
            print(f"| {name} | {batch} | {dtype} | {title} | {type(error).__name__}: {error} |")
            continue
        memory = (torch.cuda.max_memory_allocated() - held) / 2**30
        private = getattr(step, "private", None)
        why = "" if private is None else f"{private.why}"
        found[title] = (each, memory, why)
        own, most, _ = found["SGD, graph"]
        print(
            f"| {name} | {batch} | {dtype}{' nhwc' if given.channels_last else ''} | {title} | "
            f"{each:.2f} | {each / own:.2f} | {memory:.2f} | {memory / most:.2f} | {start:.1f} |",
            flush=True,
        )
        if private is not None and given.why:
            print("   ", why, private.fallbacks)
        if given.profile:
            with torch.profiler.profile() as profile:
                timed(step, 3)
            table = profile.key_averages()
            print(table.table(sort_by="self_cuda_time_total", max_name_column_width=70))
        del step, model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--dtype", nargs="+", default=["tf32", "float32", "bf16"])
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    for flag in ("channels-last", "eager", "peers", "profile", "why"):
        parser.add_argument(f"--{flag}", action="store_true")
    given = parser.parse_args()
    print("| model | batch | type | step | ms | × SGD | GiB | × SGD | s to start |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in given.models:
        for dtype in given.dtype:
            measure(name, dtype, given)


if __name__ == "__main__":
    main()
