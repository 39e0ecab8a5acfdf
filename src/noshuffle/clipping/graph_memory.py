"""Tensors that a CUDA graph reads and whose owner may let go of them: they live as long as it does.

A graph knows addresses, not tensors. What is captured while `holding` lasts may come from a cache
that forgets, or be replaced by its owner at a batch of another size; a replay would then read
whatever lies there. Whoever hands out such a tensor calls `hold`, and who captures holds the list.
State: the list of the capture that is under way, of each thread its own.

>>> with holding() as held:
...     _ = hold(Tensor([1.0]))
>>> held, hold(held[0]) is held[0], len(held)
([tensor([1.])], True, 1)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_HELD: ContextVar[list[Tensor] | None] = ContextVar("_HELD", default=None)


def hold(tensor: Tensor) -> Tensor:
    """The tensor, which stays alive with the capture that is under way, if there is one."""
    held = _HELD.get()
    if held is not None:
        held.append(tensor)
    return tensor


@contextmanager
def holding() -> Iterator[list[Tensor]]:
    """The tensors that are handed to `hold` inside."""
    held: list[Tensor] = []
    before = _HELD.set(held)
    try:
        yield held
    finally:
        _HELD.reset(before)
