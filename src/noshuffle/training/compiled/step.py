"""The compiled private step: the same Algorithm 1 as `step`, on graphs that are replayed.

    host      admit ─ stage ─ start sum ─ start release ─ finish
    device                    sum ───────►  noise, update

The host waits for nothing of the step itself; the order is that of `Step`. A graph is captured
before the first batch of its kind is admitted: a failed capture is no failed step, and goes the
eager way. Smaller batches are padded with rows of weight zero; larger ones, or of another kind than
the few captured, go the eager way. State: programs by kind of batch, and the log `fallbacks`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noshuffle.clipping import ModelLoss
from noshuffle.clipping.objective import Criterion, batch_size
from noshuffle.plan import Plan
from noshuffle.release.units import Ids
from noshuffle.training.compiled.program import Program
from noshuffle.training.compiled.programs import Programs, flat, why_not
from noshuffle.training.compiled.release import CapturedRelease
from noshuffle.training.compiled.update import Update, update_for
from noshuffle.training.generators import seeded
from noshuffle.training.outcome import Outcome, Unread, mean_of_finite
from noshuffle.training.step import check_ready, named_units
from noshuffle.training.step_parts import Parts

#: Captures of the update after which an optimizer whose settings go on changing is left alone.
MOST_UPDATES = 4


def compiled_step(parts: Parts, plan: Plan, *, wanted: bool | str) -> tuple[Compiled | None, str]:
    """The compiled step of a run, or the reason why it has none."""
    reason = why_not(parts, wanted=wanted)
    if reason:
        return None, reason
    capacity = int(parts.planned_batch)
    if plan.participation.is_sampled:
        # Draws vary around the planned size; six standard deviations leave one in 10⁸ outside.
        most = plan.participation.largest_draw
        capacity = most or capacity + math.ceil(6.0 * math.sqrt(capacity))
    return Compiled(parts, capacity=capacity, fuse=wanted is True), ""


class Compiled(Programs):
    """Steps of one run as replays.

    Guarantees: those of `Step`; see the module for the order of work.
    """

    def __init__(
        self, parts: Parts, *, capacity: int, fuse: bool = False, captures: bool = True
    ) -> None:
        super().__init__(parts, capacity=capacity, captures=captures)
        self.why = f"compiled at the first step, for batches of up to {capacity}"
        self.fuse = fuse
        self._update: Update | None = None
        self._updates = 0

    def step(
        self, loss_fn: Criterion | ModelLoss, batch: tuple[Any, ...], ids: Any
    ) -> Pending | None:
        """One step, or None where it has to be an eager one."""
        parts, release = self.parts, self.parts.release
        check_ready(parts)
        if parts.streams is not None:
            parts.streams.follow(self.device, list)  # what it reads lies in buffers that stay
        leaves, spec = flat(batch)
        program, size = self.again(loss_fn, batch) or (None, _size(batch, leaves))
        own = named_units(parts, ids, size)
        if program is None:
            program = self.find(loss_fn, batch, leaves, spec, size=size)
        if program is None:
            return None
        assert program.ending is not None
        with self.at_home():
            self.make_ready(program.ending)
            ticket = release.admit(own, drop=parts.drop)
            keep = ticket.keep
            try:
                program.stage(leaves, size)
                program.weigh(size, keep)
                program.stage_units(size, keep, own)
                if program.is_random:
                    with seeded(release.seed(ticket.step), self.device):
                        program.sum()
                else:
                    program.sum()
                release.use(ticket)
                program.ending.release()
                release.finish(ticket)
            except BaseException:
                # The gradients that the last step gave out lie where the raw sum is now.
                program.forget()
                raise
        rows = slice(size) if keep is None else np.flatnonzero(keep)
        left_out = 0 if keep is None else size - int(keep.sum())
        return Pending(program, rows, left_out, program.units)

    def reset(self) -> None:
        """Forget everything that was captured."""
        super().reset()
        self._update = None

    def _build(
        self, loss_fn: Criterion | ModelLoss, batch: tuple[Any, ...], size: int
    ) -> Program | None:
        began = time.perf_counter()

        def finish(program: Program) -> None:
            program.find_draws()
            program.end_with(self.update)

        made = self.capture(loss_fn, batch, size, fuse=self.fuse, finish=finish)
        if made is None:
            return None
        program, name = made
        self.why = (
            f"compiled for up to {self.capacity} rows: sum by {name}, {self.update.name}; "
            f"made in {time.perf_counter() - began:.1f} s"
        )
        return program

    @property
    def update(self) -> Update:
        """The optimizer's update, one for all programs."""
        if self._update is None:
            self._update = update_for(self.parts.optimizer)
        return self._update

    def make_ready(self, ending: CapturedRelease) -> None:
        """Capture an update anew whose optimizer changed: its settings, or tensors in it."""
        if not ending.has_moved():
            return
        self._updates += 1
        update = update_for(self.parts.optimizer)
        if self._updates > MOST_UPDATES and update.is_captured:
            update = Update(self.parts.optimizer, name="settings that go on changing, not captured")
            self.say("the optimizer's settings go on changing: its update is not captured")
        with self.at_home():
            try:
                ending.capture(update)
            except Exception as error:
                line = " ".join(str(error).split())[:160]
                self.say(f"the update was not captured ({type(error).__name__}: {line})")
                update = Update(self.parts.optimizer, name="update not captured")
                ending.capture(update)
        self._update = update


@dataclass(frozen=True)
class Pending(Unread):
    """What a step saw, still on its way from the device; good until the next step."""

    program: Program
    rows: Ids | slice
    dropped: int
    units: Ids | slice

    def read(self) -> Outcome:
        """Wait for it."""
        report = self.program.report()
        losses = torch.from_numpy(report[0, self.rows].copy())
        norms, bad = torch.from_numpy(report[1:, self.units].copy())
        return Outcome(losses, norms, bad != 0, self.dropped)

    @property
    def loss(self) -> float:
        """Mean loss of the finite examples (NaN if there are none); waits for it."""
        return mean_of_finite(self.program.losses()[self.rows])


def _size(batch: tuple[Any, ...], leaves: Sequence[Any]) -> int:
    """Rows of a batch, one look at every tensor where they agree."""
    sizes = {leaf.shape[:1] for leaf in leaves if isinstance(leaf, Tensor)}
    return sizes.pop()[0] if len(sizes) == 1 and () not in sizes else batch_size(batch)
