"""Private linear classifiers on tables kept aside: none of them took part when the rule was made.

    NOSHUFFLE_DATA=... python benchmarks/convex_aside.py --out aside.json [--tables ...] [--seeds 8]
    ANOTHER_PYTHON benchmarks/convex_aside.py --out peers.json --only diffprivlib opacus
    python benchmarks/convex_aside.py --out aside.json --also peers.json --check

Test accuracy of `PrivateLogisticRegression` as it is taken without a setting but ε and public
bounds, of each solver by name, of the majority class and of peers, ε = 0.1, 0.5, 1, 2, 8, δ = 1e-6
(diffprivlib: δ = 0). A seed draws another table (4,000 fresh rows are held out), or of a real set
another split (a fifth held out) or other rows of it, and other noise; every solver has the same
tables, so errors are those of differences. Sixteen synthetic shapes, the sets of scikit-learn, and
rows of the sets of NOSHUFFLE_DATA, fewer than convex_table.py has. --check says of every cell
whether auto is within a point of the best solver by name, not below the majority class, above the
peers: HOLDS; WITHIN ERROR where twice the error of the mean difference would bring it there; else
DIFFERS; ONE SEED where `auto` has no second one. `dp-sgd` is what Opacus runs, in numpy, which is
far quicker on small tables; both have the settings that opacus_tuning.py found for the nearest
shape of convex_table.py (in ln n, ln p; of two classes or of more). Cells are kept as they come,
and a second run goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from convex_table import (
    _BREAST,
    EPSILONS,
    SHAPES,
    TUNED,
    Table,
    adult,
    bank,
    diffprivlib,
    opacus,
    ours,
    stored,
)

HELD = 4000
SOLVERS = ("auto", "objective", "ftrl", "ftrl x5", "frank_wolfe")
PEERS = ("diffprivlib", "dp-sgd", "opacus")
ONCE = ("majority", "not private")


def labels(rng: Any, margin: Any, *, share: float = 0.5, strength: float = 2.0) -> Any:
    """Two classes by a logistic model; the second has about this share."""
    margin = strength * (margin - margin.mean()) / margin.std()
    noisy = margin + rng.logistic(size=len(margin))
    return (noisy > np.quantile(noisy, 1 - share)).astype(int)


def flipped(rng: Any, y: Any, share: float) -> Any:
    return np.where(rng.random(len(y)) < share, 1 - y, y)


def plain(rng: Any, n: int, p: int) -> tuple[Any, Any]:
    x = rng.uniform(-1, 1, (n, p))
    return x, labels(rng, x @ rng.normal(size=p), strength=4.0)


def correlated(rng: Any, n: int, p: int) -> tuple[Any, Any]:
    """Five factors and a little of each column's own."""
    x = rng.normal(size=(n, 5)) @ rng.normal(size=(5, p)) + 0.5 * rng.normal(size=(n, p))
    return np.clip(x / 8, -1, 1), labels(rng, x @ rng.normal(size=p))


def rare(rng: Any, n: int, p: int, *, share: float) -> tuple[Any, Any]:
    x = np.clip(rng.normal(size=(n, p)) / 4, -1, 1)
    return x, labels(rng, x @ rng.normal(size=p), share=share, strength=3.0)


def one_hot(rng: Any, n: int, p: int) -> tuple[Any, Any]:
    """Eight values for each column of the table, of very unequal frequency."""
    x = np.zeros((n, p))
    for first in range(0, p - 7, 8):
        x[np.arange(n), first + rng.choice(8, size=n, p=rng.dirichlet(np.full(8, 0.5)))] = 1
    return x, labels(rng, x @ rng.normal(size=p), share=0.3)


def heavy(rng: Any, n: int, p: int) -> tuple[Any, Any]:
    """Lognormal amounts within (0, 50) whose logarithm matters."""
    z = rng.normal(size=(n, p))
    return np.clip(np.exp(z), 0, 50) / 50, labels(rng, z @ rng.normal(size=p), strength=3.0)


def student(rng: Any, n: int, p: int) -> tuple[Any, Any]:
    """Student's t of two degrees within (−20, 20)."""
    x = np.clip(rng.standard_t(2, size=(n, p)), -20, 20) / 20
    return x, labels(rng, x @ rng.normal(size=p), strength=3.0)


def mislabelled(rng: Any, n: int, p: int) -> tuple[Any, Any]:
    x = rng.uniform(0, 1, (n, p))
    return x, flipped(rng, labels(rng, x @ rng.normal(size=p), strength=8.0), 0.3)


