"""What a model is tried on before a program is captured are rows of the batch, not its padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from noshuffle.noise import test_source
from noshuffle.participation import MinSeparation
from noshuffle.plan import Plan
from noshuffle.strategies import identity
from noshuffle.training import Private, privatize
from noshuffle.training.compiled import Compiled

LOSS, SIZE, CLIP = nn.CrossEntropyLoss(), 8, 0.7


class Shrinking(nn.Module):
    """A rule about all of the batch that a graph can hold."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x.detach().max() > 3.0, x / 255.0, x)


def make() -> Private:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Shrinking(), nn.Tanh(), nn.Linear(8, 3))
    plan = Plan(participation=MinSeparation(9, 1, 9), strategy=identity(), noise_multiplier=0.0)
    private = privatize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        plan,
        clip_norm=CLIP,
        batch_size=SIZE,
        source=test_source(seed=1),
    )
    private.compiled = Compiled(private._parts, capacity=SIZE, captures=False)
    return private


def total(private: Private, x: Tensor, y: Tensor) -> Tensor:
    """The clipped sum that a step without noise releases."""
    private.step(LOSS, x, y, ids=np.arange(len(x)))
    grads = [p.grad for p in private.model.parameters()]
    return torch.cat([g.reshape(-1) for g in grads if g is not None]) * SIZE


@pytest.mark.parametrize("first", [1, 3])
def test_a_first_batch_of_few_rows_is_tried_beside_extreme_ones(first: int) -> None:
    """The zeros behind it stay zeros: nothing was seen, and a row moved sums by 5 clip norms."""
    generator = torch.Generator().manual_seed(1)
    x, y = 2 * torch.randn(SIZE, 6, generator=generator), torch.ones(SIZE, dtype=torch.int64)
    private = make()
    total(private, x[:first], y[:first])
    before = total(private, x, y)
    x[0] = 50.0
    after = total(private, x, y)
    assert (after - before).norm() <= 2 * CLIP * 1.001
    assert "written out per example" in str(private.fallbacks)
