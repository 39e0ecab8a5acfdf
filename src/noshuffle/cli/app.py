"""The typer application: one function per command, each from its own file."""

from __future__ import annotations

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
for _command in (train, federated, fit, plan, epsilon, verify, report, reproduce):
    app.command()(_command)