def several(rng: Any, n: int, p: int, *, k: int, skew: float) -> tuple[Any, Any]:
    """k normal classes of one covariance; the shares of classes fall as j^−skew."""
    share = np.arange(1, k + 1) ** -float(skew)
    y = rng.choice(k, size=n, p=share / share.sum())
    mix = rng.normal(size=(p, p)) / math.sqrt(p)
    x = (rng.normal(size=(k, p)) * 1.5)[y] + rng.normal(size=(n, p)) @ (mix + np.eye(p))
    return np.clip(x / 8, -1, 1), y


def words(rng: Any, n: int, p: int) -> tuple[Any, Any]:
    """Words in a text (0 or 1) by Zipf's law, of two topics."""
    share = np.minimum(0.5, 1.5 / np.arange(1, p + 1) ** 0.7)
    y = rng.integers(2, size=n)
    lift = np.exp(0.5 * rng.normal(size=(2, p)))
    return (rng.random((n, p)) < np.minimum(0.9, share * lift[y])).astype(float), y


def off_centre(rng: Any, n: int, p: int) -> tuple[Any, Any]:
    """Numbers around 20 to 90 of deviation 1 to 5 within (0, 200)."""
    z = rng.normal(size=(n, p))
    x = rng.uniform(20, 90, p) + z * rng.uniform(1, 5, p)
    return np.clip(x, 0, 200) / 200, labels(rng, z @ rng.normal(size=p), strength=3.0)


def few(rng: Any, n: int, p: int) -> tuple[Any, Any]:
    x = rng.uniform(-1, 1, (n, p))
    return x, labels(rng, x[:, :5] @ rng.normal(size=5), strength=4.0)


