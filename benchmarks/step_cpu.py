"""The whole private step on a CPU beside plain SGD, Opacus and fastDP, interleaved in one process.

    python benchmarks/step_cpu.py [cnn mlp tlm lstm tlm-flat lstm-flat] [--rounds 11] [--threads 2]
                                  [--own] [--memory] [--phases]

A private step here is everything `private.step` does: participation guard, row of the log, clipped
sum, noise of the library's own source, division, SGD update. Opacus runs its default mode (hooks)
and its ghost mode, fastDP its book-keeping, with noise, without sampling.
Every round runs each method once; the table shows medians and the median ratio to plain SGD, of
wall time and of processor time. The language models come twice: with
`cross_entropy(scores.transpose(1, 2), y)`, which torch computes slowly and a private step in the
order of memory, and with the loss of flattened scores (`-flat`), which torch reads in order by
itself. `--own` leaves the peers out. `--memory` measures the peak of each method in a process of
its own, above what it held before the first step. `--phases` shows where a private step spends its
time: the lower quartile of each phase, without the phases inside it.
"""

from __future__ import annotations

import argparse
import functools
import resource
import statistics
import subprocess
import sys
import time
import warnings

import peers
import step_cases as cases
import torch
from step_peers import FASTDP, fastdp_step

from noshuffle.participation import Epochs
from noshuffle.plan import Plan
from noshuffle.strategies import blt, identity
from noshuffle.training import privatize

STRATEGIES = {"identity": identity(), "blt": blt((0.99, 0.75), (0.16, 0.32))}
METHODS = ("plain", "identity", "blt", "hooks", "ghost", *FASTDP)
TITLES = {
    "plain": "SGD, not private",
    "identity": "noshuffle, independent noise",
    "blt": "noshuffle, BLT with 2 buffers",
    "hooks": "Opacus, default (hooks)",
    "ghost": "Opacus, ghost",
    **{name: name for name in FASTDP},
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
    if method in FASTDP:
        model, size = make(), len(batch[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = lambda: loss_fn(model(batch[0]), *batch[1:])  # noqa: E731
        return fastdp_step(model, optimizer, loss, batch_size=size, has_origin=FASTDP[method])
    return cases.opacus(make, loss_fn, batch, method, noise=1.0)


def compare(case: str, rounds: int, methods: tuple[str, ...] = METHODS) -> None:
    steps = {}
    for method in methods:
        try:
            step = stepper(case, method)
            step(), step()
            steps[method] = step
        except Exception as error:
            print(f"  {TITLES[method]}: {type(error).__name__}: {str(error).splitlines()[0][:80]}")
    times = {method: [] for method in steps}
    for _ in range(rounds):
        for method, step in steps.items():
            begin = time.perf_counter(), time.process_time(), _faults()
            step()
            end = time.perf_counter(), time.process_time(), _faults()
            times[method].append(tuple(b - a for a, b in zip(begin, end)))
    print(
        f"\n{case}\n| method | ms a step | × SGD | CPU ms | × SGD | page faults |\n"
        + "|---" * 6
        + "|"
    )
    for method, own in times.items():
        cells = []
        for clock in (0, 1):
            ratio = statistics.median(a[clock] / b[clock] for a, b in zip(own, times["plain"]))
            cells.append(f"{1e3 * statistics.median(t[clock] for t in own):.1f} | {ratio:.2f}")
        cells.append(f"{statistics.median(t[2] for t in own):.0f}")
        print(f"| {TITLES[method]} | {' | '.join(cells)} |", flush=True)


def _faults() -> int:
    """Pages that the system has given this process so far.

    glibc gives the memory of 25 MB scores back and takes it anew, or not, by where it lies: up to
    25,000 faults and 45 ms a step, of plain SGD as of ours. MALLOC_MMAP_THRESHOLD_=4294967296
    MALLOC_TRIM_THRESHOLD_=8589934592 in the environment leaves the work alone to be compared.
    """
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def phase_functions() -> list[tuple[object, str, str]]:
    """Who has a function that is a phase of a step, its name, and what the phase is called."""
    from noshuffle.clipping import ghost_forms, rules_conv
    from noshuffle.clipping import units as members
    from noshuffle.noise import NoiseStream
    from noshuffle.release.release import Release
    from noshuffle.training import step as training_step

    return [
        (Release, "admit", "admit, row"),
        (ghost_forms, "batch_losses", "forward"),
        (torch.autograd, "grad", "backward, norms"),
        (rules_conv.Convolution, "squares", "norms of convolutions"),
        (members, "clip_factors", "factors"),
        (members, "_total", "weighted sums"),
        (NoiseStream, "add_", "noise, divide"),
        (torch.optim.SGD, "step", "optimizer"),
        (training_step.Step, "_outcome", "outcome"),
    ]


def phases(case: str, rounds: int) -> None:
    """Time of every phase of a private step, by wrapping the functions that are its phases."""
    spent: dict[str, float] = {}
    inside: list[float] = []

    def watch(owner: object, name: str, label: str) -> None:
        fn = getattr(owner, name)

        @functools.wraps(fn)
        def timed(*args: object, **options: object) -> object:
            begin = time.perf_counter()
            inside.append(0.0)
            try:
                return fn(*args, **options)
            finally:
                took, within = time.perf_counter() - begin, inside.pop()
                spent[label] = spent.get(label, 0.0) + took - within
                if inside:
                    inside[-1] += took

        setattr(owner, name, timed)

    table: dict[str, list[dict[str, float]]] = {}
    for method in STRATEGIES:
        step = stepper(case, method)
        step(), step()
        if not table:
            for owner, name, label in phase_functions():
                watch(owner, name, label)
        rows = table.setdefault(method, [])
        for _ in range(rounds):
            spent.clear()
            begin = time.perf_counter()
            step()
            whole = time.perf_counter() - begin
            rows.append({**spent, "everything else": whole - sum(spent.values()), "whole": whole})
    print(f"\n| {case}, ms | " + " | ".join(TITLES[m] for m in table) + " |\n" + "|---" * 3 + "|")
    for label in table["identity"][0]:
        low = [statistics.quantiles([r[label] for r in rows], n=4)[0] for rows in table.values()]
        print(f"| {label} | " + " | ".join(f"{1e3 * t:.2f}" for t in low) + " |", flush=True)


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
    parser.add_argument("--own", action="store_true", help="leave the peers out")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--phases", action="store_true")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    warnings.filterwarnings("ignore")
    peers.look_in_folder()
    for case in chosen.cases:
        if chosen.peak:
            peak(case, chosen.peak)
        elif chosen.memory:
            memory(case)
        elif chosen.phases:
            phases(case, chosen.rounds)
        else:
            own = ("plain", *STRATEGIES)
            compare(case, chosen.rounds, own if chosen.own else METHODS)


if __name__ == "__main__":
    main()
