"""A whole table from a file: CSV (`number_rows`), or Parquet where a reader is installed.

Every column but the target (and the ids) is a feature. Numbers are taken as they are. Text needs a
public meaning: with `hash_text=N` a text cell becomes one of N indicators by a fixed hash of column
name and value, which depends on no other row; with `categories` those of its values that are listed
(or that a function of all text columns lists) become indicators; otherwise text is refused. Empty
cells of features, and NA, N/A, #N/A, null or NULL among numbers, count as zero, or as NaN
(`missing="skip"`); an empty target is refused.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noshuffle.cli.number_rows import NO_NUMBER, CellRows, check_named, open_text, require_columns
from noshuffle.errors import DataUnavailable, InvalidInput, Unsupported, whole

Array = NDArray[np.float64]
#: Of columns that become indicators, the values that have one.
Categories = Mapping[str, Sequence[str]]
ChooseFn = Callable[[dict[str, list[str]], list[str] | None], Categories]


@dataclass(frozen=True, eq=False)
class Table:
    """Features in the order of the file, raw targets, and ids if a column was named for them."""

    x: Array
    y: NDArray[Any]
    columns: tuple[str, ...]
    ids: tuple[str, ...] | None
    weights: Array | None = None
    categories: Categories | None = None
    hashed: Mapping[str, int] = field(default_factory=dict)

    @property
    def indicators(self) -> set[str]:
        """Columns that were made from text, within [0, 1]."""
        listed = [
            f"{n}={value}" for n, values in (self.categories or {}).items() for value in values
        ]
        hashed = [f"{n}#{i}" for n, buckets in self.hashed.items() for i in range(buckets)]
        return {*hashed, *listed}


def read_table(
    path: Path,
    *,
    target: str | None,
    ids: str | None = None,
    weights: str | None = None,
    hash_text: int | None = None,
    missing: str = "zero",
    only: set[str] | None = None,
    categories: Categories | ChooseFn | None = None,
) -> Table:
    """Read a .csv or .parquet file; the first line of a CSV names the columns.

    Without a target y is empty; `only` names the columns that are read as features. A function
    in place of `categories` is given all columns of text, and the ids.
    """
    if hash_text is not None:
        whole(at_least=2, hash_text=hash_text)
    if not path.is_file():
        raise DataUnavailable(f"{path} is not a file; give a .csv or .parquet table")
    cells = _parquet(path) if path.suffix in (".parquet", ".pq") else _csv(path)
    empty = math.nan if missing == "skip" else 0.0
    require_columns(path, cells, target, ids, weights, *sorted(only or ()))
    features = {
        name: column
        for name, column in cells.items()
        if name not in (target, ids, weights) and (only is None or name in only)
    }
    if only is None:
        check_named(features, str(path))
    as_numbers = {n: _numbers(_emptied(c), name=n, empty=empty) for n, c in features.items()}
    if callable(categories):
        texts = {n: c for n, c in features.items() if as_numbers[n] is None}
        categories = categories(texts, None if ids is None else cells[ids])
    unknown = [name for name in categories or () if name not in features]
    if unknown:
        raise InvalidInput(f"categories name {unknown[0]!r}, which is no feature of {path}")
    blocks, names, hashed = [], [], {}
    for name, column in features.items():
        numbers = as_numbers[name]
        if categories is not None and name in categories:
            listed = {value: i for i, value in enumerate(categories[name])}
            blocks.append(_one_hot([listed.get(cell, -1) for cell in column], len(listed)))
            names += [f"{name}={value}" for value in listed]
        elif numbers is not None:
            blocks.append(numbers[:, None])
            names.append(name)
        elif hash_text is None:
            raise InvalidInput(
                f"column {name!r} holds text; give its categories (--categories {name}=a,b,c, or "
                "private to have them found within ε), --hash-text 16, or leave it out of the file"
            )
        else:
            blocks.append(_indicators(name, column, hash_text))
            names += [f"{name}#{i}" for i in range(hash_text)]
            hashed[name] = hash_text
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidInput(f"{path}: two features would be called {twice!r}; rename a column")
    if not names or not len(blocks[0]):
        beside = "that is read" if target is None else f"beside {target!r}"
        raise InvalidInput(f"{path} needs at least one row and one column {beside}")
    if target is None:
        none: Array = np.empty(0)
        return Table(np.hstack(blocks), none, tuple(names), None, None, categories, hashed)
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
    return Table(np.hstack(blocks), y, tuple(names), units, given, categories, hashed)


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


def _emptied(column: list[str]) -> list[str]:
    """The column with empty cells in the place of words for them, if it holds something else."""
    if not NO_NUMBER.intersection(column) or not set(column) - NO_NUMBER - {""}:
        return column
    return ["" if cell in NO_NUMBER else cell for cell in column]


def _numbers(column: list[str], *, name: str, empty: float = 0.0) -> Array | None:
    """The column as finite numbers (empty cells as `empty`), or None if it is text."""
    try:
        values = np.array([float(cell) if cell else empty for cell in column])
    except ValueError:
        return None
    if any("_" in cell for cell in column):  # Python's 1_000, which is no number elsewhere
        return None
    if not np.isfinite(values[[bool(cell) for cell in column]]).all():
        raise InvalidInput(
            f"column {name!r} must hold finite numbers, got nan or inf; leave such cells empty"
        )
    return values


def _indicators(name: str, column: list[str], buckets: int) -> Array:
    def bucket(value: str) -> int:
        digest = hashlib.blake2b(f"{name}={value}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % buckets

    found = {value: bucket(value) for value in set(column)}
    return _one_hot([found[value] for value in column], buckets)


def _one_hot(places: list[int], columns: int) -> Array:
    """A one in the given place of each row; none where it is −1."""
    out, at = np.zeros((len(places), columns)), np.array(places, dtype=np.int64)
    rows = np.flatnonzero(at >= 0)
    out[rows, at[rows]] = 1.0
    return out
