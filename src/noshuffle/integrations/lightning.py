"""Lightning's automatic optimisation with private steps: a callback, its criterion, its batches.

    private = PrivateCallback(plan, clip_norm=1.0, batch_size=250, run="runs/NAME")
    module = Module(criterion=private.criterion(nn.CrossEntropyLoss()))
    trainer = Trainer(max_epochs=2, callbacks=[private])
    trainer.fit(module, private.batches(loader))

`training_step` computes its loss by that criterion, `self.criterion(self.net(x), y)`; see
`training.criterion`. What it logs is raw, and its author's to keep. Rows are named by their place.

With a run folder the same script started again goes on by itself, at the next epoch: Lightning
reads one from its beginning, so the steps that are left of a broken one are passed over. Epochs of
the Trainer count from there; training stops with the plan. Checkpoints of Lightning name the run
and the step, and hold no noise and no secret. State: the run.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from noshuffle.clipping.objective import Criterion
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.plan import Plan
from noshuffle.plan.statement import PrivacyStatement
from noshuffle.release.folder import RunFolder
from noshuffle.training import Private, privatize
from noshuffle.training.batches import refuse_passes

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
        **privacy: Any,
    ) -> None:
        if not _FOUND:
            raise Unsupported("PrivateCallback needs Lightning: pip install 'noshuffle[lightning]'")
        self.plan = plan
        self.parts = 1  # batches of one step, as the Trainer accumulates them
        self._criteria: list[_LateCriterion] = []
        self._options = {"batch_size": batch_size, "clip_norm": clip_norm, "run": run, **privacy}

    def criterion(self, fn: Criterion) -> Criterion:
        """The loss function of `training_step`: `Private.criterion` while the Trainer fits."""
        self._criteria.append(_LateCriterion(fn))
        return self._criteria[-1]

    def batches(self, loader: Any) -> Any:
        """What `trainer.fit` reads: `Private.batches` of a DataLoader."""
        return _LateBatches(self, loader)

    def statement(self) -> PrivacyStatement:
        """The guarantee of what was released so far, with all its assumptions."""
        if not hasattr(self, "private"):
            raise InvalidInput("nothing was trained yet; the statement is there after trainer.fit")
        return self.private.statement()

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints of Lightning: which step of which run they are of."""
        if not hasattr(self, "private"):
            return {}
        run = self.private.run
        return {"step": self.private.steps_released, "run": None if run is None else str(run.path)}

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
        self.parts = trainer.accumulate_grad_batches
        trainer.strategy.optimizers = [self.private.optimizer]
        for criterion in self._criteria:
            criterion.begin(self.private)
        if self.private.run is not None:
            schedules = _Schedules(trainer, self.private)
            self.private.attach(fit=schedules)
            if self.private.resume():
                self.private.pass_over(to="epoch")
                schedules.catch_up()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Before the first step is charged: the batches, and how many there will be."""
        plan, loader = self.plan, trainer.train_dataloader
        if not isinstance(loader, _LateBatches) or loader.callback is not self:
            raise InvalidInput(
                "trainer.fit reads a loader whose rows nobody names; give it "
                "callback.batches(loader) of this PrivateCallback"
            )
        length, steps = -(-len(loader) // self.parts), trainer.estimated_stepping_batches
        self._stop_with_the_plan(trainer)
        if self.private.steps_released:
            return
        if steps > plan.steps:
            raise InvalidInput(
                f"trainer.fit makes {steps} steps, the plan has {plan.steps}; fit the plan again, "
                "or give max_epochs or max_steps"
            )
        if self._options.get("on_violation") != "drop":
            advice = f"fit it for Epochs(epochs={-(-steps // length)}, steps_per_epoch={length})"
            refuse_passes(plan, steps=int(steps), per_pass=length, advice=advice)

    def _stop_with_the_plan(self, trainer: Any) -> None:
        is_between_steps = self.private.optimizer.next_part()[1] == 0
        trainer.should_stop |= is_between_steps and self.private.steps_released >= self.plan.steps

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self.private.run is not None:
            self.private.save()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Nothing goes by what the step logged."""
        self._stop_with_the_plan(trainer)
        logged = {one.meta.name for one in trainer._results.values()}
        plateaus = [one for one in trainer.lr_scheduler_configs if one.reduce_on_plateau]
        for one in (*plateaus, *trainer.callbacks):
            name = getattr(one, "monitor", None) or ""
            if logged & {name, name.removesuffix("_epoch"), name.removesuffix("_step")}:
                raise InvalidInput(
                    f"monitor={name!r} is logged by training_step: raw data, and a schedule, a "
                    "stop or a choice of checkpoints by it is not covered; monitor validation data"
                )

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if hasattr(self, "private"):
            self.private.save_whole()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.private.run is not None:
            self.private.save()


class _LateCriterion:
    """The criterion of a run that begins later; until then, the function."""

    def __init__(self, fn: Criterion) -> None:
        self._plain, self._fn = fn, fn

    def begin(self, private: Private) -> None:
        """The run has begun."""
        self._fn = private.criterion(self._plain)

    def __call__(self, output: Any, *targets: Any, **ids: Any) -> Tensor:
        return self._fn(output, *targets, **ids)


class _LateBatches:
    """The batches of a run that begins later."""

    def __init__(self, callback: PrivateCallback, loader: Any) -> None:
        self.callback, self._loader = callback, loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.callback.private.batches(self._loader, parts=self.callback.parts))


class _Schedules:
    """The learning rates of `trainer.fit`; they do not keep the trainer alive."""

    def __init__(self, trainer: Any, private: Private) -> None:
        self._trainer, self._private = weakref.proxy(trainer), weakref.proxy(private)
        self._step = 0  # of the checkpoint

    def state_dict(self) -> dict[str, Any]:
        configs = self._trainer.lr_scheduler_configs
        schedules = [config.scheduler.state_dict() for config in configs]
        return {"schedules": schedules, "step": self._private.steps_released}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        configs, self._step = self._trainer.lr_scheduler_configs, state["step"]
        for config, saved in zip(configs, state["schedules"], strict=True):
            config.scheduler.load_state_dict(saved)

    def catch_up(self) -> None:
        """Learning rates move on by the steps that were passed over."""
        epoch: int = self._private.plan.participation.base.steps_per_epoch
        for config in self._trainer.lr_scheduler_configs:
            every = config.frequency * (1 if config.interval == "step" else epoch)
            missed = self._private.steps_released // every - self._step // every
            for _ in range(0 if config.reduce_on_plateau else missed):
                config.scheduler.step()


def trained_part(module: nn.Module) -> nn.Module:
    """The module whose passes are recorded: the one child that has all that is trained, or itself.

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
        "a compiled module, whose passes cannot be recorded; fit the module itself": bool(
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
