"""Augmentation multiplicity: the gradient of a row is that of its mean loss over several copies.

    g_i = ∇ (1/K) Σ_k ℓ(θ; copy_k(x_i), y_i),     then clipped once, as one row

(De et al. 2022, arXiv 2204.13650). The K copies stay one contribution of one row, so sensitivity
and noise do not depend on K; what K costs is time. Copies are drawn anew in every step from the
generators of torch, before the step (`privatize` sets them from the secret of the run).
Training then sees images (batch, K, …), and needs ids: a row looks different in every epoch.

>>> copies = Augment(copies=3, shift=2)(torch.arange(32.0).reshape(2, 1, 4, 4))
>>> copies.shape, bool((copies[0] < 16).all())
(torch.Size([2, 3, 1, 4, 4]), True)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from noshuffle.clipping import ModelLoss
from noshuffle.clipping.objective import Criterion, row_losses
from noshuffle.errors import InvalidInput, Unsupported, callables, whole
from noshuffle.training.generators import seeded
from noshuffle.training.rng import restore_rng, rng_state

#: The part of a step whose seed copies are drawn from; no batch comes in so many.
COPIES = 2**20
_MIXES = (
    "transform must treat every row alone, and draw from the generators of torch; a copy came out "
    "otherwise beside other rows"
)


@dataclass(frozen=True, kw_only=True)
class Augment:
    """How many copies of a row one step sees, and how they differ.

    Images are moved by up to `shift` pixels (their border is mirrored outwards) and, with
    `mirror`, turned left to right every other time. A `transform` of one's own is called once for
    every copy with the whole batch and gives one of the same size; it must treat rows alone, which
    a run tries on its first batch, and at random on later ones (`CopiedBatches`).
    """

    copies: int
    shift: int = 4
    mirror: bool = True
    transform: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        whole(copies=self.copies)
        whole(at_least=0, shift=self.shift)
        if self.transform is not None:
            callables(transform=self.transform)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """Copies of every row: (batch, K, …)."""
        if self.transform is not None:
            made = [self.transform(x) for _ in range(self.copies)]
            for own in made:
                if not isinstance(own, Tensor) or own.shape[:1] != x.shape[:1]:
                    raise InvalidInput("transform must return a tensor with a row for every row")
            return torch.stack(made, 1)
        if x.dim() != 4 or self.shift >= min(x.shape[2:]):
            raise InvalidInput(
                "augment moves images (batch, channels, height, width) that are larger than its "
                f"shift of {self.shift}, got {tuple(x.shape)}; give Augment(transform=...)"
            )
        return self._moved(x)

    def check_alone(self, x: Tensor) -> bool:
        """Raise if a copy changes with the other rows of its batch: clipping would bound nothing.

        Tried with other rows, zeros and extreme rows in the place of some, under the same random
        numbers, which are put back. False where there are too few rows to tell.
        """
        if self.transform is None or len(x) < 2:
            return self.transform is None
        state = rng_state()
        try:
            truth = self(x)
            for stays, beside in _other_batches(x):
                restore_rng(state)
                try:
                    found = self(beside)[stays]
                except Exception:  # it refuses such rows, and would stop a step with one
                    continue
                if not torch.allclose(found, truth[stays], 1e-3, 1e-5, equal_nan=True):
                    raise InvalidInput(_MIXES)
        finally:
            restore_rng(state)
        return True

    def _moved(self, x: Tensor) -> Tensor:
        (size, _, height, width), most = x.shape, self.shift
        x = f.pad(x, (most,) * 4, mode="reflect") if most and size else x

        def draw(values: int) -> Tensor:
            return torch.randint(values, (size, self.copies, 1), device=x.device)

        rows = draw(2 * most + 1) + torch.arange(height, device=x.device)
        columns = draw(2 * most + 1) + torch.arange(width, device=x.device)
        if self.mirror:
            columns = torch.where(draw(2) == 1, columns.flip(2), columns)
        places = rows[..., :, None] * x.shape[3] + columns[..., None, :]
        flat = x.flatten(2).unsqueeze(1).expand(-1, self.copies, -1, -1)
        index = places.flatten(2).unsqueeze(2).expand(-1, -1, x.shape[1], -1)
        return flat.gather(3, index).reshape(size, self.copies, x.shape[1], height, width)


def _other_batches(x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Which rows are as they were, and the batch: others among them, none, and extreme ones.

    Whatever goes by the largest number of a batch (`x / x.max()`) comes out the same while another
    row has that number, too: zeros take all others away, and an extreme row is beyond them.
    """
    picks = torch.Generator().manual_seed(0)
    for _ in range(4):
        stays = torch.rand(len(x), generator=picks, device="cpu").to(x.device) < 0.5
        rows = stays.reshape(-1, *[1] * (x.dim() - 1))
        yield stays, x.where(rows, x.roll(1, 0))
        yield stays, x.where(rows, torch.zeros_like(x))
    for place, by in enumerate((1e4, math.inf, -1e4, math.nan) if x.is_floating_point() else ()):
        far = place % len(x)  # one row after the other, beside all the rest as they are
        stays = torch.arange(len(x), device=x.device) != far
        extreme = x[far : far + 1].abs() * by if math.isfinite(by) else x.new_full((), by)
        yield stays, torch.where(stays.reshape(-1, *[1] * (x.dim() - 1)), x, extreme)


