"""Help: one text however it is asked for, and none of the imports that a command needs."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
from typer.main import get_command

from noshuffle.cli import app, main, mechanisms
from noshuffle.cli.commands import COMMANDS, command
from noshuffle.cli.help_page import all_commands, one_command
from noshuffle.strategies.custom import _CustomFit
from noshuffle.strategies.mechanisms import MECHANISMS

HEAVY = ("typer", "click", "rich", "numpy", "scipy", "torch", "sqlite3", "matplotlib")


def test_the_list_says_what_the_commands_say() -> None:
    for name, entry in COMMANDS.items():
        page = inspect.cleandoc(command(name).__doc__ or "")
        assert entry.line == page.split("\n")[0], name


def test_names_for_the_help_are_those_of_the_library() -> None:
    known = [name for name, own in MECHANISMS.items() if not isinstance(own.fit, _CustomFit)]
    assert list(mechanisms._NAMES) == known


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_typer_prints_the_same_page(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Behind another option --help comes by typer; alone it does not."""
    own = [name] if name else []
    assert main([*own, "--help"]) == 0
    short = capsys.readouterr().out
    tool = get_command(app)
    tool.main(args=[*own, "--help"], prog_name="noshuffle", standalone_mode=False)
    assert capsys.readouterr().out == short == f"{one_command(name) if name else all_commands()}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_of_the_page_is_one_that_typer_takes(name: str) -> None:
    tool = get_command(app).commands[name]  # type: ignore[attr-defined]
    taken = {flag for own in tool.params for flag in (*own.opts, *own.secondary_opts)}
    options = [one for one in command(name).options() if not one.is_argument]
    assert {flag for one in options for flag in one.flags} == {
        flag for flag in taken if flag.startswith("-")
    }
    wanted = {one.metavar: one.is_required for one in command(name).options() if one.is_argument}
    arguments = [own for own in tool.params if not own.opts[0].startswith("-")]
    assert {own.opts[0].upper(): own.required for own in arguments} == wanted


@pytest.mark.parametrize("line", ["--help", "--version", "no-such", "train -h", "epsilon --help"])
def test_help_imports_nothing_heavy(line: str) -> None:
    program = (
        "import sys\nfrom noshuffle.cli import main\n"
        f"main({line.split()})\n"
        f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert told.stderr.splitlines()[-1] == "[]"


def test_no_command_at_all_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"{all_commands()}\n"


def test_a_command_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["epsilom"]) == 2
    line = "there is no command 'epsilom'; did you mean epsilon? noshuffle --help lists them"
    assert capsys.readouterr().err == f"noshuffle: {line}\n"


def test_an_interval_is_no_remark(capsys: pytest.CaptureFixture[str]) -> None:
    """`[0, 1; default 0)` stood there."""
    assert main(["federated", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "do not answer, [0, 1) (default 0)" in said
