"""Hugging Face's Trainer with private steps: its arguments, collators and callbacks as they are.

    trainer = PrivateTrainer(model, args, train_dataset=data, data_collator=collator,
                             plan=plan, clip_norm=1.0, run="runs/NAME")

One step of the Trainer (`gradient_accumulation_steps` batches) is one private step: the loss is
computed example by example. `num_items_in_batch`, the division for accumulation and `max_grad_norm`
act on the whole batch and are not used. Raw losses are not logged.

Rows are named by their place in `train_dataset`, and the names travel with the rows. The order of a
shuffled Trainer is drawn from a public seed of the run: the batch of step t depends on t alone.
The run folder holds model, optimizer, schedule, noise and the state of the Trainer; training goes
on at the log's next step. `class Mine(PrivateSteps, TheirTrainer)` makes another Trainer private.

State: the batches of the next step, and the widths of the batches so far.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.utils.data import IterableDataset

from noshuffle.clipping import ModelLoss
from noshuffle.clipping.criteria import CriteriaByRow
from noshuffle.clipping.objective import batch_size
from noshuffle.errors import InvalidInput, Unsupported, instance_of
from noshuffle.participation import Epochs, MinSeparation, SinglePass
from noshuffle.plan import Plan, PrivacyStatement
from noshuffle.release.folder import RunFolder
from noshuffle.release.named_loader import NamedBatch
from noshuffle.training import Private, privatize
from noshuffle.training.batches import batches_of, refuse_passes
from noshuffle.training.criterion import PrivateOptimizer

__all__ = ["PrivateSteps", "PrivateTrainer", "output_loss", "participation_of"]

STATE_NAME = "trainer_state.json"
#: The part of a step whose seed the collators and data sets draw from (`Release.seed`).
LOADER = 2**21


def _own_loss(model: Any, batch: Mapping[str, Any]) -> Tensor:
    with CriteriaByRow(batch_size((batch,))):
        out = model(**batch)
    loss: Tensor = out["loss"] if isinstance(out, Mapping) else out[0]
    return loss


#: The loss that a model of transformers computes from its `labels`, one number per example.
output_loss = ModelLoss(_own_loss, by_row=True)


# -- the plan ------------------------------------------------------------------------------------


def participation_of(
    args: transformers.TrainingArguments, dataset: Any
) -> Epochs | SinglePass | MinSeparation:
    """Return the participation of one example in a training with these arguments.

    Every example comes once in an epoch. Where the last epoch is cut short (`max_steps`, or 1.5
    epochs) the plan counts the steps that are taken: one for whole epochs would need more noise.
    """
    per_epoch = steps_per_epoch(args, dataset)
    steps = args.max_steps
    if steps <= 0:
        steps = math.ceil(args.num_train_epochs * per_epoch)
    epochs, rest = divmod(steps, per_epoch or 1)  # Epochs refuses an epoch without steps
    if not rest:
        return Epochs(epochs=epochs, steps_per_epoch=per_epoch)
    return MinSeparation(steps, per_epoch, epochs + 1) if epochs else SinglePass(steps)


def steps_per_epoch(args: transformers.TrainingArguments, dataset: Any) -> int:
    """Return the number of steps that read the data once."""
    batch, rows = int(args.per_device_train_batch_size), len(dataset)
    if args.dataloader_drop_last:
        rows -= rows % batch
    return -(-rows // (batch * args.gradient_accumulation_steps))


def check_arguments(trainer: Any, plan: Plan) -> None:
    """Refuse arguments under which the Trainer would use the data of a step in another way."""
    args = trainer.args
    compute_loss = getattr(trainer.compute_loss, "__func__", None)
    reasons = {
        "train_sampling_strategy that looks at the examples; use 'random' or 'sequential'": (
            args.train_sampling_strategy in ("group_by_length", "batch_rebalance")
        ),
        "fp16 scales the loss of a batch; use bf16": args.fp16,
        "several devices or processes; this version trains on one, set CUDA_VISIBLE_DEVICES": (
            args.n_gpu > 1 or args.world_size > 1
        ),
        "DeepSpeed, FSDP and parallelism_config; this version trains on one device": bool(
            args.deepspeed
            or getattr(args, "fsdp", None)
            or getattr(args, "parallelism_config", None)
        ),
        "label_smoothing_factor is a mean over the batch; put it into loss_fn": (
            args.label_smoothing_factor > 0 and trainer._loss_fn is output_loss
        ),
        "compute_loss_func is of the whole batch; give loss_fn=ModelLoss(fn, by_row=True)": (
            trainer.compute_loss_func is not None
        ),
        "a compute_loss of a subclass, which it would not call; give loss_fn=": (
            compute_loss is not transformers.Trainer.compute_loss
        ),
        "torch.compile; clipping needs the calls of the layers": args.torch_compile,
        "plans that sample; use private.step with private.sampler": plan.participation.is_sampled,
        "auto_find_batch_size; the batch size is part of the plan": args.auto_find_batch_size,
        "ignore_data_skip, which reads rows again that were released; leave it out": (
            args.ignore_data_skip
        ),
        "include_num_input_tokens_seen: numbers of tokens are raw data; leave it out": (
            args.include_num_input_tokens_seen not in ("no", False)
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise Unsupported(f"PrivateTrainer does not take {reason}")


def check_plan(trainer: Any, plan: Plan) -> None:
    """Refuse, before anything is released, a plan that this training would leave."""
    data, rule = trainer.train_dataset, plan.participation.base
    if trainer._units is None and plan.unit == "user":
        raise InvalidInput("a plan with unit='user' needs units=: the user of every example")
    if not is_indexable(data):
        if trainer._units is not None:
            raise InvalidInput("units= needs a data set with a length and rows in order")
        return
    if trainer._units is not None and len(trainer._units) != len(data):
        raise InvalidInput(
            f"units must name the user of each row of train_dataset: {len(data)}, got "
            f"{len(trainer._units)}"
        )
    if trainer._options.get("on_violation") == "drop":
        return
    wanted, per_epoch = participation_of(trainer.args, data), steps_per_epoch(trainer.args, data)
    planned = per_epoch
    if isinstance(rule, Epochs):
        planned = rule.steps_per_epoch
    elif isinstance(rule, MinSeparation) and wanted.steps > per_epoch:
        planned = max(per_epoch, rule.separation)  # a smaller one allows more
    if wanted.steps > plan.steps or planned != per_epoch:
        raise InvalidInput(
            f"the Trainer makes {wanted.steps} steps, {per_epoch} an epoch; the plan has "
            f"{plan.steps}, {planned} an epoch; fit it for participation_of(args, dataset)"
        )
    advice = "fit it for participation_of(args, dataset)"
    refuse_passes(plan, steps=wanted.steps, per_pass=per_epoch, advice=advice)


def is_indexable(data: Any) -> bool:
    """Whether rows are read by number; an iterable data set with a length may shuffle."""
    return hasattr(data, "__len__") and not isinstance(data, IterableDataset)


# -- the Trainer ---------------------------------------------------------------------------------


class PrivateSteps:
    """Mixin that makes every step of a Trainer private.

    Arguments beyond those of the Trainer:
        plan: every privacy decision; fit it for `participation_of(args, dataset)`.
        clip_norm: bound on the contribution of one example (or user).
        run: the run folder; None keeps the evidence in memory, and nothing can be resumed.
        units: the user of each row of `train_dataset`, for plans of unit "user". The collator must
            then keep the order of the rows.
        loss_fn: one number per example, `ModelLoss(fn, by_row=True)`; by default the model's own.
        privacy: further options of `privatize`.
    """

    private: Private
    accelerator: Any
    args: transformers.TrainingArguments
    state: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    train_dataset: Any

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
        # accelerate 1.10 to 1.15 would put a sampler of its own in the place of torch's.
        self.accelerator.dataloader_config.use_seedable_sampler = False
        self.plan, self._loss_fn = plan, loss_fn
        self._options = {"clip_norm": clip_norm, "run": run, **(privacy or {})}
        self._units = None if units is None else np.asarray(units)
        self._parts: list[tuple[Any, Any]] = []
        self._read: list[NamedBatch] = []
        self._widths: set[int] = set()
        self._trainer_state = TrainerState(self)
        check_arguments(self, plan)
        check_plan(self, plan)

    def statement(self) -> PrivacyStatement:
        """Return the guarantee of what was released so far, with all its assumptions."""
        return self.private.statement()

    def create_optimizer(self, model: Any = None) -> Any:
        """Create the optimizer that the arguments ask for, inside a private run."""
        if not hasattr(self, "private"):
            base: Any = super()
            inner = base.create_optimizer() if model is None else base.create_optimizer(model)
            size = int(self.args.per_device_train_batch_size)
            size *= self.args.gradient_accumulation_steps
            self.private = privatize(
                self.model, inner, self.plan, **{"batch_size": size, **self._options}
            )
            self.optimizer = self._step_optimizer = StepOptimizer(self)
            if self._units is not None:
                names = json.dumps(self._units.tolist()).encode()
                release = self.private._parts.release
                digest = hashlib.blake2b(names, key=release.secret, digest_size=16).hexdigest()
                release.bind("units", digest)
        return self._step_optimizer

    def _begin(self) -> None:
        """Begin the private run, or open it again."""
        self.create_optimizer()
        if self.optimizer is not getattr(self, "_step_optimizer", None):
            raise InvalidInput(
                f"the optimizer of this training is a {type(self.optimizer).__name__} outside the "
                "private run; a create_optimizer of a subclass sets self.optimizer and ends with "
                "`return super().create_optimizer()`"
            )

    def get_train_dataloader(self) -> Any:
        """Return a loader whose batches bring the places of their rows along."""
        if not hasattr(self, "private"):
            self._begin()
        base: Any = super()
        loader = base.get_train_dataloader()
        if not is_indexable(self.train_dataset):
            return loader
        parts = self.args.gradient_accumulation_steps
        # accelerate keeps torch's DataLoader inside of its own.
        loader = getattr(loader, "base_dataloader", loader)
        self._batches = batches_of(self.private, loader, parts=parts)
        if self._units is None:
            self._batches.named()
        return self._batches.loader()

    def train(self, resume_from_checkpoint: Any = None, **options: Any) -> Any:
        """Train; a run folder with a checkpoint goes on at the log's next step."""
        if hasattr(self, "private"):
            raise InvalidInput(
                f"this PrivateTrainer has trained before ({self.private.steps_released} steps were "
                "released), and a new run would not count them; make a new one, which goes on with "
                "the same run=, or shares one budget= (in privacy=) with this one"
            )
        if resume_from_checkpoint not in (None, False, True):
            raise InvalidInput(
                "a private run goes on from its run folder, which holds the noise as well; give "
                f"run=, and no resume_from_checkpoint (got {resume_from_checkpoint!r})"
            )
        self._begin()
        folder, private = self.private.run, self.private
        is_new = folder is None or not folder.saved()
        if resume_from_checkpoint is True and is_new:
            raise InvalidInput("nothing to resume: the run folder has no checkpoint; give run=")
        private.attach(trainer=self._trainer_state)
        try:
            if is_new:
                transformers.set_seed(private._parts.release.seed(0, LOADER) % 2**32)
                return without_loss(super().train(**options))  # type: ignore[misc]
            private.resume()
            with tempfile.TemporaryDirectory() as place:
                text = self._trainer_state.at(private.steps_released)
                Path(place, STATE_NAME).write_text(text, encoding="utf8")
                options = {"resume_from_checkpoint": place, **options}
                return without_loss(super().train(**options))  # type: ignore[misc]
        except BaseException:
            private.save_whole()
            raise

    # The run folder holds what the Trainer would load from a folder of its own.
    def _load_from_checkpoint(self, *args: Any, **options: Any) -> None:
        """Weights were loaded by `resume`."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._trainer_state.load_schedule()

    def _load_scaler(self, checkpoint: str | None) -> None:
        """There is none: half precision is bfloat16."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Random states were loaded by `resume`."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)  # type: ignore[misc]
        if self.private.run is not None:
            self.private.save()

    def _get_num_items_in_batch(self, *args: Any, **options: Any) -> None:
        """A count over the whole batch may not divide the loss of an example."""

    def get_batch_samples(self, *args: Any, **options: Any) -> Any:
        """Read the batches of one step; the places of their rows stay here."""
        batches, _ = super().get_batch_samples(*args, **options)  # type: ignore[misc]
        self._read = [one for one in batches if isinstance(one, NamedBatch)]
        return [one.batch if isinstance(one, NamedBatch) else one for one in batches], None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Collect one batch for the step that `optimizer.step` takes."""
        rows = None
        if is_indexable(self.train_dataset):
            rows = next((one.rows for one in self._read if one.batch is inputs), None)
            if rows is None:
                raise InvalidInput(
                    "this batch came without the places of its rows; leave get_train_dataloader "
                    "and get_batch_samples to the PrivateTrainer, and give training_step the "
                    "inputs as they came"
                )
            if (size := batch_size((dict(inputs),))) != len(rows):
                raise InvalidInput(
                    f"the collator made {size} rows of {len(rows)} examples; let every example be "
                    "one row (no packing)"
                )
        if self.private.run is not None and not self.private.steps_released and not self._parts:
            self.private.save()  # the initial weights, so that a killed run begins with them
        self._check_padding(inputs)
        model.train()
        self._parts.append((dict(self._prepare_inputs(inputs)), rows))  # type: ignore[attr-defined]
        return torch.zeros((), device=self.args.device)

    def _check_padding(self, inputs: Mapping[str, Any]) -> None:
        """Refuse widths that depend on the longest row of a batch where the model can see them."""
        ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
        if not isinstance(ids, Tensor) or ids.dim() < 2:
            return
        self._widths.add(ids.shape[1])
        is_right = isinstance(mask, Tensor) and bool((mask[:, 1:] <= mask[:, :-1]).all())
        if len(self._widths) > 1 and not is_right:
            raise InvalidInput(
                f"batches are padded to different widths ({sorted(self._widths)}), so a long "
                "example would move the gradients of its batch; give attention_mask and pad on the "
                "right, or pad every row to one length (padding='max_length')"
            )

    def release(self) -> None:
        """Take one private step with the batches since the last one."""
        parts, self._parts = self._parts, []
        if not parts:
            raise InvalidInput(
                "a step without batches: a training_step of a subclass must give its inputs to "
                "super().training_step(model, inputs); other losses are loss_fn="
            )
        with self.compute_loss_context_manager():  # type: ignore[attr-defined]
            if len(parts) == 1:
                batch, rows = parts[0]
                self.private.advance(self._loss_fn, (batch,), ids=self._ids(rows, 0))
                return
            with self.private.accumulate() as step:
                for part, (batch, rows) in enumerate(parts):
                    step.add(self._loss_fn, (batch,), ids=self._ids(rows, part))

    def _ids(self, rows: Any, part: int) -> Any:
        """Return the users of these rows; without `units`, open their names for the next part."""
        if rows is not None and self._units is not None:
            return self._units[rows]
        if rows is not None:
            self._batches.open(rows, part=part)
        return None

    def _clip_grad_norm(self, model: Any) -> None:
        """Examples are clipped one by one; the noisy mean is not."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        """Nothing raw is logged."""

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0: lengths of the texts are raw data."""
        return 0

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Log released values only: ε, the learning rate, and what the evaluation found."""
        shown = {k: v for k, v in logs.items() if k not in ("loss", "train_loss", "grad_norm")}
        if hasattr(self, "private"):
            shown["epsilon"] = self.private.epsilon
        super().log(shown, *args, **options)  # type: ignore[misc]


_Trainer: Any = transformers.Trainer  # its signatures change with every release


class PrivateTrainer(PrivateSteps, _Trainer):  # type: ignore[misc]
    """Hugging Face's Trainer, every step of which is private; see `PrivateSteps`."""


