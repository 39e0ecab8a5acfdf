"""Federated data: real people, or roles, each with a few examples of their own.

    shakespeare     next character, 1,350 speaking roles of 37 plays
    german_drama    next character, 11,200 speaking roles of 774 plays in order of year (1510-1947)
    mnist_writers   digits of 539 writers
    digits          479 made-up users of three digits each, from inside scikit-learn: no download

The rows of a user lie together: user i owns starts[i] … starts[i + 1] − 1. Every tenth user is held
out whole for testing (MNIST has test writers of its own). Alphabets are fixed beforehand and not
read off the data; other characters share one symbol. A text is cut into windows of `length` + 1
characters, at most `most_windows` of a user; the end of the last one has no targets. `compact`
writes the roles of a file as symbols (an npz of a few megabytes), which the same functions read.

>>> encode("Äa\\n", alphabet=GERMAN).tolist() == [GERMAN.index(c) for c in "Äa\\n"]
True
>>> x, y = windows(np.arange(5), length=3, most=9, filler=7)
>>> x.tolist(), y.tolist()
([[0, 1, 2], [4, 7, 7]], [[1, 2, 3], [-100, -100, -100]])
"""

from __future__ import annotations

import gzip
import json
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noshuffle.datasets.images import digits as central_digits
from noshuffle.datasets.store import local
from noshuffle.errors import DataUnavailable, InvalidInput, one_of, whole
from noshuffle.federated.clients import NO_TARGET

if TYPE_CHECKING:
    from noshuffle.federated.cohort import UserId

Symbols = NDArray[np.int64]
Batch = tuple[Tensor, Tensor]

#: Printable ASCII and the line break.
ENGLISH = "\n" + "".join(chr(code) for code in range(32, 127))
#: The same with umlauts, sharp and long s, the accents of loan words, and German quotation marks.
GERMAN = ENGLISH + "ÄÖÜäöüßẞſůàáâæçèéêëíîïñóôœúûÀÉ–—’‘‚“”„«»‹›…§"


@dataclass(frozen=True, eq=False)
class FederatedTask:
    """Examples by user. Symbols and pixels may lie in a narrow type, which `batch` widens; what is
    floating point reaches the model as it is.
    """

    name: str
    kind: str  # "text" or "image"
    users: tuple[UserId, ...]
    starts: NDArray[np.int64]
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    years: NDArray[np.int64] | None = None
    _place: dict[UserId, int] = field(init=False, repr=False)
    _has_labels: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.starts) != len(self.users) + 1 or self.starts[-1] != len(self.x):
            raise InvalidInput(f"{self.name}: starts must give each user's first row, and the end")
        object.__setattr__(self, "_place", {user: i for i, user in enumerate(self.users)})
        is_whole = not self.y.is_floating_point() or (
            self.classes > 1 and bool((self.y == self.y.round()).all())
        )
        object.__setattr__(self, "_has_labels", is_whole)

    def __len__(self) -> int:
        return len(self.users)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one example."""
        return tuple(self.x.shape[1:])

    def place(self, user: UserId) -> int:
        """The number of a user."""
        if user not in self._place:
            raise InvalidInput(f"{self.name} has no user {user!r}")
        return self._place[user]

    def client(self, user: UserId) -> Batch:
        """All examples of a user, in their natural order."""
        i = self.place(user)
        return self.widen(*(part[self.starts[i] : self.starts[i + 1]] for part in (self.x, self.y)))

    def batch(self, rows: Tensor) -> Batch:
        """Examples by row number, in the shape of `rows`."""
        return self.widen(self.x[rows], self.y[rows])

    def widen(self, x: Tensor, y: Tensor) -> Batch:
        """What a model takes: symbols and labels as integers, pixels 0 … 255 scaled to [−1, 1].

        Features in floating point keep their values and their type, and so do targets, unless they
        are whole numbers that stand for classes.
        """
        if not x.is_floating_point():
            x = x.to(torch.float32) / 127.5 - 1 if self.kind == "image" else x.to(torch.int64)
        return x, y.to(torch.int64) if self._has_labels else y


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


def windows(symbols: Symbols, *, length: int, most: int, filler: int) -> tuple[Symbols, Symbols]:
    """Inputs and next characters, row by row; the rest of the last row has no targets."""
    rows = min(-(-len(symbols) // (length + 1)), most)
    room = np.full(rows * (length + 1), -1, dtype=np.int64)
    used = symbols[: len(room)]
    room[: len(used)] = used
    cut = room.reshape(rows, length + 1)
    x, y = cut[:, :-1], cut[:, 1:]
    return np.where(x < 0, filler, x), np.where(y < 0, NO_TARGET, y)


def shakespeare(
    *,
    length: int = 80,
    most_windows: int = 16,
    min_chars: int = 2,
    file: str | Path | None = None,
) -> FederatedTask:
    """Shakespeare's roles; one with fewer than `min_chars` characters is left out."""
    path = file or _file("shakespeare_roles.jsonl.gz")
    return _roles("shakespeare", path, ENGLISH, length, most_windows, min_chars)


