"""Runs of a trial: rows under the same random numbers, their gradients, and how far rounding may
move them.

All runs that are compared have one seed, which the check of a whole batch draws from the operating
system. Where batches of two sizes are compared, masks differ by themselves; there the seeds are
always the same ones (`FIXED`), so that a draw that is rare and honest (a dropout of one in a
thousand) is not taken for mixing.

`finite_gradients` finds the examples whose gradients are finite, which are the ones to compare: in
plain autograd one that is not makes those of all others NaN (0·∞). It asks for the sum over a part
of the examples, and for each half of a part whose sum is not finite; k such examples among n take
about 2 k log₂(n / k) runs. State: whether runs of a trial drew random numbers.

>>> w = nn.Parameter(torch.ones(()))
>>> root = lambda rows: (w * rows[0]).sqrt()  # at zero its slope is infinite
>>> finite_gradients(root, (torch.tensor([1.0, 0.0, 4.0, 9.0]),), [w]).tolist()
[0, 2, 3]
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from noshuffle.clipping.layers import NotByLayer, without_gradient
from noshuffle.clipping.objective import Batch, Loss, batch_losses, batch_size, take
from noshuffle.clipping.products import HALF, rounds_convolutions
from noshuffle.clipping.rule_check import length
from noshuffle.clipping.statefulness import put_back_after
from noshuffle.clipping.trial_rows import finite_rows
from noshuffle.errors import InvalidInput

#: Seeds where batches of several sizes are compared.
FIXED = tuple(range(8))


def new_seed() -> int:
    """The seed of a check, which nothing in a model can know."""
    return secrets.randbits(62)


@contextmanager
def with_same_rng(
    model: nn.Module | Sequence[Tensor], seed: int = FIXED[0]
) -> Iterator[Callable[[], bool]]:
    """Random numbers that leave the user's generators as they were, the same in every block, on the
    devices of a model or of some tensors. Yields a function: whether any were drawn."""
    held = list(model.parameters()) if isinstance(model, nn.Module) else model
    devices = {p.device.index or 0 for p in held if p.is_cuda}
    with torch.random.fork_rng(devices=sorted(devices)):
        if any(p.device.type not in ("cpu", "cuda") for p in held):
            torch.manual_seed(seed)
            yield lambda: True  # of such a device nobody asks
        else:  # torch 2.13 writes the call stack down for every kind of device that is missing
            used = [torch.default_generator, *(torch.cuda.default_generators[d] for d in devices)]
            began = [generator.manual_seed(seed).get_state() for generator in used]
            yield lambda: not all(torch.equal(g.get_state(), s) for g, s in zip(used, began))


class TrialRuns:
    """Losses of a model and, with `params`, their gradients, every run under the numbers of `seed`.

    `restores`: every run begins with the model as it is now. `has_drawn`: whether some run so far
    drew random numbers; otherwise seeds are all the same.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        params: Sequence[nn.Parameter] = (),
        *,
        seed: int,
        restores: bool = False,
    ) -> None:
        self.model, self.loss_fn, self.params = model, loss_fn, params
        self.seed, self.has_drawn, self._restores = seed, False, restores

    def __call__(self, rows: Batch, seed: int | None = None) -> Tensor:
        """The losses of some rows."""
        back = put_back_after(self.model) if self._restores else nullcontext()
        grads = torch.enable_grad() if self.params else without_gradient()
        with with_same_rng(self.model, self._or_own(seed)) as drew, grads, back:
            losses = batch_losses(self.model, self.loss_fn, rows)
            self.has_drawn = self.has_drawn or drew()
        return losses

    def gradient(self, losses: Tensor, seed: int | None = None) -> list[Tensor | None]:
        """The gradient of a sum of losses; none without parameters."""
        with with_same_rng(self.params, self._or_own(seed)) as drew:
            found = gradient_of(losses, self.params)
            self.has_drawn = self.has_drawn or drew()
        return found

    def _or_own(self, seed: int | None) -> int:
        return self.seed if seed is None else seed


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
        with with_same_rng(params):  # a backward pass may draw, too
            grads = gradient_of(losses, params)
        if bool(losses.detach().isfinite().all()) and math.isfinite(length(grads)):
            return [part]
        del losses, grads  # and the graph
        return [] if is_one else [own for half in part.chunk(2) for own in among(half)]

    return torch.cat(
        [torch.arange(0, device="cpu"), *among(torch.arange(batch_size(rows), device="cpu"))]
    )


def loss_tolerance(loss: float, *, low: bool) -> float:
    """How far a loss may move with the number of examples: other kernels round otherwise."""
    return 5e-2 * max(abs(loss), 0.2) if low else 1e-3 * max(abs(loss), 1e-3)


def is_low(model: nn.Module, losses: Tensor) -> bool:
    """Whether losses are made in half precision."""
    low = any(p.dtype in HALF for p in model.parameters()) or losses.dtype in HALF
    return low or torch.is_autocast_enabled(losses.device.type)


def convolves_by_tf32(model: nn.Module) -> bool:
    """Whether a GPU rounds convolutions of the model, by kernels that depend on their shapes."""
    layers = (_ConvNd, nn.RNNBase)
    has_layers = any(isinstance(module, layers) for module in model.modules())
    return has_layers and rounds_convolutions() and next(model.parameters()).is_cuda
