"""`noshuffle fit`: from a CSV file to a verified run folder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import typer

from noshuffle.cli.fit import fit
from noshuffle.cli.predict import predict
from noshuffle.cli.table_file import read_table
from noshuffle.errors import DataUnavailable, InvalidInput, NoshuffleError
from noshuffle.release.verify import verify
from noshuffle.report import write_report


def command(line: list[str], called: Callable[..., None] = fit) -> None:
    """Run the command as the application will."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(called)
    typer.main.get_command(app).main(args=line, standalone_mode=False)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 10, size=(600, 3))
    kind = np.where(x[:, 0] > x[:, 1], "yes", "no")
    price = x[:, 0] - x[:, 2] + rng.normal(size=600)
    lines = ["a,b,c,city,who,price,sold"]
    for i in range(600):
        a, b, c = (f"{v:.3f}" for v in x[i])
        lines.append(f"{a},{b},{c},{'Rome' if i % 3 else 'Oslo'},u{i},{price[i]:.3f},{kind[i]}")
    file = tmp_path / "sales.csv"
    file.write_text("\n".join(lines) + "\n")
    return file


CITY, SOLD = ["--categories", "city=Oslo,Rome"], ["--categories", "sold=no,yes"]
PLAIN = ["--mechanism", "tree", "--test-seed", "t", "--bounds", "0,10"]
COMMON = [*PLAIN, *CITY]


@pytest.mark.usefixtures("pictures")
def test_a_run_is_verified(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    command([str(table), "--target", "sold", "--ids", "who", "--epsilon", "4", "--batch-size", "8",
             "--bounds", "price=-10,10", "--out", str(out), "--json",
             *COMMON])  # fmt: skip
    told = json.loads(capsys.readouterr().out)
    assert told["steps"] == 75
    assert told["statement"]["epsilon"] <= 4
    assert any("read from y" in s for s in told["statement"]["assumptions"])
    assert sum("add up with this one" in s for s in told["statement"]["assumptions"]) == 1
    verdict = verify(out)
    assert verdict.refuted == ()
    assert verdict.answer == "NOT PRIVATE"  # a test seed
    assert verdict.released == 75
    model = json.loads((out / "model.json").read_text())
    assert model["classes"] == ["no", "yes"]
    assert model["columns"][:4] == ["a", "b", "c", "city=Oslo"]
    assert np.array(model["coef"]).shape == (1, 6)
    assert model["coef"][0][0] > 0 > model["coef"][0][1]
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["step"] == 75
    assert set().union(*metrics) == {"step", "epsilon"}  # released values only
    assert metrics[-1]["epsilon"] == told["statement"]["epsilon"]
    assert not list(out.rglob("secret.*"))  # a finished run has ended
    page = (out / "report.html").read_text(encoding="utf8")
    assert told["report"] == str(out / "report.html")
    for words in ("logistic model of sold", "largest released weights", "read from y",
                  "NOT PRIVATE"):  # fmt: skip
        assert words in page
    assert "Privacy against accuracy" not in page  # there is none
    words = re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL)  # places of points left out
    assert str(told["progressive_score_not_private"]) not in words
    (out / "report.html").unlink()
    assert write_report(out).is_file()


