"""Canaries in real training runs: what is claimed is found, what is broken is refuted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import noshuffle.strategies as st
from noshuffle.auditing.answers import HOLDS, REFUTED
from noshuffle.auditing.canaries import Canaries, estimate
from noshuffle.auditing.membership import attack
from noshuffle.auditing.one_run import best_guesses, epsilon_bound, mu_bound
from noshuffle.auditing.training_run import audit_training
from noshuffle.cli import main
from noshuffle.datasets import load
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.noise import NoiseStream
from noshuffle.noise import test_source as make_source
from noshuffle.participation import Epochs, MinSeparation, Poisson, SinglePass
from noshuffle.plan import Plan
from noshuffle.release.private_sum import PrivateSum
from noshuffle.training import RunFolder, privatize
from noshuffle.training.models import build

X = torch.randn(96, 5, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] > 0).long()


def audited(plan: Plan, **options: Any) -> dict[str, Any]:
    """Findings by what was looked at."""
    found = audit_training(plan, torch.nn.Linear(5, 2), X, Y, canaries=4000, **options)
    return dict(zip(("iterates", "final", "people"), found, strict=True))


@pytest.mark.filterwarnings("error::noshuffle.errors.ProbablyNotMeant")  # of large batches
@pytest.mark.parametrize(
    ("participation", "strategy"),
    [
        (Epochs(3, 8), st.blt((0.95, 0.5), (0.2, 0.3))),
        (MinSeparation(24, 6, 3), st.tree("honaker", restart_every=12, completion=True)),
        (SinglePass(24), st.identity()),
    ],
)
def test_a_clean_run_shows_what_it_claims(participation: Any, strategy: st.Strategy) -> None:
    plan = Plan.fit(participation, mechanism=strategy, epsilon=8.0)
    found = audited(plan)
    assert [own.answer for own in found.values()] == [HOLDS] * 3
    white, final = found["iterates"], found["final"]
    assert white.reachable_mu == pytest.approx(white.claimed_mu, rel=1e-3)
    # Five standard errors around the claim; a tenth less is outside of them.
    error = (white.estimate.high - white.estimate.low) / 3.92
    assert abs(white.estimate.mu - white.claimed_mu) < 5 * error
    assert 5 * error < 0.2 * white.claimed_mu
    assert abs(final.estimate.mu - final.reachable_mu) < 5 * error
    assert 0 < white.guesses.mu < white.claimed_mu
    assert 0 < white.guesses.epsilon < 8.0


def test_half_the_noise_is_refuted_by_the_iterates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def weak(*given: Any, scale: float, **more: Any) -> NoiseStream:
        return NoiseStream(*given, scale=scale / 2, **more)

    monkeypatch.setattr("noshuffle.release.release.NoiseStream", weak)
    found = audited(Plan.fit(Epochs(3, 8), mechanism="sqrt", epsilon=4.0))
    assert found["iterates"].answer == REFUTED
    assert found["iterates"].estimate.mu == pytest.approx(2 * found["iterates"].claimed_mu, rel=0.1)


def test_users_are_clipped_as_one_and_audited_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan.fit(Epochs(2, 6), mechanism="sqrt", epsilon=4.0, unit="user")
    assert audited(plan, examples=3)["iterates"].answer == HOLDS

    class Alone:
        """The same run, in which every row is a user of its own: three times the claim."""

        def __init__(self, *given: Any, **settings: Any) -> None:
            self.private = privatize(*given, **settings)

        def advance(self, loss: Any, batch: Any, *, ids: torch.Tensor) -> None:
            self.private.advance(loss, batch, ids=ids + 10**6 * torch.arange(len(ids)))

        def close(self) -> None:
            self.private.close()

    monkeypatch.setattr("noshuffle.auditing.training_run.privatize", Alone)
    broken = audited(plan, examples=3)["iterates"]
    assert broken.answer == REFUTED
    assert broken.estimate.mu == pytest.approx(3 * broken.claimed_mu, rel=0.1)


def test_what_canaries_cannot_audit_is_refused() -> None:
    plan = Plan.fit(SinglePass(4), mechanism="sqrt", epsilon=4.0)
    with pytest.raises(InvalidInput, match="user"):
        Canaries.of(plan, count=100, examples=2)
    with pytest.raises(Unsupported, match="sampling"):
        Canaries.of(
            Plan.fit(Poisson(4, 0.1), mechanism="identity", noise_multiplier=1.0), count=100
        )
    with pytest.raises(InvalidInput, match="either side"):
        estimate(np.zeros(12), np.arange(12) < 11)
    with pytest.raises(InvalidInput, match="at least 20"):
        best_guesses(np.zeros(3), np.zeros(3, dtype=bool), delta=1e-5)
    with pytest.raises(InvalidInput, match="members"):
        attack(np.zeros(5), np.arange(5) < 2, claimed_mu=1.0)


def test_bounds_from_guesses_hold_and_grow() -> None:
    rng = np.random.default_rng(0)
    is_false = 0
    for _ in range(15):
        coins = rng.random(400) < 0.5
        found = best_guesses(rng.standard_normal(400) + coins, coins, delta=1e-5)
        is_false += found.mu > 1.0
    assert is_false <= 4  # at most one in twenty by the bound, and it is far from tight here
    assert mu_bound(m=5000, r=250, v=240, level=0.05) > mu_bound(m=5000, r=250, v=220, level=0.05)
    assert mu_bound(m=100, r=50, v=25, level=0.05) == 0.0
    assert epsilon_bound(m=100, r=50, v=25, delta=1e-5, level=0.05) == 0.0
    # All of a thousand pure guesses right, δ = 0: q^1000 = 0.05.
    q = 0.05 ** (1 / 1000)
    bound = epsilon_bound(m=1000, r=1000, v=1000, delta=0.0, level=0.05)
    assert bound == pytest.approx(np.log(q / (1 - q)), rel=2e-3)


def test_an_overfitted_model_gives_its_members_away() -> None:
    rng = np.random.default_rng(2)
    coins = rng.random(2000) < 0.5
    losses = rng.normal(size=2000) - 3.0 * coins
    told = attack(losses, coins, claimed_mu=0.5)
    assert told.answer == REFUTED
    assert told.area > 0.9
    assert attack(losses, coins, claimed_mu=4.0).answer == HOLDS


def test_train_and_page_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan.fit(Epochs(2, 6), mechanism="tree", epsilon=8.0)
    path, page = tmp_path / "plan.json", tmp_path / "audit.html"
    path.write_text(plan.to_json())
    options = ["--train", "--canaries", "2000", "--json", "--page", str(page)]
    assert main(["audit", str(path), *options]) == 0
    parts = json.loads(capsys.readouterr().out)["parts"]
    kinds = ["plan", "canaries", "canaries", "membership"]
    assert [part["kind"] for part in parts] == kinds
    assert page.read_text().count("<svg") == 4
    assert main(["audit"]) == 2


def test_a_run_folder_is_audited_and_its_report_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run = load("digits"), str(tmp_path / "run")
    plan = Plan.fit(Epochs(1, 5), mechanism="tree", epsilon=8.0)
    RunFolder(run).write_config({"data": "digits", "model": "linear", "batch_size": 200})
    model = build("linear", data.shape, data.classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    private = privatize(model, optimizer, plan, clip_norm=1.0, batch_size=200, run=run)
    for step in range(5):
        rows = torch.arange(200 * step, 200 * step + 200)
        private.step(torch.nn.CrossEntropyLoss(), data.x_train[rows], data.y_train[rows], ids=rows)
    private.save()
    private.close()
    assert main(["report", run]) == 0
    assert main(["audit", run, "--save"]) == 0
    told = capsys.readouterr().out
    assert "from the emitted noise" in told
    assert "Second opinion" in (tmp_path / "run" / "report.html").read_text()
    assert main(["verify", run]) in (0, 3)
    statement = tmp_path / "run" / "statement.json"
    record = json.loads(statement.read_text())
    statement.write_text(json.dumps({**record, "epsilon": 0.9 * record["epsilon"]}))
    assert main(["audit", run]) == 1
    assert "REFUTED" in capsys.readouterr().out


def test_too_few_canaries_are_refused_before_anything_is_trained() -> None:
    plan = Plan.fit(SinglePass(24), mechanism=st.identity(), epsilon=8.0)
    trained: list[int] = []
    with pytest.raises(InvalidInput, match="canaries must be a whole number from 80"):
        audit_training(
            plan, torch.nn.Linear(5, 2), X, Y, canaries=79, progress=lambda n: trained.append(n)
        )
    assert not trained


def test_an_audit_says_which_part_of_a_statement_it_did_not_look_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It answered HOLDS of forks, whose parents it knows nothing of, and where no ε holds."""
    plan = Plan.fit(SinglePass(4), mechanism="tree", epsilon=2.0)

    def finished(run: Any, **how: Any) -> None:
        sums = PrivateSum(plan, clip=1.0, shape=(), run=run, **how)
        for step in range(4):
            sums.add([1.0], ids=[step])
        sums.close()

    finished(tmp_path / "parent")
    finished(tmp_path / "child", fork_of=tmp_path / "parent")
    finished(tmp_path / "seeded", source=make_source(seed=1))
    assert main(["audit", str(tmp_path / "parent")]) == 0
    assert main(["audit", str(tmp_path / "seeded")]) == 3
    assert "not checked: NOT PRIVATE: the noise comes from a named test seed" in (
        capsys.readouterr().out
    )
    assert main(["audit", str(tmp_path / "child"), "--json"]) == 3
    (part, *_) = json.loads(capsys.readouterr().out)["parts"]
    assert "1 earlier run, which" in part["left_out"]
    own = part["stops"][-1]  # its own part is still compared with what it alone may cost
    assert own["stated"] == pytest.approx(plan.epsilon()) == pytest.approx(own["low"])
