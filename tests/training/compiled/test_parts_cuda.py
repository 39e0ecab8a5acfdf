"""Batches in parts on a GPU: captured runs equal eager ones, and keep every rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.runs import weights
from tests.training.compiled.test_parts import sums_are_gone
from tests.training.compiled.test_step_cuda import data, network, sgd
from tests.training.compiled.test_step_cuda import plain_adam as adam
from torch import nn

from noshuffle.errors import ParticipationViolation, ReplayRefused
from noshuffle.noise import test_source
from noshuffle.participation import Epochs, MinSeparation, SinglePass
from noshuffle.plan import Plan
from noshuffle.strategies import blt, identity, tree
from noshuffle.training import privatize, verify
from noshuffle.training.compiled.parts import StepInParts

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_products"),
]
LOSS = nn.CrossEntropyLoss()
SIZE = 16
CLOSE = {"rtol": 1e-3, "atol": 1e-4}


def rmsprop(model):
    # Norms of twins have tolerances 3e-5 of themselves apart; an ε of 1e-8 makes 1e-2 of them.
    return torch.optim.RMSprop(model.parameters(), lr=0.02, eps=0.1)


def make(*, compile, rule=None, strategy=None, optimizer=sgd, model=None, z=0.5, **options):
    unit = options.pop("unit", "example")
    plan = Plan(
        participation=rule or Epochs(epochs=4, steps_per_epoch=4),
        strategy=strategy or tree(),
        noise_multiplier=z,
        unit=unit,
    )
    model = model or network()
    settings = {"clip_norm": 0.7, "batch_size": SIZE, "source": test_source(seed=1), **options}
    return privatize(model, optimizer(model), plan, compile=compile, **settings)


def twins(**options):
    return [make(compile=compile, **options) for compile in (False, "auto")]


def in_parts(private, t, sizes, *, has_ids=True, ids=None, xy=None):
    (x, y), at = xy or data(), SIZE * (t % 4)
    with private.accumulate() as step:
        for size in sizes:
            rows = slice(at, at + size)
            whose = (np.arange(at, at + size) if ids is None else ids[rows]) if has_ids else None
            step.add(LOSS, (x[rows], y[rows]), ids=whose)
            at += size
    return step


def single(private, t, *, has_ids=True):
    (x, y), rows = data(), slice(SIZE * (t % 4), SIZE * (t % 4) + SIZE)
    ids = range(rows.start, rows.stop) if has_ids else None
    return private.step(LOSS, x[rows], y[rows], ids=ids)


@pytest.mark.parametrize("optimizer", [sgd, adam, rmsprop])
@pytest.mark.parametrize("strategy", [identity(), tree(), blt((0.9, 0.5), (0.1, 0.2))])
@pytest.mark.parametrize("has_ids", [True, False], ids=["ids", "fingerprints"])
def test_captured_parts_equal_eager_ones_between_single_steps(
    optimizer, strategy, has_ids, off_grid
):
    slow, fast = twins(optimizer=optimizer, strategy=strategy)
    for private in (slow, fast):
        for t in range(12):
            if t % 4 == 2:
                single(private, t, has_ids=has_ids)
                continue
            step = in_parts(private, t, (6, 6, 4) if t % 4 else (5, 11), has_ids=has_ids)
            assert isinstance(step, StepInParts) == (private is fast)
            assert private is slow or sums_are_gone(fast)
    assert "rows are replays" in fast.why, fast.fallbacks
    assert not fast.fallbacks
    torch.testing.assert_close(weights(fast), weights(slow), **CLOSE)
    losses = [private.outcome.losses.cpu() for private in (fast, slow)]
    torch.testing.assert_close(*losses, **CLOSE)
    assert fast._parts.noise.step == 12
    told = [[(r.batch, r.units.tolist()) for r in run.ledger.rows()] for run in (slow, fast)]
    assert told[0] == told[1]


def test_dropout_has_the_masks_of_eager_parts(off_grid):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10)).cuda()

    slow, fast = (make(compile=c, model=model()) for c in (False, "auto"))
    for private in (slow, fast):
        for t in range(4):
            in_parts(private, t, (8, 8))
    torch.testing.assert_close(weights(fast), weights(slow), **CLOSE)
    assert all(program.is_random for program in fast._sums._programs.values())


def test_users_dropped_rows_and_rows_that_are_not_finite():
    ids = np.arange(64) // 2
    x, y = data()
    x[2], x[20] = float("nan"), float("inf")
    slow, fast = twins(unit="user", rule=MinSeparation(8, 1, 8), z=0.0)
    for private in (slow, fast):
        for t in range(3):
            in_parts(private, t, (6, 6, 4), ids=ids, xy=(x, y))
            assert (len(private.outcome.norms), private.outcome.nonfinite) == (8, int(t < 2))
    torch.testing.assert_close(weights(fast), weights(slow), **CLOSE)
    assert not fast.fallbacks
    slow, fast = twins(rule=SinglePass(steps=4), on_violation="drop", z=0.0)
    for private in (slow, fast):
        in_parts(private, 0, (8, 8), xy=(x, y))
        with private.accumulate() as step:
            step.add(LOSS, (x[4:12], y[4:12]), ids=np.arange(4, 12))
            step.add(LOSS, (x[12:24], y[12:24]), ids=np.arange(12, 24))
        assert (private.outcome.dropped, private.outcome.nonfinite) == (12, 1)
    torch.testing.assert_close(weights(fast), weights(slow), **CLOSE)


def test_what_is_refused_leaves_nothing_and_gradients_lie_elsewhere():
    private = make(compile="auto", rule=SinglePass(steps=4))
    in_parts(private, 0, (8, 8))
    given = [p.grad for p in private.model.parameters()]
    before, kept, (x, y) = weights(private), [g.clone() for g in given], data()

    def refused():
        with private.accumulate() as step:
            step.add(LOSS, (x[16:24], y[16:24]), ids=np.arange(16, 24))
            assert all(torch.equal(a, b) for a, b in zip(given, kept))
            step.add(LOSS, (x[24:32], y[24:32]), ids=np.arange(8))

    with pytest.raises(ParticipationViolation, match="already took part"):
        refused()
    assert sums_are_gone(private)
    assert torch.equal(weights(private), before)
    for t in (1, 2):
        in_parts(private, t, (8, 8))
    assert private.steps_released == 3


def test_resume_is_bit_for_bit_and_replays_are_checked(tmp_path):
    every = {0: (6, 6, 4), 1: (3, 13), 3: (8, 8), 5: (6, 6, 4), 6: (16,)}

    def walk(private, steps):
        for t in steps:
            in_parts(private, t, every[t]) if t in every else single(private, t)

    whole = make(compile="auto", run=tmp_path / "whole")
    walk(whole, range(8))
    assert "; exact" in whole.ledger.meta("program")
    first = make(compile="auto", run=tmp_path / "run")
    walk(first, range(2))
    first.save()
    walk(first, range(2, 6))  # released after the checkpoint, then lost
    first.ledger.flush()
    del first
    again = make(compile="auto", run=tmp_path / "run", on_replay="refuse")
    assert again.resume() == 2
    walk(again, range(2, 3))
    x, y = data()
    with pytest.raises(ReplayRefused, match="differs"):
        in_parts(again, 3, (8, 8), xy=(x + 1, y))
    walk(again, range(3, 8))
    assert [note["step"] for note in again.ledger.notes("replay")] == [2, 3, 4, 5]
    found = [[private.ledger.digest(t) for t in range(8)] for private in (again, whole)]
    assert found[0] == found[1]
    assert torch.equal(weights(again), weights(whole))
    again.close()
    assert not verify(tmp_path / "run").refuted


def test_schedulers_settings_and_parameters_that_move(off_grid):
    slow, fast = twins()
    for private in (slow, fast):
        own = private._parts.optimizer
        rule = torch.optim.lr_scheduler.StepLR(own, 3, gamma=0.5)
        for t in range(12):
            if t == 4:
                own.param_groups[0]["momentum"] = 0.5
            if t == 7:
                weight = next(private.model.parameters())
                weight.data = weight.data.clone()
            single(private, t) if t % 3 == 1 else in_parts(private, t, (10, 6))
            rule.step()
    torch.testing.assert_close(weights(fast), weights(slow), **CLOSE)
