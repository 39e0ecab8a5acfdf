"""Golden runs: private sums, training and federated rounds under a test seed, end to end.

Released values lie on a grid of 2⁻¹⁰ of the noise, and a sum that differs in its last bit (of
float32, on another processor) may be rounded to the next point of it. Weights after some steps are
therefore held to some points of the grid; what no matrix product makes is held more closely.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from tests.golden.arithmetic import draws, fill, normal, projections
from tests.golden.entries import Entry
from tests.golden.tables import statement
from torch import Tensor, nn

import noshuffle as ns
from noshuffle.clipping import PerLayer
from noshuffle.clipping.adaptive import QuantileClip
from noshuffle.federated import LocalTraining, Rounds, ServerOptimizer, simulate
from noshuffle.federated.tasks import FederatedTask
from noshuffle.noise import test_source
from noshuffle.participation import Epochs, MinSeparation, Participation, SinglePass

BATCH, STEPS = 8, 12
QUANTILE = QuantileClip(initial=1.0, units=BATCH, bit_noise=4.0)
#: Clip norm 1, noise 2 and batches of 8: a point of the grid is 2.4e-4; of sums by random signs.
WEIGHTS = 4e-3

PLANS: dict[str, tuple[Participation, str]] = {
    "identity": (Epochs(2, 6), "identity"),
    "tree": (Epochs(2, 6), "tree"),
    "blt": (SinglePass(STEPS), "blt"),
    "banded": (MinSeparation(STEPS, 6, 2), "banded"),
}


def plan_of(name: str, **more: Any) -> ns.Plan:
    """Fitted strategies differ between machines: these are given, the names are of the plans."""
    part, kind = PLANS[name]
    strategies = ns.strategies
    mechanism = {
        "identity": strategies.identity(),
        "tree": strategies.tree("honaker", restart_every=6),
        "blt": strategies.blt((0.9, 0.5), (0.2, 0.3)),
        "banded": strategies.banded((1.0, 0.5, 0.25)),
    }[kind]
    asked: dict[str, Any] = {"noise_multiplier": 2.0, "delta": 1e-5, **more}
    return ns.Plan.fit(part, mechanism=mechanism, **asked)


def ids_of(plan: ns.Plan, step: int, rows: int) -> list[int]:
    """Every epoch has the same rows in the same order; a single pass has new ones."""
    period = getattr(plan.participation, "steps_per_epoch", plan.steps)
    period = getattr(plan.participation, "separation", period)
    return list(range(step % period * rows, (step % period + 1) * rows))


def private_sum(name: str, shape: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """Totals of contributions, some of them larger than the bound, one of them NaN."""
    plan = plan_of(name, **more)
    sums = ns.PrivateSum(plan, clip=1.5, source=test_source(seed=f"golden {name}"))
    values = normal(f"contributions {shape}", STEPS, BATCH, *shape)
    values[3, 2] = np.nan
    values[4, 1] = 1e6
    increments = []
    for step, rows in enumerate(values):
        ids = ids_of(plan, step, BATCH)
        if plan.unit == "user":
            ids[1] = ids[0]
        increments.append(sums.add(rows, ids=ids))
    return {
        "first": np.asarray(increments[0]).reshape(-1)[:3].tolist(),
        "total": np.asarray(sums.total).reshape(-1).tolist(),
        "deviation": sums.deviation,
        "statement": statement(sums.statement()),
    }


def model_of(kind: str) -> nn.Module:
    model: nn.Module = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    if kind == "cnn":
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    fill(model)
    return model


def batches(kind: str) -> list[tuple[Tensor, Tensor]]:
    shape = (1, 6, 6) if kind == "cnn" else (6,)
    x = torch.from_numpy(normal(f"training {kind}", STEPS, BATCH, *shape)).float()
    y = torch.from_numpy(draws(f"labels {kind}").randint(0, 3, (STEPS, BATCH)))
    return list(zip(x, y))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "ftrl": lambda p: ns.FTRL(p, lr=0.5, momentum=0.9),
}


def trained(
    name: str, kind: str, optimizer: str, how: str = "step", unit: str = "example", **more: Any
) -> dict[str, Any]:
    """Weights after a dozen private steps, and the statement on the way and at the end."""
    plan, model = plan_of(name, unit=unit), model_of(kind)
    clip = {} if "clip" in more else {"clip_norm": 1.0}
    private = ns.privatize(
        model,
        OPTIMIZERS[optimizer](model.parameters()),
        plan,
        batch_size=BATCH,
        source=test_source(seed=f"golden {name}"),
        **clip,
        **more,
    )
    loss, half = nn.CrossEntropyLoss(), {}
    for step, (x, y) in enumerate(batches(kind)):
        ids = ids_of(plan, step, BATCH)
        if unit == "user":
            ids[1] = ids[0]
        if how == "parts":
            with private.accumulate() as parts:
                for own in (slice(0, 5), slice(5, BATCH)):
                    parts.add(loss, (x[own], y[own]), ids=ids[own])
        else:
            private.step(loss, x, y, ids=ids)
        if step == STEPS // 2 - 1:
            half = statement(private.statement())
    found = {
        "weights": projections((n, p) for n, p in model.named_parameters()),
        "half": half,
        "statement": statement(private.statement()),
    }
    if "average" in more:
        with private.average.in_place():
            found["average"] = projections((n, p.clone()) for n, p in model.named_parameters())
    return found


def task() -> FederatedTask:
    """Thirty users with up to eight small images each, some with none."""
    random = draws("federated")
    sizes = random.randint(0, 9, 30)
    y = random.randint(0, 2, sizes.sum() + 20)
    x = random.standard_normal((len(y), 1, 2, 2)) * 20 + 128 + 30 * (2 * y - 1)[:, None, None, None]
    pixels, labels = torch.from_numpy(x.clip(0, 255).astype(np.uint8)), torch.from_numpy(y)
    n, starts = int(sizes.sum()), np.append(0, np.cumsum(sizes))
    names = tuple(f"u{i}" for i in range(30))
    held_out = pixels[n:], labels[n:]
    return FederatedTask("blobs", "image", names, starts, pixels[:n], labels[:n], *held_out, 2)


def federated(
    mechanism: str, noise: float, clip: Any = 1.0, is_together: bool | None = None
) -> dict[str, Any]:
    """Six rounds of eight users; every fifth does not answer."""
    strategy = ns.strategies.blt((0.9, 0.5), (0.2, 0.3))
    plan = ns.Plan.fit(
        MinSeparation(6, 2, 3),
        mechanism=strategy if mechanism == "blt" else "identity",
        noise_multiplier=noise,
        unit="user",
        delta=1e-5,
    )
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    fill(model)
    server = ServerOptimizer(
        model,
        plan,
        clip=clip,
        cohort_size=8,
        optimizer_fn=lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.5),
        source=test_source(seed="golden rounds"),
    )
    data = task()

    def check_ins(step: int) -> list[Any]:
        return [*data.users[7 * step % 30 :], *data.users[: 7 * step % 30]]

    done = simulate(
        Rounds(server),
        model,
        data,
        local=LocalTraining(learning_rate=0.5, steps=3, batch_size=4, epochs=2, proximal=0.1),
        check_ins=check_ins,
        answers=lambda step, user: (step + int(str(user)[1:])) % 5 != 0,
        vectorise=is_together,
    )
    return {
        "parameters": projections(sorted(done.parameters.items())),
        "rounds": done.rounds,
        "statement": statement(done.statement),
        "users": [[own.participations, own.users, own.epsilon] for own in done.users],
    }


def _entries() -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for name in PLANS:
        for shape in ((), (5,)):
            words = "vectors" if shape else "numbers"
            by = partial(private_sum, name, shape)
            entries[f"private sum of {words}, {name}"] = Entry(by, atol=1e-6)
    by = partial(private_sum, "tree", (5,), unit="user")
    entries["private sum of users, tree"] = Entry(by, atol=1e-6)

    def train(label: str, *args: Any, **more: Any) -> None:
        # Adam divides by what it has seen: a point of the grid is more in a small gradient.
        room = 10 * WEIGHTS if "adam" in label else WEIGHTS
        entries[f"trained {label}"] = Entry(partial(trained, *args, **more), atol=room)

    for name in PLANS:
        for kind in ("mlp", "cnn"):
            train(f"{kind}, {name}, sgd", name, kind, "sgd")
    for optimizer in ("adam", "ftrl"):
        train(f"mlp, blt, {optimizer}", "blt", "mlp", optimizer)
    train("mlp, blt, in parts", "blt", "mlp", "sgd", how="parts")
    train("mlp, banded, users", "banded", "mlp", "sgd", unit="user")
    train("mlp, blt, per layer", "blt", "mlp", "sgd", clip=PerLayer(1.0))
    train("mlp, blt, averaged", "blt", "mlp", "sgd", average=0.9)
    train("mlp, identity, quantile", "identity", "mlp", "sgd", clip=QUANTILE)
    for mechanism in ("identity", "blt"):
        by = partial(federated, mechanism, 0.5)
        entries[f"federated, {mechanism}"] = Entry(by, atol=WEIGHTS)
    for words, is_together in (("together", True), ("one by one", False)):
        by = partial(federated, "blt", 0.0, is_together=is_together)
        entries[f"federated without noise, {words}"] = Entry(by, atol=1e-4)
    return entries


SECTION = _entries()
