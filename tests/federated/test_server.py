"""The server's step against the equation written out, its refusals, its state."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from noshuffle import FTRL, MinSeparation, Plan, Poisson
from noshuffle.accounting import gaussian
from noshuffle.clipping import ClippedSum
from noshuffle.clipping.adaptive import QuantileClip
from noshuffle.errors import (
    HorizonExceeded,
    InvalidInput,
    ParticipationViolation,
    Unsupported,
)
from noshuffle.federated import ServerOptimizer, statement_for
from noshuffle.federated.per_user import epsilon_of, spending
from noshuffle.noise import test_source as a_source
from noshuffle.release.verify import verify
from noshuffle.strategies import tree

SHAPES = {"w": (3, 2), "scale": (), "b": (4,)}


def start() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=g) for name, shape in SHAPES.items()}


def sums(t: int, *, length: float = 1.0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(100 + t)
    raw = {name: torch.randn(shape, generator=g) for name, shape in SHAPES.items()}
    norm = math.sqrt(sum(float(v.square().sum()) for v in raw.values()))
    return {name: v * (length / norm) for name, v in raw.items()}


@lru_cache
def a_plan(mechanism: Any = "blt", **more: Any) -> Plan:
    settings = {"noise_multiplier": 0.8, "unit": "user", **more}
    return Plan.fit(MinSeparation(12, 3, 4), mechanism=mechanism, **settings)


def sgd(p: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(p, lr=0.5, momentum=0.9)


def a_server(plan: Plan, **more: Any) -> ServerOptimizer:
    settings: dict[str, Any] = {
        "clip": 1.5,
        "cohort_size": 4,
        "optimizer_fn": sgd,
        "source": a_source(seed=9),
        **more,
    }
    return ServerOptimizer(start(), plan, **settings)


def cohort(t: int) -> list[str]:
    return [f"user {t % 3}-{i}" for i in range(2)]


@pytest.mark.parametrize("mechanism", ["blt", "tree", "identity", "banded"])
@pytest.mark.parametrize(
    "optimizer_fn",
    [sgd, lambda p: FTRL(p, lr=0.3, momentum=0.5), lambda p: torch.optim.Adam(p, lr=0.1)],
)
def test_step_is_the_equation(
    mechanism: str, optimizer_fn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the grid, which would move the sums by up to 2⁻¹⁰ of their noise."""
    monkeypatch.setattr("noshuffle.noise.grid.grid_step", lambda _: 0.0)
    plan = a_plan(mechanism)
    server = a_server(plan, optimizer_fn=optimizer_fn)
    twin = {name: torch.nn.Parameter(value.clone()) for name, value in start().items()}
    optimizer = optimizer_fn(list(twin.values()))
    noising = plan.strategy.noising(12)  # C⁻¹, or B of the tree with as many columns as nodes
    for t in range(12):
        got = server.step(sums(t), cohort=cohort(t))
        for name, p in twin.items():
            noise = torch.zeros(SHAPES[name])
            for row in np.flatnonzero(noising[t]):
                z = torch.empty(SHAPES[name])
                a_source(seed=9).on(torch.device("cpu")).normal_(z, row=int(row), name=name)
                noise += float(noising[t, row]) * z
            p.grad = -(sums(t)[name] + 0.8 * 1.5 * noise) / 4  # planned 4, two answered
        optimizer.step()
        for name, p in twin.items():
            torch.testing.assert_close(got[name], p.detach(), rtol=1e-4, atol=1e-4)
    with pytest.raises(HorizonExceeded):
        server.open(["new"])


def test_what_cannot_be_a_sum_is_refused_and_nobody_charged() -> None:
    server = a_server(a_plan())
    good = sums(0)
    wrong: list[tuple[dict[str, torch.Tensor], str]] = [
        ({n: v for n, v in good.items() if n != "b"}, "must have the tensors"),
        ({**good, "b": torch.zeros(5)}, "must have the tensors"),
        ({**good, "scale": torch.tensor(math.nan)}, "cannot sum to norm nan"),
        (sums(0, length=3.1), "clip every delta"),
    ]
    for values, words in wrong:
        with pytest.raises(InvalidInput, match=words):
            server.step(values, cohort=cohort(0))
    assert server.round == 0
    server.step(sums(0, length=2.99), cohort=cohort(0))
    assert server.round == 1


