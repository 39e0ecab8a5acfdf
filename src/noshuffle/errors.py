"""What can go wrong, as one tree, and the named checks that raise it.

    NoshuffleError
    ├── InvalidInput            a value that cannot mean anything (also a ValueError)
    ├── Unsupported             a sensible question to which no proved answer is built in
    ├── ParticipationViolation  a unit would take part more often, or sooner, than planned
    ├── HorizonExceeded         a step beyond the number of steps that was planned
    ├── ReplayRefused           a released step was to be repeated with other data
    ├── VerificationFailed      a run folder does not support its own statement
    └── DataUnavailable         a data set is neither here nor to be had

Every message is one line: what was expected, what came, what to do. The command line prints
it without a traceback and exits with status 2.

>>> positive(clip_norm=-1.0)
Traceback (most recent call last):
    ...
noshuffle.errors.InvalidInput: clip_norm must be a finite number > 0, got -1.0
"""

from __future__ import annotations

import math
import numbers

#: The largest horizon that closed forms here are trusted for; more is surely a typing mistake.
MAX_STEPS = 10**8


class NoshuffleError(Exception):
    """Root of every error that this library raises on purpose."""


class InvalidInput(NoshuffleError, ValueError):
    """A value that cannot mean anything."""


class Unsupported(NoshuffleError):
    """A sensible question to which no proved answer is built in."""


class ParticipationViolation(NoshuffleError):
    """A unit would take part more often, or sooner, than the plan allows."""


class HorizonExceeded(NoshuffleError):
    """A step beyond the number of steps that was planned."""


class ReplayRefused(NoshuffleError):
    """A released step was to be repeated with other data under the same noise."""


class VerificationFailed(NoshuffleError):
    """A run folder does not support its own statement."""


class DataUnavailable(NoshuffleError):
    """A data set is neither on this machine nor to be had."""


def _real(name: str, value: object, rule: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidInput(f"{name} must be {rule}, got {value!r}")
    return float(value)


def positive(**values: object) -> None:
    """Each value is a finite number above zero."""
    for name, value in values.items():
        rule = "a finite number > 0"
        if not 0 < _real(name, value, rule) < math.inf:
            raise InvalidInput(f"{name} must be {rule}, got {value!r}")


def non_negative(**values: object) -> None:
    """Each value is a finite number, zero allowed."""
    for name, value in values.items():
        rule = "a finite number >= 0"
        if not 0 <= _real(name, value, rule) < math.inf:
            raise InvalidInput(f"{name} must be {rule}, got {value!r}")


def open_unit(**values: object) -> None:
    """Each value lies strictly between 0 and 1 (a delta)."""
    for name, value in values.items():
        rule = "a number strictly between 0 and 1"
        if not 0 < _real(name, value, rule) < 1:
            raise InvalidInput(f"{name} must be {rule}, got {value!r}")


def unit_rate(**values: object) -> None:
    """Each value is a probability above zero (1 allowed)."""
    for name, value in values.items():
        rule = "a probability in (0, 1]"
        if not 0 < _real(name, value, rule) <= 1:
            raise InvalidInput(f"{name} must be {rule}, got {value!r}")


def whole(at_least: int = 1, at_most: int = MAX_STEPS, **values: object) -> None:
    """Each value is an integer within the limits; floats and booleans are refused."""
    for name, value in values.items():
        is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if not is_integer or not at_least <= int(value) <= at_most:  # type: ignore[call-overload]
            raise InvalidInput(
                f"{name} must be a whole number from {at_least} to {at_most:,}, got {value!r}"
            )


def one_of(choices: tuple[str, ...], **values: object) -> None:
    """Each value is one of the named choices."""
    for name, value in values.items():
        if value not in choices:
            raise InvalidInput(f"{name} must be one of {', '.join(choices)}; got {value!r}")
