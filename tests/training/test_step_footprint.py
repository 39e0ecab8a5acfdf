"""How much of the package one steady step walks through: few calls, in few files."""

import gc
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import noshuffle as ns

ROOT = str(Path(ns.__file__).parent)
LOSS = nn.CrossEntropyLoss()
ROWS, STEPS = 16, 8


def walked(private: ns.Private, *, has_ids: bool) -> Counter[str]:
    """Calls by file, in one step of the second epoch."""
    x, y = torch.randn(STEPS * ROWS, 8), torch.randint(3, (STEPS * ROWS,))
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, arg: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(ROOT):
            calls[file[len(ROOT) + 1 :]] += 1

    for step in range(STEPS + 4):
        rows = np.arange(ROWS) + step % STEPS * ROWS
        is_counted = step == STEPS + 3
        if is_counted:  # what earlier tests left says goodbye before, not meanwhile
            gc.collect()
            gc.disable()
        sys.setprofile(count if is_counted else None)
        try:
            private.step(LOSS, x[rows], y[rows], ids=rows if has_ids else None)
        finally:
            sys.setprofile(None)
            gc.enable()
    return calls


@pytest.mark.parametrize("mechanism", ["blt", "tree"])
@pytest.mark.parametrize("has_ids", [True, False])
def test_a_steady_step_makes_few_calls_in_few_files(mechanism: str, has_ids: bool) -> None:
    plan = ns.Plan.fit(
        ns.Epochs(epochs=2, steps_per_epoch=STEPS), mechanism=mechanism, noise_multiplier=2.0
    )
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = ns.privatize(model, optimizer, plan, clip_norm=1.0, batch_size=ROWS)
    calls = walked(private, has_ids=has_ids)
    assert 100 < calls.total() <= 242, calls  # below, nothing was counted
    assert len(calls) <= 32, sorted(calls)
