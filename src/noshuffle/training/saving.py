"""What is saved of a run in training, and when a run in a folder saves itself.

    end of a step           `every` seconds after the last save, or if a signal came meanwhile
    SIGTERM, first Ctrl-C   saved as soon as no step is in the making; then the handler that was
                            there before has the signal. The second one is not held up
    close, end of process   in order, by an exception too, or if nobody holds the run any more

Saved is the last whole step. One that failed half-way has ended its run object: nothing is saved of
it. Forked processes save nothing. State: when a run was saved last and how long that took; of the
process, handlers of signals and the runs that they save.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

from noshuffle.clipping.check import original
from noshuffle.errors import InvalidInput, NoshuffleError, non_negative
from noshuffle.training.rng import restore_rng, rng_state
from noshuffle.training.step_parts import Parts, load_optimizer

#: Seconds between two saves, and how many times as long as a save takes.
LEAST, TIMES = 60.0, 20.0
_FAILED = LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError


class RunState:
    """Model, optimizer, attached objects and random states of a run."""

    def __init__(self, model: nn.Module, parts: Parts) -> None:
        self._model, self.parts = original(model), parts
        self.attached: dict[str, Any] = {}
        #: The random state that a pass over the data began with, and at which step.
        self.epoch_rng: tuple[int, dict[str, Any]] | None = None

    def save(self) -> Path:
        """Write a checkpoint and the statement into the run folder."""
        self.parts.release.check_open()
        began = self.epoch_rng
        public = {
            "model": self._model.state_dict(),
            "optimizer": self.parts.optimizer.state_dict(),
            "attached": {name: item.state_dict() for name, item in self.attached.items()},
        }
        secret = {"random": rng_state(), "epoch_random": None if began is None else list(began)}
        return self.parts.release.save(public, secret=secret)

    def load(self) -> int:
        """Load the newest checkpoint, if there is one; the number of steps behind it.

        A run whose state could not be loaded is over, as a part of it may have been.
        """
        state = self.parts.release.restore()
        if state is None:
            return 0
        try:
            self._load(state)
        except BaseException as error:
            self.parts.release.log.close()
            if isinstance(error, NoshuffleError) or not isinstance(error, _FAILED):
                raise
            why = " ".join(str(error).split())[:200]
            raise InvalidInput(
                f"the checkpoint is of another model or optimizer ({type(error).__name__}: {why}); "
                "build the run as it was"
            ) from None
        return int(state["step"])

    def _load(self, state: dict[str, Any]) -> None:
        if set(state["attached"]) != set(self.attached):
            raise InvalidInput(
                f"this run was saved with attached objects {sorted(state['attached'])} and has "
                f"{sorted(self.attached)} now; attach the same ones"
            )
        self._model.load_state_dict(state["model"])
        load_optimizer(self.parts.optimizer, state["optimizer"])
        for name, item in self.attached.items():
            item.load_state_dict(state["attached"][name])
        secret = state["secret"]
        if "random" in secret:
            restore_rng(secret["random"])
        began = secret.get("epoch_random")
        self.epoch_rng = None if began is None else (int(began[0]), began[1])


class Saver:
    """The lock of a run in a folder: whoever leaves it last has the run saved, where that is due.

    `every`: seconds; by default the longer of a minute and twenty times what the last save took.
    """

    def __init__(self, state: RunState, owner: object, *, every: float | None) -> None:
        if every is not None:
            non_negative(save_every=every)
        self.state, self._every = state, every
        self._release, self._owner = state.parts.release, os.getpid()
        self._lock, self.depth = threading.RLock(), 0
        self._saved, self._at, self._took = self._release.step, time.monotonic(), 0.0
        self._finalizer = weakref.finalize(owner, self._leave)
        _signals.join(self)

    def __enter__(self) -> None:
        self._lock.acquire()
        self.depth += 1

    def __exit__(self, kind: object, *rest: object) -> None:
        try:
            if self.depth == 1 and kind is None and self._release.step != self._saved:
                pause = max(LEAST, TIMES * self._took) if self._every is None else self._every
                if time.monotonic() - self._at >= pause:
                    self.save_whole()
        finally:
            self.depth -= 1
            self._lock.release()
            if _signals.asked:
                _signals.answer()

    def save(self) -> Path:
        """Save now."""
        began = time.monotonic()
        path = self.state.save()
        self._at = time.monotonic()
        self._saved, self._took = self._release.step, self._at - began
        return path

    def load(self) -> int:
        """Load what was saved last."""
        found = self.state.load()
        self._saved = self._release.step
        return found

    def save_whole(self) -> None:
        """Save the last whole step, if there is one that was not saved."""
        if os.getpid() != self._owner or self._release.log.is_closed:
            return
        try:
            self._release.check_ready()
        except NoshuffleError:
            return
        if self._release.step != self._saved:
            self.save()

    def end(self) -> None:
        """Save nothing from here on."""
        self._finalizer.detach()
        _signals.leave(self)

    def _leave(self) -> None:
        """Nobody holds the run any more, or the process ends."""
        _signals.leave(self)
        with suppress(ReferenceError):  # an attached object had gone before
            if self._release.need_folder().is_started:  # nobody removed it
                self.save_whole()


class _Signals:
    """The signals that ask a process to end, heard while it has runs to save."""

    def __init__(self) -> None:
        self.asked = 0
        self._is_passing = False
        self._runs: set[Saver] = set()
        self._before: dict[int, Any] = {}
        self._owner = os.getpid()

    def join(self, run: Saver) -> None:
        self._runs.add(run)
        if not _is_main_thread():
            return
        self._owner = os.getpid()
        for number in (signal.SIGTERM, signal.SIGINT):
            before = signal.getsignal(number)  # perhaps a newer one than ours
            if before not in (None, signal.SIG_IGN, self._hear):
                self._before[number] = before
                signal.signal(number, self._hear)

    def leave(self, run: Saver) -> None:
        self._runs.discard(run)
        if self._runs or not _is_main_thread() or os.getpid() != self._owner:
            return
        for number, before in list(self._before.items()):
            if signal.getsignal(number) == self._hear:  # or somebody else's handler calls ours
                signal.signal(number, before)
                del self._before[number]

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._is_passing:  # a newer handler calls ours, which it found before it
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self.asked or os.getpid() != self._owner:
            self._pass_on(number)
        else:
            self.asked = number
            self.answer()

    def answer(self) -> None:
        """Save every run and let the signal through; later, if one of them is in a step."""
        if any(run.depth for run in self._runs):
            return
        try:
            for run in list(self._runs):
                run.save_whole()
        finally:
            if _is_main_thread():
                self._pass_on(self.asked)
            else:
                os.kill(os.getpid(), self.asked)

    def _pass_on(self, number: int) -> None:
        """To whom it would have gone without us."""
        self.asked, before = 0, self._before[number]
        if callable(before):
            self._is_passing = True
            try:
                before(number, None)
            finally:
                self._is_passing = False
        else:
            signal.signal(number, before)
            os.kill(os.getpid(), number)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


_signals = _Signals()
