"""Fourier accountant beside dp-accounting's PLD and Opacus' PRV: seconds, memory, and ε.

Run in one process: `OMP_NUM_THREADS=1 python benchmarks/accounting.py` (needs the `bench` extra).
Times are medians of wall-clock repeats; memory is the peak that Python allocated during a further
run (tracemalloc sees NumPy's arrays). Opacus' PRV is left out where it would need more than a few
gigabytes; --all includes it.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
import warnings
from collections.abc import Callable
from functools import partial

from noshuffle.accounting import fourier

#: (rate, noise multiplier, steps, delta, whether Opacus' PRV fits in memory)
SETTINGS = [
    (0.004, 1.0, 4_800, 1e-5, True),
    (0.004, 1.0, 100_000, 1e-5, True),
    (0.01, 0.5, 100_000, 1e-5, False),
    (3e-6, 0.646, 237_501, 1.9e-9, False),
    (1e-8, 0.4, 10_000_000, 1e-9, False),
]


def ours(rate: float, noise: float, steps: int, delta: float) -> float:
    return fourier.epsilon(noise_multiplier=noise, rate=rate, steps=steps, delta=delta)


def ours_lower(rate: float, noise: float, steps: int, delta: float) -> float:
    return fourier.epsilon(
        noise_multiplier=noise, rate=rate, steps=steps, delta=delta, bound="lower"
    )


def dp_accounting_pld(rate: float, noise: float, steps: int, delta: float) -> float:
    import dp_accounting as da
    from dp_accounting import pld

    event = da.PoissonSampledDpEvent(rate, da.GaussianDpEvent(noise))
    accountant = pld.PLDAccountant(value_discretization_interval=1e-4)
    return float(accountant.compose(da.SelfComposedDpEvent(event, steps)).get_epsilon(delta))


def opacus_prv(rate: float, noise: float, steps: int, delta: float) -> float:
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(noise, rate, steps)]
    return float(accountant.get_epsilon(delta))


def measure(fn: Callable[[], float], repeats: int) -> tuple[float, float, float]:
    """Value, median seconds, peak megabytes."""
    value = fn()  # imports and caches
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        value = fn()
        times.append(time.perf_counter() - start)
        if times[-1] > 5:
            break
    tracemalloc.start()
    fn()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return value, statistics.median(times), peak / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--all", action="store_true", help="Opacus' PRV everywhere (9 GB)")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    head = (
        f"{'setting':34} {'accountant':20} {'epsilon':>11} {'median s':>9} {'ratio':>6} {'MB':>7}"
    )
    print(head)
    for rate, noise, steps, delta, has_room in SETTINGS:
        label = f"q {rate}, sigma {noise}, {steps:,} steps"
        peers = [
            ("noshuffle upper", ours),
            ("noshuffle lower", ours_lower),
            ("dp-accounting PLD", dp_accounting_pld),
        ]
        if has_room or arguments.all:
            peers.append(("Opacus PRV", opacus_prv))
        base = None
        for name, peer in peers:
            try:
                call = partial(peer, rate, noise, steps, delta)
                value, seconds, memory = measure(call, arguments.repeats)
            except Exception as error:
                print(f"{label:34} {name:20} failed: {type(error).__name__}: {str(error)[:60]}")
                continue
            base = base or seconds
            row = f"{value:11.6f} {seconds:9.4f} {seconds / base:6.1f} {memory:7.1f}"
            print(f"{label:34} {name:20} {row}")
        if not (has_room or arguments.all):
            print(f"{label:34} {'Opacus PRV':20} left out: about 9 GB (--all runs it)")


if __name__ == "__main__":
    main()
