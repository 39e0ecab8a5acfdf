"""Long runs: does memory stay flat, how does the ledger grow, what does the guard cost a unit?

    python benchmarks/soak.py                          a short run (10⁵ steps, 10⁶ units)
    python benchmarks/soak.py --steps 1000000 --units 10000000       0 leaves a part out

Steps are those of a `PrivateSum` of eight numbers with a run folder, BLT noise and an id for every
unit, in batches of four, 100 epochs, saved every tenth of the run; at the end the run is closed and
verified. TMPDIR says where its folder lies (a disk confirms every row). Units go through the ledger
in batches of 100,000 in a random order, three epochs of them, in memory: as numbers of rows, and as
64 random bits, which names become. Nothing waits for a clock. Memory is the resident set.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from noshuffle import Epochs, MinSeparation, Plan, PrivateSum
from noshuffle.release.ledger import Ledger
from noshuffle.release.verify import verify

BATCH, ROWS, EPOCHS = 4, 100_000, 100


def resident() -> float:
    """MiB in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def size_of(folder: Path) -> int:
    """Bytes of the ledger and its log."""
    return sum(file.stat().st_size for file in folder.glob("ledger.sqlite*"))


def soak_steps(steps: int) -> None:
    """A row for every tenth of a long run."""
    once = steps // EPOCHS
    plan = Plan.fit(
        Epochs(epochs=EPOCHS, steps_per_epoch=once), mechanism="blt", noise_multiplier=2.0
    )
    print("| steps | µs a step | MiB | ledger, bytes a step |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        run = PrivateSum(plan, clip=1.0, shape=(8,), run=Path(folder) / "run")
        rows = np.ones((BATCH, 8)) / 8
        tenth = steps // 10
        for part in range(10):
            began = time.perf_counter()
            for step in range(part * tenth, (part + 1) * tenth):
                run.add(rows, ids=np.arange(BATCH) + step % once * BATCH)
            spent = time.perf_counter() - began
            run.save()
            done = (part + 1) * tenth
            size = size_of(Path(folder) / "run") / done
            print(f"| {done:,} | {spent / tenth * 1e6:.0f} | {resident():.0f} | {size:.0f} |",
                  flush=True)  # fmt: skip
        began = time.perf_counter()
        run.close()
        print(f"\nclosed in {time.perf_counter() - began:.0f} s, {resident():.0f} MiB", flush=True)
        began = time.perf_counter()
        verdict = verify(Path(folder) / "run").answer
        print(f"verified in {time.perf_counter() - began:.0f} s: {verdict}, {resident():.0f} MiB")


def soak_units(units: int, kind: str) -> None:
    """Three epochs of many units through the guard, in memory; CPU time of a unit.

    The guard is `admit` (who may take part) and `settle` (who did); the row with the list of units
    is written in between, and belongs to the ledger.
    """
    batches, rng = units // ROWS, np.random.default_rng(0)
    order = rng.permutation(units).astype(np.int64)
    if kind == "names":
        order = (order.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)
    rule = MinSeparation(steps=3 * batches, separation=1, max_participations=3)
    ledger = Ledger(rule)
    for epoch in ("first", "the same batches", "other batches"):
        if epoch == "other batches":
            rng.shuffle(order)
        spent = [0.0, 0.0, 0.0]
        for number in range(batches):
            ids = order[number * ROWS : (number + 1) * ROWS]
            times = [time.process_time()]
            leave = ledger.admit(ledger.released, ids, b"")
            times.append(time.process_time())
            ledger.record(leave)
            times.append(time.process_time())
            ledger.settle()
            times.append(time.process_time())
            spent = [s + b - a for s, a, b in zip(spent, times, times[1:])]
        admit, record, settle = (s * 1e9 / (batches * ROWS) for s in spent)
        print(
            f"| {units:,} {kind} | {epoch} | {admit:.0f} | {settle:.0f} | {admit + settle:.0f} "
            f"| {record:.0f} | {resident():.0f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--units", type=int, default=1_000_000)
    asked = parser.parse_args()
    if asked.steps:
        soak_steps(asked.steps)
    if not asked.units:
        return
    print("\n| units | epoch | admit, ns | settle, ns | guard, ns a unit | row, ns a unit | MiB |")
    print("|---" * 7 + "|")
    for kind in ("rows", "names"):
        soak_units(asked.units, kind)


if __name__ == "__main__":
    main()
