"""How long noise takes on a CPU: nanoseconds a number, beside torch and NumPy in the same process.

    python benchmarks/noise_cpu.py [--threads 1 2] [--numbers 4000000] [--repeat 15]

Every row is the best of the repeats; rows of one group take turns, so that a busy machine slows
them alike. `draw` rows fill a float32 tensor with standard normals; ours by torch, as a step does
where there is no C library. `step` rows add the noise of a mechanism to the gradients of a model,
eight steps from step 4096 on (all taps and bands in use), and give the mean of the eight: the CNN
has 26,010 parameters in 8 tensors, the MLP (784-1024-1024-10) 1,863,690 in 6. "of copy" is the time
in which a copy moves the bytes that the row has to move (a draw: 4 a number; a step: gradient and
buffers, read and written once), over the time of the row: how near it is to the limit of the
memory, or of the caches where everything fits there.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from noise_kernels import moved

from noshuffle.noise import NoiseStream, c_step, test_source
from noshuffle.noise.step_plan import StepPlans
from noshuffle.strategies.recipe import Buffered, FeedForward, Forest, Recipe, Recursive

CNN = {"conv1.weight": (16, 1, 8, 8), "conv1.bias": (16,), "conv2.weight": (32, 16, 4, 4)}
CNN |= {"conv2.bias": (32,), "fc1.weight": (32, 512), "fc1.bias": (32,)}
CNN |= {"fc2.weight": (10, 32), "fc2.bias": (10,)}
MLP = {"0.weight": (1024, 784), "0.bias": (1024,), "1.weight": (1024, 1024), "1.bias": (1024,)}
MLP |= {"2.weight": (10, 1024), "2.bias": (10,)}

STEPS, LAPS, FIRST = 10**6, 8, 4096
COPY, COPIED = "torch copy_", 8
BLT4 = Buffered(
    decays=(0.99885911, 0.98734501, 0.88051219, 0.26915574),
    scales=(-3.27832e-5, -1.048014e-3, -0.030251166, -0.457538471),
)
TAPPED = Buffered(BLT4.decays[:2], BLT4.scales[:2], tuple((240 * i, 0.3**i) for i in range(7)))
BISR16 = FeedForward(tuple(1.0 if i == 0 else -0.5 / i**1.5 for i in range(16)))
RECIPES: dict[str, Recipe] = {
    "independent": FeedForward((1.0,)),
    "Honaker tree": Forest("honaker", STEPS),
    "BLT, 4 buffers": BLT4,
    "BLT, 2 buffers, 6 taps": TAPPED,
    "banded, 4 bands": Recursive((1.0, -0.5, -0.125, -0.0625)),
    "banded inverse, 16 redrawn": BISR16,
}


class Row(NamedTuple):
    """What is timed, and the bytes of one number that it has to move."""

    do: Callable[[], object]
    moves: float


def best(rows: dict[str, Row], *, repeat: int) -> dict[str, float]:
    """Best seconds of each row; the rows take turns."""
    times = dict.fromkeys(rows, float("inf"))
    for turn in range(repeat + 1):
        for name, row in rows.items():
            start = time.perf_counter()
            row.do()
            if turn:
                times[name] = min(times[name], time.perf_counter() - start)
    return times


def by_torch(make: Callable[[], Callable[[], object]]) -> Callable[[], object]:
    """The same as it is made where there is no C library."""
    with mock.patch.object(c_step, "library", return_value=None):
        return make()


def draws(numbers: int) -> dict[str, Row]:
    out, other = torch.empty(numbers), torch.zeros(numbers)
    array = out.numpy()

    def numpy_fill(bits: np.random.BitGenerator) -> Callable[[], object]:
        generator = np.random.Generator(bits)
        return lambda: generator.standard_normal(dtype=np.float32, out=array)

    def ours(kind: str) -> Callable[[], object]:
        source = test_source(seed="benchmark", kind=kind)
        return lambda: source.normal_(out, row=1, name="w")

    fills: dict[str, Callable[[], object]] = {
        "torch normal_": lambda: out.normal_(),
        "NumPy Philox, float32": numpy_fill(np.random.Philox(1)),
        "NumPy SFC64, float32": numpy_fill(np.random.SFC64(1)),
        "noshuffle aes": ours("aes"),
        "noshuffle philox": ours("philox"),
    }
    copy = Row(lambda: out.copy_(other), COPIED)
    return {COPY: copy, **{name: Row(do, 4) for name, do in fills.items()}}


def bytes_of(recipe: Recipe) -> float:
    """Bytes of one parameter that a step has to move, mean of the steps that are timed."""
    plans = StepPlans.of(recipe)
    return statistics.mean(moved(plans.at(step)) for step in range(FIRST, FIRST + LAPS))


def steps(shapes: dict[str, tuple[int, ...]]) -> dict[str, Row]:
    values = {name: torch.zeros(shape) for name, shape in shapes.items()}
    scratch = {name: torch.empty(shape) for name, shape in shapes.items()}

    def plain() -> None:
        for _ in range(LAPS):
            for name, value in values.items():
                value.add_(scratch[name].normal_(), alpha=0.1)

    def copy() -> None:
        for _ in range(LAPS):
            for name, value in values.items():
                scratch[name].copy_(value)

    rows = {COPY: Row(copy, COPIED), "torch normal_ and add_, independent": Row(plain, 8)}

    def ours(recipe: Recipe) -> Callable[[], object]:
        source = test_source(seed="benchmark")
        stream = NoiseStream(recipe, source, shapes, scale=0.1, steps=STEPS)
        state = stream.state_dict() | {"step": FIRST}

        def laps() -> None:
            stream.load_state_dict(state)
            for _ in range(LAPS):
                stream.add_(values)

        return laps

    for name, recipe in RECIPES.items():
        rows[name] = Row(ours(recipe), bytes_of(recipe))
    for name in ("independent", "BLT, 4 buffers"):
        slow = by_torch(lambda name=name: ours(RECIPES[name]))
        rows[f"{name}, by torch"] = Row(slow, bytes_of(RECIPES[name]))
    return rows


def table(
    title: str, numbers: int, laps: int, rows: dict[str, Row], measured: dict[int, dict[str, float]]
) -> None:
    units = ("ms", "ns/number", "of copy")
    heads = [f"{unit}, {threads} thread(s)" for threads in measured for unit in units]
    print(f"\n| {title} | bytes/number | " + " | ".join(heads) + " |")
    print("|---" * (len(heads) + 2) + "|")
    for name, row in rows.items():
        cells = [f"{row.moves:.1f}"]
        for times in measured.values():
            once = times[name] / laps
            limit = times[COPY] * row.moves / COPIED
            cells += [f"{once * 1e3:.3f}", f"{once / numbers * 1e9:.2f}"]
            cells += [f"{limit / times[name]:.2f}"]
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description="Noise on a CPU, in nanoseconds a number.")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--numbers", type=int, default=4_000_000)
    parser.add_argument("--repeat", type=int, default=15)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, NumPy {np.__version__}, C step: {bool(c_step.library())}")
    groups: list[tuple[str, int, Callable[[], dict[str, Row]]]] = [
        (f"draw {options.numbers:,}", options.numbers, lambda: draws(options.numbers)),
        ("step, CNN", 26_010, lambda: steps(CNN)),
        ("step, MLP", 1_863_690, lambda: steps(MLP)),
    ]
    for title, numbers, make in groups:
        measured, rows = {}, {}
        for threads in options.threads:
            torch.set_num_threads(threads)
            rows = make()
            measured[threads] = best(rows, repeat=options.repeat)
        table(title, numbers, LAPS if title.startswith("step") else 1, rows, measured)


if __name__ == "__main__":
    main()
