"""What it costs to follow the spending of every unit over runs, and to look at a budget.

    python benchmarks/budget_units.py [--units 1000000] [--runs 3]

A budget with `individual=True`; every run names all units, each between one and four times. Per
unit: bytes on the disk, and nanoseconds to look up, to add a run in memory, and to settle a run
with everything (cost of each count, load, digest check, add, save, books). Then the time to open
and settle a run in the books of a budget that follows no units, after many runs. CPU time: waiting
for the disk (a handful of fsync a run) is not in it, nor are other programs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from noshuffle import Budget, MinSeparation, Plan
from noshuffle.budget.units import UnitSpending


def seconds(work: Callable[[], object], *, times: int) -> float:
    """The median time of some work."""
    found = []
    for _ in range(times):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return statistics.median(found)


def follow(units: int, runs: int, folder: Path) -> None:
    plan = Plan.fit(MinSeparation(64, 8, 4), mechanism="tree", epsilon=0.1, delta=1e-6)
    budget = Budget(folder / "people", epsilon=4.0, delta=1e-6, individual=True)
    draws = np.random.default_rng(0)
    ids = draws.permutation(2 * units)[:units].astype(np.int64)
    counts = draws.integers(1, 5, units)
    took = []
    for _ in range(runs):
        charge = budget.open("run", plan.statement(), plan=plan, steps=plan.steps)
        began = time.process_time()
        charge.settle(plan.statement(), plan=plan, steps=plan.steps, units=(ids, counts))
        took.append(time.process_time() - began)
    (file,) = (budget.folder).glob("units-*.npy")
    spent = UnitSpending.load(budget.folder, budget._state().units)
    more = np.full(units, 0.01)
    sorted_ids = np.sort(ids)
    batch = sorted_ids[:: max(1, units // 1000)]
    print(f"| units | {units:,} |\n|---|---|")
    print(f"| bytes a unit on the disk | {file.stat().st_size / units:.1f} |")
    print(f"| settle a run, ns a unit | {1e9 * statistics.median(took) / units:.0f} |")
    add = seconds(lambda: spent.add(ids, more), times=5)
    print(f"| add a run in memory, ns a unit | {1e9 * add / units:.0f} |")
    look = seconds(lambda: spent.of(batch), times=20)
    print(f"| look up a thousand units, ns a unit | {1e9 * look / len(batch):.0f} |")
    bar = seconds(lambda: spent.above(1.0), times=5)
    print(f"| find who is used up, ns a unit | {1e9 * bar / units:.1f} |")


def look(entries: int, folder: Path) -> None:
    plan = Plan.fit(MinSeparation(8, 1, 1), mechanism="tree", epsilon=1e-3, delta=1e-6)
    budget, said = Budget(folder / "many", epsilon=9.0, delta=1e-6), plan.statement()

    def one() -> None:
        budget.open("run", said, plan=plan, steps=8).settle(said, plan=plan, steps=8)

    first = seconds(one, times=5)
    for _ in range(entries):
        one()
    last = seconds(one, times=5)
    print(f"| open and settle a run, ms: the first | {1e3 * first:.1f} |")
    print(f"| … after {entries} runs | {1e3 * last:.1f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--units", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--entries", type=int, default=200)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        follow(asked.units, asked.runs, Path(place))
        look(asked.entries, Path(place))
