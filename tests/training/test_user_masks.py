"""Random layers of user-level runs: a user with other rows moves the masks of all others."""

from __future__ import annotations

import numpy as np
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


def test_masks_of_a_user_level_run_are_secret() -> None:
    """Under torch's own seed a user who left moved the sum by 3.2 clip norms."""
    everybody = np.arange(10)
    assert not torch.equal(gradient(everybody), gradient(everybody))
    again = [gradient(everybody, source=a_source(seed=1)) for _ in range(2)]
    assert torch.equal(*again)


def test_an_example_that_is_zeroed_out_keeps_its_row_and_the_others_their_masks() -> None:
    everybody = np.arange(10)
    again = [gradient(everybody, unit="example") for _ in range(2)]
    assert torch.equal(*again)
