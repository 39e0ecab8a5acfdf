"""The fused noise on one GPU: is it the noise of the CPU, and how near is it to the memory limit?

    python benchmarks/noise_gpu.py                 everything, under a minute
    python benchmarks/noise_gpu.py --tune          programs of other sizes, for whoever tunes
    python benchmarks/noise_gpu.py --only checks   one part: checks, speed, scaling, peers

Times are medians of CUDA-event times. "of copy" is the time that a copy at the measured bandwidth
would need for the bytes that the step has to move, over the time of the step. A row that fails
prints its error and the others go on.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import numpy as np
import torch
from torch import Tensor

from noshuffle.noise import NoiseStream, test_source
from noshuffle.noise.constants import DEVICE_CHUNK, TILE
from noshuffle.noise.fused import Fused
from noshuffle.noise.layout import Layout
from noshuffle.noise.moves import Move, Moves
from noshuffle.strategies.recipe import Buffered, FeedForward, Forest, Recipe, Recursive, Rows

DEVICE = torch.device("cuda")
STEPS_OF_GRAPH = 500
SCALE = 0.8
INVERSE_16 = tuple([1.0] + [-0.5 / (i + 1) ** 1.5 for i in range(15)])
BANDS_16 = tuple([1.0] + [-0.3 / (i + 1) for i in range(15)])
BLT_4 = Buffered((0.999, 0.98, 0.85, 0.4), (-0.01, -0.04, -0.12, -0.25))
EPOCH_TAPS = ((0, 1.0), *((240 * (i + 1), -0.1) for i in range(6)))
BLT_2_TAPS = Buffered((0.99, 0.7), (-0.05, -0.2), EPOCH_TAPS)

SPEED: dict[str, Recipe] = {
    "independent": FeedForward((1.0,)),
    "BLT, 4 buffers": BLT_4,
    "BLT, 2 buffers, 6 taps": BLT_2_TAPS,
    "banded inverse, 16 rows": FeedForward(INVERSE_16),
    "Honaker tree, 1024 steps": Forest("honaker", 1024),
    "16 bands, recursive": Recursive(BANDS_16),
}
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


@contextmanager
def row(name: str) -> Iterator[None]:
    """Print the error of one row, in one line, and go on."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())
        print(f"{name:34s} FAILED {type(error).__name__}: {text[:400]}", flush=True)
    finally:
        torch.cuda.empty_cache()


def fused_of(
    recipe: Recipe,
    shapes: dict[str, tuple[int, ...]],
    *,
    steps: int,
    exact: bool = True,
    tiles: int | None = None,
    warps: int = 4,
    starts: dict[str, int] | None = None,
) -> Fused:
    moves, source = Moves.of(recipe), test_source(seed="bench", kind="philox")
    layout = Layout.of(shapes, starts=starts, chunk_tiles=DEVICE_CHUNK)
    state = torch.zeros((moves.buffers, layout.tiles, TILE), device=DEVICE)
    return Fused(
        moves,
        layout=layout,
        seeds={name: source.seed(name) for name in shapes},
        state=state,
        scale=SCALE,
        steps=steps,
        exact=exact,
        tiles=tiles,
        warps=warps,
    )


def median_ms(do: Callable[[], object], *, repeats: int = 15, warm: int = 3) -> float:
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


def moved(move: Move) -> int:
    """Bytes of one parameter that one step must read and write, float32 gradient included."""
    reads = {b for b, _ in move.inner} | {b for b, _ in move.outer}
    writes = len(move.decays) if move.decays else int(move.store >= 0)
    return 8 + 4 * len(reads) + 4 * writes


SHAPES: dict[str, tuple[int, ...]] = {
    "w": (7, 300),
    "b": (3,),
    "big": (130, 1025),
    "none": (0, 2),
    "scalar": (),
}


def checks() -> None:
    shapes, starts = SHAPES, {"w": 700}
    print("equal to the CPU path (philox)?   largest difference over all steps and tensors")
    for name, recipe in CHECKS.items():
        for label, exact, dtype, graph in (
            ("exact", True, torch.float32, False),
            ("exact, graph", True, torch.float32, True),
            ("exact, bf16", True, torch.bfloat16, False),
            ("exact, fp16", True, torch.float16, False),
            ("fused products", False, torch.float32, False),
        ):
            # Every kernel of a new kind has to be compiled, so these are for some recipes only.
            is_rare = not exact or dtype != torch.float32
            if is_rare and name not in ("independent", "banded inverse", "BLT", "Honaker"):
                continue
            with row(f"{name} ({label})"):
                source = test_source(seed="bench", kind="philox")
                settings = {"scale": SCALE, "steps": N, "starts": starts}
                twin = NoiseStream(recipe, source, shapes, **settings)  # type: ignore[arg-type]
                fused = fused_of(recipe, shapes, steps=N, exact=exact, starts=starts)
                print(f"{name + ' (' + label + ')':34s}", _compare(twin, fused, dtype, graph=graph))


