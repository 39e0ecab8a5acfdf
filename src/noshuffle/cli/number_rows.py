"""Rows of a CSV file or of standard input, one at a time: as cells, or as numbers.

The first line names the columns if one of its cells is neither empty nor a number; otherwise it is
data and the columns are called 1, 2, 3 … (`has_header` says so beforehand). Every column that is
asked for must hold numbers. A row with an empty cell, NA, NaN or infinity in one of them, or
without an id where ids are asked for, counts as zeros: it is there, and adds nothing. A column
without a name (the index that pandas writes, a comma at the end of every line) is taken only if
asked for.

>>> text = io.StringIO("a,b,who\\n1,2,x\\n3,,y\\n")
>>> table = NumberRows(text, "t.csv", columns=["a", "b"], id="who")
>>> list(table), table.columns
([((1.0, 2.0), 'x'), ((0.0, 0.0), 'y')], ('a', 'b'))
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import sys
import zlib
from collections.abc import Collection, Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from noshuffle.cli.words import shortened
from noshuffle.errors import InvalidInput

NumberRow = tuple[tuple[float, ...], str]
#: What R, pandas, spreadsheets and databases write for a number that is not there.
NO_NUMBER = frozenset(("NA", "N/A", "#N/A", "null", "NULL"))


def require_columns(table: str | Path, known: Collection[str], *columns: str | None) -> None:
    """Refuse a column that is not there; None is none."""
    for name in columns:
        if name is not None and name not in known:
            raise InvalidInput(f"{table} has no column {name!r}; its columns: {shortened(known)}")


class CellRows:
    """The rows of one stream as text; `names` are known before the first of them is taken."""

    def __init__(self, stream: TextIO, name: str, *, has_header: bool | None) -> None:
        self.name, self._reader = name, csv.reader(stream)
        self._lines = self._read()
        self._kept: list[str] | None = None  # a first line that is data
        first = next(filter(None, self._lines), None)
        if first is None:
            raise InvalidInput(f"{name} is empty; give a table, its cells with commas between them")
        for mark in ";\t|" if len(first) == 1 else "":
            if mark in first[0]:
                raise InvalidInput(
                    f"{name} must have commas between its cells, got {mark!r} in its first line; "
                    "write it with commas, and numbers with a decimal point"
                )
        self.names = [cell.strip() for cell in first]
        if has_header is None:
            has_header = any(cell and as_number(cell) is None for cell in self.names)
        if not has_header:
            self._kept, self.names = first, [str(i + 1) for i in range(len(first))]
        if len(set(self.names)) < len(first):
            twice = next(one for one in self.names if self.names.count(one) > 1)
            raise InvalidInput(f"{name} names column {twice!r} twice in its first line; rename one")

    def _read(self) -> Iterator[list[str]]:
        try:
            yield from self._reader
        except (csv.Error, UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise InvalidInput(
                f"{self.name} could not be read as a CSV table in UTF-8, after line "
                f"{self._reader.line_num}: {error}; write it anew as text in UTF-8"
            ) from None

    def require(self, *columns: str | None) -> None:
        """Refuse a column that is not there; None is none."""
        require_columns(self.name, self.names, *columns)

    @property
    def at(self) -> str:
        """Where the row that came last stands."""
        return f"{self.name}, line {self._reader.line_num}"

    def __iter__(self) -> Iterator[list[str]]:
        for line in chain([] if self._kept is None else [self._kept], self._lines):
            if line and len(line) != len(self.names):
                raise InvalidInput(f"{self.at}: expected {len(self.names)} cells, got {len(line)}")
            if line:
                yield [cell.strip() for cell in line]


class NumberRows:
    """The rows of one stream; `columns` are known before the first of them is taken."""

    def __init__(
        self,
        stream: TextIO,
        name: str,
        *,
        columns: list[str] | None = None,
        id: str | None = None,
        has_header: bool | None = None,
    ) -> None:
        self.name, self._rows = name, CellRows(stream, name, has_header=has_header)
        names = self._rows.names
        self._rows.require(*(columns or ()), id)
        self.columns = tuple(columns) if columns else tuple(n for n in names if n != id)
        if not columns:
            check_named(self.columns, name)
        if not self.columns:
            raise InvalidInput(f"{name} has no column to add up beside {id!r}")
        self._places = [names.index(column) for column in self.columns]
        self._id = None if id is None else names.index(id)

    def __iter__(self) -> Iterator[NumberRow]:
        return map(self._row, self._rows)

    def _row(self, cells: list[str]) -> NumberRow:
        who = "" if self._id is None else cells[self._id]
        values = []
        for place, column in zip(self._places, self.columns):
            value = as_number(cells[place]) if cells[place] else math.nan
            if value is None:
                raise InvalidInput(
                    f"{self._rows.at}: column {column!r} holds text ({cells[place][:20]!r}); name "
                    "the columns of numbers with --columns"
                )
            values.append(value)
        is_lost = self._id is not None and not who
        if is_lost or not all(math.isfinite(value) for value in values):
            return (0.0,) * len(values), who
        return tuple(values), who


def check_named(columns: Collection[str], file: str) -> None:
    """Refuse a column that nobody asked for by name and that has none."""
    if "" in columns:
        raise InvalidInput(
            f"{file} has a column without a name, as pandas writes its index, or a comma too many "
            "in its first line; name it, or leave it out: to_csv(index=False)"
        )


def open_text(file: Path) -> TextIO:
    """The file, unpacked if it is gzip, or standard input for "-"."""
    if str(file) == "-":
        if isinstance(sys.stdin, io.TextIOWrapper):  # whatever the terminal speaks
            sys.stdin.reconfigure(encoding="utf-8-sig", newline="")
        return sys.stdin
    if not file.is_file():
        raise InvalidInput(f"{file} is not a file; give a .csv table, or - for standard input")
    raw: BinaryIO = file.open("rb")
    is_packed = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    if is_packed:
        raw = cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    return io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")


def as_number(cell: str) -> float | None:
    """The number that a cell holds (NaN where it says that there is none), or None; Python's 1_000
    is none.

    >>> as_number("1e3"), as_number("1_000"), as_number("x"), as_number("NA")
    (1000.0, None, None, nan)
    """
    if cell in NO_NUMBER:
        return math.nan
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None
