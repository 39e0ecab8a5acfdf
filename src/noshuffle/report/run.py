"""RunRecord: what a report needs, read from the files of a run folder."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from noshuffle.accounting.tradeoff import from_curve, gaussian_tradeoff
from noshuffle.participation.patterns import OPEN
from noshuffle.plan import Plan
from noshuffle.plan.statement import voids
from noshuffle.release.files import read_json
from noshuffle.release.folder import RunFolder
from noshuffle.release.history import History
from noshuffle.release.spending import ADAPTIVE_CLIP, Ancestor

#: Scores on held-out data by their names in metrics.jsonl, in words.
SCORES = {"test_accuracy": "Accuracy", "test_error": "The error"}


@dataclass(frozen=True)
class RunRecord:
    """A run folder in memory. `evaluations` are rows of metrics.jsonl with a step in them.

    `statement` is what follows from the log as it is now; statement.json may be older.
    """

    path: Path
    plan: Plan
    statement: dict[str, Any]
    #: Steps that the statement covers.
    released: int
    config: dict[str, Any]
    evaluations: tuple[dict[str, Any], ...]
    summary: dict[str, Any]
    #: What `noshuffle audit --save` left in the folder; empty where nobody asked.
    audit: dict[str, Any] = field(default_factory=dict)
    #: The runs that it was forked from, which its statement counts and its plan does not.
    ancestors: tuple[Ancestor, ...] = ()

    @property
    def not_private(self) -> tuple[str, ...]:
        """Why no ε holds, where the statement says so."""
        return voids(self.statement.get("assumptions", ()))

    @property
    def charged(self) -> int:
        """Steps that the stated ε pays for: with counts of norms the whole plan from step 1 on."""
        has_end = self.plan.steps != OPEN
        return self.plan.steps if self.has_counts and has_end else self.released

    @property
    def seen(self) -> tuple[float, float] | None:
        """ε and δ of all that is seen of the run; None where none is known."""
        epsilon, delta = self.statement.get("epsilon"), self.statement.get("delta")
        return None if epsilon is None or delta is None else (float(epsilon), float(delta))

    def least_misses(self, alphas: Any) -> Any:
        """Type II errors, at type I errors `alphas`, that no test of the released values is below.

        By the μ of the statement, which counts what a fork takes over; by ε and δ where a fork
        has no μ for all of it; else by the plan.
        """
        mu = self.statement.get("mu")
        if mu is None and self.ancestors:
            epsilon, delta = self.seen or (math.inf, 1.0)
            return from_curve(alphas, np.array([epsilon]), np.array([delta]))
        if mu is not None:
            return gaussian_tradeoff(alphas, mu=mu)
        return self.plan.tradeoff(alphas, steps=max(1, self.charged))

    def progress(self, of: str = "steps") -> str:
        """How many there were: "220 steps", or "99 of 220 steps" of a run that is not done."""
        if self.plan.steps == OPEN or self.released == self.plan.steps:
            return f"{self.released} {of}"
        return f"{self.released} of {self.plan.steps} {of}"

    @property
    def has_counts(self) -> bool:
        """Whether counts of norms are paid for: then ε is that of the whole plan from step 1 on."""
        return ADAPTIVE_CLIP in self.statement.get("assumptions", ())

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
    """The run in that folder; a folder without a plan and a log is refused."""
    folder = RunFolder(path)
    history = History.read(folder)
    rows: dict[tuple[str, Any], dict[str, Any]] = {}
    for row in folder.metrics():
        key = (row.get("kind", "evaluation"), row.get("step"))
        rows.pop(key, None)  # a resumed run may write a row again; the later one counts
        rows[key] = row
    return RunRecord(
        path=path,
        plan=history.plan,
        statement=history.statement().to_dict(),
        released=history.steps,
        config=_object(folder.config_file),
        evaluations=tuple(row for (kind, _), row in rows.items() if kind == "evaluation"),
        summary=next((row for (kind, _), row in reversed(rows.items()) if kind == "summary"), {}),
        audit=_object(path / "audit.json"),
        ancestors=tuple(one for one in history.ancestors() if one.released),
    )


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = read_json(path)
    return value if isinstance(value, dict) else {}
