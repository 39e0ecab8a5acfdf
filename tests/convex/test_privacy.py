"""Attempts to break the guarantees: neighbours, worst cases, density ratios, low bits."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from noshuffle.accounting import gaussian
from noshuffle.convex import PrivateLogisticRegression, losses
from noshuffle.convex.linear_rule import LinearRule
from noshuffle.convex.solvers import (
    accelerated_srgd,
    dp_sgd,
    dp_svrg,
    ftrl,
    noisy_max,
    objective_perturbation,
)
from noshuffle.convex.solvers import recursive as rec
from noshuffle.convex.solvers.accelerated_srgd import increment_bound
from noshuffle.convex.solvers.base import rho_budget
from noshuffle.convex.solvers.domains import Ball, L1Ball
from noshuffle.convex.solvers.frank_wolfe_tree import phase_plan
from noshuffle.convex.solvers.generalized_gaussian import shape_of
from noshuffle.convex.solvers.noisy_max import noise_scale
from noshuffle.convex.solvers.objective_perturbation import tilt
from noshuffle.convex.sums_rule import SumsRule
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.noise.step_plan import StepPlans, grid_of
from noshuffle.optim.norms import Norm


def spied(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a linear rule is given: the released means."""
    seen: list[Any] = []
    update = LinearRule.update

    def spy(self: Any, mean: Any, *, step: int) -> None:
        seen.append(np.array(mean))
        update(self, mean, step=step)

    monkeypatch.setattr(LinearRule, "update", spy)
    return seen


