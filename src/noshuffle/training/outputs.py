"""The tensors of a model's output in an unchanged loop: found, told apart, and known again.

A hook on an output that another output was computed from (μ of a VAE) would hear the gradient of
both,

    ∂L/∂μ  =  what the loss sends to μ itself  +  (∂reconstruction/∂μ)ᵀ ∂L/∂reconstruction,

and the second part would count twice: `apart` gives the loop a copy of every output (of a large one
a view, which may not be written to). `Carried` knows outputs again that come back as inputs of a
later step: the examples of their batch would act on that of another one, which no participation
counts. State: of `Carried`, a few numbers of each.

>>> import torch
>>> mu = torch.zeros(2, requires_grad=True) * 1
>>> first, second = apart((mu, 2 * mu))
>>> first.register_hook(lambda g: print(g.tolist())) and (first + second).sum().backward()
[1.0, 1.0]
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

#: Outputs of earlier steps that are known again.
LATEST = 32
#: Numbers by which an output is known again, and how many it must have.
SAMPLE, LEAST = 8, 4
#: Numbers of an output that is copied, at most.
MOST = 1 << 20
CARRIED = (
    "the model was given an output of an earlier step (a hidden state that is carried on, say), so "
    "that the examples of that step act on this one too, and the guarantee counts each in its own "
    "batch; begin every batch with a fresh state"
)


def _parts(output: Any) -> list[Any] | None:
    if isinstance(output, Mapping):
        return list(output.values())
    if dataclasses.is_dataclass(output):
        return [getattr(output, field.name) for field in dataclasses.fields(output)]
    return list(output) if isinstance(output, tuple | list) else None


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors of an output, in order: itself, or those of a mapping, tuple, list, dataclass."""
    if isinstance(output, Tensor):
        return [output]
    return [tensor for part in _parts(output) or () for tensor in tensors_of(part)]


def apart(output: Any) -> Any:
    """The same output with a copy of every tensor that has a gradient; losses as they are."""
    if isinstance(output, Tensor):
        if output.grad_fn is None or not output.dim():
            return output
        return output.clone() if output.numel() <= MOST else output.view_as(output)
    if isinstance(output, MutableMapping):
        own = copy.copy(output)
        for key, part in output.items():
            own[key] = apart(part)
        return own
    if isinstance(output, tuple | list):
        read = [apart(part) for part in output]
        return type(output)(*read) if hasattr(output, "_fields") else type(output)(read)
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        same: Any = copy.copy(output)
        for field in dataclasses.fields(output):
            object.__setattr__(same, field.name, apart(getattr(output, field.name)))
        return same
    return output


class Carried:
    """Whether an input has the numbers of an output of an earlier step."""

    def __init__(self) -> None:
        self._new: list[tuple[torch.Size, Tensor]] = []
        self._earlier: deque[tuple[torch.Size, Tensor]] = deque(maxlen=LATEST)

    def keep(self, outputs: list[Tensor]) -> None:
        """Outputs of a pass of this step: some of their numbers."""
        for out in outputs:
            if out.numel() >= LEAST and (out.is_contiguous() or out.numel() <= MOST):
                self._new.append((out.shape, _sample(out)))

    def end_step(self) -> None:
        """What was kept belongs to an earlier step from now on."""
        self._earlier.extend(self._new)
        self._new = []

    def has(self, inputs: Any) -> bool:
        """Whether one of these is an output of an earlier step, or a copy of one."""
        return any(self._equals(one) for one in tree_leaves(inputs) if isinstance(one, Tensor))

    def _equals(self, one: Tensor) -> bool:
        likely = [own for shape, own in self._earlier if shape == one.shape]
        mine = _sample(one) if likely else None
        return mine is not None and any(
            own.dtype is mine.dtype and torch.equal(own, mine) and len(set(own.tolist())) > 2
            for own in likely
        )


def _sample(one: Tensor) -> Tensor:
    """Some numbers of a tensor, copied."""
    flat = one.detach().reshape(-1)
    return flat[:: max(1, len(flat) // SAMPLE)][:SAMPLE].clone()
