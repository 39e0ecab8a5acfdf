"""DP-FTRL and DP-FTRL-LS: noise scales, exact steps, sensitivities, statements, refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import minimize

from noshuffle.accounting import gaussian
from noshuffle.convex import losses
from noshuffle.convex.moments import ball_least_squares, moments
from noshuffle.convex.solvers.domains import Ball, Everywhere, L1Ball
from noshuffle.convex.solvers.ftrl import ftrl, regret
from noshuffle.convex.solvers.ftrl_ls import ftrl_ls, moment_bound
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.participation import SinglePass
from noshuffle.strategies import sensitivity, tree


def is_scale(sample: np.ndarray, scale: float) -> bool:
    """Whether normal draws have this standard deviation, within five standard errors."""
    return abs(np.std(sample) / scale - 1) < 5 / math.sqrt(2 * sample.size)


@pytest.mark.parametrize("neighbours", ["zero-out", "replace-one"])
def test_noise_scale_of_ftrl(neighbours: str) -> None:
    n, d = 64, 400
    run = ftrl(
        losses.linear(),
        np.zeros((n, d)),
        None,
        epsilon=1.0,
        delta=1e-5,
        domain=Everywhere(),
        mechanism=tree("plain"),
        regularization=1.0,
        neighbours=neighbours,
        test_seed=1,
    )
    # Iterates are minus the noise of the prefix sums; whiten with the tree's own matrix.
    matrix = np.cumsum(tree("plain").noising(n), axis=0)[:-1]
    covariance = matrix @ matrix.T
    whitened = np.linalg.solve(np.linalg.cholesky(covariance), -run.iterates[1:])
    count = 2.0 if neighbours == "replace-one" else 1.0
    reach = sensitivity(tree("plain"), SinglePass(n)).value * count
    scale = reach / gaussian.mu(epsilon=1.0, delta=1e-5)
    assert is_scale(whitened, scale)
    assert not is_scale(whitened, scale * 2 / 3)
    assert not is_scale(whitened, scale * 3 / 2)
    assert run.statement.epsilon == pytest.approx(1.0)
    assert run.statement.neighbours == neighbours
    assert "test seed" in run.statement.assumptions[-1]


def test_l1_gives_exact_zeros_and_the_support() -> None:
    draws = np.random.default_rng(1)
    x = losses.fit_into(draws.standard_normal((4000, 20)), bound=1.0)
    y = np.clip(x @ np.r_[1.0, -1.0, np.zeros(18)], -1, 1)
    run = ftrl(
        losses.huber(),
        x,
        y,
        epsilon=4.0,
        delta=1e-5,
        domain=Ball(2.0),
        batch_size=8,
        l1=0.015,
        output="last",
        keep_iterates=False,
        test_seed=0,
    )
    last = run.weights
    assert run.iterates is None
    assert np.count_nonzero(last == 0) >= 15
    assert last[0] > 0 > last[1]


def test_regret_is_mean_of_differences_seen_before_learning() -> None:
    x, y = np.eye(2), np.array([1.0, -1.0])
    iterates = np.array([[0.5, 0.0], [0.0, 0.25]])
    loss = losses.hinge()
    expected = np.mean([0.5 - 1.0, 1.25 - 1.0])
    assert regret(loss, iterates, x, y, comparator=np.zeros(2)) == pytest.approx(expected)
    with pytest.raises(InvalidInput):
        regret(loss, iterates[:1], x, y, comparator=np.zeros(2))


def test_ftrl_refusals() -> None:
    x, y = np.zeros((4, 2)), np.ones(4)
    with pytest.raises(InvalidInput):
        ftrl(losses.squared(radius=1.0), x, y, epsilon=1.0, delta=1e-5, domain=Everywhere())
    with pytest.raises(Unsupported):
        ftrl(losses.sigmoid(), x, y, epsilon=1.0, delta=1e-5, domain=Ball(1.0))
    with pytest.raises(Unsupported):
        ftrl(
            losses.hinge(),
            x,
            y,
            epsilon=1.0,
            delta=1e-5,
            domain=L1Ball(1.0),
            group=1.0,
            groups=np.zeros(2),
        )
    with pytest.raises(InvalidInput):
        ftrl(losses.hinge(order=math.inf), x, y, epsilon=1.0, delta=1e-5, domain=Ball(1.0))


@pytest.mark.parametrize("neighbours", ["zero-out", "replace-one"])
def test_moment_bound_holds_and_is_nearly_reached(neighbours: str) -> None:
    draws, worst = np.random.default_rng(2), 0.0
    L, Y, tau = 1.3, 0.7, 1.1
    for _ in range(3000):
        x, other = draws.standard_normal((2, 2))
        x, other = L * x / np.linalg.norm(x), L * other / np.linalg.norm(other)
        y, label = draws.choice([-Y, Y], 2)
        move = moments(x[None], np.array([y]), ratio=tau)
        if neighbours == "replace-one":
            move = move - moments(other[None], np.array([label]), ratio=tau)
        worst = max(worst, float(np.linalg.norm(move)))
    bound = moment_bound(feature_bound=L, label_bound=Y, ratio=tau, neighbours=neighbours)
    assert 0.8 * bound <= worst <= bound * (1 + 1e-12)


def test_ball_least_squares_is_optimal_also_when_indefinite() -> None:
    draws = np.random.default_rng(4)
    for shift in (-1.0, 0.0, 2.0):
        for size in (0.1, 3.0):
            gram = draws.standard_normal((3, 3))
            gram = gram + gram.T + shift * np.eye(3)
            cross = size * draws.standard_normal(3)
            w = ball_least_squares(gram, cross, radius=1.0, ridge=0.1)

            def objective(v, gram=gram, cross=cross):
                return v @ gram @ v - 2 * cross @ v + 0.1 * v @ v

            assert np.linalg.norm(w) <= 1 + 1e-9
            best = min(
                minimize(
                    objective,
                    Ball(1.0).project(draws.standard_normal(3)),
                    constraints={"type": "ineq", "fun": lambda v: 1 - v @ v},
                ).fun
                for _ in range(6)
            )
            assert objective(w) <= best + 1e-5


def test_noise_scale_and_statement_of_ftrl_ls() -> None:
    n, d = 8, 60
    run = ftrl_ls(
        np.zeros((n, d)),
        np.zeros(n),
        epsilon=2.0,
        delta=1e-5,
        radius=1.0,
        mechanism=tree("plain"),
        test_seed=3,
    )
    reach = math.sqrt(2) * sensitivity(tree("plain"), SinglePass(n)).value
    assert run.details["noise"] == pytest.approx(reach / gaussian.mu(epsilon=2.0, delta=1e-5))
    assert run.statement.epsilon == pytest.approx(2.0)
    assert run.statement.sensitivity == pytest.approx(reach)


def test_ftrl_ls_learns() -> None:
    draws = np.random.default_rng(5)
    x = losses.fit_into(draws.standard_normal((4096, 4)), bound=1.0)
    truth = np.array([0.5, -0.3, 0.2, 0.1])
    run = ftrl_ls(x, x @ truth, epsilon=4.0, delta=1e-6, radius=1.0, batch_size=64, test_seed=0)
    assert np.linalg.norm(run.weights - truth) < 0.1
