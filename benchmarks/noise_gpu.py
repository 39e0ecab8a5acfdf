"""The fused noise on one GPU: how near to the memory limit, beside torch, jax-privacy and opake.

    python benchmarks/noise_gpu.py                          everything, under two minutes
    python benchmarks/noise_gpu.py --only speed scaling     some parts: speed, scaling, tune
    python benchmarks/noise_gpu.py --count 10000000         another number of parameters

`speed` has every mechanism and its peers in one process, then the ratios that matter. `scaling` has
time and memory against parameters, steps and buffers. `tune` tries other program sizes. "of copy"
is the time in which a copy moves the bytes that the step has to move, over the time of the step. A
row that fails prints its error and the others go on. Bits are compared by tests/noise/test_triton.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import noise_peers
import torch
from noise_kernels import (
    BLT_4,
    DEVICE,
    RECIPES,
    blt_of,
    copy_ms,
    fused_of,
    median_ms,
    time_step,
)

from noshuffle.strategies.recipe import Forest

STEPS_OF_GRAPH = 500
#: What these must not exceed.
LIMITS = {
    "independent ÷ torch normal_": 1.3,
    "BLT-4 ÷ the time to move its 40 bytes": 1.25,
    "16 redrawn rows, ms at 250 M": 8.0,
}


@contextmanager
def row(name: str) -> Iterator[None]:
    """Print the error of one row, in one line, and go on."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())
        print(f"| {name} | FAILED {type(error).__name__}: {text[:300]} |", flush=True)
    finally:
        torch.cuda.empty_cache()


def speed(count: int, *, has_peers: bool = True) -> None:
    """Every mechanism at one size, ours first, then torch's pieces and the peers."""
    copied = copy_ms(count)
    print(f"\n{count:,} float32 parameters; a copy takes {copied:.3f} ms,", end=" ")
    print(f"{8 * count / copied / 1e9:.2f} TB/s\n")
    print("| noise step | ms | bytes a parameter | of copy | GiB kept | × ours |")
    print("|---|---|---|---|---|---|")
    ours: dict[str, float] = {}
    least: dict[str, float] = {}

    def line(name: str, ms: float, moves: float, buffers: float) -> None:
        limit = moves / 8 * copied
        gib = buffers * 4 * count / 2**30
        print(f"| {name} | {ms:.3f} | {moves:.1f} | {limit / ms:.2f} | {gib:.2f} | |", flush=True)

    value = torch.zeros(count, device=DEVICE)
    for name, recipe in RECIPES.items():
        with row(f"noshuffle, {name}"):
            ours[name], moves, buffers = time_step(recipe, value)
            line(f"noshuffle, {name}", ours[name], moves, buffers)
            least[name] = moves / 8 * copied
    with row("bf16"):
        low = torch.zeros(count, device=DEVICE, dtype=torch.bfloat16)
        ms, moves, buffers = time_step(RECIPES["independent"], low)
        line("noshuffle, independent, bf16 gradient", ms, moves - 4, buffers)
        del low
    normal = float("nan")
    with row("torch"):
        normal = median_ms(value.normal_)
        line("torch, `normal_` into a buffer", normal, 4, 0)
        both = median_ms(lambda: value.add_(torch.randn_like(value)))
        line("torch, `randn` and `add_`", both, 8, 0)
    value = torch.empty(0)  # its memory is for the peers
    torch.cuda.empty_cache()
    theirs: dict[str, float] = {}
    for found in noise_peers.rows(count) if has_peers else ():
        if found.why:
            print(f"| {found.name} | not measured: {found.why} | | | | |", flush=True)
            continue
        ratio = found.ms / ours.get(found.like, float("nan"))
        kept = "" if found.gib is None else f"{found.gib:.1f} at most"
        share = least.get(found.like, float("nan")) / found.ms
        print(
            f"| {found.name} | {found.ms:.2f} | | {share:.2f} | {kept} | {ratio:.1f} |", flush=True
        )
        theirs.setdefault(f"{found.name} ÷ ours", ratio)
    ratios = {
        "independent ÷ torch normal_": ours.get("independent", float("nan")) / normal,
        "BLT-4 ÷ the time to move its 40 bytes": ours.get("BLT, 4 buffers", float("nan"))
        / (5 * copied),
        "16 redrawn rows, ms at 250 M": ours.get("banded inverse, 16 rows", float("nan"))
        * (250e6 / count),
        **theirs,
    }
    print("\n| ratio | measured | asked |\n|---|---|---|")
    for name, ratio in ratios.items():
        asked = ""
        if name in LIMITS:
            asked = f"≤ {LIMITS[name]:g}"
        elif name.startswith("jax"):
            asked = "≥ 2" if "independent" in name else "≥ 4"
        print(f"| {name} | {ratio:.2f} | {asked} |", flush=True)


