"""Losses keep their bounds; domains project and minimise exactly; minimisers are minimisers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from noshuffle.accounting import renyi
from noshuffle.convex import losses
from noshuffle.convex.solvers import dp_gd, frank_wolfe_full, frank_wolfe_noisy
from noshuffle.convex.solvers.base import rho_budget, split
from noshuffle.convex.solvers.domains import Ball, Box, Everywhere, L1Ball, LpBall, Simplex, ball
from noshuffle.convex.solvers.minimise import minimise
from noshuffle.errors import InvalidInput, Unsupported

ALL = [
    losses.logistic(),
    losses.hinge(),
    losses.smoothed_hinge(width=0.3),
    losses.squared(radius=2.0),
    losses.huber(width=0.7),
    losses.absolute(),
    losses.linear(),
    losses.sigmoid(),
    losses.phase(radius=2.0),
]


def data(n: int, d: int, *, seed: int = 0, classes: bool = True):
    draws = np.random.default_rng(seed)
    x = losses.fit_into(draws.standard_normal((n, d)), bound=1.0)
    y = np.where(draws.random(n) < 0.5, -1.0, 1.0) if classes else draws.uniform(-1, 1, n)
    return x, y


@pytest.mark.parametrize("loss", ALL, ids=lambda loss: loss.name)
def test_derivatives_and_bounds(loss) -> None:
    draws = np.random.default_rng(1)
    s = draws.uniform(-2, 2, 4000)
    y = np.where(draws.random(4000) < 0.5, -1.0, 1.0)
    if not loss.is_classifier:
        y = draws.uniform(-1, 1, 4000)
    h = 1e-6
    slope = (loss.value_fn(s + h, y) - loss.value_fn(s - h, y)) / (2 * h)
    smooth_here = np.abs(slope - loss.slope_fn(s, y)) < 1e-5
    assert smooth_here.mean() > 0.999  # a kink may fall between s − h and s + h
    assert np.all(np.abs(loss.slope_fn(s, y)) <= loss.slope_bound + 1e-12)
    if loss.is_smooth:
        curve = (loss.slope_fn(s + h, y) - loss.slope_fn(s - h, y)) / (2 * h)
        assert (np.abs(curve - loss.curvature_fn(s, y)) < 1e-4).mean() > 0.999
        assert np.all(np.abs(loss.curvature_fn(s, y)) <= loss.curvature_bound + 1e-12)
    if loss.is_convex:
        t = draws.uniform(-2, 2, 4000)
        middle = loss.value_fn((s + t) / 2, y)
        assert np.all(middle <= (loss.value_fn(s, y) + loss.value_fn(t, y)) / 2 + 1e-12)
    else:  # f + (ϱ/2)s² is convex along the row
        t, rho = draws.uniform(-2, 2, 4000), loss.weak_curvature

        def bent(v):
            return loss.value_fn(v, y) + rho / 2 * v * v

        assert np.all(bent((s + t) / 2) <= (bent(s) + bent(t)) / 2 + 1e-12)


@pytest.mark.parametrize("loss", ALL, ids=lambda loss: loss.name)
def test_vectorised_gradient_is_the_mean_of_rows(loss) -> None:
    x, y = data(30, 4)
    w = np.array([0.3, -0.2, 0.5, 0.1])
    each = loss.slopes(w, x, y)[:, None] * x + loss.ridge * w
    np.testing.assert_allclose(loss.gradient(w, x, y), each.mean(axis=0), atol=1e-14)
    assert np.linalg.norm(each, axis=1).max() <= loss.lipschitz + 1e-12


def test_ridge_is_strong_convexity_and_no_data() -> None:
    loss = losses.logistic(ridge=0.5)
    x, y = data(10, 3)
    w = np.ones(3)
    plain = losses.logistic()
    np.testing.assert_allclose(loss.gradient(w, x, y), plain.gradient(w, x, y) + 0.5 * w)
    assert loss.lipschitz == plain.lipschitz


@pytest.mark.parametrize(
    ("rows", "labels"),
    [
        (np.ones((2, 3)), np.ones(2)),
        (np.full((2, 3), np.nan), np.ones(2)),
        (np.zeros((2, 3)), np.zeros(2)),
        (np.zeros((2, 3)), np.ones(3)),
        (np.zeros((0, 3)), np.zeros(0)),
        (np.zeros(3), np.zeros(3)),
    ],
)
def test_data_beyond_the_bounds_is_refused(rows, labels) -> None:
    with pytest.raises(InvalidInput) as caught:
        losses.logistic().check(rows, labels)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("loss", "least"),
    [
        (losses.poisson(), 0.0),
        (losses.poisson(label_bound=5.0), 0.0),
        (losses.gamma(least=0.1), 0.1),
        (losses.gamma(least=0.1, label_bound=4.0), 0.1),
    ],
)
def test_labels_of_logarithmic_links_keep_slopes_within_their_bound(loss, least) -> None:
    x, s = np.zeros((2, 1)), np.linspace(-9, 9, 500)
    for label in (least, loss.label_bound):
        loss.check(x, np.full(2, label))
        assert np.abs(loss.slope_fn(s, np.full(500, label))).max() <= loss.slope_bound
        assert np.abs(loss.curvature_fn(s, np.full(500, label))).max() <= loss.curvature_bound
    for label in (least - 0.01, -loss.label_bound, loss.label_bound + 0.01, math.nan):
        with pytest.raises(InvalidInput, match="labels of"):
            loss.check(x, np.array([loss.label_bound, label]))
        with pytest.raises(InvalidInput, match="labels of"):
            dp_gd(loss, x, np.array([loss.label_bound, label]), epsilon=1.0, delta=1e-6)


DOMAINS = [Ball(1.5), Box(0.7), L1Ball(1.2), Simplex(1.3), LpBall(1.1, 1.3), LpBall(0.9, 5.0)]


@pytest.mark.parametrize("domain", DOMAINS, ids=str)
def test_projection_and_linear_minimiser(domain) -> None:
    draws = np.random.default_rng(2)
    inside = [domain.project(draws.standard_normal(5)) for _ in range(60)]
    for _ in range(10):
        u = 2 * draws.standard_normal(5)
        p = domain.project(u)
        assert max(float((u - p) @ (v - p)) for v in inside) <= 1e-10  # variational inequality
        v = domain.lmo(u)
        np.testing.assert_allclose(domain.project(v), v, atol=1e-12)
        assert min(float(u @ w) for w in inside) >= float(u @ v) - 1e-12
        assert np.linalg.norm(v) <= domain.euclidean(5) + 1e-12
        if domain.is_polytope:
            scores = domain.scores(u)
            each = [float(domain.vertex(i, 5) @ u) for i in range(len(scores))]
            np.testing.assert_allclose(scores, each)
            assert min(scores) == pytest.approx(float(u @ v))


@pytest.mark.parametrize("p", [1.05, 1.5, 2.0, 3.0, 50.0])
def test_l_p_minimiser_meets_hoelder(p: float) -> None:
    g, domain = np.random.default_rng(3).standard_normal(6), LpBall(2.0, p)
    v = domain.lmo(g)
    assert np.linalg.norm(v, p) == pytest.approx(2.0)
    assert float(g @ v) == pytest.approx(-2.0 * np.linalg.norm(g, p / (p - 1)))


def test_domains_refuse_what_they_cannot() -> None:
    with pytest.raises(Unsupported):
        Everywhere().lmo(np.ones(2))
    for p in (1.0, 0.5, math.inf, math.nan):
        with pytest.raises(InvalidInput):
            LpBall(1.0, p)


@pytest.mark.parametrize("p", [1.001, 1.1, 1.7, 2.5, 8.0, 1000.0])
def test_projection_on_l_p_balls(p: float) -> None:
    """Inside always, beside a generic solver, and by the gap that bounds the distance."""
    draws, q = np.random.default_rng(7), p / (p - 1)
    for d, size in ((1, 3.0), (3, 1.0), (40, 0.2), (40, 1e6), (7, 1e30)):
        u, radius = size * draws.standard_normal(d), 1.3
        if d > 3:
            u[:2] = 0.0, 1e-12 * size
        x = LpBall(radius, p).project(u)
        inside = np.sum(np.abs(x.astype(np.longdouble) / radius) ** np.longdouble(p))
        assert inside <= 1
        longest = np.abs(u).max()
        if np.linalg.norm(u / longest, p) * longest <= radius:
            np.testing.assert_array_equal(x, u)
            continue
        assert inside ** (1 / p) > 1 - 1e-12
        rest = u - x
        most = np.abs(rest).max()
        gap = radius * most * np.linalg.norm(rest / most, q) - rest @ x
        assert gap <= 1e-13 * math.sqrt(d) * radius * np.linalg.norm(u)
    u = np.array([1.5, -0.4, 0.9])
    x = LpBall(1.0, p).project(u)
    slow = minimize(
        lambda v: 0.5 * np.sum((v - u) ** 2), 0.1 * u, method="SLSQP",
        constraints={"type": "ineq", "fun": lambda v: 1 - np.sum(np.abs(v) ** p)},
        options={"maxiter": 500, "ftol": 1e-12},
    ).x  # fmt: skip
    if p < 100:  # the generic solver does not end on so flat a constraint
        np.testing.assert_allclose(x, slow, atol=1e-4)
    short = LpBall(1.0, p).project([torch.tensor(u, dtype=torch.float32)])[0].double().numpy()
    assert np.sum(np.abs(short.astype(np.longdouble)) ** np.longdouble(p)) <= 1
    assert np.isnan(LpBall(1.0, p).project(np.array([math.nan, 1.0]))).all()


def test_reach_bounds_every_norm_of_a_ball() -> None:
    draws = np.random.default_rng(8)
    for p in (1.0, 1.5, 2.0, 4.0, math.inf):
        domain = ball(1.3, p)
        for order in (1.0, 1.2, 2.0, 5.0, math.inf):
            v = [domain.project(9 * draws.standard_normal(5)) for _ in range(20)]
            corners = [domain.lmo(g) for g in (np.ones(5), np.eye(5)[0])]
            norms = [np.linalg.norm(one, order) for one in (*v, *corners)]
            assert max(norms) <= domain.reach(order, 5) * (1 + 1e-12)
            assert max(norms) > 0.999 * domain.reach(order, 5)


@pytest.mark.parametrize("p", [1.0, 1.25, 2.0, 3.0, math.inf])
def test_every_order_of_ball_has_a_solver(p: float) -> None:
    """The whole range 1 ≤ p ≤ ∞, rows bounded in the dual norm; ends better than it began."""
    q = {1.0: math.inf, math.inf: 1.0}.get(p) or p / (p - 1)
    draws = np.random.default_rng(9)
    x = losses.fit_into(draws.choice([-1.0, 1.0], (4000, 6)), bound=1.0, order=q)
    y = np.clip(x @ (0.8 * np.eye(6)[0]), -1, 1)
    loss, domain = losses.squared(radius=1.0, order=q), ball(1.0, p)
    solve = frank_wolfe_full if p == 1 else frank_wolfe_noisy if p < 2 else dp_gd
    run = solve(loss, x, y, epsilon=4.0, delta=1e-6, domain=domain, test_seed=0)
    assert np.linalg.norm(run.weights, p) <= 1 + 1e-12
    assert loss.risk(run.weights, x, y) < 0.5 * loss.risk(np.zeros(6), x, y)


def test_rho_budget_is_on_the_safe_side() -> None:
    for epsilon in (0.1, 1.0, 8.0):
        rho = rho_budget(epsilon=epsilon, delta=1e-6)
        back = renyi.epsilon_from_rho(rho=rho, delta=1e-6, real_orders=True)
        assert back <= epsilon
        assert back == pytest.approx(epsilon, rel=1e-6)


def test_split_covers_everything() -> None:
    assert [s.stop - s.start for s in split(10, 3)] == [3, 3, 4]
    with pytest.raises(InvalidInput):
        split(2, 3)


@pytest.mark.parametrize(
    "loss", [losses.logistic(), losses.huber(width=0.1), losses.smoothed_hinge()]
)
def test_minimiser_is_a_minimiser(loss) -> None:
    x, y = data(60, 4)
    tilt = np.array([0.1, 0.0, -0.2, 0.05])
    found = minimise(loss, x, y, ridge=0.01, tilt=tilt)
    assert found.gradient_norm <= 1e-10

    def objective(w):
        return loss.risk(w, x, y) + 0.005 * w @ w + tilt @ w

    draws = np.random.default_rng(5)
    best = objective(found.weights)
    for size in (1e-3, 0.1, 1.0):
        others = found.weights + size * draws.standard_normal((50, 4))
        assert all(objective(w) >= best for w in others)


def test_minimiser_refuses_kinks() -> None:
    x, y = data(5, 2)
    with pytest.raises(Unsupported):
        minimise(losses.hinge(), x, y, ridge=1.0)


def test_fit_into_touches_only_long_rows() -> None:
    x = np.array([[3.0, 4.0], [0.1, 0.0]])
    np.testing.assert_allclose(losses.fit_into(x, bound=1.0), [[0.6, 0.8], [0.1, 0.0]])
    np.testing.assert_allclose(
        losses.fit_into(x, bound=2.0, order=math.inf), [[1.5, 2.0], [0.1, 0.0]]
    )


def test_one_row_seen_many_times_needs_no_copies() -> None:
    loss, row = losses.logistic(), np.array([0.3, -0.4])
    lazy = np.broadcast_to(row, (7, 2))
    y, w = np.array([1.0, -1, 1, 1, -1, 1, -1]), np.array([0.5, 2.0])
    for name in ("values", "slopes", "data_gradient", "gradient"):
        fast = getattr(loss, name)(w, lazy, y)
        np.testing.assert_allclose(fast, getattr(loss, name)(w, lazy.copy(), y), rtol=1e-13)
    with pytest.raises(InvalidInput):
        loss.check(np.broadcast_to(4 * row, (7, 2)), y)
