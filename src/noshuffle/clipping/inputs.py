"""How a model is run so that its layers can be seen: as written, and with inputs cast early.

`as_written` lets parts of the model that went through `torch.compile` run uncompiled, since a
compiled graph does not call the layers it was made of. `cast_early` casts the input of linear
layers before the call where autocast would cast it inside: the same numbers, and the copy that
autograd keeps is then the one that clipping reads, so that there is no second one. No state.

>>> from torch import nn
>>> is_compiled(nn.Sequential(nn.Linear(2, 2)))
False
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

#: What engines say of a model that went through `torch.compile`.
UNCOMPILED = "compiled parts run as written: clipping needs the calls of the layers"


def is_compiled(model: nn.Module) -> bool:
    """Whether a part of the model is run by `torch.compile`."""
    return any(
        "_orig_mod" in m._modules or getattr(m, "_compiled_call_impl", None) is not None
        for m in model.modules()
    )


@contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """Run compiled parts uncompiled, for as long as the block lasts."""
    if not is_compiled(model):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Nothing is cast inside the block; free where nothing would be."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _cast(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    if not args or not isinstance(args[0], Tensor) or args[0].dtype != torch.float32:
        return None
    kind = args[0].device.type
    if not torch.is_autocast_enabled(kind):
        return None
    return (args[0].to(torch.get_autocast_dtype(kind)), *args[1:])


@contextmanager
def cast_early(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Cast the inputs of linear maps as autocast will, for as long as the block lasts."""
    with ExitStack() as stack:
        for layer in layers:
            if isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D":
                stack.callback(layer.register_forward_pre_hook(_cast).remove)
        yield
