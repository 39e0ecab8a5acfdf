"""Many clients' local training at once: the steps of `clients.local_train` under vmap.

Parameters are stacked along a first axis; local step s of all clients is one call. Batches are
padded with rows of the same user at weight zero,

    loss_u = Σ_i w_i loss_i / Σ_i w_i,        no step at all where Σ_i w_i = 0,

so nothing of one user ever enters another's arithmetic, a NaN included. On a CPU results do not
depend on the other clients: a client's shapes follow from its own data (`width`), so that one by
itself (`trained_alone`) gets the bits it has in any group. Hence parameters are stacked from the
first step on, and one client is computed as two, since a stack of one convolution goes another way.
(Some activations, sigmoid and GELU among them, may differ in the last digit at a stack's end.)

LSTM layers are written out in time (`recurrent`); other recurrent layers, and models with batch
statistics, are left to the loop.

>>> can_vectorise(nn.Linear(2, 2)), can_vectorise(nn.GRU(2, 2))
(True, False)
>>> [width(examples, local=LocalTraining(learning_rate=1.0)) for examples in (0, 3, 5, 13)]
[0, 3, 6, 16]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import grad, vmap

from noshuffle.clipping.stateless import call_with
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.federated.clients import LocalTraining, LossFn, cross_entropy
from noshuffle.federated.own_copy import Copies
from noshuffle.federated.recurrent import is_plain, unrolled

Rows = NDArray[np.int64]
#: Characters that are quoted of an error of torch.
_LONGEST = 100


def can_vectorise(model: nn.Module) -> bool:
    return not any(
        isinstance(m, nn.modules.batchnorm._BatchNorm)
        or (isinstance(m, nn.RNNBase) and not is_plain(m))
        for m in model.modules()
    )


def is_worth_it(model: nn.Module, *, device: torch.device) -> bool:
    """Whether training together is also quicker: fused LSTM calls win on a CPU."""
    is_recurrent = any(isinstance(m, nn.RNNBase) for m in model.modules())
    return can_vectorise(model) and not (is_recurrent and device.type == "cpu")


def takes_together(model: nn.Module, *, device: torch.device, vectorise: bool | None) -> bool:
    """Whether clients train together: as was asked for, or where that is quicker.

    Never in half precision on a CPU, where `value.add(pull, alpha=…)` rounds the last entries of a
    stack in another way (torch 2.13): who is missing would move the updates of others.
    """
    is_apart = device.type == "cpu" and _is_half(model)
    if vectorise and (is_apart or not can_vectorise(model)):
        raise Unsupported("clients of this model cannot be trained together; use vectorise=False")
    return is_worth_it(model, device=device) and not is_apart if vectorise is None else vectorise


def _is_half(model: nn.Module) -> bool:
    """Whether any parameter or buffer is of half precision, or less."""
    held = itertools.chain(model.parameters(), model.buffers())
    return any(value.is_floating_point() and value.element_size() < 4 for value in held)


def width(examples: int, *, local: LocalTraining) -> int:
    """Rows that a client's batches are filled up to: 1, 2, 3, 4, 6, 8, 12, 16, 24 … or all.

    Few different ones, so that clients find others of the same, and little to fill.
    """
    batches = local.batches(examples)
    if not batches:
        return 0
    largest = int(batches[0].stop)
    power = 1 << (largest - 1).bit_length()
    above = 3 * power // 4 if largest <= 3 * power // 4 else power
    return above if local.batch_size is None else min(above, local.batch_size)


def groups(
    starts: Rows, stops: Rows, *, local: LocalTraining, at_once: int
) -> Iterator[NDArray[np.intp]]:
    """Places of clients to train together: of one width, and alike in their number of examples."""
    counts = stops - starts
    widths = np.array([width(int(count), local=local) for count in counts], dtype=np.int64)
    order = np.lexsort((counts, widths))
    for same in np.split(order, np.flatnonzero(np.diff(widths[order])) + 1):
        for at in range(0, len(same), at_once):
            yield same[at : at + at_once]


def pack(starts: Rows, stops: Rows, *, local: LocalTraining) -> tuple[Tensor, Tensor]:
    """Rows (clients × steps × width) of every local step, and their weights (1, or 0 for padding).

    Client u owns the rows starts[u] … stops[u] − 1; padding repeats its first row.
    """
    plans = [local.batches(int(stop - start)) for start, stop in zip(starts, stops)]
    steps = max((len(batches) for batches in plans), default=0)
    size = max((width(int(n), local=local) for n in stops - starts), default=0)
    rows = np.broadcast_to(starts[:, None, None], (len(plans), steps, size)).copy()
    weights = np.zeros(rows.shape, dtype=np.float32)
    for u, batches in enumerate(plans):
        for s, piece in enumerate(batches):
            count = piece.stop - piece.start
            rows[u, s, :count] = starts[u] + np.arange(piece.start, piece.stop)
            weights[u, s, :count] = 1.0
    return torch.from_numpy(rows), torch.from_numpy(weights)


def weighted_loss(model: nn.Module, loss_fn: LossFn = cross_entropy) -> Callable[..., Tensor]:
    """The loss of one client: of its parameters, x, y and the weights of its rows."""

    def loss(now: Mapping[str, Tensor], x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        losses = loss_fn(call_with(model, now, (x,)), y)
        total: Tensor = (losses * weights.to(losses.dtype)).sum() / weights.sum().clamp_min(1)
        return total

    return loss


def trained_many(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    batches: Sequence[tuple[Tensor, Tensor, Tensor]],
    *,
    clients: int,
    local: LocalTraining,
    loss_fn: LossFn = cross_entropy,
) -> dict[str, Tensor]:
    """Stacked parameters after the local steps, one row per client.

    Entry s of `batches` is (x, y, weights) of step s; `model` has no LSTM of torch's own.
    """
    start = {name: value.detach() for name, value in parameters.items()}
    own = weighted_loss(Copies(model, parameters)(), Copies(loss_fn, {})())
    gradient = vmap(grad(own), randomness="different")
    rows = max(2, clients)
    now = {name: value.expand(rows, *value.shape) for name, value in start.items()}
    for s, batch in enumerate(batches):
        x, y, weights = (torch.cat([part, part]) for part in batch) if clients == 1 else batch
        try:
            found = gradient(now, x, y, weights)
        except RuntimeError as error:
            if "mutate a captured Tensor" in str(error):
                raise Unsupported(
                    "the model changes its own buffers in forward, so its clients cannot be "
                    "trained together; use vectorise=False"
                ) from error
            if "vmap" in str(error):  # of torch.func: control flow by values, random numbers, …
                why = str(error).partition("\n")[0][:_LONGEST]
                raise Unsupported(
                    f"clients of this model and loss cannot be trained together ({why}); use "
                    "vectorise=False"
                ) from error
            raise
        is_step = weights.sum(1) > 0
        is_all = x.device.type == "cpu" and bool(is_step.all())  # asking an accelerator is to wait
        for name, value in now.items():
            pull = found[name]
            if local.proximal:
                pull = pull.add(value - start[name], alpha=local.proximal)
            if not is_all:  # not times zero, which would let a NaN of padding through
                moves = is_step.reshape(-1, *(1,) * (value.dim() - 1))
                pull = torch.where(moves, pull, torch.zeros((), dtype=pull.dtype, device=x.device))
            # The stack is by far the largest thing here: after the first step it is changed in
            # place, so that a step reads and writes it once.
            step = value.add_ if s else value.add
            now[name] = step(pull, alpha=-local.learning_rate)
    return {name: value[:clients] for name, value in now.items()}


def trained_alone(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    *,
    local: LocalTraining,
    loss_fn: LossFn = cross_entropy,
) -> dict[str, Tensor]:
    """`clients.training_of`, with the arithmetic that this client has in a group."""
    if len(x) != len(y):
        raise InvalidInput(f"x and y must have one row per example, got {len(x)} and {len(y)}")
    rows, weights = pack(np.zeros(1, np.int64), np.array([len(x)]), local=local)
    batches = [(x[rows[:, s]], y[rows[:, s]], weights[:, s]) for s in range(rows.shape[1])]
    now = trained_many(
        unrolled(model), parameters, batches, clients=1, local=local, loss_fn=loss_fn
    )
    return {name: value[0].clone() for name, value in now.items()}
