"""Phased localisation, accelerated SRGD, the proximal scheme, stationarity measures."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from noshuffle.accounting import gaussian
from noshuffle.convex import losses
from noshuffle.convex.solvers.accelerated_srgd import accelerated_srgd, increment_bound
from noshuffle.convex.solvers.base import rho_budget
from noshuffle.convex.solvers.domains import Ball, Everywhere, LpBall, ball
from noshuffle.convex.solvers.phased import (
    Prox,
    phase_slices,
    phased_mirror_descent,
    phased_sgd,
)
from noshuffle.convex.solvers.stationarity import (
    frank_wolfe_gap,
    gradient_norm,
    moreau_gradient,
    proximal_point,
)
from noshuffle.convex.solvers.weakly_convex import rounds_for, weakly_convex
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.optim.norms import Norm


def table(n: int, d: int, seed: int = 0, order: float = 2.0):
    draws = np.random.default_rng(seed)
    x = losses.fit_into(2 * draws.standard_normal((n, d)), bound=1.0, order=order)
    return x, np.where(x[:, 0] > 0, 1.0, -1.0)


def test_phases_are_disjoint_halves() -> None:
    sizes = [s.stop - s.start for s in phase_slices(100)]
    assert sizes == [50, 25, 12, 6, 3, 1]
    slices = phase_slices(100)
    assert all(a.stop == b.start for a, b in pairwise(slices))


@pytest.mark.parametrize("domain", [Ball(0.5), Everywhere()])
def test_sgd_average_moves_within_its_sensitivity(domain) -> None:
    """The un-noised average of a phase, for every replaced row: at most 2Lη."""
    loss = losses.logistic(feature_bound=1.0, ridge=0.1)
    eta = 2 / (loss.smoothness + loss.ridge)  # the largest step allowed
    draws, worst = np.random.default_rng(1), 0.0

    def average(x, y):
        w, total = np.zeros(2), np.zeros(2)
        for row, label in zip(x, y):
            g = loss.gradient(w, row[None], np.array([label]))
            w = domain.project(w - eta * g)
            total += w
        return total / len(x)

    for _ in range(100):
        x, y = table(6, 2, seed=int(draws.integers(10**6)))
        here = average(x, y)
        for row in range(6):
            other, labels = x.copy(), y.copy()
            other[row], labels[row] = -x[row], draws.choice([-1.0, 1.0])
            worst = max(worst, float(np.linalg.norm(average(other, labels) - here)))
    bound = 2 * loss.lipschitz * eta
    assert worst <= bound
    if isinstance(domain, Everywhere):  # a small ball cuts the moves short
        assert worst > 0.1 * bound


def test_noise_of_phased_sgd() -> None:
    n, d = 16, 20_000
    run = phased_sgd(
        losses.linear(),
        np.zeros((n, d)),
        None,
        epsilon=1.0,
        delta=1e-6,
        domain=Everywhere(),
        learning_rate=1.0,
        test_seed=0,
    )
    mu = gaussian.mu(epsilon=1.0, delta=1e-6)
    for i in range(1, len(run.iterates)):
        scale = 1 / 4**i / mu
        fresh = run.iterates[i] - run.iterates[i - 1]
        assert abs(fresh.std() / scale - 1) < 0.03
    assert run.statement.epsilon == pytest.approx(1.0)
    assert run.statement.mu == pytest.approx(mu)


def test_phased_sgd_refuses_expanding_steps_and_kinks() -> None:
    x, y = table(20, 2)
    common = {"epsilon": 1.0, "delta": 1e-6, "domain": Ball(1.0)}
    with pytest.raises(InvalidInput):
        phased_sgd(losses.logistic(), x, y, learning_rate=100.0, **common)
    with pytest.raises(Unsupported):
        phased_sgd(losses.hinge(), x, y, **common)


@pytest.mark.parametrize("p", [1.2, 1.5, 2.0])
def test_dual_map_is_the_inverse_mirror_map(p: float) -> None:
    """∇ψ*(y) maximises ⟨y, x⟩ − ψ(x)."""
    draws = np.random.default_rng(2)
    y = draws.standard_normal(4)
    x = Norm(p).dual_map(y)

    def gain(v):
        return y @ v - np.linalg.norm(v, p) ** 2 / (2 * (p - 1))

    assert all(gain(x) >= gain(x + 0.1 * draws.standard_normal(4)) for _ in range(200))


@pytest.mark.parametrize("p", [1.3, 2.0])
def test_phased_mirror_descent_states_and_learns(p: float) -> None:
    q = p / (p - 1)
    x, y = table(6000, 5, order=q)
    loss = losses.hinge(order=q)
    run = phased_mirror_descent(
        loss,
        x,
        y,
        epsilon=8.0,
        delta=1e-6,
        domain=Everywhere(),
        p=p,
        radius=3.0,
        test_seed=0,
    )
    assert np.mean(np.sign(x @ run.weights) == y) > 0.8
    mu = gaussian.mu(epsilon=8.0, delta=1e-6)
    assert run.statement.exact
    assert run.statement.mu == mu
    stretch = 5 ** (1 / 2 - 1 / q)  # of a row of norm one in order q, to the Euclidean norm
    assert np.linalg.norm(x, axis=1).max() <= stretch * (1 + 1e-9)
    assert run.details["first_noise"] == pytest.approx((stretch / 3000) * math.sqrt(128) / mu)
    if p < 2:
        other = phased_mirror_descent(
            loss, x, y, epsilon=8.0, delta=1e-6, p=p, noise="generalized", test_seed=0
        )
        assert other.statement.rho == pytest.approx(rho_budget(epsilon=8.0, delta=1e-6))
        assert not other.statement.exact


def test_phased_mirror_descent_refusals() -> None:
    x, y = table(20, 2)
    common = {"epsilon": 1.0, "delta": 1e-6}
    with pytest.raises(InvalidInput, match="order 1 <= p <= 2"):
        phased_mirror_descent(losses.hinge(), x, y, p=2.5, **common)
    with pytest.raises(InvalidInput):
        phased_mirror_descent(losses.hinge(order=9), x, y, domain=Everywhere(), p=1.5, **common)
    with pytest.raises(InvalidInput):
        phased_mirror_descent(
            losses.phase(radius=1.0),
            x,
            y,
            domain=Ball(1.0),
            prox=Prox(np.zeros(2), 2.0, 0.5),
            **common,
        )


def test_srgd_increments_stay_within_their_bound() -> None:
    """Replay the iteration with arbitrary released sums; measure every row's share of m_t."""
    loss, radius, steps = losses.logistic(), 1.5, 12
    domain, worst = Ball(radius), 0.0
    bound = increment_bound(loss, radius=radius, steps=steps)
    assert bound <= loss.lipschitz + 8 * loss.smoothness * radius
    for seed in range(200):
        draws = np.random.default_rng(seed)
        z = w = point = np.zeros(2)
        x, y = table(30, 2, seed=seed)
        for t in range(1, steps + 1):
            tau = 2 / (t + 1)
            previous, point = point, (1 - tau) * w + tau * z
            share = loss.gradients(point, x, y)
            if t > 1:
                share = share + (t - 1) * (share - loss.gradients(previous, x, y))
            worst = max(worst, float(np.linalg.norm(share, axis=1).max()))
            z = domain.project(draws.choice([-1.0, 1.0]) * 100 * draws.standard_normal(2))
            w = (1 - tau) * w + tau * z
    assert worst <= bound
    assert worst > 0.3 * bound


