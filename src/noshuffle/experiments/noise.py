"""`noise`: standard deviations of noisy running sums at equal privacy, for every mechanism.

    over steps      one pass, and k passes in the same order           z · ‖row t of A·C⁻¹‖
    single runs     the noise itself, along a run (public seeds)
    over n          10² to 10⁶ steps, beside a lower bound of every mechanism
    memory          buffers that are kept against error
    over ε          correlated noise against sampled DP-SGD: where the lines cross

All values are in units of the clip norm. The bound is ‖A‖_tr/n, the nuclear norm of the prefix sums
over n, with singular values 1/(2 sin((2j−1)π/(4n+2))); up to 1,000 steps the certified one of
`strategies.lower_bound`, which is larger. Nothing is trained and nothing is random but the single
runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from noshuffle.accounting import gaussian
from noshuffle.errors import Unsupported
from noshuffle.experiments.figure import (
    Cell,
    Claim,
    ClaimVerdict,
    Figure,
    Request,
    Results,
    verdict,
)
from noshuffle.experiments.panels import COLOURS, panels, plain_ticks
from noshuffle.participation import Epochs, Participation, Poisson, SinglePass
from noshuffle.plan import Plan
from noshuffle.strategies import error
from noshuffle.strategies.lower_bound import rms_lower_bound

#: Points of a curve over steps that are kept.
POINTS = 200
#: Mechanisms whose single runs, and whose errors over n and ε, are shown.
SHOWN = ("independent noise", "tree, plain", "tree, Honaker", "square root", "BLT")
OVER_EPSILON = ("sampled", "independent noise", "tree, Honaker", "BLT", "BLT, taps")
#: Longest run for which the certified bound is computed here.
CERTIFIED = 1000


def nuclear_bound(n: int) -> float:
    """‖A‖_tr/n of prefix sums: no mechanism has a smaller max or rms error × sensitivity.

    >>> round(nuclear_bound(64), 3), round(nuclear_bound(4096), 3)
    (2.04, 3.35)
    """
    j = np.arange(1, n + 1)
    return float(np.sum(1 / (2 * np.sin((2 * j - 1) * math.pi / (4 * n + 2)))) / n)


def _parts(settings: Mapping[str, Any]) -> dict[str, Participation]:
    passes, steps = settings["epochs"]
    return {
        "one pass": SinglePass(settings["one_pass"]),
        "epochs": Epochs(epochs=passes, steps_per_epoch=steps),
    }


def _over_steps(
    settings: Mapping[str, Any], where: str, options: Mapping[str, Any], results: Results
) -> dict[str, Any]:
    """Noise over the steps of a run, and single runs of it."""
    part = _parts(settings)[where]
    try:
        plan = Plan.fit(part, epsilon=settings["epsilon"], delta=settings["delta"], **options)
        felt = error(plan.strategy, plan.steps).per_step * plan.noise_multiplier
    except Unsupported as refusal:
        return {"refused": str(refusal)}
    at = np.unique(np.linspace(0, plan.steps - 1, POINTS).astype(int))
    return {
        "steps": (at + 1).tolist(),
        "deviation": felt[at].tolist(),
        "max": float(felt.max()),
        "rms": float(np.sqrt(np.mean(felt**2))),
        "noise_multiplier": plan.noise_multiplier,
        "sensitivity": plan.sensitivity.value,
        "buffers": plan.strategy.buffers(plan.steps),
        "strategy": plan.strategy.words(),
        "runs": [_single_run(plan, seed)[at].tolist() for seed in settings["seeds"]],
    }


def _single_run(plan: Plan, seed: int) -> np.ndarray:
    """The noise in the running sum of one coordinate, step by step."""
    noising = plan.strategy.noising(plan.steps)
    draws = np.random.default_rng(seed).standard_normal(noising.shape[1])
    return np.asarray(np.cumsum(noising @ draws) * plan.noise_multiplier)


def _over_n(options: Mapping[str, Any], n: int, results: Results) -> dict[str, float] | None:
    """Error × sensitivity of one pass over n steps; None where no closed form reaches that far."""
    try:
        plan = Plan.fit(SinglePass(n), noise_multiplier=1.0, **options)
        found, reach = error(plan.strategy, n), plan.sensitivity.value
    except Unsupported:
        return None
    return {"max": reach * found.max, "rms": reach * found.rms}


def _bound(n: int, results: Results) -> float:
    return rms_lower_bound(SinglePass(n)) if n <= CERTIFIED else nuclear_bound(n)


def _memory(
    settings: Mapping[str, Any], mechanism: str, buffers: int, results: Results
) -> dict[str, Any]:
    size: dict[str, Any] = {"buffers": buffers} if mechanism == "blt" else {"bands": buffers + 1}
    plan = Plan.fit(_parts(settings)["epochs"], mechanism=mechanism, noise_multiplier=1.0, **size)
    found = error(plan.strategy, plan.steps)
    return {"buffers": buffers, "rms": plan.sensitivity.value * found.rms}


def _over_epsilon(
    settings: Mapping[str, Any], name: str, epsilon: float, results: Results
) -> float:
    """Rms noise over k passes; "sampled" is DP-SGD with Poisson batches of the same mean size."""
    part = _parts(settings)["epochs"]
    if name != "sampled":
        at_one = results[f"epochs/{name}"]
        mu = [
            gaussian.mu(epsilon=e, delta=settings["delta"]) for e in (settings["epsilon"], epsilon)
        ]
        return float(at_one["rms"] * mu[0] / mu[1])
    passes, steps = settings["epochs"]
    sampled = Poisson(passes * steps, 1 / steps)
    plan = Plan.fit(sampled, mechanism="identity", epsilon=epsilon, delta=settings["delta"])
    return plan.noise_multiplier * error(plan.strategy, part.steps).rms


def _cells(asked: Request) -> Sequence[Cell]:
    settings = asked.settings
    kinds: dict[str, dict[str, Any]] = settings["mechanisms"]
    cells = [
        Cell(f"{where}/{name}", partial(_over_steps, settings, where, options), kind=name)
        for where in ("one pass", "epochs")
        for name, options in kinds.items()
    ]
    for n in settings["lengths"]:
        cells.append(Cell(f"length/bound/{n}", partial(_bound, n), kind="bound"))
        for name in SHOWN:
            options = {**({"buffers": 5} if name == "BLT" else {}), **kinds[name]}
            key = f"length/{name}/{n}"
            cells.append(Cell(key, partial(_over_n, options, n), kind="length"))
    for mechanism, sizes in settings["memory"].items():
        for size in sizes:
            work = partial(_memory, settings, mechanism, size)
            cells.append(Cell(f"memory/{mechanism}/{size}", work, kind="memory"))
    for epsilon in settings["epsilons"]:
        for name in [name for name in OVER_EPSILON if name == "sampled" or name in kinds]:
            needs = () if name == "sampled" else (f"epochs/{name}",)
            noise = partial(_over_epsilon, settings, name, epsilon)
            cells.append(Cell(f"epsilon/{name}/{epsilon:g}", noise, 1.0, "epsilon", needs))
    return cells


def _line(results: Results, head: str) -> tuple[list[float], list[Any]]:
    """Sizes and values of all cells `head/size`, in order of size, refusals left out."""
    found = sorted(
        (float(key.rpartition("/")[2]), value)
        for key, value in results.items()
        if key.rpartition("/")[0] == head and value is not None
    )
    return [size for size, _ in found], [value for _, value in found]


def _table(results: Results) -> str:
    lines = [
        "| mechanism | one pass: max | rms | buffers | k passes: max | rms | buffers |",
        "|---|---|---|---|---|---|---|",
    ]
    names = [key.partition("/")[2] for key in results if key.startswith("one pass/")]
    for name in names:
        row = f"| {name} "
        for where in ("one pass", "epochs"):
            found = results.get(f"{where}/{name}", {})
            if "max" in found:
                row += f"| {found['max']:.2f} | {found['rms']:.2f} | {found['buffers']} "
            else:
                row += "| – | – | – "
        lines.append(row + "|")
    lines += ["", "| n | " + " | ".join([*SHOWN, "lower bound"]) + " |", "|---" * 7 + "|"]
    for n, bound in zip(*_line(results, "length/bound")):
        found = [results.get(f"length/{name}/{n:.0f}") for name in SHOWN]
        shown = " | ".join("–" if f is None else f"{f['rms']:.2f}" for f in found)
        lines.append(f"| {n:,.0f} | {shown} | {bound:.2f} |")
    return "\n".join(lines)


STYLES = {
    "independent noise": (COLOURS["identity"], "-"),
    "tree, plain": (COLOURS["tree"], ":"),
    "tree, Honaker": (COLOURS["tree"], "-"),
    "tree, all nodes": (COLOURS["tree"], "--"),
    "square root": ("#7b5aa6", "-"),
    "square root, bands": ("#7b5aa6", "--"),
    "inverse square root, bands": ("#7b5aa6", ":"),
    "banded": ("#8a6d3b", "-"),
    "banded inverse": ("#8a6d3b", ":"),
    "BLT": (COLOURS["blt"], "-"),
    "BLT, taps": (COLOURS["blt"], "--"),
    "BLT, taps, gains": (COLOURS["blt"], ":"),
    "sampled": (COLOURS["poisson"], "-"),
}
TITLES = {"one pass": "one pass", "epochs": "k passes in one order"}
BUFFERED = {"blt": ("BLT", "BLT"), "bsr": ("square root, bands",) * 2, "banded": ("banded",) * 2}


def _draw(results: Results, path: Path) -> None:
    with panels(path, 2, 3, size=(4.2, 3.3)) as axes:
        for axis, where in zip(axes, ("one pass", "epochs")):
            for key, found in results.items():
                name = key.partition("/")[2]
                if key.startswith(f"{where}/") and "steps" in found:
                    colour, style = STYLES[name]
                    axis.plot(found["steps"], found["deviation"], style, color=colour, lw=1,
                              label=name)  # fmt: skip
            axis.set(yscale="log", xlabel="step", ylabel="deviation of the running sum")
            axis.set_title(f"noise over steps, {TITLES[where]}")
        axes[0].legend(fontsize=6, frameon=False, ncols=2, loc="upper left")
        axes[0].set_ylim(top=axes[0].get_ylim()[1] * 6)
        for name in ("independent noise", "tree, Honaker", "BLT"):
            found = results.get(f"one pass/{name}", {})
            for number, run in enumerate(found.get("runs", [])):
                axes[2].plot(found["steps"], run, color=STYLES[name][0], lw=0.8,
                             label="" if number else name)  # fmt: skip
        axes[2].set(title="single runs, one pass", xlabel="step", ylabel="noise in the running sum")
        axes[2].legend(fontsize=7, frameon=False)
        for name in SHOWN:
            n, found = _line(results, f"length/{name}")
            colour, style = STYLES[name]
            label = "BLT, five buffers" if name == "BLT" else name
            axes[3].loglog(n, [f["rms"] for f in found], style, color=colour, lw=1.2, label=label)
        axes[3].loglog(*_line(results, "length/bound"), "--", color=COLOURS["bound"], lw=1,
                       label="lower bound")  # fmt: skip
        axes[3].set(title="one pass", xlabel="steps n", ylabel="rms error × sensitivity")
        axes[3].legend(fontsize=7, frameon=False)
        for mechanism, (style, label) in BUFFERED.items():
            _, found = _line(results, f"memory/{mechanism}")
            sizes, values = [f["buffers"] for f in found], [f["rms"] for f in found]
            axes[4].loglog(sizes, values, "o-", color=STYLES[style][0], ms=3, lw=1, label=label)
        tree = results.get("epochs/tree, Honaker", {})
        if "rms" in tree:
            normal = tree["rms"] / tree["noise_multiplier"] * tree["sensitivity"]
            axes[4].plot(tree["buffers"], normal, "^", color=COLOURS["tree"], label="tree, Honaker")
        axes[4].set(title="memory against error, k passes", xlabel="stored copies of the model",
                    ylabel="rms error × sensitivity")  # fmt: skip
        axes[4].legend(fontsize=7, frameon=False)
        for name in OVER_EPSILON:
            colour, style = STYLES[name]
            label = "DP-SGD, sampled" if name == "sampled" else name
            axes[5].loglog(*_line(results, f"epsilon/{name}"), style, color=colour, label=label)
        plain_ticks(axes[5], _line(results, "epsilon/sampled")[0])
        axes[5].set(title="k passes at equal ε", xlabel="ε", ylabel="rms deviation")
        axes[5].legend(fontsize=7, frameon=False)


def _polylog(results: Results) -> ClaimVerdict:
    grown = {}
    for name in ("independent noise", "tree, plain"):
        n, found = _line(results, f"length/{name}")
        if len(n) < 2:
            raise KeyError(f"length/{name}")
        grown[name] = found[-1]["max"] / found[0]["max"]
    allowed, root = (math.log(n[-1]) / math.log(n[0])) ** 1.5, math.sqrt(n[-1] / n[0])
    return verdict(
        grown["tree, plain"] <= allowed and abs(grown["independent noise"] / root - 1) < 0.01,
        f"from n = {n[0]:,.0f} to {n[-1]:,.0f} the largest noise grows ×{grown['tree, plain']:.2f} "
        f"with a tree (log^1.5: ×{allowed:.1f}), ×{grown['independent noise']:.0f} without",
    )


def _honaker(results: Results) -> ClaimVerdict:
    plain, other = (results[f"one pass/tree, {v}"] for v in ("plain", "Honaker"))
    share = np.array(other["deviation"]) / np.array(plain["deviation"])
    return verdict(
        bool(np.all(share <= 1)),
        f"deviation {share.min():.2f} to {share.max():.2f} of the plain tree's, rms "
        f"{other['rms']:.2f} against {plain['rms']:.2f}",
    )


def _crossing(name: str, results: Results) -> ClaimVerdict:
    sizes, own = _line(results, f"epsilon/{name}")
    _, sampled = _line(results, "epsilon/sampled")
    if len(sizes) < 2 or len(own) != len(sampled):
        raise KeyError(f"epsilon/{name}")
    wins = [e for e, a, b in zip(sizes, own, sampled) if a < b]
    pairs = ", ".join(f"ε {e:g}: {a:.1f} / {b:.1f}" for e, a, b in zip(sizes, own, sampled))
    is_crossed = bool(wins) and sizes[0] not in wins and sizes[-1] in wins
    return verdict(is_crossed, f"{name} / sampled DP-SGD: {pairs}")


def _near_bound(results: Results) -> ClaimVerdict:
    n, found = _line(results, "length/BLT")
    _, bounds = _line(results, "length/bound")
    if not n or len(n) != len(bounds):
        raise KeyError("length/BLT")
    above = [f["rms"] / b - 1 for f, b in zip(found, bounds)]
    return verdict(
        max(above) <= 0.05,
        f"{100 * min(above):.1f} to {100 * max(above):.1f} % above it, at n = {n[0]:,.0f} to "
        f"{n[-1]:,.0f}",
    )


FIGURE = Figure(
    name="noise",
    title="noise of running sums at equal privacy",
    cells=_cells,
    table=_table,
    draw=_draw,
    claims=(
        Claim(
            "the noise of a tree grows polylogarithmically, that of DP-SGD like √n",
            "section 3",
            _polylog,
        ),
        Claim("Honaker's estimate is never noisier than the plain tree", "appendix B.1", _honaker),
        Claim(
            "DP-FTRL has less noise than amplified DP-SGD at large ε, more at small ε",
            "sections 1 and 5",
            partial(_crossing, "tree, Honaker"),
        ),
        Claim("a BLT crosses amplified DP-SGD too", "this library", partial(_crossing, "BLT")),
        Claim(
            "constant memory: five buffers stay within 5 % of the lower bound",
            "this library",
            _near_bound,
        ),
    ),
)
