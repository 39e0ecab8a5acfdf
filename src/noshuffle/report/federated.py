"""What is told of a federated run: figures that everybody may see.

report.html keeps to released values (models, noisy counts), to the plan, and to who was asked how
often, which neighbours under zero-out leave as it is. How many answered, or sent NaN, depends on
the users in ways that ε does not cover: those counts are in operator.jsonl, mode 0600.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from noshuffle.federated.per_user import Spending, epsilon_of
from noshuffle.release.folder import RunFolder
from noshuffle.release.history import History
from noshuffle.report import plots
from noshuffle.report.plots import ACCENT, WARM, as_svg
from noshuffle.report.run import RunRecord
from noshuffle.rounding import up

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: More distinct counts than this are drawn as a filled line.
_MOST_BARS = 60


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
    """Users by how often they were asked, with their ε, from the log of a run folder.

    Empty where cohorts are sampled: whom a secret draw took must stay secret.
    """
    folder = RunFolder(run.path)
    if run.plan.participation.is_sampled or not folder.is_started:
        return []
    history, stated = History.read(folder), _stated(run)
    is_shared = history.header["adaptive_clip"] == "yes" or bool(history.ancestors())

    def own(times: int) -> float:
        narrow = epsilon_of(run.plan, participations=times, released=history.steps)
        return stated if is_shared else min(stated, narrow)

    counts, users = np.unique(history.guard.table.all()[1].count, return_counts=True)
    return [Spending(int(c), int(n), own(int(c))) for c, n in zip(counts, users)]


def _stated(run: RunRecord) -> float:
    """ε of the statement; null stands for infinity there."""
    epsilon = run.statement.get("epsilon")
    return math.inf if epsilon is None else float(epsilon)


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
