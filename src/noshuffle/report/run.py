"""RunRecord: what a report needs, read from the files of a run folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noshuffle.errors import InvalidInput
from noshuffle.plan import Plan


@dataclass(frozen=True)
class RunRecord:
    """A run folder in memory. `evaluations` are rows of metrics.jsonl with a step in them."""

    path: Path
    plan: Plan
    statement: dict[str, Any]
    config: dict[str, Any]
    evaluations: tuple[dict[str, Any], ...]
    summary: dict[str, Any]

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def is_federated(self) -> bool:
        """Whether steps are rounds over users."""
        return self.config.get("kind") == "federated"

    def evaluation_words(self) -> str | None:
        """Whose data the accuracy was measured on, and what that means; None without a figure."""
        rows = (*self.evaluations, self.summary)
        if not any(row.get("test_accuracy") is not None for row in rows):
            return None
        data = self.summary.get("test_data") or {}
        count = f"{data['rows']:,} " if isinstance(data.get("rows"), int) else ""
        whose = f"Accuracy was measured on {count}{data.get('words', 'held-out examples')}"
        if data.get("is_public"):
            return f"{whose}, which are public; training did not see them."
        return (
            f"{whose}, which training did not see. ε protects the training data: for the people in "
            "the held-out data these figures are covered by no guarantee, so publish them only if "
            "that data is public."
        )


def read_run(path: Path) -> RunRecord:
    """The run in that folder; a folder without a plan and a statement is refused."""
    missing = [name for name in ("plan.json", "statement.json") if not (path / name).is_file()]
    if missing:
        raise InvalidInput(
            f"{path} is not a run folder ({', '.join(missing)} missing); "
            "noshuffle train, federated and fit make such folders"
        )
    rows = _lines(path / "metrics.jsonl")
    return RunRecord(
        path=path,
        plan=Plan.from_json((path / "plan.json").read_text(encoding="utf8")),
        statement=_object(path / "statement.json"),
        config=_object(path / "config.json"),
        evaluations=tuple(row for row in rows if row.get("kind", "evaluation") == "evaluation"),
        summary=next((row for row in reversed(rows) if row.get("kind") == "summary"), {}),
    )


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf8"))
    except json.JSONDecodeError as error:
        raise InvalidInput(f"{path} is not JSON ({error}); the run folder is damaged") from None
    return value if isinstance(value, dict) else {}


def _lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file. A last line cut short by a crash is passed over.

    A resumed run may write a row again; the later one counts.
    """
    if not path.is_file():
        return []
    rows: dict[tuple[str, Any], dict[str, Any]] = {}
    for line in path.read_text(encoding="utf8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        key = (row.get("kind", "evaluation"), row.get("step"))
        rows.pop(key, None)
        rows[key] = row
    return list(rows.values())
