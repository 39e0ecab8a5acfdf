"""Compute the cells of a figure one by one: resumable, with the time left, within a limit.

    seconds left = Σ over cells to do of cost · (seconds of one unit of its kind, measured so far
                   on this machine)

With `within`, no cell is begun that would end after the limit by that measure (a kind that nothing
is known of is begun), so that a call ends cleanly and the next one goes on. State: the store.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from noshuffle.experiments.figure import Cell
from noshuffle.experiments.store import Store, machine

Say = Callable[[str], None]


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class HowFar:
    """How far a call came: cells that are done, in all, and why it stopped before the end."""

    done: int
    total: int
    stopped: str = ""

    @property
    def is_whole(self) -> bool:
        return self.done == self.total


def compute(
    cells: Sequence[Cell],
    store: Store,
    *,
    device: str = "cpu",
    within: float | None = None,
    say: Say | None = to_stderr,
    clock: Callable[[], float] = time.monotonic,
) -> HowFar:
    """Do what is not in the store yet, in order, and keep each result at once."""
    began = clock()
    say = say or (lambda line: None)
    speeds = _Speeds()
    for cell in cells:
        kept = store.record["cells"].get(cell.key)
        if kept is not None and kept.get("on") == machine(device):
            speeds.add(cell, kept["seconds"])
    todo = [cell for cell in cells if cell.key not in store.record["cells"]]
    stopped = ""
    for place, cell in enumerate(todo):
        missing = [key for key in cell.needs if key not in store.record["cells"]]
        if missing:
            say(f"{cell.key}: waits for {missing[0]}")
            continue
        left = None if within is None else within - (clock() - began)
        expected = speeds.seconds(cell)
        if left is not None and (left <= 0 or (expected or 0.0) > left):
            stopped = f"the limit of {within:g} s is reached; the same command goes on"
            break
        start = clock()
        result = cell.work(store.results)
        seconds = clock() - start
        store.put(cell.key, result, seconds=seconds, device=device)
        speeds.add(cell, seconds)
        rest = [speeds.seconds(other) for other in todo[place + 1 :]]
        unknown = "" if None not in rest else " and more"
        ahead = _words(sum(value for value in rest if value))
        count = sum(other.key in store.record["cells"] for other in cells)
        say(f"[{count}/{len(cells)}] {cell.key}: {seconds:.1f} s; left {ahead}{unknown}")
    done = sum(cell.key in store.record["cells"] for cell in cells)
    return HowFar(done, len(cells), stopped)


class _Speeds:
    """Seconds of one unit of each kind, from cells that are done."""

    def __init__(self) -> None:
        self._spent: dict[str, tuple[float, float]] = {}

    def add(self, cell: Cell, seconds: float) -> None:
        cost, spent = self._spent.get(cell.kind, (0.0, 0.0))
        self._spent[cell.kind] = cost + cell.cost, spent + seconds

    def seconds(self, cell: Cell) -> float | None:
        cost, spent = self._spent.get(cell.kind, (0.0, 0.0))
        return spent / cost * cell.cost if cost else None


def _words(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
