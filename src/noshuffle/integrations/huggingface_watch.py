"""What stands beside a `PrivateTrainer` while it trains.

    TrainerWatch    before the first step: whether rows are examples, and padding changes nothing;
                    then it counts the batches that are read, by which rows are known
    StepOptimizer   in the place of the Trainer's optimizer: `step` releases what was collected
    TrainerState    the part of a checkpoint that the Trainer goes on from, and which data it is of

State: how many batches of an epoch were read (kept by the Trainer), and whether one has begun.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Mapping
from typing import Any

import transformers

from noshuffle.errors import InvalidInput
from noshuffle.integrations.huggingface_checks import (
    is_indexable,
    refuse_mixed_rows,
    steps_per_epoch,
)
from noshuffle.integrations.huggingface_padding import refuse_padding
from noshuffle.training.criterion import PrivateOptimizer

#: The number of the part of a step whose seed collators draw by (`Release.seed`).
LOADER = 2**21


class TrainerWatch(transformers.TrainerCallback):
    """Before the first step: the optimizer is that of the private run, and a row an example. Then
    it counts batches, whoever ends an epoch early or leaves a batch out: rows are known by that.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._is_first = trainer, True

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        found = getattr(given["optimizer"], "optimizer", given["optimizer"])
        if not isinstance(found, StepOptimizer):
            raise InvalidInput(
                f"the optimizer of this training is a {type(found).__name__} outside the private "
                "run; a create_optimizer of one's own sets self.optimizer and ends with "
                "`return super().create_optimizer()`"
            )
        trainer, loader = self._trainer, given["train_dataloader"]
        refuse_mixed_rows(loader, has_units=trainer._units is not None)
        autocast = trainer.compute_loss_context_manager
        refuse_padding(trainer.model, trainer._loss_fn, loader, autocast=autocast)
        if trainer._resumed is None:
            # Collators and data sets that draw: a row that draws more often than another moves the
            # draws of those after it, and `args.seed` is known.
            transformers.set_seed(trainer.private._parts.release.seed(0, LOADER) % 2**32)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """A run that goes on leaves out what was read of its first epoch."""
        trainer, is_first = self._trainer, self._is_first
        trainer._batches, self._is_first = 0, False
        if is_first and is_indexable(trainer.train_dataset):
            steps = trainer.private.steps_released % steps_per_epoch(args, trainer.train_dataset)
            trainer._batches = steps * args.gradient_accumulation_steps

    def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._trainer._batches += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._trainer._batches += 1


class StepOptimizer(PrivateOptimizer):
    """Stands in for the Trainer's optimizer; `step` releases what the Trainer has collected."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer.private)
        self._release = trainer.release

    def step(self, closure: Any = None) -> Any:
        self._release()


class TrainerState:
    """The part of a checkpoint that the Trainer goes on from; it does not keep it alive."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = weakref.proxy(trainer)

    def state_dict(self) -> dict[str, Any]:
        state = self._trainer.state
        text = json.dumps({k: v for k, v in vars(state).items() if _is_plain(v)})
        schedule = self._trainer.lr_scheduler.state_dict()
        return {"state": text, "schedule": schedule, "data": self._data()}

    def _data(self) -> str:
        """What the data set says of itself, by a secret of the run: nobody can try that out."""
        made = self._trainer
        data, secret = made.train_dataset, made.private._parts.release.secret
        units = None if made._units is None else made._units.tolist()
        told = [len(data) if is_indexable(data) else None, getattr(data, "_fingerprint", ""), units]
        return hashlib.blake2b(repr(told).encode(), key=secret, digest_size=16).hexdigest()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["data"] != self._data():
            raise InvalidInput(
                "train_dataset (or units=) is not the one that this run began with, and rows are "
                "known by their places; give it the same data in the same order (shuffle with a "
                "seed)"
            )
        self._trainer.lr_scheduler.load_state_dict(state["schedule"])


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True
