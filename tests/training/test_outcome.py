"""Figures of a step, against slow definitions."""

from __future__ import annotations

import math

import pytest
import torch

from noshuffle.training.outcome import Outcome


def outcome(losses):
    t = torch.tensor(losses, dtype=torch.float32)
    return Outcome(losses=t, norms=t, bad=~torch.isfinite(t), dropped=0)


@pytest.mark.parametrize(
    "losses", [[1.0, 2.5], [3e38, 3e38, 3e38], [1.0, math.nan, 4.0], [math.inf, -math.inf, 2.0]]
)
def test_the_loss_is_the_mean_of_what_is_finite(losses):
    finite = torch.tensor(losses)[torch.isfinite(torch.tensor(losses))].double()
    assert outcome(losses).loss == float(finite.mean())


@pytest.mark.parametrize("losses", [[], [math.nan], [math.inf, math.nan]])
def test_no_finite_loss(losses):
    assert math.isnan(outcome(losses).loss)


def test_printed_it_shows_no_raw_figure():
    made = outcome([0.1234567, 2.3456789, math.nan])
    for text in (str(made), repr(made), f"{made}"):
        assert text == "Outcome(3 examples; raw figures in .losses, .norms)"
    assert made.losses[1] == torch.tensor(2.3456789)  # they are there for who asks
