"""A search costs what its bound says, whatever it finds, and its runs cannot cost more."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from noshuffle import Budget, Plan, Poisson, PrivateSum, SinglePass, tune
from noshuffle.accounting import gaussian
from noshuffle.budget import Cost, Trial
from noshuffle.errors import BudgetExceeded, InvalidInput, NoshuffleError, Unsupported
from noshuffle.noise import test_source as make_source
from noshuffle.release.spending import OTHER_RUNS

DELTA = 1e-6


def plan_for(trial: Trial) -> Plan:
    return _plan(trial.epsilon, trial.delta)


@cache
def _plan(epsilon: float, delta: float) -> Plan:
    return Plan.fit(SinglePass(2), mechanism="tree", epsilon=epsilon, delta=delta)


def run(setting: float, trial: Trial) -> tuple[Any, Any]:
    """A "model" whose score is its setting."""
    sums = PrivateSum(plan_for(trial), clip=1.0, shape=(), budget=trial)
    sums.add([1.0], ids=[1])
    return sums.total, np.full(4000, setting)


def test_a_search_of_twenty_settings_costs_what_its_bound_says(tmp_path: Path) -> None:
    budget = Budget(tmp_path / "b", epsilon=3.0, delta=1e-5, pure=2.0)
    settings = [i / 20 for i in range(20)]
    found = tune(run, settings, epsilon=2.0, repeats=20, budget=budget)
    assert found.statement.epsilon <= 2.0
    assert found.statement.delta == pytest.approx(1e-6)
    assert budget.total().epsilon(1e-5) == pytest.approx(found.statement.epsilon, abs=1e-9)
    said = found.statement.words()
    assert "the search is inside" in said
    assert "bound of Papernot and Steinke" in said
    assert "each with one of 20 settings at random" in said
    assert "This is run 1 of 1 on this data" in said
    assert found.setting in settings
    assert abs(found.score - found.setting) < 0.2
    with pytest.raises(BudgetExceeded):
        tune(run, settings, epsilon=2.0, budget=budget)


def test_the_best_setting_is_found() -> None:
    found = [tune(run, [0.1, 0.5, 0.9], epsilon=8.0, repeats=30).setting for _ in range(5)]
    assert sorted(found)[3] == 0.9
    everything = tune(run, [0.1, 0.9], epsilon=2.0, delta=DELTA, law="all")
    assert everything.setting == 0.9
    assert everything.statement.exact
    assert everything.statement.epsilon <= 2.0 * (1 + 1e-12)


def test_a_run_cannot_cost_more_than_its_share(tmp_path: Path) -> None:
    def dear(setting: float, trial: Trial) -> tuple[Any, Any]:
        plan = Plan.fit(SinglePass(2), mechanism="tree", epsilon=1.01 * trial.epsilon, delta=DELTA)
        return PrivateSum(plan, clip=1.0, shape=(), budget=trial), np.ones(3)

    def twice(setting: float, trial: Trial) -> tuple[Any, Any]:
        return run(setting, trial) and run(setting, trial)

    def apart(setting: float, trial: Trial) -> tuple[Any, Any]:
        return None, np.ones(3)

    def sampled(setting: float, trial: Trial) -> tuple[Any, Any]:
        plan = Plan.fit(Poisson(2, 0.1), mechanism="identity", epsilon=0.1, delta=DELTA)
        return PrivateSum(plan, clip=1.0, shape=(), budget=trial), np.ones(3)

    def seeded(setting: float, trial: Trial) -> tuple[Any, Any]:
        sums = PrivateSum(
            plan_for(trial), clip=1.0, shape=(), budget=trial, source=make_source(seed=1)
        )
        return sums, np.ones(3)

    def kept(setting: float, trial: Trial) -> tuple[Any, Any]:
        sums = PrivateSum(plan_for(trial), clip=1.0, shape=(), budget=trial, run=tmp_path / "r")
        return sums, np.ones(3)

    for wrong, error in [
        (dear, BudgetExceeded),
        (twice, BudgetExceeded),
        (apart, InvalidInput),
        (sampled, Unsupported),
        (kept, Unsupported),
        (seeded, Unsupported),
    ]:
        with pytest.raises(error):
            tune(wrong, [1.0], epsilon=1.0, delta=DELTA)
    with pytest.raises(InvalidInput, match="one score per validation unit"):
        tune(lambda s, t: (run(s, t)[0], 0.5), [1.0], epsilon=1.0, delta=DELTA)
    public = tune(lambda s, t: (run(s, t)[0], s), [0.5], epsilon=1.0, score_share=0.0)
    assert public.score == 0.5


def test_runs_in_other_processes_are_not_let_in() -> None:
    """What a worker's copy of a trial counts would be added up by nobody."""

    def pickled(setting: float, trial: Trial) -> tuple[Any, Any]:
        assert run(setting, trial)
        return run(setting, pickle.loads(pickle.dumps(trial)))

    with pytest.raises(Unsupported, match="copy of what a run of a search draws on"):
        tune(pickled, [1.0], epsilon=1.0, delta=DELTA)

    def forked(setting: float, trial: Trial) -> tuple[Any, Any]:
        if (child := os.fork()) == 0:
            try:
                run(setting, trial)
            except Unsupported:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        return run(setting, trial)

    tune(forked, [1.0], epsilon=1.0, delta=DELTA)
    found = tune(lambda s, t: (t, run(s, t)[1]), [1.0], epsilon=1.0, delta=DELTA)
    assert pickle.loads(pickle.dumps(found)).statement == found.statement  # a result may be kept


