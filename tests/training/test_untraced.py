"""Functions that compiled code runs as they are: torch's compiler is asked once a call."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from noshuffle.training.hooks import guard, untraced

#: Prints which of the heavy modules were imported, and how many steps were taken.
SCRIPT = """
import json, sys
import torch
from noshuffle.cli.train_parts import _leave_compiler_out

_leave_compiler_out()  # torch imports its compiler for the first optimizer otherwise

import noshuffle as ns

heavy = ("torch._dynamo", "scipy.special", "scipy.linalg", "scipy.optimize")
plan = ns.Plan.fit(ns.SinglePass(steps=3), mechanism="tree", noise_multiplier=1.0)

def begin():
    model = torch.nn.Linear(3, 1)
    optimizer = ns.FTRL(model.parameters(), lr=0.1)
    return model, ns.privatize(model, optimizer, plan, clip_norm=1.0, batch_size=4)

model, private = begin()
private.step(lambda out, y: (out - y).pow(2).mean(), torch.ones(4, 3), torch.ones(4, 1))
told = {"imported": [name for name in heavy if name in sys.modules]}
step = torch.compile(lambda x: private.step(lambda out, y: (out - y).pow(2).mean(), x, x[:, :1]))
step(torch.ones(4, 3))
told["steps"] = private.steps_released
print(json.dumps(told))
"""


class Owner:
    """Of an optimizer."""


def test_every_run_after_the_first_adds_no_layer_to_what_compiled_code_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where nobody has imported torch's compiler: each run wrapped the methods of a step again."""
    asked: list[Any] = []

    def disable(fn: Callable[..., Any]) -> Callable[..., Any]:
        asked.append(fn)
        return fn

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    monkeypatch.setattr(torch.compiler, "disable", disable)
    method = untraced(lambda: 7)
    for _ in range(4):
        guard(optimizer, Owner())()
    assert method() == 7
    assert not asked
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    assert method() == 7
    assert len(asked) == 1


def test_steps_import_no_compiler_until_code_is_compiled() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"imported": [], "steps": 2}
