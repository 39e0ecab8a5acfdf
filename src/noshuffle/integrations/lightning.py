"""Lightning's automatic optimisation with private steps: one callback.

    trainer = Trainer(max_epochs=2, callbacks=[PrivateCallback(plan, clip_norm=1.0, batch_size=250,
                                                               run="runs/NAME")])
    trainer.fit(module, loader)

`training_step` stays as it is: passes since the last step are heard (`training.passes`), and the
optimizer's step makes them private. What `training_step` logs is raw, and its author's to keep.

With a run folder the same script started again goes on by itself, at the next epoch: Lightning
reads one from its beginning, so the steps that are left of a broken one are passed over. State: the
run, and ids of the batches since the last step.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from operator import length_hint
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.plan import Plan
from noshuffle.plan.statement import PrivacyStatement
from noshuffle.release.folder import RunFolder
from noshuffle.training import Private, privatize
from noshuffle.training.batches import refuse_passes, repeats_rows
from noshuffle.training.check import order_of
from noshuffle.training.unchanged import PrivateOptimizer

# The package has two names, and a process must not mix them.
_NAMES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
_FOUND = [name for package, name in _NAMES.items() if find_spec(package) is not None]
_FOUND.sort(key=lambda name: name not in sys.modules)
_FINDERS = {"LearningRateFinder", "BatchSizeFinder"}
_Callback: Any = import_module(_FOUND[0]).Callback if _FOUND else object


class PrivateCallback(_Callback):  # type: ignore[misc]
    """Makes every optimizer step of `trainer.fit` private.

    Arguments:
        plan: every privacy decision.
        clip_norm: bound on one example's (user's) contribution.
        batch_size: examples of one optimizer step, accumulated batches together.
        run: the run folder; None keeps the evidence in memory, and nothing can be resumed.
        ids: the unit of every example of a batch, `ids(batch)`; without, every row counts as a
            new unit, the statement says so, and a run cannot be opened again.
        privacy: further options of `privatize`.
    """

    private: Private

    def __init__(
        self,
        plan: Plan,
        *,
        batch_size: int,
        clip_norm: float | None = None,
        run: RunFolder | str | Path | None = None,
        ids: Callable[[Any], Any] | None = None,
        **privacy: Any,
    ) -> None:
        if not _FOUND:
            raise Unsupported("PrivateCallback needs Lightning: pip install 'noshuffle[lightning]'")
        self.plan = plan
        self._options = {"batch_size": batch_size, "clip_norm": clip_norm, "run": run, **privacy}
        self._ids_of, self._ids = ids, list[Any]()

    def statement(self) -> PrivacyStatement:
        """The guarantee of what was released so far, with all its assumptions."""
        if not hasattr(self, "private"):
            raise InvalidInput("nothing was trained yet; the statement is there after trainer.fit")
        return self.private.statement()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Before anything is trained: finders take callbacks off, and train on raw gradients."""
        names = {type(one).__name__ for one in trainer.callbacks} & _FINDERS
        if names:
            raise Unsupported(
                f"PrivateCallback does not take {names.pop()} (Tuner), which trains on raw "
                "gradients first; choose by public data, or by noshuffle.tune"
            )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Put the optimizer into a private run, and go on where the run was."""
        _refuse(trainer, pl_module, self.plan)
        if hasattr(self, "private") and self.private.steps_released:
            raise InvalidInput(
                f"this callback has released {self.private.steps_released} steps of another "
                "trainer.fit, which a new run would not count; make a new PrivateCallback for "
                "each, with one budget= for both"
            )
        (inner,) = trainer.strategy.optimizers
        self.private = privatize(trained_part(pl_module), inner, self.plan, **self._options)
        trainer.strategy.optimizers = [_FitOptimizer(self)]
        if self.private.run is not None:
            progress = _Progress(trainer)
            self.private.attach(fit=progress)
            if self.private.resume():
                self.private.pass_over(to="epoch")
                progress.go_to(self.private.steps_released, self.plan.participation.base)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Before the first step is charged: the order and the number of the batches."""
        plan, combined = self.plan, trainer.fit_loop._combined_loader
        for loader in combined.flattened:
            order = order_of(plan, loader)
            if order.verdict == "refused":
                raise InvalidInput(f"{order.found}: {order.advice}")
        if self._ids_of is None and _begins_again(combined):
            raise InvalidInput(
                "several loaders of other lengths: the shorter ones begin again within an epoch, "
                "so that their rows take part more than once; give CombinedLoader(…, 'min_size'), "
                "or PrivateCallback(…, ids=lambda batch: …)"
            )
        steps = trainer.estimated_stepping_batches
        if steps > plan.steps:
            raise InvalidInput(
                f"trainer.fit makes {steps} steps, the plan has {plan.steps}; fit the plan again, "
                "or give max_epochs or max_steps"
            )
        base = getattr(plan.participation, "participation", plan.participation)
        parts, planned = trainer.num_training_batches, getattr(base, "steps_per_epoch", 0)
        length = -(-parts // trainer.accumulate_grad_batches)
        if planned and length not in (planned, math.inf) and steps > length:
            raise InvalidInput(
                f"the loader makes {length} steps in an epoch, the plan has {planned}; fit the "
                "plan again, or leave out the incomplete last batch (drop_last=True)"
            )
        drops = self._options.get("on_violation") == "drop"
        if repeats_rows(loader) and 0 < length < math.inf and not drops:
            length, steps = int(length), int(steps)
            advice = f"fit it for Epochs(epochs={-(-steps // length)}, steps_per_epoch={length})"
            refuse_passes(plan, steps=steps, per_pass=length, advice=advice)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self.private.run is not None:
            self.private.save()

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._ids_of is not None:
            self._ids.append(np.asarray(self._ids_of(batch)))

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The step was the run's, and nothing goes by what it logged."""
        if trainer.global_step != self.private.steps_released:
            raise InvalidInput(
                f"trainer.fit has made {trainer.global_step} steps, the private run "
                f"{self.private.steps_released}; an optimizer_step of the module's own calls "
                "optimizer.step(closure=closure), once, and changes no weights itself"
            )
        logged = {one.meta.name for one in trainer._results.values()}
        plateaus = [one for one in trainer.lr_scheduler_configs if one.reduce_on_plateau]
        for one in (*plateaus, *trainer.callbacks):
            name = getattr(one, "monitor", None) or ""
            if logged & {name, name.removesuffix("_epoch"), name.removesuffix("_step")}:
                raise InvalidInput(
                    f"monitor={name!r} is logged by training_step: raw data, and a schedule, a "
                    "stop or a choice of checkpoints by it is not covered; monitor validation data"
                )

    def take_ids(self) -> Any:
        """The units of the batches since the last step."""
        ids, self._ids = self._ids, []
        return np.concatenate(ids) if ids else None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if hasattr(self, "private"):
            self.private.save_whole()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.private.run is not None:
            self.private.save()


class _FitOptimizer(PrivateOptimizer):
    """Stands in for the optimizer of `trainer.fit`; its step brings the ids of its batches."""

    def __init__(self, callback: PrivateCallback) -> None:
        base = callback.private.optimizer
        super().__init__(base._parts, listener=base._listener, accumulate=base._accumulate)
        self._take_ids = callback.take_ids

    def step(self, closure: Any = None, *, ids: Any = None) -> Any:
        return super().step(closure, ids=self._take_ids())


class _Progress:
    """Learning rates of `trainer.fit`, and how far it is; it does not keep the trainer alive."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = weakref.proxy(trainer)

    def state_dict(self) -> dict[str, Any]:
        configs = self._trainer.lr_scheduler_configs
        return {"schedules": [config.scheduler.state_dict() for config in configs]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        configs = self._trainer.lr_scheduler_configs
        for config, saved in zip(configs, state["schedules"], strict=True):
            config.scheduler.load_state_dict(saved)

    def go_to(self, step: int, rule: Any) -> None:
        """Begin at this step, the first of an epoch; learning rates move on by what was missed."""
        loop, epoch = self._trainer.fit_loop, step // rule.steps_per_epoch
        past = loop.epoch_progress.current
        past.ready = past.started = past.processed = past.completed = epoch
        steps = loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
        steps.ready = steps.completed = loop.epoch_loop._batches_that_stepped = step
        for config in self._trainer.lr_scheduler_configs:
            due = (step if config.interval == "step" else epoch) // config.frequency
            done = due if config.reduce_on_plateau else config.scheduler.last_epoch
            for _ in range(due - done):
                config.scheduler.step()


def _begins_again(combined: Any) -> bool:
    """Whether a loader of several is read more than once in an epoch, as is Lightning's default."""
    if len(combined.flattened) < 2 or combined._mode != "max_size_cycle":
        return False
    lengths = [length_hint(one, -1) for one in combined.flattened]  # a stream may have none
    return -1 in lengths or len(set(lengths)) > 1


def trained_part(module: nn.Module) -> nn.Module:
    """The module whose passes are heard: the one child that has all that is trained, or itself.

    `training_step` often calls `self.net(x)` and never `self(x)`.
    """
    trained = {p for p in module.parameters() if p.requires_grad}
    for child in module.children():
        has_forward = type(child).forward is not nn.Module.forward
        if has_forward and trained and trained <= set(child.parameters()):
            return child
    return module


def _refuse(trainer: Any, module: Any, plan: Plan) -> None:
    """Raise where `trainer.fit` would do something that the guarantee does not cover."""
    reasons = {
        "manual optimisation; use private.step there": not module.automatic_optimization,
        "several optimizers; use private.step": len(trainer.strategy.optimizers) != 1,
        "several processes; this version trains on one device": trainer.world_size > 1,
        "the strategy {strategy}; use one device (strategy='auto')": (
            type(trainer.strategy).__name__ != "SingleDeviceStrategy"
        ),
        "a compiled module, whose passes cannot be heard; fit the module itself": bool(
            getattr(module, "_compiler_ctx", None)
        ),
        "gradient_clip_val, which clips the batch; clip_norm clips each example": bool(
            trainer.gradient_clip_val
        ),
        "plans that sample: they need private.sampler; use private.step": (
            plan.participation.is_sampled
        ),
        "ckpt_path; a private run goes on from its run folder": bool(trainer.ckpt_path),
    }
    for reason, applies in reasons.items():
        if applies:
            named = reason.format(strategy=type(trainer.strategy).__name__)
            raise Unsupported(f"PrivateCallback does not take {named}")
