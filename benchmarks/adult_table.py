"""Adult, and a sparse problem: what one private pass in the given order is worth.

    NOSHUFFLE_DATA=... python benchmarks/adult_table.py [--seeds 3]

Adult: test accuracy and AUC after one pass in file order, δ = 1e-6, beside logistic regression
without privacy, two forms of DP-SGD (independent noise in one pass; Poisson sampling, five epochs)
and objective perturbation. A sparse problem with 10⁵ features: the support found by the l1
composite, and by cutting DP-SGD. Features use published bounds and code books only. Nothing is
tuned per ε, but the defaults of the estimators (rate rule, radius, averaging), the added log
features and the ridge of objective perturbation were chosen while looking at these very tables, so
read them as what the defaults give, not as a search. Streams are in `stream_table.py`.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np
import torch
from scipy import sparse
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from noshuffle.convex import PrivateLogisticRegression, PrivateSVC
from noshuffle.convex.losses import logistic
from noshuffle.convex.phases import PhaseBudget, make_phase
from noshuffle.convex.solvers.objective_perturbation import objective_perturbation
from noshuffle.datasets.tables import adult
from noshuffle.noise import NoiseStream, Source, new_key
from noshuffle.participation import Poisson
from noshuffle.plan import Plan

EPSILONS = (0.1, 0.5, 1.0, 2.0, 8.0)
DELTA = 1e-6


def rows_of(x: Any) -> Any:
    """Take the scaling to norm one back: the last column is a one that was scaled along."""
    x = x.numpy().astype(np.float64)
    return x[:, :-1] / x[:, -1:]


def adult_rows() -> tuple[Any, Any, Any, Any]:
    """Adult with the logarithms of capital gain and loss beside their scaled values."""
    data = adult()
    parts = []
    for x in (rows_of(data.x_train), rows_of(data.x_test)):
        logs = [np.log1p(x[:, 3] * 99_999) / 11.6, np.log1p(x[:, 4] * 4_356) / 8.4]
        parts.append(np.column_stack([x, *logs]))
    return parts[0], data.y_train.numpy(), parts[1], data.y_test.numpy()


def poisson_sgd(x: Any, y: Any, *, epsilon: float, batch: int = 256, epochs: int = 5) -> Any:
    """DP-SGD with secret Poisson batches: weights (intercept last), linearly averaged."""
    n, steps = len(x), epochs * len(x) // batch
    plan = Plan.fit(Poisson(steps, batch / n), mechanism="identity", epsilon=epsilon, delta=DELTA)
    rows = np.hstack([x, np.ones((n, 1))])
    norms = np.linalg.norm(rows, axis=1)
    noise = NoiseStream(
        plan.strategy.recipe(steps),
        Source(new_key()),
        {"w": (rows.shape[1],)},
        scale=plan.noise_multiplier,
        steps=steps,
    )
    secret = np.random.default_rng()
    w = average = np.zeros(rows.shape[1])
    for t in range(steps):
        drawn = secret.random(n) < batch / n
        residual = 1 / (1 + np.exp(-rows[drawn] @ w)) - y[drawn]
        residual *= np.minimum(1.0, 1.0 / np.maximum(np.abs(residual) * norms[drawn], 1e-12))
        total = torch.from_numpy(rows[drawn].T @ residual)
        noise.add_({"w": total})
        w = w - 2.0 * total.numpy() / batch
        average = average + 2.0 / (t + 2) * (w - average)
    return average


def objective(x: Any, y: Any, x_test: Any, *, epsilon: float) -> Any:
    """Test margins of objective perturbation on rows of norm one; it sees all rows at once."""

    def unit(rows: Any) -> Any:
        rows = np.hstack([rows, np.ones((len(rows), 1))])
        return rows / np.linalg.norm(rows, axis=1, keepdims=True) * (1 - 1e-12)

    found = objective_perturbation(
        logistic(),
        unit(x),
        2.0 * y - 1.0,
        epsilon=epsilon,
        delta=DELTA,
        ridge=1e-4 / epsilon,
        neighbours="zero-out",
    )
    return unit(x_test) @ found.weights


def measured(y: Any, margins: Any) -> tuple[float, float]:
    return float(((margins > 0) == y).mean()), float(roc_auc_score(y, margins))


def adult_table(seeds: int) -> None:
    x, y, x_test, y_test = adult_rows()
    plain = LogisticRegression(C=100.0, max_iter=3000).fit(x, y)
    best = measured(y_test, plain.decision_function(x_test))
    print(f"Adult, {len(x):,} rows x {x.shape[1]} features, one pass in file order, δ = {DELTA:g}")
    print(f"logistic regression without privacy: accuracy {best[0]:.4f}, AUC {best[1]:.4f}")
    print(f"mean of {seeds} runs: accuracy / AUC")
    makers = {
        "DP-FTRL BLT": {"mechanism": "blt"},
        "DP-FTRL tree": {"mechanism": "tree"},
        "SVC BLT": {"mechanism": "blt"},
        "DP-SGD one pass": {"mechanism": "identity"},
    }
    names = [*makers, "DP-SGD Poisson 5 ep.", "objective pert."]
    print(f"{'ε':>5}" + "".join(f"{name:>22}" for name in names))
    for epsilon in EPSILONS:
        line = f"{epsilon:>5}"
        for name in names:
            found = []
            for _ in range(seeds):
                if name in makers:
                    kind = PrivateSVC if name.startswith("SVC") else PrivateLogisticRegression
                    model = kind(
                        epsilon=epsilon, delta=DELTA, classes=[0, 1], solver="ftrl", **makers[name]
                    )
                    found.append(measured(y_test, model.fit(x, y).decision_function(x_test)))
                elif name.startswith("objective"):
                    found.append(measured(y_test, objective(x, y, x_test, epsilon=epsilon)))
                else:
                    w = poisson_sgd(x, y, epsilon=epsilon)
                    found.append(measured(y_test, x_test @ w[:-1] + w[-1]))
            accuracy, auc = np.mean(found, axis=0)
            line += f"{f'{accuracy:.4f} / {auc:.4f}':>22}"
        print(line, flush=True)


def sparse_problem(n: int, d: int, *, seed: int, support: int = 10) -> tuple[Any, Any, set[int]]:
    """Ten features out of d decide the label; every row has fifteen others, drawn at random."""
    rng = np.random.default_rng(seed)
    true = rng.choice(d, support, replace=False)
    signs = rng.choice([-1.0, 1.0], support)
    values = (rng.random((n, support)) < 0.3) * rng.choice([-1.0, 1.0], size=(n, support))
    y = (values @ signs + 0.3 * rng.normal(size=n) > 0).astype(np.int64)
    at, which = np.nonzero(values)
    rows = np.concatenate([at, np.repeat(np.arange(n), 15)])
    columns = np.concatenate([true[which], rng.integers(d, size=15 * n)])
    cells = np.concatenate([values[at, which], rng.choice([-1.0, 1.0], size=15 * n)])
    return sparse.csr_array((cells, (rows, columns)), shape=(n, d)), y, set(true.tolist())


def found_by(
    x: Any, y: Any, *, epsilon: float, batch: int, mechanism: str, penalty: bool
) -> tuple[set[int], Any]:
    """Columns that stand out of the noise, and all weights.

    The line is the size of the largest of d noise coordinates, √(2 ln d) deviations of the noise
    at the end: known before any data is seen. l1 soft-thresholds there; DP-SGD is cut there.
    """
    n, d = x.shape
    phase = make_phase(PhaseBudget(epsilon, DELTA, mechanism), rows=n, passes=1, batch_size=batch)
    line = math.sqrt(2 * math.log(d)) * float(phase.error[-1]) / batch
    model = PrivateLogisticRegression(
        epsilon=epsilon,
        delta=DELTA,
        batch_size=batch,
        classes=[0, 1],
        mechanism=mechanism,
        averaging="last",
        penalty="l1" if penalty else None,
        alpha=line / phase.plan.steps,
    ).fit(x, y)
    w = model.coef_[0]
    cut = 0.0 if penalty else line * model.learning_rate_
    return set(np.flatnonzero(np.abs(w) > cut).tolist()), w


def sparse_table(seeds: int, *, d: int = 100_000, epsilon: float = 2.0) -> None:
    """Exact zeros by the l1 composite with BLT noise, beside DP-SGD that is cut.

    Both at a batch of 20 and at their own best of four batch sizes (judged by the truth). DP-SGD is
    cut where its noise ends, and once more with the size of the support told to it (top ten).
    """
    print(f"\nSparse logistic regression, d = {d:,}, ε = {epsilon}, support of ten features")
    print("true / false features found, mean over seeds; top ten: true ones")
    names = ("l1, 20", "l1, best", "DP-SGD cut, 20", "DP-SGD cut, best")
    names += ("DP-SGD top ten, 20", "DP-SGD top ten, best")
    print(f"{'rows':>7}" + "".join(f"{name:>22}" for name in names))
    for n in (200, 300, 1000, 1500, 2500, 10_000):
        told: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for seed in range(seeds):
            x, y, true = sparse_problem(n, d, seed=seed)
            for kind, mechanism in (("l1", "blt"), ("DP-SGD", "identity")):
                hits, tops = [], []
                for batch in (20, n // 10, n // 2, n):
                    kept, w = found_by(
                        x, y, epsilon=epsilon, batch=batch, mechanism=mechanism,
                        penalty=kind == "l1",
                    )  # fmt: skip
                    hits.append((float(len(kept & true)), float(len(kept - true))))
                    top = set(np.argsort(-np.abs(w))[:10].tolist())
                    tops.append((float(len(top & true)), float(len(top - true))))
                best = max(hits, key=lambda pair: pair[0] - pair[1])
                name = kind if kind == "l1" else "DP-SGD cut"
                told[f"{name}, 20"].append(hits[0])
                told[f"{name}, best"].append(best)
                if kind != "l1":
                    told["DP-SGD top ten, 20"].append(tops[0])
                    told["DP-SGD top ten, best"].append(max(tops))
        line = f"{n:>7,}"
        for name in names:
            right, wrong = np.mean(told[name], axis=0)
            line += f"{f'{right:.1f} / {wrong:.1f}':>22}"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=("adult", "sparse"), default=None)
    given = parser.parse_args()
    if given.only != "sparse":
        adult_table(given.seeds)
    if given.only != "adult":
        sparse_table(given.seeds)


if __name__ == "__main__":
    main()
