"""Tasks, lines and groups of a study, as records of its TOML file.

    task     data, model, batch, passes
    line     a mechanism, its momentum, how many times the batch
    group    lines × ε × trials on a task, in the order in which cells are computed

No state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
    in_turn: bool = False
    #: Rates that are searched, as factors of the middle; those of the figure if there are none.
    factors: tuple[float, ...] = ()
    #: Fixed features that stand for the images: "scattering", "mirrored", or none.
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


def groups(settings: Mapping[str, Any]) -> list[Group]:
    """The groups of a settings file."""
    tasks = {
        name: StudyTask(name=name, **{k: _frozen(v) for k, v in record.items()})
        for name, record in settings["tasks"].items()
    }
    lines = {name: StudyLine(name=name, **record) for name, record in settings["lines"].items()}
    return [
        Group(
            tasks[record["task"]],
            tuple(lines[name] for name in record["lines"]),
            tuple(record["epsilons"]),
            tuple(record["trials"]),
        )
        for record in settings["groups"]
    ]


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
