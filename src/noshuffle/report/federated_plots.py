"""The pictures of a federated run, each an SVG string.

participations   how many users were asked how often
epsilon_by_times ε of a user over how often they were asked, and where the users are
clip_curve       a clip norm that follows a quantile
cohorts          users asked and answered, round by round (for the operator)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from noshuffle.federated.per_user import Spending
from noshuffle.report.plots import ACCENT, MUTED, WARM, _draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: More distinct counts than this are drawn as a filled line.
_MOST_BARS = 60


def epsilon_curve(rounds: Sequence[int], values: Sequence[float], *, delta: float) -> str:
    """The ε that no user exceeds after so many rounds."""

    def draw(axes: Axes) -> None:
        axes.step(rounds, values, where="post", color=WARM)
        axes.set(xlabel="round", ylabel=f"ε per user, at most (δ = {delta:g})", ylim=(0, None))

    return _draw(draw)


def participations(users: Sequence[Spending], *, most: int) -> str:
    """Bars: users by how often they were asked, beside the limit."""
    from matplotlib.ticker import MaxNLocator

    counts = [row.participations for row in users]
    heights = [row.users for row in users]

    def draw(axes: Axes) -> None:
        if len(counts) <= _MOST_BARS:
            axes.bar(counts, heights, color=ACCENT, alpha=0.85, width=0.8)
        else:
            axes.fill_between(counts, heights, color=ACCENT, alpha=0.85)
        axes.axvline(most + 0.5, color=WARM, ls="--", label=f"limit: {most}")
        axes.set(xlabel="rounds that a user was asked in", ylabel="users", ylim=(0, None))
        axes.set_xlim(left=min(0.4, min(counts) - 0.6), right=most + 1.2)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(frameon=False, loc="upper left")

    return _draw(draw)


def epsilon_by_times(
    users: Sequence[Spending],
    curve: Sequence[tuple[int, float]],
    *,
    stated: float,
    delta: float,
) -> str:
    """ε of a user over how often they were asked; circles where users are, by their share."""
    everybody = sum(row.users for row in users)
    times = [row.participations for row in users]
    sizes = [20 + 500 * row.users / everybody for row in users]

    def draw(axes: Axes) -> None:
        axes.axhline(stated, color=WARM, ls="--", label=f"stated for everybody: {stated:.3g}")
        axes.plot(*zip(*curve), color=ACCENT, lw=1.4, label="of a user asked so often")
        axes.scatter(times, [row.epsilon for row in users], s=sizes, color=ACCENT, alpha=0.35, lw=0)
        axes.set(xlabel="rounds that a user was asked in", ylabel=f"ε (δ = {delta:g})")
        axes.set(ylim=(0, 1.18 * stated), xlim=(0, 1.06 * max(c for c, _ in curve)))
        axes.legend(frameon=False, loc="lower right")

    return _draw(draw)


def clip_curve(rows: Sequence[dict[str, Any]]) -> str:
    """The clip norm in force, a released value."""
    points = [(row["step"], row["clip_norm"]) for row in rows]

    def draw(axes: Axes) -> None:
        axes.plot(*zip(*points), color=ACCENT, marker="o", ms=3)
        axes.set(xlabel="round", ylabel="clip norm", ylim=(0, None))

    return _draw(draw)


def cohorts(rows: Sequence[dict[str, Any]], *, planned: int) -> str:
    """Users asked and answers that came, beside the planned number. Raw counts."""
    steps = [row["step"] for row in rows]

    def draw(axes: Axes) -> None:
        axes.axhline(planned, color=MUTED, ls="--", label=f"planned: {planned}")
        axes.plot(steps, [row["asked"] for row in rows], color=ACCENT, lw=1.2, label="asked")
        axes.plot(steps, [row["answered"] for row in rows], color=WARM, lw=1.2, label="answered")
        axes.set(xlabel="round", ylabel="users", ylim=(0, None))
        axes.legend(frameon=False, loc="lower right")

    return _draw(draw, width=9.0)
