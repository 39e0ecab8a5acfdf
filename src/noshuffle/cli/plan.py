"""`noshuffle plan`: mechanisms side by side at equal privacy, and what larger batches buy."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noshuffle.cli.from_record import setting, takes
from noshuffle.cli.mechanisms import mechanism_named
from noshuffle.cli.promise import Output, Promise, check_picture, print_json
from noshuffle.cli.words import say
from noshuffle.errors import InvalidInput, NoshuffleError, one_of, whole
from noshuffle.rounding import up

if TYPE_CHECKING:
    from noshuffle.participation import Participation


@dataclass(frozen=True, kw_only=True)
class PlanSettings(Promise):
    mechanism: str = setting("usual", "one mechanism by name, usual, or all that fit")
    momentum: float = setting(0.0, "momentum of the optimizer, [0, 1)")
    max_buffers: int | None = setting(
        None, "most model-sized buffers a mechanism may keep", check=partial(whole, at_least=0)
    )
    sampling: str = setting(
        "",
        "what secret draws would buy: any (poisson, cyclic, bins), or one of these",
    )
    plot: Path | None = setting(None, "draw error over steps and ε over batch size")


@takes(PlanSettings, Output)
def plan(asked: PlanSettings, output: Output) -> None:
    """Compare mechanisms for a run: noise, sensitivity, error, memory, time to fit.

    Without options: the MNIST budget of the DP-FTRL paper (20 epochs of 240 steps, ε = 8).
    """
    from noshuffle.cli.kept_fit import kept_fit
    from noshuffle.participation import Epochs
    from noshuffle.plan import compare
    from noshuffle.strategies import Workload

    if asked.steps is None and asked.epochs is None and asked.steps_per_epoch is None:
        people, batch = asked.population or 60_000, asked.batch_size or 250
        asked = replace(asked, epochs=20, steps_per_epoch=240, population=people, batch_size=batch)
    if asked.noise_multiplier is None and asked.target_epsilon is None:
        asked = replace(asked, target_epsilon=8.0)
    if asked.noise_multiplier is not None and asked.target_epsilon is not None:
        raise InvalidInput("give at most one of --noise-multiplier and --target-epsilon")
    if asked.plot is not None:
        check_picture(asked.plot, "--plot")
    # Population and batch size are for the picture: nobody is sampled here.
    shape = asked if asked.epochs is not None else replace(asked, population=None, batch_size=None)
    participation = shape.participation()
    rows = compare(
        participation,
        mechanism=mechanism_named(asked.mechanism),
        epsilon=asked.target_epsilon,
        noise_multiplier=asked.noise_multiplier,
        delta=asked.delta,
        neighbours=asked.neighbours,
        unit=asked.unit,
        workload=Workload(beta=asked.momentum),
        max_buffers=asked.max_buffers,
        progress=(lambda name: None) if output.json else _say,
        fit_fn=None if ":" in asked.mechanism else kept_fit,
    )
    found = _sampled(participation, asked, rows[0]) if asked.sampling else []
    if asked.plot is not None:
        from noshuffle.report.tradeoff import draw_plan

        draw_plan(asked.plot, rows, population=asked.population, batch_size=asked.batch_size)
    if output.json:
        print_json([row.to_dict() for row in [*rows, *found]])
    else:
        is_drawable = isinstance(participation, Epochs) and asked.target_epsilon is not None
        beside: list[Any] = []
        if is_drawable and not found and asked.mechanism in ("usual", "all"):
            with suppress(NoshuffleError):  # nobody asked: where there is no such plan, no row
                beside = _sampled(participation, replace(asked, sampling="poisson"), rows[0])
        _print_table(rows, beside, participation.words())
        if is_drawable and not found:
            say("What other secret draws would buy at this ε: --sampling any.")
    if found and not output.json:
        print("If positions can be drawn in secret (against the best of the table without):")
        for row in found:
            print(f"  {row.words} ({100 * (row.rms / rows[0].rms - 1):+.1f} %)")
    if asked.plot is not None and not output.json:
        print(f"plot written to {asked.plot}")


def _sampled(participation: Participation, asked: PlanSettings, unsampled: Any) -> list[Any]:
    from noshuffle.participation import Epochs
    from noshuffle.plan.comparison import KINDS, compare_sampling
    from noshuffle.strategies import Workload

    if not isinstance(participation, Epochs) or asked.target_epsilon is None:
        raise InvalidInput("--sampling needs --epochs with --steps-per-epoch, and --target-epsilon")
    one_of(("any", *KINDS[1:]), sampling=asked.sampling)
    return compare_sampling(
        participation,
        epsilon=asked.target_epsilon,
        delta=asked.delta,
        kinds=KINDS[1:] if asked.sampling == "any" else (asked.sampling,),
        unsampled=unsampled.plan.strategy,
        workload=Workload(beta=asked.momentum),
        neighbours=asked.neighbours,
        unit=asked.unit,
        max_buffers=asked.max_buffers,
    )


def _say(name: str) -> None:
    """Tell a terminal which mechanism is being fitted."""
    if sys.stderr.isatty():
        print(f"\r\033[Kfitting {name} …" if name else "\r\033[K", end="", file=sys.stderr)


def _print_table(rows: list[Any], beside: list[Any], words: str) -> None:
    """The rows, the best first, and `beside` them DP-SGD with samples of the data."""
    from rich.box import HEAVY_HEAD, SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False)
    cells = {
        "ε": lambda row: up(row.epsilon, places=3),
        "noise": lambda row: f"{row.noise_multiplier:.3f}",
        "sensitivity": lambda row: (
            f"{'' if row.plan.sensitivity.exact else '≤ '}{row.plan.sensitivity.value:.3f}"
        ),
        "rms": lambda row: f"{row.rms:.3f}",
        "max": lambda row: f"{row.max:.3f}",
        "buffers": lambda row: str(row.buffers),
        "fit, s": lambda row: f"{row.seconds:.2f}",
    }
    kept = [*cells]

    def drawn() -> Table:
        box = SIMPLE if console.width < 90 else HEAVY_HEAD
        table = Table(title=words[0].upper() + words[1:], title_justify="left", box=box)
        table.add_column("mechanism", no_wrap=True)
        for heading in kept:
            table.add_column(heading, justify="right", no_wrap=True)
        lines = [(row.rms, row.name, [cells[heading](row) for heading in kept]) for row in rows]
        for row in beside:
            known = {"rms": f"{row.rms:.3f}", "noise": f"{row.plan.noise_multiplier:.3f}",
                     "ε": up(row.plan.epsilon(), places=3), "buffers": "0"}  # fmt: skip
            shown = [known.get(heading, "–") for heading in kept]
            lines.append((row.rms, "identity, sampled", shown))
        for _, name, shown in sorted(lines, key=lambda line: line[0]):
            table.add_row(name, *shown)
        return table

    # A column less is better than numbers, or words above them, cut short.
    endless = console.options.update(max_width=1000)
    for spared in ("fit, s", "sensitivity", "max", "noise", "ε", "buffers"):
        if console.measure(drawn(), options=endless).maximum <= console.width:
            break
        kept.remove(spared)
    console.print(drawn())
    about = {
        "noise": "noise: its multiplier. ",
        "sensitivity": "sensitivity: what one unit moves, in clip norms. ",
        "buffers": "buffers: copies of the model that are kept. ",
    }
    console.print(
        "".join(said for heading, said in about.items() if heading in kept)
        + f"rms{', max' if 'max' in kept else ''}: standard deviation of the noise in the running "
        "sum of gradients over the steps, in units of the clip norm"
        + (", at the ε shown" if "ε" in kept else f", at ε = {up(rows[0].epsilon, places=3)}")
        + ". identity is DP-SGD. The order of the data may be anybody's choice"
        + ("; sampled: every batch is drawn in secret." if beside else ".")
    )
