"""Batches in parts, which are eager, between compiled steps (without capture) of one run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.runs import weights
from torch import nn

from noshuffle.noise import test_source
from noshuffle.participation import Epochs
from noshuffle.plan import Plan
from noshuffle.strategies import tree
from noshuffle.training import privatize
from noshuffle.training.compiled import Compiled

LOSS = nn.CrossEntropyLoss()
SIZE = 8
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(autouse=True)
def _off_grid(monkeypatch):
    """Twins are compared before the noise's grid, which would hide or enlarge what differs."""
    monkeypatch.setattr("noshuffle.noise.grid.grid_step", lambda _: 0.0)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def data(n=32):
    g = torch.Generator().manual_seed(1)
    return 2 * torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)


def make(*, compiled, optimizer=sgd):
    model, rule = network(), Epochs(epochs=3, steps_per_epoch=4)
    plan = Plan(participation=rule, strategy=tree(), noise_multiplier=0.5)
    settings = {"batch_size": SIZE, "clip_norm": 0.7, "source": test_source(seed=1)}
    private = privatize(model, optimizer(model), plan, **settings)
    if compiled:
        private.compiled = Compiled(private._parts, capacity=SIZE, captures=False)
    return private


def twins(**options):
    return [make(compiled=compiled, **options) for compiled in (False, True)]


def in_parts(private, t, sizes):
    """Step t, the rows from 8t on, in parts of these sizes."""
    (x, y), at = data(), SIZE * (t % 4)
    with private.accumulate() as step:
        for size in sizes:
            rows = slice(at, at + size)
            step.add(LOSS, (x[rows], y[rows]), ids=np.arange(at, at + size))
            at += size


def single(private, t):
    (x, y), rows = data(), slice(SIZE * (t % 4), SIZE * (t % 4) + SIZE)
    private.step(LOSS, x[rows], y[rows], ids=range(rows.start, rows.stop))


def alike(slow, fast):
    torch.testing.assert_close(weights(fast), weights(slow), **CLOSE)
    for name in ("losses", "norms", "bad"):
        one, other = (getattr(run.outcome, name) for run in (slow, fast))
        assert one.dtype == other.dtype or name == "norms"
        torch.testing.assert_close(other.float(), one.float(), equal_nan=True, **CLOSE)
    assert slow.outcome.dropped == fast.outcome.dropped


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.05)


def rmsprop(model):
    return torch.optim.RMSprop(model.parameters(), lr=0.05)


@pytest.mark.parametrize("optimizer", [sgd, adam, rmsprop])
@pytest.mark.parametrize("sizes", [(5, 3), (1, 7), (0, 4, 0, 4)])
def test_parts_between_compiled_steps_equal_a_run_that_is_eager(sizes, optimizer):
    """One stream of noise for both: rows, sums, parameters are the same."""
    slow, fast = twins(optimizer=optimizer)
    for private in (slow, fast):
        for t in range(9):
            single(private, t) if t in (2, 3, 6) else in_parts(private, t, sizes)
    alike(slow, fast)
    assert fast.compiled._programs
    assert not fast.fallbacks
    assert fast._parts.noise.step == 9


def test_gradients_that_were_given_out_are_not_where_the_sum_is():
    """Code of the user runs between parts."""
    private = make(compiled=True)
    single(private, 0)
    given = [p.grad for p in private.model.parameters()]
    kept = [g.clone() for g in given]
    x, y = data()
    with private.accumulate() as step:
        step.add(LOSS, (x[8:12], y[8:12]), ids=np.arange(8, 12))
        assert all(p.grad is None for p in private.model.parameters())
        assert all(torch.equal(a, b) for a, b in zip(given, kept))
        step.add(LOSS, (x[12:16], y[12:16]), ids=np.arange(12, 16))
    assert all(p.grad is not None for p in private.model.parameters())
