"""Stacked runs equal `simulate` for the same cohorts and key; stacked LSTMs equal vmap; cohorts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from noshuffle import MinSeparation, Plan
from noshuffle.datasets.text import encode
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.federated import LocalTraining, Rounds, ServerOptimizer, stacked_lstm
from noshuffle.federated.char_models import CharTransformer, build
from noshuffle.federated.clients import NO_TARGET, clip_delta, clip_flat, cross_entropy, local_train
from noshuffle.federated.cohort import observed_participation
from noshuffle.federated.many import (
    Setting,
    accuracies,
    admitted_cohorts,
    train_many,
)
from noshuffle.federated.recurrent import unrolled
from noshuffle.federated.simulate import evaluate, in_random_order, in_stream_order
from noshuffle.federated.stack import (
    _OVERHEAD,
    GROUP,
    FlatRows,
    Stack,
    UserRows,
    gradient_fn,
    stack_size,
)
from noshuffle.federated.tasks import FederatedTask, windows
from noshuffle.federated.vectorised import can_vectorise
from noshuffle.noise import grid
from noshuffle.noise import test_source as a_source
from noshuffle.training.models import CharLSTM

USERS, LENGTH, CLASSES = 30, 6, 4
LIMITS = MinSeparation(6, 3, 2)
LOCAL = LocalTraining(learning_rate=0.7, steps=2, batch_size=2)


@lru_cache
def a_task() -> FederatedTask:
    rng = np.random.default_rng(0)
    texts = [
        "".join(rng.choice(list("abc"), p=[0.5, 0.3, 0.2], size=rng.integers(2, 60)))
        for _ in range(USERS)
    ]
    cuts = [windows(encode(t, alphabet="abc"), length=LENGTH, most=5, filler=3) for t in texts]
    x, y = (torch.from_numpy(np.concatenate([c[i] for c in cuts]).astype(np.int16)) for i in (0, 1))
    starts = np.cumsum([0, *(len(c[0]) for c in cuts)])
    return FederatedTask("tiny", "text", tuple(range(USERS)), starts, x, y, x, y, CLASSES)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: CharLSTM(CLASSES, embedding=3, hidden=5),
    "transformer": lambda: CharTransformer(CLASSES, length=LENGTH, width=8, layers=1, heads=2),
    "small lstm and linear": lambda: _Odd(),
}


class _Odd(nn.Module):
    """An LSTM that `stacked_lstm` does not know, to go by vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(CLASSES, 3))
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.output = nn.Linear(4, CLASSES)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.output(self.lstm(self.table[symbols])[0]) * self.scale
        return scores.transpose(1, 2)


@lru_cache
def a_plan(mechanism: str, noise: float) -> Plan:
    return Plan.fit(LIMITS, mechanism=mechanism, noise_multiplier=noise, unit="user")


def one_run(model: nn.Module, plan: Plan, run: int, local: LocalTraining) -> dict[str, Any]:
    """Run k of a study as a run by itself: the same server with tensors called "k/name"."""
    task, order = a_task(), in_random_order(a_task().users, seed=1)
    rounds = Rounds(
        ServerOptimizer(
            {f"{run}/{name}": p for name, p in model.named_parameters()},
            plan,
            clip=0.3,
            cohort_size=5,
            optimizer_fn=lambda p: torch.optim.SGD(p, lr=0.8, momentum=0.5),
            source=a_source(seed=2),
        )
    )
    named = lambda values: {name.partition("/")[2]: v for name, v in values.items()}  # noqa: E731
    for step in range(plan.steps):
        work = rounds.begin(order(step))
        assert work is not None
        for user in work.users:
            delta = local_train(model, named(work.parameters), *task.client(user), local=local)
            sent = clip_delta(delta, clip_norm=0.3).values
            assert rounds.receive(user, {f"{run}/{n}": v for n, v in sent.items()}) is None
        rounds.finish()
    return named(rounds.server.parameters())


