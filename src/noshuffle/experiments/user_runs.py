"""Federated runs of one small model side by side: one stack of local training, a server for each.

    slot (k, u)     θ_k → local steps of user u → Δ → clip to ζ          all slots by one vmap
    run k           `ServerOptimizer` k charges its cohort, adds noise to Σ_u clip(Δ), updates

Runs have their own noise, rates and, under a sampled plan, secret cohorts. A loop over `simulate`,
which handles every reply by itself as a server must that trusts nobody, takes six times as long and
more for models as small as these. State: that of the servers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import grad, vmap

from noshuffle.clipping.factor import SLACK, clip_factor
from noshuffle.federated.clients import LocalTraining
from noshuffle.federated.cohort import draw_cohort
from noshuffle.federated.recurrent import unrolled
from noshuffle.federated.server import ServerOptimizer
from noshuffle.federated.simulate import in_random_order
from noshuffle.federated.tasks import FederatedTask
from noshuffle.federated.vectorised import pack, weighted_loss

Places = NDArray[np.int64]
Named = dict[str, Tensor]


def train(
    model: nn.Module,
    servers: Sequence[ServerOptimizer],
    task: FederatedTask,
    *,
    local: LocalTraining,
    seed: int,
    learning_rates: Sequence[float],
    at_once: int,
) -> None:
    """All rounds of these servers, of one participation, cohort size and clip norm.

    Arguments:
        model: the architecture; the servers have the parameters.
        seed: of the order in which users check in; sampled cohorts are drawn by the servers.
        learning_rates: factors on the rates of the servers, one a round.
        at_once: how many slots are trained together.

    Guarantees: those of `ServerOptimizer`; what one user adds to a sum has norm at most the clip
    norm, and is zero where its update is NaN or infinite.
    """
    first, rates = servers[0], [server.optimizer.param_groups[0]["lr"] for server in servers]
    is_sampled = first.plan.participation.is_sampled
    samplers = [server.sampler(len(task)) for server in servers] if is_sampled else []
    check_ins = in_random_order(range(len(task)), seed=seed)
    gradient = vmap(grad(weighted_loss(unrolled(model))))
    for step, factor in enumerate(learning_rates):
        if is_sampled:
            cohorts = [sampler.draw(step) for sampler in samplers]
        else:
            here = np.array(check_ins(step))
            chosen = draw_cohort(first.guard, first.units(here), size=first.cohort_size)
            cohorts = [np.sort(here[chosen])] * len(servers)
        opened = [server.open(places) for server, places in zip(servers, cohorts)]
        sums = _clipped_sums(gradient, servers, cohorts, task, local=local, at_once=at_once)
        for server, rate, total, cohort in zip(servers, rates, sums, opened):
            server.optimizer.param_groups[0]["lr"] = rate * factor
            server.step(total, cohort=cohort)


@torch.no_grad()
def _clipped_sums(
    gradient: Callable[..., Any],
    servers: Sequence[ServerOptimizer],
    cohorts: Sequence[Places],
    task: FederatedTask,
    *,
    local: LocalTraining,
    at_once: int,
) -> list[Named]:
    """Σ_u clip(Δ) of every run."""
    shapes, clip_norm = servers[0].shapes, servers[0].clip_norm
    theta = torch.stack([_flat(server.parameters(), rows=0) for server in servers])
    sums = torch.zeros_like(theta)
    users, which = np.unique(np.concatenate(cohorts), return_inverse=True)
    rows, weights = pack(task.starts[users], task.starts[users + 1], local=local)
    rows.clamp_(max=len(task.x) - 1)  # of a user without any
    run = np.repeat(np.arange(len(servers)), [len(places) for places in cohorts])
    for part in np.split(np.arange(len(run)), range(at_once, len(run), at_once)):
        before = theta[torch.from_numpy(run[part]).to(theta.device)]
        place = torch.from_numpy(which[part])
        start = _named(before, shapes)
        now = dict(start)
        for x, y, w in _steps(task, rows[place], weights[place], device=theta.device):
            gradients, is_step = gradient(now, x, y, w), w.sum(1) > 0
            for name, value in now.items():
                pull = gradients[name] + local.proximal * (value - start[name])
                moves = is_step.reshape(-1, *[1] * (value.dim() - 1))
                now[name] = value - local.learning_rate * pull.where(moves, 0.0)
        delta = _flat(now, rows=1) - before
        # In single precision small squares are lost beside a large one, and with them 0.1 %.
        norms = torch.linalg.vector_norm(delta, dim=1, dtype=torch.float64)
        factor = clip_factor(norms, clip_norm, slack=SLACK).to(delta.dtype)[:, None]
        delta = delta.where(factor > 0, 0.0).mul_(factor)
        for k in np.unique(run[part]):
            begin, end = np.searchsorted(run[part], (k, k + 1))
            sums[k] += delta[begin:end].sum(0)
    return [_named(total, shapes) for total in sums]


def _steps(
    task: FederatedTask, rows: Tensor, weights: Tensor, *, device: torch.device
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Inputs, targets and weights of every local step."""
    for s in range(rows.shape[1]):
        x, y = task.batch(rows[:, s])
        yield x.to(device), y.to(device), weights[:, s].to(device)


def _flat(values: Named, *, rows: int) -> Tensor:
    """Named tensors in one, behind this many axes."""
    return torch.cat([value.flatten(rows) for value in values.values()], rows)


def _named(flat: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> Named:
    """The other way."""
    pieces = torch.split(flat, [math.prod(shape) for shape in shapes.values()], -1)
    return {
        name: piece.reshape(*flat.shape[:-1], *shape)
        for (name, shape), piece in zip(shapes.items(), pieces)
    }
