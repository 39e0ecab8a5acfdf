"""Functions that compiled code runs as they are: torch's compiler is asked once a call."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from noshuffle.training.hooks import guard, untraced


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
        guard(optimizer, {}, Owner())()
    assert method() == 7
    assert not asked
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    assert method() == 7
    assert len(asked) == 1
