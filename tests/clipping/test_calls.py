"""A steady clipped sum goes through few functions in few files, and runs the model once."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import noshuffle
from noshuffle.clipping import Flat, Ghost

ROOT = str(Path(noshuffle.__file__).parent)


@pytest.mark.parametrize(("inputs", "hidden", "size"), [(20, 32, 32), (784, 128, 250)])
def test_a_steady_sum_of_a_small_network(inputs: int, hidden: int, size: int) -> None:
    """It made 273 calls in 23 files, most of them to find out again what had not changed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 5))
    engine, loss = Ghost(), nn.CrossEntropyLoss()
    batches = [(torch.randn(size, inputs), torch.randint(5, (size,))) for _ in range(4)]
    for batch in batches[:3]:
        engine.clipped_sum(model, loss, batch, clip=Flat(1.0))
    calls: Counter[str] = Counter()

    def count(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            calls[frame.f_code.co_filename] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        engine.clipped_sum(model, loss, batches[3], clip=Flat(1.0))
    finally:
        sys.setprofile(before)
    assert calls.total() <= 135
    assert len(calls) <= 16


def test_only_the_first_batch_is_tried() -> None:
    """Without TF32, which rounds by the shape of a batch; the setting is then as it was."""
    runs: list[str] = []

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            runs.append(torch.get_float32_matmul_precision())
            return self.layer(x)

    model, engine, loss = Counted(), Ghost(), nn.CrossEntropyLoss()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        for step in range(200):
            size = 16 - step % 3
            batch = torch.randn(size, 4), torch.randint(3, (size,))
            engine.clipped_sum(model, loss, batch, clip=Flat(1.0))
            if not step:
                assert {"highest", "high"} == set(runs)
                runs.clear()
        assert runs == ["high"] * 199
    finally:
        torch.set_float32_matmul_precision(before)
