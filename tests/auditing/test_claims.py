"""Other people's code: a recorder hears what it releases, and false claims are refuted."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from noshuffle.auditing.answers import HOLDS, REFUTED, record_of
from noshuffle.auditing.claim import ClaimAudit, audit_claim
from noshuffle.auditing.curve import epsilon_of
from noshuffle.auditing.recorder import record_optimizer, record_strategy, traces
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.report.audit import section

CANARIES, EPOCHS, STEPS = 2000, 4, 5
DELTA = 1e-5


def stranger(*, noise: float = 1.0, clip: float = 1.0, is_reused: bool = False) -> ClaimAudit:
    """DP-SGD in ten lines, in a fixed order, with one fault or none; claimed: four releases."""
    rng = np.random.default_rng(3)
    coins = rng.random(CANARIES) < 0.5
    weight = torch.nn.Parameter(torch.zeros(CANARIES))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    generator = torch.Generator().manual_seed(1)
    batch = torch.arange(CANARIES) % STEPS
    with record_optimizer(optimizer, weight) as recorder:
        for epoch in range(EPOCHS):
            if is_reused:
                generator.manual_seed(5)
            for step in range(STEPS):
                sign = 1.0 - 2.0 * (epoch % 2)
                total = sign * clip * (torch.from_numpy(coins) & (batch == step)).float()
                weight.grad = total + noise * torch.randn(CANARIES, generator=generator)
                optimizer.step()
    optimizer.step()  # nobody listens any more
    assert len(recorder.rows()) == EPOCHS * STEPS
    own = [range(int(first), EPOCHS * STEPS, STEPS) for first in batch]
    received = traces(recorder.rows(), own)
    return audit_claim(received, coins, epsilon=epsilon_of(2.0, delta=DELTA), delta=DELTA)


def test_an_honest_stranger_holds() -> None:
    found = stranger()
    assert found.answer == HOLDS, found.words()
    assert found.is_shift
    assert found.estimate.low < 2.0 < found.estimate.high + 0.2
    assert found.to_dict()["kind"] == "claim"


@pytest.mark.parametrize(
    ("fault", "mu"), [({"noise": 0.5}, 4.0), ({"clip": 2.0}, 4.0), ({"is_reused": True}, math.inf)]
)
def test_faults_are_refuted(fault: dict[str, Any], mu: float) -> None:
    found = stranger(**fault)
    assert found.answer == REFUTED
    assert found.estimate.mu == pytest.approx(mu, rel=0.1)
    assert "REFUTED" in found.words()
    assert "shown" in section(record_of([found])) or math.isinf(mu)


def test_scores_that_are_no_shift_are_judged_by_guesses_alone() -> None:
    """One member in twenty is shown in full: the two means and the pooled spread mean nothing."""
    rng = np.random.default_rng(4)
    coins = rng.random(4000) < 0.5
    shown = coins & (rng.random(4000) < 0.05)
    received = (rng.standard_normal(4000) + 40.0 * shown)[None]
    found = audit_claim(received, coins, epsilon=0.3, delta=1e-5)
    assert not found.is_shift
    assert found.answer == REFUTED
    assert audit_claim(received, coins, epsilon=60.0, delta=1e-5).answer == HOLDS


def test_an_optimizer_inside_another_is_heard() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    inner = torch.optim.SGD([weight], lr=0.1)
    with record_optimizer(SimpleNamespace(original_optimizer=inner), weight) as recorder:
        inner.step()  # without a gradient: nothing was released but zeros
    assert recorder.rows().tolist() == [[0.0, 0.0, 0.0]]
    with pytest.raises(InvalidInput, match="not one of"):
        record_optimizer(inner, torch.zeros(3))
    with pytest.raises(InvalidInput, match="torch optimizer"):
        record_optimizer("sgd", weight)
    with pytest.raises(InvalidInput, match="nothing was released"):
        record_optimizer(inner, weight).rows()


def test_a_flower_strategy_is_heard() -> None:
    app = pytest.importorskip("flwr.app")
    strategies = pytest.importorskip("flwr.serverapp.strategy")

    def arrays(*values: float) -> Any:
        return app.ArrayRecord({"w": app.Array(np.array(values, dtype=np.float32))})

    class Shifting(strategies.FedAvg):  # type: ignore[misc]
        def configure_train(self, *_: Any) -> list[Any]:
            return []

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            return (arrays(server_round, 0.5), None) if server_round < 3 else (None, None)

    strategy = Shifting()
    with record_strategy(strategy, "w") as recorder:
        for number in (1, 2, 3):
            strategy.configure_train(number, arrays(0.0, 0.25), None, None)
            strategy.aggregate_train(number, [])
    strategy.configure_train(4, arrays(0.0, 0.0), None, None)
    assert recorder.rows().tolist() == [[1.0, 0.25], [2.0, 0.25]]
    with pytest.raises(Unsupported, match="Flower strategy"):
        record_strategy(object(), "w")


def test_a_strategy_of_flower_is_audited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own central DP around FedAvg, with real messages: a client is a canary, or stays away."""
    app = pytest.importorskip("flwr.app")
    strategies = pytest.importorskip("flwr.serverapp.strategy")
    task = pytest.importorskip("flwr.supercore.task_identity").TaskIdentity
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(task, name, 1)
    clients, rounds, noise = 300, 2, 0.5
    coins = np.random.default_rng(0).random(clients) < 0.5
    inner = strategies.FedAvg(min_available_nodes=clients, min_train_nodes=clients)
    strategy = strategies.DifferentialPrivacyServerSideFixedClipping(inner, noise, 1.0, clients)
    grid = SimpleNamespace(get_node_ids=lambda: list(range(clients)))
    arrays = app.ArrayRecord({"w": app.Array(np.zeros(clients, dtype=np.float32))})

    def reply(message: Any) -> Any:
        who, own = message.metadata.dst_node_id, arrays["w"].numpy().copy()
        # Clipped to one by the strategy, which divides by zero (flwr 1.41) where nothing changed.
        own[who] += 3.0 if coins[who] else 1e-6
        content = {
            "arrays": app.ArrayRecord({"w": app.Array(own)}),
            "metrics": app.MetricRecord({"num-examples": 1}),
        }
        return app.Message(app.RecordDict(content), reply_to=message)

    with record_strategy(strategy, "w") as recorder:
        for number in range(1, rounds + 1):
            sent = strategy.configure_train(number, arrays, app.ConfigRecord(), grid)
            arrays, _ = strategy.aggregate_train(number, [reply(message) for message in sent])
    heard = traces(recorder.rows(), [range(rounds)] * clients)
    mu = math.sqrt(rounds) / noise
    fair, half = (epsilon_of(part * mu, delta=DELTA) for part in (1.0, 0.4))
    assert audit_claim(heard, coins, epsilon=fair, delta=DELTA).answer == HOLDS
    assert audit_claim(heard, coins, epsilon=half, delta=DELTA).answer == REFUTED


def test_traces_that_say_nothing_are_refused() -> None:
    coins = np.arange(200) % 3 == 0
    with pytest.raises(InvalidInput, match="neither noise"):
        audit_claim(np.zeros((1, 200)), coins, epsilon=1.0, delta=1e-5)
    with pytest.raises(InvalidInput, match="NaN"):
        audit_claim(np.full((1, 200), np.nan), coins, epsilon=1.0, delta=1e-5)
    with pytest.raises(InvalidInput, match="canaries for"):
        audit_claim(np.zeros((60, 200)), coins, epsilon=1.0, delta=1e-5)
    with pytest.raises(InvalidInput, match="equally many"):
        traces(np.zeros((4, 2), dtype=np.float32), [[0, 1], [1]])