def augment_of(wanted: int | Augment | None) -> Augment | None:
    """The option as it was given: a number of copies, or all of it."""
    if wanted is None or isinstance(wanted, Augment):
        return wanted
    return Augment(copies=wanted)


def mean_over_copies(loss_fn: Criterion | ModelLoss) -> ModelLoss:
    """The mean loss of the copies of every row, for inputs (batch, K, …).

    Guarantees: row i depends on the copies of row i alone, if that holds for model and criterion.
    """
    if isinstance(loss_fn, ModelLoss):
        raise Unsupported("augment= goes with a criterion: a ModelLoss calls the model itself")
    callables(loss_fn=loss_fn)

    def by_row(model: nn.Module, copies: Tensor, *targets: Tensor) -> Tensor:
        many = copies.shape[1]
        spread = tuple(target.repeat_interleave(many, 0) for target in targets)
        inputs = copies.flatten(0, 1)
        if inputs.is_cuda and inputs.dim() == 4:  # as matrix units and our kernels read them
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        losses = row_losses(loss_fn, model(inputs), spread)
        return losses.reshape(-1, many).mean(1)

    return ModelLoss(by_row, by_row=True)


class CopiedBatches:
    """The batches of one run with copies of their rows.

    A transform is tried on the first batch of a process that has two rows.

    State: the last loss, over copies, and whether the transform was tried.
    """

    def __init__(self, augment: Augment) -> None:
        self._augment, self._is_tried = augment, False
        self._spread: tuple[Any, ModelLoss] | None = None

    def of(
        self, loss_fn: Criterion | ModelLoss, batch: tuple[Any, ...], ids: Any, *, seed: int
    ) -> tuple[ModelLoss, tuple[Any, ...]]:
        """The loss over copies, and the batch with them: (batch, K, …) and the targets."""
        if ids is None:
            raise InvalidInput("augment= needs ids=: a row looks different in every epoch")
        if not batch or not isinstance(batch[0], Tensor):
            raise InvalidInput("augment= needs batches of one tensor of inputs and their targets")
        if self._spread is None or self._spread[0] is not loss_fn:
            self._spread = (loss_fn, mean_over_copies(loss_fn))
        with seeded(seed, batch[0].device):
            copies = self._augment(batch[0])
            self._is_tried = self._is_tried or self._augment.check_alone(batch[0])
        return self._spread[1], (copies, *batch[1:])