def scaling(largest: int) -> None:
    """Time and memory against parameters, steps and buffers."""
    sizes = [10**k for k in range(6, 10) if 10**k <= largest]
    print("\nAgainst parameters: ms (picoseconds a parameter); MiB kept\n")
    print("| mechanism |" + "".join(f" {size:,} |" for size in sizes) + " MiB a 10⁶ parameters |")
    print("|---|" + "---|" * (len(sizes) + 1))
    for name in ("independent", "BLT, 4 buffers", "banded inverse, 16 rows"):
        with row(name):
            cells, kept = "", 0.0
            for size in sizes:
                value = torch.zeros(size, device=DEVICE)
                before = torch.cuda.memory_allocated()
                held = fused_of(RECIPES[name], {"w": (size,)}, steps=10)
                kept = (torch.cuda.memory_allocated() - before) / 2**20 / size * 1e6
                del held
                ms = time_step(RECIPES[name], value)[0]
                cells += f" {ms:.3f} ({ms * 1e9 / size:.1f}) |"
                del value
                torch.cuda.empty_cache()
            print(f"| {name} |{cells} {kept:.2f} |", flush=True)
    marks = [10**k for k in range(2, 7)]
    count = 10**7
    print(f"\nAgainst the step number, {count:,} parameters: ms\n")
    print("| mechanism |" + "".join(f" step {mark:,} |" for mark in marks) + " MiB kept |")
    print("|---|" + "---|" * (len(marks) + 1))
    value = torch.zeros(count, device=DEVICE)
    recipes = {n: r for n, r in RECIPES.items() if not isinstance(r, Forest)}
    for name, recipe in (recipes | {"Honaker tree": Forest("honaker", 2 * 10**6)}).items():
        with row(name):
            found = [time_step(recipe, value, at=mark, steps=2 * 10**6) for mark in marks]
            cells = "".join(f" {ms:.3f} |" for ms, _, _ in found)
            print(f"| {name} |{cells} {found[0][2] * 4 * count / 2**20:.0f} |", flush=True)
    count = 10**8
    value = torch.zeros(count, device=DEVICE)
    copied = copy_ms(count)
    print(f"\nAgainst buffers of a BLT, {count:,} parameters\n")
    print("| buffers | ms | of copy | GiB kept |\n|---|---|---|---|")
    for buffers in (0, 1, 2, 4, 8, 16):
        with row(str(buffers)):
            ms, moves, _ = time_step(blt_of(buffers), value)
            share = moves / 8 * copied / ms
            print(f"| {buffers} | {ms:.3f} | {share:.2f} | {buffers * 4 * count / 2**30:.2f} |")
    del value
    many_tensors()


def many_tensors() -> None:
    """Small models: the launch counts, not the memory."""
    print("\nMany tensors, BLT with 4 buffers, host included: µs a step\n")
    print("| tensors | eager | in a CUDA graph |\n|---|---|---|")
    for tensors, size in ((8, 3251), (150, 10_000), (1000, 1000)):
        with row(f"{tensors} tensors"):
            values = {f"p{i}": torch.zeros(size, device=DEVICE) for i in range(tensors)}
            fused = fused_of(BLT_4, {n: tuple(v.shape) for n, v in values.items()}, steps=100_000)
            step = iter(range(100_000))
            for _ in range(20):
                fused.add_(values, step=next(step))
            eager = _wall_us(lambda: fused.add_(values, step=next(step)), 200)  # noqa: B023
            fused.prepare(values)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                fused.add_(values, step=0)
            fused.announce(step=1024, count=STEPS_OF_GRAPH)
            replay = _wall_us(graph.replay, STEPS_OF_GRAPH)
            if not all(bool(torch.isfinite(v).all()) for v in values.values()):
                raise ValueError("the noise is not finite")
            print(f"| {tensors} of {size:,} | {eager:.1f} | {replay:.1f} |", flush=True)


def _wall_us(do: Callable[[], object], turns: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(turns):
        do()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / turns * 1e6


def tune(count: int) -> None:
    """Other numbers of warps and tiles of a program."""
    choices = [(warps, tiles) for warps in (2, 4, 8) for tiles in (1, 4, 16)]
    print(f"\ntuning, {count:,} parameters (ms); columns: warps × tiles of a program\n")
    print("| |" + "".join(f" {w} × {t} |" for w, t in choices))
    print("|---|" + "---|" * len(choices))
    value = torch.zeros(count, device=DEVICE)
    for name in ("independent", "BLT, 4 buffers", "banded inverse, 16 rows", "16 bands, recursive"):
        with row(name):
            times = [time_step(RECIPES[name], value, tiles=t, warps=w)[0] for w, t in choices]
            print(f"| {name} |" + "".join(f" {ms:.3f} |" for ms in times), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=250_000_000, help="parameters")
    parts = ("speed", "scaling", "tune")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts[:2])
    parser.add_argument("--no-peers", action="store_true", help="leave jax-privacy and opake out")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device; there is none")
    import triton

    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}")
    todo: dict[str, Callable[[], None]] = {
        "speed": lambda: speed(options.count, has_peers=not options.no_peers),
        "scaling": lambda: scaling(10**9),
        "tune": lambda: tune(options.count),
    }
    for part in options.only:
        begin = time.perf_counter()
        with row(part):
            todo[part]()
        print(f"\n({part}: {time.perf_counter() - begin:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
