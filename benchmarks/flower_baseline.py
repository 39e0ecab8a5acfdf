"""Flower's own fixed clipping beside DP-FTRL and DP-FedAvg, trained for real at the same ε.

    python benchmarks/flower_baseline.py                   # five minutes of one core

Task: 479 users of three digits each, 60 rounds of 95, an MLP of 9,610 parameters, two local steps
of rate 0.5, ε = 8 at δ = 1e-5 for a user, zero-out neighbours, exact accounting.

Flower's row is flwr's `DifferentialPrivacyServerSideFixedClipping` around `FedAvg`, its code
unchanged, with its own accountant switched on; a grid in this process stands for the network. What
it does in a round, and what that is worth:

    θ ← Σ_u w_u (θ + clip_c(Δ_u)) / Σ_u w_u + N(0, (z c / m)² I),        u among m of all nodes

* No limit on participation, so one user may be in every round: z for ε is that of 60 releases.
  The draw is made by Python's `random` among whoever is connected, so nothing is amplified.
* A user moves the mean by c / m only where all weights w_u are equal, as here. With numbers of
  examples, its default, it is c · w_u / Σw: `true_multiplier` gives the z that is left. A client
  reports its own w_u, so the only bound without trust is c, that is z / m.
* FedAvg has server rate 1 and no momentum (with FedAvgM inside, the noise would come after the
  momentum, whose memory of clean sums no accountant covers). Its step is scaled by the clip norm.

Hence tuned: Flower's clip norm; the server rate of the others at clip norm 0.5 and momentum 0.9.
Each row tries the same six values, once, by accuracy on every ninth training user with the noise
of its final runs; the held-out digits are used for the table alone. "The same charge, our server"
tells how much of Flower's distance comes from the charge and how much from FedAvg's plain step.
"""

from __future__ import annotations

import argparse
import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from uuid import uuid4

import numpy as np
import torch

from noshuffle.federated import LocalTraining, Rounds, ServerOptimizer, simulate
from noshuffle.federated.clients import cross_entropy
from noshuffle.federated.simulate import evaluate, in_random_order
from noshuffle.federated.tasks import FederatedTask, load_task, without_validation
from noshuffle.federated.telemetry import switch_off
from noshuffle.federated.vectorised import pack, trained_many
from noshuffle.noise import test_source
from noshuffle.participation import MinSeparation, Participation, Poisson
from noshuffle.plan import Plan
from noshuffle.strategies.workload import momentum
from noshuffle.training import models

ROUNDS, CLIENTS, EPSILON, DELTA = 60, 95, 8.0, 1e-5
CLIP, MOMENTUM, SEEDS = 0.5, 0.9, 3
LOCAL = LocalTraining(learning_rate=0.5, steps=2, epochs=2)
RATES = tuple(2.0**e for e in range(-5, 1))
EVERY_ROUND = MinSeparation(ROUNDS, 1, ROUNDS)

Params = dict[str, torch.Tensor]


