"""Options come from settings records: each stands once, and reaches the run as it was typed."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import typer

from noshuffle import __version__
from noshuffle.cli import app, main
from noshuffle.cli.epsilon import EpsilonSettings
from noshuffle.cli.federated_settings import FederatedSettings
from noshuffle.cli.fit_settings import FitSettings
from noshuffle.cli.from_record import argument, given, setting, takes
from noshuffle.cli.mechanisms import mechanism_names
from noshuffle.cli.plan import PlanSettings
from noshuffle.cli.train_settings import PRESETS, TrainSettings
from noshuffle.cli.words import in_options

RECORDS = {
    "train": TrainSettings,
    "federated": FederatedSettings,
    "fit": FitSettings,
    "plan": PlanSettings,
    "epsilon": EpsilonSettings,
}
SOURCES = Path(__file__).parents[2] / "src" / "noshuffle" / "cli"


@dataclass(frozen=True, kw_only=True)
class Brewing:
    pot: Path = argument("where to")
    cups: int = setting(2, "how many")
    strength: float | None = setting(None, "how strong")
    milk: bool = setting(False, "with milk", "--milk")
    guests: list[str] | None = setting(None, "names")


def typed(*line: str, only_given: bool = False) -> Any:
    made = []
    command = takes(given(Brewing) if only_given else Brewing)(made.append)
    tool = typer.Typer(pretty_exceptions_enable=False)
    tool.command()(command)
    typer.main.get_command(tool).main(args=list(line), standalone_mode=False)
    return made[0]


def test_the_record_is_what_was_typed() -> None:
    assert typed("p") == Brewing(pot=Path("p"))
    line = ["p", "--cups", "3", "--strength", "0.5", "--milk", "--guests", "a", "--guests", "b"]
    full = Brewing(pot=Path("p"), cups=3, strength=0.5, milk=True, guests=["a", "b"])
    assert typed(*line) == full
    assert typed("p", only_given=True) == {"pot": Path("p")}
    assert typed(*line, only_given=True) == vars(full)
    assert typed("p", "--cups", "2", only_given=True) == {"pot": Path("p"), "cups": 2}


@pytest.mark.parametrize("name", RECORDS)
def test_every_field_is_an_option_of_its_command(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("TERM", "dumb")
    assert main([name, "--help"]) == 0
    page = re.sub(
        r" \(default\)|default; |; default [^)]+(?=\))",
        "",
        " ".join(capsys.readouterr().out.split()),
    )
    for field in fields(RECORDS[name]):
        about = field.metadata
        flag = field.name if field.name == "file" else "--" + field.name.replace("_", "-")
        assert flag in page, field.name
        if name != "fit" or field.name != "file":  # the help of an argument is the docstring's
            assert about["text"].split("{")[0].split("\n")[0] in page, field.name


def test_no_option_text_stands_twice() -> None:
    """Help texts of the settings, as written in the sources; those of one word are anybody's."""
    text = "\n".join(path.read_text(encoding="utf8") for path in SOURCES.glob("*.py"))
    seen = {f.metadata["text"] for record in RECORDS.values() for f in fields(record)}
    for words in seen:
        assert text.count(f'"{words}"') <= 1 or len(words) < 30, words


def test_presets_hold_settings_only() -> None:
    for data in PRESETS:
        assert TrainSettings.of({"data": data}).data == data


