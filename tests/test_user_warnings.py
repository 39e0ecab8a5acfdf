"""Warnings name the line of the user, whichever way led to them."""

from __future__ import annotations

import ast
import inspect
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.model_selection import cross_val_score
from torch import nn

import noshuffle as ns
from noshuffle.convex import PrivateLogisticRegression
from noshuffle.convex.given_bounds import NoBounds
from noshuffle.errors import ProbablyNotMeant
from noshuffle.noise import test_source
from noshuffle.training import fit_model, in_order
from noshuffle.training.batches import TensorBatches

ROOT = Path(__file__).parents[1] / "src" / "noshuffle"
X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(2, (24,), generator=torch.Generator().manual_seed(1))
W = torch.ones(12, 1)
LOSS = nn.CrossEntropyLoss()


def make():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    plan = ns.Plan.fit(ns.SinglePass(4), mechanism="tree", noise_multiplier=1.0, delta=1e-5)
    return ns.privatize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        plan,
        clip_norm=1.0,
        batch_size=4,  # of twelve: a warning of the first look
        source=test_source(seed=1),
    )


def by_step(private):
    private.step(LOSS, X[:12], Y[:12])


def by_advance(private):
    private.advance(LOSS, (X[:12], Y[:12]))


def by_parts(private):
    with private.accumulate() as step:
        step.add(LOSS, (X[:6], Y[:6]))
        step.add(LOSS, (X[6:12], Y[6:12]))


def by_loop(private):
    private.criterion(LOSS)(private.model(X[:12]), Y[:12]).backward()
    private.optimizer.step()


def by_fit_model(private):
    fit_model(private, TensorBatches((X, Y), in_order(24, 12)), LOSS)


def of_rows_beside(private):
    private.step(lambda out, y: (W * nn.functional.cross_entropy(out, y)).sum(), X[:12], Y[:12])


WAYS = [by_step, by_advance, by_parts, by_loop, by_fit_model, of_rows_beside]


@pytest.mark.parametrize("way", WAYS)
def test_what_a_first_look_finds_points_at_the_users_line(way):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        way(make())
    own = [one for one in told if issubclass(one.category, ProbablyNotMeant)]
    assert own
    lines, first = inspect.getsourcelines(way)
    for one in own:
        assert one.filename == __file__
        assert first < one.lineno < first + len(lines)


def test_what_a_fit_finds_points_at_the_users_line():
    rows, sides = np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 2
    model = PrivateLogisticRegression(epsilon=1.0, delta=1e-4)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model.fit(rows, sides)
        cross_val_score(model, rows, sides, cv=2)
    own = [one for one in told if issubclass(one.category, NoBounds)]
    assert len(own) == 3
    assert {one.filename for one in own} == {__file__}


def test_nothing_counts_stack_levels():
    """A number that is right for one way in is wrong for the next."""
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
                pytest.fail(f"{path}:{node.lineno}: use user_warnings.warn_user")