def test_a_round_is_released_once_by_its_own_cohort() -> None:
    server = a_server(a_plan())
    opened = server.open(["zoe", "ada"])
    assert opened.users == ("ada", "zoe")
    assert server.round == 1
    with pytest.raises(InvalidInput, match="still open"):
        server.open(["bob"])
    with pytest.raises(InvalidInput, match="still open"):
        server.save()
    server.step(sums(0), cohort=opened)
    with pytest.raises(InvalidInput, match="not open"):
        server.step(sums(0), cohort=opened)
    with pytest.raises(ParticipationViolation, match=r"user 'ada' may not take part in round 1"):
        server.open(["bob", "ada"])
    with pytest.raises(ParticipationViolation, match="named twice"):
        server.open(["bob", "bob"])
    with pytest.raises(InvalidInput, match="same kind"):
        server.open([7])
    assert server.round == 1


def test_a_skipped_row_is_never_used_and_later_rows_stay_the_same() -> None:
    """Noise of round 2 is the same whether round 1 was released or passed over."""
    plan = a_plan()
    settings: dict[str, Any] = {"optimizer_fn": lambda p: torch.optim.SGD(p, lr=1.0)}
    moves = []
    for is_skipped in (False, True):
        server = a_server(plan, **settings)
        server.step(sums(0), cohort=cohort(0))
        opened = server.open(cohort(1))
        before = server.parameters()
        if is_skipped:
            server.abandon()
            assert all(torch.equal(before[n], v) for n, v in server.parameters().items())
            with pytest.raises(InvalidInput, match="not open"):
                server.step(sums(1), cohort=opened)
        else:
            server.step(sums(1), cohort=opened)
        before = server.parameters()
        after = server.step(sums(2), cohort=cohort(2))
        moves.append({name: after[name] - before[name] for name in after})
        with pytest.raises(ParticipationViolation):  # charged although nothing came of it
            server.open([f"user 1-{0}"])
    for name, value in moves[0].items():
        torch.testing.assert_close(value, moves[1][name], rtol=1e-4, atol=1e-6)


def test_statement_and_each_user() -> None:
    plan = a_plan(noise_multiplier=5.0)
    server = a_server(plan, source=None)
    assert server.statement().epsilon == 0.0
    for t in range(12):
        server.step(sums(t), cohort=["often"] if t % 3 == 0 else [f"rare {t}"])
    assert server.statement().epsilon == plan.epsilon()
    once, often = statement_for(server, "rare 1"), statement_for(server, "often")
    assert 0 < once.epsilon < often.epsilon == pytest.approx(plan.epsilon())
    assert statement_for(server, "never").epsilon == 0.0
    assert [(s.participations, s.users) for s in spending(server)] == [(1, 8), (4, 1)]
    # Against the definition: at most c columns of C, at least 3 apart.
    c = plan.strategy.encoder(12)
    for count in (1, 2, 3):
        worst = max(
            float(np.linalg.norm(c[:, list(steps)].sum(axis=1)))
            for steps in _patterns(12, 3, count)
        )
        exact = gaussian.epsilon(mu=worst / 5.0, delta=plan.delta)
        assert epsilon_of(plan, participations=count) == pytest.approx(exact, rel=1e-9)


def _patterns(n: int, gap: int, count: int) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for _ in range(count):
        found += [(*p, t) for p in found for t in range(p[-1] + gap if p else 0, n)]
    return [p for p in set(found) if p and len(p) <= count]


def with_norms(t: int, clip: float, norms: list[float]) -> ClippedSum:
    return ClippedSum(
        values=sums(t, length=0.5 * clip),
        bound=clip,
        norms=torch.tensor(norms, dtype=torch.float64),
        losses=torch.empty(0),
        bad=torch.zeros(len(norms), dtype=torch.bool),
        present=torch.ones(len(norms), dtype=torch.bool),
    )


