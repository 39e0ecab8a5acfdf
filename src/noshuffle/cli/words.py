"""Sentences of the command line: refusals in its words, and prose as wide as the terminal.

The library speaks of Python arguments; a person who typed options reads options:

>>> in_options("noise_multiplier must be > 0", {"noise_multiplier": "--noise-multiplier"})
'--noise-multiplier must be > 0'
>>> in_options("begin a new run (fork_of=), or private.skip()", {"fork_of": "--fork"})
'begin a new run (--fork)'
>>> in_options("epochs must be whole; use epochs=3", {"epochs": "--epochs"})
'--epochs must be whole; use --epochs 3'
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

#: Whether the command that runs was asked for JSON.
_AS_JSON: ContextVar[bool] = ContextVar("as_json", default=False)


@contextmanager
def answering(*, as_json: bool) -> Iterator[None]:
    """Refusals in here are JSON on standard output as well."""
    token = _AS_JSON.set(as_json)
    try:
        yield
    finally:
        _AS_JSON.reset(token)


def in_options(message: str, flags: Mapping[str, str]) -> str:
    """The message with the arguments that are options of the command (by name) written as such.

    What can be called in Python alone is left out where it is named as another way.
    """
    message = re.sub(r",? or private\.\w+\(\)", "", message)
    for name, flag in sorted(flags.items(), key=lambda one: len(one[0]), reverse=True):
        here = rf"(?<![-\w.]){re.escape(name)}"
        message = re.sub(rf"{here}=True\b", flag, message)
        message = re.sub(rf"{here}=(['\"]?)([-\w.:]+)\1", rf"{flag} \2", message)
        message = re.sub(rf"{here}=(?![\w'\"])", flag, message)
        if "_" in name:  # no English word: it can only mean the argument
            message = re.sub(rf"{here}(?![-\w.])", flag, message)
        else:
            message = re.sub(rf"^{name}(?= must | needs | belongs )", flag, message)
    return message


def shortened(names: Iterable[str], *, most: int = 20) -> str:
    """The names, the first of them where there are many: a refusal is one line.

    >>> shortened(["a", "b", "c"], most=2)
    'a, b, … (3)'
    """
    all_of = list(names)
    more = [] if len(all_of) <= most else [f"… ({len(all_of):,})"]
    return ", ".join(
        [*(textwrap.shorten(name, 40, placeholder="…") for name in all_of[:most]), *more]
    )


def refuse(message: str, *, status: int = 2) -> int:
    """One line on the error stream, and JSON if it was asked for; returns the exit status."""
    line = " ".join(message.split())
    print(f"noshuffle: {line}", file=sys.stderr)
    if _AS_JSON.get():
        print(json.dumps({"error": line, "status": status}, indent=2))
    return status


def quoted(path: object) -> str:
    """A file or folder as it can be typed in a shell.

    >>> quoted("runs/a"), quoted("runs/my run")
    ('runs/a', "'runs/my run'")
    """
    return shlex.quote(str(path))


def wrapped(text: str, width: int) -> str:
    """The text with every line cut between words where it is wider, and what follows moved in.

    >>> print(wrapped("noise: much\\n  - of it, every day", 14))
    noise: much
      - of it,
        every day
    """
    lines = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())] + "  "
        parts = textwrap.wrap(
            line.rstrip(), width, subsequent_indent=indent,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        lines += parts or [""]
    return "\n".join(lines)


def say(text: str) -> None:
    """Print prose, cut between words on a terminal; in a pipe a sentence stays one line."""
    is_terminal = sys.stdout.isatty()
    print(wrapped(text, shutil.get_terminal_size().columns) if is_terminal else text)
