"""Captured runs and eager ones are compared as exactly as can be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def exact_products() -> Iterator[None]:
    """Full single precision, so that two ways can be compared."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture
def off_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twins are compared before the noise's grid, which would hide or enlarge what differs."""
    monkeypatch.setattr("noshuffle.noise.grid.grid_step", lambda _: 0.0)
