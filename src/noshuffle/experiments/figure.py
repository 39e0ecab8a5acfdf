"""What a figure of the paper is: cells to compute, a table, a picture, and claims to check.

    cells(request) → [Cell]          small pieces of work, each kept as soon as it is done
    table(results), draw(results, path), claims: all from the results alone, so that pictures can be
                                     drawn on another machine than the one that computed

A claim is a sentence of the paper with its place, and a function of the results that says HOLDS,
DIFFERS or NOT TESTED and gives the figures that decide. Results map the key of a cell to the record
that its work returned, plain JSON. No state.

>>> claim = Claim("more is more", "section 1", lambda results: verdict(
...     results["a"] < results["b"], f"{results['a']} against {results['b']}"))
>>> str(claim.check({"a": 1, "b": 2}))
'HOLDS       more is more (section 1): 1 against 2'
>>> str(claim.check({"a": 1}))
'NOT TESTED  more is more (section 1): no result of b'
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from noshuffle.errors import InvalidInput, whole

#: Cells that are named where one was asked for that is not there.
_SHOWN = 20
HOLDS, DIFFERS, NOT_TESTED = "HOLDS", "DIFFERS", "NOT TESTED"
Results = Mapping[str, Any]


@dataclass(frozen=True)
class ClaimVerdict:
    """What was found about a claim, and the figures."""

    word: str
    figures: str


def deviation(values: Sequence[float]) -> float:
    """Of what these trials are a sample of; 0 of a single one, which says nothing of it."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def verdict(holds: bool, figures: str) -> ClaimVerdict:
    """HOLDS or DIFFERS, with the figures that decide."""
    return ClaimVerdict(HOLDS if holds else DIFFERS, figures)


def not_tested(why: str) -> ClaimVerdict:
    """A claim that these results say nothing about."""
    return ClaimVerdict(NOT_TESTED, why)


@dataclass(frozen=True)
class Claim:
    """A sentence, where it stands, and how the results decide it."""

    text: str
    place: str
    decide: Callable[[Results], ClaimVerdict]

    def check(self, results: Results) -> Checked:
        """The verdict; a result that is not there yet means NOT TESTED."""
        try:
            found = self.decide(results)
        except KeyError as error:
            found = not_tested(f"no result of {error.args[0]}")
        return Checked(self.text, self.place, found.word, found.figures)


@dataclass(frozen=True)
class Checked:
    """A claim with its verdict, as it is printed and written."""

    text: str
    place: str
    verdict: str
    figures: str

    def __str__(self) -> str:
        return f"{self.verdict:<11} {self.text} ({self.place}): {self.figures}"


@dataclass(frozen=True)
class Cell:
    """One piece of work, at most a minute or so of the machine that it is meant for.

    `work` is called with the results so far and returns a JSON record. `cost` is its size in units
    of its own, `kind` the cells that take the same time for one unit: what is done tells how long
    the rest will take. A cell whose `needs` are not all there is left for a later call.
    """

    key: str
    work: Callable[[Results], Any]
    cost: float = 1.0
    kind: str = ""
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for; `settings` is the TOML that ships with the figure."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    quick: bool = False
    trials: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.trials is not None:
            whole(trials=self.trials)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure by name; `draw` writes what the suffix of its path says (.svg, .png)."""

    name: str
    title: str
    cells: Callable[[Request], Sequence[Cell]]
    table: Callable[[Results], str]
    draw: Callable[[Results, Path], None]
    claims: Sequence[Claim] = ()

    def checked(self, results: Results) -> list[Checked]:
        """Every claim of the paper with its verdict."""
        return [claim.check(results) for claim in self.claims]


def shipped(name: str, *, quick: bool = False) -> dict[str, Any]:
    """The settings that ship with a figure; those under [quick] replace others in a hurry."""
    file = resources.files("noshuffle.experiments") / "settings" / f"{name}.toml"
    if not file.is_file():
        return {}
    record = tomllib.loads(file.read_text(encoding="utf8"))
    hurried = record.pop("quick", {})
    return _replaced(record, hurried) if quick else record


def _replaced(record: Mapping[str, Any], by: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(record)
    for name, value in by.items():
        if isinstance(value, dict) and isinstance(out.get(name), dict):
            value = _replaced(out[name], value)
        out[name] = value
    return out


def only_keys(cells: Sequence[Cell], prefixes: Sequence[str]) -> list[Cell]:
    """The cells whose key begins so, with all that they need; all if nothing is asked."""
    if not prefixes:
        return list(cells)
    if not all(prefix.strip() for prefix in prefixes):
        raise InvalidInput("only must be the beginning of a key, got nothing; leave it out for all")
    by_key = {cell.key: cell for cell in cells}
    wanted = [cell.key for cell in cells if cell.key.startswith(tuple(prefixes))]
    if not wanted:
        names = ", ".join(list(by_key)[:_SHOWN]) + (", …" if len(by_key) > _SHOWN else "")
        raise InvalidInput(
            f"no cell is called {', '.join(prefixes)}; there are {len(by_key)}: {names}"
        )
    kept: set[str] = set()
    while wanted:
        key = wanted.pop()
        if key not in kept and key in by_key:
            kept.add(key)
            wanted.extend(by_key[key].needs)
    return [cell for cell in cells if cell.key in kept]
