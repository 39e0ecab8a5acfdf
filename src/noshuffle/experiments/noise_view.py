"""Table, picture and claims of `noise`, from its results alone."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np

from noshuffle.experiments.figure import Claim, ClaimVerdict, Results, verdict
from noshuffle.experiments.panels import COLOURS, line, markdown, panels, plain_ticks

#: Points of a curve over steps that are kept.
POINTS = 200
#: Mechanisms whose single runs, and whose errors over n and ε, are shown.
SHOWN = ("independent noise", "tree, plain", "tree, Honaker", "square root", "BLT")
OVER_EPSILON = ("sampled", "independent noise", "tree, Honaker", "BLT", "BLT, taps")


def table(results: Results) -> str:
    rows = []
    for name in (key.partition("/")[2] for key in results if key.startswith("one pass/")):
        cells = [name]
        for where in ("one pass", "epochs"):
            found = results.get(f"{where}/{name}", {})
            told = [f"{found[k]:.2f}" for k in ("max", "rms")] if "max" in found else ["–", "–"]
            cells += [*told, str(found.get("buffers", "–"))]
        rows.append(cells)
    heads = (
        "mechanism",
        *("one pass: max", "rms", "buffers"),
        *("k passes: max", "rms", "buffers"),
    )
    lines, rows = [*markdown(heads, rows), ""], []
    for n, bound in zip(*line(results, "length/bound")):
        each = [results.get(f"length/{name}/{n:.0f}") for name in SHOWN]
        shown = ["–" if f is None else f"{f['rms']:.2f}" for f in each]
        rows.append([f"{n:,.0f}", *shown, f"{bound:.2f}"])
    return "\n".join(lines + markdown(("n", *SHOWN, "lower bound"), rows))


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


def draw(results: Results, path: Path) -> None:
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
            n, found = line(results, f"length/{name}")
            colour, style = STYLES[name]
            label = "BLT, five buffers" if name == "BLT" else name
            axes[3].loglog(n, [f["rms"] for f in found], style, color=colour, lw=1.2, label=label)
        axes[3].loglog(*line(results, "length/bound"), "--", color=COLOURS["bound"], lw=1,
                       label="lower bound")  # fmt: skip
        axes[3].set(title="one pass", xlabel="steps n", ylabel="rms error × sensitivity")
        axes[3].legend(fontsize=7, frameon=False)
        for mechanism, (style, label) in BUFFERED.items():
            _, found = line(results, f"memory/{mechanism}")
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
            axes[5].loglog(*line(results, f"epsilon/{name}"), style, color=colour, label=label)
        plain_ticks(axes[5], line(results, "epsilon/sampled")[0])
        axes[5].set(title="k passes at equal ε", xlabel="ε", ylabel="rms deviation")
        axes[5].legend(fontsize=7, frameon=False)


def _polylog(results: Results) -> ClaimVerdict:
    grown = {}
    for name in ("independent noise", "tree, plain"):
        n, found = line(results, f"length/{name}", least=2)
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
    sizes, own = line(results, f"epsilon/{name}")
    _, sampled = line(results, "epsilon/sampled")
    if len(sizes) < 2 or len(own) != len(sampled):
        raise KeyError(f"epsilon/{name}")
    wins = [e for e, a, b in zip(sizes, own, sampled) if a < b]
    pairs = ", ".join(f"ε {e:g}: {a:.1f} / {b:.1f}" for e, a, b in zip(sizes, own, sampled))
    is_crossed = bool(wins) and sizes[0] not in wins and sizes[-1] in wins
    return verdict(is_crossed, f"{name} / sampled DP-SGD: {pairs}")


def _near_bound(results: Results) -> ClaimVerdict:
    n, found = line(results, "length/BLT")
    _, bounds = line(results, "length/bound")
    if not n or len(n) != len(bounds):
        raise KeyError("length/BLT")
    above = [f["rms"] / b - 1 for f, b in zip(found, bounds)]
    return verdict(
        max(above) <= 0.05,
        f"{100 * min(above):.1f} to {100 * max(above):.1f} % above it, at n = {n[0]:,.0f} to "
        f"{n[-1]:,.0f}",
    )


CLAIMS = (
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
)
