"""Golden estimators: eight tables × estimators × solvers, under a test seed.

Tables are scikit-learn's own and made-up ones of NumPy's frozen generator. The noise is the same
everywhere, products of matrices are not in their last bits, and descent carries these on: what is
learned is held to 1e-6, scores (which count rows) to one row.

`rows_per_unit` and `max_weight` are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn import datasets
from tests.golden.arithmetic import draws, normal, projections
from tests.golden.entries import Entry

from noshuffle import convex

Table = tuple[NDArray[np.float64], NDArray[Any]]
TOLERANCE = 1e-6
ROWS = 400


@cache
def table(name: str) -> Table:
    """Columns between −1 and 1, and classes or numbers, in an order of our own."""
    if name == "digits":
        found = datasets.load_digits(return_X_y=True)
        x, y = found[0][:600] / 8 - 1, found[1][:600]
    elif name in ("breast cancer", "iris", "wine", "diabetes"):
        load = getattr(datasets, f"load_{name.replace(' ', '_')}")
        x, y = load(return_X_y=True)
        low, high = x.min(axis=0), x.max(axis=0)
        x = 2 * (x - low) / (high - low) - 1
        y = y / 100 if name == "diabetes" else y
    else:
        x = draws(f"table {name}").uniform(-1, 1, (ROWS, 4))
        noise = normal(f"targets {name}", ROWS)
        s = x @ [1.0, -0.5, 0.25, 0.0]
        y = {
            "two classes": lambda: (s + 0.3 * noise > 0.2).astype(int),
            "numbers": lambda: s + 0.5 + 0.2 * noise,
            "counts": lambda: np.floor(np.exp(1 + s + 0.2 * noise)),
        }[name]()
    order = draws(f"order {name}").permutation(len(x))
    return np.ascontiguousarray(x[order], dtype=np.float64), y[order]


CLASSES = {"digits": 10, "breast cancer": 2, "iris": 3, "wine": 3, "two classes": 2}
NUMBERS: dict[str, tuple[float, float]] = {"diabetes": (0.2, 3.5), "numbers": (-2.0, 3.0)}
COMMON: dict[str, Any] = {"delta": 1e-5, "bounds": (-1, 1), "test_seed": "golden"}
#: Solvers as fit takes them; "best" is what it takes by itself.
SOLVERS: dict[str, dict[str, Any]] = {
    "best": {},
    "gd": {"solver": "gd"},
    "ftrl": {"solver": "ftrl", "batch_size": 20, "clip_norm": 1.0},
    "ftrl, tree, two passes": {
        "solver": "ftrl", "batch_size": 20, "mechanism": "tree", "passes": 2,
    },
    "objective": {"solver": "objective", "feature_bound": 1.0},
    "frank_wolfe": {"solver": "frank_wolfe", "constraint": "l1_ball", "radius": 5.0},
    "sums": {"solver": "sums", "clip_norm": 2.0, "batch_size": 50},
}  # fmt: skip


def statement(said: Any) -> dict[str, Any]:
    """The numbers of a statement."""
    return {
        "epsilon": said.epsilon,
        "delta": said.delta,
        "mu": said.mu,
        "rho": said.rho,
        "sensitivity": said.sensitivity,
        "noise multiplier": said.noise_multiplier,
        "exact": said.exact,
        "neighbours": said.neighbours,
        "unit": said.unit,
    }


def learned(model: Any, x: Any, y: Any) -> dict[str, Any]:
    """Coefficients in few numbers, predictions of five rows, the score, the statement."""
    told = model.predict_proba if hasattr(model, "predict_proba") else model.predict
    return {
        "coef": projections([("coef", model.coef_), ("intercept", model.intercept_)]),
        "predictions": np.asarray(told(x[:5])).reshape(-1).tolist(),
        "score": float(model.score(x, y)),
        "solver": getattr(model, "solver_", None),
        "statement": statement(model.privacy_),
    }


def fitted(kind: Any, name: str, solver: str, **more: Any) -> dict[str, Any]:
    """An estimator by `fit`."""
    x, y = table(name)
    model = kind(**{"epsilon": 2.0, **COMMON, **bounded(kind, name), **SOLVERS[solver], **more})
    return learned(model.fit(x, y), x, y)


def bounded(kind: Any, name: str) -> dict[str, Any]:
    """What is known of the targets beforehand."""
    if name in CLASSES:
        return {"classes": list(range(CLASSES[name]))}
    if name in NUMBERS:
        low, high = NUMBERS[name]
        is_log = kind in (convex.PrivatePoissonRegressor, convex.PrivateGammaRegressor)
        return {"target_bounds": (max(low, 0.1), high) if is_log else (low, high)}
    return {"target_bounds": (0.5 if kind is convex.PrivateGammaRegressor else 0.0, 15.0)}


def streamed(kind: Any, name: str, **more: Any) -> dict[str, Any]:
    """An estimator by `partial_fit`, in pieces of different sizes."""
    x, y = table(name)
    known = bounded(kind, name)
    asked = {"epsilon": 2.0, "horizon": len(x), "batch_size": 16, **COMMON, **known, **more}
    model = kind(**asked)
    for piece in np.split(np.arange(len(x)), [30, 31, 90]):
        model.partial_fit(x[piece], y[piece])
    return learned(model, x, y)


def weighted(solver: str) -> dict[str, Any]:
    """Public weights of rows, and a fixed weight of each class."""
    x, y = table("two classes")
    model = convex.PrivateLogisticRegression(
        epsilon=2.0, classes=[0, 1], class_weight={0: 1.0, 1: 2.0}, **COMMON, **SOLVERS[solver]
    )
    weights = 0.5 + (np.arange(len(x)) % 4) / 8
    return learned(model.fit(x, y, sample_weight=weights), x, y)


def sparse() -> dict[str, Any]:
    from scipy.sparse import csr_matrix

    x, y = table("digits")
    model = convex.PrivateLogisticRegression(
        epsilon=2.0, delta=1e-5, test_seed="golden", solver="ftrl", batch_size=20,
        classes=list(range(10)), feature_bound=4.0,
    ).fit(csr_matrix(x + 1), y)  # fmt: skip
    return learned(model, x + 1, y)


def scaled() -> dict[str, Any]:
    x, _ = table("breast cancer")
    model = convex.PrivateScaler(epsilon=2.0, delta=1e-5, test_seed="golden").fit(30 * x + 4)
    return {
        "bounds": projections([("bounds", model.bounds_)]),
        "center": projections([("center", model.center_)]),
        "scale": projections([("scale", model.scale_)]),
        "statement": statement(model.privacy_),
    }


def _entries() -> dict[str, Entry]:
    entries: dict[str, Entry] = {}

    def add(label: str, compute: Callable[[], Any], rows: int = ROWS) -> None:
        score = {"score": 1.01 / rows} if "Regress" not in label else {}
        entries[label] = Entry(compute, rtol=TOLERANCE, atol=1e-9, by_key=score)

    def fit(kind: str, name: str, solver: str, words: str = "", **more: Any) -> None:
        label = ", ".join(filter(None, (kind, name, solver, words)))
        by = partial(fitted, getattr(convex, f"Private{kind}"), name, solver, **more)
        add(label, by, 100)

    logistic = "LogisticRegression"
    for name in CLASSES:
        for solver in ("best", "ftrl", "ftrl, tree, two passes"):
            fit(logistic, name, solver)
        fit("SVC", name, "gd")
        fit("SVC", name, "ftrl")
    for name in ("breast cancer", "two classes"):
        fit(logistic, name, "objective")
        fit(logistic, name, "frank_wolfe")
        fit("SVC", name, "objective")
        fit("SVC", name, "ftrl", "hinge", loss="hinge")
    fit(logistic, "digits", "gd", "ε = 0.3", epsilon=0.3)
    fit(logistic, "two classes", "gd", "private bounds", bounds="private")
    fit(logistic, "two classes", "gd", "replace-one", neighbours="replace-one")
    fit(logistic, "two classes", "gd", "no intercept", fit_intercept=False)
    fit(logistic, "two classes", "gd", "no noise", epsilon=float("inf"))
    fit(logistic, "breast cancer", "ftrl", "l1", penalty="l1", alpha=0.01)
    fit(logistic, "breast cancer", "ftrl", "elastic", penalty="elasticnet", alpha=0.01)
    fit(logistic, "breast cancer", "ftrl", "ball", constraint="ball", radius=2.0)
    fit(logistic, "breast cancer", "ftrl", "box", constraint="box", radius=0.5)
    for name in NUMBERS:
        for solver in ("best", "ftrl", "sums"):
            fit("LinearRegression", name, solver)
        for kind in ("HuberRegressor", "QuantileRegressor"):
            fit(kind, name, "gd")
            fit(kind, name, "ftrl")
        fit("QuantileRegressor", name, "gd", "upper", quantile=0.8)
    fit("LinearRegression", "numbers", "gd", "l2", penalty="l2", alpha=0.01)
    fit("LinearRegression", "numbers", "sums", "ball", constraint="ball", radius=1.0)
    for name in ("counts", "diabetes"):
        for kind in ("PoissonRegressor", "GammaRegressor"):
            fit(kind, name, "gd")
            fit(kind, name, "ftrl")
    for kind, name in (
        ("LogisticRegression", "iris"),
        ("SVC", "two classes"),
        ("LinearRegression", "numbers"),
        ("PoissonRegressor", "counts"),
    ):
        by = partial(streamed, getattr(convex, f"Private{kind}"), name)
        add(f"{kind}, {name}, streamed", by, 100)
    unknown = partial(streamed, convex.PrivateLogisticRegression, "two classes", horizon=None)
    add("LogisticRegression, two classes, streamed without a horizon", unknown)
    add("weighted, gd", partial(weighted, "gd"))
    add("weighted, ftrl", partial(weighted, "ftrl"))
    add("sparse rows", sparse)
    add("scaler", scaled)
    return entries


SECTION = _entries()
