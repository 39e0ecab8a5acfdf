"""One run of a study: a model trained by its plan with `privatize`, and what it gets right.

    order     rows in one order, the same in every pass; what fills no batch at its end is left out
    sampled   the secret draws of the run itself, where its plan is for them

Guarantees: those of `privatize`: every row is named by its place in the order, so the guard of the
run sees that rows come as the plan says. Runs of a study share no draw. What all of them cost
together, and choosing among them, is not counted; so they are not warned of each other. No state.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from noshuffle.clipping.check import evaluated
from noshuffle.errors import ProbablyNotMeant
from noshuffle.plan import Plan
from noshuffle.training import privatize
from noshuffle.training.private import Private

Rows = NDArray[np.int64]


def train(
    make_model: Callable[[], nn.Module],
    plan: Plan,
    x: Tensor,
    y: Tensor,
    order: Rows,
    *,
    batch_size: int,
    clip_norm: float,
    learning_rate: float,
    momentum: float,
    learning_rates: Sequence[float],
    seed: int,
    augment: int | None = None,
    average: float | None = None,
    half: bool = False,
) -> Private:
    """The run when it has done all its steps, with its model on the device of the data.

    Arguments:
        plan: its noise multiplier may be 0: such a run is not private.
        order: the rows to train on.
        learning_rates: factors on the learning rate, one a step.
        seed: of the initial weights.
        augment, average: as for `privatize`.
        half: whether the model runs under autocast to bfloat16.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make_model().to(x.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=momentum)
    loss_fn = nn.CrossEntropyLoss()
    with warnings.catch_warnings(), torch.autocast(x.device.type, torch.bfloat16, enabled=half):
        warnings.simplefilter("ignore", ProbablyNotMeant)
        private = privatize(
            model,
            optimizer,
            plan,
            batch_size=batch_size,
            clip_norm=clip_norm,
            augment=augment,
            average=average,
        )
        for factor, ids in zip(learning_rates, _places(private, len(order), size=batch_size)):
            optimizer.param_groups[0]["lr"] = learning_rate * factor
            rows = torch.from_numpy(order[ids]).to(x.device)
            private.advance(loss_fn, (x[rows], y[rows]), ids=ids)
    return private


def _places(private: Private, population: int, *, size: int) -> Iterator[Rows]:
    """Places in the order of the rows of every step."""
    if private.plan.participation.is_sampled:
        yield from private.sampler(population)
        return
    usable = population // size * size
    for step in range(private.plan.steps):
        begin = step * size % usable
        yield np.arange(begin, begin + size)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor, *, at_once: int = 1000) -> float:
    """The share of rows that the model gets right."""
    right = torch.zeros((), dtype=torch.int64, device=x.device)
    with evaluated(model):
        for part, targets in zip(torch.split(x, at_once), torch.split(y, at_once)):
            right += (model(part).argmax(1) == targets).sum()
    return int(right) / len(x)
