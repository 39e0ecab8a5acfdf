"""Hostile values for every option of every command: one line and a status, never a traceback.

Training itself is not begun: what a command would train is what counts as taken. Where ε is
printed, it is a number that the settings pay for.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from tests.fuzz.damage import EXAMPLES, counted
from typer.main import get_command

from noshuffle import Plan, SinglePass, report
from noshuffle.cli import app, job_view, main
from noshuffle.cli import audit as audit_command
from noshuffle.cli.commands import command

COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
#: What a stranger types where a number, a word or a file was asked for.
HOSTILE = (
    "", " ", "-1", "0", "nan", "inf", "-inf", "1e400", "1e-400", "0x10", "1_0", "٣", "1,5", "true",
    "x" * 300, "a\nb", "../..", "/dev/null", "/no/such/file", "'; --", "{}", "%s", "🙂",
)  # fmt: skip
TABLE = "a,b,label\n" + "\n".join(f"{i % 7},{i / 30:.3f},{i % 2}" for i in range(30)) + "\n"


class Begun(Exception):
    """The command would train now."""


@pytest.fixture(autouse=True)
def _no_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def begins(*_: Any, **__: Any) -> Any:
        raise Begun

    monkeypatch.setattr(report, "write_report", lambda *_, **__: None)  # pictures take seconds
    monkeypatch.setattr(job_view, "run_and_tell", begins)
    monkeypatch.setattr(audit_command, "_trained", begins)
    monkeypatch.chdir(tmp_path)
    plan = Plan.fit(SinglePass(steps=4), mechanism="tree", noise_multiplier=2.0)
    (tmp_path / "plan.json").write_text(plan.to_json())
    (tmp_path / "rows.csv").write_text(TABLE)


BASE = {
    "train": [],
    "federated": [],
    "predict": [".", "rows.csv"],
    "fit": ["rows.csv", "--target", "label", "--bounds", "0,7", "--classes", "0,1"],
    "sum": ["rows.csv", "--clip", "9"],
    "budget": ["books"],
    "plan": ["--steps", "8", "--mechanism", "tree"],
    "epsilon": ["--steps", "8", "--mechanism", "tree", "--noise-multiplier", "2"],
    "verify": ["."],
    "seal": ["."],
    "audit": ["plan.json"],
    "report": ["."],
    "reproduce": ["no such figure"],
}


def options(command: str) -> list[str]:
    """The options of a command that take a value."""
    params = COMMANDS[command].params
    return [p.opts[0] for p in params if p.opts[0].startswith("--") and not p.is_flag]


def tried(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> int | None:
    """The exit status, None where training would begin; whatever else is raised is a fault."""
    counted()
    capsys.readouterr()
    try:
        status = main(arguments)
    except Begun:
        return None
    said = capsys.readouterr()
    assert status in (0, 1, 2, 3, 4), arguments
    if status == 2:
        assert len(said.err.strip().splitlines()) == 1, (arguments, said.err)
    if status == 0 and "--json" in arguments and arguments[0] == "epsilon":
        spent = json.loads(said.out)["epsilon"]
        assert spent == "inf" or (spent >= 0 and not math.isnan(spent)), arguments
    return status


@pytest.mark.parametrize("command", COMMANDS)
def test_hostile_values(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    chance, refused = random.Random(command), 0
    names = options(command)
    each = len(HOSTILE) if EXAMPLES > 1 else 1 if command in ("fit", "sum") else 2
    for name in names:
        for value in chance.sample(HOSTILE, each):
            json_too = ["--json"] if command == "epsilon" else []
            refused += tried([command, *BASE[command], name, value, *json_too], capsys) == 2
    assert refused > 0 or command in ("verify", "seal", "report", "reproduce")


@pytest.mark.parametrize("command", COMMANDS)
def test_hostile_lines(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Several options at once, arguments that are too many or too few, options of others."""
    chance = random.Random(f"{command} lines")
    others = [*options(command), "--no-such", "--", "-x"]
    for _ in range(2 * EXAMPLES):
        words = [
            word
            for _ in range(chance.randrange(4))
            for word in (chance.choice(others), chance.choice(HOSTILE))
        ]
        start = BASE[command] if chance.random() < 0.7 else []
        tried([command, *start, *words], capsys)


def test_arguments_have_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Those without a flag, too."""
    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        for one in command(name).options():
            assert one.text.partition("{")[0] in said, (name, one.name)
