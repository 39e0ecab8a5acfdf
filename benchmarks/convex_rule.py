"""The simulation behind the steps of `solver="auto"`: synthetic tables, every solver and schedule.

    python benchmarks/convex_rule.py [--quick] [--task classify regress wide rare small constant]

For each family, number of rows n, columns p and ε: test accuracy (R² of regressions, at least −1)
of "gd" at several numbers of readings and step sizes, of the rule's own choice ("auto") and of
the other solvers, δ = 1e-6. Printed by R = nμ/√(p + 1): how far each setting lies behind the best
of its cell, mean over cells. No table of convex_table.py takes part. Families: uniform
columns, skewed and correlated ones, indicators of five values each with a rare class, columns of
very different spread; of classes also clusters of five. "wide" has thousands of columns, of which
3, 30 or all matter, and "gd" beside "frank_wolfe" at several radii, printed cell by cell. "rare"
has two classes, one of share π, or ten clusters, and what "gd" gains by η = 2, 1 and by the rule
over η = 4, in points, mean over families, p = 20 and 60, weak and strong margins. "small": R² of
linear regression whose targets fill their bounds, fill a tenth of them (around their middle, or
far from it), have outliers, or are lognormal: mean and error of eight seeds. "constant": what
every regression saves of the loss of the best constant at 300 x 5 and 1,000 x 20, and in brackets
what a private constant does that has all of ε (a mean; of the median, one of 64 counts).
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from itertools import product
from typing import Any

import numpy as np
from scipy.special import expit

DELTA, HELD = 1e-6, 2000
FAMILIES = ("uniform", "skewed", "indicators", "spreads", "clusters")
READINGS = {"classify": (2, 5, 9, 18, 36, 71), "regress": (5, 10, 20, 40, 71)}


def columns(kind: str, n: int, p: int, rng: Any) -> Any:
    """Rows of a family within [−1, 1]^p."""
    if kind == "uniform":
        return rng.uniform(-1, 1, (n, p))
    if kind == "skewed":
        common = rng.beta(1.5, 5, size=(n, 1))
        return np.clip(0.6 * common + 0.4 * rng.beta(1, 6, size=(n, p)), 0, 1) * 2 - 1
    if kind == "indicators":
        x = np.zeros((n, p))
        for first in range(0, p - 4, 5):
            share = rng.dirichlet(np.ones(5))
            x[np.arange(n), first + rng.choice(5, size=n, p=share)] = 1
        return x
    spread = 0.4 * 10 ** rng.uniform(-1.5, 0, p)
    return np.clip(rng.normal(size=(n, p)) * spread + rng.uniform(-0.5, 0.5, p), -1, 1)


def classes(kind: str, n: int, p: int, *, seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng((seed, n, p, FAMILIES.index(kind)))
    if kind == "clusters":
        centres = rng.uniform(-0.5, 0.5, (5, p)) * (rng.random((5, p)) < 0.5)
        y = rng.integers(5, size=n)
        return np.clip(centres[y] + 0.35 * rng.normal(size=(n, p)), -1, 1), y
    x = columns(kind, n, p, rng)
    margin = x @ (3 * rng.normal(size=p) / np.maximum(x.std(0), 1e-3) / np.sqrt(p))
    rare = {"indicators": 0.75, "skewed": 0.6}.get(kind, 0.5)
    return x, (rng.random(n) < expit(margin - np.quantile(margin, rare))).astype(int)


def targets(kind: str, n: int, p: int, *, seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng((seed, n, p, FAMILIES.index(kind)))
    x = columns(kind, n, p, rng)
    signal = (x - x.mean(0)) @ (rng.normal(size=p) / np.maximum(x.std(0), 1e-3) / np.sqrt(p))
    return x, np.clip((signal + 0.5 * rng.normal(size=n) + 0.5) / 4, -1, 1)


def tries(task: str) -> dict[str, dict[str, Any]]:
    rates = (None,) if task == "classify" else (0.1, 0.3, 1.0)
    found: dict[str, dict[str, Any]] = {"auto": {}}
    for steps in READINGS[task]:
        for rate in rates:
            name = f"gd {steps}" if rate is None else f"gd {steps} η={rate}"
            found[name] = {"solver": "gd", "passes": steps, "learning_rate": rate}
    found |= {"objective": {"solver": "objective"}, "ftrl": {"solver": "ftrl"}}
    return found | ({"sums": {"solver": "sums"}} if task == "regress" else {})


def score(task: str, kind: str, x: Any, y: Any, *, epsilon: float, **settings: Any) -> float:
    if settings.get("solver") == "objective" and kind == "clusters":
        return float("nan")
    from noshuffle.convex import PrivateLinearRegression, PrivateLogisticRegression

    make: Any = PrivateLogisticRegression if task == "classify" else PrivateLinearRegression
    more = {"classes": np.unique(y)} if task == "classify" else {}
    model = make(epsilon=epsilon, delta=DELTA, bounds=(-1, 1), test_seed=0, **more, **settings)
    found = model.fit(x[:-HELD], y[:-HELD]).score(x[-HELD:], y[-HELD:])
    return max(float(found), -1.0)


def simulate(task: str, *, quick: bool) -> None:
    from noshuffle.accounting import gaussian

    made = classes if task == "classify" else targets
    kinds = FAMILIES if task == "classify" else ("uniform", "spreads", "skewed")
    behind: dict[float, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for n in (300, 2000) if quick else (300, 1000, 4000, 16_000):
        for p in (5, 20) if quick else (5, 20, 60):
            for kind in kinds:
                x, y = made(kind, n + HELD, p, seed=0)
                for epsilon in (1.0,) if quick else (0.1, 0.3, 1.0, 3.0, 8.0):
                    worth = n * gaussian.mu(epsilon=epsilon, delta=DELTA) / np.sqrt(p + 1)
                    cell = {
                        name: score(task, kind, x, y, epsilon=epsilon, **asked)
                        for name, asked in tries(task).items()
                    }
                    best = np.nanmax(list(cell.values()))
                    for name, value in cell.items():
                        behind[2.0 ** np.floor(np.log2(worth))][name].append(best - value)
    names = list(tries(task))
    print(f"{task}: points behind the best of the cell, mean over cells, by R")
    print(f"{'R from':>8}{'cells':>7}" + "".join(f"{name:>14}" for name in names))
    for worth in sorted(behind):
        row = behind[worth]
        line = f"{worth:>8g}{len(row['auto']):>7}"
        print(line + "".join(f"{100 * np.nanmean(row[name]):>14.1f}" for name in names), flush=True)


def simulate_wide(*, quick: bool) -> None:
    """Accuracy of "gd" and of chosen vertices where columns are many, and few matter or all."""
    from noshuffle.accounting import gaussian

    radii = (0.5, 1.0, 2.0)
    tried = ("gd", *(f"radius {r:g}" for r in radii))
    print("wide: accuracy\n" + f"{'n':>6}{'p':>6}{'matter':>8}{'ε':>5}{'R':>7}{'nμ/ln 2p':>10}"
          + "".join(f"{name:>12}" for name in tried))  # fmt: skip
    for n, p in ((1000, 1000),) if quick else ((1000, 1000), (1000, 4000), (4000, 4000)):
        for support in (3, 30, p):
            kind = "spreads" if support == 30 else "uniform"
            rng = np.random.default_rng((n, p, support))
            x = columns(kind, n + HELD, p, rng).astype(np.float32)
            w = rng.normal(size=p) * (np.arange(p) < support)
            margin = 3 * ((x - x.mean(0)) / x.std(0)) @ w / np.sqrt(support)
            y = (rng.random(n + HELD) < expit(margin)).astype(int)
            for epsilon in (1.0,) if quick else (0.5, 1.0, 2.0, 8.0):
                asked: list[dict[str, Any]] = [{"solver": "gd"}]
                asked += [{"solver": "frank_wolfe", "radius": r} for r in radii]
                found = [score("classify", kind, x, y, epsilon=epsilon, **own) for own in asked]
                reach = n * gaussian.mu(epsilon=epsilon, delta=DELTA)
                print(f"{n:>6}{p:>6}{support:>8}{epsilon:>5g}{reach / np.sqrt(p + 1):>7.1f}"
                      f"{reach / np.log(2 * p):>10.1f}"
                      + "".join(f"{v:>12.3f}" for v in found), flush=True)  # fmt: skip


def simulate_rare(*, quick: bool) -> None:
    """What shorter steps gain where a class is rare, or classes are many, by R."""
    from noshuffle.accounting import gaussian

    asked: list[dict[str, Any]] = [{"solver": "gd", "learning_rate": r} for r in (4.0, 2.0, 1.0)]
    print(f"rare: points gained over η = 4\n{'π':>6}{'R':>6}{'η = 2':>8}{'η = 1':>8}{'auto':>8}")
    for share in (0.5, 0.1) if quick else (0.5, 0.25, 0.1, None):
        for worth in (20, 120) if quick else (10, 20, 60, 120, 250):
            found = []
            for p, kind, strength in product((20, 60), ("skewed", "indicators", "spreads"), (1, 3)):
                n = 4000
                rng = np.random.default_rng((worth, p, len(kind), strength))
                if share is None:
                    centres = rng.uniform(-0.5, 0.5, (10, p)) * (rng.random((10, p)) < 0.5)
                    y = rng.integers(10, size=n + HELD)
                    x = np.clip(centres[y] + 0.35 * rng.normal(size=(n + HELD, p)), -1, 1)
                else:
                    x = columns(kind, n + HELD, p, rng)
                    margin = (x - x.mean(0)) @ (rng.normal(size=p) / np.maximum(x.std(0), 1e-3))
                    noisy = strength * margin / margin.std() + rng.logistic(size=n + HELD)
                    y = (noisy > np.quantile(noisy, 1 - share)).astype(int)
                epsilon = gaussian.epsilon(mu=worth * np.sqrt(p + 1) / n, delta=DELTA)
                own = [score("classify", kind, x, y, epsilon=epsilon, **a) for a in (*asked, {})]
                found.append([100 * (value - own[0]) for value in own[1:]])
            gains = "".join(f"{v:>8.2f}" for v in np.mean(found, axis=0))
            print(f"{share or '1/10':>6}{worth:>6}{gains}", flush=True)


def with_outliers(seed: int, *, one_sided: bool) -> tuple[Any, Any]:
    """Three of a hundred targets have errors of forty times the deviation of the others'."""
    n, p = 4800 + HELD, 8
    rng = np.random.default_rng((3, seed))
    x = rng.uniform(-1, 1, (n, p))
    signal = x @ rng.normal(size=p)
    far, errors = rng.random(n) < 0.03, rng.normal(size=n)
    errors = np.where(far, 20 * (np.abs(errors) if one_sided else errors), 0.5 * errors)
    return x, np.clip((signal / signal.std() + errors) / 60, -1, 1)


