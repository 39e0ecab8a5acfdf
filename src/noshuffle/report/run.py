"""RunRecord: what a report needs, read from the files of a run folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from noshuffle.clipping.norm_histogram import NormHistogram
from noshuffle.errors import InvalidInput
from noshuffle.plan import Plan
from noshuffle.release.files import read_json
from noshuffle.release.folder import RunFolder
from noshuffle.release.spending import COUNTS

#: Scores on held-out data by their names in metrics.jsonl, in words.
SCORES = {"test_accuracy": "Accuracy", "test_error": "The error"}


@dataclass(frozen=True)
class RunRecord:
    """A run folder in memory. `evaluations` are rows of metrics.jsonl with a step in them."""

    path: Path
    plan: Plan
    statement: dict[str, Any]
    config: dict[str, Any]
    evaluations: tuple[dict[str, Any], ...]
    summary: dict[str, Any]
    #: What `noshuffle audit --save` left in the folder; empty where nobody asked.
    audit: dict[str, Any] = field(default_factory=dict)

    @property
    def has_counts(self) -> bool:
        """Whether counts of norms are paid for: then ε is that of the whole plan from step 1 on."""
        said = self.statement.get("assumptions", ())
        return any(sentence in said for sentence in COUNTS.values())

    @property
    def norm_histogram(self) -> NormHistogram | None:
        """The newest noisy histogram of gradient norms, if the run pays for one."""
        found = [row["norm_histogram"] for row in self.evaluations if row.get("norm_histogram")]
        return NormHistogram.from_dict(found[-1]) if found else None

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def evaluation_words(self) -> str | None:
        """Whose data the score was measured on, and what that means; None without a figure."""
        rows = (*self.evaluations, self.summary)
        names = {name for row in rows for name in SCORES if row.get(name) is not None}
        if not names:
            return None
        data = self.summary.get("test_data") or {}
        count = f"{data['rows']:,} " if isinstance(data.get("rows"), int) else ""
        whose = (
            f"{SCORES[min(names)]} was measured on {count}{data.get('words', 'held-out examples')}"
        )
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
    folder = RunFolder(path)
    rows: dict[tuple[str, Any], dict[str, Any]] = {}
    for row in folder.metrics():
        key = (row.get("kind", "evaluation"), row.get("step"))
        rows.pop(key, None)  # a resumed run may write a row again; the later one counts
        rows[key] = row
    return RunRecord(
        path=path,
        plan=folder.plan(),
        statement=_object(folder.statement_file),
        config=_object(folder.config_file),
        evaluations=tuple(row for (kind, _), row in rows.items() if kind == "evaluation"),
        summary=next((row for (kind, _), row in reversed(rows.items()) if kind == "summary"), {}),
        audit=_object(path / "audit.json"),
    )


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = read_json(path)
    return value if isinstance(value, dict) else {}
