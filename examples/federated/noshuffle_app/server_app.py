"""The server: go on with the run in the run folder, or begin it."""

from __future__ import annotations

from logging import INFO
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, MetricRecord, UserConfig
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from noshuffle import MinSeparation, Plan
from noshuffle.errors import one_of
from noshuffle.federated import Rounds, ServerOptimizer
from noshuffle.federated.flower import (
    Handshake,
    PrivateStrategy,
    PublicKeys,
    UnregisteredKeys,
    read_public_keys,
)
from noshuffle.federated.flower_identity import Identities
from noshuffle.federated.flower_wire import to_tensors
from noshuffle.federated.rounds import RoundReport
from noshuffle.federated.simulate import evaluate
from noshuffle.federated.tasks import FederatedTask
from noshuffle.noise import test_source
from noshuffle.training import RunFolder

from .task import model_for, model_name, task_of

app = ServerApp()


def rounds_of(config: UserConfig, *, run: Path | None) -> Rounds:
    """The private server, in its run folder."""
    limits = MinSeparation(
        int(config["rounds"]), int(config["min-separation"]), int(config["max-participations"])
    )
    plan = Plan.fit(
        limits,
        mechanism=str(config["mechanism"]),
        epsilon=float(config["epsilon"]),
        delta=float(config["delta"]),
        unit="user",
    )
    seed = int(config["test-seed"])
    server = ServerOptimizer(
        model_for(task_of(str(config["task"]), int(config["users"]))),
        plan,
        clip=float(config["clip-norm"]),
        cohort_size=int(config["cohort-size"]),
        optimizer_fn=lambda p: torch.optim.SGD(
            p, lr=float(config["server-lr"]), momentum=float(config["server-momentum"])
        ),
        source=test_source(seed=seed) if seed >= 0 else None,
        run=run,
    )
    return Rounds(server, at_least=int(config["at-least"]))


def identities_of(config: UserConfig, task: FederatedTask) -> Identities:
    """How nodes become users; the statement of the run names it."""
    way = str(config["identities"])
    one_of(("partition-id", "public-key", "unregistered-key"), identities=way)
    if way == "public-key":
        return PublicKeys(read_public_keys(str(config["registered-keys"])))
    if way == "unregistered-key":
        return UnregisteredKeys()
    return Handshake(kind=type(task.users[0]), known=task.users, timeout=float(config["timeout"]))


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    task = task_of(str(config["task"]), int(config["users"]))
    model = model_for(task)
    folder = RunFolder(Path(str(config["run-folder"])).expanduser())
    if not folder.is_started:
        record = {key.replace("-", "_"): value for key, value in config.items()}
        more = {"model": model_name(task), "clients_per_round": config["cohort-size"]}
        folder.write_config({**record, **more, "kind": "federated"})  # for the report
    rounds = rounds_of(config, run=folder.path)
    identities = identities_of(config, task)

    def tell(report: RoundReport) -> None:
        # Counts of a single round are raw figures: for whoever runs the server, nobody else.
        log(
            INFO, "round %i: silent %s, epsilon so far %.3f",
            report.step, list(report.silent), rounds.server.statement().epsilon,
        )  # fmt: skip

    def on_held_out_data(number: int, arrays: ArrayRecord) -> MetricRecord:
        loss, accuracy = evaluate(model, to_tensors(arrays), task)
        folder.append_metrics({"step": number, "test_accuracy": accuracy})
        return MetricRecord({"loss": loss, "accuracy": accuracy})

    strategy = PrivateStrategy(
        rounds, identities=identities, wait=float(config["wait"]), on_round=tell
    )
    strategy.start(
        grid,
        num_rounds=int(config["stop-after"]) or None,
        timeout=float(config["timeout"]),
        evaluate_fn=on_held_out_data,
    )
    _, accuracy = evaluate(model, rounds.server.parameters(), task)
    folder.append_metrics(
        {"kind": "summary", "step": rounds.server.round, "test_accuracy": accuracy}
    )
    log(INFO, "%s", rounds.server.statement())
    rounds.close()
