"""A loop that was interrupted replays its unsaved steps without any care of the user.

Loader workers, dropout and augmentations draw from torch's, NumPy's and Python's generators; the
step after the last checkpoint used to be released with other masks, and the run was then stuck.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from noshuffle.participation import Epochs
from noshuffle.plan import Plan
from noshuffle.strategies import tree
from noshuffle.training import fit_model, privatize, verify
from noshuffle.training.batches import with_ids
from noshuffle.training.private import Private

LOSS = nn.CrossEntropyLoss()
RULE = Epochs(epochs=3, steps_per_epoch=4)


class Augmented(Dataset[Any]):
    """Every example is drawn anew in every epoch, by one of three generators."""

    def __init__(self, how: str) -> None:
        made = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(24, 4, generator=made), torch.arange(24) % 2
        self.how = how

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        shift = {
            "torch": lambda: float(torch.rand(())),
            "numpy": lambda: float(np.random.random()),  # noqa: NPY002
            "python": random.random,
            "none": float,
        }[self.how]()
        return self.x[i] + shift, self.y[i]


def make(path: Path) -> Private:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 2))
    plan = Plan(participation=RULE, strategy=tree(), noise_multiplier=2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return privatize(model, optimizer, plan, clip_norm=1.0, batch_size=6, run=path)


def seed_worker(_: int) -> None:
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)


class Stop(Exception):
    pass


@pytest.mark.parametrize(
    ("how", "stop", "workers"),
    [
        *(("none", 8, 0), ("torch", 3, 0), ("torch", 11, 0), ("torch", 8, 2)),
        *(("numpy", 3, 0), ("numpy", 8, 0), ("python", 11, 0), ("python", 8, 2)),
    ],
)
def test_interrupted_and_started_again(tmp_path: Path, how: str, workers: int, stop: int) -> None:
    numbered = with_ids(Augmented(how))

    def loader() -> DataLoader[Any]:
        return DataLoader(
            numbered,
            batch_size=6,
            num_workers=workers,
            collate_fn=numbered.collate,
            worker_init_fn=seed_worker if workers else None,
        )

    def released(into: dict[int, np.ndarray]) -> Callable[[Any], None]:
        def look(where: Any) -> None:
            grads = [p.grad for p in where.private.model.parameters()]
            into[where.step] = torch.cat([g.reshape(-1) for g in grads]).numpy().copy()
            if len(into) == stop and into is first:
                raise Stop

        return look

    first: dict[int, np.ndarray] = {}
    second: dict[int, np.ndarray] = {}
    private = make(tmp_path / "run")
    random.seed(7)
    with pytest.raises(Stop):
        fit_model(private, loader(), LOSS, checkpoint_every=5, callbacks=[released(first)])
    private.ledger.let_go()
    private._parts.release._lock = None
    torch.manual_seed(99)  # a new process starts anyhow
    np.random.seed(99)  # noqa: NPY002
    random.seed(99)
    again = make(tmp_path / "run")
    fit_model(again, loader(), LOSS, checkpoint_every=5, callbacks=[released(second)])
    saved = stop // 5 * 5
    assert sorted(second) == list(range(saved + 1, 13))
    for step in range(saved + 1, stop + 1):
        assert np.array_equal(first[step], second[step]), step
    noted = [note["step"] for note in again.ledger.notes("replay")]
    assert noted == list(range(saved, stop))
    assert again.ledger.notes("skip") == []
    assert again.steps_released == 12
    again.close()
    verdict = verify(tmp_path / "run")
    assert (verdict.answer, verdict.lives) == ("PROVED", 2), verdict.words()
