"""A module called with other tensors in place of its own, which it has back afterwards.

Torch's `functional_call` leaves its last tensors in a layer that stands at two places of a model,
since it puts them in once for each name. Here every place is filled once. No state.

>>> import torch
>>> layer = nn.Linear(2, 2)
>>> model, own = nn.Sequential(layer, layer), layer.weight
>>> _ = call_with(model, {"0.weight": torch.zeros(2, 2)}, (torch.ones(1, 2),))
>>> layer.weight is own
True
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call


def call_with(
    module: nn.Module,
    values: Mapping[str, Tensor],
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """`module(*args, **kwargs)` with these values, by first name, at every place of each tensor."""
    named = chain(module.named_parameters(), module.named_buffers())
    first = {id(t): name for name, t in named}
    full: dict[str, Tensor] = {}
    for prefix, part in module.named_modules():
        for own, t in chain(part._parameters.items(), part._buffers.items()):
            name = first.get(id(t), "")
            if name and name in values:
                full[f"{prefix}.{own}" if prefix else own] = values[name]
    return functional_call(module, full, args, kwargs, tie_weights=False)
