"""The findings of `noshuffle audit` as cards and pictures, for audit.html and report.html.

Each part of an audit record (`auditing.answers.record_of`) has its picture and its sentence. A page
about a plan may be published; one about a run with canaries says nothing of real people.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import ndtr, ndtri

from noshuffle.report.page_parts import cards as card_row
from noshuffle.report.page_parts import pictures
from noshuffle.report.plots import ACCENT, MUTED, WARM, Figure, as_svg
from noshuffle.rounding import down, up

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Part = dict[str, Any]
#: Cards (number, what it is) and pictures.
Told = tuple[list[tuple[str, str]], list[Figure]]


def section(record: dict[str, Any]) -> str:
    """The answer, the cards and the pictures."""
    cards = [(str(record["answer"]), "answer of the audit")]
    figures = []
    for part in record["parts"]:
        own_cards, own_figures = _TELLERS[part["kind"]](part)
        cards += own_cards
        figures += own_figures
    if measured := [part for part in record["parts"] if part["kind"] == "canaries"]:
        figures.append(
            (
                _intervals(measured),
                "μ of the worst unit as each attacker sees it, with 95 % intervals: the wide line "
                "is the claim, a short one the most that this attacker can reach.",
            )
        )
    return card_row(cards) + pictures(figures)


def _plan(part: Part) -> Told:
    stops = [stop for stop in part["stops"] if stop["low"] is not None]
    if not stops:
        return [(part["answer"], part["left_out"] or "no stopping point")], []
    refuted = [stop for stop in stops if stop["answer"] == "REFUTED"]
    shown = max(refuted, key=lambda stop: stop["low"] / stop["stated"]) if refuted else stops[-1]
    cards = [
        (up(shown["stated"], digits=4), f"ε stated after {shown['steps']} steps"),
        (down(shown["low"], digits=4), "ε of the emitted noise, at least"),
        (f"{len(refuted)} of {len(stops)}", "stopping points refuted"),
    ]

    about = f"The noise: {part['mechanism']}; {part['participation']}."
    return cards, [
        (
            _stopping_points(part, stops, refuted),
            "ε of every stopping point: as stated, and from the covariance of the rows that the "
            f"noise stream emits. {about}",
        ),
        (
            _ratios(stops),
            "Above one, beyond rounding, the statement is false; below one noise is wasted.",
        ),
    ]


@as_svg
def _stopping_points(axes: Axes, part: Part, stops: list[Part], refuted: list[Part]) -> None:
    steps = [stop["steps"] for stop in stops]
    axes.plot(steps, [stop["stated"] for stop in stops], color=MUTED, lw=2.4, label="stated")
    axes.plot(steps, [stop["low"] for stop in stops], color=ACCENT, ls="--", label="emitted noise")
    if bad := [(stop["steps"], stop["low"]) for stop in refuted]:
        axes.plot(*zip(*bad), "o", color=WARM, ms=4, label="refuted")
    axes.set(xlabel="run stopped after … steps", ylabel=f"ε at δ = {up(part['delta'])}")
    axes.set_ylim(0, None)
    axes.legend(frameon=False)


@as_svg
def _ratios(axes: Axes, stops: list[Part]) -> None:
    kept = [stop for stop in stops if stop["stated"]]
    axes.axhline(1.0, color=MUTED, lw=1)
    ratios = [stop["low"] / stop["stated"] for stop in kept]
    axes.plot([stop["steps"] for stop in kept], ratios, color=ACCENT)
    axes.set(xlabel="run stopped after … steps", ylabel="ε emitted / ε stated")
    low, high = min(1.0, *ratios), max(1.0, *ratios)
    margin = max(0.02, 0.1 * (high - low))  # roundings of 1e-7 are not worth a picture
    axes.set_ylim(low - margin, high + margin)
    axes.ticklabel_format(axis="y", useOffset=False)


def _canaries(part: Part) -> Told:
    label = f"μ̂ from the {part['attacker']}; claimed {up(part['claimed_mu'], digits=4)}"
    return [(_number(part["estimate"]["mu"]), label)], []


def _membership(part: Part) -> Told:
    caption = (
        f"Loss-threshold attack on the final model ({part['members']:,} members, "
        f"{part['others']:,} others): the share of members that it finds, and the most that any "
        "attack could under the claim."
    )
    return [(f"{part['area']:.3f}", "area under the attack's curve")], [(_roc(part), caption)]


def _claim(part: Part) -> Told:
    claimed, found = part["claimed_epsilon"], part["epsilon"]
    cards = [
        (up(claimed, digits=4), f"ε claimed: {part['name']}"),
        (_number(found), f"ε of {part['canaries']:,} canaries in {part['participations']} steps"),
    ]
    if found is None:
        return cards, []
    bars = [
        ("claimed", claimed),
        ("proved by guesses", part["guesses"]["epsilon"]),
        ("shown", found),
    ]
    return cards, [(_bars(bars), f"{part['name']}: ε at δ = {up(part['delta'])}.")]


@as_svg
def _bars(axes: Axes, bars: list[tuple[str, float]]) -> None:
    names, values = zip(*bars)
    axes.barh(names, values, color=[MUTED, ACCENT, WARM], height=0.5)
    axes.set(xlabel="ε")


@as_svg
def _roc(axes: Axes, part: Part) -> None:
    x, y = zip(*part["curve"])
    axes.plot([0, 1], [0, 1], color=MUTED, lw=1, ls=":", label="guessing")
    axes.plot(x, y, color=ACCENT, label="attack")
    rates = np.linspace(1e-4, 1 - 1e-4, 200)
    axes.plot(rates, ndtr(ndtri(rates) + part["claimed_mu"]), color=WARM, label="claim allows")
    axes.set(xlabel="false positives", ylabel="members found", xlim=(0, 1), ylim=(0, 1))
    axes.legend(frameon=False)


@as_svg
def _intervals(axes: Axes, parts: list[Part]) -> None:
    claim = parts[0]["claimed_mu"]
    axes.axvline(claim, color=MUTED, lw=2, label="claimed")
    for at, part in enumerate(parts):
        own, colour = part["estimate"], WARM if part["answer"] == "REFUTED" else ACCENT
        ends = [[own["mu"] - own["low"]], [own["high"] - own["mu"]]]
        axes.errorbar([own["mu"]], [at], xerr=ends, fmt="o", ms=4, capsize=4, color=colour)
        axes.plot([part["reachable_mu"]], [at], "|", color=WARM, ms=18)
    labels = [part["attacker"] for part in parts]
    axes.set(xlabel="μ", yticks=range(len(parts)), yticklabels=labels, ylim=(-1, len(parts)))
    axes.set_xlim(0, 1.1 * max(claim, *(part["estimate"]["high"] for part in parts)))
    axes.legend(frameon=False)


def _number(value: float | None) -> str:
    return "∞" if value is None else f"{value:.4g}"


#: Cards and pictures of every kind of finding.
_TELLERS: dict[str, Callable[[Part], Told]] = {
    "plan": _plan,
    "canaries": _canaries,
    "membership": _membership,
    "claim": _claim,
}
