"""The law of the noise that leaves: right scale and correlation pass, others do not."""

from __future__ import annotations

import math

import numpy as np
import pytest

import noshuffle.strategies as st
from noshuffle.auditing.answers import HOLDS, REFUTED
from noshuffle.auditing.covariance import audit_noise, released_noise
from noshuffle.errors import InvalidInput
from noshuffle.participation import Epochs, MinSeparation, Poisson, SinglePass
from noshuffle.plan import Plan

CASES = {
    "blt": (Epochs(3, 8), st.blt((0.95, 0.5), (0.2, 0.3))),
    "tree": (MinSeparation(24, 6, 3), st.tree("honaker", restart_every=10, completion=True)),
    "full tree": (SinglePass(24), st.tree("full")),
    "identity": (Epochs(3, 8), st.identity()),
}


@pytest.mark.parametrize("name", CASES)
def test_the_door_releases_the_planned_noise_and_changes_are_found(name: str) -> None:
    participation, strategy = CASES[name]
    plan = Plan.fit(participation, mechanism=strategy, epsilon=3.0)
    noise = released_noise(plan, coordinates=6000)
    found = audit_noise(noise, plan)
    assert found.answer == HOLDS, found.words()
    assert found.estimate.mu == pytest.approx(found.claimed_mu, rel=0.06)
    assert found.estimate.sure < found.estimate.low < found.estimate.mu < found.estimate.high
    for factor in (2 / 3, 0.97, 1.03, 3 / 2):
        assert audit_noise(factor * noise, plan).answer == REFUTED
    weak = audit_noise(noise * 0.5, plan)
    assert weak.estimate.mu == pytest.approx(2 * found.estimate.mu)
    reused = noise.copy()
    reused[17] = reused[3]
    assert math.isinf(audit_noise(reused, plan).estimate.mu)
    assert "no noise at all" in audit_noise(reused, plan).words()
    other = np.random.default_rng(1).standard_normal(noise.shape) * noise.std()
    assert (audit_noise(other, plan).answer == REFUTED) == (name != "identity")


def test_replacing_a_unit_doubles_what_is_claimed_and_found() -> None:
    once = Plan.fit(SinglePass(6), mechanism="sqrt", noise_multiplier=3.0)
    twice = Plan.fit(
        SinglePass(6), mechanism="sqrt", noise_multiplier=3.0, neighbours="replace-one"
    )
    noise = released_noise(once, coordinates=3000)
    first, second = audit_noise(noise, once), audit_noise(noise, twice)
    assert second.estimate.mu == pytest.approx(2 * first.estimate.mu)
    assert second.claimed_mu == pytest.approx(2 * first.claimed_mu)
    assert first.to_dict()["kind"] == "noise"


def test_what_cannot_be_compared_is_refused() -> None:
    plan = Plan.fit(SinglePass(6), mechanism="sqrt", noise_multiplier=3.0)
    with pytest.raises(InvalidInput, match="coordinates"):
        audit_noise(np.zeros((6, 20)), plan)
    sampled = Plan.fit(Poisson(6, 0.1), mechanism="identity", noise_multiplier=1.0)
    with pytest.raises(InvalidInput, match="without sampling"):
        audit_noise(np.zeros((6, 200)), sampled)