def _compare(twin: NoiseStream, fused: Fused, dtype: torch.dtype, *, graph: bool) -> str:
    generator = torch.Generator().manual_seed(0)
    values = {n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()}
    got = {n: v.to(DEVICE) for n, v in values.items()}
    flat = {n: v.view(-1) for n, v in got.items()}
    if graph:
        fused.prepare(flat)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            fused.add_(flat, step=0)
    worst, same = 0.0, True
    for step in range(N):
        twin.add_(values)
        if graph:
            fused.announce(step=step, count=1)
            captured.replay()
        else:
            fused.add_(flat, step=step)
        for name, value in values.items():
            other = got[name].cpu()
            same &= torch.equal(value, other)
            if value.numel():
                worst = max(worst, float((value.double() - other.double()).abs().max()))
    return f"{worst:9.2e}   {'same bits' if same else 'DIFFERENT BITS'}"


def copy_bandwidth(count: int) -> float:
    """Bytes per second of a device copy of `count` float32 numbers, read and write counted."""
    a, b = torch.empty(count, device=DEVICE), torch.zeros(count, device=DEVICE)
    ms = median_ms(lambda: a.copy_(b))
    print(f"copy of {count:,} float32: {ms:.3f} ms, {8 * count / ms / 1e9:.2f} TB/s")
    return 8 * count / ms * 1e3


def speed(count: int, *, bandwidth: float) -> None:
    print(f"\n{count:,} parameters{'':16s}     ms   bytes/param   of copy   GiB of buffers")

    def line(name: str, ms: float, moves: float, buffers: int) -> None:
        limit = moves * count / bandwidth * 1e3
        gib = buffers * 4 * count / 2**30
        print(f"{name:34s} {ms:6.3f}   {moves:11.1f}   {limit / ms:7.2f}   {gib:.2f}", flush=True)

    value = torch.zeros(count, device=DEVICE)
    with row("torch normal_"):
        line("torch normal_", median_ms(value.normal_), 4, 0)
    with row("torch randn + add_"):
        line("torch randn, then add_", median_ms(lambda: value.add_(torch.randn_like(value))), 8, 0)
    for exact in (True, False):
        for name, recipe in SPEED.items():
            if not exact and Moves.of(recipe).buffers > 4:
                continue
            label = name if exact else f"{name}, fused ×+"
            with row(label):
                line(label, *_time(recipe, value, exact=exact))
    value16 = torch.zeros(count, device=DEVICE, dtype=torch.bfloat16)
    with row("independent, bf16"):
        ms, moves, buffers = _time(SPEED["independent"], value16)
        line("independent, bf16 gradient", ms, moves - 4, buffers)


