"""The German drama for its benchmarks: a compact file of roles, and a population that drifts.

    python benchmarks/drama_data.py gerdracor_roles.jsonl.gz gerdracor_roles.npz

writes the roles as symbols, an npz of a few megabytes that `load` reads like the text.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from noshuffle.datasets.text import GERMAN, Symbols, read_roles
from noshuffle.errors import InvalidInput, whole
from noshuffle.federated.cohort import UserId
from noshuffle.federated.tasks import FederatedTask, german_drama, roles_task


def load(path: str | Path, *, length: int = 80, most_windows: int = 16) -> FederatedTask:
    """`german_drama` from the roles as text (.jsonl.gz) or compact (.npz)."""
    if not str(path).endswith(".npz"):
        return german_drama(length=length, most_windows=most_windows, file=path)
    roles = _compact_roles(path, longest=most_windows * (length + 1))
    return roles_task("gerdracor", roles, GERMAN, length, most_windows, 2)


def _compact_roles(path: str | Path, *, longest: int) -> Iterator[tuple[str, int, Symbols]]:
    with np.load(path) as file:
        if str(file["alphabet"]) != GERMAN or int(file["longest"]) < longest:
            raise InvalidInput(
                f"{path} was written for another alphabet, or cut to {int(file['longest'])} "
                f"characters where {longest} are wanted; write it again"
            )
        symbols, starts = file["symbols"], file["starts"]
        for i, (user, year) in enumerate(zip(file["users"].tolist(), file["years"].tolist())):
            yield user, year, symbols[starts[i] : starts[i + 1]][:longest].astype(np.int64)


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


if __name__ == "__main__":
    compact(sys.argv[1], sys.argv[2])