@pytest.mark.usefixtures("pictures")
def test_several_classes(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command([str(table), "--target", "city", "--task", "svc", "--out", str(out),
             "--classes", "Rome,Oslo,Bonn", "--bounds", "price=-10,10", "--ids", "who",
             *SOLD, *PLAIN])  # fmt: skip
    page = (out / "report.html").read_text(encoding="utf8")
    assert "weight of each class" in page
    assert verify(out).refuted == ()


@pytest.mark.parametrize("solver", ["ftrl", "sums"])
def test_regression_of_several_passes(table: Path, tmp_path: Path, solver: str) -> None:
    out = tmp_path / "run"
    command([str(table), "--target", "price", "--task", "linear", "--target-bounds", "-12,12",
             "--passes", "2", "--solver", solver, "--out", str(out), "--batch-size", "16",
             "--bounds", "0,10", "--ids", "who", *CITY, *SOLD, "--mechanism", "identity"]
            if solver == "ftrl" else
            [str(table), "--target", "price", "--task", "linear", "--target-bounds", "-12,12",
             "--ids", "who", "--solver", solver, "--out", str(out), *SOLD, *COMMON])  # fmt: skip
    assert verify(out).refuted == ()


def test_counts_and_quantiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Models of log y are fitted and say what they expect in units of y, as the estimator does."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, size=(4000, 2))
    y = rng.poisson(np.exp(1 + x[:, 0]))
    file, asked = tmp_path / "counts.csv", tmp_path / "asked.csv"
    rows = (f"{a:.4f},{b:.4f},{n}" for (a, b), n in zip(x, y, strict=True))
    file.write_text("a,b,n\n" + "\n".join(rows) + "\n")
    asked.write_text("a,b\n0.5,0\n-0.5,0\n")
    common = ["--target", "n", "--target-bounds", "0,20", "--bounds", "private", "--test-seed", "t"]
    for task, more, expected in (
        ("poisson", [], np.exp([1.5, 0.5])),
        ("quantile", ["--quantile", "0.9"], np.array([8.0, 3.0])),
    ):
        out = tmp_path / task
        command([str(file), "--task", task, *more, *common, "--epsilon", "8", "--out", str(out)])
        assert verify(out).refuted == ()
        capsys.readouterr()
        command([str(out), str(asked), "--json"], predict)
        told = [row["prediction"] for row in json.loads(capsys.readouterr().out)]
        assert np.allclose(told, expected, rtol=0.35)
        assert told[0] > 1.5 * told[1]


def test_text_columns_become_indicators_of_categories(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are listed; the model knows them, and so does `predict`."""
    line = [str(table), "--target", "sold", "--ids", "who", "--test-seed", "t", "--json"]
    line += ["--bounds", "0,10", "--bounds", "price=-10,10", "--classes", "no,yes"]
    out = tmp_path / "run"
    command([*line, "--categories", "city=Bonn, Oslo", "--out", str(out)])
    assert json.loads(capsys.readouterr().out)["statement"]["epsilon"] == pytest.approx(1.0)
    model = json.loads((out / "model.json").read_text())
    assert model["categories"] == {"city": ["Bonn", "Oslo"]}
    assert [c for c in model["columns"] if "=" in c] == ["city=Bonn", "city=Oslo"]
    assert verify(out).refuted == ()
    command([str(out), str(table), "--json"], predict)
    assert len(json.loads(capsys.readouterr().out)) == 600


def test_refusals(table: Path, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "x")]
    for line, match in (
        (["--target", "nothing"], "no column 'nothing'"),
        (["--target", "sold"], "holds text"),
        (["--target", "price", "--task", "linear", *CITY, *SOLD], "target-bounds"),
        (["--target", "sold", *CITY, "--bounds", "a=0,10"], "must cover column 'b'"),
        (["--target", "sold", *CITY, "--bounds", "zero"], "low,high"),
        (["--target", "sold", *CITY, "--bounds", "q=0,1"], "no feature"),
        (["--target", "sold", "--task", "magic"], "task"),
        (["--target", "sold", "--categories", "town=a,b"], "no feature"),
        (["--target", "sold", "--categories", "private"], "COLUMN=a,b,c"),
        (["--target", "sold", *CITY, "--classes", "yes,maybe"], "none of the 2"),
        (["--target", "sold", "--solver", "magic"], "solver"),
        (["--target", "sold", "--alpha", "-1"], "alpha"),
        (["--target", "sold", *CITY, "--width", "1"], "--task huber"),
        (["--target", "price", "--task", "gamma", *CITY, *SOLD], "--task gamma needs"),
        (["--target", "sold", "--task", "linear", "--target-bounds", "0,1"], "text"),
    ):
        with pytest.raises(NoshuffleError, match=match):
            command([str(table), *line, "--ids", "who", *out, "--mechanism", "tree"])
    with pytest.raises(DataUnavailable, match="not a file"):
        command([str(tmp_path / "gone.csv"), "--target", "y", *out])
    (tmp_path / "noise.csv").write_bytes(b"\x88\xff\x00\x01")
    with pytest.raises(InvalidInput, match="could not be read"):
        command([str(tmp_path / "noise.csv"), "--target", "y", *out])
    with pytest.raises(InvalidInput, match="is not empty; use another --out"):
        command([str(table), "--target", "sold", "--out", str(tmp_path)])


def test_tables_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    for text, match in (
        ("", "empty"),
        ("a,a\n1,2\n", "twice"),
        ("a,y\n1\n", "line 2: expected 2 cells"),
        ("a,y\nnan,1\n", "finite"),
        ("y\n1\n", "at least one row"),
        ("a,y\n", "at least one row"),
    ):
        file.write_text(text)
        with pytest.raises(InvalidInput, match=match):
            read_table(file, target="y")
    file.write_text("\ufeffa , y\n 1,0.5\n\n,2\n")
    made = read_table(file, target="y")
    np.testing.assert_array_equal(made.x, [[1.0], [0.0]])
    np.testing.assert_array_equal(made.y, [0.5, 2.0])


@pytest.fixture
def numeric(tmp_path: Path) -> Path:
    """Labels 0 and 1, columns far from [-1, 1]."""
    rng = np.random.default_rng(1)
    x = rng.uniform(0, (100, 1000), size=(400, 2))
    file = tmp_path / "n.csv"
    rows = [f"{a:.2f},{b:.2f},{int(a > 50)}" for a, b in x]
    file.write_text("\n".join(["a,b,y", *rows]) + "\n")
    return file


@pytest.mark.parametrize("classes", ["0,1", "1,0", "0.0, 1.0", "0,1,2"])
def test_numbers_can_be_classes(numeric: Path, tmp_path: Path, classes: str) -> None:
    out = tmp_path / "run"
    command([str(numeric), "--target", "y", "--classes", classes, "--bounds", "0,1000",
             "--mechanism", "tree", "--test-seed", "t", "--out", str(out)])  # fmt: skip
    kept = json.loads((out / "config.json").read_text())["classes"]
    assert kept == [int(float(c)) for c in classes.split(",")]
    assert verify(out).refuted == ()


def test_words_are_no_classes_of_numbers(numeric: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="--classes must be numbers"):
        command(
            [str(numeric), "--target", "y", "--classes", "no,yes", "--out", str(tmp_path / "r")]
        )


def test_an_empty_label_is_no_class(numeric: Path, tmp_path: Path) -> None:
    rows = numeric.read_text().splitlines()
    rows[3] = rows[3].rpartition(",")[0] + ","
    numeric.write_text("\n".join(rows) + "\n")
    with pytest.raises(InvalidInput, match="target 'y' is empty in data row 3"):
        command([str(numeric), "--target", "y", "--out", str(tmp_path / "r")])
    assert not (tmp_path / "r").exists()


def test_without_bounds_there_is_a_warning(
    numeric: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [str(numeric), "--target", "y", "--mechanism", "tree", "--test-seed", "t"]
    command([*common, "--out", str(tmp_path / "a")])
    said = capsys.readouterr().err
    assert "warning: without --bounds" in said
    assert said.count("\n") == 1
    command([*common, "--bounds", "0,1000", "--out", str(tmp_path / "b")])
    assert capsys.readouterr().err == ""


def test_predict_agrees_with_the_model(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from noshuffle.cli import main
    from noshuffle.cli.table_file import read_table

    out, told = tmp_path / "run", tmp_path / "told.csv"
    command([str(table), "--target", "sold", "--ids", "who", "--epsilon", "4",
             "--bounds", "price=-10,10", "--out", str(out), "--json", *COMMON])  # fmt: skip
    capsys.readouterr()
    assert main(["predict", str(out), str(table), "--out", str(told)]) == 0
    lines = [line.split(",") for line in told.read_text().splitlines()]
    assert lines[0] == ["prediction", "probability"]
    y = read_table(table, target="sold", ids="who", categories={"city": ["Oslo", "Rome"]}).y
    assert len(lines) - 1 == len(y)
    assert np.mean([line[0] == one for line, one in zip(lines[1:], y)]) > 0.6
    assert all(0.5 <= float(line[1]) <= 1 for line in lines[1:])
    lean = tmp_path / "lean.csv"
    lean.write_text("a,b\n1,2\n")
    assert main(["predict", str(out), str(lean)]) == 2
    assert "has no column 'c'" in capsys.readouterr().err
    assert main(["predict", str(tmp_path), str(lean)]) == 2
    assert "holds no model.json" in capsys.readouterr().err


@pytest.mark.parametrize("task", ["logistic", "linear"])
def test_empty_cells_of_rows_to_predict_count_as_zero(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = np.random.default_rng(1).uniform(-1, 1, size=(300, 2))
    target = (x[:, 0] > 0).astype(int) if task == "logistic" else x[:, 0]
    file, gaps, text = (tmp_path / f"{name}.csv" for name in ("t", "gaps", "text"))
    file.write_text("a,b,y\n" + "\n".join(f"{a},{b},{y}" for (a, b), y in zip(x, target)))
    gaps.write_text("b,a\n0.1,\n0.1,0.9\n,\n0.2,NA\n")
    text.write_text("a,b\nmuch,0.1\n")
    out = tmp_path / "run"
    command([str(file), "--target", "y", "--task", task, "--bounds", "-1,1", "--epsilon", "8",
             *(["--target-bounds=-1,1"] if task == "linear" else []),
             "--test-seed", "0", "--out", str(out)])  # fmt: skip
    zeros = tmp_path / "zeros.csv"
    zeros.write_text("b,a\n0.1,0\n0.1,0.9\n0,0\n0.2,0\n")
    found = []
    for rows in (gaps, zeros):
        capsys.readouterr()
        command([str(out), str(rows), "--json"], predict)
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert len(found[0]) == 4
    with pytest.raises(InvalidInput, match="column 'a' holds text where the model reads numbers"):
        command([str(out), str(text)], predict)


def test_numbers_are_no_classes(table: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="'price' holds numbers between integers, so use --task"):
        command([str(table), "--target", "price", "--out", str(tmp_path / "run"), "--ids", "who",
                 *SOLD, *COMMON])  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_what_belongs_to_classes_is_refused_for_numbers(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(InvalidInput, match="--classes are for --task logistic or svc"):
        command([str(table), "--target", "price", "--task", "linear", "--target-bounds", "0,10",
                 "--classes", "no,yes", "--ids", "who", *CITY, *SOLD,
                 "--out", str(out)])  # fmt: skip
    with pytest.raises(InvalidInput, match=r"holds text; give its categories [(]--categories"):
        command([str(table), "--target", "price", "--task", "linear", "--target-bounds", "0,10",
                 "--out", str(out)])  # fmt: skip
    assert not out.exists()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--clip-norm", "1e300"], "clip_norm must be at most 1e[+]30 [(]float32[)], got 1e[+]300"),
        (["--clip-norm", "1.7e308", "--solver", "ftrl"], "clip_norm must be at most 1e[+]30"),
        (["--clip-norm", "1e-300"], "clip_norm must be at least 1e-12"),
        (["--class-weight", "yes=1e300,no=1"], "clip_norm times the largest weight must be at m"),
        (["--clip-norm", "1e30", "--epsilon", "1e-30"], "noise of deviation .* is more than sums"),
    ],
)
def test_numbers_that_no_float32_holds_are_refused_before_anything_is_drawn(
    table: Path, tmp_path: Path, more: list[str], why: str
) -> None:
    out = tmp_path / "runs" / "one"
    with pytest.raises(InvalidInput, match=why):
        command([str(table), "--target", "sold", "--ids", "who", "--out", str(out),
                 "--bounds", "0,10", *CITY, "--classes", "no,yes", *more])  # fmt: skip
    assert not out.parent.exists()


@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize("more", [["--clip-norm", "1e30"], ["--epsilon", "1e300"]])
def test_numbers_at_the_edge_are_fitted(table: Path, tmp_path: Path, more: list[str]) -> None:
    out = tmp_path / "one"
    command([str(table), "--target", "sold", "--ids", "who", "--out", str(out), "--bounds", "0,10",
             *CITY, "--classes", "no,yes", *more])  # fmt: skip
    assert verify(out).answer == "VERIFIED"


def test_ids_that_are_refused_leave_no_folder(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs" / "one"
    line = [str(table), "--target", "sold", "--out", str(out), "--classes", "no,yes", *PLAIN]
    twice = ["--ids", "city", "--categories", "who=u0,u1"]
    with pytest.raises(NoshuffleError, match="id 'Rome' came twice"):
        command([*line, *twice])
    assert not out.parent.exists()
    with pytest.raises(InvalidInput, match="no column 'nobody'"):
        command([*line, "--ids", "nobody"])
    assert not out.parent.exists()
    out.mkdir(parents=True)  # one that was there stays, and can be used
    with pytest.raises(NoshuffleError, match="id 'Rome' came twice"):
        command([*line, *twice])
    command([*line, *CITY, "--ids", "who"])
    assert verify(out).answer != "REFUTED"
