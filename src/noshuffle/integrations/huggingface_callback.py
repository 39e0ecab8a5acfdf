"""The callback form of `PrivateTrainer`, for Trainers that cannot be exchanged for it.

    trainer = SomeTrainer(model, args, train_dataset=data,
                          callbacks=[PrivateTrainerCallback(plan, clip_norm=1.0, batch_size=32)])

The Trainer's own loop runs, and is heard (`training.unchanged`): its backward passes give nothing
but the batches; the optimizer's step asks the model for its `.loss` by row, which leaves
`num_items_in_batch` and the division for accumulation out. This costs a second pass. A callback
cannot choose the order of the data, or take raw losses out of logs that were written before it was
asked, so `train_sampling_strategy="sequential"` and `report_to=[]` are wanted. State: the run.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from noshuffle.errors import InvalidInput
from noshuffle.integrations.huggingface import output_loss
from noshuffle.integrations.huggingface_checks import refuse_mixed_rows, refuse_options
from noshuffle.integrations.huggingface_padding import refuse_padding
from noshuffle.plan import Plan
from noshuffle.release.folder import RunFolder
from noshuffle.statement import PrivacyStatement
from noshuffle.training import Private, privatize
from noshuffle.training.batches import refuse_passes, repeats_rows
from noshuffle.training.check import order_of

RAW = ("loss", "train_loss", "grad_norm", "total_flos")
_TrainerCallback: Any = transformers.TrainerCallback


class PrivateTrainerCallback(_TrainerCallback):  # type: ignore[misc]
    """Makes every optimizer step of a Trainer private.

    Arguments:
        plan: every privacy decision; `participation_of(args, dataset)` says what it is fitted for.
        clip_norm: bound on one example's contribution.
        batch_size: examples of one optimizer step, accumulated batches together.
        run: the run folder, saved whenever the Trainer saves; to go on, let the Trainer resume from
            its checkpoint of the same step.
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
        self.plan, self._passes = plan, 0
        self._options = {"batch_size": batch_size, "clip_norm": clip_norm, "run": run, **privacy}

    def statement(self) -> PrivacyStatement:
        """The guarantee of what was released so far, with all its assumptions."""
        return self.private.statement()

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Put the optimizer into a private run, and go on where the run was."""
        self._refuse(args, state, given["train_dataloader"])
        half = partial(torch.autocast, args.device.type, torch.bfloat16)
        autocast = half if args.bf16 else nullcontext
        refuse_padding(given["model"], output_loss, given["train_dataloader"], autocast=autocast)
        wrapper = given["optimizer"]
        self.private = privatize(given["model"], wrapper.optimizer, self.plan, **self._options)
        wrapper.optimizer = self.private.optimizer
        if self.private.run is not None:
            self.private.attach(schedule=given["lr_scheduler"])
            self.private.resume()
        if self.private.steps_done != state.global_step:
            raise InvalidInput(
                f"the run folder is at step {self.private.steps_done}, the Trainer at "
                f"{state.global_step}; give resume_from_checkpoint= the checkpoint of that step"
            )

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self._passes or (state.epoch or 0.0) >= 1.0:
            self.private.read_again()
        self._passes += 1

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.private.run is not None:
            self.private.save()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        """Nothing raw stays in the log."""
        for record in (logs or {}, *state.log_history[-1:]):
            for name in RAW:
                record.pop(name, None)

    def _refuse(self, args: Any, state: Any, loader: Any) -> None:
        if hasattr(self, "private"):
            raise InvalidInput(
                f"this callback has released {self.private.steps_released} steps of another "
                "train(), which a new run would not count; make a new Trainer and a new callback, "
                "with the same run= to go on, or one budget= for both"
            )
        reasons = {
            "an order other than that of the data: give train_sampling_strategy='sequential'": (
                args.train_sampling_strategy != "sequential"
            ),
            "report_to: reporters see raw losses first; give report_to=[]": bool(args.report_to),
            "several processes or devices; this version trains on one device": (
                args.world_size > 1 or args.n_gpu > 1
            ),
            "label_smoothing_factor, a mean over the batch; use PrivateTrainer with loss_fn=": (
                args.label_smoothing_factor > 0
            ),
            "plans that sample, or protect users; use PrivateTrainer or private.step": (
                self.plan.participation.is_sampled or self.plan.unit != "example"
            ),
        }
        refuse_options("PrivateTrainerCallback", args, reasons)
        order = order_of(self.plan, loader)
        if order.verdict == "refused":
            raise InvalidInput(f"{order.found}: {order.advice}")
        refuse_mixed_rows(loader, has_units=False)
        if state.max_steps > self.plan.steps:
            raise InvalidInput(
                f"the Trainer makes {state.max_steps} steps, the plan has {self.plan.steps}; fit "
                "it for participation_of(args, dataset)"
            )
        if repeats_rows(loader) and self._options.get("on_violation") != "drop":
            length = -(-len(loader) // args.gradient_accumulation_steps)
            advice = "fit it for participation_of(args, dataset)"
            refuse_passes(self.plan, steps=state.max_steps, per_pass=length, advice=advice)