def german_drama(
    *,
    length: int = 80,
    most_windows: int = 16,
    min_chars: int = 2,
    file: str | Path | None = None,
) -> FederatedTask:
    """German roles in order of year: streamed in that order, a population that drifts.

    `file` is the roles as text (.jsonl.gz) or compact (.npz); by default what $NOSHUFFLE_DATA has.
    """
    path = file or _file("gerdracor_roles.jsonl.gz")
    return _roles("gerdracor", path, GERMAN, length, most_windows, min_chars)


def read_roles(
    path: str | Path, *, alphabet: str, longest: int
) -> Iterator[tuple[str, int, Symbols]]:
    """User, year (0 if unknown) and the first `longest` symbols of every role of a file."""
    if str(path).endswith(".npz"):
        with np.load(path) as file:
            if str(file["alphabet"]) != alphabet or int(file["longest"]) < longest:
                raise InvalidInput(
                    f"{path} was written for another alphabet, or cut to {int(file['longest'])} "
                    f"characters where {longest} are wanted; write it again"
                )
            symbols, starts = file["symbols"], file["starts"]
            for i, (user, year) in enumerate(zip(file["users"].tolist(), file["years"].tolist())):
                own = symbols[starts[i] : starts[i + 1]][:longest]
                yield user, year, own.astype(np.int64)
        return
    with gzip.open(path, "rt", encoding="utf8") as lines:
        for line in lines:
            role = json.loads(line)
            text = "\n".join(role["speeches"])[: longest + 1]
            yield role["user"], int(role.get("year", 0)), encode(text, alphabet=alphabet)[:longest]


def compact(
    source: str | Path, target: str | Path, *, alphabet: str = GERMAN, longest: int = 16 * 81
) -> None:
    """Write the roles of a file as symbols, each cut to `longest` characters."""
    if len(alphabet) > 255:
        raise InvalidInput(f"compact roles take at most 255 symbols, got {len(alphabet) + 1}")
    users, years, symbols = zip(*read_roles(source, alphabet=alphabet, longest=longest))
    np.savez_compressed(
        target,
        users=np.array(users),
        years=np.array(years, dtype=np.int16),
        starts=np.cumsum([0, *(len(own) for own in symbols)]),
        symbols=np.concatenate(symbols).astype(np.uint8),
        alphabet=np.array(alphabet),
        longest=np.array(longest),
    )


def drifting(
    task: FederatedTask, *, rounds: int, present: int, seed: int = 0
) -> Callable[[int], list[UserId]]:
    """Check-ins of a population that drifts: only `present` users are there in a round.

    They are neighbours in the task's order (the year of a drama); the first ones are there in round
    0, the last ones in the last round, and they come in an order of its own every round.
    """
    whole(rounds=rounds)
    whole(at_most=len(task), present=present)

    def order(step: int) -> list[UserId]:
        at = (len(task) - present) * min(step, rounds - 1) // max(1, rounds - 1)
        places = at + np.random.default_rng((seed, step)).permutation(present)
        return [task.users[i] for i in places]

    return order


