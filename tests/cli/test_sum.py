"""`noshuffle sum`: private running totals, against sums that are worked out here by hand."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from noshuffle import Plan, PrivateSum, SinglePass
from noshuffle.cli import main
from noshuffle.cli.number_rows import NumberRows
from noshuffle.release.release import Release, Ticket

#: Noise of about 1e-9 of the clip norm: totals are the clipped sums to eight digits.
LOUD = ["--epsilon", "1e9", "--delta", "1e-6", "--mechanism", "tree"]


def write(path: Path, rows: list[Any], header: str | None = "price,count") -> Path:
    lines = [] if header is None else [header]
    path.write_text("\n".join([*lines, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def run(
    capsys: pytest.CaptureFixture[str], file: Path | str, out: Path, *more: str
) -> dict[str, Any]:
    assert main(["sum", str(file), "--out", str(out), "--json", *more]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def totals(out: Path) -> list[dict[str, float]]:
    with (out / "totals.csv").open() as file:
        return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]


def clipped(rows: Any, clip: float) -> Any:
    rows = np.asarray(rows, dtype=float)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows * np.minimum(1, clip / np.maximum(norms, 1e-300))


def test_totals_are_the_clipped_sums(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(53, 2)) * 4
    out = tmp_path / "run"
    told = run(capsys, write(tmp_path / "t.csv", rows.tolist()), out, "--clip", "3", "--batch",
               "10", *LOUD)  # fmt: skip
    sums = np.cumsum(clipped(rows, 3.0), axis=0)
    found = totals(out)
    assert [row["rows"] for row in found] == [10, 20, 30, 40, 50, 53]
    for row in found:
        want = sums[int(row["rows"]) - 1]
        assert math.isclose(row["price"], want[0], rel_tol=1e-3, abs_tol=1e-2)
        assert math.isclose(row["count"], want[1], rel_tol=1e-3, abs_tol=1e-2)
    assert told["totals"]["price"] == found[-1]["price"]
    assert told["steps"] == told["planned_steps"] == 6


def test_rows_of_one_id_are_one_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of an id in a step are added, then clipped; beyond its steps it counts as zero."""
    rows = [(2, "x"), (2, "x"), (1, "y"), (1, "x"), (1, "z"), (1, ""), (1, "x"), (1, "y"), (1, "z")]
    file = write(tmp_path / "t.csv", rows, "price,who")
    common = ["--clip", "3", "--batch", "3", "--id", "who", *LOUD]
    run(capsys, file, tmp_path / "one", *common)
    # x: 2 + 2 = 4 → 3; y: 1 | z: 1, x has had its step, no id: zero | nobody is left
    assert [round(row["price"], 2) for row in totals(tmp_path / "one")] == [4, 5, 5]
    told = run(capsys, file, tmp_path / "two", *common, "--max-participations", "2")
    assert [round(row["price"], 2) for row in totals(tmp_path / "two")] == [4, 6, 8]
    assert told["statement"]["unit"] == "user"
    assert any("beyond" in s for s in told["statement"]["assumptions"])


