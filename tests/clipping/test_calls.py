"""A steady clipped sum goes through few functions in few files."""

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
def test_a_steady_sum_of_a_small_network(
    monkeypatch: pytest.MonkeyPatch, inputs: int, hidden: int, size: int
) -> None:
    """It made 273 calls in 23 files, most of them to find out again what had not changed."""
    for name in ("next_full", "next_quick"):  # a look at the model comes in one call of sixteen
        monkeypatch.setattr(f"noshuffle.clipping.later_looks.{name}", lambda calls, **_: 10**9)
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
    assert calls.total() <= 112
    assert len(calls) <= 16