def model_of(task: FederatedTask, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return models.build("mlp", task.shape, task.classes)


def limits(users: int) -> MinSeparation:
    """As far apart as the population allows, and as often as that permits."""
    apart = users // CLIENTS
    return MinSeparation(ROUNDS, apart, -(-ROUNDS // apart))


def plan_of(part: Participation, mechanism: str) -> Plan:
    return Plan.fit(
        part,
        mechanism=mechanism,
        epsilon=EPSILON,
        delta=DELTA,
        unit="user",
        workload=momentum(MOMENTUM),
    )


def true_multiplier(z: float, weights: np.ndarray, *, clients: int) -> float:
    """The noise multiplier that Flower's noise is worth when its mean is weighted.

    A user with weight w among m users moves the mean by at most c · w / Σw, which is largest for
    the heaviest user among the lightest others; the noise is z c / m.
    """
    ordered = np.sort(weights)
    heaviest = ordered[-1] / (ordered[-1] + ordered[: clients - 1].sum())
    return float(z / (clients * heaviest))


# ------------------------------------------------------------------ ours
def ours(plan: Plan, task: FederatedTask, rate: float, seed: int) -> Params:
    """One run of this library; a plan without noise gives the reference."""
    part = plan.participation
    if part.is_sampled:  # of fewer users in validation, with the same noise
        part = Poisson(ROUNDS, CLIENTS / len(task))
    elif part != EVERY_ROUND:
        part = limits(len(task))
    plan = replace(plan, participation=part)
    model = model_of(task, seed)
    server = ServerOptimizer(
        model,
        plan,
        clip=CLIP,
        cohort_size=CLIENTS,
        optimizer_fn=lambda p: torch.optim.SGD(p, lr=rate, momentum=MOMENTUM),
        source=test_source(seed=seed),
    )
    if part.is_sampled:
        server.sampler(len(task))
    order = in_random_order(task.users, seed=seed)
    everybody = lambda step: task.users  # noqa: E731
    check_ins = everybody if part.is_sampled else order
    found = simulate(Rounds(server), model, task, local=LOCAL, check_ins=check_ins)
    server.close()
    return found.parameters


# ------------------------------------------------------------------ Flower
def strategy_of(task: FederatedTask, z: float, clip: float) -> Any:
    """Flower's wrapper with its own accountant, which accepts neither amplification nor weights."""
    from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
    from flwr.supercore.privacy_accounting import (
        NeighboringRelation,
        PrivacyConfig,
        SamplingMethod,
    )
    from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant

    inner = FedAvg(
        fraction_train=CLIENTS / len(task),
        fraction_evaluate=0.0,
        min_train_nodes=CLIENTS,
        min_available_nodes=len(task),
    )
    config = PrivacyConfig(
        DELTA,
        len(task),
        NeighboringRelation.ADD_OR_REMOVE_ONE,
        SamplingMethod.NO_AMPLIFICATION,
    )
    return DifferentialPrivacyServerSideFixedClipping(
        inner, z, clip, CLIENTS, accountant=RdpAccountant(config)
    )


def grid_of(task: FederatedTask, model: torch.nn.Module) -> Any:
    """A grid whose nodes are the users of a task, trained together in this process."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.serverapp import Grid
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_node_id", "_task_id"):  # messages exist only inside a task of Flower
        setattr(TaskIdentity, name, 1)

    class Here(Grid):  # type: ignore[misc]
        def get_node_ids(self) -> list[int]:
            return list(range(1, len(task) + 1))

        def send_and_receive(
            self, messages: Iterable[Message], *, timeout: float | None = None
        ) -> list[Message]:
            asked = list(messages)
            if not asked:
                return []
            places = np.array([message.metadata.dst_node_id - 1 for message in asked])
            start = asked[0].content["arrays"].to_torch_state_dict()
            rows, weights = pack(task.starts[places], task.starts[places + 1], local=LOCAL)
            batches = [(*task.batch(rows[:, s]), weights[:, s]) for s in range(rows.shape[1])]
            now = trained_many(
                model, start, batches, clients=len(asked), local=LOCAL, loss_fn=cross_entropy
            )
            replies = []
            for i, message in enumerate(asked):
                message.metadata.__dict__["_message_id"] = str(uuid4())
                own = {name: now[name][i] for name in start}
                metrics = MetricRecord({"num-examples": 1})
                content = RecordDict({"arrays": ArrayRecord(own), "metrics": metrics})
                replies.append(Message(content, reply_to=message))
            return replies

        def set_run(self, run: Any) -> None: ...

        @property
        def run(self) -> Any: ...

        def create_message(self, *args: Any, **more: Any) -> Any:
            raise NotImplementedError

        push_messages = pull_messages = create_message

    return Here()


def flower(z: float, task: FederatedTask, clip: float, seed: int) -> tuple[Params, float]:
    """Parameters after all rounds, and ε by Flower's own accountant."""
    from flwr.app import ArrayRecord

    logging.getLogger("flwr").setLevel(logging.ERROR)  # a line for every client and round
    random.seed(seed)  # its cohorts
    np.random.seed(seed)  # noqa: NPY002 - its noise
    model = model_of(task, seed)
    strategy = strategy_of(task, z, clip)
    start = ArrayRecord(model.state_dict())
    result = strategy.start(grid_of(task, model), start, num_rounds=ROUNDS)
    return result.arrays.to_torch_state_dict(), strategy.privacy_spent().epsilon


# ------------------------------------------------------------------ the table
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--rates", type=float, nargs="*", default=RATES)
    parser.add_argument("--only", nargs="*", default=[""], help="rows with such words in the name")
    options = parser.parse_args()
    switch_off()
    task = load_task("digits")
    small = without_validation(task)
    small = replace(small, users=tuple(range(len(small))))  # a secret sampler draws numbers
    few, every = limits(len(task)), plan_of(EVERY_ROUND, "identity")
    sampled = Poisson(ROUNDS, CLIENTS / len(task))
    plans = {
        "DP-FTRL, BLT": plan_of(few, "blt"),
        "DP-FTRL, Honaker tree": plan_of(few, "tree"),
        "DP-FedAvg, not amplified": plan_of(few, "identity"),
        "DP-FedAvg, amplified (Poisson)": plan_of(sampled, "identity"),
        "the same charge as Flower's, our server": every,
    }
    print(f"limits: {few.max_participations} times, {few.separation} rounds apart")
    rows: dict[str, tuple[Plan, Callable[[FederatedTask, float, int], Params]]] = {
        name: (plan, lambda t, r, s, plan=plan: ours(plan, t, r, s)) for name, plan in plans.items()
    }
    told: list[float] = []

    def wrapper(t: FederatedTask, clip: float, seed: int) -> Params:
        found, epsilon = flower(every.noise_multiplier, t, clip, seed)
        told.append(epsilon)
        return found

    rows["Flower's fixed clipping"] = every, wrapper
    free = replace(plan_of(few, "identity"), noise_multiplier=0.0)
    rows["no noise, not private"] = free, lambda t, r, s: ours(free, t, r, s)
    print("| mechanism | noise multiplier | chosen | validation, % | test, % |", flush=True)
    print("|---|---|---|---|---|")
    for name, (plan, train) in rows.items():
        if not any(words in name for words in options.only):
            continue

        def score(t: FederatedTask, rate: float, seed: int, train=train) -> tuple[float, float]:
            loss, accuracy = evaluate(model_of(t, seed), train(t, rate, seed), t)
            return 100 * accuracy, -loss  # the loss decides between equal accuracies

        tried = {rate: score(small, rate, 100) for rate in options.rates}
        best = max(tried, key=lambda rate: tried[rate])
        test = [score(task, best, seed)[0] for seed in range(options.seeds)]
        what = "clip" if train is wrapper else "rate"
        spread = f" ± {np.std(test, ddof=1):.1f}" if len(test) > 1 else ""
        print(
            f"| {name} | {plan.noise_multiplier:.3f} | {what} {best:g} "
            f"| {tried[best][0]:.1f} | {np.mean(test):.1f}{spread} |",
            flush=True,
        )
        print("   ", " ".join(f"{rate:g}:{found[0]:.1f}" for rate, found in tried.items()))
    z = every.noise_multiplier
    if told:
        print(f"Flower's accountant: ε = {told[-1]:.2f}; exactly it is {every.epsilon():.2f}")
    for name in ("digits", "shakespeare", "german_drama"):
        weigh(name, z)


def weigh(name: str, z: float) -> None:
    """What z would be worth on a task's users with Flower's weights, where the data are there."""
    from noshuffle.errors import DataUnavailable

    try:
        counts = np.diff(load_task(name).starts)
    except DataUnavailable:
        return
    left = true_multiplier(z, counts, clients=CLIENTS)
    for words, worth in (("weighted by examples", left), ("any weight claimed", z / CLIENTS)):
        plan = Plan(
            participation=EVERY_ROUND,
            strategy=plan_of(EVERY_ROUND, "identity").strategy,
            noise_multiplier=worth,
            delta=DELTA,
            unit="user",
        )
        print(f"{name}, {words}: z {z:.2f} is worth {worth:.3f}, ε = {plan.epsilon():.4g}")


if __name__ == "__main__":
    main()
