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

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from noshuffle.errors import Unsupported


class Kept(NamedTuple):
    """A buffer before a run: where it is, the tensor, and what it held."""

    name: str
    holder: dict[str, Tensor | None]
    value: Tensor
    content: Tensor


def written(model: nn.Module, run: Callable[[int], object]) -> str | None:
    """The name of a buffer that two runs of `run(0)` and `run(1)` leave unlike, if there is one."""
    before = [Kept(*place, place[2].clone()) for place in _places(model)]
    if not before:
        return None
    first, second = (_after(model, run, which, before) for which in (0, 1))
    unlike = (name for name in {**first, **second} if not _same(first.get(name), second.get(name)))
    return next(unlike, None)


def refuse_written(model: nn.Module, run: Callable[[int], object]) -> None:
    """Raise if a run writes something of its data into a buffer."""
    name = written(model, run)
    if name is not None:
        raise Unsupported(
            f"buffer {name!r} of the model keeps statistics of the data, which are not private and "
            "would be saved with it; leave that layer out, or in eval mode"
        )


def _places(model: nn.Module) -> Iterator[tuple[str, dict[str, Tensor | None], Tensor]]:
    """Every buffer: its name, the dictionary that holds it, and the tensor."""
    for prefix, module in model.named_modules():
        for key, value in module._buffers.items():
            if value is not None:
                yield f"{prefix}.{key}" if prefix else key, module._buffers, value


def _after(
    model: nn.Module, run: Callable[[int], object], which: int, before: Sequence[Kept]
) -> dict[str, Tensor]:
    """Copies of all buffers after a run; the buffers themselves are as before it then."""
    with torch.no_grad():
        run(which)
        found = {name: value.clone() for name, _, value in _places(model)}
        for own in before:
            own.holder[own.name.rpartition(".")[2]] = own.value
            if not _same(own.value, own.content):
                own.value.copy_(own.content)
    return found


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return a is b
    return bool(((a == b) | ((a != a) & (b != b))).all())
