"""`torch.autograd.backward` with somebody who listens: a backward pass frees what a loss tells.

State: who listens, and torch's own function while nobody does.
"""

from __future__ import annotations

from functools import wraps
from typing import Any
from weakref import WeakSet

import torch

#: Who wants to know of backward passes: `passes.Listener`s.
_HEARING: WeakSet[Any] = WeakSet()
_plain_backward = torch.autograd.backward


@wraps(_plain_backward)
def heard_backward(tensors: Any, grad_tensors: Any = None, *args: Any, **options: Any) -> None:
    """`torch.autograd.backward`, after everybody who listens has read the loss."""
    now = hearing()
    for one in now:
        one.begin_backward(tensors, grad_tensors)
    try:
        _plain_backward(tensors, grad_tensors, *args, **options)
    finally:
        for one in now:
            one.end_backward()
        _settle()


def hearing() -> list[Any]:
    """Who listens now."""
    return list(_HEARING)


def listen(one: Any, *, is_on: bool) -> None:
    """Begin or end to hear of backward passes; torch has its own function while nobody does."""
    (_HEARING.add if is_on else _HEARING.discard)(one)
    _settle()


def _settle() -> None:
    if _HEARING and torch.autograd.backward is _plain_backward:
        torch.autograd.backward = heard_backward
    elif not _HEARING and torch.autograd.backward is heard_backward:
        torch.autograd.backward = _plain_backward
