"""What can go wrong, as one tree, and the named checks that raise it.

    NoshuffleError
    ├── InvalidInput            a value that cannot mean anything (also a ValueError)
    ├── Unsupported             a sensible question to which no proved answer is built in
    ├── ParticipationViolation  a unit would take part more often, or sooner, than planned
    ├── HorizonExceeded         a step beyond the number of steps that was planned
    ├── ReuseRefused            noise was to be used a second time, or a run by two at once
    ├── BudgetExceeded          a run would cost more than is left for its data
    ├── VerificationFailed      a run folder does not support its own statement
    └── DataUnavailable         a data set is neither here nor to be had

    ProbablyNotMeant            a warning: something legal that hardly anybody wants

Every message is one line: what was expected, what came, what to do. The command line prints
it without a traceback and exits with status 2.

>>> positive(clip_norm=-1.0)
Traceback (most recent call last):
    ...
noshuffle.errors.InvalidInput: clip_norm must be a finite number > 0, got -1.0
"""

from __future__ import annotations

import importlib
import math
import numbers
import reprlib
from collections.abc import Callable
from typing import Any

#: The largest horizon that closed forms here are trusted for; more is surely a typing mistake.
MAX_STEPS = 10**8
#: The largest learning rate and clip norm: a sum of 10⁸ units that are clipped to it, and steps by
#: it, are float32 numbers yet.
MOST_FLOAT32 = 1e30


class NoshuffleError(Exception):
    """Root of every error that this library raises on purpose."""


class ProbablyNotMeant(UserWarning):
    """Something that is legal, and that hardly anybody wants."""


class InvalidInput(NoshuffleError, ValueError):
    """A value that cannot mean anything."""


class Unsupported(NoshuffleError):
    """A sensible question to which no proved answer is built in."""


class ParticipationViolation(NoshuffleError):
    """A unit would take part more often, or sooner, than the plan allows."""


class HorizonExceeded(NoshuffleError):
    """A step beyond the number of steps that was planned."""


class ReuseRefused(NoshuffleError):
    """The noise of a step was to be used a second time, or a run by two processes at once."""


class BudgetExceeded(NoshuffleError):
    """A run would cost more than is left for its data, or no cost of it is finite."""


class VerificationFailed(NoshuffleError):
    """A run folder does not support its own statement."""


class DataUnavailable(NoshuffleError):
    """A data set is neither on this machine nor to be had."""


def _number_check(rule: str, holds: Callable[[float], bool]) -> Callable[..., None]:
    """A check of named values: each is a number for which `holds`, or refused by the rule."""

    def check(**values: object) -> None:
        for name, value in values.items():
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            try:
                is_fine = is_number and holds(float(value))  # type: ignore[arg-type]
            except OverflowError:  # a whole number beyond all floats
                is_fine = False
            if not is_fine:
                raise InvalidInput(f"{name} must be {rule}, got {value!r}")

    return check


positive = _number_check("a finite number > 0", lambda x: 0 < x < math.inf)
non_negative = _number_check("a finite number >= 0", lambda x: 0 <= x < math.inf)
below_one = _number_check("a finite number in [0, 1)", lambda x: 0 <= x < 1)
open_unit = _number_check("a number strictly between 0 and 1", lambda x: 0 < x < 1)
unit_rate = _number_check("a probability in (0, 1]", lambda x: 0 < x <= 1)


def whole(at_least: int = 1, at_most: int = MAX_STEPS, **values: object) -> None:
    """Each value is an integer within the limits; floats and booleans are refused."""
    for name, value in values.items():
        is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if not is_integer or not at_least <= int(value) <= at_most:  # type: ignore[call-overload]
            raise InvalidInput(
                f"{name} must be a whole number from {at_least} to {at_most:,}, got {value!r}"
            )


def fits_float32(**values: float) -> None:
    """Each value is at most `MOST_FLOAT32`."""
    for name, value in values.items():
        if value > MOST_FLOAT32:
            raise InvalidInput(
                f"{name} must be at most {MOST_FLOAT32:g} (float32), got {float(value):g}"
            )


def instance_of(kind: type | tuple[type, ...], **values: object) -> None:
    """Each value is of this kind, or of one of these."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    for name, value in values.items():
        if not isinstance(value, kinds):
            rule = " or ".join(map(_own_name, kinds))
            came = f"the class {_own_name(value)}" if isinstance(value, type) else ""
            raise InvalidInput(f"{name} must be {rule}, got {came or _own_name(type(value))}")


def callables(**values: object) -> None:
    """Each value can be called."""
    for name, value in values.items():
        if not callable(value):
            raise InvalidInput(f"{name} must be a function, got {reprlib.repr(value)}")


def utf8(**values: object) -> None:
    """Each value can be written as UTF-8: a name from the disk or a shell may hold other bytes."""
    for name, value in values.items():
        try:
            str(value).encode()
        except UnicodeEncodeError:
            came = ascii(str(value))
            raise InvalidInput(f"{name} must be text in UTF-8, got {came}; rename it") from None


def imported(**values: str) -> Any:
    """The function that the one `module:function` which is given stands for."""
    ((what, text),) = values.items()
    module, _, name = text.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidInput(f"{what} {text!r} could not be imported: {error}") from None
    callables(**{f"{what} {text!r}": found})
    return found


def number_tuple(**values: object) -> tuple[float, ...]:
    """The one list that is given, as plain floats; whether they are finite is another question."""
    ((name, value),) = values.items()
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return tuple(float(one) for one in value)  # type: ignore[attr-defined]
    except (TypeError, ValueError, OverflowError):
        raise InvalidInput(f"{name} must be a list of numbers, got {reprlib.repr(value)}") from None


def record_list(width: int, **values: object) -> list[tuple[Any, ...]]:
    """The rows of the one table that is given; each has `width` values, whatever they are."""
    ((name, value),) = values.items()
    try:
        rows = [tuple(row) for row in value]  # type: ignore[attr-defined]
        if any(len(row) != width for row in rows):
            raise ValueError
    except (TypeError, ValueError):
        raise InvalidInput(
            f"{name} must be a list of records of {width} values, got {reprlib.repr(value)}"
        ) from None
    return rows


#: Kinds of the standard library, in words.
_WORDS = {
    "Iterable": "a list",
    "Mapping": "a mapping",
    "PathLike": "a path",
    "Real": "a number",
    "Sequence": "a list",
}


def _own_name(kind: type) -> str:
    home = kind.__module__.partition(".")[0]
    if home in ("collections", "numbers", "os"):
        return _WORDS.get(kind.__name__, kind.__name__)
    return kind.__name__ if home == "builtins" else f"{home}'s {kind.__name__}"


def one_of(choices: tuple[str, ...], **values: object) -> None:
    """Each value is one of the named choices."""
    for name, value in values.items():
        if not isinstance(value, str) or value not in choices:
            raise InvalidInput(f"{name} must be one of {', '.join(choices)}; got {value!r}")
