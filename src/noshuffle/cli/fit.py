"""`noshuffle fit`: a private linear model from a table, with the evidence of a run folder."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from noshuffle.cli.budget import BUDGET_HELP, opened
from noshuffle.cli.categories import CategoryChoice
from noshuffle.cli.from_record import argument, check_fields, setting, takes
from noshuffle.cli.mechanisms import HELP, mechanism_named
from noshuffle.cli.promise import DELTA_HELP, FOLDER_HELP, TEST_SEED_HELP, Output, print_json
from noshuffle.cli.run_home import dated
from noshuffle.cli.words import quoted, say
from noshuffle.errors import InvalidInput, NoshuffleError, non_negative, one_of, positive

_ESTIMATORS = {
    "logistic": "PrivateLogisticRegression",
    "svc": "PrivateSVC",
    "linear": "PrivateLinearRegression",
    "huber": "PrivateHuberRegressor",
    "quantile": "PrivateQuantileRegressor",
    "poisson": "PrivatePoissonRegressor",
    "gamma": "PrivateGammaRegressor",
}
TASKS = tuple(_ESTIMATORS)
_CLASSES = ("logistic", "svc")
#: Those whose steps a ledger can show.
SOLVERS = ("auto", "gd", "ftrl", "sums")
_SCHEMA = (
    "The columns of the table, which of them hold numbers and which text, and the number of rows "
    "are taken to be public knowledge."
)
#: Settings that go to the estimator under their own name.
_PASSED_ON = (
    *("epsilon", "delta", "batch_size", "passes", "clip_norm", "penalty", "alpha", "solver"),
    "max_weight",
    "rows_per_unit",
)


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    file: Path = argument("a .csv or .parquet table, learned in its order")
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
    mechanism: str = setting("blt", HELP)
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
    class_weight: str | None = setting(None, "balanced, or CLASS=weight,CLASS=weight")
    quantile: float | None = setting(None, "quantile: which one (default: 0.5, the median)")
    width: float | None = setting(None, "huber: residuals beyond it count linearly")
    missing: str = setting(
        "zero",
        "empty cells: zero, or skip (their rows are left out)",
        check=partial(one_of, ("zero", "skip")),
    )
    hash_text: int | None = setting(None, "text columns become so many hashed indicators")
    categories: list[str] | None = setting(
        None, "text columns: COLUMN=a,b,c, known beforehand, or private to have them found within ε"
    )
    score: bool = setting(
        False,
        "ftrl: release the progressive score with noise, for 3 % more of it, and draw it",
    )
    out: Path | None = setting(None, FOLDER_HELP)
    test_seed: str | None = setting(None, TEST_SEED_HELP)
    budget: Path | None = setting(None, BUDGET_HELP)

    def __post_init__(self) -> None:
        check_fields(self)


@takes(FitSettings, Output)
def fit(asked: FitSettings, output: Output) -> None:
    """Fit a linear model to a table with differential privacy.

    FILE is a .csv (with a line of column names) or .parquet table. Give --bounds and --classes:
    what is known of the data beforehand costs no privacy.
    """
    from noshuffle import convex
    from noshuffle.convex.table_fit import NoBounds
    from noshuffle.release.folder import RunFolder
    from noshuffle.release.seal import note_files
    from noshuffle.report import write_report

    path = asked.out or dated(asked.file.stem)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InvalidInput(f"{path} is not an empty folder; use another --out")
    choice = CategoryChoice(asked)
    table = _table(asked, choice)
    if not asked.bounds and not table.indicators.issuperset(table.columns):
        print(
            "noshuffle: warning: without --bounds numbers are learned from as they are, so that "
            "columns far from [-1, 1] drown the others and are clipped away; the model may be no "
            "better than guessing. Give --bounds from what is known beforehand, as in --bounds "
            "0,100 or --bounds age=0,120, or --bounds private to have them found within ε",
            file=sys.stderr,
        )
    settings = _estimator_settings(asked, table) | {"epsilon": choice.epsilon_left}
    kept = {name: value for name, value in settings.items() if value is not None}
    model = getattr(convex, _ESTIMATORS[asked.task])(
        **kept, budget=opened(asked.budget), verbose=sys.stderr.isatty()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoBounds)  # said above, of --bounds
        model.fit(table.x, table.y, table.weights, ids=table.ids, run=path)
    how: dict[str, Any] = {"kind": "fit", "file": asked.file.name, "target": asked.target}
    how |= {
        "task": asked.task,
        **kept,
        "solver": model.solver_,
        "bounds": None if model.bounds_ is None else model.bounds_.tolist(),
        "rows": len(table.y),
        "score": _scored(model),
    }
    if choice.words():  # ε of all that is seen; the run's own is what the choice has left
        how["together"] = {"epsilon": asked.epsilon, "delta": asked.delta}
    statement = _write_results(RunFolder(path), model, table, how, choice.words())
    write_report(path)
    note_files(path)
    _print(model, statement, path, as_json=output.json)


def _scored(model: Any) -> str:
    """What the progressive score of a model is."""
    return "accuracy" if hasattr(model, "classes_") else "mean absolute error"


def _table(asked: FitSettings, choice: CategoryChoice) -> Any:
    from noshuffle.cli.table_file import read_table

    try:
        return read_table(
            asked.file,
            target=asked.target,
            ids=asked.ids,
            weights=asked.weights,
            hash_text=asked.hash_text,
            missing=asked.missing,
            categories=choice if asked.categories else None,
        )
    except NoshuffleError:
        raise
    except (UnicodeDecodeError, ValueError):  # pyarrow's complaints are ValueErrors
        raise InvalidInput(
            f"{asked.file} could not be read; give a .csv table in UTF-8, or a .parquet one"
        ) from None


def _estimator_settings(asked: FitSettings, table: Any) -> dict[str, Any]:
    """What the estimator is made with; the run folder keeps the same."""
    settings: dict[str, Any] = {
        **{name: getattr(asked, name) for name in _PASSED_ON},
        "mechanism": mechanism_named(asked.mechanism),
        "bounds": _bounds(asked.bounds or [], table),
        "missing": "skip" if asked.missing == "skip" else None,
        "release_score": asked.score,
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
    if asked.target_bounds is None:
        raise InvalidInput(f"--task {asked.task} needs --target-bounds low,high, known beforehand")
    if table.y.dtype.kind not in "iuf":
        raise InvalidInput(
            f"--task {asked.task} needs a target of numbers; column {asked.target!r} holds text, "
            "so use --task logistic or svc"
        )
    settings["target_bounds"] = _pair(asked.target_bounds, "--target-bounds")
    return settings


def _write_results(
    run: Any, model: Any, table: Any, how: dict[str, Any], before: tuple[str, ...]
) -> Any:
    """Metrics, the model as JSON, and what the statement rests on beyond the ledger's facts."""
    import numpy as np

    from noshuffle.release.files import read_json, write_json

    _write_metrics(run, model)
    weights = {"coef": model.coef_.tolist(), "intercept": np.asarray(model.intercept_).tolist()}
    if hasattr(model, "classes_"):
        weights["classes"] = model.classes_.tolist()
    record = {"kind": type(model).__name__, "columns": list(table.columns), **weights}
    record["hashed"] = dict(table.hashed)
    if table.categories is not None:
        record["categories"] = {name: list(listed) for name, listed in table.categories.items()}
    write_json(run.path / "model.json", record)
    known = read_json(run.statement_file)["assumptions"]
    further = [*(s for s in model.privacy_.assumptions if s not in known), _SCHEMA, *before]
    how |= {"batch_size": model.batch_size_, "further_assumptions": further}
    run.write_config(how | ({"before": list(before)} if before else {}))
    return model.privacy_.with_assumptions(*known, _SCHEMA, *before)