def lognormal(seed: int) -> tuple[Any, Any]:
    """Around 30,000 within (0, 500,000)."""
    n, p = 4800 + HELD, 8
    rng = np.random.default_rng((4, seed))
    x = rng.uniform(-1, 1, (n, p))
    signal = x @ rng.normal(size=p)
    y = 30_000 * np.exp(0.6 * signal / signal.std() + 0.5 * rng.normal(size=n))
    return x, np.clip(y, 0, 500_000) / 250_000 - 1


def simulate_small(*, quick: bool) -> None:
    """R² of regressions whose targets are small beside their bounds, and of others."""
    made: dict[str, Any] = {
        "outliers, 4,800 x 8": lambda seed: with_outliers(seed, one_sided=False),
        "outliers to one side": lambda seed: with_outliers(seed, one_sided=True),
        "lognormal, 4,800 x 8": lognormal,
    }

    def family(kind: str, n: int, p: int, share: float, middle: float) -> Any:
        def draw(seed: int) -> tuple[Any, Any]:
            x, y = targets(kind, n + HELD, p, seed=seed)
            return x, share * y + middle

        return draw

    sizes = (("uniform", 1000, 20), ("spreads", 1000, 20), ("spreads", 4000, 20))
    for kind, n, p in (*sizes, ("skewed", 4000, 20), ("spreads", 4000, 60)):
        for words, share, middle in (("all", 1.0, 0.0), ("a tenth", 0.1, 0.0)):
            made[f"{kind}, {n:,} x {p}, {words}"] = family(kind, n, p, share, middle)
    made["spreads, 4,000 x 20, off-centre"] = family("spreads", 4000, 20, 0.1, 0.5)
    epsilons, seeds = (0.1, 0.3, 1.0, 8.0), 2 if quick else 8
    print("small: R²\n" + f"{'targets':<34}" + "".join(f"{f'ε = {e:g}':>16}" for e in epsilons))
    from noshuffle.convex import PrivateLinearRegression

    for name, draw in list(made.items())[: 2 if quick else None]:
        cells = []
        for epsilon in epsilons:
            found = []
            for seed in range(seeds):
                x, y = draw(seed)
                model = PrivateLinearRegression(
                    epsilon=epsilon, delta=DELTA, bounds=(-1, 1), test_seed=seed
                ).fit(x[:-HELD], y[:-HELD])
                found.append(model.score(x[-HELD:], y[-HELD:]))
            cells.append(f"{np.mean(found):.3f} ± {np.std(found) / np.sqrt(seeds):.3f}")
        print(f"{name:<34}" + "".join(f"{cell:>16}" for cell in cells), flush=True)


