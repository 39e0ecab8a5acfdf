"""TrainingRun: what a run in private training tells of itself, what is saved of it, how it ends.

    steps_released, epsilon, statement()   what left, and what that costs
    save, resume                           model, optimizer, noise, random states (`saving`)
    skip, pass_over                        steps that are given up
    close                                  the evidence is brought up to date; a finished run ends

The steps themselves are in `private.Private`. State: model, optimizer and noise by `Parts`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from noshuffle.errors import one_of
from noshuffle.one_owner import OneOwner, in_turn
from noshuffle.plan import Plan, PrivacyStatement
from noshuffle.release.sampler import Sampler
from noshuffle.training.outcome import Outcome, Unread
from noshuffle.training.rng import restore_rng, rng_state
from noshuffle.training.saving import RunState, Saver
from noshuffle.training.step_parts import Parts


class TrainingRun(OneOwner):
    """A run that a model is trained in; one in a folder saves itself (`saving`)."""

    def __init__(
        self, model: nn.Module, plan: Plan, parts: Parts, *, save_every: float | None = None
    ) -> None:
        self.model, self.plan, self.run = model, plan, parts.release.folder
        self._parts = parts
        self._outcome: Outcome | Unread | None = None
        self._kept: RunState | Saver = RunState(model, parts)
        self._attached = self._kept.attached
        if self.run is not None:
            self._kept = self._turn = Saver(self._kept, self, every=save_every)

    @property
    def steps_released(self) -> int:
        """How many steps the log holds, which the statement covers: the number of the next one."""
        return self._parts.release.step

    @property
    def outcome(self) -> Outcome | None:
        """What the last step saw; raw data."""
        if isinstance(self._outcome, Unread):
            self._outcome = self._outcome.read()
        return self._outcome

    @in_turn
    def skip(self) -> int:
        """Pass over the next step, whose number is returned.

        Its noise is drawn and thrown away, nothing is updated, and it is charged.
        """
        self._outcome = None
        return self._parts.release.pass_over()

    @in_turn
    def pass_over(self, *, to: str = "epoch") -> int:
        """Pass over the steps up to the next border of an epoch; returns how many these were.

        For a run whose order of the data is lost: it goes on with whole epochs.
        """
        one_of(("epoch",), to=to)
        self._outcome = None
        return self._parts.release.pass_over_epoch()

    def sampler(self, population: int | None = None) -> Sampler:
        """The secret sampler of a Poisson or fixed-size plan, from the current step on.

        It goes into a DataLoader as `batch_sampler`; pass its indices on as `ids`.
        """
        return self._parts.release.sampler(population)

    def statement(self) -> PrivacyStatement:
        """The guarantee of what was released so far, with all its assumptions."""
        return self._parts.release.statement()

    @property
    def epsilon(self) -> float:
        """ε so far; `statement()` says what it means."""
        return self.epsilon_after(self.steps_released)

    def epsilon_after(self, steps: int) -> float:
        """ε of the first `steps` steps of this run, and of the runs it was forked from."""
        return self._parts.release.epsilon_after(steps)

    def attach(self, **objects: Any) -> None:
        """Objects with `state_dict` (schedulers, averages) to be saved along, by name."""
        self._attached.update(objects)

    def return_to_epoch(self, step: int) -> None:
        """A pass over the data begins, or goes on, that began at `step`.

        The random state that its loader starts from is kept with the run, and put back if it was
        saved: a loader that is iterated anew draws the same order and augmentations again.
        """
        state = self._kept if isinstance(self._kept, RunState) else self._kept.state
        if state.epoch_rng is not None and state.epoch_rng[0] == step:
            restore_rng(state.epoch_rng[1])
        else:
            state.epoch_rng = (self.steps_released, rng_state())

    @in_turn
    def save(self) -> Path:
        """Write a checkpoint and the statement into the run folder."""
        return self._kept.save()

    @in_turn
    def save_whole(self) -> None:
        """Save the last whole step of a run in a folder, if it was not: a loop ends by an error."""
        if isinstance(self._kept, Saver):
            self._kept.save_whole()

    @in_turn
    def resume(self) -> int:
        """Load the newest checkpoint, if there is one; returns the next step, which is the log's.

        Steps behind the checkpoint have no sum any more: they are passed over, and stay charged.
        Also sets the random states of torch, NumPy and Python, which loaders draw from.
        """
        behind = self._kept.load()
        self._outcome = None
        self._parts.release.need_folder().forget_metrics_after(behind)
        return self.steps_released

    def close(self) -> None:
        """Save the last whole step, bring the evidence up to date, let go; a finished run ends.

        Its secret is destroyed then: nobody can take the noise off the model any more, and nothing
        that a finished run needs is lost.
        """
        if isinstance(self._kept, Saver):
            self._kept.save_whole()
            self._kept.end()
        self._parts.release.close_run()

    def write_statement(self) -> None:
        """Bring statement.json up to date with the log, if there is a run folder."""
        self._parts.release.write_statement()
