"""Tables as spreadsheets and pandas write them: read as they are meant, or refused in one line."""

from __future__ import annotations

import gzip
import io
import sys
from pathlib import Path

import numpy as np
import pytest

from noshuffle.cli.number_rows import NumberRows, open_text
from noshuffle.cli.predict import _predicted
from noshuffle.cli.table_file import read_table
from noshuffle.errors import InvalidInput


def rows_of(text: str, **options: object) -> NumberRows:
    return NumberRows(io.StringIO(text), "t.csv", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a;b\n1,5;2\n", "must have commas between its cells, got ';'"),
        ("a\tb\n1\t2\n", r"got '\\t' in its first line"),
        (",a\n0,5\n", "a column without a name"),  # the index of pandas
        ("a,b,\n1,2,\n", "a column without a name"),  # all rows would count as zeros
        ("a,b\n1_0,2\n", "column 'a' holds text"),  # Python's ten
        ("\n\n", "is empty"),
        ("a,b, b\n1,2,3\n", "names column 'b' twice in its first line"),
    ],
)
def test_sums_refuse(text: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        list(rows_of(text))


def test_unnamed_columns_that_nobody_asked_for_are_passed_over() -> None:
    assert list(rows_of(",a\n0,5\n", columns=["a"])) == [((5.0,), "")]
    assert rows_of("\n\na,b\n1,2\n").columns == ("a", "b")


def test_fits_refuse(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    for text, said in (
        (",a,y\n0,1,0\n", "a column without a name"),
        ("a,y\n1,0\nnan,1\n", "column 'a' must hold finite numbers"),
        ("a,y\n1_0,0\n", "column 'a' holds text"),
    ):
        file.write_text(text)
        with pytest.raises(InvalidInput, match=said):
            read_table(file, target="y")
    file.write_text("city,city=Rome,y\nRome,3,0\n")
    with pytest.raises(InvalidInput, match="two features would be called 'city=Rome'"):
        read_table(file, target="y", categories={"city": ["Rome"]})


@pytest.mark.parametrize("word", ["NA", "N/A", "#N/A", "null", "NULL"])
def test_words_for_no_number_are_empty_cells_of_numbers_and_values_of_text(
    tmp_path: Path, word: str
) -> None:
    """Before, one of them made a column of numbers text, with a category for every number."""
    file = tmp_path / "t.csv"
    file.write_text(f"a,city,y\n1,{word},{word}\n{word},Rome,b\n,Oslo,b\n")
    table = read_table(file, target="y", categories={"city": [word, "Rome"]})
    assert table.columns == ("a", f"city={word}", "city=Rome")
    np.testing.assert_array_equal(table.x[:, 0], [1.0, 0.0, 0.0])
    assert table.x[:, 1:].tolist() == [[1, 0], [0, 1], [0, 0]]
    assert table.y.tolist() == [word, "b", "b"]  # a class like any other
    file.write_text(f"a,y\n{word},0\n,1\n")
    with pytest.raises(InvalidInput, match="column 'a' holds text"):
        read_table(file, target="y")


def test_numbers_beyond_all_integers_stay_numbers(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("a,y\n1,1e300\n2,-5\n")
    assert read_table(file, target="y").y.tolist() == [1e300, -5.0]


def test_an_equals_sign_in_a_name_is_no_indicator(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("no=,n=3,city,y\n7,9,Rome,0\n8,1,Oslo,1\n")
    table = read_table(file, target="y", categories={"city": ["Oslo", "Rome"]})
    assert table.indicators == {"city=Oslo", "city=Rome"}
    model = {
        "kind": "PrivateLinearRegression",
        "columns": list(table.columns),
        "categories": dict(table.categories),
        "coef": [1.0, 10.0, 0.0, 0.0],
        "intercept": 0.0,
    }
    made = _predicted(model, {"target_bounds": [0, 1000]}, file)
    assert made == [["prediction"], [97.0], [18.0]]
    file.write_text("other\n1\n")
    with pytest.raises(InvalidInput, match=r"has no column '.*'; its columns: other"):
        _predicted(model, {"target_bounds": [0, 1000]}, file)


def test_packed_tables_and_standard_input_in_any_locale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = b"\xef\xbb\xbfpr\xc3\xa9cio,b\r\n1,2\r\n"
    file = tmp_path / "t.csv.gz"
    file.write_bytes(gzip.compress(raw))
    assert NumberRows(open_text(file), "t").columns == ("précio", "b")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="ascii"))
    assert list(NumberRows(open_text(Path("-")), "t", columns=["précio"])) == [((1.0,), "")]
    file.write_bytes(gzip.compress(b"a\n" + b"1\n" * 99)[:-9])
    with pytest.raises(InvalidInput, match="could not be read as a CSV table"):
        list(NumberRows(open_text(file), "t"))
