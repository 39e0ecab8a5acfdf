"""Text: Shakespeare's plays by speaking role, as windows of characters to predict the next one.

A unit is a role. Every role gives windows of `length` + 1 characters in stage order; inputs are the
first `length`, targets the last `length`. Every tenth role is held out whole.
"""

from __future__ import annotations

import gzip
import json

import numpy as np
import torch

from noshuffle.datasets.record import DataSet
from noshuffle.datasets.store import needed

#: Fixed alphabet: printable ASCII and the line break; everything else is one common symbol.
ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))
UNKNOWN = len(ALPHABET)
_TABLE = np.full(256, UNKNOWN, dtype=np.int64)
_TABLE[np.frombuffer(ALPHABET.encode(), np.uint8)] = np.arange(len(ALPHABET))


def encode(text: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Characters as symbols 0 … UNKNOWN."""
    return _TABLE[np.frombuffer(text.encode("ascii", "replace"), np.uint8)]


def shakespeare(*, length: int = 80, most_windows: int = 16) -> DataSet:
    """Next-character prediction on 1,350 roles, at most `most_windows` windows of each."""
    windows: dict[bool, list[np.ndarray[tuple[int], np.dtype[np.int64]]]] = {True: [], False: []}
    units: list[int] = []
    with gzip.open(needed("shakespeare_roles.jsonl.gz"), "rt", encoding="utf8") as file:
        for unit, line in enumerate(file):
            symbols = encode("\n".join(json.loads(line)["speeches"]))
            held = unit % 10 == 9
            for i in range(min(len(symbols) // (length + 1), most_windows)):
                windows[held].append(symbols[i * (length + 1) : (i + 1) * (length + 1)])
                if not held:
                    units.append(unit)
    train = torch.from_numpy(np.stack(windows[False]))
    test = torch.from_numpy(np.stack(windows[True]))
    return DataSet(
        "shakespeare",
        "text",
        train[:, :-1],
        train[:, 1:],
        test[:, :-1],
        test[:, 1:],
        UNKNOWN + 1,
        units=torch.tensor(units),
    )
