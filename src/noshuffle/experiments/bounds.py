"""`bounds`: what theory promises beside what our solvers reach, over n, d and ε.

    stream     regret on a linear stream whose rows are all alike: the hardest kind for noise
               (`convex.solvers.experiments.travel`), DP-FTRL with a BLT and with a tree, DP-SGD
               without amplification row by row and in batches of z√d
    risk       excess risk of DP-FTRL's average iterate, rows x = g/2 + u/2 with u on the sphere;
               the risk of a model is known exactly
    squares    regret of DP-FTRL-LS on linear data with small noise
    l_p        noisy Frank–Wolfe with and without a tree (p = 2), l1 Frank–Wolfe (p = 1)

Bounds with constants are drawn as they stand. A theorem inside O(·) has no number: its line is
drawn through the first measured point, and shows the slope alone. Slopes in n, d and ε are those of
the private term: they are fitted where it is over four fifths of the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from noshuffle import theory
from noshuffle.convex import losses, solvers
from noshuffle.convex.rates import fitted_slope
from noshuffle.convex.solvers import experiments
from noshuffle.convex.solvers.domains import Ball
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
from noshuffle.participation import SinglePass
from noshuffle.plan import Plan
from noshuffle.strategies import error
from noshuffle.theory import Sizes, l_p

#: Rows of one step of DP-FTRL.
BATCH = 8
STREAM = ("DP-FTRL, BLT", "DP-FTRL, tree", "DP-SGD, row by row", "DP-SGD, batches")
AXES = {"n": "lengths", "d": "dimensions", "epsilon": "epsilons"}
#: Runs of DP-SGD row by row, a step of Python each, end here, and have fewer seeds.
LONGEST, FEW = 16384, 2
#: Least share of the private term in the bound of a size that counts for its slope.
PRIVATE = 0.8
L_P = ("Frank–Wolfe, naive", "Frank–Wolfe, tree", "l1 Frank–Wolfe")


def _solve(name: str, sizes: Sizes, x: Any, seed: int) -> tuple[Any, int, theory.Bound]:
    """A run on the unit ball with a linear loss, its batch size, and its bound in expectation."""
    given: dict[str, Any] = {"mechanism": "blt"}
    batch = BATCH
    if name.startswith("DP-SGD"):
        batch = 1 if name.endswith("row by row") else theory.best_batch(sizes)
        bound = theory.sgd_regret(sizes, batch_size=batch)
        # λ = G√T/R: then R√T·G is n times the bound.
        given = {"mechanism": "identity", "regularization": bound.order * sizes.n}
    else:
        given["mechanism"] = "tree" if name.endswith("tree") else "blt"
        plan = Plan.fit(
            SinglePass(-(-sizes.n // batch)),
            mechanism=given["mechanism"],
            epsilon=sizes.epsilon,
            delta=sizes.delta,
        )
        spread = plan.noise_multiplier * error(plan.strategy, plan.steps).max
        bound = theory.ftrl_regret(sizes, spread=spread, batch_size=batch, expected=True)
    run = solvers.ftrl(
        losses.linear(), x, None, epsilon=sizes.epsilon, delta=sizes.delta, domain=Ball(1.0),
        batch_size=batch, test_seed=seed, **given,
    )  # fmt: skip
    return run, batch, bound


def _stream(name: str, sizes: Sizes, seeds: Sequence[int], results: Results) -> dict[str, Any]:
    """Mean regret against the best fixed model, every row the same."""
    g = np.full(sizes.d, 1 / math.sqrt(sizes.d))
    x = np.broadcast_to(g, (sizes.n, sizes.d))
    found = []
    for seed in seeds:
        run, batch, bound = _solve(name, sizes, x, seed)
        played = np.repeat(run.iterates @ g, batch)[: sizes.n]
        found.append(theory.regret(played.tolist(), [-1.0] * sizes.n))
    return _record(found, bound)


def _risk(sizes: Sizes, seeds: Sequence[int], results: Results) -> dict[str, Any]:
    """Excess risk of the average iterate on fresh rows: exact, as the mean row is known."""
    found = []
    for seed in seeds:
        u = np.random.default_rng((seed, sizes.n)).standard_normal((sizes.n, sizes.d))
        x = 0.5 * u / np.linalg.norm(u, axis=1, keepdims=True)
        x[:, 0] += 0.5
        run, _, _ = _solve("DP-FTRL, BLT", sizes, x, seed)
        found.append(0.5 * float(run.weights[0]) + 0.5)
    plan = Plan.fit(SinglePass(sizes.n // BATCH), mechanism="blt", epsilon=sizes.epsilon,
                    delta=sizes.delta)  # fmt: skip
    spread = plan.noise_multiplier * error(plan.strategy, plan.steps).max
    return _record(found, theory.ftrl_risk(sizes, spread=spread, batch_size=BATCH))


def _record(found: Sequence[float], bound: theory.Bound | None) -> dict[str, Any]:
    spread = float(np.std(found, ddof=1)) if len(found) > 1 else None
    record = {"mean": float(np.mean(found)), "deviation": spread, "all": list(found), "bound": None}
    if bound is not None:
        record |= {"bound": bound.value, "private": bound.terms["privacy"] / bound.order}
    return record


def _squares(sizes: Sizes, seeds: Sequence[int], results: Results) -> dict[str, Any]:
    fn = experiments.least_squares_regret
    return _record([fn(sizes.n, d=sizes.d, epsilon=sizes.epsilon, seed=s) for s in seeds], None)


def _l_p(name: str, n: int, seeds: Sequence[int], results: Results) -> dict[str, Any]:
    if name == "l1 Frank–Wolfe":
        fn: Callable[..., float] = partial(
            experiments.hardest_l1_excess, d=100, solver="tree", epsilon=2.0
        )
    else:
        fn = partial(experiments.frank_wolfe_excess, aggregation=name.rpartition(" ")[2])
    return _record([fn(n, seed=seed) for seed in seeds], None)


def _sizes(settings: Mapping[str, Any], **other: Any) -> Sizes:
    return Sizes(**{name: settings[name] for name in ("n", "d", "epsilon", "delta")} | other)


def _cells(asked: Request) -> Sequence[Cell]:
    settings = asked.settings
    seeds = settings["seeds"][: asked.trials]
    cells = []
    for axis, values in AXES.items():
        for value in settings[values]:
            sizes = _sizes(settings, **{axis: value})
            for name in STREAM:
                is_slow = name == "DP-SGD, row by row"
                if is_slow and sizes.n > LONGEST:
                    continue
                work = partial(_stream, name, sizes, seeds[:FEW] if is_slow else seeds)
                cells.append(Cell(f"{axis}/{name}/{value:g}", work, sizes.n, name))
    for n in settings["lengths"]:
        sizes = _sizes(settings, n=n)
        cells.append(Cell(f"risk/{n}", partial(_risk, sizes, seeds), n, "risk"))
        cells.append(Cell(f"squares/{n}", partial(_squares, sizes, seeds), n, "squares"))
    for n in settings["l_p_lengths"]:
        for name in L_P:
            cells.append(Cell(f"l_p/{name}/{n}", partial(_l_p, name, n, seeds[:FEW]), n, name))
    sizes = _sizes(settings)
    cells.append(Cell("statements", lambda results: _statements(sizes)))
    return cells


def _statements(sizes: Sizes) -> list[dict[str, Any]]:
    """Every bound at the sizes of the settings, with its conditions."""
    found = [
        *theory.table_1(sizes),
        theory.theorem_4_1(sizes),
        theory.ftrl_regret(sizes),
        theory.corollary_4_2(sizes),
        theory.ftrl_risk(sizes),
        theory.theorem_4_3(sizes),
        theory.sgd_regret(sizes),
        theory.sgd_regret(sizes, batch_size=theory.best_batch(sizes)),
    ]
    for p in (1.0, 1.5, 2.0, math.inf):
        found += [replace(b, name=f"l_p, p = {p:g}: {b.name}") for b in l_p.convex(sizes, p=p)]
    for p in (1.0, 2.0):
        found.append(replace(l_p.nonconvex(sizes, p=p), name=f"nonconvex, p = {p:g}"))
    found.append(l_p.weakly_convex(sizes))
    return [
        {
            "name": bound.name,
            "quantity": bound.quantity,
            "value": bound.value,
            "order": bound.order,
            "conditions": "; ".join(bound.conditions),
            "source": bound.source,
        }
        for bound in found
    ]


def _line(results: Results, head: str, field: str = "mean") -> tuple[list[float], list[float]]:
    found = sorted(
        (float(key.rpartition("/")[2]), value[field])
        for key, value in results.items()
        if key.rpartition("/")[0] == head
    )
    return [x for x, _ in found], [y for _, y in found]


def _both(results: Results, head: str) -> tuple[list[float], list[float], list[float]]:
    x, measured = _line(results, head)
    if len(x) < 2:
        raise KeyError(head)
    return x, measured, _line(results, head, "bound")[1]


def _table(results: Results) -> str:
    lines = ["| | at | measured | ± | proved bound |", "|---|---|---|---|---|"]
    keys = [key for key in results if key != "statements"]
    for key in sorted(keys, key=lambda k: (k.rpartition("/")[0], float(k.rpartition("/")[2]))):
        found = results[key]
        head, _, value = key.rpartition("/")
        spread = "–" if found["deviation"] is None else f"{found['deviation']:.4f}"
        bound = "–" if found["bound"] is None else f"{found['bound']:.4f}"
        at = f"{head.partition('/')[0] if '/' in head else 'n'} = {value}"
        title = head.partition("/")[2] or head
        lines.append(f"| {title} | {at} | {found['mean']:.4f} | {spread} | {bound} |")
    lines += [
        "",
        "| statement | quantity | number | conditions | source |",
        "|---|---|---|---|---|",
    ]
    for s in results.get("statements", []):
        number = f"O({s['order']:.3g})" if s["value"] is None else f"≤ {s['value']:.3g}"
        if s["name"].endswith("lower bound"):
            number = number.replace("O(", "Ω(")
        cells = (s["name"], s["quantity"], number, s["conditions"], s["source"])
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


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


def _draw(results: Results, path: Path) -> None:
    with panels(path, 2, 3, size=(4.2, 3.4)) as axes:
        for axis, name in zip(axes, AXES):
            for title in STREAM:
                x, y = _line(results, f"{name}/{title}")
                axis.loglog(x, y, "o-", color=STYLES[title], ms=3, lw=1, label=title)
                bound = _line(results, f"{name}/{title}", "bound")
                axis.loglog(*bound, "--", color=STYLES[title], lw=0.8)
            x, y = _line(results, f"{name}/DP-FTRL, BLT")
            if x:
                _slope_line(axis, x, y, SLOPES[name], f"slope of Theorem 4.1: {SLOPES[name]:+g}")
            axis.set(title=f"regret over {name}", xlabel=name, ylabel="regret per row")
            plain_ticks(axis, x)
        axes[0].legend(fontsize=6, frameon=False, title="dashed: proved bound", title_fontsize=6)
        x, y = _line(results, "risk")
        axes[3].loglog(x, y, "o-", color=COLOURS["blt"], ms=3, label="DP-FTRL, average iterate")
        axes[3].loglog(*_line(results, "risk", "bound"), "--", color=COLOURS["blt"],
                       label="proved, probability 0.95")  # fmt: skip
        if x:
            _slope_line(axes[3], x, y, -0.5, "slope of Corollary 4.2: −0.5")
        axes[3].set(title="excess risk", xlabel="n")
        for head, colour, slope, text in (
            ("squares", COLOURS["blt"], -1.0, "Theorem 4.3 (privacy)"),
            ("n/DP-FTRL, BLT", "0.5", -0.5, "Theorem 4.1"),
        ):
            x, y = _line(results, head)
            title = "least squares" if head == "squares" else "general convex"
            axes[4].loglog(x, y, "o-", color=colour, ms=3, label=title)
            if x:
                _slope_line(axes[4], x, y, slope, f"slope of {text}: {slope:+g}")
        axes[4].set(title="least squares against general convex", xlabel="n", ylabel="regret")
        for title, slope in zip(L_P, (-0.75, -1.0, -2 / 3)):
            x, y = _line(results, f"l_p/{title}")
            axes[5].loglog(x, y, "o-", color=STYLES[title], ms=3, label=title)
            if x:
                _slope_line(axes[5], x, y, slope, f"{slope:+.2f}")
        axes[5].set(title="l_p: excess at the hardest problem", xlabel="n")
        for axis, head in zip(axes[3:], ("risk", "squares", f"l_p/{L_P[0]}")):
            plain_ticks(axis, _line(results, head)[0])
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
    kept = [s >= PRIVATE for s in _line(results, head, "private")[1]]
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
    n, squares = _line(results, "squares")
    if len(n) < 2:
        raise KeyError("squares")
    found = fitted_slope(n, squares)
    general = fitted_slope(*_both(results, "n/DP-FTRL, BLT")[:2])
    return verdict(found < general - 0.2, f"slopes {found:+.2f} and {general:+.2f}")


def _tree_faster(results: Results) -> ClaimVerdict:
    slopes = {}
    for name in L_P[:2]:
        n, y = _line(results, f"l_p/{name}")
        if len(n) < 2:
            raise KeyError(f"l_p/{name}")
        slopes[name] = fitted_slope(n, y)
    told = ", ".join(f"{name}: {slope:+.2f}" for name, slope in slopes.items())
    return verdict(slopes[L_P[1]] < slopes[L_P[0]], told)


FIGURE = Figure(
    name="bounds",
    title="theorems beside measured regret and risk",
    cells=_cells,
    table=_table,
    draw=_draw,
    claims=(
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
    ),
)
