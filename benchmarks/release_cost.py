"""What the evidence of a run costs: a step with a run folder beside one without, and a long log.

    python benchmarks/release_cost.py [--threads 2] [--rounds 60] [--steps 100000] [--units 1000000]

Steps are `private.step` of the CNN (26,010 parameters, batch 250) and of the MLP (1.9 M, batch 256)
of the CPU rows, with BLT noise and ids, by turns in memory and in a run folder; medians. The long
run is a `PrivateSum` of eight numbers with four units a step, 100 epochs; then it is opened again
and verified. Units go through the guard in batches of 100,000 in a random order, three epochs of
them: as numbers of rows, and as 64 random bits, which names become. 0 leaves a part out. TMPDIR
says where folders lie (a disk confirms every row).
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import step_cases as cases
import torch

from noshuffle import Epochs, MinSeparation, Plan, PrivateSum, verify
from noshuffle.release.units import Guard
from noshuffle.strategies import blt
from noshuffle.training import Private, privatize

UNITS, EPOCHS, ROWS = 4, 100, 100_000


def resident() -> float:
    """MiB in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def steps(case: str, rounds: int, run: Path) -> str:
    """A row of the table of steps: without a folder, with one, their ratio."""
    make, data, loss_fn = cases.CASES[case]
    batch = data()
    ids, strategy = np.arange(len(batch[0])), blt((0.99, 0.75), (0.16, 0.32))
    plan = Plan(participation=Epochs(rounds + 5, 1), strategy=strategy, noise_multiplier=1.0)

    def started(folder: Path | None) -> Private:
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        settings = {"clip_norm": 1.0, "batch_size": len(batch[0]), "run": folder}
        return privatize(model, optimizer, plan, **settings)

    runs = {"memory": started(None), "folder": started(run)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 4):
        for name, private in runs.items():
            began = time.perf_counter()
            private.step(loss_fn, *batch, ids=ids)
            if number >= 4:
                times[name].append(time.perf_counter() - began)
    size = (run / "log.jsonl").stat().st_size / (rounds + 4)
    memory, folder = (statistics.median(times[name]) for name in runs)
    ratio = statistics.median(b / a for a, b in zip(times["memory"], times["folder"]))
    return f"| {case} | {1e3 * memory:.2f} | {1e3 * folder:.2f} | {ratio:.3f} | {size:.0f} |"


def long_run(count: int, folder: Path) -> None:
    """How long a run of many steps takes, grows, and is opened again and verified."""
    once = count // EPOCHS
    plan = Plan.fit(Epochs(EPOCHS, once), mechanism="blt", noise_multiplier=2.0)
    rows = np.ones((UNITS, 8)) / 8

    def opened() -> PrivateSum:
        return PrivateSum(plan, clip=1.0, shape=(8,), run=folder)

    run, before, began = opened(), resident(), time.perf_counter()
    for step in range(count - 1):
        run.add(rows, ids=np.arange(UNITS) + step % once * UNITS)
    spent = time.perf_counter() - began
    run.save()
    grown = resident() - before
    run.close()
    size = (folder / "log.jsonl").stat().st_size
    began = time.perf_counter()
    again = opened()
    seconds = time.perf_counter() - began
    again.close()
    print(
        f"\n{count:,} steps: {1e6 * spent / count:.0f} µs and {size / count:.0f} bytes of log each"
    )
    print(f"{grown:.0f} MiB more in memory at the end")
    print(f"opened in {seconds:.2f} s, {seconds / spent:.3f} of the run", flush=True)
    began = time.perf_counter()
    answer = verify(folder).answer
    print(f"verified in {time.perf_counter() - began:.2f} s: {answer}")


def guarded(units: int, kind: str) -> str:
    """A row of the table of the guard: processor time of a unit in each of three epochs."""
    batches, rng = units // ROWS, np.random.default_rng(0)
    order = rng.permutation(units).astype(np.int64)
    if kind == "names":
        order = (order.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)
    guard = Guard(MinSeparation(steps=3 * batches, separation=1, max_participations=3))
    cells = []
    for epoch in range(3):
        if epoch == 2:
            rng.shuffle(order)
        began = time.process_time()
        for number in range(batches):
            guard.take(order[number * ROWS : (number + 1) * ROWS])
        cells.append(f"{(time.process_time() - began) * 1e9 / (batches * ROWS):.0f}")
    return f"| {units:,} {kind} | {' | '.join(cells)} | {resident():.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--units", type=int, default=1_000_000)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    if asked.rounds:
        print("| step | in memory, ms | run folder, ms | ratio | bytes of log a step |")
        print("|---" * 5 + "|")
        for case in ("cnn", "mlp"):
            with tempfile.TemporaryDirectory() as folder:
                print(steps(case, asked.rounds, Path(folder) / "run"), flush=True)
    if asked.steps:
        with tempfile.TemporaryDirectory() as folder:
            long_run(asked.steps, Path(folder) / "run")
    if asked.units:
        print("\n| units | first epoch, ns a unit | same batches | other batches | MiB |")
        print("|---" * 5 + "|")
        for kind in ("rows", "names"):
            print(guarded(asked.units, kind), flush=True)


if __name__ == "__main__":
    main()