class StepOptimizer(PrivateOptimizer):
    """The optimizer that the Trainer sees; `step` releases the batches that it collected."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer.private)
        self._trainer = weakref.proxy(trainer)

    def step(self, closure: Any = None) -> Any:
        self._trainer.release()


class TrainerState:
    """The part of a checkpoint that the Trainer goes on from: its state and its schedule."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = weakref.proxy(trainer)
        self._loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        state = {k: v for k, v in vars(self._trainer.state).items() if is_plain(v)}
        return {"state": json.dumps(state), "schedule": self._trainer.lr_scheduler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loaded = dict(state)

    def at(self, step: int) -> str:
        """Return the loaded state as JSON, moved on to a step of the log."""
        state, trainer = json.loads(self._loaded["state"]), self._trainer
        self._passed = step - state["global_step"]
        state["global_step"] = step
        if is_indexable(trainer.train_dataset):
            state["epoch"] = step / steps_per_epoch(trainer.args, trainer.train_dataset)
        return json.dumps(state)

    def load_schedule(self) -> None:
        """Load the learning-rate schedule; steps that were passed over move it on."""
        schedule, groups = self._trainer.lr_scheduler, self._trainer.optimizer.param_groups
        schedule.load_state_dict(self._loaded["schedule"])
        for group, rate in zip(groups, schedule.get_last_lr()):
            group["lr"] = rate  # a new schedule has set the first rate
        for _ in range(self._passed):
            schedule.step()


def is_plain(value: Any) -> bool:
    """Whether JSON can hold this value."""
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


def without_loss(output: Any) -> Any:
    """Return what `train` returns, without the raw training loss."""
    metrics = {k: v for k, v in output.metrics.items() if k != "train_loss"}
    return output._replace(training_loss=math.nan, metrics=metrics)
