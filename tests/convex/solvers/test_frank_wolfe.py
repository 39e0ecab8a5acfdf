"""Frank–Wolfe solvers: brute-force sensitivity of the recursion, trees, noise scales, refusals."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from scipy.linalg import toeplitz

from noshuffle.convex import losses
from noshuffle.convex.solvers.base import budget, rho_budget
from noshuffle.convex.solvers.decayed_sums import AGGREGATIONS, DecayedTree, factor, root, smallest
from noshuffle.convex.solvers.domains import Ball, L1Ball, LpBall, Simplex
from noshuffle.convex.solvers.frank_wolfe_full import choice_noise, frank_wolfe_full
from noshuffle.convex.solvers.frank_wolfe_noisy import frank_wolfe_noisy, noises
from noshuffle.convex.solvers.frank_wolfe_poly import frank_wolfe_poly, vertex_noise
from noshuffle.convex.solvers.frank_wolfe_stationary import frank_wolfe_stationary, schedule
from noshuffle.convex.solvers.frank_wolfe_tree import TreePhase, frank_wolfe_tree, phase_plan
from noshuffle.convex.solvers.generalized_gaussian import Shape, releaser
from noshuffle.convex.solvers.problem import Problem
from noshuffle.convex.solvers.recursive import Recursion
from noshuffle.convex.solvers.stationarity import frank_wolfe_gap
from noshuffle.errors import InvalidInput, Unsupported


def estimates(loss, recursion, x, y, path):
    """All d_t by the recursion as printed, along a fixed path of public iterates."""
    head, batches = recursion.slices()
    eta = recursion.rate
    d = loss.gradient(path[0], x[head], y[head])
    out = [d]
    for t, batch in enumerate(batches, start=1):
        new = loss.gradient(path[t], x[batch], y[batch])
        old = loss.gradient(path[t - 1], x[batch], y[batch])
        d = (1 - eta) * (d + new - old) + eta * new
        out.append(d)
    return np.array(out)


def public_path(recursion, domain, d, seed=0):
    """Iterates x ← (1−η)x + ηv with arbitrary v of the set: what an adversary may see."""
    draws = np.random.default_rng(seed)
    path = [domain.start(d)]
    for _ in range(recursion.steps):
        v = domain.lmo(draws.standard_normal(d))
        path.append((1 - recursion.rate) * path[-1] + recursion.rate * v)
    return path


@pytest.mark.parametrize(("domain", "order"), [(Ball(2.0), 2.0), (L1Ball(2.0), math.inf)])
def test_recursion_moves_within_its_reach(domain, order: float) -> None:
    loss = losses.logistic(order=order)
    recursion = Recursion.plan(rows=24, steps=4, rate=0.4)
    assert (recursion.first, recursion.batch) == (12, 3)
    first, step = recursion.reaches(loss, radius=2.0, neighbours="replace-one")
    assert first == pytest.approx(4 * loss.lipschitz / 24)
    assert step == pytest.approx(2 * 0.4 * (2 * loss.smoothness * 2.0 + loss.lipschitz) / 3)
    draws = np.random.default_rng(1)
    worst_first = worst_step = 0.0
    for trial in range(200):
        path = public_path(recursion, domain, 2, seed=trial)
        x = losses.fit_into(9 * draws.standard_normal((24, 2)), bound=1.0, order=order)
        y = draws.choice([-1.0, 1.0], 24)
        here = estimates(loss, recursion, x, y, path)
        for row, s in ((0, 0), (13, 1), (20, 3)):
            other, labels = x.copy(), y.copy()
            other[row] = losses.fit_into(9 * draws.standard_normal((1, 2)), bound=1.0, order=order)
            labels[row] = draws.choice([-1.0, 1.0])
            there = estimates(loss, recursion, other, labels, path)
            moves = np.linalg.norm(here - there, ord=order, axis=1)
            assert np.all(moves[:s] == 0)
            reach = first if s == 0 else step
            decay = (1 - 0.4) ** np.arange(len(moves) - s)
            assert np.all(moves[s:] <= reach * decay * (1 + 1e-9))
            if s == 0:
                worst_first = max(worst_first, moves[0])
            else:
                worst_step = max(worst_step, moves[s])
    assert worst_first > 0.4 * first
    assert worst_step > 0.15 * step


def test_increment_is_the_recursion_unrolled() -> None:
    loss, domain = losses.huber(), Ball(1.0)
    recursion = Recursion.plan(rows=40, steps=5, rate=0.3)
    draws = np.random.default_rng(2)
    x = losses.fit_into(draws.standard_normal((40, 3)), bound=1.0)
    y = draws.uniform(-1, 1, 40)
    path = public_path(recursion, domain, 3)
    head, batches = recursion.slices()
    exact = loss.data_gradient(path[0], x[head], y[head]) / recursion.first
    start = exact
    tree = DecayedTree(np.copy, decay=0.7)
    slow = estimates(loss, recursion, x, y, path)
    for t, batch in enumerate(batches, start=1):
        increment = recursion.increment(loss, path[t], path[t - 1], x[batch], y[batch])
        exact = 0.7 * exact + increment
        np.testing.assert_allclose(exact, slow[t], atol=1e-13)
        np.testing.assert_allclose(0.7**t * start + tree.push(increment), slow[t], atol=1e-13)


@pytest.mark.parametrize("steps", [1, 5, 8, 13])
def test_a_leaf_is_in_as_many_nodes_as_are_paid_for(steps: int) -> None:
    worst = 0.0
    for leaf in range(steps):
        seen: list[float] = []

        def release(raw, seen=seen):
            seen.append(float(raw[0]))
            return raw

        tree = DecayedTree(release, decay=0.999)
        for t in range(steps):
            tree.push(np.array([float(t == leaf)]))
        assert len(seen) == 2 * steps - steps.bit_count()  # every node is released once
        worst = max(worst, sum(v * v for v in seen))
    assert 0.95 * steps.bit_length() <= worst <= steps.bit_length()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_noise_formulas(aggregation: str) -> None:
    recursion = Recursion.plan(rows=1000, steps=20, rate=0.1)
    shape, rho = Shape(4), 0.02
    sigma0, sigma = noises(
        recursion, shape, first=0.01, step=0.03, rho=rho, aggregation=aggregation
    )
    if aggregation == "naive":
        times = sum(0.9 ** (2 * t) for t in range(21))
        assert times == pytest.approx(recursion.decayed_squares())
        assert times * 0.03**2 / (2 * sigma**2) == pytest.approx(rho)
        assert sigma0 == sigma
        return
    # ⌊lg 20⌋ + 1 = 5 nodes of a tree; the columns of the encoder that is used; one release.
    columns = np.linalg.norm(toeplitz(root(20, 0.9)[0].coefficients(20), np.zeros(20)), axis=0)
    times = {"tree": 5, "steps": 1, "root": float(columns.max()) ** 2}[aggregation]
    assert 0.01**2 / (2 * sigma0**2) == pytest.approx(rho)
    assert times * 0.03**2 / (2 * sigma**2) == pytest.approx(rho)


@pytest.mark.parametrize(("steps", "decay"), [(1, 0.5), (13, 0.7), (64, 0.95)])
def test_noise_of_decayed_sums_by_explicit_matrices(steps: int, decay: float) -> None:
    """`factor` beside the rows and columns of the matrices themselves."""
    lags = np.subtract.outer(np.arange(steps), np.arange(steps))
    workload = np.where(lags >= 0, decay ** np.maximum(lags, 0.0), 0.0)
    encoder = toeplitz(root(steps, decay)[0].coefficients(steps), np.zeros(steps))
    sums = workload @ np.linalg.inv(encoder)
    worst = np.linalg.norm(sums, axis=1).max() * np.linalg.norm(encoder, axis=0).max()
    found = {kind: factor(kind, steps=steps, decay=decay) for kind in AGGREGATIONS}
    assert found["root"] == pytest.approx(worst)
    assert found["steps"] == pytest.approx(np.linalg.norm(workload, axis=1).max())
    read: list[float] = []

    def release(raw):
        read.append(1.0)
        out = np.zeros(2 * steps)
        out[len(read) - 1] = 1.0  # one coordinate for every node: norms are those of the noise
        return out

    tree = DecayedTree(release, decay=decay)
    noise = max(np.linalg.norm(tree.push(np.zeros(2 * steps))) for _ in range(steps))
    assert found["tree"] == pytest.approx(noise * math.sqrt(steps.bit_length()))
    bound = np.linalg.svd(workload, compute_uv=False).sum() / steps  # nuclear norm, rms
    assert bound <= found["root"] <= min(1.05 * bound + 0.02, found["steps"] * 1.01)
    assert smallest(steps=steps, decay=decay, is_normal=True) == "root"


def test_sums_of_other_noise_than_normal_are_released_values_only() -> None:
    loss, x = losses.logistic(order=3.0), np.zeros((64, 3))
    settings = {"epsilon": 1.0, "delta": 1e-6, "domain": LpBall(1.0, 1.5), "steps": 8}
    settings["noise"] = "generalized"
    with pytest.raises(Unsupported, match="law"):
        frank_wolfe_noisy(loss, x, np.ones(64), aggregation="root", **settings)
    said = frank_wolfe_noisy(loss, x, np.ones(64), **settings).statement
    assert said.mechanism.startswith("steps release")
    assert not said.exact


def test_first_noise_of_the_run_has_the_stated_scale() -> None:
    n, d = 64, 30_000
    run = frank_wolfe_noisy(
        losses.linear(),
        np.zeros((n, d)),
        None,
        epsilon=1.0,
        delta=1e-6,
        domain=Ball(1.0),
        steps=1,
        rate=0.5,
        test_seed=0,
    )
    # x_1 = −η N/‖N‖ says nothing of the scale; the statement and the formula do.
    mu = budget(epsilon=1.0, delta=1e-6)
    assert run.details["first_noise"] == pytest.approx((1 / 32) / mu)
    assert run.statement.mu == pytest.approx(mu)
    assert run.statement.epsilon == pytest.approx(1.0)
    assert run.statement.exact
    # What was accounted by zCDP before needed 7 % more noise.
    assert mu / math.sqrt(2 * rho_budget(epsilon=1.0, delta=1e-6)) == pytest.approx(
        1.0725, abs=1e-3
    )


def test_released_tree_noise_is_of_the_stated_scale() -> None:
    problem = Problem.of(
        losses.linear(), np.zeros((1, 4000)), None, epsilon=1.0, delta=1e-6, test_seed=3
    )
    release = releaser(problem, Shape(4000), steps=14)
    tree = DecayedTree(partial(release, scale=2.0), decay=1.0)
    values = [tree.push(np.zeros(4000)) for _ in range(7)]
    for t, value in enumerate(values, start=1):
        scale = 2.0 * math.sqrt(t.bit_count())
        assert abs(value.std() / scale - 1) < 0.06
        assert abs(value.std() / (scale * 1.5) - 1) > 0.06


def test_vertex_noise_composes_to_rho() -> None:
    recursion = Recursion.plan(rows=100, steps=10, rate=0.2)
    scale = vertex_noise(recursion, reach=0.05, radius=3.0, rho=0.1)
    moves = [3.0 * 0.05 * 0.8**t for t in range(11)]
    assert sum((2 * m / scale) ** 2 / 8 for m in moves) == pytest.approx(0.1)
    laplace = vertex_noise(recursion, reach=0.05, radius=3.0, rho=0.1, noise="laplace")
    assert sum((2 * m / laplace) ** 2 / 2 for m in moves) == pytest.approx(0.1)


@pytest.mark.parametrize("solver", [frank_wolfe_poly, frank_wolfe_tree])
def test_l1_solvers_find_the_coordinate(solver) -> None:
    draws = np.random.default_rng(4)
    x = draws.choice([-1.0, 1.0], (4096, 30))
    y = np.clip(0.8 * x[:, 7], -1, 1)
    loss = losses.squared(radius=1.0, order=math.inf)
    run = solver(loss, x, y, epsilon=8.0, delta=1e-6, domain=L1Ball(1.0), test_seed=0)
    assert np.argmax(np.abs(run.weights)) == 7
    assert np.abs(run.weights).sum() <= 1 + 1e-9
    assert run.statement.epsilon <= 8.0


def test_l_p_solver_learns() -> None:
    draws, p = np.random.default_rng(5), 1.5
    x = losses.fit_into(draws.standard_normal((8192, 10)), bound=1.0, order=3.0)
    y = np.clip(x @ np.r_[0.8, np.zeros(9)], -1, 1)
    loss = losses.squared(radius=1.0, order=3.0)
    settings = {"epsilon": 8.0, "delta": 1e-6, "domain": LpBall(1.0, p)}
    runs = [frank_wolfe_noisy(loss, x, y, test_seed=seed, **settings) for seed in range(12)]
    risk = np.mean([loss.risk(run.weights, x, y) for run in runs])
    assert risk < 0.7 * loss.risk(np.zeros(10), x, y)


def test_phases_use_each_row_once_and_as_planned() -> None:
    for n in (64, 1000, 5000):
        plan = phase_plan(n, phases=4)
        assert sum(p.rows for p in plan) <= n
        assert [p.before for p in plan] == [0, 2, 6, 14]
    x = np.zeros((1000, 3))
    run = frank_wolfe_tree(
        losses.linear(order=math.inf),
        x,
        None,
        epsilon=1.0,
        delta=1e-6,
        domain=L1Ball(1.0),
        phases=4,
        test_seed=0,
    )
    assert run.details["rows_used"] == sum(p.rows for p in phase_plan(1000, phases=4))
    with pytest.raises(InvalidInput):
        phase_plan(16, phases=6)


def test_tree_phase_sensitivity_by_brute_force() -> None:
    """Walk one tree along a fixed path of points and replace each row in turn."""
    loss = losses.logistic(order=math.inf)
    phase = TreePhase(depth=3, batch=16, before=6)
    draws = np.random.default_rng(6)
    radius, depth = 1.0, 3
    points = [L1Ball(radius).start(2)]
    for leaf in range(2**depth):
        eta = 2 / (phase.before + leaf + 2)
        vertex = L1Ball(radius).vertex(int(draws.integers(4)), 2)
        points.append((1 - eta) * points[-1] + eta * vertex)

    def walk(x, y):
        """(score estimates of all leaves), recursive: the slow twin of the loop."""
        out, used = [], [0]

        def take(size):
            used[0] += size
            return slice(used[0] - size, used[0])

        def visit(j, value, at):
            if j == depth:
                out.append(value)
                return
            visit(j + 1, value, at)
            size = phase.size(j + 1)
            rows, now = take(size), points[len(out)]
            change = loss.gradient(now, x[rows], y[rows]) - loss.gradient(at, x[rows], y[rows])
            visit(j + 1, value + change, now)

        rows = take(phase.batch)
        visit(0, loss.gradient(points[0], x[rows], y[rows]), points[0])
        assert used[0] == phase.rows
        return np.array(out)

    rho = 0.3
    scale = phase.noise(loss, radius=radius, rho=rho, neighbours="replace-one")
    worst = 0.0
    for _ in range(30):
        x = draws.uniform(-1, 1, (phase.rows, 2))
        y = draws.choice([-1.0, 1.0], phase.rows)
        here = walk(x, y)
        for row in range(phase.rows):
            other, labels = x.copy(), y.copy()
            other[row], labels[row] = draws.choice([-1.0, 1.0], 2), -y[row]
            moves = radius * np.abs(walk(other, labels) - here).max(axis=1)
            worst = max(worst, float(np.sum(moves**2) / (2 * scale**2)))
    assert worst <= rho
    assert worst > 0.05 * rho


def test_refusals() -> None:
    x, y = np.zeros((50, 2)), np.ones(50)
    common = {"epsilon": 1.0, "delta": 1e-6}
    with pytest.raises(Unsupported):
        frank_wolfe_noisy(losses.hinge(), x, y, domain=Ball(1.0), **common)
    with pytest.raises(Unsupported):
        frank_wolfe_noisy(losses.logistic(), x, y, domain=L1Ball(1.0), **common)
    with pytest.raises(Unsupported):
        frank_wolfe_poly(losses.logistic(), x, y, domain=Ball(1.0), **common)
    domain = LpBall(1.0, 1.5)
    with pytest.raises(InvalidInput, match="order 3 or less"):  # rows in l2 are bounded in l3 too
        frank_wolfe_noisy(losses.logistic(order=4.0), x, y, domain=domain, **common)
    with pytest.raises(Unsupported):
        frank_wolfe_poly(losses.sigmoid(order=math.inf), x, y, domain=Simplex(), **common)
    with pytest.raises(InvalidInput):
        Recursion.plan(rows=10, steps=6)


@pytest.mark.parametrize("domain", [Ball(4.0), L1Ball(4.0)])
def test_stationary_points_have_a_small_gap(domain) -> None:
    draws = np.random.default_rng(7)
    order = math.inf if domain.is_polytope else 2.0
    x = losses.fit_into(draws.standard_normal((8192, 4)), bound=1.0, order=order)
    y = np.where(x[:, 0] > 0, 1.0, -1.0)
    loss = losses.sigmoid(order=order)
    run = frank_wolfe_stationary(loss, x, y, epsilon=16.0, delta=1e-6, domain=domain, test_seed=0)
    start = frank_wolfe_gap(loss, np.zeros(4), x, y, domain=domain)
    gaps = [frank_wolfe_gap(loss, w, x, y, domain=domain) for w in run.iterates[-20:]]
    assert np.mean(gaps) < 0.5 * start
    assert any(np.array_equal(run.weights, w) for w in run.iterates)


def test_schedule_uses_public_numbers() -> None:
    steps, rate = schedule(rows=8000, dimension=4, mu=0.2, is_polytope=False)
    assert steps in (399, 400)
    assert rate == pytest.approx(20 / steps, rel=0.01)


def test_tree_phase_noise_of_a_root_row_by_hand() -> None:
    """A linear loss has no differences: only the root counts, in all 2^depth leaves."""
    loss, phase, rho = losses.linear(order=math.inf), TreePhase(depth=3, batch=16, before=6), 0.3
    scale = phase.noise(loss, radius=2.0, rho=rho, neighbours="replace-one")
    move = 2.0 * 2 * loss.lipschitz / 16
    assert 8 * (2 * move / scale) ** 2 / 8 == pytest.approx(rho)


# --- full gradients ------------------------------------------------------------------------------


@pytest.mark.parametrize(("neighbours", "c"), [("replace-one", 2), ("zero-out", 1)])
def test_scores_of_full_gradients_move_within_their_bound(neighbours: str, c: int) -> None:
    """All scores at public points, one row replaced or zeroed: at most cLD/n, and nearly that."""
    loss, domain, n, d = losses.squared(radius=2.0, order=math.inf), L1Ball(2.0), 6, 3
    draws, worst = np.random.default_rng(0), 0.0
    bound = c * loss.lipschitz * 2.0 / n
    run = frank_wolfe_full(
        loss, np.ones((n, d)), np.ones(n), epsilon=1.0, delta=1e-6, domain=domain, steps=3,
        neighbours=neighbours, test_seed=0,
    )  # fmt: skip
    assert run.statement.sensitivity == pytest.approx(bound)
    for _ in range(300):
        w = domain.vertex(int(draws.integers(2 * d)), d)
        x, y = draws.choice([-1.0, 1.0], (n, d)), draws.choice([-1.0, 1.0], n)
        other, labels = x.copy(), y.copy()
        if neighbours == "replace-one":
            other[0], labels[0] = draws.choice([-1.0, 1.0], d), draws.choice([-1.0, 1.0])
        else:
            other[0] = 0.0
        here, there = (
            domain.scores(loss.data_gradient(w, *data) / n) for data in ((x, y), (other, labels))
        )
        worst = max(worst, float(np.abs(here - there).max()))
    assert 0.99 * bound <= worst <= bound * (1 + 1e-12)


def test_choices_cost_what_is_stated() -> None:
    """The exact ρ of one Gumbel choice at the worst scores, T of them: below ρ, and not by much."""
    rho, steps, move = 0.3, 4, 0.25
    b = choice_noise(steps=steps, move=move, rho=rho)
    worst = 0.0
    for gap in np.linspace(-3, 3, 61):  # two candidates, the one up, the other down
        p, q = (1 / (1 + np.exp(-(gap + shift) / b)) for shift in (move, -move))
        for a in (1.5, 2.0, 8.0):
            moment = p**a * q ** (1 - a) + (1 - p) ** a * (1 - q) ** (1 - a)
            worst = max(worst, math.log(moment) / (a - 1) / a)
    assert 0.85 * rho < steps * worst <= rho
    assert choice_noise(steps=steps, move=move, rho=rho, noise="laplace") == pytest.approx(2 * b)


def test_full_gradients_beat_one_pass() -> None:
    draws = np.random.default_rng(1)
    x = draws.choice([-1.0, 1.0], (8192, 100))
    y = np.clip(x[:, :3] @ [0.5, -0.3, 0.2] + 0.1 * draws.standard_normal(8192), -1, 1)
    loss = losses.squared(radius=1.0, order=math.inf)
    asked = {"epsilon": 1.0, "delta": 1e-6, "domain": L1Ball(1.0), "test_seed": 0}
    found = [
        loss.risk(f(loss, x, y, **asked).weights, x, y)
        for f in (frank_wolfe_full, frank_wolfe_poly)
    ]
    assert found[0] < 0.02 < 0.05 < found[1]


def test_listed_vertices() -> None:
    x, y = np.tile([[1.0, 0.0]], (500, 1)), np.ones(500)
    asked = {"epsilon": 2.0, "delta": 1e-6, "steps": 8, "test_seed": 0}
    hull = [[2.0, 0.0], [-2.0, 0.0], [0.0, 2.0]]
    run = frank_wolfe_full(losses.logistic(), x, y, vertices=hull, **asked)
    assert run.weights[0] > 1
    assert run.statement.sensitivity == pytest.approx(2 / 500)
    with pytest.raises(InvalidInput, match="one in each row"):
        frank_wolfe_full(losses.logistic(), x, y, vertices=[[1.0]], **asked)
    with pytest.raises(InvalidInput, match="radius=2"):
        frank_wolfe_full(losses.squared(radius=1.0), x, y, vertices=hull, **asked)
    with pytest.raises(Unsupported, match="L1Ball"):
        frank_wolfe_full(losses.logistic(), x, y, domain=Ball(1.0), **asked)
