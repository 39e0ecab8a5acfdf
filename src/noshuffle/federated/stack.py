"""A stack of slots: local training of many (run, user) pairs side by side, down to clipped sums.

    for each slot:   p ← θ_run;   p ← p − η_run ∇ loss(p; batch s of the user),  s = 1 … S
                     Δ = p − θ_run;      sum_run += Δ · min(1, ζ_run / ‖Δ‖)

Parameters of a slot are one row of a flat matrix, with every tensor at a multiple of 16 bytes, so
that batched products may use it as it lies. In the first local step `GROUP` neighbours, always of
one run, share its parameters, which are read once. A round is cut into stacks of `size` slots. On
CUDA the work of a stack is captured once as a graph and replayed, so the last one is filled up with
slots of weight zero (`stack_size` keeps them few). Equal to `clients.local_train` and `clip_flat`
up to rounding.

>>> flat = FlatRows.of(nn.Linear(3, 2))
>>> flat.size, flat.views(torch.zeros(4, flat.size))["weight"].shape
(16, torch.Size([4, 2, 3]))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import grad, vmap

from noshuffle.clipping.factor import COARSE_SLACK, SLACK, clip_factor
from noshuffle.clipping.products import exactly, rounds_products
from noshuffle.errors import Unsupported
from noshuffle.federated import stacked_lstm
from noshuffle.federated.clients import LocalTraining
from noshuffle.federated.recurrent import unrolled
from noshuffle.federated.tasks import FederatedTask
from noshuffle.federated.vectorised import weighted_loss
from noshuffle.training.compiled.graphs import Captured, warmed

#: Stacked parameters, x, y, weights of rows → stacked gradients, one a slot. With fewer sets of
#: parameters than slots, neighbouring slots share one.
GradientFn = Callable[[Mapping[str, Tensor], Tensor, Tensor, Tensor], dict[str, Tensor]]
GROUP = 10
_ALIGNED = 8  # floats
_OVERHEAD = 100  # slots that take about as long as the launches of one stack


@dataclass(frozen=True)
class FlatRows:
    """Where each named tensor lies in a flat row."""

    shapes: dict[str, tuple[int, ...]]
    starts: dict[str, int]
    size: int

    @classmethod
    def of(cls, model: nn.Module) -> FlatRows:
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        starts, at = {}, 0
        for name, shape in shapes.items():
            starts[name] = at
            at += -(-math.prod(shape) // _ALIGNED) * _ALIGNED
        return cls(shapes, starts, at)

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """Rows (n, size) as named tensors (n, …) that share their memory."""
        return {
            name: rows[:, at : at + math.prod(shape)].view(len(rows), *shape)
            for (name, shape), at in zip(self.shapes.items(), self.starts.values())
        }

    def pack(self, values: Mapping[str, Tensor]) -> Tensor:
        """Named tensors as one row, or as n rows if they have an axis more; gaps are zero."""
        name = next(iter(self.shapes))
        first = values[name]
        is_one = tuple(first.shape) == self.shapes[name]
        rows = first.new_zeros(1 if is_one else len(first), self.size)
        for name, view in self.views(rows).items():
            view.copy_(values[name].detach())
        return rows[0] if is_one else rows


@dataclass(frozen=True)
class UserRows:
    """Everybody's rows as one padded array (users, rows, …), and how many are real."""

    task: FederatedTask
    x: Tensor
    y: Tensor
    counts: Tensor

    @classmethod
    def of(
        cls, task: FederatedTask, *, local: LocalTraining, device: torch.device | str
    ) -> UserRows:
        counts = np.diff(task.starts)
        most = max(piece.stop for piece in local.batches(int(counts.max())))
        rows = np.minimum(np.arange(most), np.maximum(counts, 1)[:, None] - 1)
        places = np.minimum(task.starts[:-1, None] + rows, len(task.x) - 1)
        x, y = (part[torch.from_numpy(places)].to(device) for part in (task.x, task.y))
        return cls(task, x, y, torch.from_numpy(np.minimum(counts, most)).to(device))


def gradient_fn(model: nn.Module) -> GradientFn:
    """Gradients of stacked copies of this model, each on rows of its own."""
    if stacked_lstm.fits(model):
        return stacked_lstm.gradients
    each = vmap(vmap(grad(weighted_loss(unrolled(model))), in_dims=(None, 0, 0, 0)))

    def gradients(
        params: Mapping[str, Tensor], x: Tensor, y: Tensor, weights: Tensor
    ) -> dict[str, Tensor]:
        groups = len(next(iter(params.values())))
        parts = (part.view(groups, -1, *part.shape[1:]) for part in (x, y, weights))
        found = each(params, *parts)
        return {name: value.flatten(0, 1) for name, value in found.items()}

    return gradients


