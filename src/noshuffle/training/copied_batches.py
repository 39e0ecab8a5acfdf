"""The batch of a step with copies of its rows, drawn as a replay would draw them, and their loss.

What copies are and how they differ is `augment`'s. They are drawn from a seed of the step, under
which torch's generators are put back afterwards. State: the last loss, taken over copies, and
whether a transform was found to treat rows alone.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from noshuffle.clipping import ModelLoss
from noshuffle.clipping.objective import Criterion
from noshuffle.errors import InvalidInput
from noshuffle.training.augment import Augment, mean_over_copies
from noshuffle.training.step import seeded

#: The part of a step whose seed copies are drawn from; no batch comes in so many.
COPIES = 2**20


class CopiedBatches:
    """The batches of one run with copies of their rows."""

    def __init__(self, augment: Augment) -> None:
        self._augment = augment
        self._spread: tuple[Any, ModelLoss] | None = None  # the last loss, over copies
        self._is_tried = False

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
