"""`figure2`: rates, tolerated noise and limits by hand, a toy study, verdicts both ways."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from noshuffle.errors import InvalidInput
from noshuffle.experiments import figure2
from noshuffle.experiments.figure import DIFFERS, HOLDS, NOT_TESTED, Request, shipped
from noshuffle.experiments.figure2_view import at_epsilon, curve
from noshuffle.federated.tasks import load_task, without_validation
from noshuffle.strategies import identity

QUICK = shipped("figure2", quick=True)


def test_noise_rates_and_limits_by_hand() -> None:
    settings = {"rounds": 3, "momentum": 0.0, "forget": 1.0, "clients": 10, "separation": 2,
                "max_participations": 2}  # fmt: skip
    assert figure2.felt(identity(), settings) == pytest.approx(math.sqrt(2))  # √((1 + 2 + 3)/3)
    tried = {"0": {"0.1": (50.0, 1.0), "0.2": (60.0, 1.0)}, "2": {"1.6": (90.0, 1.0)}}
    # halfway in log level between 4 and 1: halfway in log rate between 0.2 and 1.6
    assert figure2.rate_at(2.0, [4.0, 2.0, 1.0], tried) == pytest.approx(math.sqrt(0.32))
    assert figure2.tolerated([1.0, 4.0], [80.0, 60.0], 70.0) == pytest.approx(2.0)
    assert figure2.tolerated([1.0, 4.0], [80.0, 60.0], 85.0) is None
    assert figure2.tolerated([1.0, 4.0], [80.0, 60.0], 50.0) is None
    own = figure2.limits({**settings, "rounds": 100}, population=1000, cohort=20)
    assert (own.separation, own.max_participations) == (50, 2)


def test_validation_users_are_kept_apart() -> None:
    task = load_task("digits")
    small = without_validation(task)
    held = {task.users[i] for i in range(8, len(task), 9)}
    assert set(small.users) == set(task.users) - held
    assert len(small.x) + len(small.x_test) == len(task.x)
    user = small.users[20]
    assert np.array_equal(small.client(user)[0].numpy(), task.client(user)[0].numpy())
    with pytest.raises(InvalidInput, match="every"):
        without_validation(task, every=1)


@pytest.mark.slow
def test_a_toy_study_goes_through(tmp_path: Path) -> None:
    settings = {
        **QUICK,
        "rounds": 6,
        "fitted_to": 6,
        "separation": 3,
        "max_participations": 2,
        "mechanisms": ["tree", "identity", "sampled"],
        "points": 3,
        "searched": [0, 2],
        "factors": [1.0],
        "trials": 1,
        "targets": [],
        "relative_targets": [0.086],
        "trained_cohorts": [],
    }
    found: dict[str, Any] = {}
    for cell in figure2.FIGURE.cells(Request(settings=settings, quick=True)):
        assert all(key in found for key in cell.needs)
        found[cell.key] = cell.work(found)
    made = found["digits/mechanisms"]
    for record in made.values():
        assert record["epsilon"] == sorted(record["epsilon"])  # less noise, more ε
        assert record["level"] == sorted(record["level"], reverse=True)
    points, seeds = curve(found, "digits", "tree")
    assert (len(points), seeds) == (3, 1)
    assert "without noise" in figure2.FIGURE.table(found)
    figure2.FIGURE.draw(found, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size > 5_000


def made_up(**shift: float) -> dict[str, Any]:
    """Accuracies that follow the paper's order of mechanisms."""
    base = {"blt": 60.0, "tree": 55.0, "identity": 40.0, "sampled": 50.0, **shift}
    epsilons = [1.0, 4.0, 16.0, 64.0]
    made = {
        name: {"noise": [z * (10 if name == "tree" else 1) for z in (8.0, 4.0, 2.0, 1.0)],
               "level": [8.0, 4.0, 2.0, 1.0], "epsilon": epsilons, "felt": 1.0}
        for name in base
    }  # fmt: skip
    finals = {
        f"t/final/{name}/0": {"rate": [1.0] * 4, "accuracy": [at, at + 2, at + 4, at + 6]}
        for name, at in base.items()
    }
    lines = [
        {"target": f"{word} % below no noise", "accuracy": 1.0, "mechanism": name, "level": 2.0,
         "points": [{"clients": 100, "epsilon": 100 - base[name], "noise": 1.0}]}
        for word in ("2.6", "8.6") for name in base
    ]  # fmt: skip
    none = {"t/final/none/0": {"rate": [1.0], "accuracy": [70.0]}}
    return {"t/mechanisms": made, **finals, **none, "t/computation/1": lines}


def test_claims_hold_and_fail(tmp_path: Path) -> None:
    results = made_up()
    results["t/computation/2"] = []  # lines come from the most trials
    assert figure2.FIGURE.checked(results)[0].verdict == NOT_TESTED
    del results["t/computation/2"]
    results["t/cohort/blt/200"] = {
        "clients": 200,
        "accuracy": 61.0,
        "wanted": 60.0,
        "epsilon": None,
    }
    assert "| trained for 60.00 % | DP-FTRL, BLT | 200: 61.00 % at ε = ∞ |" in (
        figure2.FIGURE.table(results)
    )
    assert [claim.verdict for claim in figure2.FIGURE.checked(results)] == [HOLDS] * 5
    figure2.FIGURE.draw(results, tmp_path / "a.svg")
    assert at_epsilon(curve(results, "t", "blt")[0], 2.0) == pytest.approx(61.0)
    assert at_epsilon(curve(results, "t", "blt")[0], 0.5) is None
    swapped = made_up(tree=30.0, blt=39.0)
    for name in ("tree", "sampled"):
        swapped["t/mechanisms"][name]["noise"] = [1.0, 0.5, 0.25, 0.125]
    assert [claim.verdict for claim in figure2.FIGURE.checked(swapped)] == [DIFFERS] * 5
    assert {claim.verdict for claim in figure2.FIGURE.checked({})} == {NOT_TESTED}


def test_claims_of_several_tasks_hold_on_all(tmp_path: Path) -> None:
    first = made_up()
    other = {key.replace("t/", "other/", 1): value for key, value in made_up(tree=30.0).items()}
    checked = figure2.FIGURE.checked({**first, **other})
    assert [claim.verdict for claim in checked] == [HOLDS, DIFFERS, DIFFERS, DIFFERS, HOLDS]
    assert checked[2].figures.startswith("t HOLDS, tree")
    assert "other DIFFERS" in checked[2].figures
    # a task that is not finished does not decide
    begun = {"other/mechanisms": other["other/mechanisms"]}
    checked = figure2.FIGURE.checked({**first, **begun})
    assert [claim.verdict for claim in checked] == [HOLDS] * 5
    assert "other NOT TESTED, no result of other/" in checked[0].figures
    figure2.FIGURE.draw({**first, **other}, tmp_path / "a.svg")
    assert "2a: other" in (tmp_path / "a.svg").read_text()


def test_tasks_join_where_their_files_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOSHUFFLE_DATA", str(tmp_path))
    asked = Request(settings=shipped("figure2"))

    def heads() -> list[str]:
        return list(dict.fromkeys(c.key.split("/")[0] for c in figure2.FIGURE.cells(asked)))

    assert heads() == ["german_drama"]
    (tmp_path / "shakespeare_roles.jsonl.gz").touch()
    (tmp_path / "stackoverflow.word_count").touch()
    assert heads() == ["german_drama", "shakespeare", "stackoverflow"]
