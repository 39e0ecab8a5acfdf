"""`noshuffle train`: train privately, show progress, keep the evidence, draw the report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from noshuffle.cli import run_options as run
from noshuffle.cli.run_options import FOLDER, HOW, PRIVACY, option

_TRAINING = "Training"


def train(
    data: Annotated[
        str | None,
        typer.Option(
            help="digits, mnist, fashion_mnist, cifar10, shakespeare, adult, bank_marketing, or "
            "module:function of your own"
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="tanh_cnn, vgg, small_cnn, linear, mlp or char_lstm")
    ] = None,
    mechanism: Annotated[
        str | None, option(PRIVACY, "blt_tapped, blt, tree, identity, …; or best")
    ] = None,
    epsilon: Annotated[
        float | None, option(PRIVACY, "target ε (default 8)", "--epsilon", "--target-epsilon")
    ] = None,
    noise_multiplier: Annotated[
        float | None, option(PRIVACY, "noise standard deviation / clip norm of one contribution")
    ] = None,
    delta: run.Delta = None,
    clip_norm: Annotated[float | None, option(PRIVACY, "bound on one contribution")] = None,
    sampling: Annotated[
        str | None, option(PRIVACY, "none, or DP-SGD with poisson or fixed batches")
    ] = None,
    unit: Annotated[str | None, option(PRIVACY, "protect an example or a user")] = None,
    epochs: Annotated[int | None, option(_TRAINING, "passes over the data, in order")] = None,
    batch_size: Annotated[int | None, option(_TRAINING, "examples a step")] = None,
    optimizer: Annotated[
        str | None, option(_TRAINING, "ftrl, sgd, adam, adamw or adafactor")
    ] = None,
    lr: Annotated[float | None, option(_TRAINING, "learning rate (not its inverse)")] = None,
    momentum: Annotated[float | None, option(_TRAINING, "momentum of ftrl and sgd")] = None,
    device: run.Device = None,
    seed: Annotated[int | None, option(HOW, "seed of the initial weights (public)")] = None,
    test_seed: run.TestSeed = None,
    baseline: Annotated[
        bool | None, option(HOW, "also train without privacy, for comparison")
    ] = None,
    config: run.Config = None,
    json: run.Json = False,
    out: Annotated[Path | None, option(FOLDER, "run folder (default runs/DATA-TIME)")] = None,
    resume: run.Resume = None,
    moved: run.Moved = False,
    checkpoint_every: Annotated[int | None, option(FOLDER, "steps between checkpoints")] = None,
) -> int:
    """Train a model with differential privacy, in the natural order of the data.

    Without options: the digits that ship with scikit-learn, a small CNN, DP-FTRL, under a minute.
    """
    given = run.given_settings(locals())
    from noshuffle.cli.settings import TrainSettings

    settings, path = run.settings_and_folder(
        TrainSettings.of,
        given,
        kind="train",
        config=config,
        out=out,
        resume=resume,
        name=lambda made: made.data.replace(":", "-").replace(".", "-"),
    )
    _check_device(settings.device)
    try:
        result = _run(settings, path, quiet=json, moved=moved)
    except KeyboardInterrupt:
        if not (path / "plan.json").is_file():
            raise
        line = f"noshuffle: stopped; go on with noshuffle train --resume {path}"
        print(line, file=sys.stderr)
        return 130
    _print(settings, result, as_json=json)
    return 0


def _check_device(name: str) -> None:
    import torch

    from noshuffle.errors import InvalidInput

    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdigit()):
        raise InvalidInput(f"device must be cpu, cuda or cuda:NUMBER, got {name!r}")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise InvalidInput(f"device {name} is not available on this machine; use --device cpu")


def _run(settings: Any, path: Path, *, quiet: bool, moved: bool) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from noshuffle.cli.job import run_job

    console = Console(stderr=True, quiet=quiet)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}  ε {task.fields[epsilon]:.2f}"),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=quiet or not sys.stderr.isatty()) as bar:
        task = bar.add_task("training", total=None, epsilon=0.0, note="")

        def on_step(where: Any) -> None:
            accuracy = where.metrics.get("test_accuracy")
            fields: dict[str, Any] = {"epsilon": where.epsilon}
            if accuracy is not None:
                fields["note"] = f"held-out accuracy {100 * accuracy:.1f} %"
                if bar.disable and not quiet:
                    console.print(
                        f"step {where.step}/{where.steps}  ε {where.epsilon:.2f}  {fields['note']}"
                    )
            bar.update(task, completed=where.step, total=where.steps, **fields)

        return run_job(
            settings,
            path,
            callbacks=(on_step,),
            say=lambda text: bar.update(task, description=text),
            moved=moved,
        )


def _print(settings: Any, result: Any, *, as_json: bool) -> None:
    import json

    statement, plan = result.statement, result.plan
    if as_json:
        record = {
            "run": str(result.path),
            "test_accuracy": result.accuracy,
            "baseline_accuracy": result.baseline,
            "seconds": result.seconds,
            "steps": result.steps,
            "statement": statement.to_dict(),
            "settings": settings.to_dict(),
        }
        print(json.dumps(record, indent=2, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, title=f"run {result.path}", title_justify="left")
    table.add_row("accuracy, private", f"{100 * result.accuracy:.1f} %")
    if result.baseline is not None:
        table.add_row("accuracy, not private", f"{100 * result.baseline:.1f} %")
    table.add_row("ε", f"{statement.epsilon:.3f} ({'exact' if statement.exact else 'upper bound'})")
    table.add_row("δ", f"{statement.delta:g}")
    table.add_row("per", f"{statement.unit}, {statement.neighbours} neighbours")
    table.add_row("mechanism", plan.strategy.words())
    table.add_row("noise multiplier", f"{plan.noise_multiplier:.3f}")
    table.add_row("time", f"{result.seconds:.0f} s")
    console = Console()
    console.print(table)
    print(f"report: {result.path / 'report.html'}")  # one line each, to be copied
    print(f"check the evidence: noshuffle verify {result.path}")
