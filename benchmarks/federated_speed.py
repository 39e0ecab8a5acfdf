"""Rounds per second of federated simulation: ours, Flower's (Ray) and pfl's, on the same task.

    NOSHUFFLE_DATA=… python benchmarks/federated_speed.py --task writers --model mlp
    … --task shakespeare --model lstm --pfl-python PATH    # pfl needs an environment of its own

Every engine gets the same users, model, local steps (SGD, batches in order) and cohort size, clips
the whole update of a client and adds Gaussian noise. Ours: `Rounds` with a BLT, one client after
the other, vectorised, and by default with a run folder that is checkpointed after every round.
Flower: message API, FedAvg inside its own server-side fixed clipping, one actor per core. pfl:
FederatedAveraging with its Gaussian mechanism applied centrally. Each engine runs in a process of
its own, `--repeats` times in turn. A round is timed from the choice of its cohort to the choice of
the next one; the table has the median after the warm-up rounds, over all repeats. Processor seconds
are those of the process and its descendants, and say what is left of a busy machine's noise.
Start-up is the time from launching the process to the first cohort. An engine that does not run has
a row that says why. pfl is looked for in this environment, else in that of `--pfl-python` or
`$NOSHUFFLE_PFL_PYTHON` (one with torch, NumPy and pfl; its pins do not go with ours).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from federated_engines import WORKERS, Case, Stamp


def export(args: argparse.Namespace, path: Path) -> Case:
    from noshuffle.federated.tasks import load_task

    task = load_task(
        {"writers": "mnist_writers", "drama": "german_drama"}.get(args.task, args.task)
    )
    users = len(task) if args.users is None else min(args.users, len(task))
    starts = task.starts[: users + 1]
    how = {name: getattr(args, name) for name in ("model", "cohort", "batch", "steps", "rounds")}
    how |= {"kind": task.kind, "classes": task.classes}
    x, y = (part[: int(starts[-1])].numpy() for part in (task.x, task.y))
    np.savez(path, x=x, y=y, starts=starts, how=json.dumps(how))
    return Case(str(path))


def measure(name: str, args: argparse.Namespace, path: Path) -> tuple[float, list[Stamp]] | str:
    """Seconds to the first cohort; wall and processor seconds of every round after it.

    Or the reason why there are none.
    """
    python = args.pfl_python if name.startswith("pfl") else sys.executable
    if python is None:
        return "pfl is not in this environment; give --pfl-python PATH of one that has it"
    line = [python, __file__, "--worker", name, "--case", str(path), "--threads", str(args.threads)]
    count = str(args.threads)
    env = {**os.environ, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}
    began = time.time()
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=args.limit, env=env)
    except FileNotFoundError:
        return f"there is no {python}"
    except subprocess.TimeoutExpired:
        return f"stopped after {args.limit:g} s"
    told = [text for text in done.stdout.splitlines() if text.startswith("STAMPS ")]
    if not told:
        print(f"{name}: no result\n{done.stdout[-1500:]}{done.stderr[-1500:]}", file=sys.stderr)
        last = " ".join(done.stderr.strip().splitlines()[-1:])
        return last[:200] or f"exit status {done.returncode}"
    stamps = json.loads(told[-1].removeprefix("STAMPS "))
    return stamps[0][0] - began, np.diff(stamps, axis=0).tolist()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", default="digits", help="digits, writers, shakespeare or drama")
    parser.add_argument("--model", default="mlp", choices=("mlp", "lstm"))
    parser.add_argument("--users", type=int, default=None, help="the first so many users")
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--steps", type=int, default=6, help="most local steps of a client")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of torch, in one process")
    parser.add_argument("--limit", type=float, default=900, help="seconds for one process")
    found = sys.executable if importlib.util.find_spec("pfl") else None
    parser.add_argument(
        "--pfl-python",
        default=os.environ.get("NOSHUFFLE_PFL_PYTHON", found),
        help="python of an environment with pfl",
    )
    parser.add_argument("--only", nargs="*", default=None, help="engines whose name starts so")
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--case", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        torch.set_num_threads(args.threads)
        WORKERS[args.worker](args.case)
        return
    names = list(WORKERS)
    if args.only:
        names = [n for n in names if any(n.startswith(begin) for begin in args.only)]
    starts: dict[str, list[float]] = {name: [] for name in names}
    times: dict[str, list[Stamp]] = {name: [] for name in names}
    reasons: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        case = export(args, Path(scratch) / "case.npz")
        rows = np.diff(case.starts)
        steps = np.minimum(-(-rows // args.batch), args.steps).mean()
        print(
            f"{args.task}, {args.model} ({sum(p.numel() for p in case.model().parameters()):,} "
            f"parameters), {len(case):,} users, {args.cohort} a round, {steps:.1f} local steps of "
            f"{args.batch} on average, {args.threads} thread(s), "
            f"{args.repeats} × {args.rounds} rounds"
        )
        for _ in range(args.repeats):
            for name in names:
                found = measure(name, args, Path(scratch) / "case.npz")
                if isinstance(found, str):
                    reasons[name] = found
                else:
                    starts[name].append(found[0])
                    times[name] += found[1][args.warm_up :]
                    middle = statistics.median(wall for wall, _ in found[1][args.warm_up :])
                    print(f"  {name}: {1 / middle:.2f} rounds/s", file=sys.stderr, flush=True)
    print_table(starts, {name: found for name, found in times.items() if found})
    for name, reason in reasons.items():
        if not times[name]:
            print(f"| {name} | not measured: {reason} | | | | | |")


def print_table(starts: dict[str, list[float]], times: dict[str, list[Stamp]]) -> None:
    wall = {name: statistics.median(w for w, _ in found) for name, found in times.items()}
    work = {name: statistics.fmean(c for _, c in found) for name, found in times.items()}
    base = next((name for name in times if name.startswith("Flower")), None)
    print(
        "| engine | rounds/s | ms a round, median (quartiles) | × Flower | CPU s a round "
        "| × Flower | start-up, s |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, found in times.items():
        low, _, high = (1000 * q for q in statistics.quantiles([w for w, _ in found], n=4))
        quicker, lighter = (
            f"{values[base] / max(values[name], 1e-9):.1f}" if base else "–"
            for values in (wall, work)
        )
        print(
            f"| {name} | {1 / wall[name]:.2f} | {1000 * wall[name]:.0f} ({low:.0f}–{high:.0f}) "
            f"| {quicker} | {work[name]:.3f} | {lighter} | {statistics.median(starts[name]):.1f} |"
        )


if __name__ == "__main__":
    main()
