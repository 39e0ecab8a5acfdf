"""A whole table from a CSV file (`number_rows`).

Every column but the target (and the ids) is a feature. Numbers are taken as they are. Text needs a
public meaning: those of its values that `categories` lists become indicators; otherwise text is
refused. Empty cells of features, and NA, N/A, #N/A, null or NULL among numbers, count as zero; an
empty target is refused.

>>> import pathlib, tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     file = pathlib.Path(folder) / "t.csv"
...     _ = file.write_text("age,city,sold\\n30,Rome,yes\\n40,Oslo,no\\n")
...     made = read_table(file, target="sold", categories={"city": ["Rome", "Oslo"]})
>>> made.x.shape, made.columns[:2], made.y.tolist()
((2, 3), ('age', 'city=Rome'), ['yes', 'no'])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noshuffle.cli.number_rows import NO_NUMBER, CellRows, check_named, open_text, require_columns
from noshuffle.errors import DataUnavailable, InvalidInput

Array = NDArray[np.float64]
#: Of columns that become indicators, the values that have one.
Categories = Mapping[str, Sequence[str]]


@dataclass(frozen=True, eq=False)
class Table:
    """Features in the order of the file, raw targets, and ids if a column was named for them."""

    x: Array
    y: NDArray[Any]
    columns: tuple[str, ...]
    ids: tuple[str, ...] | None
    weights: Array | None = None
    categories: Categories = field(default_factory=dict)

    @property
    def indicators(self) -> set[str]:
        """Columns that were made from text, within [0, 1]."""
        return {f"{n}={value}" for n, values in self.categories.items() for value in values}


def read_table(
    path: Path,
    *,
    target: str | None,
    ids: str | None = None,
    weights: str | None = None,
    only: set[str] | None = None,
    categories: Categories | None = None,
) -> Table:
    """Read a .csv file, whose first line names the columns.

    Without a target y is empty; `only` names the columns that are read as features.
    """
    categories = categories or {}
    if not path.is_file():
        raise DataUnavailable(f"{path} is not a file; give a .csv table")
    cells = _csv(path)
    require_columns(path, cells, target, ids, weights, *sorted(only or ()))
    features = {
        name: column
        for name, column in cells.items()
        if name not in (target, ids, weights) and (only is None or name in only)
    }
    if only is None:
        check_named(features, str(path))
    unknown = [name for name in categories if name not in features]
    if unknown:
        raise InvalidInput(f"categories name {unknown[0]!r}, which is no feature of {path}")
    blocks, names = [], []
    for name, column in features.items():
        numbers = _numbers(_emptied(column), name=name)
        if name in categories:
            listed = {value: i for i, value in enumerate(categories[name])}
            blocks.append(_one_hot([listed.get(cell, -1) for cell in column], len(listed)))
            names += [f"{name}={value}" for value in listed]
        elif numbers is not None:
            blocks.append(numbers[:, None])
            names.append(name)
        else:
            advice = " where the model reads numbers"
            if target is not None:
                advice = f"; give its categories (--categories {name}=a,b,c), or leave it out"
            raise InvalidInput(f"column {name!r} holds text{advice}")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidInput(f"{path}: two features would be called {twice!r}; rename a column")
    if not names or not len(blocks[0]):
        beside = "that is read" if target is None else f"beside {target!r}"
        raise InvalidInput(f"{path} needs at least one row and one column {beside}")
    if target is None:
        none: Array = np.empty(0)
        return Table(np.hstack(blocks), none, tuple(names), None, None, categories)
    if "" in cells[target]:
        raise InvalidInput(
            f"{path}: the target {target!r} is empty in data row {cells[target].index('') + 1}; "
            "give every row a target, or leave the row out"
        )
    y: NDArray[Any] | None = _numbers(cells[target], name=target)
    if y is None:
        y = np.asarray(cells[target], dtype=str)
    elif (y == np.rint(y)).all() and np.abs(y).max() < 2**53:  # classes
        y = y.astype(np.int64)
    given = None if weights is None else _numbers(cells[weights], name=weights)
    if weights is not None and given is None:
        raise InvalidInput(f"column {weights!r} holds text; weights are numbers >= 0")
    units = None if ids is None else tuple(cells[ids])
    return Table(np.hstack(blocks), y, tuple(names), units, given, categories)


def _csv(path: Path) -> dict[str, list[str]]:
    with open_text(path) as file:
        rows = CellRows(file, str(path), has_header=True)
        columns: dict[str, list[str]] = {name: [] for name in rows.names}
        for cells in rows:
            for column, cell in zip(columns.values(), cells):
                column.append(cell)
    return columns


def _emptied(column: list[str]) -> list[str]:
    """The column with empty cells in the place of words for them, if it holds something else."""
    if not NO_NUMBER.intersection(column) or not set(column) - NO_NUMBER - {""}:
        return column
    return ["" if cell in NO_NUMBER else cell for cell in column]


def _numbers(column: list[str], *, name: str) -> Array | None:
    """The column as finite numbers (empty cells as zero), or None if it is text."""
    try:
        values = np.array([float(cell) if cell else 0.0 for cell in column])
    except ValueError:
        return None
    if any("_" in cell for cell in column):  # Python's 1_000, which is no number elsewhere
        return None
    if not np.isfinite(values).all():
        raise InvalidInput(
            f"column {name!r} must hold finite numbers, got nan or inf; leave such cells empty"
        )
    return values


def _one_hot(places: list[int], columns: int) -> Array:
    """A one in the given place of each row; none where it is −1."""
    out, at = np.zeros((len(places), columns)), np.array(places, dtype=np.int64)
    rows = np.flatnonzero(at >= 0)
    out[rows, at[rows]] = 1.0
    return out
