"""Private linear classifiers on ten tables at five ε, every solver beside the peers.

    NOSHUFFLE_DATA=... python benchmarks/convex_table.py --out convex.json [--quick] [--seeds 2]
    ANOTHER_PYTHON benchmarks/convex_table.py --out convex.json --only diffprivlib   (opacus, …)
    python benchmarks/convex_table.py --out convex.json --check

Test accuracy, δ = 1e-6 (diffprivlib: δ = 0), zero-out neighbours, a random fifth held out (Adult:
its official split; 10,000 columns: 6,000 fresh rows), mean over seeds of the noise (ten on tables
of 2,000 rows and less). --check says of every cell whether auto is within a point of the best
linear solver, not below the majority class, and above the peers, and measures nothing. Columns have
public bounds, and nothing is tuned here: `auto` takes its steps by a rule that was made on
synthetic tables (convex_rule.py), in a form that was chosen while looking at the first six of these
tables but Bank.
Of the peers, diffprivlib has rows of norm √p; Opacus 20 epochs, batches of n/10, rate 2, clip norm
1, and `opacus tuned` what opacus_tuning.py chose for its rows, columns, classes and ε on synthetic
tables. Every cell is kept in the file as soon as it is there, and a second run goes on; peers are
measured by whichever interpreter has them, and a line says what was left out.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import sys
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

EPSILONS = (0.1, 0.5, 1.0, 2.0, 8.0)
DELTA = 1e-6
SOLVERS = ("auto", "objective", "ftrl", "ftrl x5", "frank_wolfe")
PEERS = ("diffprivlib", "opacus", "opacus tuned")
#: Settings by opacus_tuning.py.
TUNED = Path(__file__).parents[1] / "docs/results/convex/opacus.json"
Table = tuple[Any, Any, Any, Any]


def split(x: Any, y: Any) -> Table:
    order = np.random.default_rng(0).permutation(len(y))
    cut = int(0.8 * len(y))
    return x[order[:cut]], y[order[:cut]], x[order[cut:]], y[order[cut:]]


def stored(name: str) -> Any:
    return np.load(Path(os.environ["NOSHUFFLE_DATA"]) / f"{name}.npz")


def coded(file: Any, bounds: list[tuple[float, float] | None]) -> Any:
    """Numbers scaled by public bounds to [0, 1], categories as indicators of the code book."""
    parts = [
        np.clip((c - b[0]) / (b[1] - b[0]), 0, 1)[:, None]
        for c, b in zip(file["num"].T, bounds)
        if b is not None
    ]
    book = json.loads(str(file["cat_values"]))
    for column, values in zip(file["cat"].T, book.values() if isinstance(book, dict) else book):
        parts.append((column[:, None] == np.arange(len(values))).astype(float))
    return np.hstack(parts)


def adult() -> Table:
    file = stored("adult")
    x = coded(file, [(17, 90), (0, 1_500_000), (1, 16), (0, 99_999), (0, 4_356), (1, 99)])
    y, held = file["y"].astype(int), file["is_test"] == 1
    return x[~held], y[~held], x[held], y[held]


def bank() -> Table:
    file = stored("bank_marketing")
    bounds = [(17, 98), None, (1, 56), (0, 999), (0, 7), (-4, 2), (92, 95), (-51, -26), (0, 6)]
    return split(coded(file, [*bounds, (4900, 5300)]), file["y"].astype(int))


def elec2() -> Table:
    file = stored("elec2")
    return split(file["x"] / np.array([1, 7, 1, 1, 1, 1, 1, 1.0]), file["y"].astype(int))


def digits() -> Table:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return split(x / 16, y)


#: Largest values of the thirty columns as scikit-learn's description of the set has them.
_BREAST = (
    28.11, 39.28, 188.5, 2501.0, 0.163, 0.345, 0.427, 0.201, 0.304, 0.097, 2.873, 4.885, 21.98,
    542.2, 0.031, 0.135, 0.396, 0.053, 0.079, 0.03, 36.04, 49.54, 251.2, 4254.0, 0.223, 1.058,
    1.252, 0.291, 0.664, 0.208,
)  # fmt: skip


def breast() -> Table:
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    return split(np.clip(x / np.array(_BREAST), 0, 1), y)


def made() -> Table:
    from sklearn.datasets import make_classification

    x, y = make_classification(10_000, 20, random_state=0)
    return split(np.clip(x, -5, 5) / 5, y)


def drawn(n: int, p: int, *, support: int | None = None, held: int = 0) -> Table:
    """Columns of unequal spread around unequal centres; a linear margin with noise.

    `held` rows are drawn beside the table in the place of its last fifth.
    """
    rng = np.random.default_rng((n, p))
    x = rng.standard_normal((n, p), dtype=np.float32)
    spread = 10 ** rng.uniform(-1, 0, p)
    x = x * spread * 0.4
    w = rng.normal(size=p) * (np.arange(p) < (support or p))
    toward = w / x.std(0)

    def labels(rows: Any) -> Any:
        margin = rows @ toward / math.sqrt(support or p)
        return (margin + 0.5 * rng.normal(size=len(rows)) > 0).astype(int)

    y, centre = labels(x), rng.uniform(-0.5, 0.5, p)
    data = split(np.clip(x + centre, -1, 1), y)
    if not held:
        return data
    fresh = rng.standard_normal((held, p), dtype=np.float32) * spread * 0.4
    return (*data[:2], np.clip(fresh + centre, -1, 1), labels(fresh))


TABLES: dict[str, Callable[[], Table]] = {
    "Adult": adult,
    "Bank": bank,
    "Elec2": elec2,
    "digits": digits,
    "breast cancer": breast,
    "make_classification": made,
    "1,000 x 5": lambda: drawn(1000, 5),
    "10,000 x 100": lambda: drawn(10_000, 100),
    "2,000 x 10,000": lambda: drawn(2000, 10_000, support=5, held=6000),
    "1,000,000 x 10": lambda: drawn(1_000_000, 10),
}
#: Rows held out.
HELD = dict(zip(TABLES, (16_281, 8_238, 9_063, 360, 114, 2000, 200, 2000, 6000, 200_000)))
#: Rows learned from, columns, classes and the lower bound of the columns: public.
SHAPES = dict(zip(TABLES, (
    (32_561, 105, 2, 0), (32_950, 62, 2, 0), (36_249, 8, 2, 0), (1437, 64, 10, 0),
    (455, 30, 2, 0), (8000, 20, 2, -1), (800, 5, 2, -1), (8000, 100, 2, -1),
    (1600, 10_000, 2, -1), (800_000, 10, 2, -1),
)))  # fmt: skip
QUICK = ("digits", "breast cancer", "1,000 x 5")
#: Tables of so few rows that one run says little have this many seeds, of all but Opacus.
SMALL_SEEDS = 10


def ours(name: str, data: Table, epsilon: float, seed: int) -> float | None:
    from noshuffle.convex import PrivateLogisticRegression

    x, y, held, told = data
    known: dict[str, Any] = {"epsilon": epsilon, "delta": DELTA, "classes": np.unique(y)}
    known |= {"bounds": (-1, 1) if x.min() < 0 else (0, 1), "test_seed": seed}
    settings: dict[str, Any] = {"solver": name.split()[0]}
    if name == "ftrl x5":
        settings["passes"] = 5
    if name in ("objective", "frank_wolfe") and len(np.unique(y)) > 2:
        return None
    if name == "objective" and x.shape[1] > 2000:
        return None
    model = PrivateLogisticRegression(**known, **settings)
    return float(model.fit(x, y).score(held, told))


def let_import() -> None:
    """diffprivlib 0.6.6 imports names of trees and gives an argument that scikit-learn 1.9 has not:
    its forests are left out, the argument is taken and kept (it is "ovr", as it was)."""
    from sklearn.linear_model import LogisticRegression

    if "multi_class" in inspect.signature(begin := LogisticRegression.__init__).parameters:
        return
    forest: Any = types.ModuleType("diffprivlib.models.forest")
    forest.RandomForestClassifier = forest.DecisionTreeClassifier = object
    sys.modules.setdefault(forest.__name__, forest)

    def with_argument(self: Any, *given: Any, multi_class: str = "ovr", **named: Any) -> None:
        begin(self, *given, **named)
        self.multi_class = multi_class

    LogisticRegression.__init__ = with_argument


def diffprivlib(data: Table, epsilon: float, seed: int) -> float | None:
    let_import()
    from diffprivlib.models import LogisticRegression  # type: ignore[import-not-found]

    x, y, held, told = data
    norm = math.sqrt(x.shape[1])
    model = LogisticRegression(epsilon=epsilon, data_norm=norm, random_state=seed, max_iter=500)
    return float(model.fit(x, y).score(held, told))


FIXED = {"epochs": 20, "parts": 10, "rate": 2.0, "clip": 1.0}


def opacus(data: Table, epsilon: float, seed: int, asked: dict[str, Any]) -> float | None:
    import torch
    from opacus import PrivacyEngine  # type: ignore[import-not-found]
    from torch.utils.data import DataLoader, TensorDataset

    x, y, held, told = (torch.as_tensor(np.asarray(v)) for v in data)
    torch.manual_seed(seed)
    model: Any = torch.nn.Linear(x.shape[1], int(y.max()) + 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=asked["rate"])
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=max(1, len(x) // asked["parts"]))
    model, optimizer, loader = PrivacyEngine().make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=loader, target_epsilon=epsilon,
        target_delta=DELTA, epochs=asked["epochs"], max_grad_norm=asked["clip"],
    )  # fmt: skip
    x = x.float()
    for _ in range(asked["epochs"]):
        for index in loader.batch_sampler:  # rows of its batches, without collating them one by one
            optimizer.zero_grad()
            if len(index):
                torch.nn.functional.cross_entropy(model(x[index]), y[index]).backward()
                optimizer.step()
    return float((model(held.float()).argmax(1) == told).float().mean())


def measure(table: str, name: str, data: Table, epsilon: float, seed: int) -> float | None:
    if name == "majority":
        return float((data[3] == np.bincount(data[1]).argmax()).mean())
    if name == "not private":
        from sklearn.linear_model import LogisticRegression

        keep = slice(0, 200_000)
        model = LogisticRegression(C=100.0, max_iter=300).fit(data[0][keep], data[1][keep])
        return float(model.score(data[2], data[3]))
    if name == "diffprivlib":
        return diffprivlib(data, epsilon, seed)
    if name in PEERS:
        tuned = json.loads(TUNED.read_text()) if name == "opacus tuned" else {}
        return opacus(data, epsilon, seed, tuned[f"{table}|{epsilon:g}"] if tuned else FIXED)
    return ours(name, data, epsilon, seed)


def run(
    out: Path, *, names: list[str], tables: list[str], seeds: int, epsilons: list[float]
) -> None:
    cells: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    missing: set[str] = set()
    for table in tables:
        data: Table | None = None
        for name in names:
            once = name in ("majority", "not private")
            for epsilon in (0.0,) if once else epsilons:
                is_small = table in QUICK and not name.startswith("opacus") and seeds > 1
                for seed in range(1 if once else SMALL_SEEDS if is_small else seeds):
                    key = f"{table}|{name}|{epsilon:g}|{seed}"
                    if key in cells or name in missing:
                        continue
                    data = data or TABLES[table]()
                    began = time.perf_counter()
                    try:
                        found = measure(table, name, data, epsilon, seed)
                    except ImportError as absent:
                        missing.add(name)
                        print(f"{name} is left out: {absent}")
                        continue
                    except KeyError as untuned:
                        print(f"{key} is left out: opacus_tuning.py has no settings for {untuned}")
                        continue
                    cells[key] = {"accuracy": found, "s": round(time.perf_counter() - began, 2)}
                    draft = out.with_suffix(".draft")
                    draft.write_text(json.dumps(cells, indent=0))
                    draft.replace(out)
    show(cells, tables)


def accuracies(cells: dict[str, Any], table: str, name: str, epsilon: float) -> list[float]:
    """Those of all seeds."""
    at = 0.0 if name in ("majority", "not private") else epsilon
    start = f"{table}|{name}|{at:g}|"
    found = [cell["accuracy"] for key, cell in cells.items() if key.startswith(start)]
    return [value for value in found if value is not None]


def check(cells: dict[str, Any], tables: list[str]) -> None:
    """One line for each cell: what is ahead of `auto`, in points, with the error of the difference.

    The error is of seeds and of the rows held out, as if two models erred independently.
    """
    told: dict[str, int] = {"HOLDS": 0, "WITHIN ERROR": 0, "DIFFERS": 0}
    for table in tables:
        for epsilon in EPSILONS:
            of = {n: accuracies(cells, table, n, epsilon) for n in (*SOLVERS, *PEERS)}
            auto, least = of["auto"], accuracies(cells, table, "majority", epsilon)
            rivals = {**{n: of[n] for n in (*SOLVERS[1:], *PEERS) if of[n]}, "majority": least}
            said, worst = [], "HOLDS"
            for name, values in rivals.items():
                ahead = float(np.mean(values) - np.mean(auto))
                if ahead <= (0.01 if name in SOLVERS else 0.0):
                    continue
                spread = max(float(np.std(v)) for v in (auto, values))
                chance = sum(float(np.mean(v)) * (1 - float(np.mean(v))) for v in (auto, values))
                seeds = spread**2 * (1 / len(auto) + 1 / len(values))
                error = math.sqrt(seeds + chance / HELD[table])
                said.append(f"{name} ahead by {100 * ahead:.2f} ± {100 * error:.2f}")
                if worst != "DIFFERS":
                    worst = "WITHIN ERROR" if ahead <= 2 * error else "DIFFERS"
            told[worst] += 1
            gaps = ", ".join(n for n, values in of.items() if not values)
            print(f"{table:<20}{epsilon:>5g}  {worst}{': ' * bool(said)}{'; '.join(said)}"
                  + f"  (no {gaps})" * bool(gaps), flush=True)  # fmt: skip
    print(", ".join(f"{name} {count}" for name, count in told.items()))


def show(cells: dict[str, Any], tables: list[str]) -> None:
    names = ["majority", "not private", *SOLVERS, *PEERS]
    print(f"{'table':<22}{'ε':>5}" + "".join(f"{name:>13}" for name in names))
    for table in tables:
        for epsilon in EPSILONS:
            line = f"{table:<22}{epsilon:>5g}"
            for name in names:
                kept = accuracies(cells, table, name, epsilon)
                line += f"{np.mean(kept):>13.3f}" if kept else f"{'–':>13}"
            print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("convex_table.json"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=None)
    parser.add_argument("--tables", nargs="+", default=None)
    parser.add_argument("--epsilons", nargs="+", type=float, default=list(EPSILONS))
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    tables = given.tables or list(QUICK if given.quick else TABLES)
    if given.check:
        check(json.loads(given.out.read_text()), tables)
        return
    names = given.only or ["majority", "not private", *SOLVERS, *PEERS]
    seeds = 1 if given.quick else given.seeds
    run(given.out, names=names, tables=tables, seeds=seeds, epsilons=given.epsilons)


if __name__ == "__main__":
    main()
