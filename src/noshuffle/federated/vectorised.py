"""Many clients' local training at once: the steps of `clients.local_train` under vmap.

Every client has its own parameters, stacked along a first axis; local step s of all clients is one
call. Batches are padded with rows of the same user at weight zero,

    loss_u = Σ_i w_i loss_i / Σ_i w_i,        no step at all where Σ_i w_i = 0,

so nothing of one user ever enters another's arithmetic, a NaN included. Results agree with the
one-by-one path up to rounding, not bit for bit. LSTM layers are written out in time for this (see
`recurrent`); other recurrent layers of torch have no batched form, and models with batch statistics
change themselves: both are left to the loop.

>>> can_vectorise(nn.Linear(2, 2)), can_vectorise(nn.GRU(2, 2))
(True, False)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from noshuffle.federated.clients import LocalTraining, LossFn, cross_entropy
from noshuffle.federated.recurrent import is_plain

Rows = NDArray[np.int64]


def can_vectorise(model: nn.Module) -> bool:
    """Whether clients of this model can be trained together."""
    return not any(
        isinstance(m, nn.modules.batchnorm._BatchNorm)
        or (isinstance(m, nn.RNNBase) and not is_plain(m))
        for m in model.modules()
    )


def is_worth_it(model: nn.Module, *, device: torch.device) -> bool:
    """Whether training together is also quicker: fused LSTM calls win on a CPU."""
    is_recurrent = any(isinstance(m, nn.RNNBase) for m in model.modules())
    return can_vectorise(model) and not (is_recurrent and device.type == "cpu")


def pack(starts: Rows, stops: Rows, *, local: LocalTraining) -> tuple[Tensor, Tensor]:
    """Rows (clients × steps × batch) of every local step, and their weights (1, or 0 for padding).

    Client u owns the rows starts[u] … stops[u] − 1; padding repeats its first row.
    """
    plans = [local.batches(int(stop - start)) for start, stop in zip(starts, stops)]
    steps = max((len(batches) for batches in plans), default=0)
    size = max((s.stop - s.start for batches in plans for s in batches), default=0)
    rows = np.broadcast_to(starts[:, None, None], (len(plans), steps, size)).copy()
    weights = np.zeros(rows.shape, dtype=np.float32)
    for u, batches in enumerate(plans):
        for s, piece in enumerate(batches):
            count = piece.stop - piece.start
            rows[u, s, :count] = starts[u] + np.arange(piece.start, piece.stop)
            weights[u, s, :count] = 1.0
    return torch.from_numpy(rows), torch.from_numpy(weights)


def local_train_many(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    batches: Sequence[tuple[Tensor, Tensor, Tensor]],
    *,
    clients: int,
    local: LocalTraining,
    loss_fn: LossFn = cross_entropy,
) -> dict[str, Tensor]:
    """Stacked deltas, one row per client; entry s of `batches` is (x, y, weights) of step s."""
    start = {name: value.detach() for name, value in parameters.items()}

    def loss(now: dict[str, Tensor], x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        losses = loss_fn(functional_call(model, now, (x,)), y)
        total: Tensor = (losses * weights.to(losses.dtype)).sum() / weights.sum().clamp_min(1)
        return total

    # In the first step all clients still share one model, and products with it need no stacking.
    first = vmap(grad(loss), in_dims=(None, 0, 0, 0), randomness="different")
    later = vmap(grad(loss), randomness="different")
    now = {name: value.expand(clients, *value.shape) for name, value in start.items()}
    for s, (x, y, weights) in enumerate(batches):
        found = later(now, x, y, weights) if s else first(start, x, y, weights)
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
    return {name: value - start[name] for name, value in now.items()}
