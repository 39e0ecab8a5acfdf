"""Secret draws in stages: one guarantee over all of them, beside brute force; fresh draws."""

from __future__ import annotations

import math

import numpy as np
import pytest

from noshuffle import Plan
from noshuffle.accounting import fourier
from noshuffle.auditing.draws import audit_draws
from noshuffle.budget.cost import cost_of
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.participation import (
    BallsInBins,
    CyclicPoisson,
    DrawnStages,
    Participation,
    Poisson,
    SeparatedBins,
    from_dict,
)
from noshuffle.plan_accountant import sampled_release
from noshuffle.release.sampler_kinds import make_sampler
from noshuffle.strategies import banded, identity
from noshuffle.strategies.phases import Phases, StrategyPhase

DELTA = 1e-3


def stage_losses(shifts: np.ndarray, z: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Losses and masses of P and Q of one secret position of two, by a grid over the two rows.

    shifts[j] is what the unit adds to the rows at position j.
    """
    x = np.linspace(-9 * z, 9 * z + 3, 301)
    a, b = np.meshgrid(x, x)
    q = np.exp(-(a * a + b * b) / (2 * z * z))
    q /= q.sum()
    ratio = np.mean(
        [np.exp((a * u + b * v - (u * u + v * v) / 2) / z**2) for u, v in shifts], axis=0
    )
    return np.log(ratio).ravel(), (q * ratio).ravel(), q.ravel()


def composed_delta(
    first: tuple[np.ndarray, np.ndarray, np.ndarray],
    second: tuple[np.ndarray, np.ndarray, np.ndarray],
    epsilon: float,
) -> float:
    """E(1 − e^{ε − l₁ − l₂})₊ over all pairs of outcomes, the larger of the directions."""
    found = []
    for sign in (1, -1):
        (l1, *m1), (l2, *m2) = ((sign * part[0], part[1], part[2]) for part in (first, second))
        (p1, q1), (p2, q2) = (m[::sign] for m in (m1, m2))
        order = np.argsort(l2)
        over_p = np.append(np.cumsum(p2[order][::-1])[::-1], 0.0)
        over_q = np.append(np.cumsum(q2[order][::-1])[::-1], 0.0)
        at = np.searchsorted(l2[order], epsilon - l1, side="right")
        found.append(float(p1 @ over_p[at] - math.exp(epsilon) * (q1 @ over_q[at])))
    return max(found)


def two_rows(strategy) -> np.ndarray:
    """What a unit adds to the two rows C x of a stage, at its first or second step."""
    return np.abs(strategy.encoder(2)).T


@pytest.mark.parametrize("correlated", [False, True])
def test_two_stages_of_one_position_beside_all_outcomes(correlated: bool) -> None:
    noise = banded([1.0, 0.4]) if correlated else identity()
    plan = Plan(participation=BallsInBins(1, 2), strategy=noise, noise_multiplier=1.5, delta=DELTA)
    both = plan.extended(epochs=1, mechanism=identity())
    first, second = stage_losses(two_rows(noise), 1.5), stage_losses(np.eye(2), 1.5)
    epsilon = both.epsilon()
    assert composed_delta(first, second, epsilon) <= DELTA
    assert composed_delta(first, second, 0.93 * epsilon) > DELTA  # nothing much is given away
    # as if the second stage were the run, or the larger of the two counted
    alone = Plan(participation=BallsInBins(1, 2), strategy=identity(), noise_multiplier=1.5,
                 delta=DELTA)  # fmt: skip
    careless = max(plan.epsilon(), alone.epsilon())
    assert composed_delta(first, second, careless) > 2 * DELTA
    # ε at one δ does not compose: the whole curve does, and is what the stages are held to
    for delta in (1e-2, 1e-4):
        at = sampled_release(both, both.steps).epsilon(delta=delta)
        assert composed_delta(first, second, at) <= delta


def test_two_stages_of_turns_are_one_composition_of_all_turns() -> None:
    plan = Plan(
        participation=CyclicPoisson(8, 2, 0.3), strategy=banded([1.0, 0.5]), noise_multiplier=1.7
    )
    both = plan.extended(steps=6, mechanism=banded([1.0, 0.2]))
    z1, z2 = 1.7 / math.hypot(1, 0.5), 1.7 / math.hypot(1, 0.2)
    stated = fourier.compose([(z1, 0.3, 4), (z2, 0.3, 3)]).epsilon(delta=both.delta)
    assert both.epsilon() == pytest.approx(stated, rel=1e-9)
    assert both.epsilon_after(8) == plan.epsilon()
    whole = plan.extended(steps=6)  # the same noise goes on, as before
    assert isinstance(whole.participation, CyclicPoisson)
    replaced = Plan(
        participation=CyclicPoisson(8, 2, 0.3), strategy=banded([1.0, 0.5]), noise_multiplier=1.7,
        neighbours="replace-one",
    )  # fmt: skip
    twice = replaced.extended(steps=6, mechanism=banded([1.0, 0.2]))
    assert twice.epsilon() > both.epsilon() * 1.3


@pytest.mark.parametrize(
    ("part", "more"),
    [
        (BallsInBins(2, 6), {"epochs": 1, "steps_per_epoch": 4}),
        (SeparatedBins(3, 6, 2), {"epochs": 2}),
        (CyclicPoisson(12, 3, 0.4), {"steps": 9, "mechanism": "best"}),
    ],
)
def test_a_plan_in_stages(part: Participation, more: dict[str, int]) -> None:
    mechanism = "blt" if isinstance(part, BallsInBins) else "best"
    plan = Plan.fit(part, mechanism=mechanism, noise_multiplier=2.0)
    both = plan.extended(**more, epsilon=plan.epsilon() * 1.4)
    assert 1.38 * plan.epsilon() < both.epsilon() <= 1.4 * plan.epsilon()
    assert both.epsilon_after(plan.steps) == plan.epsilon()
    assert plan.epsilon() <= both.epsilon_after(plan.steps + 2) <= both.epsilon()
    assert Plan.from_json(both.to_json()) == both
    assert from_dict(both.participation.to_dict()) == both.participation
    said = both.statement()
    assert "2 stages, each with secret draws of its own" in said.words()
    assert said.epsilon == both.epsilon()
    cost = cost_of(said, delta=both.delta, plan=both, steps=both.steps)
    assert both.epsilon() <= cost.epsilon(both.delta) < 2 * both.epsilon()
    three = both.extended(**more)
    assert len(three.participation.stages) == 3
    assert three.epsilon() > both.epsilon()
    with pytest.raises(InvalidInput, match="already"):
        both.extended(**more, epsilon=0.5 * both.epsilon())
    with pytest.raises(Unsupported, match="after the last of them"):
        both.extended(**more, after=plan.steps)
    with pytest.raises(Unsupported, match="does not go on"):
        both.extended(**{**more, "mechanism": "continue"})


@pytest.mark.parametrize(
    "part", [BallsInBins(2, 6), SeparatedBins(2, 6, 2), CyclicPoisson(12, 3, 0.4)]
)
def test_the_draws_of_a_stage_are_its_own(part: Participation) -> None:
    """Under one key and under two; a stage that repeated another one's words would be found."""
    staged = DrawnStages((part, part))
    for key in (bytes(32), lambda step: bytes([step >= part.steps]) * 32):
        sampler = make_sampler(staged, key=key, population=600)
        alone = make_sampler(part, key=bytes(32), population=600)
        same = 0.0
        for step in range(part.steps):
            np.testing.assert_array_equal(sampler.draw(step), alone.draw(step))
            once, again = (set(sampler.draw(t).tolist()) for t in (step, part.steps + step))
            same += len(once & again) / max(len(once), 1) / part.steps
        assert same < 0.6
        assert audit_draws(staged, sampler=sampler).answer == "HOLDS"
    assert audit_draws(staged).answer == "HOLDS"


def test_what_is_no_stage() -> None:
    with pytest.raises(InvalidInput, match="all of one kind"):
        DrawnStages((BallsInBins(1, 2), CyclicPoisson(4, 2, 0.5)))
    with pytest.raises(InvalidInput, match="all of one kind"):
        DrawnStages((Poisson(4, 0.5),))
    part = DrawnStages((BallsInBins(1, 2), BallsInBins(1, 2)))
    with pytest.raises(Unsupported, match="one phase of noise for each"):
        Plan(participation=part, strategy=identity(), noise_multiplier=1.0)
    phases = Phases(parts=(StrategyPhase(identity(), 2, 2), StrategyPhase(identity(), 2, 2)))
    plan = Plan(participation=part, strategy=phases, noise_multiplier=1.0)
    with pytest.raises(Unsupported, match="no overlaps"):
        plan.positions(plan.steps)
