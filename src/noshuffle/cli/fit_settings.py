"""FitSettings: what `noshuffle fit` was asked to do, and what its estimator is made with.

Options that are texts become values here: --bounds COLUMN=low,high a pair per column, --classes
a,b,c values of the kind of the target, --class-weight CLASS=weight a mapping. The kind of the
target decides which tasks suit it. State: none.

>>> made = FitSettings(file=Path("census.csv"), target="income", bounds=["0,100"])
>>> made.task, made.epsilon, made.solver
('logistic', 1.0, 'auto')
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from noshuffle.cli.budget import BUDGET_HELP
from noshuffle.cli.from_record import argument, check_fields, setting
from noshuffle.cli.mechanisms import HELP, mechanism_named
from noshuffle.cli.promise import DELTA_HELP, FOLDER_HELP, TEST_SEED_HELP
from noshuffle.errors import InvalidInput, non_negative, one_of, positive

#: The estimator of each task, by its name in `noshuffle.convex`.
ESTIMATORS = {
    "logistic": "PrivateLogisticRegression",
    "svc": "PrivateSVC",
    "linear": "PrivateLinearRegression",
    "huber": "PrivateHuberRegressor",
    "quantile": "PrivateQuantileRegressor",
    "poisson": "PrivatePoissonRegressor",
    "gamma": "PrivateGammaRegressor",
}
TASKS = tuple(ESTIMATORS)
_CLASSES = ("logistic", "svc")
#: Those whose steps a log can show.
SOLVERS = ("auto", "gd", "ftrl", "sums")
#: Settings that go to the estimator under their own name.
_PASSED_ON = (
    *("epsilon", "delta", "batch_size", "passes", "clip_norm", "penalty", "alpha", "solver"),
    "max_weight",
    "rows_per_unit",
)


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    file: Path = argument("a .csv table, learned in its order")
    target: str = setting(..., "the column to predict")
    task: str = setting("logistic", ", ".join(TASKS), check=partial(one_of, TASKS))
    epsilon: float = setting(1.0, "ε of the whole run", check=positive)
    delta: float = setting(1e-6, DELTA_HELP)
    bounds: list[str] | None = setting(
        None, "low,high for all columns, COLUMN=low,high (repeat as needed), or private"
    )
    target_bounds: str | None = setting(None, "numbers: low,high of the target, known beforehand")
    classes: str | None = setting(
        None, "all classes, a,b,c; without it they are read from the file"
    )
    mechanism: str | None = setting(None, f"for ftrl and sums (default blt): {HELP}")
    batch_size: int | None = setting(None, "rows a step (default: by length)")
    passes: int = setting(1, "passes over the table, in the same order (gd: readings)")
    clip_norm: float | None = setting(None, "bound on a gradient of a row (default: by task)")
    penalty: str | None = setting(None, "l1, l2, elasticnet or group")
    alpha: float = setting(1e-4, "strength of the penalty", check=non_negative)
    radius: float | None = setting(None, "norm of the weights aimed at")
    solver: str = setting(
        "auto", "auto, gd, ftrl, or for linear sums", check=partial(one_of, SOLVERS)
    )
    ids: str | None = setting(None, "column that names the unit of a row")
    rows_per_unit: int | None = setting(
        None, "gd: a unit of --ids may have several rows, which count for this many at most"
    )
    weights: str | None = setting(None, "column that holds the weight of a row")
    max_weight: float | None = setting(
        None, "largest weight, known beforehand (without it weights are taken to be public)"
    )
    class_weight: str | None = setting(None, "CLASS=weight,CLASS=weight")
    quantile: float | None = setting(None, "quantile: which one (default: 0.5, the median)")
    width: float | None = setting(None, "huber: residuals beyond it count linearly")
    categories: list[str] | None = setting(
        None, "text columns: COLUMN=a,b,c, known beforehand (repeat as needed)"
    )
    out: Path | None = setting(None, FOLDER_HELP)
    test_seed: str | None = setting(None, TEST_SEED_HELP)
    budget: Path | None = setting(None, BUDGET_HELP)

    def __post_init__(self) -> None:
        check_fields(self)


def estimator_settings(asked: FitSettings, table: Any) -> dict[str, Any]:
    """What the estimator is made with; the run folder keeps the same."""
    settings: dict[str, Any] = {
        **{name: getattr(asked, name) for name in _PASSED_ON},
        "mechanism": None if asked.mechanism is None else mechanism_named(asked.mechanism),
        "bounds": _bounds(asked.bounds or [], table),
        "test_seed": asked.test_seed,
    }
    if asked.radius is not None:
        settings["radius"] = asked.radius
    for name, task in (("quantile", "quantile"), ("width", "huber")):
        if (value := getattr(asked, name)) is not None:
            if asked.task != task:
                raise InvalidInput(f"--{name} is for --task {task}, got --task {asked.task}")
            settings[name] = value
    if asked.solver == "sums" and asked.task != "linear":
        raise InvalidInput("--solver sums is for --task linear; use auto, gd or ftrl")
    if asked.task in _CLASSES:
        if table.y.dtype.kind == "f":
            raise InvalidInput(
                f"--task {asked.task} needs classes; column {asked.target!r} holds numbers between "
                "integers, so use --task linear, huber, quantile, poisson or gamma"
            )
        if asked.class_weight is not None:
            settings["class_weight"] = _class_weight(asked.class_weight, table.y)
        if asked.classes is not None:
            settings["classes"] = _classes(asked.classes, table.y)
        return settings
    if asked.class_weight is not None:
        raise InvalidInput("--class-weight is for classes; use --task logistic or svc")
    if asked.classes is not None:
        raise InvalidInput("--classes are for --task logistic or svc; leave them out")
    if asked.target_bounds is None:
        raise InvalidInput(f"--task {asked.task} needs --target-bounds low,high, known beforehand")
    if table.y.dtype.kind not in "iuf":
        raise InvalidInput(
            f"--task {asked.task} needs a target of numbers; column {asked.target!r} holds text, "
            "so use --task logistic or svc"
        )
    settings["target_bounds"] = _pair(asked.target_bounds, "--target-bounds")
    return settings


def categories_of(options: list[str]) -> dict[str, list[str]]:
    """The listed categories of every column that is named."""
    categories: dict[str, list[str]] = {}
    for text in options:
        name, _, listed = text.partition("=")
        if not listed:
            raise InvalidInput(
                f"--categories must be COLUMN=a,b,c as in city=Rome,Oslo; got {text!r}"
            )
        categories[name] = list(dict.fromkeys(value.strip() for value in listed.split(",")))
    return categories


def _pair(text: str, option: str) -> tuple[float, float]:
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise InvalidInput(f"{option} must be low,high as in 0,100; got {text!r}") from None
    return low, high


def _bounds(given: list[str], table: Any) -> list[tuple[float, float]] | str | None:
    """One pair per column: its own, else the common one; indicators lie in [0, 1]."""
    columns = table.columns
    if not given or given == ["private"]:
        return given[0] if given else None
    own = dict(text.rsplit("=", 1) for text in given if "=" in text)
    common = [_pair(text, "--bounds") for text in given if "=" not in text]
    pairs = dict.fromkeys(table.indicators, (0.0, 1.0))
    pairs |= {name: _pair(text, "--bounds") for name, text in own.items()}
    unknown = sorted(set(pairs) - set(columns))
    if unknown:
        raise InvalidInput(f"--bounds names {unknown[0]!r}, which is no feature of the table")
    missing = [name for name in columns if name not in pairs]
    if missing and len(common) != 1:
        raise InvalidInput(
            f"--bounds must cover column {missing[0]!r}: give {missing[0]}=low,high, or one "
            "low,high for all that have none of their own"
        )
    return [pairs[name] if name in pairs else common[0] for name in columns]


def _classes(text: str, y: Any) -> list[Any]:
    """The classes as plain values of the kind of the target, so that JSON can hold them."""
    names = [part.strip() for part in text.split(",")]
    if y.dtype.kind not in "iuf":
        return names
    try:
        numbers = [float(name) for name in names]
    except ValueError:
        raise InvalidInput(f"--classes must be numbers, as the target is; got {text!r}") from None
    return [int(v) if v.is_integer() and y.dtype.kind in "iu" else v for v in numbers]


def _class_weight(text: str, y: Any) -> dict[Any, float]:
    """The mapping that CLASS=weight,… means."""
    pairs = [part.rpartition("=") for part in text.split(",")]
    try:
        weights = [float(weight) for _, _, weight in pairs]
    except ValueError:
        raise InvalidInput(
            f"--class-weight must be CLASS=weight as in 0=1,1=5; got {text!r}"
        ) from None
    return dict(zip(_classes(",".join(name for name, _, _ in pairs), y), weights))
