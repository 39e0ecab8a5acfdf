"""Privacy against computation at two accuracy targets (as Figure 2c of Kairouz et al. 2021).

    python benchmarks/drama_figure.py --cache plans.npz --table table.json --targets 48 46.5 --png …

How it is made. The table's runs give accuracy over the noise on the iterates, `drama_table.error` ·
z / m for noise multiplier z and m clients a round (interpolated in its logarithm, each run with its
own best rate): one curve for BLT and tree, whose runs lie on one within 0.2 points, and one for
independent noise, amplified or not. From it comes the largest noise that reaches the target. With
more clients a round the same quality needs the same noise on the mean, so z grows with m: more
computation buys more noise on the sum. Rounds stay at 1,000; a user out of a population of U takes
part at most ⌈1000/b⌉ times, at least b = ⌊U/m⌋ rounds apart (sampled: with probability m/U). ε then
is the exact one at δ = 1e-5. Assumed: a larger cohort with the same noise on its mean is not worse.

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

COHORTS = (100, 150, 200, 300, 400, 600, 800, 1200, 1600)
POPULATIONS = (10_080, 100_800)
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


def epsilon(name: str, strategy, z: float, population: int, cohort: int) -> float:
    part = Poisson(ROUNDS, cohort / population) if name == "poisson" else limits(population, cohort)
    return Plan(
        participation=part, strategy=strategy, noise_multiplier=z, delta=DELTA, unit="user"
    ).epsilon()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--targets", type=float, nargs=2, required=True, help="accuracies in %%")
    parser.add_argument("--png", type=Path)
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    options = parser.parse_args()
    strategies, _, _ = load_cache(options.cache)
    table = json.loads(options.table.read_text())
    alike = {"tree": ("tree", "blt"), "blt": ("tree", "blt"), "poisson": ("poisson", "identity")}
    scale = {name: error(strategies[name]) for name in (*alike, "identity")}
    fits = {
        (name, population, cohort): build(limits(population, cohort))
        for name, build in (("tree", short_tree), ("blt", short_blt))
        for population in POPULATIONS
        for cohort in COHORTS
    }
    result = []
    for target in options.targets:
        for name, names in alike.items():
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
    for names in dict.fromkeys(alike.values()):
        pairs = " ".join(f"{n:.3g}:{a:.2f}" for n, a in zip(*curve(table, scale, names)))
        print(f"noise on the iterates: accuracy, {' and '.join(names)}: {pairs}")
    if options.out:
        options.out.write_text(json.dumps(result, indent=1))
    if options.png:
        draw(result, options.png)


def draw(result: list[dict], path: Path) -> None:
    """One panel a population; colour a mechanism, line a target."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {"tree": "tab:green", "blt": "tab:blue", "poisson": "tab:orange"}
    targets = sorted({r["target"] for r in result}, reverse=True)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
    for axis, population in zip(axes, POPULATIONS):
        for r in result:
            if r["population"] != population or not r["fixed"]:
                continue
            style = "-" if r["target"] == targets[0] else "--"
            best = [min(pair) for pair in zip(r["fixed"], r["refitted"] or r["fixed"])]
            label = f"{TITLES[r['mechanism']]}, {r['target']:g} %"
            axis.plot(
                r["cohorts"], best, style, color=colours[r["mechanism"]], marker=".", label=label
            )
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="clients a round (1,000 rounds)",
            title=f"{population:,} users",
        )
        axis.grid(True, which="both", alpha=0.25)
    axes[0].set_ylabel(f"user-level ε at δ = {DELTA:g}")
    axes[1].legend(fontsize=7)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
