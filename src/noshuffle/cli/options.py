"""Options that several commands share, and what they mean as a participation and a strategy."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from noshuffle.errors import InvalidInput
from noshuffle.participation import (
    Epochs,
    FixedSize,
    MinSeparation,
    Participation,
    Poisson,
    Restarted,
    SinglePass,
)

Mechanism = Annotated[
    str,
    typer.Option(
        help="identity, tree, sqrt, bsr, bisr, banded, banded_inverse, blt, blt_tapped, "
        "blt_gains, blt_two_sided, dense"
    ),
]
Variant = Annotated[str, typer.Option(help="tree: plain, honaker or full")]
Steps = Annotated[int | None, typer.Option(help="number of steps (one pass, or with sampling)")]
EpochCount = Annotated[int | None, typer.Option("--epochs", help="passes in the same order")]
StepsPerEpoch = Annotated[int | None, typer.Option(help="steps in one pass")]
Separation = Annotated[
    int | None,
    typer.Option(help="least index difference between two steps of one unit (rounds between + 1)"),
]
MaxParticipations = Annotated[int | None, typer.Option(help="most steps one unit may join")]
RestartEvery = Annotated[
    str | None,
    typer.Option(help="tree: steps per tree, or epochs with the suffix e (2000, 20e)"),
]
Completion = Annotated[
    bool, typer.Option("--completion", help="tree: virtual empty steps before a restart")
]
PoissonRate = Annotated[float | None, typer.Option(help="independent sampling probability")]
Population = Annotated[int | None, typer.Option(help="number of units")]
BatchSize = Annotated[int | None, typer.Option(help="units per step")]
NoiseMultiplier = Annotated[
    float | None, typer.Option(help="noise standard deviation / clip norm of one contribution")
]
TargetEpsilon = Annotated[float | None, typer.Option(help="find the least noise for this epsilon")]
Delta = Annotated[float, typer.Option(help="delta, strictly between 0 and 1")]
Neighbours = Annotated[
    str, typer.Option(help="zero-out, add-remove or replace-one (default by participation)")
]
Unit = Annotated[str, typer.Option(help="what is protected: example or user")]
Accountant = Annotated[
    str, typer.Option(help="exact, rdp or fourier (default: the tightest that applies)")
]
Json = Annotated[bool, typer.Option("--json", help="print JSON and nothing else")]


def build_participation(
    *,
    steps: int | None,
    epochs: int | None,
    steps_per_epoch: int | None,
    separation: int | None,
    max_participations: int | None,
    poisson_rate: float | None,
    population: int | None,
    batch_size: int | None,
) -> Participation:
    """The participation that the options describe; contradictions are refused."""
    if epochs is not None and steps_per_epoch is None and population and batch_size:
        steps_per_epoch = population // batch_size
        if steps_per_epoch < 1:
            raise InvalidInput(
                f"batch size must be at most the population ({population}), got {batch_size}"
            )
    if (epochs is None) != (steps_per_epoch is None):
        raise InvalidInput("give --epochs and --steps-per-epoch together (or --population too)")
    if epochs is not None and steps is not None:
        raise InvalidInput("give either --steps or --epochs with --steps-per-epoch, not both")
    if epochs is None and steps is None:
        raise InvalidInput("give --steps, or --epochs with --steps-per-epoch")
    if max_participations is not None and separation is None:
        raise InvalidInput("--max-participations needs --separation (1 means no gap is promised)")
    order = None
    if epochs is not None and steps_per_epoch is not None:
        order = Epochs(epochs, steps_per_epoch)
    horizon = order.steps if order is not None else steps
    assert horizon is not None
    if poisson_rate is not None:
        if separation is not None:
            raise InvalidInput("give either --poisson-rate or --separation, not both")
        return Poisson(horizon, poisson_rate)
    if separation is not None:
        whole_run = SinglePass(horizon).steps
        most = max_participations
        if most is None:
            most = math.ceil(whole_run / max(separation, 1))
        return MinSeparation(whole_run, separation, most)
    if order is not None:
        return order
    if population is not None and batch_size is not None:
        return FixedSize(horizon, batch_size, population)
    if population is not None or batch_size is not None:
        raise InvalidInput("give --population and --batch-size together")
    return SinglePass(horizon)


def restart_steps(text: str | None, participation: Participation) -> int | None:
    """`--restart-every` in steps: a number of steps, or a number of epochs with the suffix e."""
    if text is None:
        return None
    digits, in_epochs = (text[:-1], True) if text.endswith("e") else (text, False)
    if not digits.isdigit() or int(digits) == 0:
        raise InvalidInput(
            f"--restart-every must be a number of steps (2000) or of epochs (20e), got {text!r}"
        )
    if not in_epochs:
        return int(digits)
    if not isinstance(participation, Epochs):
        raise InvalidInput("--restart-every in epochs needs --epochs and --steps-per-epoch")
    return int(digits) * participation.steps_per_epoch


def with_restarts(participation: Participation, every: int | None) -> Participation:
    """Epochs whose order may change when the tree restarts, which is the safe reading."""
    if every is None or not isinstance(participation, Epochs) or every >= participation.steps:
        return participation
    return Restarted(participation, every)
