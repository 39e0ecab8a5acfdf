"""`noshuffle fit`: a private linear model from a table, with the evidence of a run folder."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

from noshuffle.cli.budget import opened
from noshuffle.cli.fit_settings import ESTIMATORS, FitSettings, categories_of, estimator_settings
from noshuffle.cli.from_record import takes
from noshuffle.cli.promise import Output, print_json
from noshuffle.cli.run_home import check_new_folder, dated
from noshuffle.cli.words import quoted, say

_SCHEMA = (
    "The columns of the table, which of them hold numbers and which text, and the number of rows "
    "are taken to be public knowledge."
)


@takes(FitSettings, Output)
def fit(asked: FitSettings, output: Output) -> None:
    """Fit a linear model to a table with differential privacy.

    FILE is a .csv table with a line of column names. Give --bounds and --classes: what is known of
    the data beforehand costs no privacy.
    """
    from noshuffle import convex
    from noshuffle.convex.given_bounds import NoBounds
    from noshuffle.release.folder import RunFolder
    from noshuffle.report import write_report

    path = asked.out or dated(asked.file.stem)
    check_new_folder(path, resumes=False)
    table = _table(asked)
    if not asked.bounds and not table.indicators.issuperset(table.columns):
        print(
            "noshuffle: warning: without --bounds numbers are learned from as they are, so that "
            "columns far from [-1, 1] drown the others and are clipped away; the model may be no "
            "better than guessing. Give --bounds from what is known beforehand, as in --bounds "
            "0,100 or --bounds age=0,120, or --bounds private to have them found within ε",
            file=sys.stderr,
        )
    settings = estimator_settings(asked, table)
    kept = {name: value for name, value in settings.items() if value is not None}
    model = getattr(convex, ESTIMATORS[asked.task])(
        **kept, budget=opened(asked.budget), verbose=sys.stderr.isatty()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoBounds)  # said above, of --bounds
        model.fit(table.x, table.y, table.weights, ids=table.ids, run=path)
    if model.solver_ == "gd":  # independent noise; how often it reads follows from the table
        idle = ("mechanism", *(["passes"] if asked.passes == 1 else []))
        kept = {name: value for name, value in kept.items() if name not in idle}
    how: dict[str, Any] = {"kind": "fit", "file": asked.file.name, "target": asked.target}
    how |= {
        "task": asked.task,
        **kept,
        "solver": model.solver_,
        "bounds": None if model.bounds_ is None else model.bounds_.tolist(),
        "rows": len(table.y),
    }
    statement = _write_results(RunFolder(path), model, table, how)
    write_report(path)
    _print(model, statement, path, as_json=output.json)


def _table(asked: FitSettings) -> Any:
    from noshuffle.cli.table_file import read_table

    return read_table(
        asked.file,
        target=asked.target,
        ids=asked.ids,
        weights=asked.weights,
        categories=categories_of(asked.categories or []),
    )


def _write_results(run: Any, model: Any, table: Any, how: dict[str, Any]) -> Any:
    """Metrics, the model as JSON, and what the statement rests on beyond the facts of the log."""
    import numpy as np

    from noshuffle.release.files import read_json, write_json

    _write_metrics(run, model)
    weights = {"coef": model.coef_.tolist(), "intercept": np.asarray(model.intercept_).tolist()}
    if hasattr(model, "classes_"):
        weights["classes"] = model.classes_.tolist()
    record = {"kind": type(model).__name__, "columns": list(table.columns), **weights}
    if table.categories:
        record["categories"] = {name: list(listed) for name, listed in table.categories.items()}
    write_json(run.path / "model.json", record)
    known = read_json(run.statement_file)["assumptions"]
    further = [*(s for s in model.privacy_.assumptions if s not in known), _SCHEMA]
    how |= {"batch_size": model.batch_size_, "further_assumptions": further}
    run.write_config(how)
    return model.privacy_.with_assumptions(*known, _SCHEMA)


def _write_metrics(run: Any, model: Any) -> None:
    """ε spent, at up to 20 steps."""
    released = model.n_steps_
    every = 10 * max(1, released // 200)
    for step in range(1, released + 1):
        if step % every == 0 or step == released:
            run.append_metrics({"step": step, "epsilon": model.plan_.epsilon_after(step)})


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
            "progressive_score_not_private": None if unscored else model.progressive_score_,
            "statement": statement.to_dict(),
        }
        print_json(record)
        return
    say(statement.words())
    print(f"\n{model.n_rows_:,} rows read in {model.n_steps_:,} steps of {model.solver_}")
    print(f"model: {path / 'model.json'}")
    if not unscored:
        print(
            f"progressive {score} {model.progressive_score_:.4f} "
            "(from raw targets, not private: for your eyes, not in the run folder)"
        )
    print(f"report: {page}\ncheck the evidence: noshuffle verify {quoted(path)}")
