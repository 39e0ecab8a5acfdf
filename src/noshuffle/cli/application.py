"""The typer application: one function per command, each from its own file when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from noshuffle.cli.commands import COMMANDS, command
from noshuffle.cli.from_record import Command
from noshuffle.cli.help_page import ABOUT, VERSION_HELP, all_commands, one_command, print_version
from noshuffle.cli.signals import status_of
from noshuffle.cli.words import in_options, refuse
from noshuffle.errors import NoshuffleError


class _Commands(TyperGroup):
    """All commands, with the help that is printed without typer as well."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(all_commands())


class _OneCommand(TyperCommand):
    """A command with the help that is printed without typer as well."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(one_command(str(self.name)))


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print_version()
        raise typer.Exit


def _everywhere(
    version: Annotated[
        bool, typer.Option("--version", help=VERSION_HELP, callback=_print_version)
    ] = False,
) -> None:
    pass


def readable(command: Command) -> Callable[..., Any]:
    """The command as typer reads it, with refusals in the words of its options, one line each."""
    flags = {one.name: one.flags[0] for one in command.options()}

    def call(**given: Any) -> Any:
        try:
            return command(**given)
        except NoshuffleError as error:
            return refuse(in_options(str(error), flags))
        except KeyboardInterrupt as error:  # typer would say nothing
            return refuse("stopped", status=status_of(error))

    call.__signature__ = command.__signature__  # type: ignore[attr-defined]
    call.__annotations__ = command.__annotations__
    return call


def application(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """The application with the commands of these names: all of them take 0.1 s to import."""
    made = typer.Typer(
        name="noshuffle",
        help=ABOUT,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        cls=_Commands,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    made.callback()(_everywhere)
    for name in names:
        made.command(name, cls=_OneCommand)(readable(command(name)))
    return made
