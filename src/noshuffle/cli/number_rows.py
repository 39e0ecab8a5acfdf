"""Rows of a CSV file or of standard input, one at a time: as cells, or as numbers.

The first line names the columns if one of its cells is neither empty nor a number; otherwise it is
data and the columns are called 1, 2, 3 … (`has_header` says so beforehand). Every column that is
asked for must hold numbers. A row with an empty cell, NaN or infinity in one of them, or without
an id where ids are asked for, counts as zeros: it is there, and adds nothing.

>>> text = io.StringIO("a,b,who\\n1,2,x\\n3,,y\\n")
>>> table = NumberRows(text, "t.csv", columns=["a", "b"], id="who")
>>> list(table), table.columns
([((1.0, 2.0), 'x'), ((0.0, 0.0), 'y')], ('a', 'b'))
"""

from __future__ import annotations

import csv
import io
import math
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TextIO

from noshuffle.errors import InvalidInput

NumberRow = tuple[tuple[float, ...], str]


class CellRows:
    """The rows of one stream as text; `names` are known before the first of them is taken."""

    def __init__(self, stream: TextIO, name: str, *, has_header: bool | None) -> None:
        self.name, self._reader = name, csv.reader(stream)
        self._lines = self._read()
        self._kept: list[str] | None = None  # a first line that is data
        first = next(self._lines, None)
        if first is None:
            raise InvalidInput(f"{name} is empty; give a table, its cells with commas between them")
        self.names = [cell.strip() for cell in first]
        if has_header is None:
            has_header = any(cell and _number(cell) is None for cell in self.names)
        if not has_header:
            self._kept, self.names = first, [str(i + 1) for i in range(len(first))]
        if len(set(self.names)) < len(first):
            raise InvalidInput(f"{name} names a column twice in its first line")

    def _read(self) -> Iterator[list[str]]:
        try:
            yield from self._reader
        except (csv.Error, UnicodeDecodeError) as error:
            raise InvalidInput(
                f"{self.name} could not be read as a CSV table in UTF-8, after line "
                f"{self._reader.line_num}: {error}"
            ) from None

    def require(self, *columns: str | None) -> None:
        """Refuse a column that is not there; None is none."""
        for wanted in columns:
            if wanted is not None and wanted not in self.names:
                told = ", ".join(self.names)
                raise InvalidInput(f"{self.name} has no column {wanted!r}; its columns: {told}")

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
            value = _number(cells[place]) if cells[place] else math.nan
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


def open_text(file: Path) -> TextIO:
    """The file, or standard input for "-"."""
    if str(file) == "-":
        return sys.stdin
    if not file.is_file():
        raise InvalidInput(f"{file} is not a file; give a .csv table, or - for standard input")
    return io.TextIOWrapper(file.open("rb"), encoding="utf-8-sig", newline="")


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None
