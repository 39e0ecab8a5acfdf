"""The noise step of other libraries on the same device, in the same process.

    python benchmarks/noise_peers.py [--count 10000000] [--device cpu] [--threads 2]

By itself it prints them below `NoiseStream` and torch's `normal_` on a CPU (or any device);
`noise_gpu.py` takes its rows for a GPU.

jax-privacy: `update` of its privatizers, jitted, gradient and state donated, float32, on a chain of
steps that is waited for at its end, so that the host's part overlaps. Bands are its streaming
inverse, "redrawn" its dense form, which makes the normals of a row's non-zero entries again. Memory
is what its allocator had at most during the chain, gradient included.

"of copy" is the time in which a copy moves the bytes of the step, over the time of the step.
opake draws its normals on the CPU and copies them, also for gradients on a GPU; its steps are timed
with a wall clock, few of them because each takes seconds at this size.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import peers

SCALE = 0.8
#: BLT of four buffers, as decays and output scales of C (its inverse is what runs).
DECAYS = (0.999, 0.98, 0.85, 0.4)
OUTPUTS = (0.01, 0.04, 0.12, 0.25)
BANDS = tuple(1.0 / (i + 1) ** 0.5 / 2**0.5 if i else 1.0 for i in range(16))
REDRAWN = 16
#: Bytes a parameter that a step has to move: the value, and what is kept; 4 for a draw alone.
MOVES = {
    "": 4,
    "independent": 8,
    "BLT, 4 buffers": 40,
    "banded inverse, 16 rows": 8,
    "16 bands, recursive": 72,
}


@dataclass(frozen=True)
class Row:
    """One measured step; `like` names the row of ours that does the same."""

    name: str
    like: str
    ms: float
    gib: float | None = None
    why: str = ""


def attempt(name: str, like: str, measure: Callable[[], tuple[float, float | None]]) -> Row:
    """A row, or its failure in one line."""
    try:
        ms, gib = measure()
    except Exception as error:
        text = " ".join(str(error).split())
        return Row(name, like, float("nan"), why=f"{type(error).__name__}: {text[:160]}")
    return Row(name, like, ms, gib)


def rows(count: int, *, device: str = "cuda") -> Iterator[Row]:
    """Every row that can be measured here, and one with a reason for each peer that cannot."""
    for name, of in (("jax-privacy", jax_rows), ("opake", opake_rows)):
        if why := peers.absent(name):
            yield Row(name, "", float("nan"), why=why)
        else:
            yield from of(count, device)


def jax_rows(count: int, device: str) -> Iterator[Row]:
    import jax
    import jax.numpy as jnp
    from jax_privacy import noise_addition
    from jax_privacy.matrix_factorization import buffered_toeplitz, toeplitz

    place = jax.devices("gpu" if device == "cuda" else "cpu")[0]
    title = f"jax-privacy {peers.version('jax-privacy')}"
    factorized = noise_addition.matrix_factorization_privatizer

    def timed(privatizer: Any, *, at: int | None = None) -> tuple[float, float | None]:
        with jax.default_device(place):
            grads = jnp.zeros(count, jnp.float32)
            state = privatizer.init(grads)
            if at is not None:
                state = jnp.array(at)  # the state of a dense matrix is the number of its row
            update = jax.jit(privatizer.update, donate_argnums=(0, 1))
            times = []
            for _ in range(4):
                begin = time.perf_counter()
                for _ in range(5):
                    grads, state = update(grads, state)
                jax.block_until_ready((grads, state))
                times.append((time.perf_counter() - begin) * 1e3 / 5)
            seen = place.memory_stats() or {}
            peak = seen.get("peak_bytes_in_use")
            finite = bool(jnp.isfinite(grads).all())
        if not finite:
            raise ValueError("its noise is not finite")
        return statistics.median(times[1:]), None if peak is None else peak / 2**30

    def independent() -> tuple[float, float | None]:
        return timed(noise_addition.gaussian_privatizer(stddev=SCALE, prng_key=jax.random.key(0)))

    def buffered() -> tuple[float, float | None]:
        made = buffered_toeplitz.BufferedToeplitz(
            buf_decay=jnp.array(DECAYS, jnp.float32), output_scale=jnp.array(OUTPUTS, jnp.float32)
        )
        matrix = made.inverse_as_streaming_matrix()
        return timed(factorized(matrix, stddev=SCALE, prng_key=jax.random.key(0)))

    def redrawn() -> tuple[float, float | None]:
        size = 4 * REDRAWN
        first = np.zeros(size, np.float32)
        first[:REDRAWN] = [1.0, *(-0.5 / (i + 1) ** 1.5 for i in range(REDRAWN - 1))]
        dense = sum(np.diag(np.full(size - i, first[i]), -i) for i in range(REDRAWN))
        made = factorized(jnp.array(dense, jnp.float32), stddev=SCALE, prng_key=jax.random.key(0))
        return timed(made, at=REDRAWN)

    def bands() -> tuple[float, float | None]:
        matrix = toeplitz.inverse_as_streaming_matrix(jnp.array(BANDS, jnp.float32))
        return timed(factorized(matrix, stddev=SCALE, prng_key=jax.random.key(0)))

    # In the order of the memory they take: the allocator's peak only grows.
    yield attempt(f"{title}, independent", "independent", independent)
    yield attempt(f"{title}, 16 rows redrawn", "banded inverse, 16 rows", redrawn)
    yield attempt(f"{title}, BLT, 4 buffers", "BLT, 4 buffers", buffered)
    yield attempt(f"{title}, 16 bands", "16 bands, recursive", bands)
    jax.clear_caches()


def opake_rows(count: int, device: str) -> Iterator[Row]:
    import torch
    from opake.dpftrl.noise import bisr_strategy, blt_strategy, identity_strategy, mf_gaussian_noise
    from opake.random import key
    from opake.types import ClippedPytree

    title = f"opake {peers.version('opake')}"

    def timed(strategy: Any, *, turns: int) -> tuple[float, float | None]:
        def steps(size: int, turns: int) -> list[float]:
            grads = {"w": torch.zeros(size, device=device)}
            noise, state = mf_gaussian_noise(
                grads, strategy, n_steps=100, min_sep=100, max_participations=1,
                noise_multiplier=SCALE, key=key(0),
            )  # fmt: skip
            took = []
            for _ in range(turns):
                begin = time.perf_counter()
                noisy, state = noise(ClippedPytree(grads, max_norm=1.0), state)
                if device == "cuda":
                    torch.cuda.synchronize()
                took.append((time.perf_counter() - begin) * 1e3)
                del noisy
            return took

        steps(1000, 2)
        return statistics.median(steps(count, turns)), None

    yield attempt(
        f"{title}, independent", "independent", lambda: timed(identity_strategy(), turns=2)
    )
    yield attempt(
        f"{title}, BLT, at most 4 buffers",
        "BLT, 4 buffers",
        lambda: timed(blt_strategy(max_buffers=4), turns=2),
    )
    yield attempt(
        f"{title}, banded inverse, 16 stored",
        "banded inverse, 16 rows",
        lambda: timed(bisr_strategy(bandwidth=16), turns=1),
    )


def our_rows(count: int, device: str) -> Iterator[Row]:
    """torch's own draw, and the library's streams through their public door."""
    import torch

    from noshuffle.noise import NoiseStream, test_source
    from noshuffle.strategies.recipe import Buffered, FeedForward, Recursive

    def timed(do: Callable[[], object]) -> tuple[float, float | None]:
        times = []
        for _ in range(7):
            begin = time.perf_counter()
            do()
            if device == "cuda":
                torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) * 1e3)
        return statistics.median(times[2:]), None

    value = torch.zeros(count, device=device)
    yield attempt("torch, `normal_` into a buffer", "", lambda: timed(value.normal_))
    inverse = (1.0, *(-0.5 / (i + 1) ** 1.5 for i in range(REDRAWN - 1)))
    recipes = {
        "independent": FeedForward((1.0,)),
        "BLT, 4 buffers": Buffered(DECAYS, tuple(-w for w in OUTPUTS)),
        "banded inverse, 16 rows": FeedForward(inverse),
        "16 bands, recursive": Recursive(BANDS),
    }
    for name, recipe in recipes.items():
        stream = NoiseStream(
            recipe, test_source(seed="bench"), {"w": (count,)},
            scale=SCALE, steps=1000, device=device,
        )  # fmt: skip
        for _ in range(REDRAWN if count < 10**7 else 2):  # so that most rows and bands are in use
            stream.add_({"w": value})
        yield attempt(f"noshuffle, {name}", name, lambda: timed(lambda: stream.add_({"w": value})))  # noqa: B023


def copy_ms(count: int, device: str) -> float:
    """A copy of as many float32 numbers, which moves eight bytes for each."""
    import torch

    source = torch.zeros(count, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(9):
        begin = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000_000, help="parameters")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(options.threads)
    print(f"{options.count:,} parameters, {options.device}, {options.threads} threads\n")
    copied = copy_ms(options.count, options.device)
    print("| noise step | ms | ns a parameter | of copy | × ours |\n|---|---|---|---|---|")
    ours: dict[str, float] = {}

    def show(row: Row) -> None:
        if row.why:
            print(f"| {row.name} | not measured: {row.why} | | | |", flush=True)
            return
        ratio = f"{row.ms / ours[row.like]:.1f}" if row.like in ours else ""
        cost = row.ms * 1e6 / options.count
        share = MOVES[row.like] / 8 * copied / row.ms
        print(f"| {row.name} | {row.ms:.2f} | {cost:.2f} | {share:.2f} | {ratio} |", flush=True)

    for row in our_rows(options.count, options.device):
        show(row)
        ours[row.like] = row.ms
    for row in rows(options.count, device=options.device):
        show(row)


if __name__ == "__main__":
    main()
