"""What the evidence of a step costs on a CPU: digest, admission, ledger row with its link.

    python benchmarks/release_cost.py [--threads 2] [--steps 60] [--cpu]

The private step of the CNN (26,010 parameters, batch 250) and of the MLP (1.9 M, batch 256) with
BLT noise and ids, in memory and with a run folder; medians of the step and of the calls inside it,
timed in the same steps. `--cpu` takes the processor time of the process, which says more on a busy
machine: with one thread, since waiting threads count too, and without what the disk takes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import step_cases as cases
import torch

from noshuffle.participation import Epochs
from noshuffle.plan import Plan
from noshuffle.strategies import blt
from noshuffle.training import privatize

#: What is timed: (who holds it, its name, its title).
PARTS = (("release", "digest"), ("ledger", "admit"), ("file", "add_step"))


#: Seconds so far.
Clock = Callable[[], float]


def timed(holder: Any, name: str, into: list[float], clock: Clock) -> None:
    """Let every call of a method add its seconds to `into`."""
    call: Callable[..., Any] = getattr(holder, name)

    def wrapped(*given: Any, **named: Any) -> Any:
        began = clock()
        try:
            return call(*given, **named)
        finally:
            into.append(clock() - began)

    setattr(holder, name, wrapped)


def row(case: str, *, steps: int, run: Path | None, clock: Clock) -> str:
    make, data, loss_fn = cases.CASES[case]
    torch.manual_seed(0)
    model, batch = make(), data()
    strategy = blt((0.99, 0.75), (0.16, 0.32))
    plan = Plan(participation=Epochs(steps, 1), strategy=strategy, noise_multiplier=1.0)
    private = privatize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        plan,
        clip_norm=1.0,
        batch_size=len(batch[0]),
        run=run,
    )
    release = private._parts.release
    holders = {"release": release, "ledger": release.ledger, "file": release.ledger}
    found: dict[str, list[float]] = {name: [] for _, name in PARTS}
    for holder, name in PARTS:
        timed(holders[holder], name, found[name], clock)
    whole, ids = [], np.arange(len(batch[0]))
    for _ in range(steps - 1):
        began = clock()
        private.step(loss_fn, *batch, ids=ids)
        whole.append(clock() - began)
    step = statistics.median(whole[5:])
    parts = [statistics.median(found[name][5:]) for _, name in PARTS]
    shares = " | ".join(f"{1e6 * p:.0f} µs ({p / step:.1%})" for p in parts)
    where = "memory" if run is None else "run folder"
    return f"| {case}, {where} | {1e3 * step:.2f} | {shares} | {sum(parts) / step:.1%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--cpu", action="store_true", help="processor time instead of wall time")
    asked = parser.parse_args()
    given: dict[str, Any] = {"steps": asked.steps}
    given["clock"] = time.process_time if asked.cpu else time.perf_counter
    torch.set_num_threads(asked.threads)
    print("| step | ms | digest | admission | ledger row | together |\n|---|---|---|---|---|---|")
    for case in ("cnn", "mlp"):
        print(row(case, run=None, **given), flush=True)
        with tempfile.TemporaryDirectory() as folder:
            print(row(case, run=Path(folder) / "run", **given), flush=True)


if __name__ == "__main__":
    main()
