"""What was spent: prefixes, forks, and the sentences that recorded facts add."""

from __future__ import annotations

import math

import numpy as np
import pytest

from noshuffle.accounting import gaussian
from noshuffle.errors import InvalidInput
from noshuffle.participation import Epochs, MinSeparation, Poisson, SinglePass
from noshuffle.plan import Plan
from noshuffle.plan.statement import of_stops
from noshuffle.release.spending import (
    ADAPTIVE_CLIP,
    OTHER_RUNS,
    OWN_LOG,
    Ancestor,
    notes_of,
    spent,
)
from noshuffle.strategies import identity, tree


def plan_of(rule=None, z=3.0, **options):
    rule = rule or Epochs(epochs=3, steps_per_epoch=4)
    strategy = identity() if rule.is_sampled else tree()
    return Plan(participation=rule, strategy=strategy, noise_multiplier=z, **options)


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(),
        plan_of(SinglePass(steps=12)),
        plan_of(accountant="rdp"),
        plan_of(z=0.0),
        plan_of(neighbours="replace-one"),
    ],
    ids=["epochs", "single pass", "rdp", "no noise", "replace-one"],
)
def test_a_prefix_costs_what_the_plan_says_and_the_record_is_consistent(plan):
    before = 0.0
    for released in range(plan.steps + 1):
        statement = spent(plan, released)
        assert statement.epsilon == plan.epsilon_after(released)
        assert statement.epsilon >= before
        before = statement.epsilon
        if plan.accountant == "exact" and 0 < statement.epsilon < math.inf:
            again = gaussian.epsilon(mu=statement.mu, delta=statement.delta)
            assert again == pytest.approx(statement.epsilon, rel=1e-9)
            assert statement.sensitivity == pytest.approx(statement.mu * plan.noise_multiplier)
    assert spent(plan, plan.steps) == plan.statement()
    with pytest.raises(InvalidInput, match="covers 12"):
        spent(plan, 13)


def test_forks_add_up():
    plan, old = plan_of(), plan_of(SinglePass(steps=5), z=1.5)
    ancestors = (Ancestor(old, 5), Ancestor(old, 0))
    statement = spent(plan, 12, ancestors=ancestors)
    mu = math.hypot(plan.mu(), old.mu())
    assert statement.mu == pytest.approx(mu)
    assert statement.epsilon == pytest.approx(gaussian.epsilon(mu=mu, delta=plan.delta))
    assert any("fork" in s for s in statement.assumptions)
    assert [Ancestor.from_dict(a.to_dict()) for a in ancestors] == list(ancestors)
    sampled = plan_of(Poisson(steps=5, rate=0.1), neighbours="zero-out")
    both = spent(sampled, 5, ancestors=(Ancestor(old, 5),))
    assert both.epsilon == pytest.approx(sampled.epsilon() + old.epsilon())
    assert both.delta == pytest.approx(2e-5)
    assert not both.exact
    with pytest.raises(InvalidInput, match="keep the unit"):
        spent(plan_of(unit="user"), 12, ancestors=ancestors)


@pytest.mark.parametrize("released", [1, 3, 4, 5, 8, 11])
def test_a_stopped_run_states_the_sensitivity_of_its_rows(released):
    """Completion and least squares: the first rows are not those of a shorter run."""
    for strategy in (tree(restart_every=4, completion=True), tree("full"), tree(restart_every=6)):
        plan = Plan(
            participation=Epochs(epochs=3, steps_per_epoch=4),
            strategy=strategy,
            noise_multiplier=3.0,
        )
        rows = strategy.noising(12)[:released]
        X = np.linalg.inv(rows @ rows.T)
        squared = max(X[j::4, j::4].sum() for j in range(4))
        statement = spent(plan, released)
        assert statement.exact
        assert statement.squared_sensitivity == pytest.approx(squared, rel=1e-9)
        assert statement.mu == pytest.approx(math.sqrt(squared) / 3.0, rel=1e-9)
        fork = spent(plan, released, ancestors=[Ancestor(plan, released)])
        assert fork.mu == pytest.approx(math.sqrt(2 * squared) / 3.0, rel=1e-9)
        assert fork.squared_sensitivity == pytest.approx(2 * squared, rel=1e-9)


def test_a_stopped_run_says_that_no_result_stopped_it():
    """A length that results decide has the guarantee that was fixed beforehand."""
    plan = plan_of()
    (said,) = of_stops(spent(plan, 5).assumptions)
    assert said.startswith("No result decided to stop after step 5; if one did, this run counts")
    assert not of_stops([*spent(plan, 12).assumptions, *spent(plan, 0).assumptions])
    once = Plan(participation=SinglePass(steps=9), strategy=identity(), noise_multiplier=3.0)
    assert not of_stops(spent(once, 5).assumptions)  # ε is the same wherever it stops
    inherited = of_stops(spent(plan, 12, ancestors=[Ancestor(plan, 5)]).assumptions)
    assert inherited == [f"Of an earlier run: {said}"]


def test_facts_become_sentences():
    plain = {"test_key": "no", "adaptive_clip": "no"}
    assert notes_of(plain) == (OTHER_RUNS, OWN_LOG)
    said = notes_of(
        {
            "test_key": "yes",
            "adaptive_clip": "yes",
        }
    )
    assert len(said) == 4
    assert said[0].startswith("NOT PRIVATE")
    said = notes_of(
        {
            **plain,
            "ids": "names",
            "initial": "ImageNet",
            "starts": "3",
            "first": "1970-01-01",
            "last": "1970-01-02",
            "version": "9",
            "torch": "8",
            "records": "77",
            "clip": "Flat(1)",
            "divisor": "5",
            "noise_scale": "2.5",
        }
    )
    for words in ("by names", "ImageNet", "3 processes", "from 1970-01-01 to 1970-01-02", "77"):
        assert any(words in line for line in said), words


def test_an_unfinished_run_with_an_adaptive_clip_states_the_whole_plan():
    """Its budget was split for all participations: a part of the run may cost more than its part.

    S² / z_Δ² + k / (2σ_b)² = S² / z² over the whole run; over one participation of four the first
    term shrinks more slowly than the plan's own figure says.
    """
    plan = Plan(
        participation=MinSeparation(64, 16, 4),
        strategy=tree(restart_every=16),
        noise_multiplier=3.0,
    )
    part = spent(plan, 1, notes=(ADAPTIVE_CLIP,))
    assert part.epsilon == plan.epsilon() > spent(plan, 1).epsilon
    assert spent(plan, 0, notes=(ADAPTIVE_CLIP,)).epsilon == 0
    fresh = spent(plan, 0, ancestors=[Ancestor(plan, 1, is_adaptive=True)])
    assert fresh.epsilon == pytest.approx(plan.epsilon())
    assert Ancestor.from_dict(Ancestor(plan, 1, is_adaptive=True).to_dict()).is_adaptive
