"""Coverage of confidence intervals: how often they hold the coefficients that made the data.

    python benchmarks/convex_intervals.py --out FILE.json [--runs 1000] [--only NAME …] [--quick]

A model with known coefficients and an intercept on four columns, δ = 1e-6; every run draws a table
and fresh noise. Shares of `intervals` (all coefficients and the intercept) and `predict_interval`
(five rows) that hold the truth, at level 0.95; "table": sampling=False against the same fit without
noise, in every tenth run (with "sums", whose intervals are of the noise alone, in all). "none":
runs in which the noise hid the curvature, so that there was no interval. The truth of the support
vector classifier is the minimiser of its risk on a million rows. The first six rows are every
estimator that has intervals, at its default settings, ε = 2 and columns uniform on [−1, 1]; the
others change one thing each. HOLDS: between 0.93 and 0.97. Every 25 runs the file is written and a
line on standard error says how far it is; a second call goes on from there.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from noshuffle.convex import (
    PrivateHuberRegressor,
    PrivateLinearRegression,
    PrivateLogisticRegression,
    PrivatePoissonRegressor,
    PrivateSVC,
)
from noshuffle.errors import Unsupported

COEFFICIENTS, INTERCEPT = np.array([0.8, -0.5, 0.0, 0.3]), 0.2
SHARES = ("coefficients", "predictions", "table")
LOW, HIGH = 0.93, 0.97


@dataclass(frozen=True)
class Case:
    """A model, the columns and errors of its tables, and settings that differ from the default."""

    kind: str
    rows: int = 4000
    columns: str = "uniform"
    errors: str = "normal"
    epsilon: float = 2.0
    intercept: float = INTERCEPT
    is_weighted: bool = False
    gaps: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)


CASES = {
    "linear": Case("linear"),
    "huber": Case("huber", errors="t", settings={"width": 1.0}),
    "logistic": Case("logistic"),
    "svc": Case("svc", epsilon=8.0),
    "poisson": Case("poisson", epsilon=4.0),
    "sums": Case("linear", settings={"solver": "sums"}),
    "linear, epsilon 1": Case("linear", 8000, epsilon=1.0),
    "linear, epsilon 8": Case("linear", epsilon=8.0),
    "linear, 1,000 rows, epsilon 8": Case("linear", 1000, epsilon=8.0),
    "linear, 1,000 rows, epsilon 4": Case("linear", 1000, epsilon=4.0),
    "linear, skewed columns": Case("linear", columns="skewed"),
    "linear, correlated columns": Case("linear", 8000, columns="correlated"),
    "linear, errors grow with a column": Case("linear", errors="unequal"),
    "linear, skewed errors": Case("linear", errors="skewed"),
    "linear, sample_weight": Case("linear", is_weighted=True),
    "linear, max_weight": Case("linear", is_weighted=True, settings={"max_weight": 2.0}),
    "linear, a tenth missing": Case("linear", gaps=0.1, settings={"missing": "skip"}),
    "linear, no intercept": Case("linear", intercept=0.0, settings={"fit_intercept": False}),
    "linear, private bounds": Case("linear", settings={"bounds": "private"}),
    "linear, replace-one": Case("linear", 8000, settings={"neighbours": "replace-one"}),
    "logistic, epsilon 0.5": Case("logistic", 8000, epsilon=0.5),
    "logistic, epsilon 8": Case("logistic", epsilon=8.0),
    "logistic, skewed columns": Case("logistic", 8000, columns="skewed"),
    "logistic, a class of 10 %": Case("logistic", 8000, intercept=-2.3),
    "poisson, epsilon 8": Case("poisson", 8000, epsilon=8.0),
    "poisson, skewed columns": Case("poisson", 8000, columns="skewed"),
}
COLUMNS: dict[str, Callable[[Any, int], Any]] = {
    "uniform": lambda rng, n: rng.uniform(-1, 1, (n, 4)),
    "skewed": lambda rng, n: np.minimum(rng.exponential(0.15, (n, 4)), 1.0),
    "correlated": lambda rng, n: np.clip(
        0.3 * (math.sqrt(0.8) * rng.normal(size=(n, 1)) + math.sqrt(0.2) * rng.normal(size=(n, 4))),
        -1, 1,
    ),
}  # fmt: skip
ERRORS: dict[str, Callable[[Any, Any], Any]] = {
    "normal": lambda rng, x: 0.5 * rng.normal(size=len(x)),
    "t": lambda rng, x: 0.3 * rng.standard_t(3, size=len(x)),
    "skewed": lambda rng, x: 0.5 * (rng.exponential(size=len(x)) - 1),
    "unequal": lambda rng, x: np.abs(x[:, 0]) * rng.normal(size=len(x)),
}
ESTIMATORS: dict[str, tuple[Any, dict[str, Any]]] = {
    "linear": (PrivateLinearRegression, {"target_bounds": (-8, 8)}),
    "huber": (PrivateHuberRegressor, {"target_bounds": (-8, 8)}),
    "logistic": (PrivateLogisticRegression, {"classes": [0, 1]}),
    "svc": (PrivateSVC, {"classes": [0, 1]}),
    "poisson": (PrivatePoissonRegressor, {"target_bounds": (0, 20)}),
}


def drawn(case: Case, rng: Any, rows: int) -> tuple[Any, Any, Any]:
    """Rows, targets, and what is expected of the rows."""
    x = COLUMNS[case.columns](rng, rows)
    s = x @ COEFFICIENTS + case.intercept
    if case.kind in ("linear", "huber"):
        return x, s + ERRORS[case.errors](rng, x), s
    if case.kind == "poisson":
        return x, rng.poisson(np.exp(s)), np.exp(s)
    chance = 1 / (1 + np.exp(-s))
    return x, (rng.random(rows) < chance).astype(int), chance


@cache
def truth(name: str) -> Any:
    """Coefficients, the intercept last."""
    case = CASES[name]
    if case.kind != "svc":
        return np.append(COEFFICIENTS, case.intercept)
    from scipy.optimize import minimize

    from noshuffle.convex.losses import smoothed_hinge

    x, y, _ = drawn(case, np.random.default_rng(1), 1_000_000)
    x, sign, loss = np.column_stack([x, np.ones(len(x))]), 2.0 * y - 1.0, smoothed_hinge()

    def risk(w: Any) -> tuple[float, Any]:
        s = x @ w
        return float(loss.value_fn(s, sign).mean()), x.T @ loss.slope_fn(s, sign) / len(x)

    return minimize(risk, np.zeros(5), jac=True, method="BFGS").x


def one(name: str, seed: int) -> dict[str, float] | None:
    """Shares of one run; None where there is no interval."""
    case, rng = CASES[name], np.random.default_rng((7, seed))
    x, y, mean = drawn(case, rng, case.rows)
    told: dict[str, Any] = {}
    if case.is_weighted:
        told["sample_weight"] = rng.uniform(0.2, 2.0, case.rows)
    if case.gaps:
        x[rng.random(case.rows) < case.gaps, 0] = np.nan
    estimator, own = ESTIMATORS[case.kind]
    common = {"delta": 1e-6, "bounds": (-1, 1), "inference": True, **own, **case.settings}

    def noise_of_table(found: Any) -> float:
        exact = estimator(epsilon=math.inf, **common).fit(x, y, **told).intervals(sampling=False)
        return float(np.mean((found.low <= exact.estimate) & (exact.estimate <= found.high)))

    model = estimator(epsilon=case.epsilon, test_seed=seed, **common).fit(x, y, **told)
    try:
        noise = model.intervals(sampling=False)
        out = {"noise": float(noise.deviation.mean())}
        if model.solver_ == "sums":
            return {**out, "table": noise_of_table(noise)}
        both, true = model.intervals(), truth(name)
    except Unsupported:
        return None
    # Without an intercept the last interval is [0, 0].
    used = slice(None) if common.get("fit_intercept", True) else slice(-1)
    out["coefficients"] = float(np.mean(((both.low <= true) & (true <= both.high))[used]))
    out["deviation"] = float(both.deviation[used].mean())
    if case.kind != "svc":  # it has no probabilities
        whole = np.flatnonzero(~np.isnan(x[:100]).any(axis=1))[:5]
        low, high = model.predict_interval(x[whole]).T
        out["predictions"] = float(np.mean((low <= mean[whole]) & (mean[whole] <= high)))
    if seed % 10 == 0 and common["bounds"] != "private":
        out["table"] = noise_of_table(noise)
    return out


def added(kept: dict[str, Any], run: dict[str, float] | None) -> dict[str, Any]:
    """What is kept of all runs of a case, with one more: sums of each number, and how many."""
    sums, counts = dict(kept["sums"]), dict(kept["counts"])
    for key, value in (run or {}).items():
        sums[key], counts[key] = sums.get(key, 0.0) + value, counts.get(key, 0) + 1
    none = kept["none"] + int(run is None)
    return {"runs": kept["runs"] + 1, "none": none, "sums": sums, "counts": counts}


def line(name: str, kept: dict[str, Any]) -> str:
    """One row of the table."""

    def mean(key: str) -> float:
        return kept["sums"][key] / kept["counts"][key] if key in kept["sums"] else math.nan

    shares = [mean(key) for key in SHARES]
    # "table" is of a tenth of the runs, and says less.
    judged = [v for v in (shares[:2] if not math.isnan(shares[0]) else shares) if not math.isnan(v)]
    verdict = "HOLDS" if judged and all(LOW <= v <= HIGH for v in judged) else "DIFFERS"
    numbers = [*(f"{v:.3f}" for v in shares), f"{mean('deviation'):.4f}", f"{mean('noise'):.4f}"]
    numbers = ["–" if v == "nan" else v for v in numbers]
    case = CASES[name]
    cells = [name, f"{case.rows:,}", f"{case.epsilon:g}", str(kept["runs"]), str(kept["none"])]
    return "| " + " | ".join([*cells, *numbers, verdict]) + " |"


def write(out: Path, found: dict[str, Any]) -> None:
    draft = out.with_suffix(".draft")
    draft.write_text(json.dumps(found))
    draft.replace(out)


def measure(name: str, found: dict[str, Any], runs: int, out: Path) -> None:
    """Go on until there are so many runs."""
    kept = found.get(name, {"runs": 0, "none": 0, "sums": {}, "counts": {}})
    began, first = time.perf_counter(), kept["runs"]
    while kept["runs"] < runs:
        found[name] = kept = added(kept, one(name, kept["runs"]))
        done = kept["runs"]
        if done % 25 == 0 or done == runs:
            write(out, found)
            left = (time.perf_counter() - began) / (done - first) * (runs - done)
            print(f"{name}: {done} of {runs} runs, {left:.0f} s left", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("convex_intervals.json"))
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--only", nargs="+", choices=CASES, default=None, metavar="NAME")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    found: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
    names = given.only or list(CASES)[: 1 if given.quick else None]
    print("| model | rows | ε | runs | none | coefficients | predictions | table | deviation "
          "| of noise | |\n" + "|---" * 11 + "|")  # fmt: skip
    for name in names:
        measure(name, found, 10 if given.quick else given.runs, given.out)
        print(line(name, found[name]), flush=True)


if __name__ == "__main__":
    main()
