"""What ends a command from outside: ctrl-C, SIGTERM (a scheduler), SIGHUP (a closed terminal).

Each is one line and the status that shells give it, 128 + number: 130, 143, 129. A long job stops
after the step it is in, with everything saved (`StopRequest`); whatever else runs stops at once.
A process that was started to outlive its terminal (nohup) does.

>>> status_of(KeyboardInterrupt()), status_of(Interrupted(signal.SIGTERM))
(130, 143)
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, NoReturn, Self


class Interrupted(KeyboardInterrupt):
    """Stopped by the signal of this number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


def status_of(error: BaseException | None) -> int:
    """The exit status of a command that was stopped so; ctrl-C if nothing else is known."""
    return 128 + int(getattr(error, "number", signal.SIGINT))


def stop_at_once() -> None:
    """From now on SIGTERM and SIGHUP raise as ctrl-C does; for a process that is the command's."""
    for number in _taken((signal.SIGTERM, signal.SIGHUP)):
        signal.signal(number, _interrupt)


class StopRequest:
    """Whether somebody asked to stop. In its context the first signal asks, a second one raises.

    So does the first while `is_idle`: nothing is under way that would have to be finished.
    """

    def __init__(self, is_idle: Callable[[], bool] = lambda: False) -> None:
        self.is_idle = is_idle
        self.number: int | None = None
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self.number is not None

    def __enter__(self) -> Self:
        try:
            for number in _taken((signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
                self._before[number] = signal.signal(number, self._handle)
        except ValueError:  # not in the main thread: whoever runs us handles signals
            pass
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, old in self._before.items():
            signal.signal(number, old)

    @property
    def status(self) -> int:
        """The exit status of a command that stopped because it was asked to."""
        return 128 + (signal.SIGINT if self.number is None else self.number)

    def _handle(self, number: int, frame: Any) -> None:
        if self.number is not None or self.is_idle():
            self.number = number
            _interrupt(number, frame)
        self.number = number
        _leave_dead_terminals(number)


def _taken(numbers: Iterable[int]) -> list[int]:
    """The signals that are handled: all but a SIGHUP that whoever started the process ignores."""
    return [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


def _interrupt(number: int, frame: Any) -> NoReturn:
    _leave_dead_terminals(number)
    raise Interrupted(number)


def _leave_dead_terminals(number: int) -> None:
    """Once a terminal is closed, every word for it would be an error in the middle of the work."""
    for stream in (1, 2) if number == signal.SIGHUP else ():
        try:
            os.write(stream, b"")  # nothing; an error where nobody could read it
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)
