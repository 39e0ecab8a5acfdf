"""Inputs of layers in the form in which autograd keeps them, made before the call.

    autocast         casts the input of a linear map inside the call
    group norm       brings channels that come last in front, on a GPU

Autograd then keeps the copy and clipping the original, both until the backward pass. Made before
the call, the copy is the only one; the numbers are the same. State: hooks inside the blocks.

>>> norm, x = nn.GroupNorm(1, 2), torch.randn(1, 2, 3, 3).to(memory_format=torch.channels_last)
>>> with ordered_early([norm]):
...     norm(x).is_contiguous(), torch.equal(norm(x), norm(x.contiguous()))
(True, True)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def _cast(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    if not args or not isinstance(args[0], Tensor) or args[0].dtype != torch.float32:
        return None
    kind = args[0].device.type
    if not torch.is_autocast_enabled(kind):
        return None
    return (args[0].to(torch.get_autocast_dtype(kind)), *args[1:])


@contextmanager
def cast_early(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Cast the inputs of linear maps before the call, where autocast would cast them inside."""
    with ExitStack() as stack:
        for layer in layers:
            # One with a forward of its own may want them as they are, a head in float32, say.
            if type(layer).forward is nn.Linear.forward or type(layer).__name__ == "Conv1D":
                stack.callback(layer.register_forward_pre_hook(_cast).remove)
        yield


def _in_order(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    if not args or not isinstance(args[0], Tensor) or args[0].is_contiguous():
        return None
    return (args[0].contiguous(), *args[1:])


@contextmanager
def ordered_early(norms: Iterable[nn.Module]) -> Iterator[None]:
    """Bring channels that come last in front before norms of a GPU, which would do it inside."""
    with ExitStack() as stack:
        for layer in norms:
            stack.callback(layer.register_forward_pre_hook(_in_order).remove)
        yield
