"""What is told of a federated run: figures for everybody, and a page for the operator alone.

report.html keeps to released values (models, noisy counts), to the plan, and to who was asked how
often, which neighbours under zero-out leave as it is. How many answered, or sent NaN, depends on
the users in ways that ε does not cover: those counts are in operator.html, mode 0600.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from noshuffle.plan import Plan
from noshuffle.report import plots
from noshuffle.report.run import RunRecord

Figure = tuple[str, str]


def lead(run: RunRecord) -> str:
    """What the run was, in one line."""
    config = run.config
    return (
        f"{config.get('model', 'own model')} on {config.get('task', 'own users')}, "
        f"{run.plan.steps} rounds of {config.get('clients_per_round', '?')} users, "
        f"{run.plan.strategy.words()}"
    )


def cards(run: RunRecord) -> list[tuple[str, str]]:
    """Nothing beyond what every page has."""
    return []


def figures(run: RunRecord) -> list[Figure]:
    """The pictures of the shared page with their captions."""
    from noshuffle.report import federated_plots as draw

    found: list[Figure] = []
    rows = [row for row in run.evaluations if row.get("test_accuracy") is not None]
    if rows:
        found.append(
            (
                plots.learning_curve(rows, step="round", of="held-out users"),
                "Accuracy on users who never took part, computed from the released models.",
            )
        )
    found += _privacy(run, draw)
    has_noise = run.plan.noise_multiplier > 0
    series = plots.noise_series(run.plan, independent="DP-FedAvg") if has_noise else []
    if series:
        size = run.config.get("clients_per_round")
        users = size if isinstance(size, int) else None
        found.append(
            (
                plots.noise_curve(series, batch_size=users, step="round"),
                "Noise in the sum of all updates so far, per planned user: mechanisms at this ε.",
            )
        )
    if len({row.get("clip_norm") for row in rows}) > 1:
        found.append(
            (
                draw.clip_curve(rows),
                "The clip norm follows a quantile of the update norms by noisy counts, which are "
                "part of the stated ε.",
            )
        )
    return found


def _privacy(run: RunRecord, draw: Any) -> list[Figure]:
    plan, stated = run.plan, _stated(run)
    users = spending_in(run)
    most = plan.participation.most
    found: list[Figure] = []
    if users:
        found.append(
            (
                draw.participations(users, most=most),
                "How often users were asked. It counts whether or not the user answered.",
            )
        )
    is_adaptive = any("clip norm follows" in s for s in run.statement.get("assumptions", []))
    if is_adaptive or not math.isfinite(stated):
        return found  # one ε for everybody from the first round on: nothing to draw
    released = int(run.statement.get("released_steps", plan.steps))
    rounds = _spread(released)
    found.insert(
        0,
        (
            draw.epsilon_curve(
                rounds, [plan.epsilon_after(step) for step in rounds], delta=plan.delta
            ),
            "No user's ε exceeds this after so many rounds, whoever was asked.",
        ),
    )
    if users:
        curve = [(c, _own(plan, c, released=released, stated=stated)) for c in _spread(most)]
        found.append(
            (
                draw.epsilon_by_times(users, curve, stated=stated, delta=plan.delta),
                "A user who was asked less often is covered by a smaller ε of their own. Circles: "
                "the users of this run, the area by their share.",
            )
        )
    return found


def _spread(last: int) -> list[int]:
    """At most 40 whole numbers from 1 to `last`."""
    picks = np.linspace(1, max(1, last), min(40, max(1, last))).round()
    return sorted({int(pick) for pick in picks})


def spending_in(run: RunRecord) -> list[Any]:
    """Users by how often they were asked, with their ε, from the ledger of a run folder.

    Empty where cohorts are sampled: whom a secret draw took must stay secret.
    """
    from noshuffle.federated.per_user import Spending
    from noshuffle.release.ledger_tables import Evidence

    file = run.path / "ledger.sqlite"
    if run.plan.participation.is_sampled or not file.is_file():
        return []
    evidence = Evidence(file)
    try:
        facts = evidence.facts()
        covered, units = evidence.saved_units()
        counts = Counter({unit: count for unit, _, _, count in units})
        rows = list(evidence.rows(start=covered))
    finally:
        evidence.close()
    for row in rows:  # a run that was killed since its last checkpoint
        counts.update(row.units.tolist())
    released = covered + len(rows)
    stated = _stated(run)
    is_shared = facts.get("adaptive_clip") == "yes" or (run.path / "ancestors.json").is_file()
    return [
        Spending(
            times,
            users,
            stated if is_shared else _own(run.plan, times, released=released, stated=stated),
        )
        for times, users in sorted(Counter(counts.values()).items())
    ]


def _stated(run: RunRecord) -> float:
    """ε of the statement; null stands for infinity there."""
    epsilon = run.statement.get("epsilon")
    return math.inf if epsilon is None else float(epsilon)


def _own(plan: Plan, times: int, *, released: int, stated: float) -> float:
    from noshuffle.federated.per_user import epsilon_of

    return min(stated, epsilon_of(plan, participations=times, released=released))


def write_operator_page(run: RunRecord, *, style: str) -> Path | None:
    """operator.html beside the report, readable by the owner only; None without raw counts."""
    from noshuffle.report import federated_plots as draw

    rows = _lines(run.path / "operator.jsonl")
    if not rows:
        return None
    answered, asked = (sum(row[name] for row in rows) for name in ("answered", "asked"))
    planned = int(run.config.get("clients_per_round", max(row["asked"] for row in rows)))
    table = "".join(
        f"<tr><td>{escape(label)}</td><td>{value}</td></tr>"
        for label, value in (
            ("rounds", f"{len(rows):,}"),
            ("invitations", f"{asked:,}"),
            ("answers", f"{answered:,} ({100 * answered / max(1, asked):.1f} %)"),
            ("answers with NaN or infinity", f"{sum(row['nonfinite'] for row in rows):,}"),
            ("replies refused", f"{sum(row['refused'] for row in rows):,}"),
        )
    )
    title = f"noshuffle run {run.name}: for the operator"
    page = (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<title>{escape(title)}</title><style>{style}</style></head><body>"
        f"<h1>{escape(title)}</h1><p class='warn'>Raw counts. They depend on the users in ways "
        "that the stated ε does not cover: do not pass this page on.</p>"
        f"<table>{table}</table><h2>Cohorts</h2>"
        f"<figure>{draw.cohorts(rows, planned=planned)}</figure>"
        "</body></html>\n"
    )
    target, part = run.path / "operator.html", run.path / ".operator.html.part"
    part.unlink(missing_ok=True)
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf8") as file:
        file.write(page)
    os.replace(part, target)
    return target


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:  # cut short by a crash
            continue
    return sorted(rows, key=lambda row: int(row["step"]))
