"""What a federated report shows, what it keeps back, and what it does with odd folders."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from noshuffle import MinSeparation, Plan, Poisson
from noshuffle.clipping.adaptive import QuantileClip
from noshuffle.federated import Rounds, ServerOptimizer
from noshuffle.federated.per_user import spending
from noshuffle.noise import test_source as a_source
from noshuffle.report import page as whole_page
from noshuffle.report import read_run, write_report
from noshuffle.report.federated import participations, spending_in

USERS = 12


def a_run(
    path: Path, *, mechanism: str = "tree", clip: Any = 1.0, rounds: int = 5, noise: float = 1.0
) -> Rounds:
    """Rounds of 3 users, the first of them more often; a config as the command line writes it."""
    sampled = mechanism == "poisson"
    rule = Poisson(steps=6, rate=0.3) if sampled else MinSeparation(6, 1, 4)
    plan = Plan.fit(
        rule, mechanism="identity" if sampled else mechanism, noise_multiplier=noise, unit="user"
    )
    server = ServerOptimizer(
        {"w": torch.zeros(2)},
        plan,
        clip=clip,
        cohort_size=3,
        optimizer_fn=lambda p: torch.optim.SGD(p, lr=1.0),
        source=a_source(seed=1) if noise else None,
        run=path,
    )
    if sampled:
        server.sampler(USERS)
    work = Rounds(server)
    assert server.run is not None
    server.run.write_config({"kind": "federated", "task": "toy", "clients_per_round": 3})
    lines = []
    for step in range(rounds):
        order = np.arange(USERS) if sampled else np.array([0, 1, 2 + step, 3 + step])
        invited = work.begin(order)
        assert invited is not None
        for user in invited.users[:-1]:
            work.receive(user, {"w": torch.ones(2)})
        report = work.finish()
        server.run.append_metrics(
            {"step": step + 1, "test_accuracy": 0.5, "clip_norm": server.clip_norm}
        )
        row = {"step": step, "asked": report.asked, "answered": report.answered}
        lines.append(json.dumps({**row, "nonfinite": 0, "refused": 0}))
    (path / "operator.jsonl").write_text("\n".join(lines) + '\n{"step": 9, "as')
    return work


def test_log_and_live_server_tell_the_same(tmp_path: Path) -> None:
    work = a_run(tmp_path / "a")
    alive = spending(work.server)
    assert tuple(spending_in(read_run(tmp_path / "a"))) == alive  # while it is running
    work.close()
    assert tuple(spending_in(read_run(tmp_path / "a"))) == alive
    assert [row.participations for row in alive] == [1, 4]
    assert alive[0].epsilon < alive[1].epsilon


def test_rounds_after_the_last_checkpoint_count(tmp_path: Path) -> None:
    work = a_run(tmp_path / "a", rounds=4)
    before = spending_in(read_run(tmp_path / "a"))
    work.begin(np.array([5, 6, 7]))  # charged, and then the process dies
    after = spending_in(read_run(tmp_path / "a"))
    asked = [sum(row.participations * row.users for row in rows) for rows in (before, after)]
    assert asked == [12, 15]


def test_the_shared_page_has_no_raw_counts(tmp_path: Path) -> None:
    a_run(tmp_path / "a").close()
    page = write_report(tmp_path / "a").read_text()
    assert page.count("<svg") == 3  # ε is not drawn where none holds
    run = read_run(tmp_path / "a")
    said = [s for s in run.statement["assumptions"] if "NOT PRIVATE" not in s]
    private = replace(run, statement={**run.statement, "assumptions": said})
    assert whole_page(private).count("<svg") == 5
    assert "answered" not in page.replace("whether or not the user answered", "")
    assert "<script" not in page
    assert not re.findall(r"(?:src|href)=[\"']https?:", page)
    assert "NOT PRIVATE" in page  # the noise came from a test seed


def test_pictures_speak_of_rounds_and_of_federated_averaging(tmp_path: Path) -> None:
    a_run(tmp_path / "a").close()
    page = write_report(tmp_path / "a").read_text()
    said = set(re.findall(r"<!-- (.*?) -->", page))  # the words of a picture, beside their shapes
    assert {"round", "independent noise (DP-FedAvg)"} <= said
    assert "step" not in said
    assert "DP-SGD" not in page


def test_secret_draws_stay_secret(tmp_path: Path) -> None:
    a_run(tmp_path / "a", mechanism="poisson").close()
    assert spending_in(read_run(tmp_path / "a")) == []
    page = write_report(tmp_path / "a").read_text()
    assert "rounds that a user was asked in" not in page
    assert page.count("<svg") == 2


def test_an_adaptive_clip_is_drawn_and_shares_one_epsilon(tmp_path: Path) -> None:
    clip = QuantileClip(initial=0.1, units=3, bit_noise=2.0)
    work = a_run(tmp_path / "a", mechanism="identity", clip=clip)
    alive = spending(work.server)
    work.close()
    assert len({row.epsilon for row in alive}) == 1
    assert tuple(spending_in(read_run(tmp_path / "a"))) == alive
    page = write_report(tmp_path / "a").read_text()
    assert "<!-- clip norm -->" in page
    assert "<!-- ε per user" not in page


def test_a_run_without_noise_or_counts_still_has_a_page(tmp_path: Path) -> None:
    a_run(tmp_path / "a", noise=0.0).close()
    (tmp_path / "a" / "operator.jsonl").unlink()
    page = write_report(tmp_path / "a").read_text()
    assert "∞" in page


def test_many_counts_become_one_shape(tmp_path: Path) -> None:
    from noshuffle.federated.per_user import Spending

    many = [Spending(c, 5, 1.0) for c in range(1, 200)]
    assert participations(many, most=300).startswith("<svg")


@pytest.mark.parametrize(
    ("missing", "words"), [("plan.json", "no plan.json"), ("log.jsonl", "no log of a run")]
)
def test_half_a_folder_is_one_line(tmp_path: Path, missing: str, words: str) -> None:
    a_run(tmp_path / "a").close()
    (tmp_path / "a" / missing).unlink()
    with pytest.raises(ValueError, match=words):
        write_report(tmp_path / "a")
