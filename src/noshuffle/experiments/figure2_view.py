"""Table, picture and claims of `figure2`, from its results alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from noshuffle.experiments.figure import (
    DIFFERS,
    HOLDS,
    NOT_TESTED,
    Claim,
    ClaimVerdict,
    Results,
    deviation,
    not_tested,
    verdict,
)
from noshuffle.experiments.panels import COLOURS, legend_below, markdown, panels, plain_ticks

TITLES = {
    "blt": "DP-FTRL, BLT",
    "tree": "DP-FTRL, tree",
    "identity": "DP-FedAvg, not amplified",
    "sampled": "DP-FedAvg, sampled",
}
PAINT = {**COLOURS, "sampled": COLOURS["poisson"]}
LARGEST_EPSILON = 200  # of those drawn


def heads(results: Results) -> list[str]:
    """The tasks that results are there of."""
    return [key.partition("/")[0] for key in results if key.endswith("/mechanisms")]


def curve(results: Results, head: str, name: str) -> tuple[list[dict[str, float]], int]:
    """Noise multiplier, ε, mean accuracy and its deviation at every point; and how many seeds."""
    made, found = results[f"{head}/mechanisms"][name], _finals(results, head, name)
    mean, spread = np.mean(found, 0).tolist(), [deviation(own) for own in zip(*found)]
    points = [
        {"noise": z, "epsilon": math.inf if e is None else e, "accuracy": a, "deviation": s}
        for z, e, a, s in zip(made["noise"], made["epsilon"], mean, spread)
    ]
    return points, len(found)


def _finals(results: Results, head: str, name: str) -> list[list[float]]:
    """Accuracies of every seed."""
    start = f"{head}/final/{name}/"
    found = [value["accuracy"] for key, value in results.items() if key.startswith(start)]
    if not found:
        raise KeyError(start)
    return found


def computed(results: Results, head: str) -> list[dict[str, Any]]:
    """The lines of 2c, from as many trials as there are; none before the first."""
    start = f"{head}/computation/"
    trials = [int(key.removeprefix(start)) for key in results if key.startswith(start)]
    lines: list[dict[str, Any]] = results[f"{start}{max(trials)}"] if trials else []
    return lines


def at_epsilon(points: Sequence[dict[str, float]], epsilon: float) -> float | None:
    """Accuracy at ε, between trained points (linear in log ε); None beyond them."""
    known = sorted((p["epsilon"], p["accuracy"]) for p in points if math.isfinite(p["epsilon"]))
    if not known or not known[0][0] <= epsilon <= known[-1][0]:
        return None
    logs, accuracy = zip(*((math.log(e), a) for e, a in known))
    return float(np.interp(math.log(epsilon), logs, accuracy))


def _epsilon(point: Mapping[str, Any]) -> str:
    return "∞" if point["epsilon"] is None else f"{point['epsilon']:.2f}"


def table(results: Results) -> str:
    lines = []
    for head in heads(results):
        lines += [f"**{head}**: accuracy in % at ε (between trained points)", ""]
        grid = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
        rows: list[tuple[object, ...]] = []
        for name, title in TITLES.items():
            with suppress(KeyError):
                points, trials = curve(results, head, name)
                found = (at_epsilon(points, e) for e in grid)
                rows.append((title, trials, *("–" if a is None else f"{a:.2f}" for a in found)))
        lines += markdown(("mechanism", "trials", *(f"ε = {e:g}" for e in grid)), rows)
        with suppress(KeyError):
            lines += ["", f"without noise {np.mean(_finals(results, head, 'none')):.2f} %"]
        rows = []
        for one in computed(results, head):
            told = ", ".join(f"{p['clients']}: {_epsilon(p)}" for p in one["points"])
            target = f"{one['target']} ({one['accuracy']:.2f} %)"
            rows.append((target, TITLES[one["mechanism"]], told or "not reached"))
        for key, one in results.items():
            if key.startswith(f"{head}/cohort/") and one:
                told = f"{one['clients']}: {one['accuracy']:.2f} % at ε = {_epsilon(one)}"
                title = TITLES[key.split("/")[2]]
                rows.append((f"trained for {one['wanted']:.2f} %", title, told))
        lines += ["", *markdown(("target", "mechanism", "ε at clients a round"), rows), ""]
    return "\n".join(lines) or "nothing is trained yet"


def draw(results: Results, path: Path) -> None:
    """One row a task: 2a, 2b and 2c."""
    shown = heads(results)
    if not shown:
        return
    with panels(path, len(shown), 3, size=(4.2, 4.0)) as axes:
        for row, head in enumerate(shown):
            over_epsilon, over_noise, computation = axes[3 * row : 3 * row + 3]
            _accuracy(over_epsilon, over_noise, results, head)
            _computation(computation, results, head)


def _accuracy(over_epsilon: Any, over_noise: Any, results: Results, head: str) -> None:
    for name, title in TITLES.items():
        try:
            points = curve(results, head, name)[0]
        except KeyError:
            continue
        style = {"color": PAINT[name], "ms": 3, "lw": 1, "capsize": 2, "fmt": "o-"}
        shown = [p for p in points if p["epsilon"] <= LARGEST_EPSILON]
        for axis, x, some in ((over_epsilon, "epsilon", shown), (over_noise, "noise", points)):
            across, up, bars = ([p[k] for p in some] for k in (x, "accuracy", "deviation"))
            axis.errorbar(across, up, bars, label=title, **style)
    with suppress(KeyError):
        level = float(np.mean(_finals(results, head, "none")))
        for axis in (over_epsilon, over_noise):
            axis.axhline(level, color="0.5", ls="--", lw=1, label="no noise")
    over_epsilon.set(xscale="log", xlabel="ε of a user", ylabel="accuracy, %", title=f"2a: {head}")
    legend_below(over_epsilon)
    over_noise.set(xscale="log", xlabel="noise multiplier", title="2b: over noise multipliers")


def _computation(axis: Any, results: Results, head: str) -> None:
    lines = computed(results, head)
    words = list(dict.fromkeys(line["target"] for line in lines if line["points"]))
    dashes = {word: ("-", "--", ":", "-.")[i % 4] for i, word in enumerate(words)}
    for one in lines:
        known = [p for p in one["points"] if p["epsilon"] is not None]
        if known:
            across, up = ([p[k] for p in known] for k in ("clients", "epsilon"))
            colour = PAINT[one["mechanism"]]
            axis.loglog(across, up, dashes[one["target"]], color=colour, lw=1)
    for word in words:
        axis.plot([], [], dashes[word], color="0.3", label=word)
    trained = set()
    for key, found in results.items():
        if key.startswith(f"{head}/cohort/") and found and found["epsilon"]:
            colour = PAINT[key.split("/")[2]]
            full = colour if found["accuracy"] >= found["wanted"] else "white"
            axis.plot(found["clients"], found["epsilon"], "o", color=colour, mfc=full, ms=5)
            trained.add(full != "white")
    for is_met in sorted(trained, reverse=True):
        words_of = "trained, accuracy met" if is_met else "trained, not met"
        axis.plot([], [], "o", color="0.3", mfc="0.3" if is_met else "white", ms=5, label=words_of)
    axis.set(xlabel="clients a round", ylabel="ε of a user", title="2c: at equal accuracy")
    if words:
        plain_ticks(axis, sorted({p["clients"] for line in lines for p in line["points"]}))
        legend_below(axis)


def _lines(results: Results, head: str, word: str) -> dict[str, dict[str, Any]]:
    found = computed(results, head)
    if not found:
        raise KeyError(f"{head}/computation")
    return {line["mechanism"]: line for line in found if line["target"].startswith(word)}


def _everywhere(decide: Callable[[Results, str], ClaimVerdict], results: Results) -> ClaimVerdict:
    """The claim on every task: it holds if it holds on all that tested it."""
    found = {}
    for head in heads(results):
        try:
            found[head] = decide(results, head)
        except KeyError as error:
            found[head] = not_tested(f"no result of {error.args[0]}")
    if not found:
        raise KeyError("mechanisms")
    words = {one.word for one in found.values()} - {NOT_TESTED}
    word = NOT_TESTED if not words else DIFFERS if DIFFERS in words else HOLDS
    many = len(found) > 1
    told = [f"{head} {one.word}, {one.figures}" if many else one.figures
            for head, one in found.items()]  # fmt: skip
    return ClaimVerdict(word, "; ".join(told))


def _tolerates(results: Results, head: str) -> ClaimVerdict:
    told, wins = [], []
    made = results[f"{head}/mechanisms"]
    clients = {}
    for word in ("2.6 %", "8.6 %"):
        lines = _lines(results, head, word)
        for name in ("tree", "sampled"):
            level = lines[name]["level"]
            if level is None:
                return not_tested(f"{word}: {TITLES[name]} was not trained near this target")
            one = made[name]
            clients[name] = level * one["noise"][0] / one["level"][0]
        wins.append(clients["tree"] > clients["sampled"])
        told.append(f"{word} below: z = {clients['tree']:.3g} against {clients['sampled']:.3g}")
    return verdict(all(wins), "; ".join(told))


def _above(
    name: str, other: str, epsilons: Sequence[float], results: Results, head: str
) -> tuple[list[bool], str]:
    """At which of these ε a line is above another, as far as both were trained there."""
    own, beside = (curve(results, head, n)[0] for n in (name, other))
    pairs = [(e, at_epsilon(own, e), at_epsilon(beside, e)) for e in epsilons]
    known = [(e, a, b) for e, a, b in pairs if a is not None and b is not None]
    return [a > b for _, a, b in known], ", ".join(
        f"ε {e:g}: {a:.2f} / {b:.2f}" for e, a, b in known
    )


def _large_epsilon(results: Results, head: str) -> ClaimVerdict:
    found, told = _above("tree", "sampled", (2.0, 4.0, 8.0, 16.0, 19.0), results, head)
    return verdict(found[-1], f"tree / sampled: {told}") if found else _NOWHERE


def _unamplified(name: str, results: Results, head: str) -> ClaimVerdict:
    found, told = _above(name, "identity", (1.0, 2.0, 4.0, 8.0, 16.0), results, head)
    return verdict(all(found), f"{name} / not amplified: {told}") if found else _NOWHERE


_NOWHERE = not_tested("no ε was trained for both")


def _cheaper(results: Results, head: str) -> ClaimVerdict:
    lines = _lines(results, head, "2.6 %")
    found = {}
    for name in ("tree", "sampled", "blt"):
        points = lines[name]["points"]
        if not points:
            return not_tested(f"2.6 %: {TITLES[name]} was not trained near this target")
        found[name] = math.inf if points[0]["epsilon"] is None else points[0]["epsilon"]
    told = ", ".join(f"{TITLES[n]}: ε = {e:.2f}" for n, e in found.items())
    first = lines["tree"]["points"][0]["clients"]
    return verdict(found["tree"] < found["sampled"], f"{first} clients a round, {told}")


CLAIMS = (
    Claim(
        "DP-FTRL reaches the targets with larger noise multipliers than DP-SGD",
        "figure 2b: 0.149 and 0.387 against 0.007 and 0.015",
        partial(_everywhere, _tolerates),
    ),
    Claim(
        "DP-FTRL is above amplified DP-SGD at large ε",
        "figure 2a: 19.74 against 18.89 % at ε ≈ 19",
        partial(_everywhere, _large_epsilon),
    ),
    Claim(
        "DP-FTRL is above DP-SGD without amplification at every ε",
        "section 5.3",
        partial(_everywhere, partial(_unamplified, "tree")),
    ),
    Claim(
        "near full accuracy, with few clients a round, DP-FTRL needs less ε than amplified DP-SGD",
        "figure 2c",
        partial(_everywhere, _cheaper),
    ),
    Claim(
        "a BLT is above DP-SGD without amplification at every ε",
        "this library",
        partial(_everywhere, partial(_unamplified, "blt")),
    ),
)