def test_low_bits_do_not_tell_which_data_were_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Released − (guessed sum) must not be recognisable as a draw of float32 noise."""
    seen = spied(monkeypatch)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 200)), rng.integers(2, size=64)
    PrivateLogisticRegression(batch_size=64, horizon=64, classes=[0, 1]).fit(x, y)
    residual = (0.5 - y) / np.maximum(1.0, np.abs(0.5 - y) * np.sqrt((x * x).sum(1) + 1))
    raw = np.append(x.T @ residual, residual.sum())
    noise = seen[0] * 64 - raw
    assert abs(noise).max() > 1  # there is noise of the expected size at all
    near_float32 = np.abs(noise - noise.astype(np.float32)) < 1e-11 * np.abs(noise)
    assert near_float32.mean() < 0.02


def test_what_is_released_lies_on_a_public_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = spied(monkeypatch)
    x, y = np.random.default_rng(1).normal(size=(64, 50)), np.arange(64) % 2
    model = PrivateLogisticRegression(batch_size=64, horizon=64, classes=[0, 1]).fit(x, y)
    moves = StepPlans.of(model.plan_.strategy.recipe(model.plan_.steps))
    grid = grid_of(moves.at(0), scale=model.plan_.noise_multiplier)
    cells = seen[0] * 64 / grid
    np.testing.assert_array_equal(cells, np.rint(cells))


def test_the_grid_leaves_the_noise_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = spied(monkeypatch)
    x, y = np.zeros((40, 3000)), np.arange(40) % 2
    model = PrivateLogisticRegression(
        batch_size=20, classes=[0, 1], mechanism="identity", fit_intercept=False, test_seed=0
    ).fit(x, y)
    scale = model.plan_.noise_multiplier / 20
    for mean in seen:
        assert abs(np.std(mean[:3000]) / scale - 1) < 0.07
    assert abs(np.corrcoef(seen[0][:3000], seen[1][:3000])[0, 1]) < 0.08


# --- report-noisy-max, exactly ---------------------------------------------------------------


def exact_choice(scores: np.ndarray, scale: float, noise: str) -> np.ndarray:
    """P[i wins], by quadrature over the noise of i."""
    out = []
    for i in range(len(scores)):
        others = np.delete(scores, i)

        def integrand(t: float, i: int = i, others: np.ndarray = others) -> float:
            if noise == "laplace":
                density = math.exp(-abs(t) / scale) / (2 * scale)
                below = scores[i] + t - others
                cdf = np.where(
                    below < 0, 0.5 * np.exp(below / scale), 1 - 0.5 * np.exp(-abs(below) / scale)
                )
            else:
                density = math.exp(-t / scale) / scale if t >= 0 else 0.0
                cdf = 1 - np.exp(-np.maximum(scores[i] + t - others, 0.0) / scale)
            return density * float(np.prod(cdf))

        low = -40 * scale if noise == "laplace" else 0.0
        kinks = sorted({0.0, *(others - scores[i])})
        ends = [low, *[k for k in kinks if low < k < 60 * scale], 60 * scale]
        out.append(sum(quad(integrand, a, b)[0] for a, b in itertools.pairwise(ends)))
    return np.array(out)


@pytest.mark.parametrize("is_monotone", [False, True])
@pytest.mark.parametrize("noise", ["laplace", "gumbel", "permute-and-flip"])
def test_noisy_max_worst_ratio_is_epsilon(noise: str, is_monotone: bool) -> None:
    epsilon, worst = 1.0, 0.0
    scale = noise_scale(epsilon=epsilon, sensitivity=1.0, is_monotone=is_monotone)
    moves = [0.0, 1.0] if is_monotone else [-1.0, 1.0]
    for base in ((0.0, 0.0, 0.0), (6.0, 0.0, 0.0), (3.0, 3.0, 0.0)):
        for move in itertools.product(moves, repeat=3):
            a, b = np.array(base), np.array(base) + np.array(move)
            if noise == "gumbel":
                p, q = (np.exp(s / scale - np.logaddexp.reduce(s / scale)) for s in (a, b))
            else:
                p, q = exact_choice(a, scale, noise), exact_choice(b, scale, noise)
                assert p.sum() == pytest.approx(1, abs=1e-5)
            worst = max(worst, float(np.abs(np.log(p / q)).max()))
    assert worst <= epsilon * (1 + 1e-4)
    assert worst > 0.7 * epsilon  # the scale is not too large either


def test_monotone_scores_and_replaced_units_do_not_go_together() -> None:
    scores = np.array([3.0, 1.0])
    said = noisy_max(scores, epsilon=1.0, sensitivity=1.0, is_monotone=True, test_seed=0).statement
    assert said.neighbours == "zero-out"
    assert any("one direction" in s for s in said.assumptions)
    with pytest.raises(Unsupported, match="replaced"):
        noisy_max(scores, epsilon=1.0, sensitivity=1.0, is_monotone=True, neighbours="replace-one")
    # Half the noise under replace-one would be wrong: a vote moves from one count to the other.
    scale = noise_scale(epsilon=1.0, sensitivity=1.0, is_monotone=True)
    p, q = (exact_choice(np.array(s), scale, "permute-and-flip") for s in ((1.0, 0.0), (0.0, 1.0)))
    assert np.abs(np.log(p / q)).max() > 1.3


# --- objective perturbation ---------------------------------------------------------------------


def log_density(w: Any, x: Any, y: Any, *, loss: Any, chosen: Any, normal: bool) -> float:
    b = -(loss.data_gradient(w, x, y) + len(x) * chosen.ridge * w)
    hessian = (x * loss.curvatures(w, x, y)[:, None]).T @ x + len(x) * chosen.ridge * np.eye(len(w))
    tail = -float(b @ b) / (2 * chosen.scale**2) if normal else -np.linalg.norm(b) / chosen.scale
    return float(tail + np.linalg.slogdet(hessian)[1])


@pytest.mark.parametrize("neighbours", ["replace-one", "zero-out"])
@pytest.mark.parametrize("d", [1, 2, 3])
def test_objective_density_ratio_in_low_dimension(neighbours: str, d: int) -> None:
    """Pure ε: the ratio of densities at many points and neighbours, worst labels and corners."""
    loss, epsilon, n = losses.logistic(), 0.8, 3
    draws = np.random.default_rng(d)
    worst = 0.0
    for ridge in (1e-6, 0.05, 1.0):
        chosen = tilt(loss, rows=n, ridge=ridge, epsilon=epsilon, neighbours=neighbours)
        for _ in range(40):
            x = losses.fit_into(3 * draws.standard_normal((n, d)), bound=1.0)
            y = draws.choice([-1.0, 1.0], n)
            other, labels = x.copy(), y.copy()
            if neighbours == "replace-one":
                other[0], labels[0] = -x[0], y[0]
            else:
                other[0] = 0.0
            for length in (0.1, 1.0, 5.0, 30.0):
                w = length * draws.standard_normal(d)
                a = log_density(w, x, y, loss=loss, chosen=chosen, normal=False)
                b = log_density(w, other, labels, loss=loss, chosen=chosen, normal=False)
                worst = max(worst, abs(a - b))
    assert worst <= epsilon + 1e-9
    assert worst > 0.3 * epsilon


@pytest.mark.parametrize("neighbours", ["replace-one", "zero-out"])
def test_objective_hockey_stick_in_one_dimension(neighbours: str) -> None:
    """(ε, δ): ∫ (p − e^ε q)₊ over worst neighbours stays below δ, in both directions."""
    loss, epsilon, delta, n = losses.huber(width=0.7), 0.5, 1e-3, 4
    chosen = tilt(loss, rows=n, ridge=0.02, epsilon=epsilon, delta=delta, neighbours=neighbours)
    y = np.array([1.0, 1.0, -1.0, 0.2])
    x = np.array([[1.0], [1.0], [1.0], [-0.4]])
    other, labels = x.copy(), y.copy()
    if neighbours == "replace-one":
        labels[0] = -1.0
    else:
        other[0] = 0.0
    grid = np.linspace(-4000, 4000, 200_001)

    def density(rows: Any, told: Any) -> Any:
        scores = grid[:, None] * rows[:, 0]
        slopes = np.clip(scores - told, -0.7, 0.7)
        b = -(slopes @ rows[:, 0] + n * chosen.ridge * grid)
        bend = (np.abs(scores - told) <= 0.7) @ rows[:, 0] ** 2 + n * chosen.ridge
        return norm.pdf(b, scale=chosen.scale) * bend

    p, q = density(x, y), density(other, labels)
    step = grid[1] - grid[0]
    assert p.sum() * step == pytest.approx(1, abs=1e-3)
    for a, b in ((p, q), (q, p)):
        assert np.maximum(a - math.exp(epsilon) * b, 0).sum() * step <= delta


def test_the_distance_to_the_exact_minimiser_is_paid_for() -> None:
    x, y = losses.fit_into(np.random.default_rng(0).normal(size=(50, 2)), bound=1.0), np.ones(50)
    common = {"epsilon": 1.0, "ridge": 0.1, "tolerance": 1e-6}
    pure = objective_perturbation(losses.logistic(), x, y, test_seed=0, **common)
    assert pure.details["cover"] == pytest.approx(2e-6 / 0.1 / 0.001)
    both = objective_perturbation(losses.logistic(), x, y, delta=1e-6, test_seed=0, **common)
    mu = gaussian.mu(epsilon=0.001, delta=1e-9)
    assert both.details["cover"] == pytest.approx(2e-6 / 0.1 / mu)
    assert pure.statement.epsilon == both.statement.epsilon == 1.0
    main = tilt(losses.logistic(), rows=50, ridge=0.1, epsilon=0.999, delta=0.999e-6, dimension=2)
    assert both.details["noise"] == pytest.approx(main.scale)


# --- sensitivities by brute force ---------------------------------------------------------------


def test_sums_move_by_at_most_the_clip_norm() -> None:
    rng = np.random.default_rng(2)
    rule = SumsRule(features=3, clip_norm=0.8, tau=1.3)
    for scale in (1e-3, 1.0, 1e8, 1e200):
        x, y = scale * rng.normal(size=(40, 3)), rng.uniform(-1, 1, 40)
        one = [np.linalg.norm(rule.clipped_sum(x[i : i + 1], y[i : i + 1])) for i in range(40)]
        assert np.all(np.isfinite(one))
        assert max(one) <= 0.8


@pytest.mark.parametrize("neighbours", ["replace-one", "zero-out"])
def test_recursive_estimate_moves_within_its_reach(neighbours: str) -> None:
    """Whole recursion on neighbours along one path of iterates, every place of the row."""
    plan = rec.Recursion.plan(rows=24, steps=4, rate=0.3)
    loss, draws = losses.logistic(order=math.inf, feature_bound=1.5), np.random.default_rng(3)
    first, step = plan.reaches(loss, radius=1.0, neighbours=neighbours)
    head, batches = plan.slices()
    used = [0.0, 0.0]
    for _ in range(150):
        x = 1.5 * draws.choice([-1.0, 1.0], (24, 2))
        y = draws.choice([-1.0, 1.0], 24)
        place = int(draws.integers(24))
        other, labels = x.copy(), y.copy()
        if neighbours == "replace-one":
            labels[place] *= -1
        else:
            other[place] = 0.0
        path = [np.zeros(2)]
        for _ in range(plan.steps):
            v = L1Ball(1.0).vertex(int(draws.integers(4)), 2)
            path.append((1 - plan.rate) * path[-1] + plan.rate * v)
        moved = []
        for rows, told in ((x, y), (other, labels)):
            d = loss.data_gradient(path[0], rows[head], told[head]) / plan.first
            out = [d]
            for t, batch in enumerate(batches, start=1):
                d = (1 - plan.rate) * d + plan.increment(
                    loss, path[t], path[t - 1], rows[batch], told[batch]
                )
                out.append(d)
            moved.append(np.array(out))
        gap = np.abs(moved[0] - moved[1]).max(axis=1)
        born = (
            0
            if place < plan.first
            else next((t for t, b in enumerate(batches, 1) if b.start <= place < b.stop), None)
        )
        if born is None:
            assert gap.max() == 0
            continue
        reach = first if born == 0 else step
        decays = (1 - plan.rate) ** np.arange(plan.steps + 1 - born)
        assert np.all(gap[:born] == 0)
        assert np.all(gap[born:] <= reach * decays * (1 + 1e-9))
        used[born > 0] = max(used[born > 0], float(gap[born] / reach))
    assert used[0] > 0.49  # logistic slopes are 1/2 at 0, where the first batch is read


def test_tree_of_gradients_counts_leaves_and_drift() -> None:
    """Leaves below a right child, and how far the iterate may have moved since its parent."""
    for phase in phase_plan(5000, phases=4):
        points, path = [0] * (phase.depth + 1), []
        leaves_of: dict[int, int] = {}
        drift_of: dict[int, int] = {}
        owner = [0] * (phase.depth + 1)
        for leaf in range(2**phase.depth):
            turned = phase.depth if leaf == 0 else (leaf & -leaf).bit_length() - 1
            top = phase.depth - turned
            if leaf:
                node = len(path) + 1
                path.append((node, top))
                drift_of[node] = leaf - points[top - 1]  # one move of the iterate per leaf
                points[top] = leaf
                owner[top] = node
            for j in range(top + 1, phase.depth + 1):
                points[j], owner[j] = points[j - 1], owner[j - 1]
            # The value used at the leaf is the sum over the chain of right children above it.
            chain = {n for n in owner if n}
            for n in chain:
                leaves_of[n] = leaves_of.get(n, 0) + 1
        for node, depth in path:
            below = 2 ** (phase.depth - depth)
            assert leaves_of[node] <= below
            assert drift_of[node] <= below


def test_share_of_a_row_in_accelerated_sums() -> None:
    """Random weights inside the ball: the increment never exceeds its bound."""
    loss, draws = losses.logistic(feature_bound=2.0), np.random.default_rng(4)
    worst = 0.0
    for _ in range(300):
        steps, radius = 12, 1.5
        z = Ball(radius).project(draws.standard_normal(2) * 9)
        w = point = z
        row, label = losses.fit_into(9 * draws.standard_normal((1, 2)), bound=2.0), np.ones(1)
        for t in range(1, steps + 1):
            tau = 2 / (t + 1)
            previous, point = point, (1 - tau) * w + tau * z
            new = loss.data_gradient(point, row, label)
            share = new + (t - 1) * (new - loss.data_gradient(previous, row, label))
            bound = increment_bound(loss, radius=radius, steps=t)
            worst = max(worst, float(np.linalg.norm(share)) / bound)
            # The farthest jumps there are: from one end of the ball to the other.
            z = Ball(radius).project(-np.sign(t % 2 - 0.5) * row[0] * 99)
            w = (1 - tau) * w + tau * z
    assert 0.2 < worst <= 1 + 1e-12


@pytest.mark.parametrize(("p", "d"), [(1.001, 50), (1.1, 3), (1.5, 8), (2.0, 5)])
def test_generalized_gaussian_loss_by_sampling(p: float, d: int) -> None:
    """E e^{(α−1)·loss} at α = 2 for the worst shifts of norm one: at most e^{κα/(2σ²)·(α−1)}."""
    from noshuffle.convex.solvers.generalized_gaussian import sample

    shape = shape_of(Norm(p), d, noise="generalized")
    sigma = 2.0 * math.sqrt(shape.kappa)
    z = sample(shape, sigma=sigma, count=40_000, draws=np.random.default_rng(5))
    q = min(Norm(p).q, 1e6)
    for u in (np.eye(d)[0], np.full(d, d ** (-1 / q))):
        energy = (
            np.linalg.norm(z - u, ord=shape.r, axis=1) ** 2
            - np.linalg.norm(z, ord=shape.r, axis=1) ** 2
        ) / (2 * sigma**2)
        # D_2(P_u ‖ P_0) = log E_{z∼P_0} e^{−2·energy}
        moments = np.exp(-2 * energy)
        found = math.log(moments.mean() - 4 * moments.std() / math.sqrt(len(z)))
        assert found <= shape.kappa * 2 / (2 * sigma**2)


def test_batches_by_place_refuse_added_and_removed_rows() -> None:
    x, y = np.ones((30, 2)) / 2, np.ones(30)
    for solver in (ftrl, accelerated_srgd):
        with pytest.raises(InvalidInput, match="neighbours"):
            solver(
                losses.logistic(), x, y, epsilon=1.0, delta=1e-6, domain=Ball(1.0),
                neighbours="add-remove",
            )  # fmt: skip


def test_a_public_number_of_rows_goes_with_zero_out() -> None:
    x, y = np.ones((60, 2)) / 2, np.ones(60)
    common = {"epsilon": 2.0, "delta": 1e-5, "domain": Ball(1.0), "test_seed": 0}
    for run in (
        dp_sgd(losses.logistic(), x, y, rate=0.2, steps=5, **common),
        dp_svrg(losses.logistic(), x, y, epochs=1, steps=3, rate=0.2, **common),
    ):
        assert run.statement.neighbours == "zero-out"
        assert any("(60) is public" in s for s in run.statement.assumptions)


def test_rho_budget_is_on_the_safe_side() -> None:
    from noshuffle.accounting import renyi

    for epsilon, delta in ((0.1, 1e-6), (1.0, 1e-9), (8.0, 1e-5)):
        rho = rho_budget(epsilon=epsilon, delta=delta)
        assert renyi.epsilon_from_rho(rho=rho, delta=delta, real_orders=True) <= epsilon
        # A Gaussian of the same ρ is really within (ε, δ).
        assert gaussian.epsilon(mu=math.sqrt(2 * rho), delta=delta) <= epsilon
