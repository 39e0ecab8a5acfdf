"""A whole table from a file: CSV (`number_rows`), or Parquet where a reader is installed.

Every column but the target (and the ids) is a feature. Numbers are taken as they are. Text needs a
public meaning: with `hash_text=N` a text cell becomes one of N indicators by a fixed hash of column
name and value, which depends on no other row; otherwise text is refused. Empty
cells of features count as zero, or as NaN (`missing="skip"`); an empty target is refused.

>>> import pathlib, tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     file = pathlib.Path(folder) / "t.csv"
...     _ = file.write_text("age,city,sold\\n30,Rome,yes\\n40,Oslo,no\\n")
...     made = read_table(file, target="sold", hash_text=4)
>>> made.x.shape, made.columns[:2], made.y.tolist()
((2, 5), ('age', 'city#0'), ['yes', 'no'])
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noshuffle.cli.number_rows import CellRows, open_text
from noshuffle.errors import DataUnavailable, InvalidInput, Unsupported, whole

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Table:
    """Features in the order of the file, raw targets, and ids if a column was named for them."""

    x: Array
    y: NDArray[Any]
    columns: tuple[str, ...]
    ids: tuple[str, ...] | None
    weights: Array | None = None


def read_table(
    path: Path,
    *,
    target: str | None,
    ids: str | None = None,
    weights: str | None = None,
    hash_text: int | None = None,
    missing: str = "zero",
    only: set[str] | None = None,
) -> Table:
    """Read a .csv or .parquet file; the first line of a CSV names the columns.

    Without a target y is empty; `only` names the columns that are read as features.
    """
    if hash_text is not None:
        whole(at_least=2, hash_text=hash_text)
    if not path.is_file():
        raise DataUnavailable(f"{path} is not a file; give a .csv or .parquet table")
    cells = _parquet(path) if path.suffix in (".parquet", ".pq") else _csv(path)
    empty = math.nan if missing == "skip" else 0.0
    for name in (target, ids, weights):
        if name is not None and name not in cells:
            raise InvalidInput(f"{path} has no column {name!r}; its columns: {', '.join(cells)}")
    blocks, names = [], []
    for name, column in cells.items():
        if name in (target, ids, weights) or (only is not None and name not in only):
            continue
        numbers = _numbers(column, empty=empty)
        if numbers is not None:
            blocks.append(numbers[:, None])
            names.append(name)
        elif hash_text is None:
            raise InvalidInput(
                f"column {name!r} holds text; encode it with a public list of values, or use "
                "hash_text=16"
            )
        else:
            blocks.append(_indicators(name, column, hash_text))
            names += [f"{name}#{i}" for i in range(hash_text)]
    if not blocks or not len(blocks[0]):
        beside = "that is read" if target is None else f"beside {target!r}"
        raise InvalidInput(f"{path} needs at least one row and one column {beside}")
    if target is None:
        return Table(np.hstack(blocks), np.empty(0), tuple(names), None)
    if "" in cells[target]:
        raise InvalidInput(
            f"{path}: the target {target!r} is empty in data row {cells[target].index('') + 1}; "
            "give every row a target, or leave the row out"
        )
    y: NDArray[Any] | None = _numbers(cells[target])
    if y is None:
        y = np.asarray(cells[target], dtype=str)
    elif (y == np.rint(y)).all():  # classes 0, 1, 2 read better as integers
        y = y.astype(np.int64)
    given = None if weights is None else _numbers(cells[weights])
    if weights is not None and given is None:
        raise InvalidInput(f"column {weights!r} holds text; weights are numbers >= 0")
    units = None if ids is None else tuple(cells[ids])
    return Table(np.hstack(blocks), y, tuple(names), units, given)


def _csv(path: Path) -> dict[str, list[str]]:
    with open_text(path) as file:
        rows = CellRows(file, str(path), has_header=True)
        columns: dict[str, list[str]] = {name: [] for name in rows.names}
        for cells in rows:
            for column, cell in zip(columns.values(), cells):
                column.append(cell)
    return columns


def _parquet(path: Path) -> dict[str, list[str]]:
    if find_spec("pyarrow") is None:
        raise Unsupported(
            f"{path} is Parquet, which needs pyarrow; install it, or write the table as CSV"
        )
    from pyarrow import parquet  # type: ignore[import-not-found,import-untyped,unused-ignore]

    columns = parquet.read_table(path).to_pydict()
    return {
        name: ["" if cell is None else str(cell) for cell in column]
        for name, column in columns.items()
    }


def _numbers(column: list[str], *, empty: float = 0.0) -> Array | None:
    """The column as finite numbers (empty cells as `empty`), or None if it is text."""
    try:
        values = np.array([float(cell) if cell else empty for cell in column])
    except ValueError:
        return None
    if not np.isfinite(values[[bool(cell) for cell in column]]).all():
        raise InvalidInput("cells must be finite numbers, got nan or inf; leave them empty instead")
    return values


def _indicators(name: str, column: list[str], buckets: int) -> Array:
    def bucket(value: str) -> int:
        digest = hashlib.blake2b(f"{name}={value}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % buckets

    found = {value: bucket(value) for value in set(column)}
    out = np.zeros((len(column), buckets))
    out[np.arange(len(column)), [found[value] for value in column]] = 1.0
    return out
