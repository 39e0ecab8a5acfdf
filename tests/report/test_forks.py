"""Pages of forks count all that is seen."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import noshuffle as ns
from noshuffle.report import federated, page, plots, read_run

Drawn = list[int]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """Every curve of ε that is drawn from a plan alone."""
    found: Drawn = []
    curve: Callable[..., str] = plots.epsilon_curve

    def noted(plan: ns.Plan, *, last: int, **more: str) -> str:
        found.append(last)
        return curve(plan, last=last, **more)

    monkeypatch.setattr(plots, "epsilon_curve", noted)
    return found


def sums(plan: ns.Plan, run: Path, steps: int, fork_of: Path | None = None) -> ns.PrivateSum:
    """A run of so many steps, one unit in each (or those that are drawn), still open."""
    made = ns.PrivateSum(plan, clip=1.0, shape=(), run=run, fork_of=fork_of)
    drawn = made.sampler(100) if plan.participation.is_sampled else [[i] for i in range(steps)]
    for ids, _ in zip(drawn, range(steps)):
        made.add(np.ones(len(ids)), ids=ids)
    return made


def test_no_curve_of_its_plan_bounds_a_fork(tmp_path: Path, drawn: Drawn) -> None:
    plan = ns.Plan.fit(ns.SinglePass(steps=4), mechanism="tree", epsilon=2.0, delta=1e-5)
    sums(plan, tmp_path / "parent", 4).close()
    sums(plan, tmp_path / "child", 3, tmp_path / "parent").close()
    page(read_run(tmp_path / "child"))
    assert not drawn  # the plan has the part of the fork alone
    page(read_run(tmp_path / "parent"))
    assert drawn == [4]


@pytest.mark.parametrize("has_sampled_parent", [True, False])
def test_the_page_of_a_fork_without_mu_counts_its_parent(
    tmp_path: Path, has_sampled_parent: bool
) -> None:
    """Its trade-off, and what ε means, were those of its own plan."""
    sampled = ns.Plan.fit(
        ns.Poisson(6, 0.1), mechanism="identity", noise_multiplier=1.0, delta=1e-5
    )
    plain = ns.Plan.fit(ns.SinglePass(4), noise_multiplier=2.0, neighbours="add-remove")
    parent, child = (sampled, plain) if has_sampled_parent else (plain, sampled)
    sums(parent, tmp_path / "parent", parent.steps).close()
    sums(child, tmp_path / "child", child.steps, tmp_path / "parent").close()
    run = read_run(tmp_path / "child")
    assert run.statement["mu"] is None
    epsilon, delta, alpha = run.statement["epsilon"], run.statement["delta"], 0.01
    assert epsilon == pytest.approx(parent.epsilon() + child.epsilon())
    least = max(0, 1 - delta - math.exp(epsilon) * alpha, math.exp(-epsilon) * (1 - delta - alpha))
    (misses,) = run.least_misses([alpha])
    assert misses == pytest.approx(least)
    assert misses < child.tradeoff([alpha])[0]
    assert f"<b>{delta:g}</b><span>δ</span>" in page(run)  # not that of the plan: they add up


def test_no_curve_of_its_plan_bounds_a_federated_fork(tmp_path: Path, drawn: Drawn) -> None:
    plan = ns.Plan.fit(
        ns.SinglePass(steps=4), mechanism="tree", epsilon=2.0, delta=1e-5, unit="user"
    )
    sums(plan, tmp_path / "parent", 4).close()
    sums(plan, tmp_path / "child", 4, tmp_path / "parent").close()
    run = read_run(tmp_path / "child")
    told = [caption for _, caption in federated.figures(run)]
    assert not drawn
    assert not any("No user's ε exceeds" in one or "ε of their own" in one for one in told)
    alone = [caption for _, caption in federated.figures(replace(run, ancestors=()))]
    assert any("No user's ε exceeds" in one for one in alone)
