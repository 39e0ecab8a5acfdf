"""`best`: what it ranks, what it leaves out, and that the first ones are worth having."""

from __future__ import annotations

import math

import numpy as np
import pytest

from noshuffle.accounting import gaussian
from noshuffle.convex import losses
from noshuffle.convex.solvers import best, dp_gd
from noshuffle.convex.solvers.domains import Ball, L1Ball


@pytest.mark.slow
def test_logistic_regression() -> None:
    found = best(losses.logistic(), 16_384, 20, epsilon=1.0, domain=Ball(10.0), seeds=1)
    assert {found[0].solver, found[1].solver} == {"objective_perturbation", "dp_gd"}
    assert found[1].excess <= 0.0012
    assert found[-1].solver == "start"
    assert all(one.excess <= found[-1].excess for one in found)
    assert [one.excess for one in found] == sorted(one.excess for one in found)


def test_the_l1_ball() -> None:
    loss = losses.squared(radius=1.0, order=math.inf)
    found = best(loss, 8192, 100, epsilon=1.0, domain=L1Ball(1.0), seeds=1)
    assert [one.solver for one in found[:2]] == ["frank_wolfe_full", "phased_mirror_descent"]
    assert found[0].excess <= 0.008 < 0.2 < found[-1].excess


def test_heavy_ball_steps_spend_exactly_epsilon() -> None:
    x = losses.fit_into(np.random.default_rng(0).normal(size=(400, 3)), bound=1.0)
    run = dp_gd(
        losses.logistic(), x, np.sign(x[:, 0]), epsilon=2.0, delta=1e-6, domain=Ball(5.0),
        neighbours="zero-out", test_seed=0,
    )  # fmt: skip
    steps, noise = run.details["steps"], run.details["noise"]
    assert gaussian.epsilon(mu=math.sqrt(steps) / (400 * noise), delta=1e-6) == pytest.approx(2.0)
    assert np.mean(np.sign(x @ run.weights) == np.sign(x[:, 0])) > 0.9
