"""Norms of entries, groups and matrices beside brute force, and solvers that measure by them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import minimize

from noshuffle.accounting import gaussian
from noshuffle.convex import losses
from noshuffle.convex.solvers import (
    frank_wolfe_noisy,
    frank_wolfe_stationary,
    phased_mirror_descent,
    weakly_convex,
)
from noshuffle.convex.solvers import generalized_gaussian as gg
from noshuffle.convex.solvers.domains import Ball, L1Ball, NormBall, ball
from noshuffle.convex.solvers.mirror_step import MirrorStep
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.optim.norms import Entries, Groups, Norm, SingularValues

PARTS = [Entries(), Groups((0, 0, 1, 1, 2, 0)), SingularValues(2, 3)]
ORDERS = [1.0, 1.3, 2.0, 3.0, math.inf]


def slow_norm(x: np.ndarray, p: float, parts) -> float:
    """By the definitions, written out."""
    if isinstance(parts, SingularValues):
        gram = x.reshape(parts.rows, parts.columns)
        sizes = np.sqrt(np.maximum(np.linalg.eigvalsh(gram @ gram.T), 0))
    elif isinstance(parts, Groups):
        sizes = [
            math.sqrt(sum(v * v for v, name in zip(x, parts.labels) if name == label))
            for label in sorted(set(parts.labels))
        ]
    else:
        sizes = np.abs(x)
    return max(sizes) if math.isinf(p) else sum(s**p for s in sizes) ** (1 / p)


@pytest.mark.parametrize("parts", PARTS, ids=lambda parts: type(parts).__name__)
@pytest.mark.parametrize("p", ORDERS)
def test_norm_dual_and_minimiser_by_sampling(p: float, parts) -> None:
    draws, norm, inside = np.random.default_rng(0), Norm(p, parts), ball(1.0, p, parts)
    y = draws.standard_normal(6)
    assert norm(y) == pytest.approx(slow_norm(y, p, parts))
    best = inside.lmo(y)
    assert norm(best) <= 1 + 1e-12
    assert -y @ best == pytest.approx(norm.dual(y), rel=1e-10)  # the dual norm is attained
    others = draws.standard_normal((300, 6))
    others /= norm.rows(others)[:, None]
    assert (others @ y).max() <= norm.dual(y) * (1 + 1e-12)
    for order in ORDERS:  # equivalence of norms, of the same parts and of others
        for other in (Norm(order, parts), Norm(order), Norm(order, PARTS[1])):
            assert other.rows(others).max() <= norm.times(other, 6) * (1 + 1e-9)


@pytest.mark.parametrize("parts", PARTS[1:], ids=lambda parts: type(parts).__name__)
@pytest.mark.parametrize("p", [1.0, 1.4, math.inf])
def test_projection_beside_a_generic_solver(p: float, parts) -> None:
    """Inside, and no feasible point that is found otherwise is nearer."""
    draws, norm, inside = np.random.default_rng(1), Norm(p, parts), ball(0.9, p, parts)
    assert isinstance(inside, NormBall)
    for _ in range(3):
        u = 2 * draws.standard_normal(6)
        x = inside.project(u)
        assert norm(x) <= 0.9
        # The variational inequality: ⟨u − x, v − x⟩ ≤ 0 for all v inside, the worst by the lmo.
        gap = (u - x) @ (-inside.lmo(u - x) * -1 - x)
        assert gap <= 1e-9
    slow = minimize(
        lambda v: np.sum((v - u) ** 2), 0.1 * u, method="SLSQP",
        constraints={"type": "ineq", "fun": lambda v: 0.9 - slow_norm(v, min(p, 60.0), parts)},
        options={"maxiter": 300, "ftol": 1e-12},
    ).x  # fmt: skip
    np.testing.assert_allclose(x, slow, atol=0.05 if math.isinf(p) else 2e-3)
    near = 0.1 * u / norm(u)
    np.testing.assert_array_equal(inside.project(near), near)
    assert np.isnan(inside.project(np.full(6, math.nan))).all()


@pytest.mark.parametrize("parts", PARTS, ids=lambda parts: type(parts).__name__)
@pytest.mark.parametrize("p", [1.3])
def test_mirror_maps_and_the_step_over_a_ball(p: float, parts) -> None:
    draws, norm = np.random.default_rng(2), Norm(p, parts)
    y = draws.standard_normal(6)
    np.testing.assert_allclose(norm.gradient(norm.dual_map(y)), y, rtol=1e-9)
    x = norm.dual_map(y)
    others = x + 0.1 * draws.standard_normal((100, 6))

    def gain(v):
        return v @ y - norm.rows(np.atleast_2d(v)) ** 2 / (2 * (p - 1))

    assert (gain(others) <= gain(x) + 1e-12).all()
    domain, centre = ball(1.0, p, parts), ball(0.8, p, parts).project(draws.standard_normal(6))
    step = MirrorStep(norm, domain, most=500, tolerance=1e-5)
    for g in (3 * y, 3 * y + 0.1):  # the second starts from a multiplier
        found = step(g, centre=centre, strength=1.0)
        assert norm(found) <= 1 + 1e-12

        def cost(v, g=g):
            return v @ g + norm.rows(np.atleast_2d(v) - centre) ** 2 / (2 * (p - 1))

        around = np.array([domain.project(found + s * draws.standard_normal(6))
                           for s in (0.01, 0.1, 1.0) for _ in range(8)])  # fmt: skip
        assert (cost(around) >= cost(found) - 2e-3).all()
        assert (cost(around) < cost(found) - 2e-3 + 1.0).any()


@pytest.mark.parametrize("parts", PARTS, ids=lambda parts: type(parts).__name__)
@pytest.mark.parametrize("r", [2.0, 3.0, 6.0])
def test_squared_norms_are_as_smooth_as_stated(r: float, parts) -> None:
    """‖x+h‖² + ‖x−h‖² − 2‖x‖² ≤ 2(r−1)‖h‖², and hardly less is true."""
    draws, norm, worst = np.random.default_rng(3), Norm(r, parts), 0.0
    for size in (1e-2, 0.3, 3.0):
        x, h = draws.standard_normal((2, 300, 6))
        x[:100] = np.eye(6)[0] + 1e-3 * x[:100]
        h[:50] = x[:50]  # along a ray ‖·‖² is a parabola, of curvature 2
        bend = norm.rows(x + size * h) ** 2 + norm.rows(x - size * h) ** 2 - 2 * norm.rows(x) ** 2
        worst = max(worst, float((bend / (2 * size**2 * norm.rows(h) ** 2)).max()))
    assert 1 - 1e-6 <= worst <= r - 1 + 1e-6


def test_noise_shaped_like_groups() -> None:
    """E‖z‖_r² = dσ², directions inside a group alike, and the Rényi bound at α = 2 by sampling."""
    parts, draws = Groups((0, 0, 0, 1, 2, 2)), np.random.default_rng(4)
    shape = gg.shape_of(Norm(1.2, parts), 6, noise="generalized")
    assert shape.r == pytest.approx(2 * math.log(3))
    z = gg.sample(shape, sigma=1.3, count=20_000, draws=draws)
    squares = Norm(shape.r, parts).rows(z) ** 2
    error = 5 * squares.std() / math.sqrt(len(z))
    assert abs(squares.mean() - 6 * 1.3**2) < error
    assert abs(squares.mean() - 6 * (1.3 * 1.1) ** 2) > error
    second = np.mean(z**2, axis=0)
    np.testing.assert_allclose(second[:3], second[0], rtol=0.05)
    sigma = 2 * math.sqrt(shape.kappa)
    z = gg.sample(shape, sigma=sigma, count=20_000, draws=draws)
    for u in (np.eye(6)[0], np.array([1, 0, 0, 1, 0, 1.0]) / 3 ** (1 / Norm(1.2).q)):
        assert Norm(1.2, parts).dual(u) <= 1 + 1e-9
        energy = (Norm(shape.r, parts).rows(z - u) ** 2 - Norm(shape.r, parts).rows(z) ** 2) / (
            2 * sigma**2
        )
        moments = np.exp(-2 * energy)
        found = math.log(moments.mean() - 4 * moments.std() / math.sqrt(len(z)))
        assert found <= shape.kappa * 2 / (2 * sigma**2)
    with pytest.raises(InvalidInput, match="sampler"):
        gg.sample(gg.Shape(6, 3.0, 1.0, SingularValues(2, 3)), sigma=1.0, count=1, draws=draws)


def test_sensitivity_of_a_gradient_in_other_norms() -> None:
    """A row at the edge of the operator norm moves a sum by √k·L in the Euclidean norm, no more."""
    parts, draws = SingularValues(3, 4), np.random.default_rng(5)
    norm = Norm(1.0, parts)
    rows = losses.fit_into(9 * draws.standard_normal((500, 12)), bound=1.0, order=math.inf,
                           parts=parts)  # fmt: skip
    rows[0] = np.eye(3, 4).ravel()
    shape = gg.shape_of(norm, 12, rows=Norm(math.inf, parts))
    assert math.sqrt(shape.kappa) == pytest.approx(math.sqrt(3))
    lengths = np.linalg.norm(rows, axis=1)
    assert lengths.max() == pytest.approx(math.sqrt(3))
    loss = losses.logistic(order=math.inf, parts=parts)
    loss.check(rows, np.ones(500))
    with pytest.raises(InvalidInput, match="feature_bound"):
        loss.check(1.1 * rows, np.ones(500))


@pytest.mark.parametrize("parts", PARTS[1:], ids=lambda parts: type(parts).__name__)
@pytest.mark.parametrize("p", [1.0, 1.4])
def test_solvers_in_groups_and_matrices(p: float, parts) -> None:
    """Stated exactly, inside their domain, better than their start; noise by the row norm."""
    draws, norm, mu = np.random.default_rng(6), Norm(p, parts), gaussian.mu(epsilon=4.0, delta=1e-6)
    bounds = {"order": norm.q, "parts": parts}
    x = losses.fit_into(9 * draws.standard_normal((1500, 6)), bound=1.0, **bounds)
    planted = ball(0.9, p, parts).project(9 * np.eye(6)[0])
    y = np.clip(x @ planted, -1, 1)
    domain = ball(1.0, p, parts)
    asked = {"epsilon": 4.0, "delta": 1e-6, "domain": domain, "test_seed": 0}
    loss = losses.squared(radius=1.0, **bounds)
    for run in (
        frank_wolfe_noisy(loss, x, y, **asked),
        phased_mirror_descent(loss, x, y, norm=norm, steps=32, **asked),
    ):
        assert run.statement.mu == mu
        assert norm.rows(run.iterates).max() <= 1 + 1e-12
        assert loss.risk(run.weights, x, y) < 0.6 * loss.risk(np.zeros(6), x, y)
    k = parts.count(6)
    stretch = k ** (1 / 2 - 1 / norm.q)
    assert run.details["first_noise"] == pytest.approx(
        2 * stretch / 750 * math.sqrt(32) / mu, rel=1e-9
    )
    sign = np.where(x @ planted > 0, 1.0, -1.0)
    rough = losses.sigmoid(**bounds)
    walked = weakly_convex(rough, x, sign, norm=norm, rounds=2, output="last", **asked)
    assert norm.rows(walked.iterates).max() <= 1 + 1e-12
    assert rough.risk(walked.weights, x, sign) < rough.risk(np.zeros(6), x, sign) - 0.01
    assert frank_wolfe_stationary(rough, x, sign, steps=8, **asked).statement.mu == mu


def test_other_norms_refuse_what_they_do_not_bound() -> None:
    x, y = np.zeros((20, 6)), np.ones(20)
    common = {"epsilon": 1.0, "delta": 1e-6}
    nuclear = ball(1.0, 1, SingularValues(2, 3))
    with pytest.raises(InvalidInput, match="same parts"):  # entries say nothing of singular values
        frank_wolfe_noisy(losses.logistic(order=math.inf), x, y, domain=nuclear, **common)
    with pytest.raises(InvalidInput, match="2 × 3"):
        frank_wolfe_noisy(losses.logistic(), x[:, :5], y, domain=nuclear, **common)
    with pytest.raises(InvalidInput, match="labels for 2"):
        phased_mirror_descent(losses.hinge(), x, y, norm=Norm(1.5, Groups((0, 1))), **common)
    for domain in (L1Ball(1.0), ball(1.0, math.inf, PARTS[1]), ball(1.0, 3)):
        with pytest.raises(Unsupported, match="polytopes"):
            frank_wolfe_noisy(losses.logistic(), x, y, domain=domain, **common)
    with pytest.raises(InvalidInput, match="at least 1"):
        Norm(0.5)
    # Rows bounded in the Euclidean norm are bounded in every dual norm, without a stretch.
    said = frank_wolfe_noisy(losses.logistic(), x, y, domain=nuclear, test_seed=0, **common)
    plain = frank_wolfe_noisy(losses.logistic(), x, y, domain=Ball(1.0), test_seed=0, **common)
    assert said.details["first_noise"] == plain.details["first_noise"]