def numbers(kind: str, n: int, p: int, *, seed: int) -> tuple[Any, Any]:
    """Columns of a family, targets within [−1, 1]: all of it, a tenth of it in or off its middle,
    or with errors of Student's t of two degrees."""
    columns_of, where = kind.split(", ")
    x, y = targets(columns_of, n, p, seed=seed)
    if where == "heavy tails":
        errors = np.random.default_rng((5, seed)).standard_t(2, size=n)
        return x, np.clip(0.15 * y + 0.03 * errors, -1, 1)
    return x, y if where == "all" else 0.1 * y + (0.5 if where == "off-centre" else 0.0)


def regressions() -> dict[str, tuple[Any, Any, Any, Any]]:
    """A model by name: how it is made, targets from [−1, 1], its loss, the best constant."""
    from noshuffle import convex

    def deviance(kind: str) -> Any:
        def poisson(y: Any, m: Any) -> Any:
            return m - y + np.where(y > 0, y * np.log(np.maximum(y, 1e-12) / m), 0.0)

        return poisson if kind == "poisson" else lambda y, m: y / m - 1 - np.log(y / m)

    def pinball(y: Any, m: Any) -> Any:
        return np.abs(y - m)

    def huber(y: Any, m: Any) -> Any:
        return np.where(np.abs(y - m) < 0.1, 0.5 * (y - m) ** 2, 0.1 * np.abs(y - m) - 0.005)

    def as_is(y: Any) -> Any:
        return y

    def above(y: Any) -> Any:
        return (y + 1.02) / 2.02

    positive = {"target_bounds": (0.009, 1.0)}
    return {
        "linear": (convex.PrivateLinearRegression, {}, as_is, lambda y, m: (y - m) ** 2),
        "huber": (convex.PrivateHuberRegressor, {"width": 0.1}, as_is, huber),
        "median": (convex.PrivateQuantileRegressor, {}, as_is, pinball),
        "poisson": (convex.PrivatePoissonRegressor, positive, above, deviance("poisson")),
        "gamma": (convex.PrivateGammaRegressor, positive, above, deviance("gamma")),
    }


