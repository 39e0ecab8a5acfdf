"""Every closed form against the definition of the argmin it claims to be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn

from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.optim import FTRL, box, elastic_net, group_lasso, l1_ball, l2_ball, lasso, simplex
from noshuffle.optim.composite import GroupLasso, solve
from noshuffle.optim.constraints import Box, L1Ball, L2Ball

SETS = {
    "none": None,
    "l2": l2_ball(1.3),
    "box": box(-0.4, 0.7),
    "simplex": simplex(1.5),
    "l1": l1_ball(1.1),
}
PENALTIES = {
    "none": None,
    "lasso": lasso(0.3),
    "group": group_lasso(0.4),
    "elastic": elastic_net(0.2, 0.5),
}
REFUSED = {("box", "group"), ("simplex", "group"), ("l1", "group")}
PAIRS = [(s, p) for s in SETS for p in PENALTIES if (s, p) not in REFUSED]


def is_inside(constraint, theta, slack=1e-9):
    flat = torch.cat([t.reshape(-1) for t in theta])
    if constraint is None:
        return True
    if isinstance(constraint, L2Ball):
        return flat.norm() <= constraint.radius + slack
    if isinstance(constraint, Box):
        return bool(((flat >= constraint.low - slack) & (flat <= constraint.high + slack)).all())
    if isinstance(constraint, L1Ball):
        return flat.abs().sum() <= constraint.radius + slack
    return bool((flat >= -slack).all()) and abs(flat.sum() - constraint.total) < slack


def feasible(constraint, theta):
    return theta if constraint is None else constraint.project(theta)


def value_of(penalty, theta):
    """r(θ) by its definition."""
    if penalty is None:
        return 0.0
    if isinstance(penalty, GroupLasso):
        rows = [t.reshape(len(t) if t.dim() > 1 else 1, -1) for t in theta]
        return penalty.strength * sum(float(r.norm(dim=1).sum()) for r in rows)
    l1, l2 = (sum(float(t.abs().pow(k).sum()) for t in theta) for k in (1, 2))
    return penalty.l1 * l1 + 0.5 * penalty.l2 * l2


def objective(theta, u, weight, penalty):
    quadratic = sum(0.5 * float((a - b).square().sum()) for a, b in zip(theta, u))
    return quadratic + weight * value_of(penalty, theta)


@pytest.mark.parametrize(("set_name", "penalty_name"), PAIRS)
def test_solution_is_feasible_and_no_feasible_point_is_better(set_name, penalty_name):
    constraint, penalty = SETS[set_name], PENALTIES[penalty_name]
    rng = torch.Generator().manual_seed(len(set_name) * 7 + len(penalty_name))
    for trial in range(5):
        u = [torch.randn(s, generator=rng, dtype=torch.float64) for s in [(3, 2), (4,), ()]]
        weight = 0.1 + trial * 0.2
        best = solve(u, weight=weight, composite=penalty, constraint=constraint)
        assert is_inside(constraint, best)
        value = objective(best, u, weight, penalty)
        for scale in (1e-3, 1e-2, 0.1, 1.0):
            for _ in range(25):
                move = [scale * torch.randn(t.shape, generator=rng, dtype=t.dtype) for t in best]
                other = feasible(constraint, [b + m for b, m in zip(best, move)])
                assert objective(other, u, weight, penalty) >= value - 1e-12


@pytest.mark.parametrize(("set_name", "penalty_name"), PAIRS)
def test_against_a_numerical_solver(set_name, penalty_name):
    """Split θ = p − q with p, q ≥ 0 makes l1 terms smooth, so SLSQP can be trusted."""
    if penalty_name == "group":
        pytest.skip("not smooth at zero: the perturbation test covers it")
    constraint, penalty = SETS[set_name], PENALTIES[penalty_name]
    u = np.random.default_rng(5).standard_normal(4)
    l1, l2 = (penalty.l1, penalty.l2) if penalty is not None else (0.0, 0.0)

    def cost(x):
        theta = x[:4] - x[4:]
        return 0.5 * ((theta - u) ** 2).sum() + l1 * x.sum() + 0.5 * l2 * (theta**2).sum()

    rules = {
        "none": [],
        "l2": [{"type": "ineq", "fun": lambda x: 1.3**2 - ((x[:4] - x[4:]) ** 2).sum()}],
        "box": [
            {"type": "ineq", "fun": lambda x: x[:4] - x[4:] + 0.4},
            {"type": "ineq", "fun": lambda x: 0.7 - x[:4] + x[4:]},
        ],
        "simplex": [
            {"type": "ineq", "fun": lambda x: x[:4] - x[4:]},
            {"type": "eq", "fun": lambda x: (x[:4] - x[4:]).sum() - 1.5},
        ],
        "l1": [{"type": "ineq", "fun": lambda x: 1.1 - x.sum()}],
    }[set_name]
    found = minimize(
        cost,
        np.full(8, 0.2),
        bounds=[(0, None)] * 8,
        constraints=rules,
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    theta = found.x[:4] - found.x[4:]
    ours = solve([torch.from_numpy(u)], weight=1.0, composite=penalty, constraint=constraint)
    np.testing.assert_allclose(ours[0].numpy(), theta, atol=2e-6)


@pytest.mark.parametrize("name", [n for n in SETS if n != "none"])
def test_projection_obeys_its_variational_inequality(name):
    """Π is the projection iff ⟨u − Πu, x − Πu⟩ ≤ 0 for every x in the set."""
    constraint = SETS[name]
    rng = torch.Generator().manual_seed(3)
    for _ in range(20):
        u = [2 * torch.randn(s, generator=rng, dtype=torch.float64) for s in [(3, 2), (5,)]]
        p = constraint.project(u)
        assert all(torch.allclose(a, b) for a, b in zip(p, constraint.project(p)))
        for _ in range(30):
            y = [3 * torch.randn(t.shape, generator=rng, dtype=t.dtype) for t in u]
            x = constraint.project(y)
            inner = sum(float(((a - b) * (c - b)).sum()) for a, b, c in zip(u, p, x))
            assert inner <= 1e-10


@pytest.mark.parametrize("gamma", [0.0, 0.8])
def test_optimizer_solves_algorithm_one_at_every_step(gamma):
    """θ_{t+1} minimises ⟨s_t,θ⟩ + t·r(θ) + (λ/2)‖θ−θ₀‖² in the ball; momentum filters both."""
    rng = torch.Generator().manual_seed(9)
    start = torch.randn(6, generator=rng, dtype=torch.float64) * 0.3
    theta = nn.Parameter(start.clone())
    lr, penalty, ball = 0.2, elastic_net(0.15, 0.1), l2_ball(0.8)
    optimizer = FTRL([theta], lr, momentum=gamma, composite=penalty, constraint=ball)
    sums, velocity, weight = torch.zeros(6), torch.zeros(6), 0.0
    for rounds in range(1, 9):
        g = torch.randn(6, generator=rng, dtype=torch.float64)
        theta.grad = g.clone()
        optimizer.step()
        sums = sums + g
        velocity, weight = gamma * velocity + sums, gamma * weight + rounds

        def value(x, velocity=velocity, weight=weight):
            quadratic = 0.5 / lr * float((x - start).square().sum())
            return float(velocity @ x) + weight * value_of(penalty, [x]) + quadratic

        mine = theta.detach()
        assert mine.norm() <= 0.8 + 1e-12
        for scale in (1e-3, 1e-1, 1.0):
            for _ in range(50):
                other = mine + scale * torch.randn(6, generator=rng, dtype=torch.float64)
                assert value(ball.project([other])[0]) >= value(mine) - 1e-10


def test_threshold_grows_with_time():
    """Soft threshold of s_t by t·κ: zero gradient in expectation leaves an exact zero."""
    theta = nn.Parameter(torch.zeros(2))
    optimizer = FTRL([theta], 0.5, composite=lasso(0.25))
    for _ in range(4):
        theta.grad = torch.tensor([1.0, 0.2])
        optimizer.step()
    assert theta.tolist() == pytest.approx([-0.5 * 4 * (1 - 0.25), 0.0])


def test_refusals():
    for set_name, penalty_name in sorted(REFUSED):
        with pytest.raises(Unsupported, match="no closed form"):
            solve(
                [torch.zeros(2)],
                weight=1.0,
                composite=PENALTIES[penalty_name],
                constraint=SETS[set_name],
            )
    with pytest.raises(InvalidInput):
        l2_ball(0.0)
    with pytest.raises(InvalidInput):
        box(1.0, 0.0)
    with pytest.raises(InvalidInput):
        lasso(-1.0)