def test_srgd_states_learns_and_refuses() -> None:
    x, y = table(6000, 3)
    run = accelerated_srgd(
        losses.logistic(), x, y, epsilon=8.0, delta=1e-6, domain=Ball(3.0), test_seed=0
    )
    assert run.statement.epsilon == pytest.approx(8.0)
    assert np.mean(np.sign(x @ run.weights) == y) > 0.85
    steps = int(run.details["steps"])
    bound = increment_bound(losses.logistic(), radius=3.0, steps=steps) / (6000 // steps)
    assert run.details["noise"] == pytest.approx(run.statement.noise_multiplier * bound)
    with pytest.raises(Unsupported):
        accelerated_srgd(losses.hinge(), x, y, epsilon=1.0, delta=1e-6, domain=Ball(1.0))
    with pytest.raises(Unsupported):
        accelerated_srgd(losses.logistic(), x, y, epsilon=1.0, delta=1e-6, domain=Everywhere())


def test_weakly_convex_scheme_descends_and_states() -> None:
    draws = np.random.default_rng(3)
    x = losses.fit_into(9 * draws.standard_normal((6144, 2)), bound=1.0)
    y = (x @ np.array([0.9, 0.0])) ** 2
    loss, start = losses.phase(radius=1.0), np.array([0.4, 0.4])
    run = weakly_convex(
        loss,
        x,
        y,
        epsilon=8.0,
        delta=1e-6,
        domain=Ball(1.0),
        start=start,
        output="last",
        test_seed=0,
    )
    assert loss.risk(run.weights, x, y) < 0.2 * loss.risk(start, x, y)
    assert run.statement.epsilon <= 8.0
    assert "disjoint" in run.statement.assumptions[-1]
    with pytest.raises(Unsupported):
        weakly_convex(losses.hinge(), x, np.sign(y), epsilon=1.0, delta=1e-6, domain=Ball(1.0))
    assert rounds_for(rows=10**6, dimension=4, mu=1.0) == 500


def test_proximal_point_against_a_grid() -> None:
    loss, domain = losses.phase(radius=1.0), Ball(1.0)
    draws = np.random.default_rng(4)
    x = losses.fit_into(draws.standard_normal((50, 1)), bound=1.0)
    y = (0.8 * x[:, 0]) ** 2
    w = np.array([0.3])
    grid = np.linspace(-1, 1, 20_001)
    values = [loss.risk(np.array([v]), x, y) + 2.0 * (v - 0.3) ** 2 for v in grid]
    best = grid[int(np.argmin(values))]
    found = proximal_point(loss, w, x, y, domain=domain, strength=4.0, steps=4000)
    assert found[0] == pytest.approx(best, abs=2e-3)
    gradient = moreau_gradient(loss, w, x, y, domain=domain, steps=4000)
    assert gradient == pytest.approx(4 * abs(best - 0.3), abs=1e-2)
    with pytest.raises(InvalidInput):
        proximal_point(loss, w, x, y, domain=domain, strength=1.0)


def test_gap_and_norm() -> None:
    loss = losses.squared(radius=1.0)
    x, y = np.eye(2), np.array([1.0, 0.0])
    w = np.zeros(2)
    assert gradient_norm(loss, w, x, y) == pytest.approx(0.5)
    assert frank_wolfe_gap(loss, w, x, y, domain=Ball(1.0)) == pytest.approx(0.5)
    with pytest.raises(Unsupported):
        gradient_norm(losses.hinge(), w, x, y)
    with pytest.raises(Unsupported):
        frank_wolfe_gap(losses.hinge(), w, x, y, domain=Ball(1.0))


@pytest.mark.parametrize("p", [1.0, 1.3, 1.7])
def test_proximal_rounds_for_other_norms(p: float) -> None:
    """Noise as stated, the inverse of the dual map, and a smaller envelope gradient at the end."""
    q = p / (p - 1) if p > 1 else math.inf
    draws = np.random.default_rng(11)
    y = draws.standard_normal(6)
    for r in (1.2, 1.5, 1.9):
        np.testing.assert_allclose(Norm(r).gradient(Norm(r).dual_map(y)), y, rtol=1e-9)
    x = losses.fit_into(draws.choice([-1.0, 1.0], (4000, 6)), bound=1.0, order=q)
    labels = np.where(x[:, 0] > 0, 1.0, -1.0)
    loss = losses.sigmoid(order=q)
    settings = {"epsilon": 8.0, "delta": 1e-6, "rounds": 3, "p": p, "output": "last"}
    run = weakly_convex(loss, x, labels, **settings, test_seed=0)
    assert loss.risk(run.weights, x, labels) < loss.risk(np.zeros(6), x, labels) - 0.02
    reach = 0.25 / 1334
    stretch = 6 ** (1 / 2 - 1 / q)
    assert np.linalg.norm(x, axis=1).max() <= stretch * (1 + 1e-9)  # what the noise rests on
    mu = gaussian.mu(epsilon=8.0, delta=1e-6)
    assert run.statement.mu == mu
    assert run.statement.sensitivity == pytest.approx(reach * stretch, rel=1e-6)
    assert run.details["noise"] == pytest.approx(reach * stretch * math.sqrt(128) / mu, rel=1e-6)
    settings["rounds"] = 1
    inside = weakly_convex(loss, x, labels, domain=ball(0.5, p), **settings, test_seed=0)
    assert max(np.linalg.norm(w, p) for w in inside.iterates) <= 0.5 * (1 + 1e-12)
    assert loss.risk(inside.weights, x, labels) < loss.risk(np.zeros(6), x, labels) - 0.01


@pytest.mark.parametrize("p", [1.25, 3.0])
def test_projections_of_phased_sgd_do_not_expand(p: float) -> None:
    """Euclidean projections on l_p balls are non-expansive; what iteration adds is covered."""
    domain, draws = LpBall(0.7, p), np.random.default_rng(12)
    for size in (1e-6, 1e-2, 1.0):
        a = draws.standard_normal(5)
        b = a + size * draws.standard_normal(5)
        apart = np.linalg.norm(domain.project(a) - domain.project(b))
        far = domain.inexact * (0.7 * math.sqrt(5) + np.linalg.norm(a) + np.linalg.norm(b))
        assert apart <= np.linalg.norm(a - b) + far
    x, y = table(64, 3)
    plain = {"epsilon": 1.0, "delta": 1e-6, "learning_rate": 1e-4, "test_seed": 0}
    exact = phased_sgd(losses.logistic(), x, y, domain=Ball(0.7), **plain).details["first_noise"]
    more = phased_sgd(losses.logistic(), x, y, domain=domain, **plain).details["first_noise"]
    assert 1 + 1e-7 < more / exact < 1 + 1e-3  # 64 steps of 1e-11, beside moves of 2.5e-5
