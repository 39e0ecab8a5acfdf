"""Refusals in the words of the command line.

The library speaks of Python arguments; a person who typed options reads options:

>>> in_options("say so: moved=True; noise_multiplier must be > 0", ["moved", "noise_multiplier"])
'say so: --moved; --noise-multiplier must be > 0'
>>> in_options("epochs must be a whole number; use accountant='rdp'", ["epochs", "accountant"])
'--epochs must be a whole number; use --accountant rdp'
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable


def in_options(message: str, names: Iterable[str]) -> str:
    """The message with the arguments that are options of the command written as such."""
    for name in sorted(names, key=len, reverse=True):
        flag = "--" + name.replace("_", "-")
        here = rf"(?<![-\w.]){re.escape(name)}"
        message = re.sub(rf"{here}=True\b", flag, message)
        message = re.sub(rf"{here}=(['\"]?)([-\w.:]+)\1", rf"{flag} \2", message)
        message = re.sub(rf"{here}=(?![\w'\"])", flag, message)
        if "_" in name:  # no English word: it can only mean the argument
            message = re.sub(rf"{here}(?![-\w.])", flag, message)
        else:
            message = re.sub(rf"^{name}(?= must | needs | belongs )", flag, message)
    return message


def refuse(message: str, *, status: int = 2) -> int:
    """One line on the error stream; returns the exit status."""
    print(f"noshuffle: {' '.join(message.split())}", file=sys.stderr)
    return status
