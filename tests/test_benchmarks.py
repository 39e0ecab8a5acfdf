"""The arithmetic of benchmarks that a claim of the documents rests on."""

from __future__ import annotations

import importlib
import sys
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from noshuffle.strategies import blt
from noshuffle.strategies.workload import Workload, cooldown

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module(name)


@pytest.mark.parametrize("seed", range(5))
def test_what_noise_is_worth_under_weights(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest share of a weighted mean over all cohorts and users, one by one."""
    baseline = load("flower_baseline", monkeypatch)
    weights, clients = np.random.default_rng(seed).integers(1, 20, 8), 4
    largest = max(w / sum(group) for group in combinations(weights, clients) for w in group)
    found = baseline.true_multiplier(3.0, weights, clients=clients)
    assert found == pytest.approx(3.0 / (clients * largest))
    assert baseline.true_multiplier(3.0, np.full(8, 7), clients=clients) == pytest.approx(3.0)


@pytest.mark.parametrize("alpha", [1.0, 0.9])
def test_noise_of_the_iterates_is_that_of_the_matrices(
    alpha: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that forgets, as matrices; without forgetting, the workload of the library."""
    bench, n, beta = load("workload_error", monkeypatch), 24, 0.7
    strategy = blt(decays=(0.9, 0.4), scales=(0.2, 0.1), taps=(0.3,), lag=6)
    rates = np.array(cooldown(n))
    keep = np.diag(1 - (1 - alpha) * rates[1:], -1)  # θ_t − keep·θ_{t−1} = η_t·(1−β)·m_t
    heavy = np.eye(n) - beta * np.eye(n, k=-1)
    A = np.linalg.inv(np.eye(n) - keep) @ np.diag(rates * (1 - beta)) @ np.linalg.inv(heavy)
    if alpha == 1:
        assert np.allclose(A, (1 - beta) * Workload(beta, tuple(rates)).matrix(n))
    squared = np.sum((A @ strategy.noising(n)) ** 2, axis=1)
    found = bench.felt(strategy, rates, beta=beta, alpha=alpha)
    assert np.allclose(np.square(found), [squared.mean(), squared[-6:].mean(), squared[-1]])
    met = max(sum(A[-1, place + 6 * lap] for lap in range(4)) for place in range(6))
    assert bench.floor(rates, epochs=4, beta=beta, alpha=alpha) == pytest.approx(met)


def test_split_benchmarks_have_all_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers are imported when their row is made, so the tables can be had without any of them."""
    step = load("step_gpu", monkeypatch)
    names = set(step.methods(fuse=True))
    assert {
        "SGD, CUDA graph",
        "ours, compiled and fused",
        "Opacus, ghost",
        "fastDP, MixOpt",
        "jax-privacy, jit",
    } <= names
    speed = load("federated_speed", monkeypatch)
    assert {name.partition(" ")[0] for name in speed.WORKERS} == {"ours,", "Flower", "pfl"}


class Engine:
    """Knows linear layers and tables only, and says a lot, as fastDP's does."""

    origins: ClassVar[list[Any]] = []

    def __init__(self, module: nn.Module, *, origin_params: Any, **_: Any) -> None:
        print("Number of trainable components")
        self.origins.append(origin_params)
        self.named_params = list(module.named_parameters())
        rules = (nn.Linear, nn.Embedding)
        self.named_layers = [own for own in module.named_modules() if type(own[1]) in rules]

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


class Placed(nn.Module):
    """Tokens with a parameter of the model's own, and another layer between."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(1, 1, 4))
        self.token, self.between, self.head = nn.Embedding(99, 4), between, nn.Linear(4, 99)


def test_fastdp_is_measured_where_it_does_the_same_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It freezes what it has no rule for, and does not see that a weight is tied."""
    monkeypatch.setitem(sys.modules, "fastDP", SimpleNamespace(PrivacyEngine=Engine))
    monkeypatch.setattr(Engine, "origins", [])
    steps = load("step_peers", monkeypatch)

    def made(model: nn.Module, *, has_origin: bool = False) -> Any:
        optimizer = torch.optim.SGD(model.parameters())
        loss = lambda: model.head.weight.sum()  # noqa: E731
        return steps.fastdp_step(model, optimizer, loss, batch_size=4, has_origin=has_origin)

    model = Placed(nn.Identity())
    assert made(model).note == "does not train start"
    assert not model.start.requires_grad
    assert model.head.weight.requires_grad
    assert made(nn.ModuleDict({"head": nn.Linear(4, 2)}), has_origin=True).note == ""
    made(Placed(nn.Identity()), has_origin=True)
    assert Engine.origins == [None, ["head.bias"], ["token.weight"]]
    with pytest.raises(RuntimeError, match=r"no rule for 1\d% of the model: start, between"):
        made(Placed(nn.LSTM(4, 4)))
    tied = Placed(nn.Identity())
    tied.head.weight = tied.token.weight
    with pytest.raises(RuntimeError, match="tied"):
        made(tied)
    assert capsys.readouterr().out == ""


def test_rows_by_torch_are_made_without_the_c_step(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = load("noise_cpu", monkeypatch)
    known, seen = noise.c_step.library(), []
    noise.by_torch(lambda: seen.append(noise.c_step.library()))
    assert seen == [None]
    assert noise.c_step.library() is known
    for row in noise.draws(3000).values():
        row.do()


MARKDOWN = """
gpt2-small, batch 32, bf16; 3 rounds

| step | ms (fastest to slowest round) | GiB |
|---|---|---|
| plain SGD | 80.0 (79.0 to 81.0) | 20.0 |
| private step, fast | {ms} (90.0 to 91.0) | 25.0 |
| Opacus | not measured: absent | |
"""
COLUMNS = """
setting               accountant         epsilon  median s
q 0.004, 4,800 steps  noshuffle upper    1.47902    0.5000
q 0.004, 4,800 steps  dp-accounting      failed: absent
q 0.01, 4,800 steps   noshuffle upper    8.02433    0.2500
"""


def test_rows_of_two_versions_are_matched_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    against = load("against", monkeypatch)
    item = against.Compared("x", "", "", "ms .*|GiB", "plain")
    title, time = "gpt2-small, batch 32, bf16", "ms (fastest to slowest round)"
    assert against.readings(MARKDOWN.format(ms="100.0"), item) == {
        (title, "plain SGD", time): 80.0,
        (title, "private step, fast", time): 1.25,
        (title, "plain SGD", "GiB"): 20.0,
        (title, "private step, fast", "GiB"): 1.25,
    }
    steps = against.Compared("x", "", "", "median s", names=2)
    assert against.readings(COLUMNS, steps) == {
        ("", "q 0.004, 4,800 steps · noshuffle upper", ""): 0.5,
        ("", "q 0.01, 4,800 steps · noshuffle upper", ""): 0.25,
    }
    rate = against.Compared("x", "", "", "rounds/s")
    assert against.readings("| engine | rounds/s |\n|---|---|\n| ours | 4.0 |", rate) == {
        ("", "ours", ""): 250.0
    }


@pytest.mark.parametrize(("after", "is_worse"), [("102.0", False), ("104.0", True)])
def test_more_than_three_percent_is_worse(
    after: str, is_worse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the median of the turns: one slow turn of three decides nothing."""
    against = load("against", monkeypatch)
    item = against.Compared("x", "", "", "ms .*", "plain")
    match = against.Match(item, "", against.Side(FOLDER), against.Side(FOLDER))
    for side, turns in ((match.before, ("100.0",) * 3), (match.after, (after, "180.0", "99.0"))):
        for ms in turns:
            for row, value in against.readings(MARKDOWN.format(ms=ms), item).items():
                side.values.setdefault(row, []).append(value)
        match.turns = 3
    text, worse = against.document([match])
    assert match.is_worse is is_worse
    assert worse == int(is_worse)
    assert ("**worse**" in text) is is_worse
    assert f"{float(after) / 100:.3f}" in text


def test_phases_of_a_step_are_functions_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    found = load("step_cpu", monkeypatch).phase_functions()
    assert [name for owner, name, _ in found if not callable(getattr(owner, name, None))] == []
    assert len({label for *_, label in found}) == len(found)
