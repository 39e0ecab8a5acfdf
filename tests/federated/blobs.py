"""A small task of two blobs, a model for it, and what a run folder says of its users."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from torch import nn

from noshuffle.federated.tasks import FederatedTask
from noshuffle.release.ledger_tables import Evidence


def a_task(users: int = 30, *, held_out: int = 200, prefix: str | None = "u") -> FederatedTask:
    """Every user has a few points, some have none; ids are numbers without a prefix."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 9, users)
    y = rng.integers(0, 2, sizes.sum() + held_out)
    x = rng.normal(size=(len(y), 1, 2, 2)) * 20 + 128 + 30 * (2 * y - 1)[:, None, None, None]
    pixels, labels = torch.from_numpy(x.clip(0, 255).astype(np.uint8)), torch.from_numpy(y)
    n, starts = int(sizes.sum()), np.append(0, np.cumsum(sizes))
    names = tuple(i if prefix is None else f"{prefix}{i}" for i in range(users))
    return FederatedTask(
        "blobs", "image", names, starts, pixels[:n], labels[:n], pixels[n:], labels[n:], 2
    )


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def fact(run: Path) -> str | None:
    """How users were told apart, by the ledger."""
    evidence = Evidence(run / "ledger.sqlite")
    try:
        return evidence.bound().get("user_identity")
    finally:
        evidence.close()


def saved(run: Path) -> str:
    """The assumptions of the saved statement."""
    return " ".join(json.loads((run / "statement.json").read_text())["assumptions"])