@pytest.mark.parametrize(("kind", "proximal"), [("lstm", 0.0), *((kind, 0.2) for kind in MODELS)])
def test_a_stacked_run_equals_a_simulation(
    kind: str, proximal: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the grid of the noise, on which a last place can make a whole step."""
    monkeypatch.setattr(grid, "grid_step", lambda _: 0.0)
    task, order = a_task(), in_random_order(a_task().users, seed=1)
    local = LocalTraining(learning_rate=0.7, steps=2, batch_size=2, proximal=proximal)
    plans = [a_plan("blt", 0.2), a_plan("tree", 0.3), a_plan("identity", 0.1)]
    names = ("blt", "tree", "identity")
    # Two runs a mechanism: each has the noise that a run of its own would have.
    settings = [
        Setting(
            mechanism=name,
            cohorts="all",
            noise_multiplier=plan.noise_multiplier,
            server_rate=0.8,
            client_rate=rate,
            clip_norm=0.3,
            momentum=0.5,
            seed=i,
        )
        for i, (name, plan) in enumerate(zip(names, plans))
        for rate in (0.7, 0.1)
    ]
    common: dict[str, Any] = {"rounds": 6, "cohort_size": 5, "local": local, "at_once": 7}
    stacked = train_many(
        MODELS[kind],
        task,
        settings,
        cohorts={"all": admitted_cohorts(LIMITS, task, size=5, check_ins=order)},
        strategies={name: plan.strategy for name, plan in zip(names, plans)},
        source=a_source(seed=2),
        **common,
    )
    loss, accuracy = accuracies(MODELS[kind](), stacked, task.x_test, task.y_test, at_once=50)
    for k in (0, 3, 4) if proximal else range(6):
        setting = settings[k]
        torch.manual_seed(setting.seed)
        model = MODELS[kind]()
        alone = one_run(model, plans[k // 2], k, replace(local, learning_rate=setting.client_rate))
        for name, value in alone.items():
            torch.testing.assert_close(stacked[name][k], value, rtol=1e-4, atol=1e-5)
        expected = evaluate(model, alone, task)
        assert float(loss[k]) == pytest.approx(expected[0], rel=1e-4)
        assert float(accuracy[k]) == pytest.approx(expected[1], abs=0.01)


def test_clipped_sums_of_uneven_cohorts() -> None:
    """Slots of several runs in stacks of any size; a broken run stays with itself."""
    task = a_task()
    torch.manual_seed(0)
    models = [MODELS["lstm"]() for _ in range(3)]
    with torch.no_grad():
        models[1].output.bias[0] = float("nan")  # type: ignore[union-attr, operator]
    flat = FlatRows.of(models[0])
    theta = torch.stack([flat.pack(dict(m.named_parameters())) for m in models])
    cohorts = [np.arange(4), np.arange(2), np.empty(0, dtype=np.int64)]
    rates, clips = torch.tensor([0.7, 0.7, 0.7]), torch.tensor([0.05, 1.0, 1.0])
    expected = torch.zeros(flat.size)
    for user in cohorts[0]:
        x, y = task.client(int(user))
        delta = local_train(models[0], dict(models[0].named_parameters()), x, y, local=LOCAL)
        expected += clip_flat(flat.pack(delta), clip_norm=0.05)[0]
    for size in (1, 3, 50):
        stack = Stack(
            gradient_fn(models[0]),
            flat,
            UserRows.of(task, local=LOCAL, device="cpu"),
            theta,
            client_rate=rates,
            clip_norm=clips,
            local=LOCAL,
            size=size,
        )
        for is_captured in (False, True):  # a graph has one size: the last stack is filled up
            if is_captured:
                stack._is_captured, stack._graph = True, partial(stack._work, stack._slots)  # type: ignore[assignment]
            total = stack.clipped_sums(list(enumerate(cohorts)))
            torch.testing.assert_close(total[0], expected, rtol=1e-4, atol=1e-6)
            assert not total[1:].any()


def test_the_size_of_stacks_wastes_least() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        slots = (10 * rng.integers(0, 40, size=12)).tolist()
        most = int(rng.integers(10, 300))

        def slots_worth(size: int, slots: list[int] = slots) -> int:
            return sum(math.ceil(n / size) * (size + _OVERHEAD) for n in slots)

        size = stack_size(slots, at_most=most)
        assert size % GROUP == 0
        assert size <= most
        tried = range(GROUP, most + 1, GROUP)
        assert slots_worth(size) == min(map(slots_worth, tried))


def test_places_of_many_users() -> None:
    task = a_task()
    users = list(reversed(task.users))
    assert task.places(iter(users)).tolist() == [task.place(user) for user in users]
    with pytest.raises(InvalidInput, match="has no user 'nobody'"):
        task.places([users[0], "nobody"])


def test_small_numbers_beside_a_large_one_count() -> None:
    """In single precision their squares are lost, and the norm of a delta was 0.07 % too small."""
    task, model = a_task(), nn.Linear(400, 500, bias=False)
    pull = torch.full((500, 400), 2.4e-4)
    pull[0, 0] = 1.0

    def gradients(params: Any, x: Any, y: Any, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"weight": pull.expand(len(weights), -1, -1)}

    stack = Stack(
        gradients,
        FlatRows.of(model),
        UserRows.of(task, local=LOCAL, device="cpu"),
        torch.zeros(1, 200_000),
        client_rate=torch.ones(1),
        clip_norm=torch.tensor([0.1]),
        local=LOCAL,
        size=1,
    )
    total = stack.clipped_sums([(0, np.arange(1))])
    assert 0.0999 < float(total.double().norm()) <= 0.1


def test_stacked_lstm_gradients() -> None:
    torch.manual_seed(0)
    clients, rows, steps, classes = 3, 4, 7, 6
    models = [CharLSTM(classes, embedding=3, hidden=5) for _ in range(clients)]
    params = {
        name: torch.stack([m.get_parameter(name).detach() for m in models])
        for name in stacked_lstm.NAMES
    }
    x, y = torch.randint(0, classes, (2, clients, rows, steps))
    y[0, 1, 3:] = NO_TARGET
    y[1, 0] = NO_TARGET
    weights = torch.ones(clients, rows)
    weights[1, 2:] = 0
    weights[2] = 0
    twin = unrolled(models[0])

    def loss(now: dict[str, torch.Tensor], x: Any, y: Any, w: Any) -> torch.Tensor:
        losses = cross_entropy(functional_call(twin, now, (x,)), y)
        total: torch.Tensor = (losses * w).sum() / w.sum().clamp_min(1)
        return total

    expected = vmap(grad(loss))(params, x, y, weights)
    found = stacked_lstm.gradients(params, x, y, weights)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)
    assert not found["output.bias"][2].any()
    assert stacked_lstm.fits(models[0])
    assert not stacked_lstm.fits(nn.Linear(2, 2))


def test_cohorts_keep_the_limits() -> None:
    task = a_task()
    for order in (in_random_order(task.users, seed=3), in_stream_order(task.users, rounds=6)):
        cohorts = admitted_cohorts(LIMITS, task, size=8, check_ins=order)
        seen = observed_participation(cohorts, steps=6)
        assert seen.separation >= 3
        assert seen.max_participations <= 2
        assert [len(c) for c in cohorts] == [8, 8, 8, 8, 8, 8]


def test_transformer_is_causal_and_can_be_stacked() -> None:
    torch.manual_seed(0)
    model = build("char_transformer", classes=9, length=12)
    assert can_vectorise(model)
    x = torch.randint(0, 9, (2, 12))
    before = model(x)
    assert before.shape == (2, 9, 12)
    for t in range(12):
        other = x.clone()
        other[:, t] = (x[:, t] + 1) % 9
        is_same = (model(other) - before).abs().amax((0, 1)) < 1e-6
        assert is_same[:t].all()
        assert not is_same[t]
    assert type(build("char_lstm", classes=9, length=12)) is CharLSTM
    with pytest.raises(InvalidInput, match="model must be one of"):
        build("gpt", classes=9, length=12)
    with pytest.raises(InvalidInput, match="12 characters at most"):
        model(torch.zeros(1, 13, dtype=torch.int64))


def test_bad_input() -> None:
    task = a_task()
    one = Setting(
        mechanism="identity", cohorts="c", noise_multiplier=0.0, server_rate=1.0, client_rate=1.0
    )
    common: dict[str, Any] = {
        "strategies": {"identity": a_plan("identity", 0.1).strategy},
        "cohort_size": 2,
        "local": LOCAL,
    }
    cohorts = {"c": [np.arange(2)] * 2}
    with pytest.raises(InvalidInput, match="at least one run"):
        train_many(MODELS["lstm"], task, [], cohorts=cohorts, rounds=1, **common)
    with pytest.raises(InvalidInput, match="hold 2 of 3 rounds"):
        train_many(MODELS["lstm"], task, [one], cohorts=cohorts, rounds=3, **common)
    with pytest.raises(InvalidInput, match="1 factors for 2 steps"):
        train_many(
            MODELS["lstm"], task, [one], cohorts=cohorts, rounds=2, learning_rates=[1.0], **common
        )
    twice = {**common, "local": LocalTraining(learning_rate=1.0, batch_size=2, epochs=2)}
    with pytest.raises(Unsupported, match="once"):
        train_many(MODELS["lstm"], task, [one], cohorts=cohorts, rounds=2, **twice)
    with pytest.raises(InvalidInput, match="server_rate"):
        Setting(
            mechanism="tree", cohorts="c", noise_multiplier=1.0, server_rate=0.0, client_rate=1.0
        )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["lstm", "transformer"])
def test_a_graph_on_cuda_equals_the_cpu(kind: str) -> None:
    task = a_task()
    order = in_random_order(task.users, seed=1)
    plan = a_plan("blt", 0.2)
    settings = [
        Setting(
            mechanism="blt",
            cohorts="all",
            noise_multiplier=0.2,
            server_rate=0.8,
            client_rate=rate,
            clip_norm=0.3,
        )
        for rate in (0.7, 0.1, 0.3)
    ]
    found = [
        train_many(
            MODELS[kind],
            task,
            settings,
            cohorts={"all": admitted_cohorts(LIMITS, task, size=5, check_ins=order)},
            strategies={"blt": plan.strategy},
            rounds=6,
            cohort_size=5,
            local=LOCAL,
            source=a_source(seed=2, kind="philox"),
            device=device,
            at_once=20,
        )
        for device in ("cpu", "cuda")
    ]
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name].cpu(), value, rtol=1e-3, atol=1e-4)
