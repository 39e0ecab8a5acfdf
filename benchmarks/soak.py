"""Long runs: does memory stay flat, how does the ledger grow, what does the guard cost a unit?

    python benchmarks/soak.py                          a short run (10⁵ steps, 10⁶ units)
    python benchmarks/soak.py --steps 1000000 --units 10000000

Steps are those of a `PrivateSum` of eight numbers with a run folder, BLT noise and an id for every
unit, in batches of four, saved every tenth of the run; units go through `Ledger.admit` and `record`
in batches of 100,000, two epochs of them, in memory. Nothing waits for a clock: time is that of the
machine. Memory is the resident set of the process.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from noshuffle import Epochs, Plan, PrivateSum, SinglePass
from noshuffle.release.ledger import Ledger

BATCH, ROWS = 4, 100_000


def resident() -> float:
    """MiB in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def size_of(folder: Path) -> int:
    """Bytes of the ledger and its log."""
    return sum(file.stat().st_size for file in folder.glob("ledger.sqlite*"))


def soak_steps(steps: int) -> None:
    """A row for every tenth of a long run."""
    plan = Plan.fit(SinglePass(steps=steps), mechanism="blt", noise_multiplier=2.0)
    print("| steps | µs a step | MiB | ledger, bytes a step |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        run = PrivateSum(plan, clip=1.0, shape=(8,), run=Path(folder) / "run")
        rows = np.ones((BATCH, 8)) / 8
        tenth = steps // 10
        for part in range(10):
            began = time.perf_counter()
            for step in range(part * tenth, (part + 1) * tenth):
                run.add(rows, ids=np.arange(step * BATCH, (step + 1) * BATCH))
            spent = time.perf_counter() - began
            run.save()
            done = (part + 1) * tenth
            size = size_of(Path(folder) / "run") / done
            print(f"| {done:,} | {spent / tenth * 1e6:.0f} | {resident():.0f} | {size:.0f} |",
                  flush=True)  # fmt: skip
        run.close()


def soak_units(units: int) -> None:
    """Two epochs of many units through the guard, in memory."""
    batches = units // ROWS
    ledger = Ledger(Epochs(epochs=2, steps_per_epoch=batches))
    order = np.random.default_rng(0).permutation(units).astype(np.int64)
    print("\n| epoch | units | admit, ns a unit | record, ns a unit | MiB |\n|---|---|---|---|---|")
    for epoch in range(2):
        admit = record = 0.0
        for number in range(batches):
            ids = order[number * ROWS : (number + 1) * ROWS]
            began = time.perf_counter()
            leave = ledger.admit(epoch * batches + number, ids, b"")
            middle = time.perf_counter()
            ledger.record(leave)
            ledger.settle()
            admit += middle - began
            record += time.perf_counter() - middle
        each = 1e9 / (batches * ROWS)
        print(
            f"| {epoch + 1} | {units:,} | {admit * each:.0f} | {record * each:.0f} "
            f"| {resident():.0f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--units", type=int, default=1_000_000)
    asked = parser.parse_args()
    soak_steps(asked.steps)
    soak_units(asked.units)


if __name__ == "__main__":
    main()
