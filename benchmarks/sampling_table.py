"""Noise × rms of every kind of sampling at equal (ε, δ): 20 epochs of 100 and of 240 steps.

    OMP_NUM_THREADS=1 python benchmarks/sampling_table.py [--steps-per-epoch 100] [--epsilons 1 2]

Every figure is of a plan that can be trained with: its noise multiplier, by rigorous accountants,
times the root mean square of the noise in the running sum, in clip norms (δ = 1e-5).
"""

from __future__ import annotations

import argparse
import time

from noshuffle.participation import Epochs
from noshuffle.plan.comparison import KINDS, compare_sampling
from noshuffle.strategies.fit import best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps-per-epoch", type=int, nargs="+", default=[100, 240])
    parser.add_argument("--epsilons", type=float, nargs="+", default=[0.5, 1, 2, 4, 8])
    parser.add_argument("--delta", type=float, default=1e-5)
    asked = parser.parse_args()
    for b in asked.steps_per_epoch:
        print(f"{asked.epochs} epochs of {b} steps, delta {asked.delta:g}")
        print(f"{'epsilon':>8} " + " ".join(f"{kind:>10}" for kind in KINDS) + "  best")
        order = Epochs(asked.epochs, b)
        found = best(order)
        unsampled = found.strategy
        print(f"unsampled: {found.objective:.3f} at sensitivity 1")
        for epsilon in asked.epsilons:
            started = time.perf_counter()
            rows = compare_sampling(
                order, kinds=KINDS, epsilon=epsilon, delta=asked.delta, unsampled=unsampled
            )
            felt = {row.sampling: row.rms for row in rows}
            cells = " ".join(f"{felt[kind]:10.2f}" if kind in felt else " " * 10 for kind in KINDS)
            seconds = time.perf_counter() - started
            print(f"{epsilon:8g} {cells}  {rows[0].words} ({seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
