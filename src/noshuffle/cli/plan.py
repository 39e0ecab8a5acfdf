"""`noshuffle plan`: mechanisms side by side at equal privacy, and what larger batches buy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from noshuffle.cli import options as o


def plan(
    mechanism: Annotated[
        str, typer.Option(help="one mechanism, or 'all' to compare those that fit")
    ] = "all",
    steps: o.Steps = None,
    epochs: o.EpochCount = None,
    steps_per_epoch: o.StepsPerEpoch = None,
    separation: o.Separation = None,
    max_participations: o.MaxParticipations = None,
    population: o.Population = None,
    batch_size: o.BatchSize = None,
    noise_multiplier: o.NoiseMultiplier = None,
    target_epsilon: o.TargetEpsilon = None,
    delta: o.Delta = 1e-5,
    neighbours: o.Neighbours = "",
    unit: o.Unit = "example",
    momentum: Annotated[float, typer.Option(help="momentum of the optimizer, [0, 1)")] = 0.0,
    max_buffers: Annotated[
        int | None, typer.Option(help="most model-sized buffers a mechanism may keep")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="draw error over steps and ε over batch size")
    ] = None,
    json: o.Json = False,
) -> None:
    """Compare mechanisms for a run: noise, sensitivity, error, memory, time to fit.

    Without options: the MNIST budget of the DP-FTRL paper (20 epochs of 240 steps, ε = 8).
    """
    from noshuffle.comparison import compare
    from noshuffle.errors import InvalidInput, whole
    from noshuffle.strategies import Workload

    if steps is None and epochs is None and steps_per_epoch is None:
        epochs, steps_per_epoch = 20, 240
        population, batch_size = population or 60_000, batch_size or 250
    if noise_multiplier is None and target_epsilon is None:
        target_epsilon = 8.0
    if noise_multiplier is not None and target_epsilon is not None:
        raise InvalidInput("give at most one of --noise-multiplier and --target-epsilon")
    if plot is not None and plot.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InvalidInput(f"--plot must end in .png, .svg or .pdf, got {str(plot)!r}")
    if plot is not None and not plot.parent.is_dir():
        raise InvalidInput(f"--plot needs an existing folder, got {str(plot.parent)!r}")
    if max_buffers is not None:
        whole(at_least=0, max_buffers=max_buffers)
    participation = o.build_participation(
        steps=steps,
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        separation=separation,
        max_participations=max_participations,
        poisson_rate=None,
        population=population if epochs is not None else None,
        batch_size=batch_size if epochs is not None else None,
    )
    rows = compare(
        participation,
        mechanism=mechanism,
        epsilon=target_epsilon,
        noise_multiplier=noise_multiplier,
        delta=delta,
        neighbours=neighbours,
        unit=unit,
        workload=Workload(beta=momentum),
        max_buffers=max_buffers,
        progress=None if json else _progress(),
    )
    if json:
        _print_json(rows)
    else:
        _print_table(rows, participation.words())
    if plot is not None:
        from noshuffle.report.tradeoff import draw_plan

        draw_plan(plot, rows, population=population, batch_size=batch_size)
        if not json:
            print(f"plot written to {plot}")


def _progress() -> Any:
    """Say on a terminal which mechanism is being fitted."""
    import sys

    def say(name: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[Kfitting {name} …" if name else "\r\033[K", end="", file=sys.stderr)

    return say


def _print_json(rows: list[Any]) -> None:
    import json

    print(json.dumps([row.to_dict() for row in rows], indent=2, ensure_ascii=False))


def _print_table(rows: list[Any], words: str) -> None:
    from rich.box import HEAVY_HEAD, SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = Console()
    headings = ["ε", "noise", "sensitivity", "rms", "max", "buffers", "fit, s"]
    # A column less is better than numbers cut short.
    spared = {"fit, s": 90, "sensitivity": 80}
    kept = [h for h in headings if console.width >= spared.get(h, 0)]
    table = Table(
        title=words[0].upper() + words[1:],
        title_justify="left",
        box=SIMPLE if console.width < 90 else HEAVY_HEAD,
    )
    table.add_column("mechanism", no_wrap=True)
    for heading in kept:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        mark = "" if row.exact else "≤ "
        cells = (
            f"{row.epsilon:.3f}",
            f"{row.noise_multiplier:.3f}",
            f"{mark}{row.sensitivity:.3f}",
            f"{row.rms:.3f}",
            f"{row.max:.3f}",
            str(row.buffers),
            f"{row.seconds:.2f}",
        )
        table.add_row(row.name, *(c for h, c in zip(headings, cells) if h in kept))
    console.print(table)
    console.print(
        "noise: its multiplier. rms, max: standard deviation of the noise in the running sum of "
        "gradients over the steps, in units of the clip norm, at the ε shown. The order of the "
        "data may be anybody's choice."
    )
