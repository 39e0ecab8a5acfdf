"""TrainingRun: what a run in private training tells of itself, what is saved of it, how it ends.

    steps_released, epsilon, statement()   what left by the door, and what that costs
    state_dict, save, resume               everything but the keys: model, optimizer, noise, rng
    close                                  the evidence is brought up to date; a finished run sealed

The steps themselves are in `private.Private`. State: model, optimizer and noise by `Parts`; the
index of the next step, attached objects, the rng state that an epoch began with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from noshuffle.clipping.check import original
from noshuffle.errors import InvalidInput, NoshuffleError
from noshuffle.one_owner import OneOwner, in_turn
from noshuffle.plan import Plan
from noshuffle.release.ledger import Ledger
from noshuffle.release.sampler import Sampler
from noshuffle.statement import PrivacyStatement
from noshuffle.training.outcome import Outcome, Unread
from noshuffle.training.rng import restore_rng, rng_state
from noshuffle.training.step_parts import Parts, load_optimizer


class TrainingRun(OneOwner):
    """A run that a model is trained in."""

    def __init__(self, model: nn.Module, plan: Plan, parts: Parts) -> None:
        self.model, self.plan, self.run = model, plan, parts.release.folder
        self._parts, self._index = parts, 0
        self._outcome: Outcome | Unread | None = None
        self._attached: dict[str, Any] = {}
        self._epoch_rng: tuple[int, dict[str, Any]] | None = None
        self._is_closed = False
        self._statement: PrivacyStatement | None = None
        #: What `fit_model` read last.
        self.last_batches: Any = None

    @property
    def steps_done(self) -> int:
        """Index of the next step of this process (smaller than `steps_released` in a replay)."""
        return self._index

    @property
    def steps_released(self) -> int:
        """How many steps the ledger holds: what the statement covers."""
        return self._parts.ledger.released

    @property
    def outcome(self) -> Outcome | None:
        """What the last step saw; raw data."""
        if isinstance(self._outcome, Unread):
            self._outcome = self._outcome.read()
        return self._outcome

    @property
    def ledger(self) -> Ledger:
        """The evidence."""
        return self._parts.ledger

    @in_turn
    def skip(self) -> None:
        """Pass over the next step, which was released before and cannot be repeated.

        Its noise is drawn and thrown away, nothing is updated, its charge stays. For steps after
        the last checkpoint whose data are gone, or whose sums do not come out the same again.
        """
        self._parts.release.skip()
        self._outcome = None
        self._index += 1

    def sampler(self, population: int | None = None) -> Sampler:
        """The secret sampler of a Poisson or fixed-size plan, from the current step on.

        It goes into a DataLoader as `batch_sampler`; pass its indices on as `ids`.
        """
        return self._parts.release.sampler(population)

    def statement(self) -> PrivacyStatement:
        """The guarantee of what was released so far, with all its assumptions."""
        return self._statement or self._parts.release.statement()

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

    def read_again(self) -> None:
        """A further pass over the same data begins.

        From here on batches without ids must be those of the first pass, whatever the plan allows:
        rows that are put together anew could not be followed, and would count as new ones.
        """
        self._parts.ledger.is_read_again = True

    def return_to_epoch(self, step: int) -> None:
        """A pass over the data begins, or goes on, that began at `step`.

        The random state that its loader starts from is kept with the run, and put back if it was
        saved: a loader that is iterated anew draws the same order and augmentations again.
        """
        if self._epoch_rng is not None and self._epoch_rng[0] == step:
            restore_rng(self._epoch_rng[1])
        else:
            self._epoch_rng = (self._index, rng_state())

    @in_turn
    def state_dict(self) -> dict[str, Any]:
        """The whole state but the keys."""
        return {
            **self._parts.release.state_dict(),
            "model": original(self.model).state_dict(),
            "optimizer": self._parts.optimizer.state_dict(),
            "attached": {name: item.state_dict() for name, item in self._attached.items()},
            "random": rng_state(),
            "epoch_random": None if self._epoch_rng is None else list(self._epoch_rng),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state` was taken; another plan, key or clipping is refused.

        Also sets the random states of torch, NumPy and Python, which loaders draw from.
        """
        try:
            self._load(state)
        except NoshuffleError:
            raise
        except (
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            ArithmeticError,
            RuntimeError,
        ) as error:
            why = str(error).partition("\n")[0]
            raise InvalidInput(
                f"this is not a state of such a run ({type(error).__name__}: {why}); load one that "
                "state_dict() gave before going on"
            ) from None

    def _load(self, state: dict[str, Any]) -> None:
        self._parts.release.check_state(state)
        if set(state["attached"]) != set(self._attached):
            raise InvalidInput(
                f"this state was saved with attached objects {sorted(state['attached'])}, the run "
                f"has {sorted(self._attached)}; attach the same ones"
            )
        original(self.model).load_state_dict(state["model"])
        load_optimizer(self._parts.optimizer, state["optimizer"])
        self._parts.release.load_state_dict(state)
        for name, item in self._attached.items():
            item.load_state_dict(state["attached"][name])
        if state["random"] is not None:  # a seal removes those of a sampled run
            restore_rng(state["random"])
        began = state.get("epoch_random")
        self._epoch_rng = None if began is None else (int(began[0]), began[1])
        self._index = int(state["step"])

    def save(self) -> Path:
        """Write a checkpoint and the statement into the run folder."""
        self._parts.check_open()
        return self._parts.release.save(self.state_dict())

    def resume(self) -> int:
        """Load the newest checkpoint, if there is one; returns the next step's index."""
        state = self._parts.release.saved()
        if state is not None:
            self.load_state_dict(state)
        self._parts.release.need_folder().forget_metrics_after(self._index)
        return self._index

    def close(self, *, keep_keys: bool = False) -> None:
        """Bring the evidence up to date and let go of it. A finished run is sealed.

        Sealing destroys the keys: nobody can take the noise off the model any more, and nothing
        that a finished run needs is lost. `keep_keys` leaves them in the folder.
        """
        if not self._is_closed:
            self._parts.release.settle_budget()
            self._statement = self.statement()
            self._parts.release.close_run(keep_keys=keep_keys)
            self._end()

    def _end(self) -> None:
        self._parts.is_over = self._is_closed = True

    def write_statement(self) -> None:
        """Bring statement.json up to date with the ledger, if there is a run folder."""
        self._parts.release.write_statement()