def private_constant(name: str, y: Any, *, mu: float, rng: Any, low: float) -> float:
    """A mean, or of "median" a quantile of 64 counts, with all of ε."""
    if name != "median":
        middle, half = (low + 1) / 2, (1 - low) / 2
        return (
            float(np.clip(y.mean() + half * rng.normal() / (len(y) * mu), low, 1))
            if half
            else middle
        )
    counts = np.histogram(y, 64, (low, 1))[0] + rng.normal(size=64) / mu
    below = np.cumsum(counts)
    return float(low + (1 - low) / 64 * (np.argmin(np.abs(below - len(y) / 2)) + 0.5))


def simulate_constant(*, quick: bool) -> None:
    """Share of the loss of the best constant that a regression saves, beside a private constant."""
    from noshuffle.accounting import gaussian

    sizes = ((1000, 20),) if quick else ((300, 5), (1000, 20))
    kinds = [f"{c}, {w}" for c in ("uniform", "spreads") for w in ("all", "a tenth")]
    kinds += ["spreads, off-centre", "uniform, heavy tails"]
    seeds = 2 if quick else 8
    print(f"constant: 1 − loss/loss of the best constant, auto (private constant)\n{'model':<8}"
          f"{'targets':<34}" + "".join(f"{f'ε = {e:g}':>30}" for e in (0.1, 0.3, 1.0)))  # fmt: skip
    for name, (make, more, map_fn, loss) in regressions().items():
        for (n, p), kind in product(sizes, kinds):
            cells = []
            for epsilon in (0.1, 0.3, 1.0):
                mu, found = gaussian.mu(epsilon=epsilon, delta=DELTA), []
                for seed in range(seeds):
                    x, y = numbers(kind, n + HELD, p, seed=seed)
                    y, rng = map_fn(y), np.random.default_rng((6, seed))
                    low = more.get("target_bounds", (-1.0, 1.0))[0]
                    held, told = x[-HELD:], y[-HELD:]
                    model = make(
                        epsilon=epsilon,
                        delta=DELTA,
                        bounds=(-1, 1),
                        test_seed=f"{kind} {n} {seed}",
                        **more,
                    )
                    model.fit(x[:-HELD], y[:-HELD])
                    flat = [
                        private_constant(name, y[:-HELD], mu=mu, rng=rng, low=low)
                        for _ in range(50)
                    ]
                    best = min(loss(told, told.mean()).mean(), loss(told, np.median(told)).mean())
                    own = loss(told, model.predict(held)).mean()
                    others = [loss(told, max(c, 1e-3) if low > 0 else c).mean() for c in flat]
                    found.append((1 - own / best, 1 - np.mean(others) / best))
                a, c = np.mean(found, axis=0)
                error = np.std([f[0] for f in found]) / np.sqrt(seeds)
                sign = " !" if a < c - 2 * error else "  "
                cells.append(f"{a:.3f} ± {error:.3f} ({c:.3f}){sign}")
            line = f"{name:<8}{f'{kind}, {n:,} x {p}':<34}"
            print(line + "".join(f"{cell:>30}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--task", nargs="+", default=("classify", "regress", "wide", "rare", "small", "constant")
    )
    given = parser.parse_args()
    own = {"wide": simulate_wide, "rare": simulate_rare, "small": simulate_small}
    own["constant"] = simulate_constant
    for task in given.task:
        if task in own:
            own[task](quick=given.quick)
        else:
            simulate(task, quick=given.quick)


if __name__ == "__main__":
    main()
