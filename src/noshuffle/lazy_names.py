"""Names of a package that are imported when they are first asked for (PEP 562). No state.

`import noshuffle` takes milliseconds then, whatever lies behind its names.

>>> find, names = lazily("noshuffle", {"Plan": "plan", "rounding": ""})
>>> find("Plan").__module__, find("rounding").__name__, "Plan" in names()
('noshuffle.plan.plan', 'noshuffle.rounding', True)
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazily(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package, from the module below it that each name is in.

    No module means that the name is one itself.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = importlib.import_module(f"{package}.{homes[name] or name}")
        return getattr(found, name) if homes[name] else found

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return find, names
