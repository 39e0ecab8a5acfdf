"""Whether a model writes something of its data into its buffers.

A buffer is saved with the model, and noise never reaches it. A running mean of activations, a code
book that follows its codes or a feature normaliser would so publish raw statistics of the examples
beside private weights. Batch norm is known by its class (`check`); own layers are found out by two
runs from the same state under the same random numbers:

    buffers after example 0  ≠  buffers after example 1     →  refused, by name

Counters, caches that depend on shapes and power iterations on weights end up the same and may stay.
The buffers are put back as they were. No state.

>>> import torch
>>> class Mean(torch.nn.Linear):
...     def forward(self, x):
...         self.mean.copy_(x.detach().mean(0)); return super().forward(x)
>>> model = Mean(2, 1); model.register_buffer("mean", torch.zeros(2))
>>> written(model, lambda row: model(torch.full((1, 2), float(row))))
'mean'
>>> model.mean
tensor([0., 0.])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from noshuffle.errors import Unsupported


class Kept(NamedTuple):
    """The buffers of a module before a run: who holds them, the tensors, and what they held."""

    holder: dict[str, Tensor | None]
    tensors: dict[str, Tensor | None]
    contents: dict[str, Tensor]


def written(model: nn.Module, run: Callable[[int], object]) -> str | None:
    """The name of a buffer that two runs of `run(0)` and `run(1)` leave unlike, if there is one."""
    before = kept(model)
    first, second = (_after(model, run, which, before) for which in (0, 1))
    unlike = (name for name in {**first, **second} if not same(first.get(name), second.get(name)))
    return next(unlike, None)


def refuse_written(model: nn.Module, run: Callable[[int], object]) -> None:
    """Raise if a run writes something of its data into a buffer."""
    name = written(model, run)
    if name is not None:
        raise Unsupported(
            f"buffer {name!r} of the model keeps statistics of the data, which are not private and "
            "would be saved with it; leave that layer out, or in eval mode"
        )


def kept(model: nn.Module) -> list[Kept]:
    """The buffers of all modules, for `put_back`."""
    return [_kept(module._buffers) for module in model.modules()]


def _kept(holder: dict[str, Tensor | None]) -> Kept:
    contents = {key: value.clone() for key, value in holder.items() if value is not None}
    return Kept(holder, dict(holder), contents)


def _after(
    model: nn.Module, run: Callable[[int], object], which: int, before: Sequence[Kept]
) -> dict[str, Tensor]:
    """Copies of all buffers after a run; the buffers themselves are as before it then."""
    with torch.no_grad():
        run(which)
        found = {name: value.clone() for name, value in model.named_buffers()}
        put_back(before)
    return found


def put_back(before: Sequence[Kept]) -> None:
    """All buffers as they were; one that a run made is gone again, one that it filled is empty."""
    for own in before:
        own.holder.clear()
        own.holder.update(own.tensors)
        for key, content in own.contents.items():
            value = own.tensors[key]
            assert value is not None
            if not same(value, content):
                value.copy_(content)


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal in type, shape and numbers, NaN included; or both absent."""
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return a is b
    return bool(((a == b) | ((a != a) & (b != b))).all())
