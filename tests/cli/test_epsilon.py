"""The commands as a person types them, in a process of their own where that matters."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest

from noshuffle.cli import main


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_stackoverflow_setting(capsys: pytest.CaptureFixture[str]) -> None:
    base = [
        "epsilon",
        "--mechanism",
        "tree",
        "--steps",
        "1600",
        "--noise-multiplier",
        "1.13",
        "--delta",
        "1e-6",
    ]
    exact = output(capsys, *base)
    assert exact["epsilon"] == pytest.approx(16.07, abs=0.005)
    assert exact["squared_sensitivity"] < 11
    assert exact["exact"] is True
    base += ["--tree-accounting", "nodes"]
    nodes = output(capsys, *base)
    assert nodes["epsilon"] == pytest.approx(17.67, abs=0.005)
    assert nodes["squared_sensitivity"] == pytest.approx(11)
    assert nodes["exact"] is False
    for key in ("mu", "sensitivity", "noise_multiplier", "mechanism", "participation"):
        assert exact[key]
    assert exact["neighbours"] == "zero-out"
    assert len(exact["assumptions"]) > 3
    rdp = output(capsys, *base, "--accountant", "rdp")
    assert rdp["epsilon"] == pytest.approx(18.71, abs=0.005)
    assert rdp["exact"] is False


@pytest.mark.parametrize("every", ["2000", "20e"])
def test_cifar_setting(capsys: pytest.CaptureFixture[str], every: str) -> None:
    line = "epsilon --mechanism tree --epochs 100 --steps-per-epoch 100 --completion "
    line += f"--noise-multiplier 46.3 --delta 1e-5 --restart-every {every} --tree-accounting nodes"
    found = output(capsys, *line.split())
    assert found["squared_sensitivity"] == pytest.approx(4129)
    assert found["epsilon"] == pytest.approx(6.43, abs=0.005)
    assert output(capsys, *line.split(), "--accountant", "rdp")["epsilon"] == pytest.approx(
        6.92, abs=0.005
    )


def test_gboard_setting(capsys: pytest.CaptureFixture[str]) -> None:
    line = "epsilon --mechanism tree --steps 2000 --separation 314 --max-participations 6 "
    line += "--noise-multiplier 7 --delta 1e-10 --unit user --tree-accounting nodes"
    found = output(capsys, *line.split())
    assert found["squared_sensitivity"] == pytest.approx(79)
    assert found["epsilon"] == pytest.approx(8.526093, abs=1e-5)
    assert found["rho"] == pytest.approx(0.8061, abs=1e-4)
    assert found["unit"] == "user"


def test_poisson_setting(capsys: pytest.CaptureFixture[str]) -> None:
    line = "epsilon --mechanism identity --steps 4800 --poisson-rate 0.004166666666666667 "
    line += "--noise-multiplier 1 --delta 1e-5"
    found = output(capsys, *line.split())
    assert found["epsilon"] == pytest.approx(1.54702, rel=1e-3)
    assert found["neighbours"] == "add-remove"
    assert found["mu"] is None


def test_target_epsilon_gives_the_noise(capsys: pytest.CaptureFixture[str]) -> None:
    line = "epsilon --mechanism identity --steps 1 --target-epsilon 1 --delta 1e-5"
    found = output(capsys, *line.split())
    assert found["noise_multiplier"] == pytest.approx(3.7306, abs=1e-4)
    assert found["epsilon"] <= 1


def test_words_without_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["epsilon", "--mechanism", "tree", "--steps", "8", "--noise-multiplier", "2"]) == 0
    text = capsys.readouterr().out
    assert "DP per example" in text
    assert "provided that" in text


BAD = [
    "epsilon --mechanism tree --steps 0 --noise-multiplier 1",
    "epsilon --mechanism tree --steps 1000000000000 --noise-multiplier 1",
    "epsilon --mechanism tree --steps 10 --noise-multiplier -1",
    "epsilon --mechanism tree --steps 10 --noise-multiplier 0",
    "epsilon --mechanism tree --steps 10 --noise-multiplier nan",
    "epsilon --mechanism tree --steps 10 --noise-multiplier inf",
    "epsilon --mechanism tree --steps 10 --noise-multiplier 1 --delta 1",
    "epsilon --mechanism tree --steps 10 --noise-multiplier 1 --delta 0",
    "epsilon --mechanism tree --steps 10 --noise-multiplier 1 --delta nan",
    "epsilon --mechanism tree --steps ten --noise-multiplier 1",
    "epsilon --mechanism tree --steps 10 --noise-multiplier 1 --target-epsilon 2",
    "epsilon --mechanism tree --steps 10",
    "epsilon --mechanism tree --noise-multiplier 1",
    "epsilon --mechanism tree --steps 10 --epochs 3 --steps-per-epoch 2 --noise-multiplier 1",
    "epsilon --mechanism tree --epochs 3 --noise-multiplier 1",
    "epsilon --mechanism oak --steps 10 --noise-multiplier 1",
    "epsilon --mechanism tree --variant oak --steps 10 --noise-multiplier 1",
    "epsilon --mechanism tree --steps 10 --poisson-rate 0.1 --noise-multiplier 1",
    "epsilon --mechanism blt --steps 10 --poisson-rate 0.1 --noise-multiplier 1",
    "epsilon --mechanism banded --bands 50 --steps 100 --separation 10 --noise-multiplier 1",
    "epsilon --mechanism tree --steps 10 --completion --noise-multiplier 1",
    "epsilon --mechanism blt --steps 10 --restart-every 5 --noise-multiplier 1",
    "epsilon --mechanism tree --steps 10 --restart-every often --noise-multiplier 1",
    "epsilon --mechanism tree --steps 10 --max-participations 2 --noise-multiplier 1",
    "epsilon --mechanism identity --steps 10 --population 5 --noise-multiplier 1",
    "epsilon --mechanism identity --steps 10 --noise-multiplier 1 --neighbours friends",
    "epsilon --mechanism identity --steps 10 --noise-multiplier 1 --accountant mine",
    "epsilon --mechanism identity --steps 10 --noise-multiplier 1 --nonsense 3",
    "epsilon --mechanism blt --steps 10 --noise-multiplier 1 --bands 3",
    "epsilon --mechanism blt --steps 10 --noise-multiplier 1 --taps 3",
    "epsilon --mechanism blt --steps 10 --noise-multiplier 1 --variant full",
    "epsilon --mechanism blt --steps 10 --noise-multiplier 1 --tree-accounting nodes",
    "epsilon --mechanism tree --steps 10 --noise-multiplier 1 --tree-accounting leaves",
    "epsilon --mechanism tree --steps 10 --noise-multiplier 1 --buffers 2",
    "plan --steps 0",
    "plan --steps 16 --plot picture.txt",
    "plan --steps 16 --target-epsilon -2",
    "plan --epochs 2 --steps-per-epoch 8 --mechanism tree --sampling fixed",
    "plan --epochs 2 --population 80 --batch-size 100 --mechanism tree --sampling fixed",
    "plan --epochs 2 --steps-per-epoch 9 --population 80 --batch-size 10 --mechanism tree "
    "--sampling truncated",
    "wish",
]


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_line_and_status_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("noshuffle: ")
    assert "Traceback" not in captured.err + captured.out


def test_a_real_process_exits_with_2_and_no_traceback() -> None:
    command = [sys.executable, "-m", "noshuffle", *BAD[0].split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_plan_compares_mechanisms(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    picture = tmp_path / "plan.png"
    line = f"plan --epochs 2 --steps-per-epoch 8 --target-epsilon 4 --plot {picture}"
    rows = output(capsys, *line.split())
    names = [row["mechanism"] for row in rows]
    assert {"identity", "tree", "blt"} <= set(names)
    assert [r["rms_error"] for r in rows] == sorted(r["rms_error"] for r in rows)
    assert all(row["epsilon"] <= 4 for row in rows)
    assert picture.stat().st_size > 10_000
    assert main(["plan", "--steps", "16", "--mechanism", "tree"]) == 0
    assert "tree" in capsys.readouterr().out


def test_plan_respects_the_memory_limit(capsys: pytest.CaptureFixture[str]) -> None:
    rows = output(capsys, *["plan", "--steps", "32", "--max-buffers", "1"])
    assert all(row["buffers"] <= 1 for row in rows)


@pytest.mark.parametrize(
    ("more", "is_there"),
    [("", True), ("--mechanism identity", False), ("--noise-multiplier 2", False)],
)
def test_dp_sgd_stands_in_the_table_with_and_without_samples(
    more: str, is_there: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "plan --epochs 4 --steps-per-epoch 8 --max-buffers 0"
    assert main([*line.split(), *more.split()]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    found = {" ".join(row[:2]): row for row in rows if row[:1] == ["identity,"]}
    assert list(found) == (["identity, sampled"] if is_there else [])
    if is_there:  # less noise than without, at the same ε
        (plain,) = (row for row in rows if row[:1] == ["identity"] and row[1] == "8.000")
        sampled = found["identity, sampled"]
        assert sampled[2] == "8.000"
        assert 0 < float(sampled[3]) < float(plain[2])


def test_a_narrow_table_cuts_no_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for width in ("60", "80", "120"):
        monkeypatch.setenv("COLUMNS", width)
        assert (
            main(["plan", "--epochs", "9", "--steps-per-epoch", "80", "--mechanism", "tree"]) == 0
        )
        assert "…" not in capsys.readouterr().out
    for width in ("60", "80"):  # a longer name, and larger numbers
        monkeypatch.setenv("COLUMNS", width)
        assert (
            main(["plan", "--epochs", "20", "--steps-per-epoch", "240", "--max-buffers", "0"]) == 0
        )
        said = capsys.readouterr().out
        assert "identity, sampled" in said
        assert "…" not in said


def test_notes_speak_of_columns_that_are_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ["plan", "--epochs", "20", "--steps-per-epoch", "240", "--max-buffers", "0"]
    said = {}
    for width in ("40", "200"):
        monkeypatch.setenv("COLUMNS", width)
        assert main(line) == 0
        said[width] = " ".join(capsys.readouterr().out.split())
    assert "…" not in said["40"]
    for words in ("noise: its multiplier", "rms, max: standard", "at the ε shown"):
        assert words in said["200"]
        assert words not in said["40"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("plan --epochs 2 --steps-per-epoch 8 --sampling fixed", "--sampling must be one of any"),
        (
            "epsilon --mechanism tree --steps 8 --noise-multiplier 1 --completion",
            "--completion must come with --restart-every, got it alone; a tree",
        ),
        ("train --restart-every 5", "--restart-every and --completion belong to --mechanism tree"),
        (
            "train --mechanism tree --order random-per-restart",
            "--order random-per-restart needs --mechanism tree and --restart-every",
        ),
        ("train --composite l1:-1", "--composite l1:-1: l1 must be"),
    ],
)
def test_refusals_name_options(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    assert words in capsys.readouterr().err


def test_sentences_are_cut_between_words_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["epsilon", "--steps", "64", "--noise-multiplier", "2", "--mechanism", "tree"]) == 0
    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= 40
    assert any(line.startswith("  - ") for line in lines)
