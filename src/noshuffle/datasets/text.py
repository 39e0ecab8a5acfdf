"""Text by speaking role: alphabets, the file of roles, and windows of characters.

A file has one role a line, {"user": …, "year": …, "speeches": […]}, gzipped JSON. Alphabets are
fixed beforehand and not read off the data; other characters share one symbol.

>>> encode("Äa\\n", alphabet=GERMAN).tolist() == [GERMAN.index(c) for c in "Äa\\n"]
True
"""

from __future__ import annotations

import gzip
import json
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from noshuffle.datasets.record import DataSet
from noshuffle.datasets.store import needed

Symbols = NDArray[np.int64]

#: Printable ASCII and the line break.
ENGLISH = "\n" + "".join(chr(code) for code in range(32, 127))
#: The same with umlauts, sharp and long s, the accents of loan words, and German quotation marks.
GERMAN = ENGLISH + "ÄÖÜäöüßẞſůàáâæçèéêëíîïñóôœúûÀÉ–—’‘‚“”„«»‹›…§"


def encode(text: str, *, alphabet: str) -> Symbols:
    """Characters as symbols 0 … len(alphabet), the last for everything else."""
    composed = unicodedata.normalize("NFC", text)
    codes = np.frombuffer(composed.encode("utf-32-le", "replace"), "<u4")
    table = _table(alphabet)
    found: Symbols = np.take(table, np.minimum(codes, len(table) - 1))
    return found


@lru_cache
def _table(alphabet: str) -> Symbols:
    table = np.full(max(map(ord, alphabet)) + 2, len(alphabet), dtype=np.int64)
    table[[ord(c) for c in alphabet]] = np.arange(len(alphabet))
    return table


def read_roles(
    path: str | Path, *, alphabet: str, longest: int
) -> Iterator[tuple[str, int, Symbols]]:
    """User, year (0 if unknown) and the first `longest` symbols of every role of a file."""
    with gzip.open(path, "rt", encoding="utf8") as lines:
        for line in lines:
            role = json.loads(line)
            text = "\n".join(role["speeches"])[: longest + 1]
            yield role["user"], int(role.get("year", 0)), encode(text, alphabet=alphabet)[:longest]


def shakespeare(*, length: int = 80, most_windows: int = 16) -> DataSet:
    """Next-character prediction on 1,350 roles, at most `most_windows` windows of each.

    Windows of `length` + 1 characters in stage order; what is left at the end of a role is not
    used. A unit is a role; every tenth role is held out whole.
    """
    size = length + 1
    parts: dict[bool, list[Symbols]] = {True: [], False: []}
    units: list[int] = []
    path = needed("shakespeare_roles.jsonl.gz")
    roles = read_roles(path, alphabet=ENGLISH, longest=most_windows * size)
    for unit, (_, _, symbols) in enumerate(roles):
        windows = symbols[: len(symbols) // size * size].reshape(-1, size)
        is_held = unit % 10 == 9
        parts[is_held].append(windows)
        units += [] if is_held else [unit] * len(windows)
    train, test = (torch.from_numpy(np.concatenate(parts[is_held])) for is_held in (False, True))
    tensors = train[:, :-1], train[:, 1:], test[:, :-1], test[:, 1:]
    return DataSet(
        "shakespeare", "text", *tensors, len(ENGLISH) + 1, units=torch.tensor(units, device="cpu")
    )
