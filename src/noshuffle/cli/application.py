"""The typer application: one function per command, each from its own file when it is asked for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from noshuffle.cli.mechanisms import PLACEHOLDER, mechanism_names
from noshuffle.cli.signals import status_of
from noshuffle.cli.words import in_options, refuse
from noshuffle.errors import NoshuffleError

#: Every command, in the order of the help, and the module that has it.
COMMANDS = {
    "train": "train",
    "tune": "tune",
    "federated": "train",
    "fit": "fit",
    "predict": "predict",
    "sum": "sum",
    "budget": "budget",
    "plan": "plan",
    "epsilon": "epsilon",
    "verify": "evidence",
    "seal": "evidence",
    "audit": "audit",
    "report": "evidence",
    "watch": "watch",
    "reproduce": "reproduce",
}


class _Commands(TyperGroup):
    """All commands with the first line of their help, as plain text: rich takes 0.1 s to import."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        lines = [(name, (own.help or "").split("\n")[0]) for name, own in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(lines)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from noshuffle.version import __version__

        print(f"noshuffle {__version__}")
        raise typer.Exit


def _everywhere(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version)
    ] = False,
) -> None:
    pass


class _LateHelp(TyperCommand):
    """A command whose help names all mechanisms, which are imported when somebody reads it."""

    def format_help(self, *given: Any) -> None:
        self.rich_markup_mode = "rich"
        # typer 0.20 over click 8.5: click's Argument has a help of its own, None, in typer's place.
        stated = inspect.signature(self.callback).parameters if self.callback else {}
        for parameter in self.params:
            text = getattr(parameter, "help", None) or ""
            if not text and parameter.name in stated:
                text = parameter.help = stated[parameter.name].annotation.__metadata__[0].help
            if PLACEHOLDER in text:
                parameter.help = text.replace(PLACEHOLDER, ", ".join(mechanism_names()))
        super().format_help(*given)


def _one_line(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with refusals in the words of its options, and Ctrl-C, as one line each."""
    names = tuple(inspect.signature(command).parameters)

    @wraps(command)
    def call(**given: Any) -> Any:
        try:
            return command(**given)
        except NoshuffleError as error:
            return refuse(in_options(str(error), names))
        except KeyboardInterrupt as error:  # typer would say nothing
            return refuse("stopped", status=status_of(error))

    return call


def application(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """The application with the commands of these names: all of them take 0.1 s to import."""
    made = typer.Typer(
        name="noshuffle",
        help="Train with differential privacy, without sampling or shuffling.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        cls=_Commands,
        rich_markup_mode=None,
    )
    made.callback()(_everywhere)
    for name in names:
        module = import_module(f"noshuffle.cli.{COMMANDS[name]}")
        command = getattr(module, "sum_" if name == "sum" else name)
        made.command(name, cls=_LateHelp)(_one_line(command))
    return made
