"""`noshuffle predict`: what a model of `noshuffle fit` says of the rows of another table.

Numbers are clamped to the bounds that the model was fitted with, text becomes indicators of the
model's categories; the target and other columns of the table are not read.
Empty cells count as zero, as they did in the fit. Predictions are for whoever holds the rows: the
model is released and covered by its statement, the rows that it is asked about are not.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noshuffle.cli.from_record import argument, check_fields, setting, takes
from noshuffle.cli.promise import Output, print_json
from noshuffle.errors import InvalidInput

#: Models whose margins are logarithms of what is expected.
_OF_LOGARITHMS = ("PrivatePoissonRegressor", "PrivateGammaRegressor")


@dataclass(frozen=True, kw_only=True)
class PredictSettings:
    run: Path = argument("the run folder of noshuffle fit")
    file: Path = argument("a .csv table with the columns of the model")
    out: Path | None = setting(None, "a .csv file for the predictions (default: printed)")

    def __post_init__(self) -> None:
        check_fields(self)


@takes(PredictSettings, Output)
def predict(asked: PredictSettings, output: Output) -> None:
    """Predict the rows of a table by a model of noshuffle fit.

    RUN is its folder, FILE a .csv table with the same columns.
    """
    from noshuffle.release.files import read_json, write_bytes
    from noshuffle.release.folder import RunFolder

    path = asked.run / "model.json"
    if not path.is_file():
        raise InvalidInput(f"{asked.run} holds no model.json; give a run folder of noshuffle fit")
    made = _predicted(read_json(path), read_json(RunFolder(asked.run).config_file), asked.file)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(made)
    names, *rows = made
    if asked.out is not None:
        write_bytes(asked.out, text.getvalue().encode())
    if output.json:
        print_json([dict(zip(names, row)) for row in rows])
    elif asked.out is None:
        print(text.getvalue(), end="")
    else:
        print(f"{len(rows):,} predictions: {asked.out}")


def _predicted(model: dict[str, Any], config: dict[str, Any], file: Path) -> list[list[Any]]:
    """A line of names, and one for every row: the prediction, and of classes its probability."""
    import numpy as np
    from scipy.special import expit, softmax

    from noshuffle.cli.table_file import read_table

    columns: list[str] = model["columns"]
    listed: dict[str, list[str]] = model.get("categories", {})
    made = {f"{name}={value}" for name, values in listed.items() for value in values}
    table = read_table(
        file,
        target=None,
        only={name for name in columns if name not in made} | set(listed),
        categories=listed,
    )
    missing = [name for name in columns if name not in table.columns]
    if missing:
        raise InvalidInput(f"{file} has no column {missing[0]!r} of numbers, which the model reads")
    x = table.x[:, [table.columns.index(name) for name in columns]]
    if config.get("bounds") is not None:
        low, high = np.array(config["bounds"], dtype=float).T
        x = np.clip(x, low, high)
    margins = x @ np.atleast_2d(model["coef"]).T + np.atleast_1d(model["intercept"])
    if "classes" not in model:
        low, high = config["target_bounds"]
        expected = margins[:, 0]
        if model["kind"] in _OF_LOGARITHMS:
            low, expected = 0.0, np.exp(np.minimum(expected, np.log(high)))
        found = np.clip(expected, low, high).tolist()
        return _lines(["prediction"], found)
    if margins.shape[1] == 1:
        chances = np.hstack([expit(-margins), expit(margins)])
    else:
        chances = softmax(margins, axis=1)
    codes = chances.argmax(axis=1)
    told = [model["classes"][code] for code in codes]
    if model["kind"] != "PrivateLogisticRegression":
        return _lines(["prediction"], told)
    return _lines(["prediction", "probability"], told, chances.max(axis=1).tolist())


def _lines(names: list[str], *columns: list[Any]) -> list[list[Any]]:
    """Names, and the cells of every row."""
    return [names, *map(list, zip(*columns))]
