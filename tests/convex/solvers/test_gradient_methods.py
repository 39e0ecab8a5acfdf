"""DP-GD, DP-SGD and DP-SVRG: noise, brute-force sensitivity, twins."""

from __future__ import annotations

import math

import numpy as np
import pytest

from noshuffle.accounting import gaussian, renyi
from noshuffle.convex import losses
from noshuffle.convex.solvers.domains import Ball, Box, Everywhere
from noshuffle.convex.solvers.dp_gd import dp_gd
from noshuffle.convex.solvers.dp_sgd import dp_sgd
from noshuffle.convex.solvers.dp_svrg import dp_svrg, svrg_epsilon
from noshuffle.errors import InvalidInput, Unsupported


def is_scale(sample: np.ndarray, scale: float) -> bool:
    return abs(np.std(sample) / scale - 1) < 5 / math.sqrt(2 * sample.size)


def table(n: int = 400, d: int = 4, seed: int = 0):
    draws = np.random.default_rng(seed)
    x = losses.fit_into(draws.standard_normal((n, d)), bound=1.0)
    return x, np.where(x[:, 0] > 0, 1.0, -1.0)


@pytest.mark.parametrize("loss", [losses.linear(), losses.logistic(), losses.huber(width=0.5)])
def test_gradient_sensitivity_by_brute_force(loss) -> None:
    x, y = table(6, 2)
    draws, worst = np.random.default_rng(1), 0.0
    w = np.array([2.0, 0.0])
    for _ in range(2000):
        pair = losses.fit_into(10 * draws.standard_normal((2, 2)), bound=1.0)
        labels = draws.choice([-1.0, 1.0], 2)
        moved = []
        for row, label in zip(pair, labels):
            x[2], y[2] = row, label
            moved.append(loss.gradient(w, x, y))
        worst = max(worst, float(np.linalg.norm(moved[0] - moved[1])))
    bound = 2 * loss.lipschitz / len(x)
    assert worst <= bound * (1 + 1e-12)
    if loss.name != "logistic":  # whose two slopes are not both at their largest at one w
        assert worst > 0.95 * bound


@pytest.mark.parametrize("neighbours", ["replace-one", "zero-out"])
def test_noise_of_dp_gd(neighbours: str) -> None:
    n, d, steps = 50, 20_000, 9
    run = dp_gd(
        losses.linear(),
        np.zeros((n, d)),
        None,
        epsilon=1.0,
        delta=1e-6,
        domain=Everywhere(),
        steps=steps,
        learning_rate=1.0,
        output="last",
        neighbours=neighbours,
        test_seed=0,
    )
    # With α_t = √(T/t) the last iterate is minus a weighted sum of independent noise.
    weights = math.sqrt(sum(steps / t for t in range(1, steps + 1)))
    count = 2 if neighbours == "replace-one" else 1
    scale = math.sqrt(steps) * count / n / gaussian.mu(epsilon=1.0, delta=1e-6)
    assert run.details["noise"] == pytest.approx(scale)
    assert is_scale(run.weights, scale * weights)
    assert not is_scale(run.weights, scale * weights * 2 / 3)
    assert not is_scale(run.weights, scale * weights * 3 / 2)
    assert run.statement.epsilon == pytest.approx(1.0)
    assert run.statement.exact


def test_dp_sgd_states_and_learns() -> None:
    x, y = table(2000)
    run = dp_sgd(
        losses.hinge(),
        x,
        y,
        epsilon=2.0,
        delta=1e-6,
        domain=Ball(3.0),
        rate=0.05,
        steps=60,
        test_seed=0,
    )
    assert 1.99 < run.statement.epsilon <= 2.0
    assert run.statement.neighbours == "zero-out"
    assert np.mean(np.sign(x @ run.weights) == y) > 0.85


def test_dp_gd_stays_near_its_start_where_noise_hides_all() -> None:
    """Whole steps had 3.9 and 1.8 times the loss of the start."""
    x, y = table(2000, 50)
    for epsilon in (0.003, 0.01):
        run = dp_gd(
            losses.huber(), x, y, epsilon=epsilon, delta=1e-6, domain=Ball(20.0), test_seed=0
        )
        assert np.mean(losses.huber().values(run.weights, x, y)) < 1.02 * 0.5


def test_dp_svrg_states_and_learns() -> None:
    x, y = table(2000)
    run = dp_svrg(losses.logistic(), x, y, epsilon=2.0, delta=1e-6, domain=Ball(5.0), test_seed=0)
    assert run.statement.epsilon <= 2.0
    noise = run.details["noise"]
    spent = svrg_epsilon(noise=noise, epochs=4, steps=25, rate=0.1, delta=1e-6)
    assert spent == pytest.approx(run.statement.epsilon)
    assert svrg_epsilon(noise=noise * 0.9, epochs=4, steps=25, rate=0.1, delta=1e-6) > 2.0
    assert np.mean(np.sign(x @ run.weights) == y) > 0.85
    # Snapshots and steps both count: the divergences of the parts, added by hand.
    orders = np.array(renyi.DEFAULT_ORDERS)
    total = 4 * orders / (2 * noise**2) + renyi.curve([(noise, 0.1, 100)])
    assert renyi.epsilon_from_curve(orders, total, delta=1e-6) == pytest.approx(spent)


@pytest.mark.parametrize(("epsilon", "share"), [(0.1, 0.9), (1e4, 0.01)])
def test_svrg_comes_near_the_optimum_as_far_as_noise_allows(epsilon: float, share: float) -> None:
    """Steps of R/(L√T) left 0.4 of the excess of the start without noise, and had 1.1 in it."""
    draws = np.random.default_rng(0)
    x = losses.fit_into(draws.standard_normal((500, 4)), bound=1.0)
    loss, y = losses.squared(radius=2.0), np.clip(x @ [0.8, -0.4, 0.0, 0.2], -1, 1)
    common = {"epsilon": epsilon, "delta": 1e-6, "domain": Ball(2.0)}
    runs = [dp_svrg(loss, x, y, test_seed=seed, **common) for seed in range(4)]
    left = [np.mean(loss.values(run.weights, x, y)) for run in runs]
    assert np.mean(left) < share * np.mean(loss.values(np.zeros(4), x, y))


def test_svrg_differences_stay_within_their_bound() -> None:
    loss, (x, y) = losses.logistic(), table(200)
    draws = np.random.default_rng(4)
    for _ in range(50):
        w, v = draws.standard_normal((2, 4))
        moves = np.linalg.norm(loss.gradients(w, x, y) - loss.gradients(v, x, y), axis=1)
        assert moves.max() <= min(2 * loss.lipschitz, loss.smoothness * np.linalg.norm(w - v))


def test_refusals() -> None:
    x, y = table(20)
    common = {"epsilon": 1.0, "delta": 1e-6}
    with pytest.raises(Unsupported):
        dp_svrg(losses.hinge(), x, y, domain=Ball(1.0), **common)
    with pytest.raises(InvalidInput):
        dp_gd(losses.squared(radius=1.0), x, y, domain=Ball(2.0), **common)
    with pytest.raises(InvalidInput):  # a box of half-width 1 reaches out to √d
        dp_gd(losses.squared(radius=1.0), x, y, domain=Box(1.0), **common)
    with pytest.raises(InvalidInput):
        dp_gd(losses.logistic(), x, y, domain=Ball(1.0), epsilon=-1.0, delta=1e-6)