def test_adaptive_clip_moves_only_between_trees() -> None:
    clip = QuantileClip(initial=1.0, units=4, bit_noise=2.0)
    plan = a_plan(tree("honaker", restart_every=4), noise_multiplier=1.0)
    server = a_server(plan, clip=clip)
    seen = []
    for t in range(12):
        seen.append(server.clip_norm)
        server.step(with_norms(t, server.clip_norm, [50.0, 60.0]), cohort=cohort(t))
    assert len({*seen[:4]}) == len({*seen[4:8]}) == len({*seen[8:]}) == 1
    assert len({*seen}) == 3
    with pytest.raises(InvalidInput, match="ClippedSum with norms"):
        server.step(sums(0), cohort=["x"])
    with pytest.raises(Unsupported, match="clip norm may not change"):
        a_server(a_plan("blt"), clip=clip)


def test_adaptive_clip_never_states_too_little() -> None:
    """Part of the budget of a tree goes to the counts, so every prefix states the whole plan."""
    plan = a_plan(tree("honaker", restart_every=4), noise_multiplier=3.0)
    server = a_server(plan, clip=QuantileClip(initial=1.0, units=4, bit_noise=2.0), source=None)
    server.step(with_norms(0, 1.0, [0.5, 0.5]), cohort=cohort(0))
    assert server.statement().epsilon == plan.epsilon()
    assert statement_for(server, cohort(0)[0]).epsilon == plan.epsilon()


def test_sampled_plans_take_the_secret_draw_only() -> None:
    plan = Plan.fit(Poisson(steps=5, rate=0.3), mechanism="identity", noise_multiplier=1.0,
                    unit="user")  # fmt: skip
    server = a_server(plan)
    sampler = server.sampler(200)
    drawn = sampler.draw(0)  # nobody at all: once in 10³⁰ draws
    with pytest.raises(ParticipationViolation, match="secret sampler"):
        server.open([*drawn.tolist()[1:]])
    server.step(sums(0, length=0.1), cohort=drawn)
    assert server.round == 1


def test_settings_are_checked() -> None:
    with pytest.raises(InvalidInput, match="protect a user"):
        a_server(a_plan(unit="example"))
    with pytest.raises(InvalidInput, match="floating point"):
        ServerOptimizer({"n": torch.tensor(1)}, a_plan(), clip=1.0, cohort_size=2, optimizer_fn=sgd)
    with pytest.raises(InvalidInput, match="'scale' is trainable but not in the optimizer"):
        a_server(a_plan(), optimizer_fn=lambda p: sgd(p[:1]))
    with pytest.raises(InvalidInput, match="cohort_size"):
        a_server(a_plan(), cohort_size=0)


def test_the_open_round_is_meant_if_no_cohort_is_named() -> None:
    named, meant = a_server(a_plan()), a_server(a_plan())
    for t in range(3):
        expected = named.step(sums(t), cohort=cohort(t))
        meant.open(cohort(t))
        got = meant.step(sums(t))
        assert all(torch.equal(got[name], value) for name, value in expected.items())
        with pytest.raises(InvalidInput, match="no round is open"):
            meant.step(sums(t))
    assert meant.round == 3


def test_a_count_that_would_take_all_names_a_noise_that_does_not() -> None:
    plan = a_plan("identity", noise_multiplier=6.0)
    for clip in (
        QuantileClip(initial=1.0, units=4),
        QuantileClip(initial=1.0, units=4, bit_noise=1.0),
    ):
        with pytest.raises(InvalidInput, match="give bit_noise=") as refused:
            a_server(plan, clip=clip)
        value = float(re.findall(r"bit_noise=([\d.]+)", str(refused.value))[0])
        server = a_server(plan, clip=replace(clip, bit_noise=value))
        # nine tenths of μ² are left: z_Δ = z / √0.9, or a little less
        assert 6.0 < server._release.noise.scale <= 6.0 / math.sqrt(0.9)


def test_a_folder_has_a_statement_from_its_beginning_on(tmp_path: Path) -> None:
    """Killed in its first round, an honest run was refuted for the lack of one."""
    server = a_server(a_plan(), run=tmp_path)
    assert not verify(tmp_path).refuted
    server.close()
