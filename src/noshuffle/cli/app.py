"""The typer application: one function per command, each from its own file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import typer

from noshuffle.cli.epsilon import epsilon
from noshuffle.cli.evidence import report, verify
from noshuffle.cli.federated import federated
from noshuffle.cli.fit import fit
from noshuffle.cli.plan import plan
from noshuffle.cli.reproduce import reproduce
from noshuffle.cli.train import train

app = typer.Typer(
    name="noshuffle",
    help="Train with differential privacy, without sampling or shuffling.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _stoppable(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with Ctrl-C as one line and exit status 130 (typer would say nothing)."""

    @wraps(command)
    def call(**given: Any) -> Any:
        try:
            return command(**given)
        except KeyboardInterrupt:
            print("noshuffle: stopped", file=sys.stderr)
            return 130

    return call


for _command in (train, federated, fit, plan, epsilon, verify, report, reproduce):
    app.command()(_stoppable(_command))
