"""Rows per second of one private pass, beside scikit-learn's SGD (and river's, if installed).

    python benchmarks/convex_speed.py --rows 1000000 --features 100
    python benchmarks/convex_speed.py --single 3000

Every estimator sees the same rows once, in order. Peak memory is that of the process beyond the
table itself, read before and after the private pass. --single: streams of so many rows, one a call,
with 8 columns at default settings, with and without ids, per second of processor time (median of
five); batches grow with a stream, so that longer ones are faster.
"""

from __future__ import annotations

import argparse
import importlib.util
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import SGDClassifier

from noshuffle.convex import PrivateLogisticRegression


def table(rows: int, features: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, features), dtype=np.float32)
    truth = rng.standard_normal(features, dtype=np.float32) / np.float32(np.sqrt(features))
    y = (x @ truth + 0.5 * rng.standard_normal(rows, dtype=np.float32) > 0).astype(np.int64)
    return x, y


def peak() -> float:
    """Largest resident size so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    return work(), time.perf_counter() - began


def river_rate(x: Any, y: Any, rows: int) -> float:
    from river import linear_model, optim

    model = linear_model.LogisticRegression(optimizer=optim.SGD(0.1))
    names = [f"f{i}" for i in range(x.shape[1])]
    began = time.perf_counter()
    for row, target in zip(x[:rows].tolist(), y[:rows].tolist()):
        entry = dict(zip(names, row))
        model.predict_proba_one(entry)
        model.learn_one(entry, bool(target))
    return rows / (time.perf_counter() - began)


def single_rows(rows: int = 3000, repeats: int = 5) -> None:
    """Streams of one row a call."""
    x, y = table(rows, 8)
    x = x.astype(np.float64)
    kinds: dict[str, Any] = {
        "without ids": None,
        "integers as ids": list(range(rows)),
        "names as ids": [f"user {i}" for i in range(rows)],
    }
    for name, ids in kinds.items():
        rates = []
        for _ in range(repeats):
            model = PrivateLogisticRegression(bounds=(-4, 4), classes=[0, 1])
            began = time.process_time()
            for i in range(rows):
                own = None if ids is None else ids[i : i + 1]
                model.partial_fit(x[i : i + 1], y[i : i + 1], ids=own)
            rates.append(rows / (time.process_time() - began))
        told = f"{np.median(rates):>12,.0f}   ({min(rates):,.0f} to {max(rates):,.0f})"
        print(f"{'noshuffle partial_fit, row by row, ' + name:<51}{told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--features", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--single", type=int, default=0)
    given = parser.parse_args()
    if given.single:
        torch.set_num_threads(1)
        return single_rows(given.single)
    torch.set_num_threads(given.threads)
    x, y = table(given.rows, given.features)
    print(f"{given.rows:,} rows x {given.features} features, float32, one pass")
    print(f"{'estimator':<42}{'seconds':>9}{'rows/s':>12}{'accuracy':>10}{'extra MiB':>11}")

    def show(name: str, model: Any, fit: Callable[[], Any]) -> None:
        before = peak()
        _, seconds = timed(fit)
        extra = peak() - before
        score = model.score(x[-20000:], y[-20000:])
        rate = given.rows / seconds
        print(f"{name:<42}{seconds:>9.2f}{rate:>12,.0f}{score:>10.3f}{extra:>11.0f}", flush=True)

    small = slice(0, 20_000)
    for mechanism in ("blt", "tree", "identity"):
        for batch in (64, 256):
            model = PrivateLogisticRegression(
                mechanism=mechanism, batch_size=batch, bounds=(-4, 4), classes=[0, 1]
            )
            model.fit(x[small], y[small])  # compiled helpers and imports are not what is measured
            name = f"noshuffle logistic, {mechanism}, batch {batch}"
            show(name, model, lambda model=model: model.fit(x, y))
    model = PrivateLogisticRegression(bounds=(-4, 4), horizon=given.rows, batch_size=256)

    def stream() -> None:
        for first in range(0, given.rows, 1000):
            piece = slice(first, first + 1000)
            model.partial_fit(x[piece], y[piece], classes=[0, 1])

    show("noshuffle partial_fit, 1,000 rows a call", model, stream)
    single_rows()
    sgd = SGDClassifier(loss="log_loss", max_iter=1, tol=None, shuffle=False)
    show("scikit-learn SGDClassifier.fit", sgd, lambda: sgd.fit(x, y))
    sgd2 = SGDClassifier(loss="log_loss", shuffle=False)

    def pieces() -> None:
        for first in range(0, given.rows, 1000):
            piece = slice(first, first + 1000)
            sgd2.partial_fit(x[piece], y[piece], classes=[0, 1])

    show("scikit-learn SGDClassifier.partial_fit", sgd2, pieces)
    if importlib.util.find_spec("river"):
        rate = river_rate(x, y, min(given.rows, 20_000))
        print(f"{'river LogisticRegression (first 20,000)':<42}{'':>9}{rate:>12,.0f}")
    else:
        print("river is not installed; its row is left out")


if __name__ == "__main__":
    main()
