"""Whether a model remembers an example when it sees the next one.

A layer may keep something of its input in an attribute: the last hidden state, a running mean, the
batch before. The next example then has a gradient that the one before it has a say in, and no
clipping of either bounds that. Two runs from the same state show it, under the same random numbers:

    loss of 0 after a run of 0  ≠  loss of 0 after a run of 1      →  refused

What is kept only to be looked at (attention maps, a loss that is read in the same run) changes no
loss and may stay. Where the first of the two does not come out the same twice (a schedule that
counts calls outside the model), nothing can be said. Buffers and attributes of the modules are put
back as they were; containers are put back, not what is in them. No state.

>>> class Last(nn.Linear):
...     last = 0.0
...     def forward(self, x):
...         before, self.last = self.last, x.detach()
...         return super().forward(x + before)
>>> model = Last(2, 1)
>>> remembers(model, lambda row: model(torch.full((1, 2), float(row))).sum()), model.last
(True, 0.0)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from noshuffle.clipping.buffers import kept, put_back
from noshuffle.clipping.products import HALF
from noshuffle.errors import Unsupported

_OWN = frozenset(nn.Module().__dict__)  # what torch keeps in every module


def remembers(model: nn.Module, run: Callable[[int], Tensor]) -> bool:
    """Whether the loss `run(0)` depends on which of `run(0)` and `run(1)` came before it."""
    first, again, other = (_after(model, run, which) for which in (0, 0, 1))
    low = any(p.dtype in HALF for p in model.parameters())
    low = low or any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
    room = (2e-3 if low else 1e-5) * max(abs(first), 1e-6)
    return abs(first - other) > room and abs(first - again) <= 0.1 * room


def refuse_memory(model: nn.Module, run: Callable[[int], Tensor]) -> None:
    """Raise if what an example leaves in the model changes the loss of the next one."""
    if remembers(model, run):
        raise Unsupported(
            "the model keeps something of one example that changes the loss of the next one, which "
            "no clipping bounds; let it forget between calls (an attribute set in forward, say)"
        )


def _after(model: nn.Module, run: Callable[[int], Tensor], which: int) -> float:
    """The loss of example 0 after a run of another one; all is as before it then."""
    buffers = kept(model)
    attributes = [(module.__dict__, _attributes(module)) for module in model.modules()]
    with torch.no_grad():
        run(which)
        loss = float(run(0))
        put_back(buffers)
    for holder, own in attributes:
        for name in [name for name in holder if name not in _OWN and name not in own]:
            del holder[name]
        holder.update(own)
    return loss


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if name not in _OWN}
