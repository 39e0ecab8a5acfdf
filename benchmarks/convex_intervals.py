"""Coverage of confidence intervals: how often they hold the coefficients that made the data.

    python benchmarks/convex_intervals.py --out intervals.json [--runs 1000] [--quick]

Rows uniform on [−1, 1]^p, a model with known coefficients, ε = 2, δ = 1e-6; every run draws a table
and fresh noise. Shares of `intervals` (all coefficients and the intercept) and `predict_interval`
(five rows) that hold the truth, at level 0.95; "table": sampling=False against the same fit without
noise, in every tenth run (with "sums", whose intervals are of the noise alone, in all). Every fifty
runs are kept in the file, and a second run goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from noshuffle.convex import (
    PrivateLinearRegression,
    PrivateLogisticRegression,
    PrivatePoissonRegressor,
)
from noshuffle.errors import Unsupported

CASES = {
    "linear 4,000 x 4": (4000, 4),
    "logistic 4,000 x 4": (4000, 4),
    "poisson 8,000 x 4": (8000, 4),
    "sums 4,000 x 4": (4000, 4),
}
NO_SAMPLING = dict.fromkeys(
    ("coefficients", "predictions", "table", "deviation", "noise"), math.nan
)


def drawn(kind: str, n: int, p: int, seed: int) -> tuple[Any, Any, Any, Any, Any, dict[str, Any]]:
    """Rows, targets, coefficients, what is expected of the rows, and an estimator's settings."""
    rng, w = np.random.default_rng((7, seed)), np.resize([0.8, -0.5, 0.0, 0.3], p)
    x = rng.uniform(-1, 1, size=(n, p))
    s = x @ w + 0.2
    true = np.append(w, 0.2)
    if kind in ("linear", "sums"):
        settings: dict[str, Any] = {"target_bounds": (-8, 8)}
        if kind == "sums":
            settings |= {"solver": "sums"}
        return x, s + 0.5 * rng.normal(size=n), true, s, PrivateLinearRegression, settings
    if kind == "poisson":
        mean = np.exp(s)
        return x, rng.poisson(mean), true, mean, PrivatePoissonRegressor, {"target_bounds": (0, 20)}
    chance = 1 / (1 + np.exp(-s))
    y = (rng.random(n) < chance).astype(int)
    return x, y, true, chance, PrivateLogisticRegression, {"classes": [0, 1], "clip_norm": 5.0}


def one(kind: str, n: int, p: int, seed: int) -> dict[str, float] | None:
    x, y, true, mean, estimator, settings = drawn(kind, n, p, seed)
    common = {"bounds": (-1, 1), "inference": True, **settings}
    model = estimator(epsilon=2.0, delta=1e-6, test_seed=seed, **common).fit(x, y)
    if kind == "sums":
        noise = model.intervals(sampling=False)
        table = _of_the_table(estimator, common, x, y, noise)
        return {**NO_SAMPLING, "table": table, "noise": float(noise.deviation.mean())}
    try:
        both, noise = model.intervals(), model.intervals(sampling=False)
    except Unsupported:
        return None
    low, high = model.predict_interval(x[:5]).T
    return {
        "coefficients": float(np.mean((both.low <= true) & (true <= both.high))),
        "predictions": float(np.mean((low <= mean[:5]) & (mean[:5] <= high))),
        "table": _of_the_table(estimator, common, x, y, noise) if seed % 10 == 0 else math.nan,
        "deviation": float(both.deviation.mean()),
        "noise": float(noise.deviation.mean()),
    }


def _of_the_table(estimator: Any, common: dict[str, Any], x: Any, y: Any, told: Any) -> float:
    exact = estimator(epsilon=math.inf, **common).fit(x, y).intervals(sampling=False).estimate
    return float(np.mean((told.low <= exact) & (exact <= told.high)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("convex_intervals.json"))
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    found: dict[str, list[Any]] = json.loads(given.out.read_text()) if given.out.exists() else {}
    print(f"{'case':<22}{'runs':>6}{'coefficients':>14}{'predictions':>13}{'table':>8}"
          f"{'deviation':>11}{'of noise':>10}")  # fmt: skip
    for name, (n, p) in list(CASES.items())[: 1 if given.quick else None]:
        kept = found.setdefault(name, [])
        while len(kept) < (10 if given.quick else given.runs):
            kept.append(one(name.split()[0], n, p, len(kept)))
            if len(kept) % 50 == 0:
                draft = given.out.with_suffix(".draft")
                draft.write_text(json.dumps(found))
                draft.replace(given.out)
        had = [run for run in kept if run is not None]
        mean = {key: np.nanmean([run[key] for run in had]) for key in had[0]} if had else {}
        print(f"{name:<22}{len(had):>6}" + "".join(
            f"{value:>{width}.{digits}f}" for value, width, digits in
            zip(mean.values(), (14, 13, 8, 11, 10), (3, 3, 3, 4, 4))), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
