"""What looks at a model run: rows under the same random numbers, their gradients, and how far
rounding may move them.

`finite_gradients` finds the examples whose gradients are finite, which are the ones to compare: in
plain autograd one that is not makes those of all others NaN (0·∞). It asks for the sum over a part
of the examples, and for each half of a part whose sum is not finite; k such examples among n take
about 2 k log₂(n / k) runs. No state.

>>> w = nn.Parameter(torch.ones(()))
>>> root = lambda rows: (w * rows[0]).sqrt()  # at zero its slope is infinite
>>> finite_gradients(root, (torch.tensor([1.0, 0.0, 4.0, 9.0]),), [w]).tolist()
[0, 2, 3]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from noshuffle.clipping.layers import NotByLayer
from noshuffle.clipping.objective import Batch, Loss, batch_losses, batch_size, take
from noshuffle.clipping.products import HALF
from noshuffle.clipping.rule_check import length
from noshuffle.clipping.trial_rows import finite_rows
from noshuffle.errors import InvalidInput


@contextmanager
def with_same_rng(model: nn.Module | Sequence[Tensor], seed: int = 0) -> Iterator[None]:
    """Random numbers that leave the user's generators as they were, the same in every block, on the
    devices of a model or of some tensors."""
    held = list(model.parameters()) if isinstance(model, nn.Module) else model
    devices = {p.device.index or 0 for p in held if p.is_cuda}
    with torch.random.fork_rng(devices=sorted(devices)):
        if any(p.device.type not in ("cpu", "cuda") for p in held):
            torch.manual_seed(seed)
        else:  # torch 2.13 writes the call stack down for every kind of device that is missing
            torch.default_generator.manual_seed(seed)
            for device in devices:
                torch.cuda.default_generators[device].manual_seed(seed)
        yield


def probe(model: nn.Module, loss_fn: Loss, batch: Batch) -> Callable[[int], Tensor]:
    """A function that runs the first n examples, for looking at shapes."""

    def run(n: int) -> Tensor:
        with with_same_rng(model):
            try:
                return batch_losses(model, loss_fn, finite_rows(batch, *range(n)))
            except InvalidInput as error:
                raise NotByLayer(str(error)) from error

    return run


def gradient_of(losses: Tensor, params: Sequence[nn.Parameter]) -> list[Tensor | None]:
    """The gradient of a sum of losses; none without parameters."""
    if not params or not losses.requires_grad:
        return []
    with torch.enable_grad():
        total = losses.sum()
    with with_same_rng(params):  # a backward pass may draw, too
        return list(torch.autograd.grad(total, params, allow_unused=True))


def finite_gradients(
    run: Callable[[Batch], Tensor], rows: Batch, params: Sequence[nn.Parameter]
) -> Tensor:
    """Which examples have a loss and a gradient that are finite, in order.

    A sum that is finite has no part that is not; one that is not is halved, down to an example
    beside its own copy.
    """

    def among(part: Tensor) -> list[Tensor]:
        is_one = len(part) == 1
        with torch.enable_grad():
            losses = run(take(rows, part.repeat(2) if is_one else part))[: len(part)]
        grads = gradient_of(losses, params)
        if bool(losses.detach().isfinite().all()) and math.isfinite(length(grads)):
            return [part]
        del losses, grads  # and the graph
        return [] if is_one else [own for half in part.chunk(2) for own in among(half)]

    return torch.cat([torch.arange(0), *among(torch.arange(batch_size(rows)))])


def loss_tolerance(loss: float, *, low: bool) -> float:
    """How far a loss may move with the number of examples: other kernels round otherwise."""
    return 5e-2 * max(abs(loss), 0.2) if low else 1e-3 * max(abs(loss), 1e-3)


def is_low(model: nn.Module, losses: Tensor) -> bool:
    """Whether losses are made in half precision."""
    low = any(p.dtype in HALF for p in model.parameters()) or losses.dtype in HALF
    return low or torch.is_autocast_enabled(losses.device.type)