def test_help_names_every_mechanism(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    for command in ("epsilon", "fit"):
        assert main([command, "--help"]) == 0
        assert ", ".join(mechanism_names()) in " ".join(capsys.readouterr().out.split())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"noshuffle {__version__}\n"


@pytest.mark.parametrize(
    ("line", "flag"),
    [
        ("train --epochs 0", "--epochs must"),
        ("train --noise-multiplier -1", "--noise-multiplier must"),
        ("train --sampling poisson --mechanism tree", "--sampling poisson needs"),
        ("train --sampling poisson --mechanism blt_tapped", "poisson needs mechanism identity"),
        ("train --sampling cyclic --mechanism blt_tapped", "needs mechanism banded or identity"),
        ("federated --clients-per-round 100000", "--clients-per-round must"),
        ("epsilon --steps 9 --noise-multiplier 1 --bands 3 --mechanism blt", "--bands belongs"),
        ("epsilon --steps 9 --noise-multiplier 1 --unit planet", "--unit must"),
        ("epsilon --steps 9 --target-epsilon 0", "--target-epsilon must"),
        ("epsilon --steps 9 --noise-multiplier 1 --poisson-rate 2", "--poisson-rate must"),
        ("plan --population 60 --batch-size 0", "--batch-size must"),
        ("train --mechanism tree --clip-norm 1e-300", "--clip-norm must be at least"),
        ("train --mechanism tree --order backwards", "--order must be file, sorted"),
        ("train --data os:path", "data 'os:path' must be a function"),
        ("federated --task os:path", "task 'os:path' must be a function"),
        ("federated --client-lr 1e300", "learning_rate must be at most"),
        ("federated --proximal 1e300", "proximal must be at most"),
        ("train --lr 1e300", "--lr must be at most 1e+30"),
        ("train --clip-norm 1e39", "--clip-norm must be at most 1e+30"),
        ("train --device x", "device must be cpu"),
        ("train --test-seed \udcff", r"--test-seed must be text in UTF-8, got '\udcff'"),
        ("train --order \udcff:f", r"--order must be text in UTF-8, got '\udcff:f'"),
        ("train --out \udcff", r"--out must be text in UTF-8, got '\udcff'"),
        ("budget b --epsilon 1 --delta 1e-6 --unprotected=", "--unprotected must be a name"),
    ],
)
def test_refusals_speak_of_options(
    line: str,
    flag: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one line, with nothing left behind."""
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == 2
    said = capsys.readouterr().err
    assert flag in said
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "line", "words"),
    [
        ("train", "mechanism = 3", "--mechanism must be text, got 3"),
        ("train", "data = [1]", "data must be text, got [1]"),
        ("train", "epochs = true", "--epochs must be a whole number, got True"),
        ("train", "epochs = 1.5", "--epochs must be a whole number, got 1.5"),
        ("train", "lr = 'fast'", "--lr must be a number, got 'fast'"),
        ("train", "baseline = 1", "--baseline must be true or false, got 1"),
        ("train", "device = 1979-05-27", "--device must be text, got datetime.date"),
        ("federated", "task = {a = 1}", "task must be text, got {'a': 1}"),
        ("federated", f"proximal = 1{400 * '0'}", "--proximal must be a finite number"),
        ("federated", "separation = 'two'", "--separation must be a whole number"),
    ],
)
def test_settings_of_another_type(
    kind: str,
    line: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A TOML file may hold anything; most of it ended in a traceback, true was the number 1."""
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text(line)
    assert main([kind, "--config", "c.toml"]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["c.toml"]


def test_whole_numbers_are_numbers() -> None:
    made = FederatedSettings.of({"client_lr": 10**23, "rounds": 3})  # torch takes the float alone
    assert (type(made.client_lr), made.client_lr) == (float, 1e23)
    assert type(made.rounds) is int


def test_arguments_become_options() -> None:
    names = {
        name: "--" + name.replace("_", "-") for name in ("json", "delta", "test_seed", "steps")
    }
    assert in_options("say so: json=True", names) == "say so: --json"
    assert in_options("a new run (fork_of=)", {"fork_of": "--fork"}) == "a new run (--fork)"
    assert in_options("use delta=1e-6, not test_seed", names) == "use --delta 1e-6, not --test-seed"
    assert in_options("the steps of a plan", names) == "the steps of a plan"
    assert in_options("steps must be ≥ 1", names) == "--steps must be ≥ 1"
    assert in_options("plan.steps=3 and max_steps=4", names) == "plan.steps=3 and max_steps=4"
    assert in_options("--test-seed stays", names) == "--test-seed stays"


def test_all_commands_are_there() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert set(RECORDS) | {"verify", "report", "reproduce"} <= set(commands)


OWN = """
from dataclasses import dataclass

from noshuffle.strategies import register
from noshuffle.strategies.toeplitz import SqrtToeplitz, sqrt_toeplitz


@register
@dataclass(frozen=True)
class Roots(SqrtToeplitz):
    name = "cli_test_roots"
"""


def test_a_mechanism_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Registered by its module, it is compared, fitted and named like those of the library."""
    from noshuffle.strategies.mechanisms import MECHANISMS

    (tmp_path / "own_roots.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    try:
        assert main(["plan", "--steps", "16", "--mechanism", "own_roots:cli_test_roots"]) == 0
        assert "cli_test_roots" in capsys.readouterr().out
        for line in ("plan --steps 16", "epsilon --steps 16 --noise-multiplier 1"):
            assert main([*line.split(), "--mechanism", "cli_test_roots", "--json"]) == 0
        assert "cli_test_roots" in mechanism_names()
        table = tmp_path / "t.csv"
        table.write_text("1\n2\n3\n")
        line = f"sum {table} --clip 1 --batch 1 --mechanism cli_test_roots --out {tmp_path / 'r'}"
        assert main(line.split()) == 0
        assert main(["verify", str(tmp_path / "r")]) == 0
    finally:
        MECHANISMS.pop("cli_test_roots", None)


def test_a_module_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--steps", "9", "--mechanism", "no_such_module:roots"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "no_such_module" in said
