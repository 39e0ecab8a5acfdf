"""Hugging Face's Trainer with private steps: its arguments, collators and callbacks as they are.

    trainer = PrivateTrainer(model, args, train_dataset=data, data_collator=collator,
                             plan=plan, clip_norm=1.0, run="runs/NAME")

A step of the Trainer (`gradient_accumulation_steps` batches) is one private step: `.loss` is asked
for example by example. `num_items_in_batch`, the division for accumulation and `max_grad_norm` act
on the whole batch and have no place here. Data are read in their order. Losses are raw: not logged.

With a run folder training goes on at the next step, whoever killed it: it holds model, optimizer,
schedule, noise and Trainer, written whenever the Trainer saves, by time, and when the process is
asked to end. State: the batches of the step, and how many of the epoch were read.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.utils.data import SequentialSampler

from noshuffle.clipping import ModelLoss
from noshuffle.clipping.criteria import CriteriaByRow
from noshuffle.clipping.objective import batch_size
from noshuffle.errors import InvalidInput, instance_of
from noshuffle.integrations.huggingface_checks import (
    is_indexable,
    part_size,
    participation_of,
    refuse,
    steps_per_epoch,
)
from noshuffle.integrations.huggingface_watch import (
    StepOptimizer,
    TrainerState,
    TrainerWatch,
)
from noshuffle.plan import Plan
from noshuffle.release.folder import RunFolder, load
from noshuffle.release.history import History
from noshuffle.training import Private, privatize
from noshuffle.training.criterion import PrivateOptimizer
from noshuffle.training.rng import restore_rng

__all__ = ["PrivateTrainer", "output_loss", "participation_of"]

STATE_NAME = "trainer_state.json"


def _own_loss(model: Any, batch: Mapping[str, Any]) -> Tensor:
    with CriteriaByRow(batch_size((batch,))):
        out = model(**batch)
    loss: Tensor = out["loss"] if isinstance(out, Mapping) else out[0]
    return loss


#: The loss that a model of transformers computes from its `labels`, one number per example.
output_loss = ModelLoss(_own_loss, by_row=True)


_Trainer: Any = transformers.Trainer  # its signatures change with every release


class PrivateTrainer(_Trainer):  # type: ignore[misc]
    """A Trainer whose every step is private.

    Arguments beyond those of the Trainer:
        plan: every privacy decision; `participation_of(args, dataset)` says what it is fitted for.
        clip_norm: bound on one example's (user's) contribution.
        run: the run folder; None keeps the evidence in memory, and nothing can be resumed.
        units: whose each example is (one id per row of the data set), for plans of unit "user".
        loss_fn: one number per example, `ModelLoss(fn, by_row=True)`; by default the model's own.
        privacy: further options of `privatize`.
    """

    private: Private
    optimizer: Any

    def __init__(
        self,
        *args: Any,
        plan: Plan,
        clip_norm: float | None = None,
        run: RunFolder | str | Path | None = None,
        units: Sequence[Any] | None = None,
        loss_fn: ModelLoss = output_loss,
        privacy: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        instance_of(Plan, plan=plan)
        self.plan, self._loss_fn = plan, loss_fn
        self._options = {"clip_norm": clip_norm, "run": run, **(privacy or {})}
        self._run = None if run is None else RunFolder.of(run)
        self._units = None if units is None else np.asarray(units)
        self._parts: list[tuple[Any, Any]] = []
        self._batches = 0  # of this epoch, before the current one
        self._resumed: dict[str, Any] | None = None
        self._lost = 0  # steps between the checkpoint and where the run goes on
        refuse(self, plan, is_own_loss=loss_fn is output_loss, readers=_readers())
        self.add_callback(TrainerWatch(self))

    def statement(self) -> Any:
        """The guarantee of what was released so far, with all its assumptions."""
        return self.private.statement()

    def create_optimizer(self, model: Any = None) -> Any:
        """The optimizer that the arguments ask for, inside a private run."""
        if isinstance(self.optimizer, PrivateOptimizer):
            return self.optimizer
        inner = super().create_optimizer() if model is None else super().create_optimizer(model)
        size = part_size(self.args) * self.args.gradient_accumulation_steps
        options = {"batch_size": size, **self._options}
        self.private = privatize(self.model, inner, self.plan, **options)
        self.optimizer = StepOptimizer(self)
        return self.optimizer

    def train(self, resume_from_checkpoint: Any = None, **options: Any) -> Any:
        """Train, from the newest checkpoint of the run folder on if it has one."""
        if hasattr(self, "private"):
            raise InvalidInput(
                f"this PrivateTrainer has trained before ({self.private.steps_released} steps were "
                "released), and a new run would not count them; make a new one, which goes on with "
                "the same run=, or has one budget= in privacy= with this one"
            )
        found = [] if self._run is None else self._run.saved()
        if resume_from_checkpoint not in (None, False, True):
            raise InvalidInput(
                "a private run goes on from its run folder, which holds the noise as well; give "
                f"run=, and no resume_from_checkpoint (got {resume_from_checkpoint!r})"
            )
        if resume_from_checkpoint is True and not found:
            raise InvalidInput("nothing to resume: the run folder has no checkpoint; give run=")
        if self._run is None or not found:
            return self._trained(options)
        state = load(found[-1], with_secret=True)
        self._resumed, told = state["secret"], json.loads(state["attached"]["trainer"]["state"])
        # Steps behind the checkpoint are passed over, and so are their batches.
        steps = History.read(self._run).steps
        self._lost = steps - told["global_step"]
        told["global_step"] = steps
        if hasattr(self.train_dataset, "__len__"):
            told["epoch"] = steps / steps_per_epoch(self.args, self.train_dataset)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, STATE_NAME).write_text(json.dumps(told), encoding="utf8")
            return self._trained({"resume_from_checkpoint": folder, **options})

    def _trained(self, options: dict[str, Any]) -> Any:
        """What the Trainer comes to; the last whole step is saved if that is an error."""
        try:
            return _without_loss(super().train(**options))
        except BaseException:
            if hasattr(self, "private"):
                self.private.save_whole()
            raise

    # What the Trainer would load from a folder of its own comes from the run folder.
    def _load_from_checkpoint(self, *args: Any, **options: Any) -> None:
        """Weights come with everything else."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.private.attach(trainer=TrainerState(self))
            self.private.resume()
            for _ in range(self._lost):
                self.lr_scheduler.step()

    def _load_scaler(self, checkpoint: str | None) -> None:
        """There is none: half precision is bfloat16."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        found = None if self._resumed is None else self._resumed["random"]
        if found is not None:
            restore_rng(found)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self._run is not None:
            self.private.save()

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        data = self.train_dataset if train_dataset is None else train_dataset
        return SequentialSampler(data) if hasattr(data, "__len__") else None

    def _get_num_items_in_batch(self, *args: Any, **options: Any) -> None:
        """A count over the whole batch, which no example's loss may be divided by."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Take one batch into the step that `optimizer.step` makes."""
        self._begin()
        model.train()
        given = dict(inputs)
        ids = self._ids(batch_size((given,)))
        self._parts.append((dict(self._prepare_inputs(given)), ids))
        return torch.zeros((), device=self.args.device)

    def _begin(self) -> None:
        """Before the first step: what it starts from is kept, so that it can begin alike."""
        if self._run is not None and not self.private.steps_released and not self._parts:
            self.private.attach(trainer=TrainerState(self))
            self.private.save()

    def _ids(self, rows: int) -> Any:
        """Which examples of the data set (whose) a batch holds: it is read in order."""
        data: Any = self.train_dataset
        if not is_indexable(data):
            if self._units is not None:
                raise InvalidInput("units= needs a data set with a length and rows in order")
            return None
        size, total = part_size(self.args), len(data)
        start = self._batches * size
        if rows != min(size, total - start):
            raise InvalidInput(
                f"the collator made {rows} rows of {min(size, total - start)} examples, so that it "
                "cannot be told whose they are; let every example be one row (no packing)"
            )
        ids = np.arange(start, start + rows)
        return ids if self._units is None else self._units[ids]

    def release(self) -> None:
        """One private step of the batches since the last one."""
        parts, self._parts = self._parts, []
        if not parts:
            raise InvalidInput(
                "a step without batches: a training_step of one's own must give its inputs to "
                "super().training_step(model, inputs), which reads them; other losses are loss_fn="
            )
        with self.compute_loss_context_manager():
            if len(parts) == 1:
                self.private.advance(self._loss_fn, (parts[0][0],), ids=parts[0][1])
                return
            with self.private.accumulate() as step:
                for batch, ids in parts:
                    step.add(self._loss_fn, (batch,), ids=ids)

    def _clip_grad_norm(self, model: Any) -> None:
        """Examples are clipped, one by one; the noisy mean is not."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        """Nothing raw is logged."""

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: lengths of the texts are raw data."""
        return 0

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Log released values only: ε, the learning rate, what the evaluation found."""
        shown = {k: v for k, v in logs.items() if k not in ("loss", "train_loss", "grad_norm")}
        if hasattr(self, "private"):
            shown["epsilon"] = self.private.epsilon
        super().log(shown, *args, **options)


def _readers() -> dict[str, type]:
    """Methods that decide which rows a step reads, and whose they must be."""
    theirs = ("_get_dataloader", "get_train_dataloader", "get_batch_samples")
    return {"_get_train_sampler": PrivateTrainer, **dict.fromkeys(theirs, _Trainer)}


def _without_loss(output: Any) -> Any:
    metrics = {k: v for k, v in output.metrics.items() if k != "train_loss"}
    return output._replace(training_loss=math.nan, metrics=metrics)
