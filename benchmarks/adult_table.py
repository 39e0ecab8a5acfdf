"""Adult, Bank Marketing and Elec2: what one private pass in the given order is worth.

    NOSHUFFLE_DATA=... python benchmarks/adult_table.py [--seeds 3]

Adult: test accuracy and AUC after one pass in file order, δ = 1e-6, beside logistic regression
without privacy, two forms of DP-SGD (independent noise in one pass; Poisson sampling, five epochs)
and objective perturbation. Bank Marketing and Elec2: progressive AUC in time order (every row is
predicted before it is learned from), by quarters of the stream, which shows the drift. A sparse
problem with 10⁵ features: the support found by the l1 composite, and by cutting DP-SGD. Features
use published bounds and code books only. Nothing is tuned per ε, but the defaults of the estimators
(rate rule, radius, averaging), the added log features and the ridge of objective perturbation were
chosen while looking at these very tables, so read them as what the defaults give, not as a search.
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
from noshuffle.convex.phases import Budget, make_phase
from noshuffle.convex.solvers.objective_perturbation import objective_perturbation
from noshuffle.datasets.store import local
from noshuffle.datasets.tables import adult, bank_marketing
from noshuffle.errors import DataUnavailable
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
                    model = kind(epsilon=epsilon, delta=DELTA, classes=[0, 1], **makers[name])
                    found.append(measured(y_test, model.fit(x, y).decision_function(x_test)))
                elif name.startswith("objective"):
                    found.append(measured(y_test, objective(x, y, x_test, epsilon=epsilon)))
                else:
                    w = poisson_sgd(x, y, epsilon=epsilon)
                    found.append(measured(y_test, x_test @ w[:-1] + w[-1]))
            accuracy, auc = np.mean(found, axis=0)
            line += f"{f'{accuracy:.4f} / {auc:.4f}':>22}"
        print(line, flush=True)


def elec2_rows() -> tuple[Any, Any]:
    """Half-hours and weekdays as indicators, prices as logarithms: the calendar is public."""
    path = local("elec2.npz")
    if path is None:
        raise DataUnavailable("elec2.npz is not in $NOSHUFFLE_DATA; set it to the data folder")
    with np.load(path) as file:
        x, y = file["x"].astype(np.float64), file["y"].astype(np.int64)
    half_hour = np.eye(48)[np.rint(x[:, 2] * 47).astype(int)]
    weekday = np.eye(7)[np.rint(x[:, 1]).astype(int) - 1]
    price = np.log1p(1000 * x[:, [3, 5]]) / np.log(1001)
    return np.column_stack([x[:, [0, 4, 6, 7]], price, half_hour, weekday]), y


def bank_rows() -> tuple[Any, Any]:
    data = bank_marketing()
    x = np.concatenate([rows_of(data.x_train), rows_of(data.x_test)])
    return x, np.concatenate([data.y_train.numpy(), data.y_test.numpy()])


def progressive(x: Any, y: Any, model: PrivateLogisticRegression) -> Any:
    """Margins of every row by the model of the moment, batch by batch."""
    size = int(model.batch_size or 64)
    margins = np.zeros(len(y))
    for first in range(0, len(y), size):
        piece = slice(first, first + size)
        if first:
            margins[piece] = model.decision_function(x[piece])
        model.partial_fit(x[piece], y[piece], classes=[0, 1])
    return margins


def stream_table(name: str, x: Any, y: Any) -> None:
    print(f"\n{name}: {len(y):,} rows x {x.shape[1]} features in time order, progressive AUC")
    print(
        f"{'ε':>5}{'horizon':>10}{'all':>8}" + "".join(f"{f'quarter {q}':>11}" for q in range(1, 5))
    )
    quarter = np.array_split(np.arange(len(y)), 4)
    for epsilon in (*EPSILONS, math.inf):
        for horizon in (len(y), None) if epsilon == 1.0 else (len(y),):
            model = PrivateLogisticRegression(
                epsilon=epsilon, delta=DELTA, horizon=horizon, batch_size=64, averaging="last"
            )
            margins = progressive(x, y, model)
            parts = [roc_auc_score(y[q], margins[q]) for q in quarter]
            told = "known" if horizon else "unknown"
            line = f"{epsilon:>5}{told:>10}{roc_auc_score(y, margins):>8.3f}"
            print(line + "".join(f"{part:>11.3f}" for part in parts), flush=True)


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


def sparse_table(seeds: int, *, d: int = 100_000, epsilon: float = 2.0, batch: int = 20) -> None:
    """Exact zeros by the l1 composite; DP-SGD is given the true size of the support to cut
    at, and the best of three batch sizes.

    The penalty is the size of the largest of d noise coordinates, √(2 ln d) deviations of the mean
    gradient's noise at the end: known before any data is seen.
    """
    print(f"\nSparse logistic regression, d = {d:,}, ε = {epsilon}, support of ten features")
    print(
        f"{'rows':>7}{'l1: nonzero':>13}{'of them true':>14}"
        f"{'DP-SGD top ten, true:':>24}{'best batch':>14}"
    )
    for n in (1000, 1500, 2500, 10_000):
        found = []
        for seed in range(seeds):
            x, y, true = sparse_problem(n, d, seed=seed)
            common = {"epsilon": epsilon, "delta": DELTA, "batch_size": batch, "classes": [0, 1]}
            phase = make_phase(Budget(epsilon, DELTA, "blt"), rows=n, passes=1, batch_size=batch)
            alpha = math.sqrt(2 * math.log(d)) * float(phase.error[-1]) / n
            model = PrivateLogisticRegression(penalty="l1", alpha=alpha, **common).fit(x, y)
            kept = set(np.flatnonzero(model.coef_[0]).tolist())
            hits = []
            for size in (batch, 200, 1000):
                common["batch_size"] = size
                plain = PrivateLogisticRegression(mechanism="identity", **common).fit(x, y)
                top = set(np.argsort(-np.abs(plain.coef_[0]))[:10].tolist())
                hits.append(len(top & true))
            found.append((len(kept), len(kept & true), hits[0], max(hits)))
        a, b, c, e = np.mean(found, axis=0)
        print(f"{n:>7,}{a:>13.1f}{b:>14.1f}{c:>24.1f}{e:>14.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    adult_table(given.seeds)
    stream_table("Bank Marketing", *bank_rows())
    stream_table("Elec2", *elec2_rows())
    sparse_table(given.seeds)


if __name__ == "__main__":
    main()
