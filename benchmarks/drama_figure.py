"""Privacy against computation at two accuracy targets (as Figure 2c of Kairouz et al. 2021).

    python benchmarks/drama_figure.py --cache plans.npz --table table.json --targets 48 46 \
        --measured cohorts.json --png …

Lines are computed. The table's runs, all with 100 clients a round, give accuracy over the noise on
the iterates, `drama_table.error` · z / m for noise multiplier z and m clients a round (interpolated
in its logarithm, each run with its own best rate): one curve for BLT and tree, whose runs lie on
one within 0.2 points, and one for independent noise, amplified or not. From it comes the largest
noise that reaches the target. With more clients a round the same quality needs the same noise on
the mean, so z grows with m: more computation buys more noise on the sum. Rounds stay at 1,000; a
user out of a population of U takes part at most ⌈1000/b⌉ times, at least b = ⌊U/m⌋ rounds apart
(sampled: with probability m/U). ε then is the exact one at δ = 1e-5. Assumed: a larger cohort with
the same noise on its mean is not worse.

Markers are measured: `drama_cohorts.py` trains other cohort sizes at the z that a line predicts. A
full marker met the target, a hollow one did not; beside it stands the accuracy.

`fixed` keeps the strategy of the table, so the noise on the mean has the same law for every m.
`refitted` fits it again to the limits of each m, with the same noise on the iterates by the measure
above. The figure shows the better of the two.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
from drama_table import CLIENTS, DELTA, ROUNDS, error, load_cache, short_blt, short_tree

from noshuffle.participation import MinSeparation, Poisson
from noshuffle.plan import Plan

COHORTS = (50, 100, 150, 200, 300, 400, 600, 800, 1200, 1600)
POPULATIONS = (10_080, 100_800)
#: Marker of a trained cohort, and where its accuracy stands.
MARKS = {"tree": ("^", 5), "blt": ("s", -11), "poisson": ("o", 5)}
#: Mechanisms that share a curve of accuracy over noise.
ALIKE = {
    "tree": ("tree", "blt"),
    "blt": ("tree", "blt"),
    "poisson": ("poisson", "identity", "flower"),
}
TITLES = {"tree": "DP-FTRL, Honaker tree", "blt": "DP-FTRL, BLT", "poisson": "DP-FedAvg, amplified"}


def curve(table: dict, scale: dict[str, float], names: tuple[str, ...]):
    """Noise on the iterates, rising, and mean accuracies (not rising)."""
    points = sorted(
        (record["noise"] * scale[cell.split("/")[0]] / CLIENTS, np.mean(record["accuracy"]))
        for cell, record in table.items()
        if cell.split("/")[0] in names and record["noise"] > 0
    )
    level, accuracy = (np.array(part) for part in zip(*points))
    return level, np.minimum.accumulate(accuracy)


def tolerated(level: np.ndarray, accuracy: np.ndarray, target: float) -> float:
    """The largest noise that reaches the target; NaN where no run was near enough to tell."""
    if not accuracy[-1] <= target <= accuracy[0]:
        return math.nan
    return float(np.exp(np.interp(-target, -accuracy, np.log(level))))


def limits(population: int, cohort: int) -> MinSeparation:
    apart = min(ROUNDS, population // cohort)
    return MinSeparation(ROUNDS, apart, math.ceil(ROUNDS / apart))


def scales(strategies: dict) -> dict[str, float]:
    """Noise on the iterates for unit draws, by mechanism."""
    return {name: error(strategies[name]) for name in (*ALIKE, "identity", "flower")}


def epsilon(name: str, strategy, z: float, population: int, cohort: int) -> float:
    part = Poisson(ROUNDS, cohort / population) if name == "poisson" else limits(population, cohort)
    return Plan(
        participation=part, strategy=strategy, noise_multiplier=z, delta=DELTA, unit="user"
    ).epsilon()


def compute(options: argparse.Namespace) -> list[dict]:
    """ε over cohort sizes for every target, mechanism and population."""
    strategies, _, _ = load_cache(options.cache)
    table = json.loads(options.table.read_text())
    scale = scales(strategies)
    fits = {
        (name, population, cohort): build(limits(population, cohort))
        for name, build in (("tree", short_tree), ("blt", short_blt))
        for population in POPULATIONS
        for cohort in COHORTS
    }
    result = []
    for target in options.targets:
        for name, names in ALIKE.items():
            level = tolerated(*curve(table, scale, names), target)
            for population in POPULATIONS:
                fixed, refitted = [], []
                for cohort in COHORTS if level == level else ():
                    z = level * cohort / scale[name]
                    fixed.append(epsilon(name, strategies[name], z, population, cohort))
                    if name != "poisson":
                        other = fits[name, population, cohort]
                        same = level * cohort / error(other)
                        refitted.append(epsilon(name, other, same, population, cohort))
                result.append(
                    {
                        "target": target,
                        "mechanism": name,
                        "population": population,
                        "noise on the iterates": level,
                        "z at 100 clients": level * CLIENTS / scale[name],
                        "cohorts": COHORTS,
                        "fixed": fixed,
                        "refitted": refitted,
                    }
                )
                shown = " ".join(f"{e:.2f}" for e in fixed)
                again = " ".join(f"{e:.2f}" for e in refitted)
                z = level * CLIENTS / scale[name]
                print(f"{target:g} % {name}, {population} users, z {z:.3f}: {shown} | {again}")
    for names in dict.fromkeys(ALIKE.values()):
        pairs = " ".join(f"{n:.3g}:{a:.2f}" for n, a in zip(*curve(table, scale, names)))
        print(f"noise on the iterates: accuracy, {' and '.join(names)}: {pairs}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, help="what drama_table prepare wrote")
    parser.add_argument("--table", type=Path, help="what drama_table table wrote")
    parser.add_argument("--targets", type=float, nargs=2, default=(48, 46), help="in %%")
    parser.add_argument("--computed", type=Path, help="lines of an earlier --out, to draw again")
    parser.add_argument("--measured", type=Path, help="what drama_cohorts wrote")
    parser.add_argument("--png", type=Path)
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    options = parser.parse_args()
    if options.computed:
        result = json.loads(options.computed.read_text())["computed"]
    else:
        result = compute(options)
    measured = json.loads(options.measured.read_text()) if options.measured else []
    for point in measured:
        print(words(point))
    if options.out:
        options.out.write_text(json.dumps({"computed": result, "measured": measured}, indent=1))
    if options.png:
        draw(result, measured, options.png)


def words(point: dict) -> str:
    """A measured point in one line."""
    found = ", ".join(f"{a:.2f}" for a in point["accuracy"])
    return (
        f"measured: {point['mechanism']} ({point['strategy']}), {point['cohort']} a round, "
        f"z {point['noise']:.3f}, ε {point['epsilon']:.2f}, target {point['target']:g} %: {found} %"
    )


def draw(result: list[dict], measured: list[dict], path: Path) -> None:
    """One panel a population; colour a mechanism, line a target; a marker is a trained cohort."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {"tree": "tab:green", "blt": "tab:blue", "poisson": "tab:orange"}
    targets = sorted({r["target"] for r in result}, reverse=True)
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.4), sharey=True, layout="constrained")
    for axis, population in zip(axes, POPULATIONS):
        for r in result:
            if r["population"] != population or not r["fixed"]:
                continue
            style = "-" if r["target"] == targets[0] else "--"
            best = [min(pair) for pair in zip(r["fixed"], r["refitted"] or r["fixed"])]
            label = f"{TITLES[r['mechanism']]}, {r['target']:g} % (computed)"
            axis.plot(r["cohorts"], best, style, color=colours[r["mechanism"]], label=label)
        for point in measured:
            if point["population"] != population:
                continue
            mean, colour = float(np.mean(point["accuracy"])), colours[point["mechanism"]]
            at, is_met = (point["cohort"], point["epsilon"]), mean >= point["target"]
            shape, offset = MARKS[point["mechanism"]]
            axis.plot(*at, shape, color=colour, mfc=colour if is_met else "white")
            axis.annotate(
                f"{mean:.2f}",
                at,
                xytext=(3, offset),
                textcoords="offset points",
                fontsize=7,
                color=colour,
            )
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="clients a round (1,000 rounds)",
            title=f"{population:,} users" + (" (hypothetical)" if axis is axes[1] else ""),
        )
        axis.margins(y=0.09)
        axis.grid(True, which="both", alpha=0.25)
    axes[0].set_ylabel(f"user-level ε at δ = {DELTA:g}")
    if measured:
        wanted = f"{measured[0]['target']:g} %"
        axes[0].plot([], [], "o", color="0.3", label=f"trained, accuracy beside it: {wanted} met")
        axes[0].plot([], [], "o", color="0.3", mfc="white", label="trained, not met")
        axes[0].legend(handles=axes[0].lines[-2:], fontsize=7)
    axes[1].legend(fontsize=7)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
