"""Residual nets, a ViT and small CNNs on one GPU: the private step beside plain SGD and peers.

    python benchmarks/residual_gpu.py                          every row, one table
    python benchmarks/residual_gpu.py resnet-18 bf16 --peers   rows with all of these words
    python benchmarks/residual_gpu.py --out rows.jsonl         goes on with that file
    python benchmarks/residual_gpu.py wrn-16-4 --profile 12    and the kernels that take longest

    python benchmarks/residual_gpu.py wrn-16-4 bf16 --bound    how far one example moves the sum

Plain SGD of the same precision, as a CUDA graph, is 1. bf16 is autocast with float32 weights and
`nhwc` images with channels last. Medians over rounds, one method after the other; the memory is the
most that torch held during a step. Images are random. Further rows:

    vit          ViT-B/16, 64 images of 224 × 224, weights in bf16, AdamW
    views        WRN-16-4 in TF32, 125 images; clipped is the mean over four augmentations of each
    users        the CNN of `step_gpu`, 250 rows of 50 users
    poisson      the same CNN, 250 examples, batches drawn by Poisson sampling
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import peers
import torch
from step_methods import captured, network
from step_peers import FASTDP, fastdp_step
from torch import Tensor, nn
from torch.nn import functional as F

from noshuffle.clipping import Flat, Ghost, ModelLoss
from noshuffle.participation import Epochs, Poisson
from noshuffle.plan import Plan
from noshuffle.strategies import blt, identity
from noshuffle.training import privatize
from noshuffle.training.batches import TensorBatches
from noshuffle.training.compiled.sum import candidates
from noshuffle.training.residual import residual, wide

LOSS = nn.CrossEntropyLoss()
BLT = blt((0.999, 0.98, 0.85, 0.4), (0.05, 0.1, 0.15, 0.2))
VIEWS = 4
Step = Callable[[], object]


class Encoder(nn.Module):
    """One layer of a ViT: attention and an MLP, each behind a norm (Dosovitskiy et al. 2021)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        own = self.mix(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = own.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + self.out(seen)
        return x + self.narrow(F.gelu(self.wide(self.norm2(x))))


class Patches(nn.Module):
    """Images as tokens of 16 × 16 pixels behind one that stands for the whole, with places."""

    def __init__(self, width: int, side: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 1 + (side // 16) ** 2, width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.cut(x).flatten(2).transpose(1, 2)
        return torch.cat([self.token.expand(len(x), -1, -1), h], 1) + self.places


class Vit(nn.Module):
    def __init__(self, width: int = 768, depth: int = 12, heads: int = 12, side: int = 224) -> None:
        super().__init__()
        self.patches = Patches(width, side)
        self.layers = nn.ModuleList(Encoder(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h)[:, 0])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "wrn-16-2": lambda: wide(2),
    "wrn-16-4": lambda: wide(4),
    "resnet-18": lambda: residual([(64, 2, 1), (128, 2, 2), (256, 2, 2), (512, 2, 2)], first=64),
    "vit": Vit,
    "cnn": network,
}


def _views(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean loss of all augmentations of an image; x is [images, views, …]."""
    scores = model(x.flatten(0, 1))
    losses = F.cross_entropy(scores, y.repeat_interleave(x.shape[1]), reduction="none")
    return losses.view(len(y), -1).mean(1)


def _rows(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).float(), y, reduction="none")


@dataclass(frozen=True)
class Row:
    """One model with one batch, in one precision."""

    model: str
    batch: int
    dtype: str
    layout: str = ""
    kind: str = ""

    @property
    def name(self) -> str:
        words = (self.kind, self.model, str(self.batch), self.dtype, self.layout)
        return " ".join(word for word in words if word)

    @property
    def format(self) -> torch.memory_format:
        return torch.channels_last if self.layout == "nhwc" else torch.contiguous_format

    def data(self) -> tuple[Tensor, Tensor]:
        shape: tuple[int, ...] = (self.batch, 3, 32, 32)
        classes = 10
        if self.model == "vit":
            shape, classes = (self.batch, 3, 224, 224), 1000
        elif self.model == "cnn":
            shape = (self.batch, 1, 28, 28)
        elif self.kind == "views":
            shape = (self.batch, VIEWS, *shape[1:])
        x = torch.randn(shape, device="cuda")
        x = x.to(memory_format=self.format) if len(shape) == 4 else x
        x = x.bfloat16() if self.dtype == "bfloat16" else x
        return x, torch.randint(classes, (self.batch,), device="cuda")

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        model = MODELS[self.model]().to("cuda", memory_format=self.format)
        return model.bfloat16() if self.dtype == "bfloat16" else model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.model == "vit":
            return torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=True)
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    @property
    def loss(self) -> Any:
        if self.kind == "views":
            return ModelLoss(_views, by_row=True)
        return ModelLoss(_rows, by_row=True) if self.model == "vit" else LOSS

    def cast(self) -> Any:
        return torch.autocast("cuda", torch.bfloat16) if self.dtype == "bf16" else nullcontext()


ROWS = [
    Row("wrn-16-4", 500, "bf16"),
    Row("resnet-18", 250, "bf16"),
    Row("vit", 64, "bfloat16"),
    Row("cnn", 250, "float32"),
    Row("cnn", 250, "float32", kind="users"),
    Row("cnn", 250, "float32", kind="poisson"),
    Row("resnet-18", 250, "tf32"),
    Row("wrn-16-2", 500, "bf16"),
    Row("wrn-16-4", 2000, "bf16"),
    Row("wrn-16-4", 125, "tf32", kind="views"),
    Row("wrn-16-4", 500, "float32"),
    Row("resnet-18", 250, "float32"),
    Row("wrn-16-4", 2000, "tf32"),
    Row("wrn-16-4", 500, "bf16", "nhwc"),
    Row("resnet-18", 250, "bf16", "nhwc"),
    Row("wrn-16-4", 500, "tf32"),
    Row("wrn-16-2", 500, "tf32"),
    Row("wrn-16-2", 500, "float32"),
    Row("wrn-16-4", 500, "tf32", "nhwc"),
    Row("wrn-16-4", 2000, "float32"),
]


def plain(row: Row, x: Tensor, y: Tensor) -> Step:
    """The same optimizer without privacy, as one graph."""
    model = row.make()
    optimizer, loss_fn = row.optimizer(model), row.loss

    def once() -> None:
        optimizer.zero_grad(set_to_none=True)
        with row.cast():
            if isinstance(loss_fn, ModelLoss):
                loss = loss_fn.fn(model, x, y).mean()
            else:
                loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()

    graph = captured(once)
    replay = lambda: graph.replay()  # noqa: E731
    replay.keeps = (model, optimizer)  # type: ignore[attr-defined]
    return replay


def ours(row: Row, x: Tensor, y: Tensor, *, compile: bool | str = "auto") -> Step:
    model, size = row.make(), len(x)
    rule: Any = Poisson(10_000, 0.25) if row.kind == "poisson" else Epochs(10_000, 1)
    strategy = identity() if row.kind == "poisson" else BLT
    unit = "user" if row.kind == "users" else "example"
    plan = Plan(participation=rule, strategy=strategy, noise_multiplier=1.0, unit=unit)
    optimizer = row.optimizer(model)
    private = privatize(model, optimizer, plan, clip_norm=1.0, batch_size=size, compile=compile)
    loss_fn, ids = row.loss, np.arange(size) // (5 if row.kind == "users" else 1)
    if row.kind == "poisson":
        x, y = x.repeat(4, 1, 1, 1), y.repeat(4)
        draws = iter(TensorBatches((x, y), private.sampler(len(x))))

    def step() -> None:
        with row.cast():
            if row.kind == "poisson":
                drawn = next(draws)
                private.advance(loss_fn, drawn.data, ids=drawn.ids)
            else:
                private.advance(loss_fn, (x, y), ids=ids)

    step.private = private  # type: ignore[attr-defined]
    return step


def opacus(row: Row, x: Tensor, y: Tensor, *, mode: str) -> Step:
    """Opacus by hooks, or by ghost clipping; its clipping and noise, momentum SGD."""
    from opacus import PrivacyEngine

    if row.kind:
        raise RuntimeError(f"no {row.kind} with Opacus here")
    model = row.make()
    data = torch.utils.data.TensorDataset(torch.zeros(len(x), 1), torch.zeros(len(x)))
    options: dict[str, Any] = {
        "module": model,
        "optimizer": row.optimizer(model),
        "data_loader": torch.utils.data.DataLoader(data, batch_size=len(x)),
        "poisson_sampling": False,
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "grad_sample_mode": mode,
    }
    criterion: Any = LOSS
    if mode == "ghost":
        module, optimizer, criterion, _ = PrivacyEngine().make_private(criterion=LOSS, **options)
    else:
        module, optimizer, _ = PrivacyEngine().make_private(**options)

    def step() -> None:
        optimizer.zero_grad()
        with row.cast():
            loss = criterion(module(x), y)
        loss.backward()
        optimizer.step()

    return step


def fastdp(row: Row, x: Tensor, y: Tensor, *, has_origin: bool) -> Step:
    """fastDP's book-keeping, its clipping and noise, the same optimizer."""
    if row.kind:
        raise RuntimeError(f"no {row.kind} with fastDP here")
    model = row.make()

    def loss() -> Tensor:
        with row.cast():
            return LOSS(model(x), y)

    return fastdp_step(model, row.optimizer(model), loss, batch_size=len(x), has_origin=has_origin)


def timed(step: Step, steps: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps * 1e3


def kernels(step: Step, most: int) -> list[str]:
    """Where the device's time of a step goes, the longest first."""
    activity = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activity) as seen:
        timed(step, 2)
    own = [e for e in seen.key_averages() if e.self_device_time_total and not e.self_cpu_time_total]
    own.sort(key=lambda e: -e.self_device_time_total)
    busy = sum(e.self_device_time_total for e in own) / 2e3
    lines = [f"{busy:.2f} ms busy, {sum(e.count for e in own) // 2} kernels"]
    for e in own[:most]:
        lines.append(
            f"{e.self_device_time_total / 2e3:8.3f} ms  {e.count // 2:4d} x  {e.key[:110]}"
        )
    return lines


def measure(row: Row, given: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds, memory and seconds to the first step, by method; errors where it has none."""
    for backend in (torch.backends.cuda.matmul, torch.backends.cudnn):
        backend.allow_tf32 = row.dtype == "tf32"
    x, y = row.data()
    methods: dict[str, Callable[..., Step]] = {"plain": plain, "noshuffle": ours}
    if given.eager:
        methods["noshuffle, eager"] = lambda *a: ours(*a, compile=False)
    if given.peers:
        methods |= {f"Opacus, {m}": lambda *a, m=m: opacus(*a, mode=m) for m in ("hooks", "ghost")}
        methods |= {n: lambda *a, o=o: fastdp(*a, has_origin=o) for n, o in FASTDP.items()}
    found: dict[str, Any] = {"row": row.name}
    for title, method in methods.items():
        step: Step | None = None
        gc.collect()  # a captured graph refers to itself, and would be counted as held
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        try:
            began = time.perf_counter()
            step = method(row, x, y)
            timed(step, 1)
            start = time.perf_counter() - began
            once = timed(step, 3)
            steps = max(2, min(given.steps, int(700 / given.rounds / once)))
            each = statistics.median(timed(step, steps) for _ in range(given.rounds))
            memory = (torch.cuda.max_memory_allocated() - held) / 2**30
            own: dict[str, Any] = {"ms": each, "GiB": memory, "start": start}
            own["why"] = getattr(step, "note", "")  # what a peer leaves out
            private = getattr(step, "private", None)
            if private is not None:
                own["why"] = f"{private.why} {private.fallbacks}"
            if given.profile and not title.startswith(("Opacus", "fastDP")):
                own["kernels"] = kernels(step, given.profile)
        except Exception as error:
            own = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
        found[title] = own
        del step
    return found


def bound(row: Row) -> None:
    """‖sum − sum without one example‖ in clip norms, by form and by size of the example."""
    for backend in (torch.backends.cuda.matmul, torch.backends.cudnn):
        backend.allow_tf32 = row.dtype == "tf32"
    small = replace(row, batch=min(row.batch, 64))
    (x, y), model, engine = small.data(), small.make(), Ghost()
    keep = torch.ones(len(x), dtype=torch.bool, device=x.device)
    without = keep.clone()
    without[5] = False
    worst: dict[str, list[float]] = {}
    for scale in (1e-3, 1.0, 1e3, 1e6, 1e15):
        own = x.clone()
        own[5] *= scale
        with row.cast():
            made = candidates(engine, model, row.loss, (own, y), keep, clip=Flat(1.0), fuse=False)
            for name, build in made.items():
                total = build()
                one, other = (total((own, y), who).values for who in (keep, without))
                gap = sum(float((one[n].double() - other[n].double()).norm()) ** 2 for n in one)
                worst.setdefault(name, []).append(gap**0.5)
    for name, gaps in worst.items():
        print(f"| {row.name} | sum by {name} | {' '.join(f'{g:.5f}' for g in gaps)} |", flush=True)


def show(found: dict[str, Any]) -> None:
    base = found.get("plain", {})
    for title, own in found.items():
        if title == "row":
            continue
        line = own.get("error", "")
        if not line:
            times, more = (own[k] / base[k] if base.get(k) else 1.0 for k in ("ms", "GiB"))
            line = f"{own['ms']:.3f} | {times:.2f} | {own['GiB']:.2f} | {more:.2f}"
            line += f" | {own['start']:.1f}"
        print(f"| {found['row']} | {title} | {line} |", flush=True)
    for title, own in found.items():
        if isinstance(own, dict):
            for line in [*filter(None, [own.get("why")]), *own.get("kernels", [])]:
                print(f"    {title}: {line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="rows whose name has all of these")
    parser.add_argument("--out", type=Path, help="a file of rows to go on with")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no row after so many")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", type=int, default=0, metavar="KERNELS")
    for flag in ("eager", "peers", "bound"):
        parser.add_argument(f"--{flag}", action="store_true")
    given = parser.parse_args()
    peers.look_in_folder()
    lines = given.out.read_text().splitlines() if given.out and given.out.exists() else []
    done = {found["row"]: found for found in map(json.loads, lines)}
    print("| row | step | ms | × plain | GiB | × plain | s to the first |")
    print("|---|---|---|---|---|---|---|")
    began = time.perf_counter()
    for row in ROWS:
        if not all(word in row.name.split() for word in given.words):
            continue
        if given.bound:
            bound(row)
            continue
        found = done.get(row.name)
        if found is None:
            if time.perf_counter() - began > given.seconds:
                print(f"| {row.name} | not measured, out of time |")
                continue
            found = measure(row, given)
            if given.out is not None:
                with given.out.open("a") as file:
                    file.write(json.dumps(found) + "\n")
        show(found)


if __name__ == "__main__":
    main()