def _roles(
    name: str,
    path: str | Path,
    alphabet: str,
    length: int,
    most_windows: int,
    min_chars: int,
) -> FederatedTask:
    whole(length=length, most_windows=most_windows)
    whole(at_least=2, min_chars=min_chars)
    users: list[UserId] = []
    years: list[int] = []
    kept: list[tuple[Symbols, Symbols]] = []
    held: list[tuple[Symbols, Symbols]] = []
    longest = most_windows * (length + 1)
    roles = read_roles(path, alphabet=alphabet, longest=longest)
    for number, (user, year, symbols) in enumerate(roles):
        if len(symbols) < min_chars:
            continue
        cut = windows(symbols, length=length, most=most_windows, filler=len(alphabet))
        if number % 10 == 9:
            held.append(cut)
            continue
        kept.append(cut)
        users.append(user)
        years.append(year)
    x, y, x_test, y_test = (
        torch.from_numpy(np.concatenate([cut[i] for cut in part]).astype(np.int16))
        for part in (kept, held)
        for i in (0, 1)
    )
    starts = np.cumsum([0, *(len(cut[0]) for cut in kept)])
    when = np.array(years) if any(years) else None
    classes = len(alphabet) + 1
    return FederatedTask(
        name, "text", tuple(users), starts, x, y, x_test, y_test, classes, years=when
    )


def mnist_writers() -> FederatedTask:
    """MNIST by the person who wrote the digits."""
    with np.load(_file("mnist.npz")) as file:
        if "writer_train" not in file:
            raise DataUnavailable(
                "this mnist.npz does not say who wrote what; it needs writer_train, one number for "
                "each row of x_train (see docs/federated.md)"
            )
        writers = file["writer_train"].astype(np.int64)
        order = np.argsort(writers, kind="stable")
        arrays = [file["x_train"][order], file["y_train"][order], file["x_test"], file["y_test"]]
    x, y, x_test, y_test = (torch.from_numpy(array) for array in arrays)
    users, first = np.unique(writers[order], return_index=True)
    starts = np.append(first, len(writers)).astype(np.int64)
    return FederatedTask(
        "mnist_writers",
        "image",
        tuple(users.tolist()),
        starts,
        x.unsqueeze(1),
        y,
        x_test.unsqueeze(1),
        y_test,
        10,
    )


def digits(*, rows: int = 3) -> FederatedTask:
    """Scikit-learn's digits, `rows` neighbouring ones a user; the last 360 are held out.

    The file does not say who wrote what, so these users are made up: for trying things out.
    """
    whole(at_most=1437, rows=rows)
    found = central_digits()
    users = len(found) // rows
    x, x_test = (
        ((part + 1) * 127.5).round().to(torch.uint8) for part in (found.x_train, found.x_test)
    )
    return FederatedTask(
        "digits",
        "image",
        tuple(range(users)),
        np.arange(users + 1, dtype=np.int64) * rows,
        x[: users * rows],
        found.y_train[: users * rows],
        x_test,
        found.y_test,
        10,
    )


def _file(name: str) -> str:
    path = local(name)
    if path is None:
        raise DataUnavailable(
            f"{name} is not in $NOSHUFFLE_DATA; set NOSHUFFLE_DATA to the folder that holds it"
        )
    return str(path)


TASKS: dict[str, Callable[[], FederatedTask]] = {
    "shakespeare": shakespeare,
    "german_drama": german_drama,
    "mnist_writers": mnist_writers,
    "digits": digits,
}


def load_task(name: str) -> FederatedTask:
    """A federated task by name."""
    one_of(tuple(TASKS), task=name)
    return TASKS[name]()
