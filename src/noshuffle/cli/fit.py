"""`noshuffle fit`: a private linear model from a table, with the evidence of a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from noshuffle.cli import options as o

TASKS = ("logistic", "svc", "linear")
_SCHEMA = (
    "The columns of the table, which of them hold numbers and which text, and the number of rows "
    "are taken to be public knowledge."
)


def fit(
    file: Annotated[Path, typer.Argument(help="a .csv or .parquet table, learned in its order")],
    target: Annotated[str, typer.Option(help="the column to predict")],
    task: Annotated[str, typer.Option(help="logistic, svc or linear")] = "logistic",
    epsilon: Annotated[float, typer.Option(help="ε of the whole run")] = 1.0,
    delta: o.Delta = 1e-6,
    bounds: Annotated[
        list[str] | None,
        typer.Option(help="low,high for all columns, or COLUMN=low,high (repeat as needed)"),
    ] = None,
    target_bounds: Annotated[
        str | None, typer.Option(help="linear: low,high of the target, known beforehand")
    ] = None,
    classes: Annotated[
        str | None, typer.Option(help="all classes, a,b,c; without it they are read from the file")
    ] = None,
    mechanism: o.Mechanism = "blt",
    batch_size: Annotated[int | None, typer.Option(help="rows a step (default: by length)")] = None,
    passes: Annotated[int, typer.Option(help="passes over the table, in the same order")] = 1,
    clip_norm: Annotated[float, typer.Option(help="bound on the gradient of one row")] = 1.0,
    penalty: Annotated[str | None, typer.Option(help="l1, l2, elasticnet or group")] = None,
    alpha: Annotated[float, typer.Option(help="strength of the penalty")] = 1e-4,
    radius: Annotated[float | None, typer.Option(help="norm of the weights aimed at")] = None,
    solver: Annotated[str, typer.Option(help="linear: ftrl or sums (few columns)")] = "ftrl",
    ids: Annotated[str | None, typer.Option(help="column that names the unit of a row")] = None,
    hash_text: Annotated[
        int | None, typer.Option(help="text columns become so many hashed indicators")
    ] = None,
    score: Annotated[
        bool,
        typer.Option(
            "--score/--no-score",
            help="release the progressive score with noise, for 3 % more of it, and draw it",
        ),
    ] = True,
    out: Annotated[Path | None, typer.Option(help="run folder (default runs/NAME-TIME)")] = None,
    test_seed: Annotated[
        str | None, typer.Option(help="reproducible noise for tests: NOT PRIVATE")
    ] = None,
    json: o.Json = False,
) -> None:
    """Fit a linear model to a table with differential privacy, in one pass, in file order.

    FILE is a .csv (with a line of column names) or .parquet table. Give --bounds and --classes:
    what is known of the data beforehand costs no privacy.
    """
    from noshuffle.convex.table_file import read_table
    from noshuffle.errors import InvalidInput, NoshuffleError, non_negative, one_of
    from noshuffle.report import write_report

    one_of(TASKS, task=task)
    one_of(("ftrl", "sums"), solver=solver)
    non_negative(alpha=alpha)
    path = _folder(out, file)
    try:
        table = read_table(file, target=target, ids=ids, hash_text=hash_text)
    except NoshuffleError:
        raise
    except (UnicodeDecodeError, ValueError):  # pyarrow's complaints are ValueErrors
        raise InvalidInput(
            f"{file} could not be read; give a .csv table in UTF-8, or a .parquet one"
        ) from None
    settings: dict[str, Any] = {
        "epsilon": epsilon,
        "delta": delta,
        "bounds": _bounds(bounds or [], table.columns),
        "mechanism": mechanism,
        "batch_size": batch_size,
        "passes": passes,
        "clip_norm": clip_norm,
        "penalty": penalty,
        "alpha": alpha,
        "release_score": score,
        "test_seed": test_seed,
    }
    if radius is not None:
        settings["radius"] = radius
    if task == "linear":
        if target_bounds is None:
            raise InvalidInput("--task linear needs --target-bounds low,high, known beforehand")
        if table.y.dtype.kind not in "iuf":
            raise InvalidInput(
                f"--task linear needs a target of numbers; column {target!r} holds text, "
                "so use --task logistic or svc"
            )
        settings |= {"target_bounds": _pair(target_bounds, "--target-bounds"), "solver": solver}
    elif classes is not None:
        settings["classes"] = _classes(classes, table.y)
    model = _model(task, settings)
    kept = {name: value for name, value in settings.items() if value is not None}
    how = {"kind": "fit", "file": file.name, "target": target, "task": task, **kept}
    scored = "mean absolute error" if task == "linear" else "accuracy"
    how |= {"rows": len(table.y), "score": scored}
    evidence = _Evidence(path, table, how)
    model.fit(table.x, table.y, ids=table.ids, observer=evidence)
    statement = evidence.close(model, table.columns)
    page = write_report(path)
    _print(model, statement, path, page, as_json=json)


class _Evidence:
    """Writes the run folder as the estimator releases its steps."""

    plan: Any
    ledger: Any

    def __init__(self, path: Path, table: Any, how: dict[str, Any]) -> None:
        from noshuffle.release.folder import RunFolder

        self.run, self.table = RunFolder(path), table
        self.how = how

    def start(self, plan: Any, source: Any) -> None:
        import numpy as np

        from noshuffle.release.fingerprint import secret_of
        from noshuffle.release.ledger import Ledger
        from noshuffle.release.units import as_ids

        self.plan = plan
        self.run.begin(plan, source=source)
        self.run.write_config(self.how)
        self.ledger = Ledger(plan.participation, path=self.run.ledger_file)
        for name, value in (
            ("plan", plan.hash),
            ("key", source.fingerprint),
            ("test_key", "yes" if source.is_test else "no"),
        ):
            self.ledger.bind(name, value)
        self.secret = secret_of(source.key)
        given = self.table.ids
        rows = np.arange(len(self.table.y))
        self.ids = rows if given is None else as_ids(list(given), secret=self.secret)

    def before(self, step: int, first: int, last: int) -> None:
        from noshuffle.release.fingerprint import of_batch

        rows, units = slice(first, last), self.ids[first:last]
        batch = (self.table.x[rows], self.table.y[rows])
        admitted = self.ledger.admit(step, units, of_batch(batch, units, secret=self.secret))
        self.ledger.record(admitted)

    def after(self, step: int) -> None:
        """Metrics are written at the end, from what the model released."""

    def close(self, model: Any, columns: tuple[str, ...]) -> Any:
        """The statement of what was released, and the model as JSON."""
        from noshuffle.release.files import write_json
        from noshuffle.release.ledger_tables import Evidence
        from noshuffle.release.spending import notes_of, spent

        released = self.ledger.released
        self.ledger.close()
        evidence = Evidence(self.run.ledger_file)
        said = spent(self.plan, released, notes=notes_of(evidence.facts()))
        evidence.close()
        self.run.write_statement(
            {
                **said.to_dict(),
                "plan_hash": self.plan.hash,
                "planned_steps": self.plan.steps,
                "released_steps": released,
            }
        )
        self._write_metrics(model, released)
        weights = {"coef": model.coef_.tolist(), "intercept": _plain(model.intercept_)}
        if hasattr(model, "classes_"):
            weights["classes"] = model.classes_.tolist()
        record = {"kind": type(model).__name__, "columns": list(columns), **weights}
        write_json(self.run.path / "model.json", record)
        own = [s for s in model.privacy_.assumptions if s not in said.assumptions]
        own.append(_SCHEMA)
        self.how["batch_size"] = model.batch_size_
        self.run.write_config({**self.how, "further_assumptions": own})
        return said.with_assumptions(*own)

    def _write_metrics(self, model: Any, released: int) -> None:
        """ε spent and, where it was released, the progressive score, at up to 200 steps."""
        curve = getattr(model, "progress_", None)
        every = max(1, released // 200)
        for step in range(1, released + 1):
            if step % every and step != released:
                continue
            row: dict[str, Any] = {"step": step}
            if step == released or step % (10 * every) == 0:
                row["epsilon"] = self.plan.epsilon_after(step)
            if curve is not None and step <= len(curve):
                rows, score, deviation = (float(v) for v in curve[step - 1])
                row |= {"rows": int(rows), "progressive_score": score}
                row["progressive_deviation"] = deviation
            self.run.append_metrics(row)


def _model(task: str, settings: dict[str, Any]) -> Any:
    from noshuffle.convex import PrivateLinearRegression, PrivateLogisticRegression, PrivateSVC

    kinds = {
        "logistic": PrivateLogisticRegression,
        "svc": PrivateSVC,
        "linear": PrivateLinearRegression,
    }
    return kinds[task](**settings)


def _folder(out: Path | None, file: Path) -> Path:
    from datetime import datetime

    from noshuffle.errors import InvalidInput

    path = out or Path("runs") / f"{file.stem}-{datetime.now():%Y%m%d-%H%M%S}"
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InvalidInput(f"{path} is not an empty folder; use another --out")
    return path


def _pair(text: str, option: str) -> tuple[float, float]:
    from noshuffle.errors import InvalidInput

    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise InvalidInput(f"{option} must be low,high as in 0,100; got {text!r}") from None
    return low, high


def _bounds(given: list[str], columns: tuple[str, ...]) -> list[tuple[float, float]] | None:
    """One pair per column: its own, else the common one; hashed indicators lie in [0, 1]."""
    from noshuffle.errors import InvalidInput

    if not given:
        return None
    own = dict(text.rsplit("=", 1) for text in given if "=" in text)
    common = [_pair(text, "--bounds") for text in given if "=" not in text]
    pairs = {name: _pair(text, "--bounds") for name, text in own.items()}
    unknown = sorted(set(pairs) - set(columns))
    if unknown:
        raise InvalidInput(f"--bounds names {unknown[0]!r}, which is no feature of the table")
    found = []
    for name in columns:
        if name in pairs or "#" in name:
            found.append(pairs.get(name, (0.0, 1.0)))
        elif len(common) == 1:
            found.append(common[0])
        else:
            raise InvalidInput(
                f"--bounds must cover column {name!r}: give {name}=low,high, or one low,high for "
                "all that have none of their own"
            )
    return found


def _classes(text: str, y: Any) -> list[Any]:
    from noshuffle.errors import InvalidInput

    names = [part.strip() for part in text.split(",")]
    try:
        return [y.dtype.type(name) for name in names]
    except ValueError:
        raise InvalidInput(f"--classes must be of the kind of the target, got {text!r}") from None


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _print(model: Any, statement: Any, path: Path, page: Path, *, as_json: bool) -> None:
    import json

    score = "accuracy" if hasattr(model, "classes_") else "R²"
    if as_json:
        record = {
            "run": str(path),
            "steps": model.n_steps_,
            "rows": model.n_rows_,
            "report": str(page),
            "progressive_score_not_private": model.progressive_score_,
            "statement": statement.to_dict(),
        }
        print(json.dumps(record, indent=2, ensure_ascii=False))
        return
    print(statement.words())
    print(f"\n{model.n_rows_:,} rows in {model.n_steps_:,} steps; model: {path / 'model.json'}")
    print(
        f"progressive {score} {model.progressive_score_:.4f} "
        "(from raw targets, not private: for your eyes, not in the run folder)"
    )
    if hasattr(model, "progress_"):
        _, value, deviation = model.progress_[-1]
        name = "accuracy" if hasattr(model, "classes_") else "mean absolute error"
        print(f"released progressive {name} {value:.4f} ± {2 * deviation:.4f} (covered by ε)")
    print(f"report: {page}\ncheck the evidence: noshuffle verify {path}")
