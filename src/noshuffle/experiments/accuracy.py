"""Accuracy over ε: tasks, lines and groups of a TOML file as cells, and their results as curves.

    TASK/LINE/search/i    accuracy on held-out training rows, per ε of `search` and learning rate
    TASK/LINE/widen       the same one factor outwards, where an end of the grid had won
    TASK/LINE/final/t-i   test accuracy per ε and trial, at the chosen rate

`python -m noshuffle.experiments.accuracy FIGURE …` fits what these cells need into the file that
ships. No state.

>>> grid = {1.0: {0.1: 0.5, 0.2: 0.6}, 16.0: {0.4: 0.8, 0.8: 0.9}}
>>> [round(chosen_rate(grid, epsilon), 3) for epsilon in (1.0, 4.0, 16.0, 99.0)]
[0.2, 0.4, 0.8, 0.8]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from noshuffle.experiments import fitted
from noshuffle.experiments.figure import Cell, Request, Results, shipped
from noshuffle.experiments.lines import Group, StudyLine, StudyTask, groups

Grid = Mapping[float, Mapping[float, float]]


def cells(asked: Request) -> list[Cell]:
    """Searches before the figures that need them, in the order of the groups."""
    out: dict[str, Cell] = {}
    for group in groups(asked.settings):
        for line in group.lines:
            searches = _search_cells(group.task, line, asked)
            trials = group.trials
            if asked.trials is not None:
                trials = tuple(t for t in trials if t < asked.trials)
            finals = _final_cells(group, line, trials, asked, tuple(c.key for c in searches))
            for cell in (*searches, *finals):
                out.setdefault(cell.key, cell)
    return list(out.values())


def _search_cells(task: StudyTask, line: StudyLine, asked: Request) -> list[Cell]:
    epsilons = task.search if line.fit else (0.0,)
    middles = task.middle if line.fit else (task.middle[-1],)
    factors = task.factors or asked.settings["factors"]
    runs = [
        (epsilon, _rounded(middle * line.shift * factor), 0)
        for epsilon, middle in zip(epsilons, middles)
        for factor in factors
    ]
    found = []
    for place, part in enumerate(_parts(runs, task.most)):
        key = f"{task.name}/{line.name}/search/{place}"
        found.append(_cell(key, task, line, asked, part, is_search=True))
    step = factors[1] / factors[0]

    def widen(results: Results) -> Any:
        outer = []
        for epsilon, tried in search_grid(results, task.name, line.name).items():
            best = max(tried, key=lambda rate: tried[rate])
            if len(task.factors) == 2:  # one of two is always at an end
                continue
            if best == max(tried):
                outer.append((epsilon, _rounded(best * step), 0))
            elif best == min(tried):
                outer.append((epsilon, _rounded(best / step), 0))
        if not outer:
            return {"runs": []}
        return _work(task, line, asked, outer, results, is_search=True)

    first = tuple(cell.key for cell in found)
    cost = sum(cell.cost for cell in found) / len(factors)
    last = Cell(f"{task.name}/{line.name}/widen", widen, cost=cost, kind=_kind(task), needs=first)
    return [*found, last]


def _final_cells(
    group: Group,
    line: StudyLine,
    trials: tuple[int, ...],
    asked: Request,
    needs: tuple[str, ...],
) -> list[Cell]:
    if not trials:
        return []
    task, found = group.task, []
    runs = [(epsilon, 0.0, trial) for epsilon in group.epsilons for trial in trials]
    for place, part in enumerate(_parts(runs, task.most)):
        key = f"{task.name}/{line.name}/final/{trials[0]}-{place}"
        found.append(_cell(key, task, line, asked, part, is_search=False, needs=needs))
    return found


def _cell(
    key: str,
    task: StudyTask,
    line: StudyLine,
    asked: Request,
    runs: Sequence[tuple[float, float, int]],
    *,
    is_search: bool,
    needs: tuple[str, ...] = (),
) -> Cell:
    def work(results: Results) -> Any:
        return _work(task, line, asked, runs, results, is_search=is_search)

    cost = len(runs) * task.epochs * line.times * (0.9 if is_search else 1.0)
    cost *= 1.3 if line.is_sampled else 1.0
    return Cell(key, work, cost=cost, kind=_kind(task), needs=needs)


def _kind(task: StudyTask) -> str:
    return f"{task.data}/{task.model}"


def _work(
    task: StudyTask,
    line: StudyLine,
    asked: Request,
    runs: Sequence[tuple[float, float, int]],
    results: Results,
    *,
    is_search: bool,
) -> Any:
    from noshuffle.experiments.train_lines import train  # torch, and data

    if not is_search:
        grid = search_grid(results, task.name, line.name)
        runs = [(e, _rounded(chosen_rate(grid, e)), trial) for e, _, trial in runs]
    return train(task, line, runs, asked, is_search=is_search)


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
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else 0.0

    def __str__(self) -> str:
        more = f" ± {100 * self.deviation:.2f}" if len(self.values) > 1 else ""
        return f"{100 * self.mean:.2f}{more} ({self.rate:g})"


def curve(results: Results, task: str, line: str, *, of: str = "accuracy") -> dict[float, Point]:
    """Test accuracy by ε; a KeyError that names what is missing if there is none."""
    found: dict[float, list[Mapping[str, Any]]] = {}
    for key in sorted(results):
        if key.startswith(f"{task}/{line}/final/"):
            for run in results[key]["runs"]:
                found.setdefault(run["epsilon"], []).append(run)
    if not found:
        raise KeyError(f"{task}/{line}")
    return {
        epsilon: Point(epsilon, tuple(run[of] for run in runs), runs[0]["learning_rate"])
        for epsilon, runs in sorted(found.items())
    }


def needed_fits(settings: Mapping[str, Any], rows: Mapping[str, int]) -> Iterator[str]:
    """Fit strategies and noise of every cell; the names of what was fitted."""
    for group in groups(settings):
        task = group.task
        for line in (one for one in group.lines if one.fit):
            whole = task.rows or rows[task.stands_in or task.data]
            for size, epsilons in ((whole - task.held_out, task.search), (whole, group.epsilons)):
                epochs, per_epoch = task.layout(size, line.times)
                rate = task.batch * line.times / size
                for epsilon in epsilons:
                    how: dict[str, Any] = {
                        "epochs": epochs,
                        "per_epoch": per_epoch,
                        "epsilon": epsilon,
                    }
                    plan = fitted.plan(
                        line.fit_at(epsilon), **how, delta=settings["delta"], rate=rate
                    )
                    z = plan.noise_multiplier
                    yield f"{task.name}/{line.name} {epochs}x{per_epoch} ε={epsilon:g}: {z:.3f}"


ROWS = {"mnist": 60_000, "fashion_mnist": 60_000, "cifar10": 50_000}

if __name__ == "__main__":
    for figure in sys.argv[1:]:
        for is_quick in (True, False):
            for line_fitted in needed_fits(shipped(figure, quick=is_quick), ROWS):
                print(line_fitted, flush=True)
            fitted.save()