def test_odd_rows_count_as_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [(1, 2), ("nan", 1), (1, ""), ("inf", 0), (1, 1), ("NA", 1), ("null", "#N/A")]
    out = tmp_path / "run"
    told = run(capsys, write(tmp_path / "t.csv", rows), out, "--clip", "9", "--batch", "2", *LOUD)
    assert told["rows"] == 7
    assert [(round(r["price"], 2), round(r["count"], 2)) for r in totals(out)] == [
        (1, 2), (1, 2), (2, 3), (2, 3),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "more", "columns", "count"),
    [
        ("a,b\n1,2\n3,4\n", {}, ("a", "b"), 2),
        ("1,2\n3,4\n", {}, ("1", "2"), 2),
        ("2019,2020\n3,4\n", {"has_header": True}, ("2019", "2020"), 1),
        ("1,,3\n3,4,5\n", {}, ("1", "2", "3"), 2),
        ("1,NA\n3,4\n", {}, ("1", "2"), 2),
        (" a , b \n 1 , 2 \n\n", {"columns": ["b"]}, ("b",), 1),
        ("1,x\n", {"has_header": False, "columns": ["1"]}, ("1",), 1),
    ],
)
def test_the_first_line_is_a_header_if_it_holds_a_word(
    text: str, more: dict[str, Any], columns: tuple[str, ...], count: int
) -> None:
    table = NumberRows(io.StringIO(text), "t", **more)
    assert table.columns == columns
    assert len(list(table)) == count


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("a,b\n1,x\n", "--clip 1", "column 'b' holds text ('x')"),
        ("a,b\n1,2\n1\n", "--clip 1", "line 3: expected 2 cells"),
        ("a,b\n1,2\n", "--clip 1 --columns c", "no column 'c'"),
        ("a,b\n1,2\n", "--clip 1 --id who", "no column 'who'"),
        ("a,a\n1,2\n", "--clip 1", "twice"),
        ("a,b\n", "--clip 1", "no rows"),
        ("", "--clip 1", "is empty"),
        ("a\n1\n", "", "--clip"),
        ("a\n1\n", "--clip 0", "--clip must"),
        ("a\n1\n", "--clip 1 --batch 0", "--batch must"),
        ("a\n1\n", "--clip 1 --mechanism oak", "oak"),
        ("a\n1\n", "--clip 1 --max-participations 3", "--max-participations belongs to --id"),
        ("a\n1\n", "--clip 1 --resume nowhere", "give it alone"),
    ],
)
def test_refusals_are_one_line_and_leave_nothing(
    text: str, line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.csv").write_text(text)
    out = [] if "--resume" in line else ["--out", str(tmp_path / "r")]
    assert main(["sum", str(tmp_path / "t.csv"), *line.split(), *out]) == 2
    found = capsys.readouterr().err
    assert found.count("\n") == 1
    assert said in found
    assert not (tmp_path / "r").exists()


def test_a_stream_from_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "\n".join(["1"] * 25) + "\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert main(["sum", "-", "--clip", "1", "--out", str(tmp_path / "x")]) == 2
    assert "--steps" in capsys.readouterr().err
    out = tmp_path / "r"
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    line = ["--clip", "1", "--steps", "4", "--batch", "10", *LOUD]
    told = run(capsys, "-", out, *line)
    assert (told["steps"], told["planned_steps"]) == (3, 4)
    # The same input from its beginning, with more rows behind: the short batch is not repeated.
    monkeypatch.setattr(sys, "stdin", io.StringIO(text + "1\n" * 7))
    assert main(["sum", "-", "--resume", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["steps"], told["rows"]) == (4, 32)
    assert [row["rows"] for row in totals(out)] == [10, 20, 25, 32]
    assert math.isclose(told["totals"]["1"], 32, rel_tol=1e-3)
    assert main(["verify", str(out)]) == 0
    more = tmp_path / "more"
    monkeypatch.setattr(sys, "stdin", io.StringIO("1\n" * 70))
    assert main(["sum", "-", "--out", str(more), *line]) == 0
    assert "planned steps are used up after 40 rows" in capsys.readouterr().err


def test_the_noise_is_that_of_private_sum_and_its_deviation_is_right(tmp_path: Path) -> None:
    """Many columns: the noise in a total has the printed deviation, not 3/2 or 2/3 of it.

    Over 400 independent columns the sample deviation is off by more than 20 % with probability
    below 1e-7 (chi square, 399 degrees of freedom).
    """
    columns, rows = 400, 12
    file = write(
        tmp_path / "t.csv", [[0] * columns] * rows, ",".join(f"c{i}" for i in range(columns))
    )
    out = tmp_path / "r"
    line = [
        "--clip",
        "2",
        "--batch",
        "3",
        "--epsilon",
        "1",
        "--mechanism",
        "blt",
        "--test-seed",
        "1",
    ]
    assert main(["sum", str(file), "--out", str(out), "--json", *line]) == 0
    for row in totals(out):
        noise = np.array([row[f"c{i}"] for i in range(columns)])
        assert 0.8 < noise.std() / row["standard_deviation"] < 1.2
    plan = Plan.fit(SinglePass(4), mechanism="blt", epsilon=1.0, delta=1e-6)
    other = PrivateSum(plan, clip=2.0, shape=(columns,))
    assert row["standard_deviation"] == pytest.approx(other.deviation_after(4))


@pytest.mark.usefixtures("pictures")
def test_nothing_in_the_folder_tells_a_true_sum(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(3)
    rows = np.round(rng.uniform(0, 10, size=(60, 2)), 3)
    out = tmp_path / "run"
    line = ["--clip", "100", "--batch", "6", "--test-seed", "1"]  # or a total is a figure by chance
    run(capsys, write(tmp_path / "t.csv", rows.tolist()), out, *line)
    true = np.cumsum(rows, axis=0)[5::6]
    steps = np.diff(true, axis=0, prepend=0)
    raw = np.concatenate([true.ravel(), steps.ravel(), rows.ravel()])
    for name in ("totals.csv", "metrics.jsonl", "report.html", "statement.json", "config.json"):
        text = (out / name).read_text(encoding="utf8")
        text = re.sub(r"<svg.*?</svg>", "", text, flags=re.S)  # pixel places
        found = np.array([float(n) for n in re.findall(r"\d+\.\d+", text)])
        for figure in raw:
            assert not np.isclose(found, figure, rtol=1e-6, atol=0).any(), (name, figure)
    page = (out / "report.html").read_text(encoding="utf8")
    assert page.count("<svg") == 3
    assert "Private running total of price" in page
    assert main(["verify", str(out)]) == 4  # the seed, nothing else


def test_a_person_sees_totals_with_their_noise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "t.csv", [(1, 1)] * 40)
    assert (
        main(["sum", str(file), "--clip", "2", "--batch", "2", "--out", str(tmp_path / "r")]) == 0
    )
    said = capsys.readouterr().out
    assert "private running totals" in said
    assert "standard deviation" in said
    assert "DP per example" in said
    assert said.count("│") >= 12 * 4  # some of the 20 steps, the last one too
    assert re.search(r"│ +40 │", said)


def test_a_silent_stream_is_stopped_at_once(tmp_path: Path) -> None:
    """Ctrl-C while rows are waited for: what came is saved, and the run goes on later."""
    out = tmp_path / "r"
    command = [sys.executable, "-m", "noshuffle", "sum", "-", "--clip", "1", "--batch", "2",
               "--steps", "4", *LOUD, "--out", str(out)]  # fmt: skip
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert child.stdin is not None
    try:
        child.stdin.write(b"1\n1\n1\n1\n1\n")
        child.stdin.flush()
        told, end = out / "metrics.jsonl", time.monotonic() + 600
        while not told.exists() or told.read_bytes().count(b"\n") < 2:
            assert child.poll() is None, "the run ended before it could be stopped"
            assert time.monotonic() < end
            time.sleep(0.01)
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=600) == 130
    finally:
        child.kill()
    assert child.stderr is not None
    said = child.stderr.read().decode()
    assert f"--resume {out}" in said
    assert "Traceback" not in said
    file = write(tmp_path / "t.csv", [[1]] * 8, None)
    assert main(["sum", str(file), "--resume", str(out), "--json"]) == 0
    assert [round(row["1"], 2) for row in totals(out)] == [2, 4, 6, 8]
    assert main(["verify", str(out)]) == 0


def test_a_killed_sum_loses_no_total_that_was_told(
    tmp_path: Path, interrupted: Callable[..., int | None]
) -> None:
    """SIGKILL somewhere after 70 steps: at most the step it was in is in no total."""
    file = write(tmp_path / "t.csv", [[i % 7] for i in range(800)], "a")
    out = tmp_path / "r"
    command = ["sum", str(file), "--clip", "9", "--batch", "2", "--mechanism", "tree",
               "--test-seed", "k", "--out", str(out)]  # fmt: skip
    told = out / "metrics.jsonl"
    assert interrupted(command, signal.SIGKILL, file=told, lines=70) == -signal.SIGKILL
    seen = [json.loads(line) for line in told.read_text().splitlines()[:70]]
    assert main(["sum", str(file), "--resume", str(out), "--json"]) == 0
    found = totals(out)
    assert [row["a"] for row in found[:70]] == [line["totals"][0] for line in seen]
    assert found[-1]["rows"] == 800
    whole = tmp_path / "whole"
    assert main([*command[:-1], str(whole), "--json"]) == 0
    (lost,) = {step["step"] for step in totals(whole)} - {row["step"] for row in found} or {0}
    if not lost:
        assert totals(whole) == found
    assert main(["verify", str(out)]) == 4  # a test seed, and nothing wrong beside it


def test_rows_of_a_step_that_was_cut_off_are_passed_over_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table, out = write(tmp_path / "t.csv", [[1, 1] for _ in range(8)]), tmp_path / "run"
    usual = Release.close

    def killed(self: Release, ticket: Ticket, *given: Any, **more: Any) -> None:
        if ticket.step == 3:
            raise KeyboardInterrupt
        usual(self, ticket, *given, **more)

    monkeypatch.setattr(Release, "close", killed)
    line = ["sum", str(table), "--clip", "5", "--batch", "1", *LOUD]
    assert main([*line, "--out", str(out)]) == 130
    monkeypatch.setattr(Release, "close", usual)
    capsys.readouterr()
    assert main(["sum", str(table), "--resume", str(out), "--json"]) == 0
    told = capsys.readouterr()
    assert "1 of the steps were cut off" in told.err
    assert json.loads(told.out)["steps"] == 8
    assert [row["rows"] for row in totals(out)] == [1, 2, 3, 5, 6, 7, 8]
    assert round(totals(out)[-1]["price"], 2) == 7
    assert main(["verify", str(out)]) == 0