def test_threads_of_a_run_do_not_pass_its_share_together(monkeypatch: pytest.MonkeyPatch) -> None:
    known, meet = Cost.epsilon, threading.Barrier(2)

    def slow(self: Cost, delta: float) -> float:
        found = known(self, delta)
        with contextlib.suppress(threading.BrokenBarrierError):
            meet.wait(0.2)  # both have looked before one of them is written down
        return found

    monkeypatch.setattr(Cost, "epsilon", slow)

    def both(setting: float, trial: Trial) -> tuple[Any, Any]:
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(run, setting, trial) for _ in range(2)]
            errors = [one.exception() for one in asked]
        assert sorted(type(one).__name__ for one in errors) == ["BudgetExceeded", "NoneType"]
        return next(one.result() for one in asked if one.exception() is None)

    tune(both, [1.0], epsilon=1.0, delta=DELTA)


def test_scores_have_their_noise() -> None:
    """The deviation of a score is 1/μ; two thirds or three halves of it is not taken for it."""
    share, rows = 0.2, 100

    def scored(setting: float, trial: Trial) -> tuple[Any, Any]:
        return run(setting, trial)[0], np.full(rows, setting)

    def scores(setting: float) -> np.ndarray:
        more = {"epsilon": 1.0, "delta": DELTA, "law": "all", "score_share": share}
        return np.array([tune(scored, [setting], **more).score for _ in range(80)])

    mu = gaussian.mu(epsilon=1.0, delta=DELTA) * math.sqrt(share)
    assert 0.72 < float(np.std(scores(0.5))) * rows * mu < 1.4
    assert float(np.mean(scores(math.nan))) < 0.05  # no score counts as the worst


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"epsilon": 0.05, "delta": 1e-2}, "smaller delta"),
        ({"epsilon": 8.0, "repeats": 1e300}, r"at most 1,000,000 runs on average, got 1e\+300"),
        ({"epsilon": 8.0, "score_share": 1.0}, "score_share"),
    ],
)
def test_a_search_that_is_refused_is_not_charged(
    tmp_path: Path, asked: dict[str, Any], match: str
) -> None:
    budget = Budget(tmp_path / "b", epsilon=9.0, delta=0.5, pure=8.5)
    with pytest.raises(InvalidInput, match=match):
        tune(run, [1.0], budget=budget, **asked)
    assert not budget.entries()


@pytest.mark.parametrize("error", [OSError(28, "full"), NoshuffleError("full")])
def test_a_full_disk_does_not_lose_what_a_search_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It is charged as it was reserved, which is what it costs."""
    budget = Budget(tmp_path / "b", epsilon=4.0, delta=1e-5)
    monkeypatch.setattr("noshuffle.budget.budget.Place.settle", Mock(side_effect=error))
    with pytest.warns(RuntimeWarning, match="stays charged as it was reserved"):
        found = tune(run, [0.2, 0.9], epsilon=3.0, law="all", budget=budget)
    assert found.setting == 0.9
    assert OTHER_RUNS in found.statement.assumptions
    (entry,) = budget.entries()
    assert entry.is_open
    assert budget.total().mu == pytest.approx(found.statement.mu)


@pytest.mark.parametrize(("law", "share"), [("geometric", 0.1), ("all", 0.0)])
def test_a_search_says_what_it_does_not_count_and_what_stays_secret(law: str, share: float) -> None:
    """Only statements of runs and of searches with a budget spoke of other runs."""

    def scored(setting: float, trial: Trial) -> tuple[Any, Any]:
        model, scores = run(setting, trial)
        return model, scores if share else float(scores[0])

    told = tune(scored, [0.1, 0.2], epsilon=1.0, law=law, score_share=share).statement
    assert told.assumptions.count(OTHER_RUNS) == 1
    (kept,) = (said for said in told.assumptions if said.startswith("Only the best run"))
    assert ("noisy score" in kept) == (share > 0)  # a public score has no noise
    assert ("How many runs" in kept) == (law != "all")  # otherwise everybody knows
