"""Runs of a study: those of `privatize` in their order, and those of `simulate` side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.federated.blobs import a_model, a_task
from torch import nn

from noshuffle import Epochs, MinSeparation, Plan, Poisson
from noshuffle.experiments import one_run, user_runs
from noshuffle.federated import LocalTraining, Rounds, ServerOptimizer, simulate
from noshuffle.federated.char_models import CharTransformer
from noshuffle.federated.simulate import in_random_order
from noshuffle.federated.tasks import FederatedTask
from noshuffle.noise import grid
from noshuffle.noise import test_source as a_source
from noshuffle.strategies import identity
from noshuffle.strategies.workload import cooldown
from noshuffle.training.models import CharLSTM

ROUNDS, COHORT, CLIP = 6, 5, 0.3
LIMITS = MinSeparation(ROUNDS, 3, 2)


@pytest.mark.parametrize("is_sampled", [False, True])
def test_a_run_is_that_of_privatize(is_sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(participation=Epochs(2, 3), strategy=identity(), noise_multiplier=0.0)
    if is_sampled:
        part = Poisson(6, 0.4)
        plan = Plan(participation=part, strategy=identity(), noise_multiplier=0.0)
    torch.manual_seed(0)
    x, y = torch.randn(14, 4), torch.arange(14) % 3
    order, seen = np.random.default_rng(1).permutation(14)[:11], []
    advance = one_run.Private.advance

    def watched(self: Any, loss_fn: Any, batch: Any, *, ids: Any) -> None:
        seen.append(order[ids])
        assert torch.equal(batch[0], x[torch.from_numpy(order[ids])])
        advance(self, loss_fn, batch, ids=ids)

    monkeypatch.setattr(one_run.Private, "advance", watched)
    before = torch.get_rng_state()
    private = one_run.train(
        partial(nn.Linear, 4, 3), plan, x, y, order, batch_size=3, clip_norm=0.5,
        learning_rate=0.2, momentum=0.9, learning_rates=cooldown(6), seed=7, average=0.9,
    )  # fmt: skip
    assert private.steps_released == 6
    assert private.statement().participation == plan.statement().participation
    if is_sampled:
        assert set(np.concatenate(seen)) <= set(order)
    else:
        assert [rows.tolist() for rows in seen] == [
            order[begin : begin + 3].tolist() for begin in (0, 3, 6, 0, 3, 6)
        ]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(7)
    model, velocity = nn.Linear(4, 3), 0.0
    for rows, factor in zip(seen, cooldown(6)):  # by hand
        total = 0.0
        for i in rows:
            loss = nn.functional.cross_entropy(model(x[i]), y[i])
            g = torch.cat([p.flatten() for p in torch.autograd.grad(loss, model.parameters())])
            total = total + g * min(1.0, 0.5 / float(g.norm()))
        velocity = 0.9 * velocity + total / 3
        now = nn.utils.parameters_to_vector(model.parameters()) - 0.2 * factor * velocity
        nn.utils.vector_to_parameters(now.detach(), model.parameters())
    for p, own in zip(model.parameters(), private.model.parameters(), strict=True):
        torch.testing.assert_close(own, p, rtol=1e-4, atol=1e-5)
    right = (private.model(x).argmax(1) == y).float().mean()
    assert one_run.accuracy(private.model, x, y, at_once=4) == pytest.approx(float(right))


def text() -> FederatedTask:
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 6, size=30)
    x, y = (torch.from_numpy(rng.integers(0, 4, (counts.sum(), 6)).astype(np.int16)) for _ in "xy")
    y[::3, 4:] = -100
    starts = np.cumsum([0, *counts])
    return FederatedTask("tiny", "text", tuple(range(30)), starts, x, y, x, y, 4)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": a_model,
    "lstm": lambda: CharLSTM(4, embedding=3, hidden=5),
    "transformer": lambda: CharTransformer(4, length=6, width=8, layers=1, heads=2),
}


def a_server(kind: str, noise: float, rate: float, **more: Any) -> ServerOptimizer:
    torch.manual_seed(3)
    given: dict[str, Any] = {"participation": LIMITS, "strategy": identity(), **more}
    return ServerOptimizer(
        MODELS[kind](),
        Plan(noise_multiplier=noise, unit="user", **given),
        clip=CLIP,
        cohort_size=COHORT,
        optimizer_fn=partial(torch.optim.SGD, lr=rate, momentum=0.5),
        source=a_source(seed=2),
    )


@pytest.mark.parametrize("proximal", [0.0, 0.2])
@pytest.mark.parametrize("kind", MODELS)
def test_runs_side_by_side_are_those_of_simulate(
    kind: str, proximal: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the grid of the noise, on which a last place can make a whole step."""
    monkeypatch.setattr(grid, "grid_step", lambda _: 0.0)
    task = replace(a_task(), users=tuple(range(len(a_task())))) if kind == "mlp" else text()
    local = LocalTraining(learning_rate=0.7, steps=2, batch_size=2, proximal=proximal)
    settings = [(0.2, 0.8), (0.0, 0.3), (0.1, 0.8)]
    factors = [1.0, 1.0, 0.5, 1.0, 0.25, 0.5]
    servers = [a_server(kind, *setting) for setting in settings]
    user_runs.train(
        MODELS[kind](), servers, task, local=local, seed=1, learning_rates=factors, at_once=7
    )
    order = in_random_order(task.users, seed=1)
    for server, (noise, rate) in zip(servers, settings):
        one = a_server(kind, noise, rate)

        def check_ins(step: int, one: Any = one, rate: float = rate) -> Any:
            one.optimizer.param_groups[0]["lr"] = rate * factors[step]
            return order(step)

        found = simulate(
            Rounds(one), MODELS[kind](), task, local=local, check_ins=check_ins, vectorise=False
        )
        for name, value in found.parameters.items():
            torch.testing.assert_close(server.parameters()[name], value, rtol=1e-4, atol=1e-5)
        assert server.statement().epsilon == one.statement().epsilon
        (users, seen), (others, alike) = (own.guard.table.all() for own in (server, one))
        assert np.array_equal(users, others)
        assert np.array_equal(seen, alike)