def slots_of(places: NDArray[np.int64]) -> int:
    """Slots that the users of one run take: neighbours of a group are of one run."""
    return -(-len(places) // GROUP) * GROUP


def stack_size(slots: Sequence[int], *, at_most: int) -> int:
    """The size with which rounds of so many slots take least: Σ_t stacks_t · (size + overhead).

    >>> stack_size([1500, 1500, 1500], at_most=2400), stack_size([1500] * 3, at_most=800)
    (1500, 750)
    """
    counts, often = np.unique(slots, return_counts=True)
    sizes = np.arange(GROUP, max(at_most, GROUP) + 1, GROUP)
    stacks = -(-counts[:, None] // sizes)
    return int(sizes[np.argmin(often @ (stacks * (sizes + _OVERHEAD)))])


def slack_on(device: torch.device) -> float:
    """How far below the clip norm to stay: the sum is a product, which may keep ten bits only."""
    is_coarse = device.type == "cuda" and rounds_products()
    return COARSE_SLACK if is_coarse else SLACK


class Stack:
    """Clipped sums of all runs in a round, `size` slots at a time.

    `theta` (runs × flat size) is read at every call and may change in between. Slots whose delta
    has a NaN or an infinity contribute zero.
    """

    def __init__(
        self,
        gradients: GradientFn,
        flat: FlatRows,
        users: UserRows,
        theta: Tensor,
        *,
        client_rate: Tensor,
        clip_norm: Tensor,
        local: LocalTraining,
        size: int,
    ) -> None:
        if local.epochs != 1 or local.batch_size is None:
            raise Unsupported("stacked runs go through the data once, in batches of a given size")
        self._gradients, self._flat, self._users = gradients, flat, users
        self._theta, self._rate, self._clip = theta, client_rate, clip_norm
        self._local, self._size = local, -(-size // GROUP) * GROUP
        self._device = theta.device
        self._runs = torch.arange(len(theta), device=self._device)
        self._total = torch.zeros_like(theta)
        # Run, user and weight of every slot: what a captured graph reads.
        self._slots = torch.zeros(3, self._size, dtype=torch.int64, device=self._device)
        self._graph: Captured | None = None
        # Few characters a call make LSTMs wait for launches; other models are wide enough.
        is_lstm = gradients is stacked_lstm.gradients
        self._is_captured = self._device.type == "cuda" and is_lstm
        self._slack = slack_on(self._device)

    def clipped_sums(self, slots: Sequence[tuple[int, NDArray[np.int64]]]) -> Tensor:
        """Σ clip(Δ) per run, for the users given with each run; overwritten by the next call."""
        tables = []
        for run, places in slots:
            short = slots_of(places) - len(places)
            own = np.pad(np.stack([places, np.ones_like(places)]), ((0, 0), (0, short)))
            tables.append(np.concatenate([np.full((1, own.shape[1]), run), own]))
        table = np.concatenate(tables, axis=1).astype(np.int64)
        if self._is_captured:
            table = np.pad(table, ((0, 0), (0, -table.shape[1] % self._size)))
        given = torch.from_numpy(table).to(self._device)
        self._total.zero_()
        for at in range(0, given.shape[1], self._size):
            some = given[:, at : at + self._size]
            if not self._is_captured:
                self._work(some)
                continue
            self._slots.copy_(some)
            if self._graph is None:
                self._graph = self._capture()
            self._graph()
        return self._total

    def _capture(self) -> Captured:
        """The work of a stack as a graph; what warming up added to the sums is taken back."""
        before, work = self._total.clone(), partial(self._work, self._slots)
        warmed(work, self._device)
        graph = Captured(work, captures=True)
        self._total.copy_(before)
        return graph

    @torch.no_grad()
    def _work(self, slots: Tensor) -> None:
        run, place, live = slots
        start = self._theta[run]
        now = start.clone()
        views = self._flat.views(now)
        x, y, count = self._users.x[place], self._users.y[place], self._users.counts[place] * live
        rate = self._rate[run]
        shared: dict[str, Tensor] | None = self._flat.views(start[::GROUP])
        for piece in self._local.batches(x.shape[1]):
            numbers = torch.arange(piece.start, piece.stop, device=self._device)
            weights = (numbers < count[:, None]).to(now.dtype)
            xs, ys = self._users.task.widen(x[:, piece], y[:, piece])
            found = self._gradients(shared or views, xs, ys, weights)
            shared = None
            step = rate * (weights.sum(1) > 0)
            for name, view in views.items():
                width = (-1, *(1,) * (view.dim() - 1))
                pull = found[name]
                if self._local.proximal:
                    pull = pull + self._local.proximal * (view - self._flat.views(start)[name])
                view.sub_(pull * step.view(width))
        delta = now.sub_(start)
        # In single precision small squares are lost beside a large one, and with them 0.1 %.
        norm = torch.linalg.vector_norm(delta, dim=1, dtype=torch.float64)
        factor = clip_factor(norm, self._clip[run], slack=self._slack, keep=live > 0)
        delta = torch.where((factor > 0)[:, None], delta, 0.0)
        share = (run == self._runs[:, None]) * factor.to(delta.dtype)
        with exactly(self._device):
            self._total.addmm_(share, delta)