def _time(
    recipe: Recipe, value: Tensor, *, exact: bool = True, tiles: int | None = None, warps: int = 4
) -> tuple[float, float, int]:
    """Milliseconds and bytes per parameter of a step (a tree: mean over 64 steps), and buffers."""
    moves, shapes = Moves.of(recipe), {"w": (value.numel(),)}
    horizon = moves.horizon or 100_000
    fused = fused_of(recipe, shapes, steps=horizon, exact=exact, tiles=tiles, warps=warps)
    if isinstance(recipe, Forest):
        fused.add_({"w": value}, step=0)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for step in range(1, 65):
            fused.add_({"w": value}, step=step)
        end.record()
        torch.cuda.synchronize()
        moves_mean = statistics.mean(moved(moves.at(step)) for step in range(1, 65))
        return begin.elapsed_time(end) / 64, moves_mean, moves.buffers
    step = iter(range(min(2000, horizon // 2), horizon))  # past the lag of every tap
    ms = median_ms(lambda: fused.add_({"w": value}, step=next(step)))
    return ms, moved(moves.at(2000)), moves.buffers


def scaling(largest: int) -> None:
    print("\nscaling       parameters:", end="")
    sizes = [10**k for k in range(6, 10) if 10**k <= largest]
    print("".join(f"{size:>12,}" for size in sizes), "  (ms, and ps a parameter)")
    for name in ("independent", "BLT, 4 buffers", "banded inverse, 16 rows"):
        with row(name):
            times = []
            for size in sizes:
                value = torch.zeros(size, device=DEVICE)
                times.append(_time(SPEED[name], value)[0])
                del value
                torch.cuda.empty_cache()
            print(f"{name:25s}", "".join(f"{ms:12.3f}" for ms in times))
            cost = (ms * 1e9 / size for ms, size in zip(times, sizes))
            print(f"{'':25s}", "".join(f"{ps:12.1f}" for ps in cost), flush=True)
    marks = [10**k for k in range(2, 7)]
    print("at step (10^7 parameters):", "".join(f"{step:>12,}" for step in marks), "  (ms)")
    value = torch.zeros(10**7, device=DEVICE)
    for name, recipe in (SPEED | {"Honaker tree": Forest("honaker", 2 * 10**6)}).items():
        if isinstance(recipe, Forest) and recipe.steps < max(marks):
            continue
        with row(name):
            fused = fused_of(recipe, {"w": (value.numel(),)}, steps=2 * 10**6)
            times = []
            for mark in marks:
                step = iter(range(mark, mark + 100))
                ms = median_ms(lambda: fused.add_({"w": value}, step=next(step)))  # noqa: B023
                times.append(ms)
            print(f"{name:25s}", "".join(f"{ms:12.3f}" for ms in times), flush=True)
    print("many tensors (host included), microseconds a step:")
    for tensors, size in ((8, 3251), (150, 10_000), (1000, 1000)):
        with row(f"{tensors} tensors"):
            values = {f"p{i}": torch.zeros(size, device=DEVICE) for i in range(tensors)}
            fused = fused_of(BLT_4, {n: tuple(v.shape) for n, v in values.items()}, steps=100_000)
            step = iter(range(100_000))
            for _ in range(20):
                fused.add_(values, step=next(step))
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(200):
                fused.add_(values, step=next(step))
            torch.cuda.synchronize()
            us = (time.perf_counter() - begin) / 200 * 1e6
            fused.prepare(values)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                fused.add_(values, step=0)
            fused.announce(step=1024, count=STEPS_OF_GRAPH)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(STEPS_OF_GRAPH):
                graph.replay()
            torch.cuda.synchronize()
            replay = (time.perf_counter() - begin) / STEPS_OF_GRAPH * 1e6
            finite = all(bool(torch.isfinite(v).all()) for v in values.values())
            label = f"{tensors} tensors of {size:,}"
            print(f"  {label:23s} eager {us:8.1f}   graph {replay:8.1f}   finite: {finite}")


def tune(count: int) -> None:
    print(f"\ntuning, {count:,} parameters (ms); columns: warps × tiles of a program")
    choices = [(warps, tiles) for warps in (2, 4, 8) for tiles in (1, 4, 16)]
    print(f"{'':34s}", "".join(f"{f'{w}×{t}':>9s}" for w, t in choices))
    value = torch.zeros(count, device=DEVICE)
    for name in ("independent", "BLT, 4 buffers", "banded inverse, 16 rows", "16 bands, recursive"):
        with row(name):
            times = [_time(SPEED[name], value, tiles=t, warps=w)[0] for w, t in choices]
            print(f"{name:34s}", "".join(f"{ms:9.3f}" for ms in times), flush=True)


def peers(count: int) -> None:
    """jax-privacy's own noise step, jitted, in the same process; only where it imports."""
    try:
        import jax
        import jax.numpy as jnp
        from jax_privacy import noise_addition
        from jax_privacy.matrix_factorization import buffered_toeplitz
    except Exception as error:
        print(f"\njax-privacy: not measured, it does not import here ({error})")
        return
    print(f"\njax-privacy, {count:,} parameters (ms)")

    def median(privatizer: object) -> float:
        grads = jnp.zeros(count, jnp.float32)
        state = privatizer.init(grads)  # type: ignore[attr-defined]
        update = jax.jit(lambda g, s: privatizer.update(g, s), donate_argnums=(1,))  # type: ignore[attr-defined]
        times = []
        for _ in range(8):
            begin = time.perf_counter()
            noisy, state = update(grads, state)
            jax.block_until_ready(noisy)
            times.append((time.perf_counter() - begin) * 1e3)
        return statistics.median(times[2:])

    key = jax.random.key(0)
    with row("jax-privacy, independent"):
        ms = median(noise_addition.gaussian_privatizer(stddev=SCALE, prng_key=key))
        print(f"{'jax-privacy, independent':34s} {ms:6.3f}", flush=True)
    with row("jax-privacy, BLT-4"):
        jax.config.update("jax_enable_x64", True)
        blt = buffered_toeplitz.BufferedToeplitz.from_rational_approx_to_sqrt_x(num_buffers=4)
        privatizer = noise_addition.matrix_factorization_privatizer(
            blt.inverse_as_streaming_matrix(), stddev=SCALE, prng_key=key
        )
        print(f"{'jax-privacy, BLT-4':34s} {median(privatizer):6.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=250_000_000, help="parameters")
    parser.add_argument("--tune", action="store_true", help="try other program sizes, only that")
    parser.add_argument("--only", choices=("checks", "speed", "scaling", "peers"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device; there is none")
    import triton

    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}")
    begin = time.perf_counter()
    if options.tune:
        tune(options.count)
    else:
        parts: dict[str, Callable[[], None]] = {
            "checks": checks,
            "speed": lambda: speed(options.count, bandwidth=copy_bandwidth(options.count)),
            "scaling": lambda: scaling(10**9),
            "peers": lambda: peers(options.count),
        }
        for part, do in parts.items():
            if options.only in (None, part):
                with row(part):
                    do()
    print(f"total {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
