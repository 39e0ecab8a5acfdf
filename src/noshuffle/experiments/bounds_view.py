"""Table, picture and claims of `bounds`, from its results alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from noshuffle.convex.rates import fitted_slope
from noshuffle.experiments.figure import Claim, ClaimVerdict, Results, verdict
from noshuffle.experiments.panels import COLOURS, line, markdown, panels, plain_ticks

STREAM = ("DP-FTRL, BLT", "DP-FTRL, tree", "DP-SGD, row by row", "DP-SGD, batches")
AXES = {"n": "lengths", "d": "dimensions", "epsilon": "epsilons"}
#: Least share of the private term in the bound of a size that counts for its slope.
PRIVATE = 0.8
L_P = ("Frank–Wolfe, naive", "Frank–Wolfe, tree", "l1 Frank–Wolfe")


def _both(results: Results, head: str) -> tuple[list[float], list[float], list[float]]:
    x, measured = line(results, head, "mean", least=2)
    return x, measured, line(results, head, "bound")[1]


def table(results: Results) -> str:
    keys = [key.rpartition("/") for key in results if key != "statements"]
    rows = []
    for head, _, value in sorted(keys, key=lambda key: (key[0], float(key[2]))):
        found = results[f"{head}/{value}"]
        at = f"{head.partition('/')[0] if '/' in head else 'n'} = {value}"
        told = ("–" if (v := found[k]) is None else f"{v:.4f}" for k in ("deviation", "bound"))
        rows.append((head.partition("/")[2] or head, at, f"{found['mean']:.4f}", *told))
    lines = [*markdown(("", "at", "measured", "±", "proved bound"), rows), ""]
    statements = []
    for s in results.get("statements", []):
        number = f"O({s['order']:.3g})" if s["value"] is None else f"≤ {s['value']:.3g}"
        if s["name"].endswith("lower bound"):
            number = number.replace("O(", "Ω(")
        statements.append((s["name"], s["quantity"], number, s["conditions"], s["source"]))
    heads = ("statement", "quantity", "number", "conditions", "source")
    return "\n".join(lines + markdown(heads, statements))


STYLES = {
    "DP-FTRL, BLT": COLOURS["blt"],
    "DP-FTRL, tree": COLOURS["tree"],
    "DP-SGD, row by row": COLOURS["identity"],
    "DP-SGD, batches": COLOURS["poisson"],
    "Frank–Wolfe, naive": COLOURS["identity"],
    "Frank–Wolfe, tree": COLOURS["blt"],
    "l1 Frank–Wolfe": COLOURS["tree"],
}
SLOPES = {"n": -0.5, "d": 0.25, "epsilon": -0.5}


def _slope_line(axis: Any, x: Sequence[float], y: Sequence[float], slope: float, text: str) -> None:
    """The direction of a theorem inside O(·), through the first measured point."""
    line = [y[0] * (value / x[0]) ** slope for value in x]
    axis.loglog(x, line, ":", color=COLOURS["bound"], lw=1, label=text)


def draw(results: Results, path: Path) -> None:
    with panels(path, 2, 3, size=(4.2, 3.4)) as axes:
        for axis, name in zip(axes, AXES):
            for title in STREAM:
                x, y = line(results, f"{name}/{title}", "mean")
                axis.loglog(x, y, "o-", color=STYLES[title], ms=3, lw=1, label=title)
                bound = line(results, f"{name}/{title}", "bound")
                axis.loglog(*bound, "--", color=STYLES[title], lw=0.8)
            x, y = line(results, f"{name}/DP-FTRL, BLT", "mean")
            if x:
                _slope_line(axis, x, y, SLOPES[name], f"slope of Theorem 4.1: {SLOPES[name]:+g}")
            axis.set(title=f"regret over {name}", xlabel=name, ylabel="regret per row")
            plain_ticks(axis, x)
        axes[0].legend(fontsize=6, frameon=False, title="dashed: proved bound", title_fontsize=6)
        x, y = line(results, "risk", "mean")
        axes[3].loglog(x, y, "o-", color=COLOURS["blt"], ms=3, label="DP-FTRL, average iterate")
        axes[3].loglog(*line(results, "risk", "bound"), "--", color=COLOURS["blt"],
                       label="proved, probability 0.95")  # fmt: skip
        if x:
            _slope_line(axes[3], x, y, -0.5, "slope of Corollary 4.2: −0.5")
        axes[3].set(title="excess risk", xlabel="n")
        for head, colour, slope, text in (
            ("squares", COLOURS["blt"], -1.0, "Theorem 4.3 (privacy)"),
            ("n/DP-FTRL, BLT", "0.5", -0.5, "Theorem 4.1"),
        ):
            x, y = line(results, head, "mean")
            title = "least squares" if head == "squares" else "general convex"
            axes[4].loglog(x, y, "o-", color=colour, ms=3, label=title)
            if x:
                _slope_line(axes[4], x, y, slope, f"slope of {text}: {slope:+g}")
        axes[4].set(title="least squares against general convex", xlabel="n", ylabel="regret")
        for title, slope in zip(L_P, (-0.75, -1.0, -2 / 3)):
            x, y = line(results, f"l_p/{title}", "mean")
            axes[5].loglog(x, y, "o-", color=STYLES[title], ms=3, label=title)
            if x:
                _slope_line(axes[5], x, y, slope, f"{slope:+.2f}")
        axes[5].set(title="l_p: excess at the hardest problem", xlabel="n")
        for axis, head in zip(axes[3:], ("risk", "squares", f"l_p/{L_P[0]}")):
            plain_ticks(axis, line(results, head)[0])
            axis.legend(fontsize=6, frameon=False)


def _below(heads: Sequence[str], results: Results) -> ClaimVerdict:
    """Whether every mean lies below its proved bound, and by how much."""
    shares = []
    for head in heads:
        _, measured, bound = _both(results, head)
        shares += [m / b for m, b in zip(measured, bound)]
    return verdict(
        max(shares) <= 1,
        f"measured is {100 * min(shares):.0f} to {100 * max(shares):.0f} % of the bound, "
        f"{len(shares)} sizes",
    )


def _private(results: Results, head: str) -> tuple[list[float], list[float]]:
    """Sizes and means at which the private term decides."""
    x, y, _ = _both(results, head)
    kept = [s >= PRIVATE for s in line(results, head, "private")[1]]
    if sum(kept) < 2:
        raise KeyError(f"{head} where privacy decides")
    return [v for v, k in zip(x, kept) if k], [v for v, k in zip(y, kept) if k]


def _slopes(results: Results) -> ClaimVerdict:
    found = {a: fitted_slope(*_private(results, f"{a}/DP-FTRL, BLT")) for a in SLOPES}
    told = ", ".join(f"{a}: {s:+.2f} (theory {SLOPES[a]:+g})" for a, s in found.items())
    return verdict(all(abs(s - SLOPES[a]) <= 0.1 for a, s in found.items()), told)


def _against_sgd(name: str, results: Results) -> ClaimVerdict:
    d, ours, _ = _both(results, "d/DP-FTRL, BLT")
    _, other, _ = _both(results, f"d/{name}")
    pairs = ", ".join(f"d = {x:g}: {a:.3f} / {b:.3f}" for x, a, b in zip(d, ours, other))
    return verdict(ours[-1] < other[-1], f"DP-FTRL / {name}: {pairs}")


def _squares_faster(results: Results) -> ClaimVerdict:
    found = fitted_slope(*line(results, "squares", "mean", least=2))
    general = fitted_slope(*_both(results, "n/DP-FTRL, BLT")[:2])
    return verdict(found < general - 0.2, f"slopes {found:+.2f} and {general:+.2f}")


def _tree_faster(results: Results) -> ClaimVerdict:
    slopes = {n: fitted_slope(*line(results, f"l_p/{n}", "mean", least=2)) for n in L_P[:2]}
    told = ", ".join(f"{name}: {slope:+.2f}" for name, slope in slopes.items())
    return verdict(slopes[L_P[1]] < slopes[L_P[0]], told)


CLAIMS = (
    Claim("regret scales with n^-1/2, d^1/4 and ε^-1/2 (within 0.1)", "Theorem 4.1", _slopes),
    Claim(
        "regret of DP-FTRL stays below its bound with constants",
        "Theorem 4.1, constants of docs/proofs-convex.md",
        partial(_below, [f"{a}/{n}" for a in AXES for n in STREAM[:2]]),
    ),
    Claim(
        "the risk of the average iterate stays below its bound",
        "Corollary 4.2, constants of docs/proofs-convex.md",
        partial(_below, ["risk"]),
    ),
    Claim(
        "DP-FTRL has less regret than unamplified DP-SGD in high dimension, row by row",
        "Table 1",
        partial(_against_sgd, "DP-SGD, row by row"),
    ),
    Claim(
        "… and than unamplified DP-SGD with batches of z√d rows",
        "not claimed by the paper",
        partial(_against_sgd, "DP-SGD, batches"),
    ),
    Claim("least squares are learned faster", "Theorem 4.3", _squares_faster),
    Claim(
        "a tree falls faster in n than fresh noise in every step",
        "Bassily, Guzmán, Nandi 2021",
        _tree_faster,
    ),
)
