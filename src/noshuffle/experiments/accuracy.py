"""Accuracy over ε: tasks, lines and groups of a TOML file as cells, and their results as curves.

    TASK/LINE/search/i    accuracy on held-out training rows, per ε of `search` and learning rate;
                          of a group with an ε of its own, i counts from its place in the task's
    TASK/LINE/widen       the same one factor outwards, where an end of the grid had won (`/i`, too)
    TASK/LINE/final/t-i   test accuracy per ε and trial, at the chosen rate
    TASK/LINE/choice/t-i  the same on held-out training rows: what chooses among lines

No state.

>>> grid = {1.0: {0.1: 0.5, 0.2: 0.6}, 16.0: {0.4: 0.8, 0.8: 0.9}}
>>> [round(chosen_rate(grid, epsilon), 3) for epsilon in (1.0, 4.0, 16.0, 99.0)]
[0.2, 0.4, 0.8, 0.8]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from noshuffle.experiments.figure import Cell, Request, Results, deviation
from noshuffle.experiments.lines import Group, StudyLine, StudyTask, groups

Grid = Mapping[float, Mapping[float, float]]
#: ε, learning rate and trial.
Run = tuple[float, float, int]


def cells(asked: Request) -> list[Cell]:
    """Searches before the figures that need them, in the order of the groups."""
    out: dict[str, Cell] = {}
    for group in groups(asked.settings):
        trials = [t for t in group.trials if asked.trials is None or t < asked.trials]
        for line in group.lines:
            made = _LineCells(group.task, line, asked, group)
            searches = made.searches()
            needs = tuple(cell.key for cell in searches)
            for cell in (*searches, *made.finals(group.epsilons, trials, needs)):
                out.setdefault(cell.key, cell)
    return list(out.values())


@dataclass(frozen=True)
class _LineCells:
    """The cells of one line of a task."""

    task: StudyTask
    line: StudyLine
    asked: Request
    group: Group

    @property
    def search(self) -> tuple[float, ...]:
        return self.group.search

    @property
    def rates_line(self) -> StudyLine:
        """The line whose search says the rates."""
        return self.group.rates_of or self.line

    @property
    def head(self) -> str:
        return f"{self.task.name}/{self.line.name}"

    @property
    def first(self) -> int:
        """The number of the first cell of a kind: groups with an ε of their own keep apart."""
        return self.task.search.index(self.search[0]) if self.search else 0

    def searches(self) -> list[Cell]:
        """The cells that rates come from; of another line, which has its own, with its names."""
        task, line = self.task, self.rates_line
        if line != self.line:
            return replace(self, line=line, group=replace(self.group, rates_of=None)).searches()
        epsilons = task.search if line.fit else (0.0,)
        middles = task.middle if line.fit else (task.middle[-1],)
        factors = task.factors or self.asked.settings["factors"]
        runs = [
            (epsilon, _rounded(middle * line.shift * factor), 0)
            for epsilon, middle in zip(epsilons, middles)
            if not self.search or epsilon in self.search
            for factor in factors
        ]
        found = [
            self._cell(f"search/{place}", partial(self._train, part), 0.9 * len(part))
            for place, part in enumerate(_parts(runs, task.most), start=self.first)
        ]
        if len(factors) == 1:  # a rate that is given, not searched
            return found
        widen = partial(self._widen, factors[1] / factors[0])
        first = tuple(cell.key for cell in found)
        name = f"widen/{self.first}" if self.first else "widen"
        return [*found, self._cell(name, widen, 0.9 * len(runs) / len(factors), first)]

    def finals(
        self, epsilons: Sequence[float], trials: Sequence[int], needs: tuple[str, ...]
    ) -> list[Cell]:
        """What is trained at the chosen rates, by test rows or held-out ones."""
        runs = [(epsilon, 0.0, trial) for epsilon in epsilons for trial in trials]
        name, share = ("choice", 0.9) if self.group.by_held_out else ("final", 1.0)
        return [
            self._cell(
                f"{name}/{trials[0]}-{place}", partial(self._final, part), share * len(part), needs
            )
            for place, part in enumerate(_parts(runs, self.task.most), start=self.first)
        ]

    def _cell(
        self, key: str, work: Callable[[Results], Any], runs: float, needs: tuple[str, ...] = ()
    ) -> Cell:
        cost = runs * self.task.epochs * self.line.times * (1.3 if self.line.is_sampled else 1.0)
        kind = f"{self.task.data}/{self.task.model}"
        return Cell(f"{self.head}/{key}", work, cost=cost, kind=kind, needs=needs)

    def _train(self, runs: Sequence[Run], results: Results, *, is_search: bool = True) -> Any:
        from noshuffle.experiments.train_lines import train  # torch, and data

        return train(self.task, self.line, runs, self.asked, is_search=is_search)

    def _widen(self, step: float, results: Results) -> Any:
        outer = []
        for epsilon, tried in self._grid(results).items():
            if self.search and epsilon not in self.search:
                continue
            best = max(tried, key=lambda rate: tried[rate])
            if len(self.task.factors) == 2:  # one of two is always at an end
                continue
            if best == max(tried):
                outer.append((epsilon, _rounded(best * step), 0))
            elif best == min(tried):
                outer.append((epsilon, _rounded(best / step), 0))
        return self._train(outer, results) if outer else {"runs": []}

    def _grid(self, results: Results) -> Grid:
        return search_grid(results, self.task.name, self.rates_line.name)

    def _final(self, runs: Sequence[Run], results: Results) -> Any:
        grid, times = self._grid(results), self.group.rates_times
        chosen = [(e, _rounded(times * chosen_rate(grid, e)), trial) for e, _, trial in runs]
        return self._train(chosen, results, is_search=self.group.by_held_out)


def _parts(runs: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    """Parts of nearly one size, each of at most so many runs."""
    count = -(-len(runs) // most)
    for place in range(count):
        yield runs[len(runs) * place // count : len(runs) * (place + 1) // count]


def _rounded(rate: float) -> float:
    return float(f"{rate:.3g}")


def search_grid(results: Results, task: str, line: str) -> Grid:
    """Held-out accuracy by ε and learning rate, as far as it was searched."""
    found: dict[float, dict[float, float]] = {}
    for key in sorted(results):
        if key.startswith((f"{task}/{line}/search/", f"{task}/{line}/widen")):
            for run in results[key]["runs"]:
                found.setdefault(run["epsilon"], {})[run["learning_rate"]] = run["accuracy"]
    if not found:
        raise KeyError(f"{task}/{line}/search")
    return found


def chosen_rate(grid: Grid, epsilon: float) -> float:
    """The best rate at ε, linear in the logarithms between the ε that were searched."""
    known = sorted(grid)
    best = [max(grid[e], key=lambda rate: grid[e][rate]) for e in known]
    if len(known) == 1 or epsilon <= 0:
        return best[0]
    return float(np.exp(np.interp(math.log(epsilon), np.log(known), np.log(best))))


@dataclass(frozen=True)
class Point:
    """Mean and deviation of the trials at one ε."""

    epsilon: float
    values: tuple[float, ...]
    rate: float

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def deviation(self) -> float:
        return deviation(self.values)

    def __str__(self) -> str:
        more = f" ± {100 * self.deviation:.2f}" if len(self.values) > 1 else ""
        return f"{100 * self.mean:.2f}{more} ({self.rate:g})"


def curve(results: Results, task: str, line: str, *, of: str = "accuracy") -> dict[float, Point]:
    """Test accuracy by ε; a KeyError that names what is missing if there is none."""
    if found := _points(results, f"{task}/{line}/final/", of):
        return found
    raise KeyError(f"{task}/{line}")


def _choices(results: Results, task: str, line: str) -> dict[float, Point]:
    """Held-out accuracy by ε at the chosen rate, where several seeds were trained for it."""
    return _points(results, f"{task}/{line}/choice/", "accuracy")


def _points(results: Results, head: str, of: str) -> dict[float, Point]:
    found: dict[float, list[Mapping[str, Any]]] = {}
    for key in sorted(results):
        if key.startswith(head):
            for run in results[key]["runs"]:
                found.setdefault(run["epsilon"], []).append(run)
    return {
        epsilon: Point(epsilon, tuple(run[of] for run in runs), runs[0]["learning_rate"])
        for epsilon, runs in sorted(found.items())
    }


def best_held_out(
    results: Results, options: Iterable[tuple[str, str]]
) -> dict[float, tuple[str, str, Point]]:
    """By ε, the task and line that was best on held-out rows, and its test accuracy.

    By the mean of their `choice` where all of them have one, else by the best of their searches: a
    single seed, which cannot tell apart what is a deviation apart.
    """
    found: dict[float, dict[tuple[str, str], _Option]] = {}
    for task, line in options:
        if not any(key.startswith(f"{task}/{line}/final/") for key in results):
            continue
        grid, points = search_grid(results, task, line), curve(results, task, line)
        means = {e: point.mean for e, point in _choices(results, task, line).items()}
        for epsilon in (e for e in points if e in grid):
            one = _Option(max(grid[epsilon].values()), means.get(epsilon), points[epsilon])
            found.setdefault(epsilon, {})[task, line] = one
    return {
        epsilon: (*(best := _best(found[epsilon])), found[epsilon][best].point)
        for epsilon in sorted(found)
    }


@dataclass(frozen=True)
class _Option:
    """A line that may be chosen: held-out accuracy of its search and its choice, and in the end."""

    searched: float
    choice: float | None
    point: Point


def _best(options: Mapping[tuple[str, str], _Option]) -> tuple[str, str]:
    means = {key: one.choice for key, one in options.items() if one.choice is not None}
    scores = means if len(means) == len(options) else {k: o.searched for k, o in options.items()}
    return max(scores, key=lambda key: scores[key])
