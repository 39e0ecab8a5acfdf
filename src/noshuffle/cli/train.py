"""`noshuffle train`: train privately, show progress, keep the evidence, draw the report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from noshuffle.cli import options as o


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
        str | None, typer.Option(help="blt_tapped, blt, tree, identity, …; or best")
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option("--epsilon", "--target-epsilon", help="target ε (default 8)")
    ] = None,
    noise_multiplier: o.NoiseMultiplier = None,
    delta: Annotated[float | None, typer.Option(help="δ, strictly between 0 and 1")] = None,
    epochs: Annotated[int | None, typer.Option(help="passes over the data, in order")] = None,
    batch_size: Annotated[int | None, typer.Option(help="examples a step")] = None,
    clip_norm: Annotated[float | None, typer.Option(help="bound on one contribution")] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="ftrl, sgd, adam, adamw or adafactor")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="learning rate (not its inverse)")] = None,
    momentum: Annotated[float | None, typer.Option(help="momentum of ftrl and sgd")] = None,
    sampling: Annotated[
        str | None, typer.Option(help="none, or DP-SGD with poisson or fixed batches")
    ] = None,
    unit: Annotated[str | None, typer.Option(help="protect an example or a user")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda")] = None,
    seed: Annotated[int | None, typer.Option(help="seed of the initial weights (public)")] = None,
    test_seed: Annotated[
        str | None, typer.Option(help="reproducible noise for tests: NOT PRIVATE")
    ] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="steps between checkpoints")] = None,
    baseline: Annotated[
        bool | None, typer.Option(help="also train without privacy, for comparison")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with these settings")] = None,
    out: Annotated[Path | None, typer.Option(help="run folder (default runs/DATA-TIME)")] = None,
    resume: Annotated[Path | None, typer.Option(help="go on with the run in this folder")] = None,
    moved: Annotated[
        bool, typer.Option("--moved", help="with --resume: the folder was moved, not copied")
    ] = False,
    json: o.Json = False,
) -> int:
    """Train a model with differential privacy, in the natural order of the data.

    Without options: the digits that ship with scikit-learn, a small CNN, DP-FTRL, under a minute.
    """
    given = {
        "data": data,
        "model": model,
        "mechanism": mechanism,
        "epsilon": epsilon,
        "noise_multiplier": noise_multiplier,
        "delta": delta,
        "epochs": epochs,
        "batch_size": batch_size,
        "clip_norm": clip_norm,
        "optimizer": optimizer,
        "lr": lr,
        "momentum": momentum,
        "sampling": sampling,
        "unit": unit,
        "device": device,
        "seed": seed,
        "test_seed": test_seed,
        "checkpoint_every": checkpoint_every,
        "baseline": baseline,
    }
    given = {name: value for name, value in given.items() if value is not None}
    settings, path = _settings(given, config=config, out=out, resume=resume)
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


def _settings(
    given: dict[str, Any], *, config: Path | None, out: Path | None, resume: Path | None
) -> tuple[Any, Path]:
    from datetime import datetime

    from noshuffle.cli.settings import TrainSettings, check_new_folder, kept_settings, read_toml
    from noshuffle.errors import InvalidInput

    if resume is not None:
        if given or config or out:
            raise InvalidInput("--resume takes all settings from the run folder; give it alone")
        return TrainSettings.of(kept_settings(resume, kind="train")), resume
    from_file = read_toml(config) if config is not None else {}
    if {"epsilon", "noise_multiplier"} & set(given):  # one on the command line replaces either
        from_file = {k: v for k, v in from_file.items() if k not in ("epsilon", "noise_multiplier")}
    settings = TrainSettings.of({**from_file, **given})
    if out is None:
        name = settings.data.replace(":", "-").replace(".", "-")
        out = Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    check_new_folder(out)
    return settings, out


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