def test_sampled_runs_take_their_own_secret_draws() -> None:
    task = text()
    plan = {"participation": Poisson(ROUNDS, COHORT / len(task))}
    servers = [a_server("lstm", 0.5, 0.3, **plan) for _ in range(2)]
    draws = [[server.sampler(len(task)).draw(t).tolist() for t in range(ROUNDS)]
             for server in servers]  # fmt: skip
    user_runs.train(
        MODELS["lstm"](), servers, task, local=LocalTraining(learning_rate=0.7, batch_size=2),
        seed=1, learning_rates=[1.0] * ROUNDS, at_once=100,
    )  # fmt: skip
    assert draws[0] == draws[1]  # of one test seed
    assert [server.round for server in servers] == [ROUNDS, ROUNDS]  # others would be refused


def test_what_a_user_adds_is_clipped() -> None:
    """NaN counts as zero; in single precision small squares are lost beside a large one."""
    task = text()
    users = np.flatnonzero(np.diff(task.starts) > 0)[:3]
    model = nn.Linear(400, 500, bias=False)
    pull = torch.full((3, 500, 400), 2.4e-4)
    pull[:, 0, 0] = 1.0
    pull[1, 3, 3] = float("nan")
    servers = [
        ServerOptimizer(
            model,
            Plan(participation=LIMITS, strategy=identity(), noise_multiplier=0.0, unit="user"),
            clip=0.1,
            cohort_size=3,
            optimizer_fn=partial(torch.optim.SGD, lr=1.0),
        )
    ]
    local = LocalTraining(learning_rate=1.0, batch_size=2)
    for chosen, most in (([0], 0.1), ([1], 0.0), ([0, 1, 2], 0.2)):
        (total,) = user_runs._clipped_sums(
            lambda now, x, y, w, own=chosen: {"weight": pull[own]},
            servers, [users[chosen]], task, local=local, at_once=10,
        )  # fmt: skip
        assert 0.999 * most <= float(total["weight"].double().norm()) <= most * (1 + 1e-7)
