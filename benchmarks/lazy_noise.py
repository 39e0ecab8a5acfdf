"""Time of one step on an embedding table: plain sparse SGD, lazy noise, eager noise.

    python benchmarks/lazy_noise.py [--rows 10000 100000 1000000 10000000] [--columns 16]
                                    [--touched 1000] [--repeat 25] [--device cuda] [--threads 1]

A step reads `touched` distinct random rows and updates them with a gradient. `plain` is the
update alone. `lazy` brings the rows up to date before the read and adds this step's noise with the
update (`SparseSGD.read_` and `apply_`); `schedule` is the same with a learning rate for every step.
`unfused` (on a GPU) is `lazy` by torch operations instead of kernels. `eager` adds the buffered
noise of the step to the whole table, which is what lazy noise equals in law. Milliseconds, the best
of the repeats; 4 buffers, 4096 steps. `release` is one flush of the whole table, `MiB` the noise
state (the table itself comes on top, the same for all).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from noshuffle.noise import NoiseStream, test_source
from noshuffle.noise.lazy import LazyNoise
from noshuffle.noise.lazy_fused import lazy_noise
from noshuffle.noise.sparse_sgd import SparseSGD
from noshuffle.strategies.recipe import Buffered

STEPS, WARM, LR, DIVISOR = 4096, 30, 0.1, 256.0
BLT4 = Buffered(
    decays=(0.99885911, 0.98734501, 0.88051219, 0.26915574),
    scales=(-3.27832e-5, -1.048014e-3, -0.030251166, -0.457538471),
)
RATES = tuple(1.0 - t / STEPS for t in range(STEPS))
#: Elements of the largest table whose release by torch operations is worth waiting for.
UNFUSED = 2**25
Step = Callable[[Tensor, Tensor, int], object]


def clock(do: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one call, with the device's work finished before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    do()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def distinct(rows: int, count: int, device: torch.device) -> Tensor:
    found = torch.randint(rows, (2 * count,), device=device).unique()
    return found[torch.randperm(len(found), device=device)[:count]]


def lazy_step(
    table: Tensor, rates: tuple[float, ...], form: Callable[..., LazyNoise] = lazy_noise
) -> tuple[SparseSGD, Step]:
    noise = form(
        BLT4, test_source(seed="benchmark"), table.shape,
        scale=1.0, steps=STEPS, name="table", rates=rates, device=table.device,
    )  # fmt: skip
    sgd = SparseSGD(noise=noise, lr=LR, divisor=DIVISOR)
    sgd.release_(table, 0)  # so that all memory is in use, as in the middle of a run

    def step(rows: Tensor, gradients: Tensor, t: int) -> None:
        sgd.read_(table, rows, t)
        sgd.apply_(table, rows, gradients, t)

    return sgd, step


def eager_step(table: Tensor) -> Step:
    stream = NoiseStream(
        BLT4, test_source(seed="benchmark"), {"table": table.shape},
        scale=1.0, steps=STEPS, device=table.device,
    )  # fmt: skip
    total = torch.zeros_like(table)

    def step(rows: Tensor, gradients: Tensor, t: int) -> None:
        total.zero_()
        total[rows] = gradients
        stream.add_({"table": total})
        table.add_(total, alpha=-LR / DIVISOR)

    return step


def measure(rows: int, args: argparse.Namespace) -> dict[str, float]:
    device = torch.device(args.device)
    table = torch.zeros(rows, args.columns, device=device)
    sgd, lazy = lazy_step(table, ())
    _, schedule = lazy_step(table, RATES)

    def plain(touched: Tensor, gradients: Tensor, t: int) -> None:
        table.index_add_(0, touched, gradients, alpha=-LR / DIVISOR)

    times: dict[str, list[float]] = {}
    steps: dict[str, Step] = {"plain": plain, "lazy": lazy, "schedule": schedule}
    if device.type == "cuda" and table.numel() <= UNFUSED:
        steps["unfused"] = lazy_step(table, (), LazyNoise)[1]
    for name, step in (steps | {"eager": eager_step(table)}).items():
        laps = WARM + args.repeat if name != "eager" else 1 + min(args.repeat, 5)
        t, times[name] = 0, []
        for turn in range(laps):
            t += 1 + turn % 7  # steps in between touch nothing here: skips of many lengths
            touched = distinct(rows, args.touched, device)
            gradients = torch.randn(len(touched), args.columns, device=device)
            do = partial(step, touched, gradients, t)
            times[name].append(clock(do, device))
        del times[name][: -args.repeat]
    found = {name: min(values) for name, values in times.items()}
    found["release"] = clock(lambda: sgd.release_(table, STEPS - 1), device)
    state = sgd.noise.buffers * table.numel() * 4 + rows * 4
    return found | {"MiB": state / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10**4, 10**5, 10**6, 10**7])
    parser.add_argument("--columns", type=int, default=16)
    parser.add_argument("--touched", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=25)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"{args.threads} thread(s)"
    print(f"{args.device} ({where}), {args.columns} columns, {args.touched} rows touched, ms\n")
    unfused = ("unfused",) if args.device == "cuda" else ()
    names = ("plain", "lazy", "schedule", *unfused, "eager", "release", "MiB")
    print("| rows |" + "".join(f" {name} |" for name in names) + " eager ÷ lazy |")
    print("|---|" + "---|" * (len(names) + 1))
    for rows in args.rows:
        try:
            found = measure(rows, args)
        except Exception as error:  # one size too large must not hide the others
            text = " ".join(str(error).split())
            print(f"| {rows:,} | FAILED {type(error).__name__}: {text[:200]} |", flush=True)
            continue
        cells = "".join(f" {found[n]:.3f} |" if n in found else " – |" for n in names)
        print(f"| {rows:,} |{cells} {found['eager'] / found['lazy']:.1f} |", flush=True)


if __name__ == "__main__":
    main()
