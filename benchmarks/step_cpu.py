"""The whole private step on a CPU beside plain SGD and Opacus, interleaved in one process.

    python benchmarks/step_cpu.py [cnn mlp tlm lstm] [--rounds 11] [--threads 2] [--memory]

A private step here is everything `private.step` does: fingerprint of the batch, participation
guard, clipped sum, ledger row, noise of the library's own source, division, SGD update. Opacus runs
its default mode (hooks) and its ghost mode, with noise, without sampling. Every round runs each
method once; the table shows medians and the median ratio to plain SGD. `--memory` measures the peak
of each method in a process of its own, above what it held before the first step.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
import warnings

import clipping_cpu as cases
import torch

from noshuffle.participation import Epochs
from noshuffle.plan import Plan
from noshuffle.strategies import blt, identity
from noshuffle.training import privatize

STRATEGIES = {"identity": identity(), "blt": blt((0.99, 0.75), (0.16, 0.32))}
METHODS = ("plain", "identity", "blt", "hooks", "ghost")
TITLES = {
    "plain": "SGD, not private",
    "identity": "noshuffle, independent noise",
    "blt": "noshuffle, BLT with 2 buffers",
    "hooks": "Opacus, default (hooks)",
    "ghost": "Opacus, ghost",
}


def stepper(case: str, method: str):
    """A function that does one step of a method; raises where a peer cannot."""
    make, data, loss_fn = cases.CASES[case]
    torch.manual_seed(0)
    batch = data()
    if method == "plain":
        return cases.plain(make(), loss_fn, batch)
    if method in STRATEGIES:
        model = make()
        # The same batch at every step: one epoch is one step long.
        plan = Plan(
            participation=Epochs(1000, 1), strategy=STRATEGIES[method], noise_multiplier=1.0
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        private = privatize(model, optimizer, plan, clip_norm=1.0, batch_size=len(batch[0]))
        return lambda: private.step(loss_fn, *batch)
    return cases.opacus(make, loss_fn, batch, method, noise=1.0)


def compare(case: str, rounds: int) -> None:
    steps = {}
    for method in METHODS:
        try:
            step = stepper(case, method)
            step(), step()
            steps[method] = step
        except Exception as error:
            print(f"  {TITLES[method]}: {type(error).__name__}: {str(error).splitlines()[0][:80]}")
    times = {method: [] for method in steps}
    for _ in range(rounds):
        for method, step in steps.items():
            begin = time.perf_counter()
            step()
            times[method].append(time.perf_counter() - begin)
    print(f"\n{case}\n| method | ms a step | × SGD |\n|---|---|---|")
    for method, own in times.items():
        ratio = statistics.median(a / b for a, b in zip(own, times["plain"]))
        print(
            f"| {TITLES[method]} | {1e3 * statistics.median(own):.1f} | {ratio:.2f} |", flush=True
        )


def peak(case: str, method: str) -> None:
    """Extra megabytes of a few steps above what the process held before them."""
    step = stepper(case, method)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(3):
        step()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def memory(case: str) -> None:
    print(f"\n{case}, extra peak memory\n| method | MB |\n|---|---|")
    for method in METHODS:
        command = [sys.executable, __file__, case, "--peak", method]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        shown = f"{float(done.stdout):.0f}" if done.returncode == 0 else "failed"
        print(f"| {TITLES[method]} | {shown} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=list(cases.CASES))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    warnings.filterwarnings("ignore")
    for case in chosen.cases:
        if chosen.peak:
            peak(case, chosen.peak)
        elif chosen.memory:
            memory(case)
        else:
            compare(case, chosen.rounds)


if __name__ == "__main__":
    main()
