"""Every command: `--json` prints JSON and nothing else; 40 columns are enough for the rest."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from noshuffle.cli import app, main
from noshuffle.cli.promise import print_json

TABLE = "a,b,label\n" + "".join(f"{i / 40},{i % 7},{i % 2}\n" for i in range(40))
STATED = ("run", "statement")
JOB = (*STATED, "test_accuracy", "seconds", "steps", "settings")
VERDICT = ("answer", "failures", "unchecked", "participation_checked", "epsilon", "delta")
#: Of every command, in an order in which each finds what it needs: the line, and keys of its JSON.
LINES: dict[str, tuple[str, tuple[str, ...]]] = {
    "sum": ("sum t.csv --columns a --clip 1 --batch 5 --steps 9 --out run", (*STATED, "csv")),
    "report": ("report run", ("report",)),
    "verify": ("verify run", VERDICT),
    "audit": ("audit run", ("answer", "parts")),
    "seal": ("seal run", ("sealed", "signed")),
    "budget": ("budget all --epsilon 9 --delta 1e-3", ("epsilon", "spent_epsilon", "runs")),
    "epsilon": ("epsilon --steps 8 --mechanism tree --noise-multiplier 2", ("epsilon", "delta")),
    "plan": (
        "plan --steps 16 --mechanism tree",
        ("mechanism", "rms_error", "noise_multiplier"),
    ),
    "reproduce": (
        "reproduce rates --quick --only noisy_max --out rates",
        ("claims", "seconds", "pictures"),
    ),
    "train": (
        "train --epochs 1 --batch-size 240 --mechanism tree --out trained",
        (*JOB, "baseline_accuracy"),
    ),
    "federated": ("federated --rounds 2 --mechanism tree --out users", JOB),
    "fit": (
        "fit t.csv --target label --classes 0,1 --bounds 0,9 --budget all --delta 1e-4 --out model",
        STATED,
    ),
    "predict": ("predict model t.csv", ("prediction", "probability")),
}
#: What is told without --json of work that is done, where the line itself would do it again.
AGAIN = {
    "sum": "verify run",
    "budget": "budget all",
    "train": "train --resume trained",
    "federated": "federated --resume users",
    "fit": "verify model",
    "seal": "verify run",
}
#: Folders, and the command that makes each.
MAKERS = {"run": "sum", "all": "budget", "trained": "train", "users": "federated", "model": "fit"}
#: Those that train: a second or two each, and their own tests have --json, too.
TRAINS = ("train", "federated", "fit", "predict")
EVERY = [pytest.param(n, marks=pytest.mark.slow) if n in TRAINS else n for n in LINES]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("json")
    (folder / "t.csv").write_text(TABLE)
    return folder


def make_ready(line: str, home: Path) -> None:
    """Make what the line reads, where the test that makes it runs in another process."""
    for folder, maker in MAKERS.items():
        needed = LINES[maker][0]
        if folder in line.split() and line != needed and not (home / folder).exists():
            make_ready(needed, home)
            assert main([*needed.split(), "--json"]) == 0


def not_json(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


@pytest.mark.parametrize("command", EVERY)
def test_json_and_nothing_else(
    command: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    line, keys = LINES[command]
    make_ready(line, home)
    for folder in (folder for folder, maker in MAKERS.items() if maker == command):
        shutil.rmtree(home / folder, ignore_errors=True)
    capsys.readouterr()
    assert main([*line.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=not_json)
    first = found[0] if isinstance(found, list) else found
    assert set(keys) <= set(first)


def test_no_command_is_forgotten() -> None:
    assert {command.name for command in app.registered_commands} == set(LINES)


def test_what_is_no_number_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"epsilon": math.inf, "rows": [(1.5, math.nan)]})
    found = json.loads(capsys.readouterr().out, parse_constant=not_json)
    assert found == {"epsilon": None, "rows": [[1.5, None]]}


@pytest.mark.parametrize("command", EVERY)
def test_forty_columns(command: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is wider, but paths and commands, to be copied in one piece, and Markdown tables."""
    monkeypatch.chdir(home)
    line = AGAIN.get(command, LINES[command][0])
    make_ready(line, home)
    monkeypatch.setenv("COLUMNS", "40")
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(line.split()) == 0
    lines = re.sub(r"\x1b\[[0-9;]*[mAJK]", "", terminal.getvalue()).splitlines()
    assert lines
    wide = [line for line in lines if len(line) > 40]
    copied = re.compile(r"\|.*|[\w ,]+: (noshuffle )?[\w/. -]+")
    assert all(copied.fullmatch(line) for line in wide), wide