def _write_metrics(run: Any, model: Any) -> None:
    """ε spent and, where it was released, the progressive score, at up to 200 steps."""
    curve, released = getattr(model, "progress_", None), model.n_steps_
    every = max(1, released // 200)
    for step in range(1, released + 1):
        if step % every and step != released:
            continue
        row: dict[str, Any] = {"step": step}
        if step == released or step % (10 * every) == 0:
            row["epsilon"] = model.plan_.epsilon_after(step)
        if curve is not None and step <= len(curve):
            rows, score, deviation = (float(v) for v in curve[step - 1])
            row |= {"rows": int(rows), "progressive_score": score}
            row["progressive_deviation"] = deviation
        run.append_metrics(row)


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


def _class_weight(text: str, y: Any) -> Any:
    """ "balanced", or the mapping that CLASS=weight,… means."""
    if text == "balanced":
        return text
    pairs = [part.rpartition("=") for part in text.split(",")]
    try:
        weights = [float(weight) for _, _, weight in pairs]
    except ValueError:
        raise InvalidInput(
            f"--class-weight must be balanced, or CLASS=weight as in 0=1,1=5; got {text!r}"
        ) from None
    return dict(zip(_classes(",".join(name for name, _, _ in pairs), y), weights))


def _print(model: Any, statement: Any, path: Path, *, as_json: bool) -> None:
    page = path / "report.html"
    score = "accuracy" if hasattr(model, "classes_") else "R²"
    unscored = model.progressive_score_ != model.progressive_score_  # batches predict nothing first
    if as_json:
        record = {
            "run": str(path),
            "steps": model.n_steps_,
            "rows": model.n_rows_,
            "report": str(page),
            "solver": model.solver_,
            "rows_left_out": getattr(model, "n_left_out_", None),
            "progressive_score_not_private": None if unscored else model.progressive_score_,
            "statement": statement.to_dict(),
        }
        print_json(record)
        return
    say(statement.words())
    print(f"\n{model.n_rows_:,} rows read in {model.n_steps_:,} steps of {model.solver_}")
    if hasattr(model, "n_left_out_"):
        print(f"about {max(model.n_left_out_, 0):,.0f} rows left out (released with noise)")
    print(f"model: {path / 'model.json'}")
    if not unscored:
        print(
            f"progressive {score} {model.progressive_score_:.4f} "
            "(from raw targets, not private: for your eyes, not in the run folder)"
        )
    if hasattr(model, "progress_"):
        _, value, deviation = model.progress_[-1]
        shown = f"{_scored(model)} {value:.4f} ± {2 * deviation:.4f}"
        print(f"released progressive {shown} (covered by ε)")
    print(f"report: {page}\ncheck the evidence: noshuffle verify {quoted(path)}")
