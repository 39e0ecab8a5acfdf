"""Time of a step against batch, parameters, image size and sequence length, private beside plain.

    python benchmarks/scaling.py --out docs/figures/scaling.svg         on a GPU where there is one
    python benchmarks/scaling.py --rows scaling.json --out scaling.svg  draws what was measured

One picture of four, each with two lines: plain SGD (a CUDA graph where there is one) and the whole
`private.step` with BLT-4 noise. float32 with TF32 allowed; medians of five rounds.

    batch        the CNN of `step_gpu` (26,010 parameters), 28 × 28, 64 to 4,096 rows
    parameters   an MLP of two hidden layers, 256 rows, 0.3 to 39 million
    image side   WRN-16-2 with GroupNorm, 64 images of 16 to 128 pixels
    tokens       a transformer of four layers of 256, 16 rows of 32 to 1,024 tokens
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from residual_gpu import BLT, Encoder, timed
from step_methods import captured
from torch import Tensor, nn
from torch.nn import functional as F

from noshuffle.participation import Epochs
from noshuffle.plan import Plan
from noshuffle.training import privatize
from noshuffle.training.models import build
from noshuffle.training.residual import wide

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LOSS = nn.CrossEntropyLoss()
Case = tuple[nn.Module, Tensor, Tensor]


class Tokens(nn.Module):
    def __init__(self, width: int = 256, vocab: int = 1000) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.layers = nn.Sequential(*(Encoder(width, 4) for _ in range(4)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.token(x)).mean(1))


def _labels(rows: int) -> Tensor:
    return torch.randint(10, (rows,), device=DEVICE)


def of_batch(rows: int) -> Case:
    model = build("tanh_cnn", (1, 28, 28), 10)
    return model, torch.randn(rows, 1, 28, 28, device=DEVICE), _labels(rows)


def of_width(width: int) -> Case:
    layers = [nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    return model, torch.randn(256, 784, device=DEVICE), _labels(256)


def of_side(side: int) -> Case:
    return wide(2), torch.randn(64, 3, side, side, device=DEVICE), _labels(64)


def of_length(length: int) -> Case:
    return Tokens(), torch.randint(1000, (16, length), device=DEVICE), _labels(16)


AXES: dict[str, tuple[Callable[[int], Case], tuple[int, ...]]] = {
    "rows of a batch": (of_batch, (64, 256, 1024, 4096)),
    "parameters": (of_width, (256, 1024, 2048, 6000)),
    "pixels of a side": (of_side, (16, 32, 64, 128)),
    "tokens of a row": (of_length, (32, 128, 512, 1024)),
}


def plain(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def once() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return captured(once).replay if DEVICE.type == "cuda" else once


def ours(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    plan = Plan(participation=Epochs(10_000, 1), strategy=BLT, noise_multiplier=1.0)
    private = privatize(model, optimizer, plan, clip_norm=1.0, batch_size=len(x))
    ids = np.arange(len(x))
    return lambda: private.advance(LOSS, (x, y), ids=ids)


def clock(step: Callable[[], object]) -> float:
    """Milliseconds of a step; fewer of them where one takes long."""
    if DEVICE.type == "cuda":
        many = max(2, min(30, int(60 / timed(step, 3))))
        return statistics.median(timed(step, many) for _ in range(5))
    times = []
    for _ in range(3):
        began = time.process_time()
        step()
        times.append(1e3 * (time.process_time() - began))
    return statistics.median(times)


def measure(most: int) -> list[dict[str, Any]]:
    found = []
    for axis, (make, values) in AXES.items():
        for value in values[:most]:
            row: dict[str, Any] = {"axis": axis, "value": value}
            for name, method in (("plain", plain), ("private", ours)):
                torch.manual_seed(0)
                model, x, y = make(value)
                model = model.to(DEVICE)
                if axis == "parameters":
                    row["value"] = sum(p.numel() for p in model.parameters())
                try:
                    step = method(model, x, y)
                    step()
                    row[name] = clock(step)
                except Exception as error:
                    row[name] = None
                    print(f"{axis} {value} {name}: {type(error).__name__}: {error}", flush=True)
            print(json.dumps(row), flush=True)
            found.append(row)
    return found


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    plain_numbers = FuncFormatter(lambda v, _: f"{v / 1e6:.2g} M" if v >= 1e5 else f"{v:g}")
    figure, axes = pyplot.subplots(2, 2, figsize=(8.0, 6.0), layout="constrained")
    for own, axis in zip(axes.flat, AXES):
        for name, colour in (("plain", "#9aa5b1"), ("private", "#0b6e99")):
            points = [(r["value"], r[name]) for r in rows if r["axis"] == axis and r[name]]
            own.plot(*zip(*points), marker="o", color=colour, label=name)
        own.set(xscale="log", yscale="log", xlabel=axis, ylabel="ms a step")
        own.xaxis.set_major_locator(FixedLocator([r["value"] for r in rows if r["axis"] == axis]))
        own.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        for side in (own.xaxis, own.yaxis):
            side.set_minor_locator(NullLocator())
            side.set_major_formatter(plain_numbers)
        own.grid(alpha=0.25)
        own.spines[["top", "right"]].set_visible(False)
    axes[0, 0].legend(frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, help="measurements: read where they are, else written")
    parser.add_argument("--out", type=Path, help="the picture: SVG or PNG")
    parser.add_argument("--most", type=int, default=9, help="points of a line")
    given = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    if given.rows is not None and given.rows.exists():
        rows = json.loads(given.rows.read_text())
    else:
        rows = measure(given.most)
        if given.rows is not None:
            given.rows.write_text(json.dumps(rows, indent=1) + "\n")
    if given.out is not None:
        draw(rows, given.out)


if __name__ == "__main__":
    main()
