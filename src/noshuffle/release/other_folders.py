"""Folders that are no run: what they are instead, and which run whoever named them may mean.

A run has a plan, a ledger or checkpoints. A folder with none of them contradicts no statement, so
nothing about it is refuted: it is a slip in a name, a folder of several runs, a part of a run, or
a budget.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

#: What only runs have; whoever has taken one of them out of a run has left the others.
OF_RUNS = ("plan.json", "ledger.sqlite", "checkpoints")
#: What a run that was killed before its plan was written may have left beside them.
_BEFORE = ("config.json", "ancestors.json")
#: How many runs one line names.
_NAMED = 5


def is_other(path: Path) -> bool:
    """Whether a folder holds something, and nothing of it is of a run."""
    names = {each.name for each in path.iterdir() if not each.name.startswith(".")}
    return bool(names - {*_BEFORE}) and not names & {*OF_RUNS}


def not_a_run(path: Path) -> str:
    """One line: that it is not a run folder, and where to look instead."""
    said = f"{path} is not a run folder: it has no plan.json"
    if runs := _runs_in(path):
        more = f" and {len(runs) - _NAMED} more" if len(runs) > _NAMED else ""
        return f"{said}, but holds runs: name one of {', '.join(map(str, runs[:_NAMED]))}{more}"
    around = next((up for up in list(path.absolute().parents)[:2] if _is_run(up)), None)
    if around is not None:
        return f"{said}, but is part of one: name {around}"
    if (path / "books.sqlite").exists():
        return f"{said}; it is a budget (noshuffle budget {path}), which names its runs"
    return said


def _is_run(path: Path) -> bool:
    return (path / "plan.json").is_file()


def _runs_in(path: Path) -> list[Path]:
    with suppress(OSError):
        files = [*path.glob("*/plan.json"), *path.glob("*/*/plan.json")]
        return sorted(file.parent for file in files)
    return []
