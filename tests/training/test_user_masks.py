"""Random layers: a user with other rows, or a longer row, moves the masks of all others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from noshuffle import MinSeparation, Plan, privatize
from noshuffle.noise import Source
from noshuffle.noise import test_source as a_source

OWN = np.repeat(np.arange(10), 3)


def gradient(own: np.ndarray, *, unit: str = "user", source: Source | None = None) -> Tensor:
    """The sum of a step on rows of these users, of a plan without noise."""
    g = torch.Generator().manual_seed(3)
    x, y = torch.randn(30, 6, generator=g), torch.arange(30) % 3
    torch.manual_seed(0)  # torch's own seed is no secret: in a new process it is the same, too
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    plan = Plan.fit(MinSeparation(4, 1, 4), mechanism="identity", noise_multiplier=0.0, unit=unit)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    private = privatize(model, optimizer, plan, batch_size=1, clip_norm=0.5, source=source)
    rows = np.flatnonzero(np.isin(OWN, own))
    ids = OWN[rows] if unit == "user" else rows
    private.step(nn.functional.cross_entropy, x[rows], y[rows], ids=ids)
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("unit", ["user", "example"])
def test_masks_are_secret_and_those_of_a_test_source_come_again(unit: str) -> None:
    """Under torch's own seed a user who left moved the sum by 3.2 clip norms, and an example that
    all others are padded to by up to 9.5 (64 rows, dropout of 0.3 in a small transformer)."""
    everybody = np.arange(10)
    assert not torch.equal(gradient(everybody, unit=unit), gradient(everybody, unit=unit))
    again = [gradient(everybody, unit=unit, source=a_source(seed=1)) for _ in range(2)]
    assert torch.equal(*again)
