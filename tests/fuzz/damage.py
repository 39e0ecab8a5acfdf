"""Hands that damage documents and files at random, and how many times they were let at them.

`EXAMPLES` multiplies the inputs of every fuzz test: `NOSHUFFLE_FUZZ=100 pytest tests/fuzz` is a
long run, plain pytest a short one.
"""

from __future__ import annotations

import copy
import os
import random
from collections import Counter
from typing import Any

EXAMPLES = int(os.environ.get("NOSHUFFLE_FUZZ", "1"))
#: How many inputs each test has tried; printed at the end (conftest.py).
INPUTS: Counter[str] = Counter()

#: What a stranger writes where a value was expected.
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 10**9, 10**30, -(10**30), 0.5, -0.5, 1e-300, 1e308, "", "1",
    "nan", "Infinity", "x" * 300, "\x00", [], {}, [1], [[]], {"": 1}, [None], {"kind": "epochs"},
)  # fmt: skip


def counted() -> None:
    """One input more for the test that runs now."""
    where = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[2]
    INPUTS[where.partition("[")[0].partition(" ")[0]] += 1


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the values of a nested document are."""
    found = [at]
    if isinstance(value, dict):
        for key, own in value.items():
            found += paths(own, (*at, key))
    elif isinstance(value, list):
        for i, own in enumerate(value[:8]):
            found += paths(own, (*at, i))
    return found


def damaged(document: Any, chance: random.Random) -> Any:
    """The document with one or two values replaced, removed, doubled or moved."""
    counted()
    document = copy.deepcopy(document)
    for _ in range(chance.choice((1, 1, 1, 2))):
        places = [path for path in paths(document) if path]
        if not places:
            return chance.choice(ODD)
        *way, last = chance.choice(places)
        holder = document
        for key in way:
            holder = holder[key]
        act = chance.choice(("odd", "odd", "nudge", "drop", "add"))
        if act == "drop":
            del holder[last]
        elif act == "add" and isinstance(holder, dict):
            holder[chance.choice(("noise", "strategy", "steps", "x"))] = chance.choice(ODD)
        elif act == "nudge" and isinstance(holder[last], int | float):
            holder[last] = holder[last] * chance.choice((2, 0.5, -1, 1 + 1e-9)) + chance.choice(
                (0, 1)
            )
        else:
            holder[last] = copy.deepcopy(chance.choice(ODD))
    return document


def spoiled(data: bytes, chance: random.Random) -> bytes:
    """The bytes cut off, with a bit flipped, with a piece doubled, or with zeros in them."""
    counted()
    if not data:
        return b"\x00"
    at = chance.randrange(len(data))
    act = chance.choice(("flip", "flip", "cut", "zeros", "double", "insert"))
    if act == "flip":
        return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
    if act == "cut":
        return data[:at]
    if act == "zeros":
        return data[:at] + bytes(min(64, len(data) - at)) + data[at + 64 :]
    if act == "double":
        return data[:at] + data[max(0, at - 16) :]
    return data[:at] + chance.randbytes(3) + data[at:]


def check_one_line(error: Exception) -> None:
    """What a person is told fits on one line."""
    assert str(error)
    assert "\n" not in str(error)
