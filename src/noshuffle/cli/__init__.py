"""The command line. Commands are thin and import late; every error is one line and exit status 2.

With --json standard output is one JSON document, of a refusal too: {"error": …, "status": …}.

noshuffle epsilon   a number and its assumptions
noshuffle plan      mechanisms side by side at equal privacy
noshuffle train     train a model privately and keep the evidence
noshuffle federated train over users that come when they like, each of them protected
noshuffle fit       a private linear model from a table
noshuffle predict   what such a model says of other rows
noshuffle sum       private running totals of a table of numbers
noshuffle tune      the best learning rate and clip norm, the search paid for
noshuffle budget    what all runs on the same data cost together
noshuffle verify    recompute the guarantee of a run from its folder
noshuffle audit     check a guarantee without the formulas that made it
noshuffle seal      destroy the keys of a run, and sign it
noshuffle reproduce an experiment of the paper: table, pictures, claims that hold
noshuffle report    draw the report of a run again
"""

from __future__ import annotations

import os
import sqlite3
import sys
from functools import cache
from typing import Any

from noshuffle.cli.application import COMMANDS, application
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
    return application()


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status instead of leaving the process."""
    given = sys.argv[1:] if arguments is None else arguments
    with answering(as_json="--json" in given):
        return _answer(given)


def _answer(given: list[str]) -> int:
    try:
        from typer.main import get_command

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
    except sqlite3.DatabaseError as error:
        from noshuffle.release.ledger_errors import in_words

        return refuse(in_words(error))
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


def run() -> None:
    """The command as a process of its own."""
    stop_at_once()
    steady_streams()
    let_threads_sleep()
    leave(main())
