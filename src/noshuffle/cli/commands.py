"""All commands: the module of each, imported when it is asked for, and its line in the help.

The line is the first one of the command's docstring; it stands here too because `noshuffle --help`
would otherwise import them all (tests/cli/test_help.py compares).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from noshuffle.cli.from_record import Command


class Listed(NamedTuple):
    """Where a command is, and what it is for."""

    module: str
    line: str


#: Every command, in the order of the help.
COMMANDS = {
    "train": Listed(
        "train", "Train a model with differential privacy, in the natural order of the data."
    ),
    "federated": Listed(
        "federated", "Train over users with user-level differential privacy, without sampling them."
    ),
    "fit": Listed("fit", "Fit a linear model to a table with differential privacy."),
    "predict": Listed("predict", "Predict the rows of a table by a model of noshuffle fit."),
    "sum": Listed("sum", "Private running totals of the columns of a table, in its order."),
    "budget": Listed(
        "budget", "What all runs on the same data have cost together, and what is left."
    ),
    "plan": Listed(
        "plan", "Compare mechanisms for a run: noise, sensitivity, error, memory, time to fit."
    ),
    "epsilon": Listed(
        "epsilon", "Epsilon of a run (or the noise for a target epsilon), with its assumptions."
    ),
    "verify": Listed("evidence", "Recompute the guarantee of a run from its folder."),
    "seal": Listed(
        "evidence",
        "End a run for good: its secret is removed, so that nobody can take the noise off again.",
    ),
    "audit": Listed("audit", "Check a guarantee without the formulas that made it."),
    "report": Listed("evidence", "Draw report.html of a run again from its files."),
    "reproduce": Listed(
        "reproduce", "Compute an experiment of the paper, and say which of the paper's claims hold."
    ),
}


def command(name: str) -> Command:
    """The command of that name, from its module."""
    module = import_module(f"noshuffle.cli.{COMMANDS[name].module}")
    found: Command = getattr(module, "sum_" if name == "sum" else name)
    return found
