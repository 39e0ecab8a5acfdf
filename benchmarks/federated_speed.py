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
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

CLIP, NOISE, RATE = 0.5, 1.0, 0.1
NO_TARGET = -100


class Case:
    """One benchmark in a file, readable without this library."""

    def __init__(self, path: str) -> None:
        with np.load(path) as file:
            self.x, self.y = torch.from_numpy(file["x"]), torch.from_numpy(file["y"])
            self.starts = file["starts"]
            self.how: dict[str, Any] = json.loads(str(file["how"]))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def client(self, user: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = slice(int(self.starts[user]), int(self.starts[user + 1]))
        x, y = self.x[rows], self.y[rows].long()
        return (x.float() / 127.5 - 1 if self.how["kind"] == "image" else x.long()), y

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        if self.how["model"] == "lstm":
            return CharLSTM(self.how["classes"])
        size = int(np.prod(self.x.shape[1:]))
        return nn.Sequential(nn.Flatten(), nn.Linear(size, 128), nn.Tanh(), nn.Linear(128, 10))


class CharLSTM(nn.Module):
    """The model of `noshuffle.training.models`, written out for an environment without it."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, 32)
        self.lstm = nn.LSTM(32, 128, batch_first=True)
        self.output = nn.Linear(128, classes)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.output(self.lstm(self.embedding(symbols))[0])
        return scores.transpose(1, 2)


@lru_cache(maxsize=1)
def case_of(path: str) -> Case:
    return Case(path)


Stamp = tuple[float, float]


def stamp() -> Stamp:
    """The wall clock, and the processor seconds of this process and all its descendants."""
    used: dict[int, float] = {}
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended in the meantime
                continue
            parents[int(entry.name)] = int(fields[1])
            used[int(entry.name)] = int(fields[11]) + int(fields[12])
    family = {os.getpid()}
    while new := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= new
    ticks = sum(used.get(pid, 0.0) for pid in family)
    return time.time(), ticks / os.sysconf("SC_CLK_TCK")


def tell(stamps: list[Stamp]) -> None:
    """What a worker hands back: when each cohort was chosen."""
    print("STAMPS " + json.dumps(stamps), flush=True)


# ------------------------------------------------------------------ ours
def ours(path: str, *, vectorise: bool | None, folder: bool = False) -> None:
    from noshuffle import MinSeparation, Plan
    from noshuffle.federated import LocalTraining, Rounds, ServerOptimizer, simulate
    from noshuffle.federated.simulate import in_random_order
    from noshuffle.federated.tasks import FederatedTask

    case, stamps = Case(path), list[Stamp]()
    how, users = case.how, tuple(range(len(case)))
    none = case.x[:0], case.y[:0]
    task = FederatedTask("case", how["kind"], users, case.starts, case.x, case.y, *none, 1)
    separation = max(1, min(len(users) // how["cohort"], how["rounds"]))
    limits = MinSeparation(how["rounds"], separation, -(-how["rounds"] // separation))
    plan = Plan.fit(limits, mechanism="blt", noise_multiplier=NOISE, unit="user")
    model, order = case.model(), in_random_order(users, seed=0)

    def check_ins(step: int) -> Any:
        stamps.append(stamp())
        return order(step)

    with tempfile.TemporaryDirectory() as scratch:
        server = ServerOptimizer(
            model,
            plan,
            clip=CLIP,
            cohort_size=how["cohort"],
            optimizer_fn=lambda p: torch.optim.SGD(p, lr=1.0),
            run=Path(scratch) / "run" if folder else None,
        )
        local = LocalTraining(
            learning_rate=RATE, steps=how["steps"], batch_size=how["batch"], epochs=1
        )
        simulate(Rounds(server), model, task, local=local, check_ins=check_ins, vectorise=vectorise)
        server.ledger.close()
    tell([*stamps, stamp()])


# ------------------------------------------------------------------ Flower
def local_sgd(model: nn.Module, case: Case, user: int) -> None:
    """The local steps, as a client of Flower would write them."""
    x, y = case.client(user)
    size, optimizer = case.how["batch"], torch.optim.SGD(model.parameters(), lr=RATE)
    for step, at in enumerate(range(0, len(x), size)):
        if step == case.how["steps"]:
            break
        optimizer.zero_grad()
        scores = model(x[at : at + size])
        nn.functional.cross_entropy(scores, y[at : at + size], ignore_index=NO_TARGET).backward()
        optimizer.step()


def flower(path: str) -> None:
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0"}
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
    from flwr.simulation import run_simulation

    stamps = list[Stamp]()
    case = case_of(path)
    cohort, users = case.how["cohort"], len(case)
    client, server = ClientApp(), ServerApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        mine = case_of(path)
        model = mine.model()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        user = int(context.node_config["partition-id"])
        local_sgd(model, mine, user)
        content = RecordDict(
            {
                "arrays": ArrayRecord(model.state_dict()),
                "metrics": MetricRecord({"num-examples": 1}),
            }
        )
        return Message(content, reply_to=message)

    class Timed(DifferentialPrivacyServerSideFixedClipping):
        def configure_train(self, *args: Any, **named: Any) -> Any:
            stamps.append(stamp())
            return super().configure_train(*args, **named)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        inner = FedAvg(
            fraction_train=cohort / users,
            fraction_evaluate=0.0,
            min_train_nodes=cohort,
            min_available_nodes=users,
        )
        strategy = Timed(inner, NOISE, CLIP, cohort)
        while len(list(grid.get_node_ids())) < users:
            time.sleep(0.1)
        start = ArrayRecord(case.model().state_dict())
        strategy.start(grid, start, num_rounds=case.how["rounds"])
        stamps.append(stamp())

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=users, backend_config=resources)
    tell(stamps)


# ------------------------------------------------------------------ pfl
def pfl(path: str) -> None:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import MinimizeReuseUserSampler
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Weighted
    from pfl.model.pytorch import PyTorchModel
    from pfl.privacy.gaussian_mechanism import GaussianMechanism
    from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism

    case, stamps = Case(path), list[Stamp]()
    how = case.how

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = case.model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.inner(x)
            return scores

        def loss(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> torch.Tensor:
            return nn.functional.cross_entropy(self.inner(x), y, ignore_index=NO_TARGET)

        def metrics(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> dict[str, Any]:
            return {"n": Weighted(0.0, len(y))}

    class Timed(TrainingProcessCallback):  # type: ignore[misc]
        def on_train_begin(self, **named: Any) -> Any:
            stamps.append(stamp())
            return super().on_train_begin(**named)

        def after_central_iteration(self, *args: Any, **named: Any) -> Any:
            stamps.append(stamp())
            return super().after_central_iteration(*args, **named)

    def data_of(user: int) -> Any:
        x, y = case.client(user)
        rows = min(len(x), how["steps"] * how["batch"])
        return Dataset(raw_data=[x[:rows], y[:rows]])

    module = Module()
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    data = FederatedDataset(data_of, MinimizeReuseUserSampler(list(range(len(case)))))
    noise = CentrallyAppliedPrivacyMechanism(GaussianMechanism(CLIP, NOISE))
    FederatedAveraging().run(
        backend=SimulatedBackend(training_data=data, val_data=data, postprocessors=[noise]),
        model=model,
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=how["rounds"],
            evaluation_frequency=10**6,
            train_cohort_size=how["cohort"],
            val_cohort_size=0,
        ),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=RATE, local_batch_size=how["batch"]
        ),
        callbacks=[Timed()],
    )
    tell(stamps)


WORKERS: dict[str, Callable[[str], None]] = {
    "ours, vectorised": lambda path: ours(path, vectorise=True),
    "ours, one by one": lambda path: ours(path, vectorise=False),
    "ours, default, run folder": lambda path: ours(path, vectorise=None, folder=True),
    "Flower 1.41, Ray": flower,
    "pfl 0.6": pfl,
}


# ------------------------------------------------------------------ the table
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
