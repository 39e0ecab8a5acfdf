"""Tasks, lines and groups of a study, as records of its TOML file.

    task     data, model, batch, passes
    line     a mechanism, its momentum, how many times the batch
    group    lines × ε × trials on a task, in the order in which cells are computed; its rates are
             searched at the task's ε, or at some of them (`search`), or are those of another line
             of the task (`rates_of`) by a factor (`rates_times`); `by_held_out`: its trials are
             scored on held-out training rows, and choose among lines

No state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar

from noshuffle.errors import InvalidInput, one_of
from noshuffle.experiments.fitted import AMPLIFIED, name_at


@dataclass(frozen=True, kw_only=True)
class StudyTask:
    """Data, model and computation of a panel; `held_out` training rows choose learning rates."""

    name: str
    title: str
    data: str
    model: str
    batch: int
    epochs: int
    held_out: int
    search: tuple[float, ...]
    middle: tuple[float, ...]
    most: int = 32
    rows: int | None = None
    stands_in: str = ""
    half: bool = False
    #: Rates that are searched, as factors of the middle; those of the figure if there are none.
    factors: tuple[float, ...] = ()
    #: Fixed features that stand for the images, a name of `noshuffle.features`; none if empty.
    features: str = ""
    #: Augmented copies of a row in every step; none if 0.
    augment: int = 0

    def layout(self, rows: int, times: int) -> tuple[int, int]:
        """Passes and steps of one: as many steps at a larger batch, in more passes."""
        per_epoch = rows // (self.batch * times)
        return self.epochs * times, per_epoch


@dataclass(frozen=True, kw_only=True)
class StudyLine:
    """A mechanism (`fit`, a name of `fitted`; empty: not private) and how it is trained."""

    name: str
    title: str
    fit: str
    times: int = 1
    momentum: float = 0.9
    shift: float = 1.0

    @property
    def is_sampled(self) -> bool:
        return self.fit in ("amplified", *AMPLIFIED)

    def fit_at(self, epsilon: float) -> str:
        """The name in `fitted`: bands under a secret draw are those that are best at ε."""
        if self.fit in AMPLIFIED:
            return f"{self.fit}@{epsilon:g}"
        return name_at(self.fit, momentum=self.momentum)


@dataclass(frozen=True)
class Group:
    """Lines × ε × trials on a task."""

    task: StudyTask
    lines: tuple[StudyLine, ...]
    epsilons: tuple[float, ...]
    trials: tuple[int, ...]
    #: Which ε of the task rates are searched at, all of them if none is named.
    search: tuple[float, ...] = ()
    #: The line whose rates are taken, none if they are searched, and by which factor.
    rates_of: StudyLine | None = None
    rates_times: float = 1.0
    #: Whether held-out training rows score its trials, instead of test rows.
    by_held_out: bool = False


def groups(settings: Mapping[str, Any]) -> list[Group]:
    """The groups of a settings file; what is missing, unknown or empty there is one line."""
    tasks = {name: _record(StudyTask, name, own) for name, own in settings["tasks"].items()}
    lines = {name: _record(StudyLine, name, own) for name, own in settings["lines"].items()}
    _filled("settings", settings, "factors", "groups")
    out = []
    for place, record in enumerate(settings["groups"]):
        where = f"group {place + 1}"
        _filled(where, record, "task", "lines", "epsilons", "trials")
        one_of(tuple(tasks), **{f"task of {where}": record["task"]})
        for name in record["lines"]:
            one_of(tuple(lines), **{f"lines of {where}": name})
        if "rates_of" in record:
            one_of(tuple(lines), **{f"rates_of of {where}": record["rates_of"]})
        out.append(
            Group(
                tasks[record["task"]],
                tuple(lines[n] for n in record["lines"]),
                tuple(record["epsilons"]),
                tuple(record["trials"]),
                search=tuple(record.get("search", ())),
                rates_of=lines.get(record.get("rates_of", "")),
                rates_times=float(record.get("rates_times", 1.0)),
                by_held_out=bool(record.get("by_held_out", False)),
            )
        )
    for task in tasks.values():
        if not 0 < len(task.search) == len(task.middle):
            raise InvalidInput(
                f"task {task.name} needs a middle for each ε of search, got "
                f"{len(task.middle)} for {len(task.search)}"
            )
    return out


Made = TypeVar("Made", StudyTask, StudyLine)


def _record(kind: type[Made], name: str, record: Mapping[str, Any]) -> Made:
    """A record of a settings file; unknown and missing names are refused."""
    known = {one.name for one in fields(kind)} - {"name"}
    needed = {one.name for one in fields(kind) if one.default is MISSING} - {"name"}
    what = kind.__name__.removeprefix("Study").lower()
    if unknown := sorted(set(record) - known):
        raise InvalidInput(
            f"{what} {name} has an unknown key {unknown[0]!r}; there are: "
            f"{', '.join(sorted(known))}"
        )
    _filled(f"{what} {name}", record, *sorted(needed))
    return kind(name=name, **{key: _frozen(value) for key, value in record.items()})


def _filled(where: str, record: Mapping[str, Any], *names: str) -> None:
    """These names are there; a list has something in it (the text of a mechanism may be empty)."""
    for name in names:
        if name not in record or record[name] == []:
            raise InvalidInput(f"{where}: {name} is {'empty' if name in record else 'missing'}")


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
