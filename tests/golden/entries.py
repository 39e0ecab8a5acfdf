"""What a golden value is: a name, how it is computed, and how far it may be off.

A section is a module with `SECTION`, a mapping from names to entries. Its values lie beside it in
`SECTION.json`, by the same names. `compare` holds a fresh value against a stored one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
#: In the order in which they are written and tested.
SECTIONS = ("plans", "sums", "noise", "solvers", "tables", "runs", "commands")
#: Closed forms: what the last digits of a processor's and a library's functions may move.
CLOSED = 1e-9


@dataclass(frozen=True)
class Entry:
    """One golden value. Numbers agree within `rtol` of the stored one plus `atol`."""

    compute: Callable[[], Any]
    rtol: float = CLOSED
    atol: float = 1e-300
    #: Other tolerances for single keys.
    by_key: Mapping[str, float] | None = None


def section(name: str) -> dict[str, Entry]:
    """The entries of a section, by name."""
    entries: dict[str, Entry] = import_module(f"tests.golden.{name}").SECTION
    return entries


def stored(name: str) -> dict[str, Any]:
    """The values of a section as they were written; none before the first time."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text("utf8")) if path.exists() else {}


def plain(value: Any) -> Any:
    """As it comes back from JSON: infinities and NaN are words."""
    if isinstance(value, Mapping):
        return {str(key): plain(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [plain(own) for own in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    return float(value)


def differences(entry: Entry, got: Any, wanted: Any) -> list[str]:
    """Where a value is not the stored one."""
    return list(_differences(entry, plain(got), wanted, path=(), rtol=entry.rtol))


def _differences(
    entry: Entry, got: Any, wanted: Any, *, path: tuple[str, ...], rtol: float
) -> Iterator[str]:
    where = ".".join(path) or "value"
    if isinstance(wanted, dict) and isinstance(got, dict):
        if got.keys() != wanted.keys():
            yield f"{where} has the keys {sorted(got)}, stored are {sorted(wanted)}"
        for key in got.keys() & wanted.keys():
            own = (entry.by_key or {}).get(key, rtol)
            yield from _differences(entry, got[key], wanted[key], path=(*path, key), rtol=own)
    elif isinstance(wanted, list) and isinstance(got, list):
        if len(got) != len(wanted):
            yield f"{where} has {len(got)} items, stored are {len(wanted)}"
        for i, (one, other) in enumerate(zip(got, wanted)):
            yield from _differences(entry, one, other, path=(*path, str(i)), rtol=rtol)
    elif _is_number(wanted) and _is_number(got):
        if not abs(got - wanted) <= rtol * abs(wanted) + entry.atol:
            yield f"{where} is {got!r}, stored is {wanted!r}"
    elif got != wanted:
        yield f"{where} is {got!r}, stored is {wanted!r}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
