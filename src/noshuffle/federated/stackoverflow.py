"""StackOverflow by user, from the published files of TensorFlow Federated: next-word prediction.

    stackoverflow.sqlite                  examples(split_name, client_id, serialized_example_proto)
    stackoverflow_{train,test}.h5         examples/CLIENT/tokens, one sentence a row (needs h5py)
    stackoverflow.word_count              "word count" a line, the most frequent first

in $NOSHUFFLE_DATA, unpacked; none of them is downloaded. 342,477 users train, those of the split
`test` judge. A sentence of at most `length` words becomes

    x = begin w₁ … wₙ        y = w₁ … wₙ end        filled up with symbol 0, which has no target

with the 10,000 most frequent words as symbols 1 … 10,000, then begin, end and unknown (Kairouz et
al. 2021, section 5.3; Reddi et al. 2020, arXiv 2003.00295). Accuracy counts known words only: in
the test part, end and unknown words are no targets. A record of SQLite is a tf.train.Example, of
which `feature_bytes` reads what is needed: fields 1 (features) → 1 (entry) → 1 name, 2 value → 1
(list of bytes) → 1.

>>> feature_bytes(bytes.fromhex("0a0e0a0c0a017412070a050a03612062"), "t")
b'a b'
"""

from __future__ import annotations

import importlib
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from noshuffle.datasets.store import local, needed
from noshuffle.errors import DataUnavailable, InvalidInput, whole
from noshuffle.federated.clients import NO_TARGET
from noshuffle.federated.tasks import FederatedTask

WORDS = 10_000
#: A user and the sentences of that user, as text.
UserText = tuple[str, list[str]]


def stackoverflow(
    *,
    length: int = 20,
    most_sentences: int = 256,
    words: int = WORDS,
    most_users: int | None = None,
    most_test_users: int | None = 10_000,
) -> FederatedTask:
    """The task from whichever of the files is there; `most_…` keep the first ones."""
    whole(length=length, most_sentences=most_sentences, words=words)
    symbols = vocabulary(needed("stackoverflow.word_count"), words=words)
    code = _Coder(symbols, length=length)
    found: dict[str, list[Any]] = {}
    for split, most in (("train", most_users), ("test", most_test_users)):
        everybody = _read(split, most_sentences=most_sentences)
        found[split] = [(user, code(said)) for user, said in islice(everybody, most) if said]
        if not found[split]:
            raise DataUnavailable(f"the StackOverflow files hold no user of the split {split!r}")
    users = tuple(user for user, _ in found["train"])
    starts = np.cumsum([0, *(len(rows) for _, rows in found["train"])])
    train, test = (np.concatenate([rows for _, rows in found[s]]) for s in ("train", "test"))
    x, y = _pairs(train)
    x_test, y_test = _pairs(test)
    y_test = torch.where(y_test > words, NO_TARGET, y_test)
    return FederatedTask("stackoverflow", "text", users, starts, x, y, x_test, y_test, words + 4)


def vocabulary(path: Path, *, words: int) -> dict[str, int]:
    """The most frequent words and their symbols 1, 2, …, from the published counts."""
    with path.open(encoding="utf8") as lines:
        found = [line.split()[0] for line in islice(lines, words) if line.strip()]
    if len(set(found)) != words:
        raise InvalidInput(f"{path} must list {words:,} different words, got {len(set(found)):,}")
    return {word: number for number, word in enumerate(found, 1)}


class _Coder:
    """Sentences → rows of symbols, one longer than the windows that a model sees."""

    def __init__(self, symbols: Mapping[str, int], *, length: int) -> None:
        self._symbols, self._length = symbols, length
        self._begin, self._end, self._unknown = (len(symbols) + i for i in (1, 2, 3))

    def __call__(self, sentences: Iterable[str]) -> np.ndarray[Any, np.dtype[np.int16]]:
        rows = []
        for sentence in sentences:
            found = [self._symbols.get(w, self._unknown) for w in sentence.split()]
            row = [self._begin, *found[: self._length], self._end][: self._length + 1]
            rows.append(row + [0] * (self._length + 1 - len(row)))
        return np.array(rows, dtype=np.int16)


def _pairs(rows: np.ndarray[Any, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())
    return x, torch.where(y == 0, NO_TARGET, y)


def _read(split: str, *, most_sentences: int) -> Iterator[UserText]:
    database = local("stackoverflow.sqlite")
    if database is not None:
        return read_sqlite(database, split, most_sentences=most_sentences)
    archive = local(f"stackoverflow_{split}.h5")
    if archive is None:
        raise DataUnavailable(
            f"neither stackoverflow.sqlite nor stackoverflow_{split}.h5 is in $NOSHUFFLE_DATA; "
            "unpack the published files there, or use the task drama or shakespeare"
        )
    return _read_archive(archive, most_sentences=most_sentences)


def read_sqlite(path: Path, split: str, *, most_sentences: int) -> Iterator[UserText]:
    """Users of a split in order of their id, with their first sentences."""
    base = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    try:
        ids = "SELECT client_id FROM client_metadata WHERE split_name = ? ORDER BY client_id"
        said = (
            "SELECT serialized_example_proto FROM examples WHERE split_name = ? AND client_id = ? "
            "ORDER BY rowid LIMIT ?"
        )
        for (user,) in base.execute(ids, (split,)).fetchall():
            rows = base.execute(said, (split, user, most_sentences))
            yield user, [feature_bytes(row, "tokens").decode("utf8", "replace") for (row,) in rows]
    except sqlite3.Error as error:
        raise InvalidInput(f"{path} is not the published SQLite file: {error}") from None
    finally:
        base.close()


def _read_archive(path: Path, *, most_sentences: int) -> Iterator[UserText]:
    try:
        h5py = importlib.import_module("h5py")
    except ImportError:
        raise DataUnavailable(
            f"{path.name} needs h5py, which is not installed: pip install h5py, or use "
            "stackoverflow.sqlite"
        ) from None
    with h5py.File(path, "r") as file:
        yield from read_groups(file, most_sentences=most_sentences)


def read_groups(file: Mapping[str, Any], *, most_sentences: int) -> Iterator[UserText]:
    """Users of the HDF5 form: file["examples"][user]["tokens"] holds bytes, a sentence each."""
    if "examples" not in file:
        raise InvalidInput(
            "an HDF5 file of StackOverflow has a group called examples; this has not"
        )
    for user, group in file["examples"].items():
        said = group["tokens"][:most_sentences]
        yield user, [one.decode("utf8", "replace") if isinstance(one, bytes) else str(one)
                     for one in said]  # fmt: skip


def feature_bytes(record: bytes, name: str) -> bytes:
    """The first value of a feature of bytes in a serialized tf.train.Example."""
    try:
        for features in _fields(record, 1):
            for entry in _fields(features, 1):
                if next(_fields(entry, 1)) == name.encode():
                    return next(_fields(next(_fields(next(_fields(entry, 2)), 1)), 1))
    except (IndexError, StopIteration):
        raise InvalidInput(f"not a tf.train.Example with bytes called {name!r}") from None
    raise InvalidInput(f"the example has no feature {name!r}")


def _fields(message: bytes, number: int) -> Iterator[bytes]:
    """The length-delimited fields of that number in a protocol-buffer message."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 2:
            size, at = _varint(message, at)
            if at + size > len(message):
                raise IndexError
            if tag >> 3 == number:
                yield message[at : at + size]
            at += size
        elif kind == 0:
            _, at = _varint(message, at)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise IndexError


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