def mixed(rng: Any, n: int, p: int) -> tuple[Any, Any]:
    """A third numbers, a third rare indicators, a third amounts of which most are 0."""
    a = np.clip(rng.normal(0.4, 0.15, (n, p // 3)), 0, 1)
    b = (rng.random((n, p // 3)) < rng.uniform(0.005, 0.1, p // 3)).astype(float)
    c = np.clip(rng.exponential(0.05, (n, p // 3)), 0, 1) * (rng.random((n, p // 3)) < 0.2)
    x = np.hstack([a, b, c])
    return x, labels(rng, (x / x.std(0)) @ rng.normal(size=x.shape[1]), share=0.2)


#: A family, rows that are learned from, columns.
SYNTHETIC: dict[str, tuple[Any, int, int]] = {
    "plain 500 x 3": (plain, 500, 3),
    "correlated 1,000 x 50": (correlated, 1000, 50),
    "5 % rare 2,000 x 20": (lambda *a: rare(*a, share=0.05), 2000, 20),
    "1 % rare 20,000 x 30": (lambda *a: rare(*a, share=0.01), 20_000, 30),
    "one-hot 5,000 x 40": (one_hot, 5000, 40),
    "lognormal 6,000 x 12": (heavy, 6000, 12),
    "Student t 3,000 x 15": (student, 3000, 15),
    "30 % mislabelled 3,000 x 10": (mislabelled, 3000, 10),
    "3 classes 2,000 x 20": (lambda *a: several(*a, k=3, skew=0), 2000, 20),
    "5 unequal 1,500 x 6": (lambda *a: several(*a, k=5, skew=1.5), 1500, 6),
    "10 classes 10,000 x 30": (lambda *a: several(*a, k=10, skew=0), 10_000, 30),
    "words 4,000 x 500": (words, 4000, 500),
    "off-centre 4,000 x 8": (off_centre, 4000, 8),
    "few matter 2,000 x 200": (few, 2000, 200),
    "mixed 10,000 x 30": (mixed, 10_000, 30),
    "correlated 200,000 x 10": (correlated, 200_000, 10),
}


def synthetic(name: str, seed: int) -> Table:
    family, n, p = SYNTHETIC[name]
    rng = np.random.default_rng((20, list(SYNTHETIC).index(name), seed))
    x, y = family(rng, n + HELD, p)
    return x[:n], y[:n], x[n:], y[n:]


def shuffled(x: Any, y: Any, seed: int, *, rows: int | None = None, held: int = HELD) -> Table:
    """A random fifth of a set is held out, or that many rows when so many are learned from."""
    order = np.random.default_rng((21, seed)).permutation(len(y))
    cut = int(0.8 * len(y)) if rows is None else rows
    rest = order[cut:] if rows is None else order[cut : cut + held]
    return x[order[:cut]], y[order[:cut]], x[rest], y[rest]


#: (low, high) that a reader of the description of a set would give, by the unit of each column.
_WINE = ((10, 16), (0, 6), (1, 4), (10, 30), (50, 200), (0, 5), (0, 6), (0, 1), (0, 4), (0, 15),
         (0, 2), (0, 5), (200, 2000))  # fmt: skip


def of_sklearn(name: str) -> tuple[Any, Any]:
    from sklearn import datasets

    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    if name == "diabetes":  # columns of norm 1 around 0; more than the median of 140 or not
        return np.clip(x / 0.2, -1, 1), (y > 140).astype(int)
    if name == "wine":
        low, high = np.array(_WINE).T
        return np.clip((x - low) / (high - low), 0, 1), y
    most = {"iris": 8.0, "digits": 16.0, "breast_cancer": np.array(_BREAST)}[name]
    return np.clip(x / most, 0, 1), y


def images(name: str) -> tuple[Any, Any]:
    file = stored(name)
    return file["x_train"].reshape(60_000, 784) / np.float32(255), file["y_train"].astype(int)


def clicks() -> tuple[Any, Any]:
    """Which of three campaigns a visitor saw, by position and affinities: indicators and counts."""
    file, parts = stored("open_bandit_small"), []
    for k, name in enumerate(("all", "men", "women")):
        user = np.hstack([file[f"random_{name}_user"][:, [j]] == np.arange(8) for j in range(4)])
        place = file[f"random_{name}_position"][:, None] == np.arange(1, 4)
        parts.append((np.hstack([user, place]).astype(float), np.full(len(user), k)))
    return np.vstack([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def whole(data: Table) -> tuple[Any, Any]:
    return np.vstack([data[0], data[2]]), np.concatenate([data[1], data[3]])


#: A set, and how many of its rows are learned from (None: four fifths).
REAL: dict[str, tuple[Callable[[], tuple[Any, Any]], int | None]] = {
    "iris": (lambda: of_sklearn("iris"), None),
    "wine": (lambda: of_sklearn("wine"), None),
    "diabetes": (lambda: of_sklearn("diabetes"), None),
    "breast cancer": (lambda: of_sklearn("breast_cancer"), None),
    "digits": (lambda: of_sklearn("digits"), None),
    "Adult 2,000": (lambda: whole(adult()), 2000),
    "Bank 4,000": (lambda: whole(bank()), 4000),
    "campaigns 6,000": (clicks, 6000),
    "Fashion-MNIST 4,000": (lambda: images("fashion_mnist"), 4000),
    "MNIST 4,000": (lambda: images("mnist"), 4000),
}
TABLES = (*SYNTHETIC, *REAL)
_SETS: dict[str, tuple[Any, Any]] = {}


def drawn(name: str, seed: int) -> Table:
    if name in SYNTHETIC:
        return synthetic(name, seed)
    load, rows = REAL[name]
    if name not in _SETS:
        _SETS[name] = load()
    return shuffled(*_SETS[name], seed, rows=rows)


def settings(data: Table, epsilon: float) -> dict[str, Any]:
    """Of Opacus: those tuned for the nearest shape."""
    (n, p), k = data[0].shape, len(np.unique(data[1]))

    def away(name: str) -> float:
        rows, columns, classes, _ = SHAPES[name]
        far = abs(math.log(rows / n)) + abs(math.log(columns / p))
        return far + 100.0 * ((classes > 2) != (k > 2))

    tuned = json.loads(TUNED.read_text())
    at = [name for name in SHAPES if f"{name}|{epsilon:g}" in tuned]
    return dict(tuned[f"{min(at, key=away)}|{epsilon:g}"])


def dp_sgd(data: Table, epsilon: float, seed: int) -> float:
    """What `opacus` runs, in numpy, with noise by the central limit, which is no more than that of
    its accountant."""
    from opacus_tuning import multiplier, sgd

    (x, y, held, told), asked = data, settings(data, epsilon)
    known = {"epochs": asked["epochs"], "parts": asked["parts"]}
    k, pairs = len(np.unique(y)), ((asked["clip"], asked["rate"]),)
    sigma = multiplier(epsilon, **known)
    w = sgd(
        np.asarray(x, np.float32), y, k, rows=len(y), sigma=sigma, **known, pairs=pairs, seed=seed
    )
    m = held @ w[:-1, 0] + w[-1, 0]
    return float((((m[:, 0] > 0) if k == 2 else m.argmax(1)) == told).mean())


def measure(name: str, data: Table, epsilon: float, seed: int) -> float | None:
    if name == "majority":
        return float((data[3] == np.bincount(data[1]).argmax()).mean())
    if name == "not private":
        from sklearn.linear_model import LogisticRegression

        model = LogisticRegression(C=10.0, max_iter=300).fit(data[0], data[1])
        return float(model.score(data[2], data[3]))
    if name == "diffprivlib":
        return diffprivlib(data, epsilon, seed)
    if name == "dp-sgd":
        return dp_sgd(data, epsilon, seed)
    if name == "opacus":
        return opacus(data, epsilon, seed, settings(data, epsilon))
    if name == "frank_wolfe" and len(data[1]) > 100_000:
        return None  # a minute each
    return ours(name, data, epsilon, seed)


def run(out: Path, names: list[str], tables: list[str], seeds: int, epsilons: list[float]) -> Any:
    cells: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    missing: set[str] = set()
    for seed in range(seeds):
        for table in tables:
            asked = [(n, e) for n in names for e in ((0.0,) if n in ONCE else epsilons)]
            keys = {f"{table}|{n}|{e:g}|{seed}": (n, e) for n, e in asked}
            data = drawn(table, seed) if any(key not in cells for key in keys) else None
            for key, (name, epsilon) in keys.items():
                if key in cells or name in missing or data is None:
                    continue
                began = time.perf_counter()
                try:
                    found = measure(name, data, epsilon, seed)
                except ImportError as absent:
                    missing.add(name)
                    print(f"{name} is left out: {absent}")
                    continue
                cells[key] = {"accuracy": found, "s": round(time.perf_counter() - began, 2)}
            draft = out.with_suffix(".draft")
            draft.write_text(json.dumps(cells, indent=0))
            draft.replace(out)
    return cells


def of_seeds(cells: dict[str, Any], table: str, name: str, epsilon: float) -> dict[int, float]:
    start = f"{table}|{name}|{0.0 if name in ONCE else epsilon:g}|"
    found = {int(k.split("|")[-1]): c["accuracy"] for k, c in cells.items() if k.startswith(start)}
    return {seed: value for seed, value in found.items() if value is not None}


def verdict(cells: dict[str, Any], table: str, epsilon: float) -> tuple[str, list[str]]:
    """The word of a cell, and who is ahead by how many points, with the error of the difference."""
    auto = of_seeds(cells, table, "auto", epsilon)
    if len(auto) < 2:
        return "ONE SEED", []
    word, said = "HOLDS", []
    for name in (*SOLVERS[1:], "majority", *PEERS):
        other = of_seeds(cells, table, name, epsilon)
        gaps = [100 * (other[seed] - auto[seed]) for seed in auto if seed in other]
        allowed = 1.0 if name in SOLVERS else 0.0
        if len(gaps) < 2 or (ahead := float(np.mean(gaps))) <= allowed:
            continue
        error = float(np.std(gaps, ddof=1)) / math.sqrt(len(gaps))
        said.append(f"{name} ahead by {ahead:.2f} ± {error:.2f}")
        if word != "DIFFERS":
            word = "WITHIN ERROR" if ahead - allowed <= 2 * error else "DIFFERS"
    return word, said


def check(cells: dict[str, Any], tables: list[str], epsilons: list[float]) -> None:
    told: dict[str, int] = {"HOLDS": 0, "WITHIN ERROR": 0, "DIFFERS": 0, "ONE SEED": 0}
    for table in tables:
        for epsilon in epsilons:
            if not of_seeds(cells, table, "auto", epsilon):
                continue
            word, said = verdict(cells, table, epsilon)
            told[word] += 1
            print(f"{table:<30}{epsilon:>5g}  {word}{': ' * bool(said)}{'; '.join(said)}")
    print(", ".join(f"{name} {count}" for name, count in told.items()))


def show(cells: dict[str, Any], tables: list[str], epsilons: list[float]) -> None:
    names = [*ONCE, *SOLVERS, *PEERS]
    print("| table | ε | " + " | ".join(names) + " |\n" + "|---" * (len(names) + 2) + "|")
    for table in tables:
        for epsilon in epsilons:
            kept = [list(of_seeds(cells, table, name, epsilon).values()) for name in names]
            row = [f"{np.mean(values):.3f}" if values else "–" for values in kept]
            print(f"| {table} | {epsilon:g} | {' | '.join(row)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("convex_aside.json"))
    parser.add_argument("--also", type=Path, nargs="*", default=(), help="other files to read")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--only", nargs="+", default=[*ONCE, *SOLVERS, *PEERS])
    parser.add_argument("--tables", nargs="+", default=list(TABLES))
    parser.add_argument("--epsilons", nargs="+", type=float, default=list(EPSILONS))
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.check:
        cells = json.loads(given.out.read_text())
    else:
        cells = run(given.out, given.only, given.tables, given.seeds, given.epsilons)
    for other in given.also:
        cells |= json.loads(other.read_text())
    (check if given.check else show)(cells, given.tables, given.epsilons)


if __name__ == "__main__":
    main()
