"""Federated data: real people, or roles, each with a few examples of their own.

    shakespeare     next character, 1,350 speaking roles of 37 plays
    german_drama    next character, 11,200 speaking roles of 774 plays in order of year (1510-1947)
    mnist_writers   digits of 539 writers
    digits          479 made-up users of three digits each, from inside scikit-learn: no download
    stackoverflow   next word, 342,477 users, from the published files (`stackoverflow`)
    module:function a function of your own that returns a FederatedTask

The rows of a user lie together: user i owns starts[i] … starts[i + 1] − 1. Every tenth user is held
out whole for testing (MNIST has test writers of its own). A text is cut into windows of `length` +
1 characters, at most `most_windows` of a user; the end of the last one has no targets.

>>> x, y = windows(np.arange(5), length=3, most=9, filler=7)
>>> x.tolist(), y.tolist()
([[0, 1, 2], [4, 7, 7]], [[1, 2, 3], [-100, -100, -100]])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noshuffle.datasets.images import digits as central_digits
from noshuffle.datasets.store import needed
from noshuffle.datasets.text import ENGLISH, GERMAN, Symbols, read_roles
from noshuffle.errors import DataUnavailable, InvalidInput, imported, one_of, whole
from noshuffle.federated.clients import NO_TARGET

if TYPE_CHECKING:
    from noshuffle.federated.cohort import UserId

Batch = tuple[Tensor, Tensor]


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

    def __post_init__(self) -> None:
        if len(self.starts) != len(self.users) + 1 or self.starts[-1] != len(self.x):
            raise InvalidInput(f"{self.name}: starts must give each user's first row, and the end")
        if self.starts[0] < 0 or (np.diff(self.starts) < 0).any():
            raise InvalidInput(
                f"{self.name}: starts must rise from 0 on, or rows would belong to several users"
            )
        if len(self._place) < len(self.users):
            twice = next(u for i, u in enumerate(self.users) if self._place[u] != i)
            raise InvalidInput(
                f"{self.name}: user {twice!r} is named twice; bring the rows of a user together"
            )

    def __len__(self) -> int:
        return len(self.users)

    @cached_property
    def _place(self) -> dict[UserId, int]:
        return {user: i for i, user in enumerate(self.users)}

    @property
    def has_labels(self) -> bool:
        """Whether targets stand for classes: by their type alone.

        Never by their values, or one user's (a NaN among whole numbers) would decide how everybody
        else's are learned.
        """
        return not self.y.is_floating_point()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape[1:])

    def place(self, user: UserId) -> int:
        if user not in self._place:
            raise InvalidInput(f"{self.name} has no user {user!r}")
        return self._place[user]

    def places(self, users: Iterable[UserId]) -> NDArray[np.int64]:
        """The places of many users, in this order."""
        listed = list(users)
        found = [*map(self._place.get, listed)]
        if None in found:
            self.place(listed[found.index(None)])  # says who is unknown
        return np.array(found, dtype=np.int64)

    def client(self, user: UserId) -> Batch:
        """All examples of a user, in their natural order."""
        i = self.place(user)
        return self.widen(*(part[self.starts[i] : self.starts[i + 1]] for part in (self.x, self.y)))

    def batch(self, rows: Tensor) -> Batch:
        """Examples by row number, in the shape of `rows`."""
        return self.widen(self.x[rows], self.y[rows])

    def widen(self, x: Tensor, y: Tensor) -> Batch:
        """What a model takes: symbols and labels as integers, pixels 0 … 255 scaled to [−1, 1].

        What is floating point keeps its values and its type, features and targets.
        """
        if not x.is_floating_point():
            x = x.to(torch.float32) / 127.5 - 1 if self.kind == "image" else x.to(torch.int64)
        return x, y.to(torch.int64) if self.has_labels else y


def windows(symbols: Symbols, *, length: int, most: int, filler: int) -> tuple[Symbols, Symbols]:
    """Inputs and next characters, row by row; the rest of the last row has no targets."""
    rows = min(-(-len(symbols) // (length + 1)), most)
    used = symbols[: rows * (length + 1)]
    padded = np.pad(used, (0, rows * (length + 1) - len(used)), constant_values=-1)
    cut = padded.reshape(rows, length + 1)
    x, y = cut[:, :-1], cut[:, 1:]
    return np.where(x < 0, filler, x), np.where(y < 0, NO_TARGET, y)


def shakespeare(
    *, length: int = 80, most_windows: int = 16, min_chars: int = 2, file: str | Path | None = None
) -> FederatedTask:
    """Shakespeare's roles; one with fewer than `min_chars` characters is left out.

    `file` holds the roles (see `datasets.text`), by default that of $NOSHUFFLE_DATA.
    """
    path = file or needed("shakespeare_roles.jsonl.gz")
    roles = read_roles(path, alphabet=ENGLISH, longest=most_windows * (length + 1))
    return roles_task("shakespeare", roles, ENGLISH, length, most_windows, min_chars)


def german_drama(
    *, length: int = 80, most_windows: int = 16, min_chars: int = 2, file: str | Path | None = None
) -> FederatedTask:
    """German roles in order of year: streamed in that order, a population that drifts."""
    path = file or needed("gerdracor_roles.jsonl.gz")
    roles = read_roles(path, alphabet=GERMAN, longest=most_windows * (length + 1))
    return roles_task("gerdracor", roles, GERMAN, length, most_windows, min_chars)


def roles_task(
    name: str,
    roles: Iterable[tuple[str, int, Symbols]],
    alphabet: str,
    length: int,
    most_windows: int,
    min_chars: int,
) -> FederatedTask:
    """A task from user, year (0 if unknown) and symbols of every role."""
    whole(length=length, most_windows=most_windows)
    whole(at_least=2, min_chars=min_chars)
    kept: list[tuple[str, int, Symbols, Symbols]] = []
    held: list[tuple[str, int, Symbols, Symbols]] = []
    for number, (user, year, symbols) in enumerate(roles):
        if len(symbols) >= min_chars:
            cut = windows(symbols, length=length, most=most_windows, filler=len(alphabet))
            (held if number % 10 == 9 else kept).append((user, year, *cut))
    x, y, x_test, y_test = (
        torch.from_numpy(np.concatenate(part).astype(np.int16))
        for roles_of in (kept, held)
        for part in list(zip(*roles_of))[2:]
    )
    users, years, rows, _ = zip(*kept)
    starts = np.cumsum([0, *map(len, rows)])
    when = np.array(years) if any(years) else None
    classes = len(alphabet) + 1
    return FederatedTask(name, "text", users, starts, x, y, x_test, y_test, classes, years=when)


def mnist_writers() -> FederatedTask:
    with np.load(needed("mnist.npz")) as file:
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
    images = x.unsqueeze(1), y, x_test.unsqueeze(1), y_test
    return FederatedTask("mnist_writers", "image", tuple(users.tolist()), starts, *images, 10)


def digits(*, rows: int = 3) -> FederatedTask:
    """Scikit-learn's digits, `rows` neighbouring ones a user; the last 360 are held out.

    The file does not say who wrote what, so these users are made up: for trying things out.
    """
    whole(at_most=1437, rows=rows)
    found = central_digits()
    users = tuple(range(len(found) // rows))
    used = len(users) * rows
    x, x_test = (
        ((part + 1) * 127.5).round().to(torch.uint8) for part in (found.x_train, found.x_test)
    )
    images = x[:used], found.y_train[:used], x_test, found.y_test
    starts = np.arange(0, used + 1, rows, dtype=np.int64)
    return FederatedTask("digits", "image", users, starts, *images, 10)


def without_validation(task: FederatedTask, *, every: int = 9) -> FederatedTask:
    """All training users but every ninth, whose rows stand for the test: for choosing rates."""
    whole(at_least=2, at_most=len(task), every=every)
    is_held = np.arange(len(task)) % every == every - 1
    counts = np.diff(task.starts)
    rows = torch.from_numpy(np.repeat(is_held, counts))
    kept = [user for user, held in zip(task.users, is_held) if not held]
    return FederatedTask(
        f"{task.name}, validation",
        task.kind,
        tuple(kept),
        np.cumsum([0, *counts[~is_held]]),
        task.x[~rows],
        task.y[~rows],
        task.x[rows],
        task.y[rows],
        task.classes,
        years=None if task.years is None else task.years[~is_held],
    )


TASKS: dict[str, Callable[[], FederatedTask]] = {
    "shakespeare": shakespeare,
    "german_drama": german_drama,
    "mnist_writers": mnist_writers,
    "digits": digits,
    "stackoverflow": lambda: _own("noshuffle.federated.stackoverflow:stackoverflow"),
}


def load_task(name: str) -> FederatedTask:
    """A task by name, or your own by `module:function`."""
    if isinstance(name, str) and ":" in name:
        return _own(name)
    one_of(tuple(TASKS), task=name)
    return TASKS[name]()


def _own(name: str) -> FederatedTask:
    task = imported(task=name)()
    if not isinstance(task, FederatedTask):
        raise InvalidInput(
            f"{name} must return a noshuffle.federated.tasks.FederatedTask, got "
            f"{type(task).__name__}"
        )
    return task
