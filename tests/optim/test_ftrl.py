"""FTRL against SGD, golden numbers, restarts, drift and state."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn

from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.optim import FTRL, box, elastic_net, group_lasso, l2_ball, lasso
from noshuffle.optim.ftrl import accumulate_


def drive(optimizer, params, gradients):
    for step in gradients:
        for p, g in zip(params, step):
            p.grad = g.clone()
        optimizer.step()
    return [p.detach().clone() for p in params]


def random_problem(seed, *, steps=25, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    shapes = [(3, 4), (5,), ()]
    start = [torch.randn(s, generator=g, dtype=dtype) for s in shapes]
    gradients = [[torch.randn(s, generator=g, dtype=dtype) for s in shapes] for _ in range(steps)]
    return start, gradients


def parameters(start):
    return [nn.Parameter(s.clone()) for s in start]


@pytest.mark.parametrize(
    ("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True), (0.5, True)]
)
def test_noiseless_equals_torch_sgd(momentum, nesterov):
    start, gradients = random_problem(1)
    ours, theirs = parameters(start), parameters(start)
    drive(FTRL(ours, 0.1, momentum=momentum, nesterov=nesterov), ours, gradients)
    sgd = torch.optim.SGD(theirs, lr=0.1, momentum=momentum, nesterov=nesterov)
    drive(sgd, theirs, gradients)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_equals_sgd_with_residual_noise(momentum):
    """Section 3.2: prefix noise b_t in FTRL is residual noise b_t − b_{t−1} in SGD."""
    start, gradients = random_problem(2)
    noise = random_problem(3)[1]  # b_t: any sequence at all
    zero = [torch.zeros_like(s) for s in start]
    before = [zero, *noise[:-1]]
    residual = [[g + b - a for g, b, a in zip(*row)] for row in zip(gradients, noise, before)]
    ours, theirs = parameters(start), parameters(start)
    drive(FTRL(ours, 0.05, momentum=momentum), ours, residual)
    # Algorithm 1 as written: s_t = Σ g + b_t, v_t = γ v + s_t, θ = θ₀ − η v.
    sums, velocity = zero, zero
    for g, b in zip(gradients, noise):
        sums = [s + x for s, x in zip(sums, g)]
        velocity = [momentum * v + s + n for v, s, n in zip(velocity, sums, b)]
    for p, s, v in zip(ours, start, velocity):
        torch.testing.assert_close(p.data, s - 0.05 * v, rtol=1e-12, atol=1e-12)
    drive(torch.optim.SGD(theirs, lr=0.05, momentum=momentum), theirs, residual)
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


def test_golden_numbers():
    theta = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = FTRL([theta], lr=0.1, momentum=0.9)
    seen = []
    for _ in range(3):
        theta.grad = torch.ones_like(theta)
        optimizer.step()
        seen.append(theta.item())
    assert seen == pytest.approx([-0.1, -0.29, -0.561], rel=1e-14)


def test_schedule_weights_the_gradients_that_arrive_under_it():
    start, gradients = random_problem(4, steps=12)
    ours, theirs = parameters(start), parameters(start)
    a, b = FTRL(ours, 0.1), torch.optim.SGD(theirs, lr=0.1)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 4, gamma=0.3) for o in (a, b)]
    for g in gradients:
        for params, optimizer, schedule in ((ours, a, schedules[0]), (theirs, b, schedules[1])):
            drive(optimizer, params, [g])
            schedule.step()
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


def test_no_drift_over_a_hundred_thousand_steps():
    """The compensated float32 total stays within one rounding of the exact sum; a plain one not."""
    total, lost = torch.zeros(64), torch.zeros(64)
    rng = np.random.default_rng(0)
    exact, plain = np.zeros(64), np.zeros(64, np.float32)
    for _ in range(1000):
        block = (rng.standard_normal((100, 64)) + 0.1).astype(np.float32)
        for row in torch.from_numpy(block):
            accumulate_(total, lost, row)
        for row in block:
            plain += row
        exact += block.sum(0, dtype=np.float64)
    error = np.abs(total.numpy() - exact).max()
    assert error <= np.spacing(np.float32(np.abs(exact).max()))
    assert np.abs(plain - exact).max() > 10 * error


def test_restart_conventions():
    start, gradients = random_problem(5, steps=10)
    kept, plain, moved = parameters(start), parameters(start), parameters(start)
    keep = FTRL(kept, 0.1, momentum=0.9)
    drive(keep, kept, gradients[:5])
    keep.restart(reanchor=False)
    drive(keep, kept, gradients[5:])
    drive(FTRL(plain, 0.1, momentum=0.9), plain, gradients)
    move = FTRL(moved, 0.1, momentum=0.9, composite=lasso(0.1))
    middle = parameters(drive(move, moved, gradients[:5]))
    move.restart(reanchor=True)
    drive(move, moved, gradients[5:])
    drive(FTRL(middle, 0.1, momentum=0.9, composite=lasso(0.1)), middle, gradients[5:])
    for a, b in zip(kept, plain):
        assert torch.equal(a, b)
    for a, b in zip(moved, middle):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("constraint", "composite"),
    [
        (None, None),
        (l2_ball(0.7), None),
        (l2_ball(0.7), group_lasso(0.05)),
        (box(-0.2, 0.3), elastic_net(0.01, 0.3)),
    ],
)
def test_state_round_trip_is_bit_identical(constraint, composite):
    start, gradients = random_problem(6, dtype=torch.float32)
    settings = {"momentum": 0.9, "constraint": constraint, "composite": composite}
    whole, first = parameters(start), parameters(start)
    drive(FTRL(whole, 0.1, **settings), whole, gradients)
    one = FTRL(first, 0.1, **settings)
    second = parameters(drive(one, first, gradients[:10]))
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    two = FTRL(second, 0.1, **settings)
    two.load_state_dict(torch.load(file, weights_only=True))
    drive(two, second, gradients[10:])
    for a, b in zip(whole, second):
        assert torch.equal(a, b)


def test_state_of_bfloat16_parameters_stays_wide():
    theta = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = FTRL([theta], 0.1)
    drive(optimizer, [theta], [[torch.full((3,), 1e-3, dtype=torch.bfloat16)]] * 7)
    other = FTRL([nn.Parameter(theta.detach().clone())], 0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    state = other.state[other.param_groups[0]["params"][0]]
    assert state["total"].dtype == torch.float32
    assert torch.equal(state["total"], optimizer.state[theta]["total"])


def test_parameter_groups_have_their_own_settings():
    a, b = nn.Parameter(torch.full((2,), 3.0)), nn.Parameter(torch.full((2,), 3.0))
    groups = [{"params": [a], "constraint": l2_ball(1.0)}, {"params": [b], "lr": 0.5}]
    drive(FTRL(groups, 0.1), [a, b], [[torch.ones(2), torch.ones(2)]])
    assert a.norm().item() == pytest.approx(1.0)
    assert torch.equal(b.data, torch.full((2,), 2.5))


def test_regularizer_balance_does_not_depend_on_momentum():
    """With a constant gradient below the l1 strength, every iterate is exactly zero."""
    for momentum in (0.0, 0.9):
        theta = nn.Parameter(torch.zeros(4))
        optimizer = FTRL([theta], 0.1, momentum=momentum, composite=lasso(1.0))
        drive(optimizer, [theta], [[torch.full((4,), 0.9)]] * 50)
        assert torch.equal(theta.data, torch.zeros(4))


def test_parameters_without_gradient_stay():
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = FTRL([a, b], 0.1)
    a.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(b.data, torch.ones(2))


def test_bad_input_is_one_line():
    p = [nn.Parameter(torch.zeros(1))]
    with pytest.raises(InvalidInput, match="momentum must lie"):
        FTRL(p, 0.1, momentum=1.0)
    with pytest.raises(InvalidInput, match="nesterov needs"):
        FTRL(p, 0.1, nesterov=True)
    with pytest.raises(InvalidInput, match="lr must be"):
        FTRL(p, -1.0)
    with pytest.raises(Unsupported, match="no closed form"):
        FTRL(p, 0.1, constraint=box(0, 1), composite=group_lasso(1.0))
    with pytest.raises(InvalidInput, match="saved with"):
        FTRL(p, 0.1).load_state_dict(FTRL(p, 0.1, constraint=box(0, 1)).state_dict())
