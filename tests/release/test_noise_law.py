"""The noise that leaves by the door has the planned covariance, and no row of it is used twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.noise.laws import agrees, check_covariance
from tests.strategies.slow_recipes import materialize

import noshuffle.strategies as st
from noshuffle.participation import Epochs, MinSeparation, SinglePass
from noshuffle.plan import Plan
from noshuffle.release.release import Release

CLIP = 1.5
CASES = {
    "blt": (Epochs(3, 8), st.blt((0.95, 0.5), (0.2, 0.3))),
    "tree": (MinSeparation(24, 6, 3), st.tree("honaker", restart_every=10, completion=True)),
    "full tree": (SinglePass(24), st.tree("full")),
    "identity": (Epochs(3, 8), st.identity()),
}


def released_noise(plan: Plan, *, coordinates: int) -> np.ndarray:
    """What leaves when nobody takes part: noise alone, steps × coordinates."""
    release = Release(plan, {"w": (coordinates,)}, clip=CLIP)
    nobody, rows = release.identify(np.empty(0, dtype=np.int64)), []
    for _ in range(plan.steps):
        values, ticket = {"w": torch.zeros(coordinates)}, release.admit(nobody)
        release.close(ticket, values)
        release.finish(ticket)
        rows.append(values["w"].double().numpy())
    return np.array(rows)


@pytest.mark.parametrize("name", CASES)
def test_the_door_releases_the_planned_noise_and_changes_are_found(name: str) -> None:
    participation, strategy = CASES[name]
    plan = Plan.fit(participation, mechanism=strategy, epsilon=3.0)
    noise = released_noise(plan, coordinates=6000)
    matrix = materialize(strategy.recipe(plan.steps), plan.steps)
    covariance = (CLIP * plan.noise_multiplier) ** 2 * matrix @ matrix.T
    # Fresh keys in every run: a true sample of 300 entries is outside once in a million runs.
    check_covariance(noise, covariance, errors=6.0)
    reused = noise.copy()
    reused[17] = reused[3]
    assert not agrees(reused, covariance, errors=6.0)
