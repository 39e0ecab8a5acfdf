"""The engines that `federated_speed` times, and the case that all of them get, in a file.

Each engine is a function of the path of a case; it runs in a process of its own and prints when it
chose each cohort. Only ours needs this library: what is imported at the top has to be there in the
environment of every peer.
"""

from __future__ import annotations

import json
import os
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
        server.close()
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
