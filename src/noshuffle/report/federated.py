"""What is told of a federated run: figures for everybody, and a page for the operator alone.

report.html keeps to released values (models, noisy counts), to the plan, and to who was asked how
often, which neighbours under zero-out leave as it is. How many answered, or sent NaN, depends on
the users in ways that ε does not cover: those counts are in operator.html, mode 0600.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noshuffle.federated.per_user import Spending, epsilon_of
from noshuffle.release.files import write_bytes
from noshuffle.release.ledger_tables import Evidence
from noshuffle.report import plots
from noshuffle.report.page_parts import document, pictures, table, warning
from noshuffle.report.plots import ACCENT, MUTED, WARM, as_svg
from noshuffle.report.run import RunRecord
from noshuffle.rounding import up

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: More distinct counts than this are drawn as a filled line.
_MOST_BARS = 60
OPERATOR_PAGE = "operator.html"
#: What is counted in a round, for the operator alone.
_COUNTS = ("asked", "answered", "nonfinite", "refused")


def lead(run: RunRecord) -> str:
    config = run.config
    return (
        f"{config.get('model', 'own model')} on {config.get('task', 'own users')}, "
        f"{run.progress('rounds')} of {config.get('clients_per_round', '?')} users, "
        f"{run.plan.strategy.words()}"
    )


def cards(run: RunRecord) -> list[tuple[str, str]]:
    return []


def figures(run: RunRecord) -> Iterator[plots.Figure]:
    rows = [row for row in run.evaluations if row.get("test_accuracy") is not None]
    if rows:
        yield (
            plots.learning_curve(rows, step="round", of="held-out users"),
            "Accuracy on users who never took part, computed from the released models.",
        )
    yield from _privacy(run)
    yield from plots.noise_figure(
        run.plan,
        "Noise in the sum of all updates so far, per planned user: mechanisms at this ε.",
        per=run.config.get("clients_per_round"),
        step="round",
        independent="DP-FedAvg",
    )
    if len({row.get("clip_norm") for row in rows}) > 1:
        yield (
            plots.clip_curve(rows, step="round"),
            "The clip norm follows a quantile of the update norms by noisy counts, which are "
            "part of the stated ε.",
        )


def _privacy(run: RunRecord) -> Iterator[plots.Figure]:
    plan, stated, released = run.plan, _stated(run), run.released
    is_adaptive = any("clip norm follows" in s for s in run.statement.get("assumptions", []))
    # Otherwise one ε holds for everybody from the first round on, or none: nothing to draw. Of a
    # fork, the plan has its own part alone.
    has_curve = math.isfinite(stated) and not (is_adaptive or run.not_private or run.ancestors)
    if has_curve:
        yield (
            plots.epsilon_curve(
                plan, last=max(1, released), step="round", what="ε per user, at most"
            ),
            "No user's ε exceeds this after so many rounds, whoever was asked.",
        )
    users, most = spending_in(run), plan.participation.most
    if users:
        yield (
            participations(users, most=most),
            "How often users were asked. It counts whether or not the user answered.",
        )
    if users and has_curve:
        times = plots.spread(most, most=40)
        own = [epsilon_of(plan, participations=c, released=released) for c in times]
        yield (
            _epsilon_by_times(users, times, own, stated=stated, delta=plan.delta),
            "A user who was asked less often is covered by a smaller ε of their own. Circles: "
            "the users of this run, the area by their share.",
        )


def spending_in(run: RunRecord) -> list[Spending]:
    """Users by how often they were asked, with their ε, from the ledger of a run folder.

    Empty where cohorts are sampled: whom a secret draw took must stay secret.
    """
    file = run.path / "ledger.sqlite"
    if run.plan.participation.is_sampled or not file.is_file():
        return []
    with closing(Evidence(file)) as evidence:
        facts = evidence.bound()
        covered, units = evidence.saved_units()
        counts = Counter({unit: count for unit, _, _, count in units})
        rows = list(evidence.rows(start=covered))
    for row in rows:  # a run that was killed since its last checkpoint
        counts.update(row.units.tolist())
    released, stated = covered + len(rows), _stated(run)
    is_shared = facts.get("adaptive_clip") == "yes" or (run.path / "ancestors.json").is_file()

    def own(times: int) -> float:
        narrow = epsilon_of(run.plan, participations=times, released=released)
        return stated if is_shared else min(stated, narrow)

    return [Spending(c, users, own(c)) for c, users in sorted(Counter(counts.values()).items())]


def _stated(run: RunRecord) -> float:
    """ε of the statement; null stands for infinity there."""
    epsilon = run.statement.get("epsilon")
    return math.inf if epsilon is None else float(epsilon)


def write_operator_page(run: RunRecord) -> str:
    """operator.html beside the report, readable by the owner only; not without raw counts. Its
    name, or nothing.

    None where cohorts were sampled either, though folders of before 0.2 have the counts: how many a
    secret draw took is secret, and the digest of the page, from which it can be guessed, would
    become part of the ledger.
    """
    rows = _raw_counts(run.path / "operator.jsonl")
    if not rows or run.plan.participation.is_sampled:
        return ""
    asked, answered, nonfinite, refused = (sum(row[name] for row in rows) for name in _COUNTS)
    planned = int(run.config.get("clients_per_round", max(row["asked"] for row in rows)))
    cells = (
        ("rounds", f"{len(rows):,}"),
        ("invitations", f"{asked:,}"),
        ("answers", f"{answered:,} ({100 * answered / max(1, asked):.1f} %)"),
        ("answers with NaN or infinity", f"{nonfinite:,}"),
        ("replies refused", f"{refused:,}"),
    )
    caption = "Users who were asked, and answers that came, a round."
    page = document(
        f"noshuffle run {run.name}: for the operator",
        warning(
            "Raw counts. They depend on the users in ways that the stated ε does not cover: do not "
            "pass this page on."
        )
        + table(cells)
        + f"<h2>Cohorts</h2>{pictures([(cohorts(rows, planned=planned), caption)])}",
    )
    write_bytes(run.path / OPERATOR_PAGE, page.encode(), mode=0o600)
    return OPERATOR_PAGE


def _raw_counts(path: Path) -> list[dict[str, int]]:
    """A row a round; lines that a crash cut short, or somebody edited, are passed over."""
    rows = []
    text = path.read_text(encoding="utf8", errors="replace") if path.is_file() else ""
    for line in text.splitlines():
        with suppress(ValueError, TypeError, AttributeError):
            found = json.loads(line)
            rows.append({name: int(found.get(name, 0)) for name in ("step", *_COUNTS)})
    return sorted(rows, key=lambda row: row["step"])


@as_svg
def participations(axes: Axes, users: Sequence[Spending], *, most: int) -> None:
    """Bars: users by how often they were asked, beside the limit."""
    from matplotlib.ticker import MaxNLocator

    counts = [row.participations for row in users]
    heights = [row.users for row in users]
    if len(counts) <= _MOST_BARS:
        axes.bar(counts, heights, color=ACCENT, alpha=0.85, width=0.8)
    else:
        axes.fill_between(counts, heights, color=ACCENT, alpha=0.85)
    axes.axvline(most + 0.5, color=WARM, ls="--", label=f"limit: {most}")
    axes.set(xlabel="rounds that a user was asked in", ylabel="users", ylim=(0, None))
    axes.set_xlim(left=min(0.4, min(counts) - 0.6), right=most + 1.2)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, loc="upper left")


@as_svg
def _epsilon_by_times(
    axes: Axes,
    users: Sequence[Spending],
    times: Sequence[int],
    own: Sequence[float],
    *,
    stated: float,
    delta: float,
) -> None:
    """ε of a user over how often they were asked; circles where users are, by their share."""
    from matplotlib.ticker import MaxNLocator

    everybody = sum(row.users for row in users)
    at, epsilons = [row.participations for row in users], [row.epsilon for row in users]
    sizes = [20 + 500 * row.users / everybody for row in users]
    axes.axhline(stated, color=WARM, ls="--", label=f"stated for everybody: {up(stated, digits=3)}")
    capped = [min(stated, epsilon) for epsilon in own]
    axes.plot(times, capped, color=ACCENT, lw=1.4, label="of a user asked so often")
    axes.scatter(at, epsilons, s=sizes, color=ACCENT, alpha=0.35, lw=0)
    axes.set(xlabel="rounds that a user was asked in", ylabel=f"ε (δ = {up(delta)})")
    axes.set(ylim=(0, 1.18 * stated), xlim=(0, 1.06 * max(times)))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, loc="lower right")


@as_svg
def cohorts(axes: Axes, rows: Sequence[dict[str, Any]], *, planned: int) -> None:
    """Users asked and answers that came, beside the planned number. Raw counts."""
    axes.figure.set(figwidth=9.0)
    axes.axhline(planned, color=MUTED, ls="--", label=f"planned: {planned}")
    rounds = [row["step"] + 1 for row in rows]  # from one on, as everywhere that is read
    for name, colour, width in (("asked", ACCENT, 2.6), ("answered", WARM, 1.2)):
        axes.plot(rounds, [row[name] for row in rows], color=colour, lw=width, label=name)
    axes.set(xlabel="round", ylabel="users", ylim=(0, None))
    axes.legend(frameon=False, loc="lower right")
