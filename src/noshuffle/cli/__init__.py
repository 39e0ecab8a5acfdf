"""The command line. Commands are thin and import late; every error is one line and exit status 2.

With --json standard output is one JSON document, of a refusal too: {"error": …, "status": …}.
`commands.COMMANDS` lists them; help and refusals of the first word need no more than that list.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Any

from noshuffle.cli.commands import COMMANDS
from noshuffle.cli.signals import status_of, stop_at_once
from noshuffle.cli.start import leave, let_threads_sleep, steady_streams
from noshuffle.cli.words import answering, refuse
from noshuffle.errors import NoshuffleError

__all__ = ["app", "main"]


@cache
def __getattr__(name: str) -> Any:
    """`app`: the application with all of its commands."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from noshuffle.cli.application import application

    return application()


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status instead of leaving the process."""
    given = sys.argv[1:] if arguments is None else arguments
    with answering(as_json="--json" in given):
        return _answer(given)


def _answer(given: list[str]) -> int:
    try:
        from noshuffle.cli.help_page import all_commands, help_for, print_version

        if (page := help_for(given)) is not None:
            print(page)
            return 0
        if not given:
            print(all_commands(), file=sys.stderr)
            return 2
        if given == ["--version"]:
            print_version()
            return 0
        if given[0] not in COMMANDS and not given[0].startswith("-"):
            return refuse(_no_such(given[0]))
        from typer.main import get_command

        from noshuffle.cli.application import application

        own = application(given[:1]) if given[:1] and given[0] in COMMANDS else application()
        command = get_command(own)
        status = command.main(args=given, prog_name="noshuffle", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except NoshuffleError as error:
        return refuse(str(error))
    except BrokenPipeError:
        # The reader of a pipe (head, less) has left; let the interpreter's last flush go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        return refuse(f"{where}{error.strerror or error}")
    except UnicodeDecodeError:
        return refuse("a file that should hold text (UTF-8) does not; the folder is damaged")
    except UnicodeEncodeError as error:
        name = error.object[max(0, error.start - 20) : error.end + 20]
        return refuse(f"names must be text in UTF-8, got …{name!a}…; rename the file")
    except MemoryError:
        return refuse("there is not enough memory for that; ask for fewer steps, rows or buckets")
    except Exception as error:
        # typer may carry its own click: recognise usage errors by shape, not by class.
        if hasattr(error, "format_message"):
            return refuse(error.format_message() or "give a command; noshuffle --help lists them")
        if type(error).__name__ == "Abort":
            return refuse("stopped", status=130)
        raise
    except KeyboardInterrupt as error:
        return refuse("stopped", status=status_of(error))


def _no_such(name: str) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, COMMANDS, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    return f"there is no command {name!r}; {meant}noshuffle --help lists them"


def run() -> None:
    """The command as a process of its own."""
    stop_at_once()
    steady_streams()
    let_threads_sleep()
    leave(main())
