"""Curves of accuracy over ε as tables, pictures and claims, for every figure that has them.

All from results alone and the settings that ship with the figure. No state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from noshuffle.experiments.accuracy import Point, curve
from noshuffle.experiments.figure import ClaimVerdict, Results, not_tested, shipped, verdict
from noshuffle.experiments.panels import COLOURS, legend_below, markdown, panels

NOTHING: Mapping[str, Any] = {}


def _found(figure: str, results: Results) -> dict[str, list[str]]:
    """Lines with final figures by task, in the order of the settings."""
    settings = shipped(figure)
    out: dict[str, list[str]] = {}
    for task in settings["tasks"]:
        for line in settings["lines"]:
            if any(key.startswith(f"{task}/{line}/final/") for key in results):
                out.setdefault(task, []).append(line)
    return out


def table(figure: str, results: Results, *, averaged: Sequence[str] = ()) -> str:
    """One Markdown table a task: mean ± deviation of trials, and the learning rate.

    Lines in `averaged` have a second row: the average of their iterates.
    """
    settings, blocks = shipped(figure), []
    for task, lines in _found(figure, results).items():
        curves = {line: curve(results, task, line) for line in lines}
        epsilons = sorted({e for points in curves.values() for e in points if e > 0})
        made = _made(results, task)
        title = _title(task, settings, made)
        block, rows = [f"**{title}**: test accuracy in %, mean ± deviation (learning rate)", ""], []
        names = {line: settings["lines"][line]["title"] for line in lines}
        for line in (line for line in averaged if line in lines):
            curves[f"{line}, averaged"] = curve(results, task, line, of="averaged")
            names[f"{line}, averaged"] = f"{names[line]}; average of iterates"
        for line, points in curves.items():
            counts = sorted({len(point.values) for point in points.values()})
            trials = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
            shown = [str(points[e]) if e in points else "–" for e in epsilons]
            if 0.0 in points:
                shown = [str(points[0.0]), *["" for _ in epsilons[1:]]]
            rows.append((names[line], trials, *shown))
        heads = ("line", "trials", *(f"ε = {e:g}" for e in epsilons))
        blocks.append("\n".join(block + markdown(heads, rows)))
    return "\n\n".join(blocks)


def _made(results: Results, task: str) -> list[Mapping[str, Any]]:
    return [v for k, v in results.items() if k.startswith(f"{task}/") and "data" in v]


def _title(task: str, settings: Mapping[str, Any], made: Sequence[Mapping[str, Any]]) -> str:
    """The title of a task, with the data that stood in for its own."""
    record = settings["tasks"].get(task, {"title": ""})
    if not made:
        return str(record["title"])
    name, title = made[0]["data"], made[0].get("title", record["title"])
    return str(title if name == record["data"] else f"{title} ({name} stands in)")


def draw(
    figure: str,
    results: Results,
    path: Path,
    *,
    published: Mapping[str, Mapping[str, Mapping[float, float]]] = NOTHING,
) -> None:
    """One panel a task: accuracy over ε, bars of one standard deviation.

    `published` are points of others by task and name. A task with one ε is for the table.
    """
    settings, found = shipped(figure), _found(figure, results)
    many = {
        task: set().union(*(curve(results, task, line) for line in found[task])) for task in found
    }
    names = [task for task in found if len(many[task]) > 1] or list(found) or [""]
    columns = 2 if len(names) == 4 else min(len(names), 3)
    with panels(path, -(-len(names) // columns), columns, size=(5.2, 4.8)) as grid:
        for axes, task in zip(grid, names):
            _panel(axes, results, task, found.get(task, ()), settings, published.get(task, {}))
        for axes in grid[::columns]:
            axes.set_ylabel("test accuracy, %")


def _panel(
    axes: Any,
    results: Results,
    task: str,
    lines: Sequence[str],
    settings: Mapping[str, Any],
    published: Mapping[str, Mapping[float, float]],
) -> None:
    for line in lines:
        points = curve(results, task, line)
        label = settings["lines"][line]["title"]
        if 0.0 in points:
            axes.axhline(100 * points[0.0].mean, label=label, color="black", lw=0.8, ls=":")
            continue
        y, bars = zip(*((100 * p.mean, 100 * p.deviation) for p in points.values()))
        style = STYLES.get(line, {"color": "#9aa5b1", "marker": "."})
        axes.errorbar(list(points), y, yerr=bars, label=label, ms=4, lw=1.3, **style)
    for (name, values), mark in zip(published.items(), "x+1"):
        axes.plot(*zip(*values.items()), mark, color="black", ms=5, label=name, zorder=4)
    axes.set(xscale="log", xlabel="ε", title=_title(task, settings, _made(results, task)))
    shown = [epsilon for line in lines for epsilon in curve(results, task, line) if epsilon > 0]
    ends = min(shown, default=1.0), max(shown, default=16.0)
    ticks = [tick for tick in (0.5, 1, 2, 4, 8, 16) if ends[0] <= tick <= 1.3 * ends[1]]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    legend_below(axes)


STYLES: dict[str, dict[str, Any]] = {
    "blt": {"color": COLOURS["blt"], "marker": "o"},
    "blt4": {"color": COLOURS["blt"], "marker": "o", "ls": "--"},
    "blt_heavy": {"color": "#67a9c4", "marker": "v"},
    "blt_99": {"color": "#2f4b7c", "marker": "^"},
    "tree": {"color": COLOURS["tree"], "marker": "s"},
    "tree4": {"color": COLOURS["tree"], "marker": "s", "ls": "--"},
    "tree_plain": {"color": COLOURS["tree"], "marker": "s", "ls": ":"},
    "tree_one": {"color": "#9cc4a3", "marker": "v"},
    "tree_bare": {"color": "#9cc4a3", "marker": "^"},
    "amplified": {"color": COLOURS["poisson"], "marker": "D"},
    "amplified4": {"color": COLOURS["poisson"], "marker": "D", "ls": "--"},
    "amplified_heavy": {"color": "#c9722b", "marker": "v"},
    "amplified_99": {"color": "#8c510a", "marker": "^"},
    "amplified_plain": {"color": COLOURS["poisson"], "marker": "D", "ls": ":"},
    "identity": {"color": COLOURS["identity"], "marker": "x"},
    "blt_prefix": {"color": "#67a9c4", "marker": "v"},
    "blt_gains": {"color": "#2f4b7c", "marker": "^"},
    "two_sided": {"color": "#7a5195", "marker": "P"},
    "banded": {"color": "#b8860b", "marker": "d"},
    "cyclic": {"color": "#b8860b", "marker": "d"},
    "bins": {"color": "#8c2d5a", "marker": "*"},
}


def beside(a: Point, b: Point) -> str:
    """Two points at one ε in words."""
    return f"ε = {a.epsilon:g}: {_percent(a)} against {_percent(b)}"


def _percent(point: Point) -> str:
    more = f" ± {100 * point.deviation:.2f}" if len(point.values) > 1 else " (1 trial)"
    return f"{100 * point.mean:.2f}{more}"


def compare(task: str, line: str, other: str, results: Results) -> ClaimVerdict:
    """Whether one line is at or above another at every ε that both have."""
    first, second = curve(results, task, line), curve(results, task, other)
    both = [e for e in first if e in second]
    return at_or_above([(first[e], second[e], "") for e in both])


def at_or_above(pairs: Sequence[tuple[Point, Point, str]]) -> ClaimVerdict:
    """Whether the first of every two points is at or above the second; with a word to each."""
    if not pairs:
        return not_tested("no ε in common")
    told = "; ".join(beside(a, b) + more for a, b, more in pairs)
    near = ", ".join(f"{a.epsilon:g}" for a, b, _ in pairs if are_near(a, b))
    told += f" (within a standard error of the difference at ε = {near})" if near else ""
    return verdict(all(a.mean >= b.mean for a, b, _ in pairs), told)


def are_near(a: Point, b: Point) -> bool:
    """Whether two means differ by less than the standard error of their difference.

    >>> a, b = Point(1.0, (0.50, 0.52), 0.1), Point(1.0, (0.505, 0.525), 0.1)
    >>> are_near(a, b), are_near(a, Point(1.0, (0.60, 0.62), 0.1))
    (True, False)
    """
    errors = (point.deviation / math.sqrt(len(point.values)) for point in (a, b))
    return abs(a.mean - b.mean) < math.hypot(*errors)
