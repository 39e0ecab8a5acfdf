"""Mechanisms as the command line names them: those of the library, and a module's own.

The list is the library's; its names stand here for the help alone, which does not wait for SciPy
(tests/cli/test_help.py compares). `module:name` imports the module, which registers
its mechanism, and stands for that name from then on.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from noshuffle.errors import InvalidInput

#: Where the help lists all mechanisms; filled in when somebody reads it.
PLACEHOLDER = "{mechanisms}"
HELP = f"{PLACEHOLDER}; or module:name of your own"


_NAMES = (
    "identity", "tree", "sqrt", "bsr", "bisr", "banded", "banded_inverse", "blt", "blt_tapped",
    "blt_gains", "blt_two_sided", "dense",
)  # fmt: skip


def mechanism_names() -> tuple[str, ...]:
    """All names that can be asked for, those that a module has registered included."""
    registry = sys.modules.get("noshuffle.strategies.mechanisms")
    return _NAMES if registry is None else tuple(registry.MECHANISMS)


def mechanism_named(text: str) -> str:
    """The name of a mechanism; that of a module is imported first, from the current folder too."""
    module, _, name = text.rpartition(":")
    if not module:
        return text
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise InvalidInput(f"mechanism {text!r} could not be imported: {error}") from None
    return name


def check_options(mechanism: str, given: dict[str, Any]) -> None:
    """Refuse options that this mechanism does not have; `given` holds those that were typed."""
    from noshuffle.strategies.mechanisms import MECHANISMS

    own = MECHANISMS.get(mechanism)
    for name, value in given.items():
        if value and own is not None and name not in own.options:
            takers = [other.name for other in MECHANISMS.values() if name in other.options]
            raise InvalidInput(f"{name} belongs to {', '.join(takers)}; got {mechanism}")
