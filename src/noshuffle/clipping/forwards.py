"""Layers that run by another function in place of their `forward`, for as long as a block lasts.

The function is handed the layer and its arguments, and must compute what the layer computes.
Whoever has replaced the forward of a layer first stays in its place. No state is left behind.

>>> layer = nn.ReLU()
>>> with forward_by([(layer, lambda own, x: x + 1)]):
...     layer(3)
4
>>> "forward" in layer.__dict__
False
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn


@contextmanager
def forward_by(chosen: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Run each layer by its function; hooks of the layer are called as ever."""
    changed = []
    try:
        for layer, fn in chosen:
            if "forward" not in layer.__dict__:
                layer.__dict__["forward"] = partial(fn, layer)
                changed.append(layer)
        yield
    finally:
        for layer in changed:
            layer.__dict__.pop("forward", None)
