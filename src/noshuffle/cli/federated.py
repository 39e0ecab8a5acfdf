"""`noshuffle federated`: train over users that come when they like, each of them protected."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from noshuffle.cli import options as o


def federated(
    task: Annotated[
        str | None,
        typer.Option(
            help="digits (ships with scikit-learn, made-up users), shakespeare, drama, writers"
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="text: lstm, transformer; images: mlp, cnn, linear")
    ] = None,
    mechanism: Annotated[
        str | None,
        typer.Option(help="blt, tree, banded, … as in plan; or best; dp-fedavg: independent noise"),
    ] = None,
    amplified: Annotated[
        bool | None,
        typer.Option("--amplified", help="dp-fedavg with secret Poisson sampling of users"),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option("--epsilon", "--target-epsilon", help="target ε (default 8)")
    ] = None,
    noise_multiplier: o.NoiseMultiplier = None,
    delta: Annotated[float | None, typer.Option(help="δ, strictly between 0 and 1")] = None,
    rounds: Annotated[int | None, typer.Option(help="number of rounds")] = None,
    clients_per_round: Annotated[int | None, typer.Option(help="users asked a round")] = None,
    separation: Annotated[
        int | None,
        typer.Option(help="least difference of two rounds of one user (default: derived)"),
    ] = None,
    max_participations: Annotated[
        int | None, typer.Option(help="most rounds one user may join (default: derived)")
    ] = None,
    clip: Annotated[
        str | None,
        typer.Option(help="bound on a user's update; or adaptive[:QUANTILE[:START]]"),
    ] = None,
    server_optimizer: Annotated[
        str | None, typer.Option(help="ftrl, sgd, momentum or adam")
    ] = None,
    server_lr: Annotated[float | None, typer.Option(help="learning rate of the server")] = None,
    server_momentum: Annotated[
        float | None, typer.Option(help="momentum of ftrl and momentum")
    ] = None,
    cooldown: Annotated[
        float | None, typer.Option(help="last part of the run with a falling server rate")
    ] = None,
    client_lr: Annotated[float | None, typer.Option(help="learning rate of a client")] = None,
    local_epochs: Annotated[int | None, typer.Option(help="passes over a user's data")] = None,
    local_steps: Annotated[int | None, typer.Option(help="most steps of a client")] = None,
    local_batch: Annotated[
        int | None, typer.Option(help="examples of a client's step (default: all)")
    ] = None,
    proximal: Annotated[float | None, typer.Option(help="μ of FedProx")] = None,
    order: Annotated[
        str | None,
        typer.Option(help="who comes first: random, year (drama: a drifting population), list"),
    ] = None,
    check_in_rate: Annotated[
        float | None, typer.Option(help="share of users that check in, (0, 1]")
    ] = None,
    drop_out: Annotated[
        float | None, typer.Option(help="share of asked users that do not answer, [0, 1)")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="process (in this one), or flower (its simulation)")
    ] = None,
    vectorise: Annotated[
        bool | None, typer.Option(help="train clients together (default: where quicker)")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda")] = None,
    seed: Annotated[
        int | None, typer.Option(help="seed of initial weights and check-ins (public)")
    ] = None,
    test_seed: Annotated[
        str | None, typer.Option(help="reproducible noise for tests: NOT PRIVATE")
    ] = None,
    evaluate_every: Annotated[int | None, typer.Option(help="rounds between evaluations")] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="rounds between checkpoints; a crash loses those since")
    ] = None,
    baseline: Annotated[
        bool | None, typer.Option(help="also train without noise, for comparison")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with these settings")] = None,
    out: Annotated[Path | None, typer.Option(help="run folder (default runs/TASK-TIME)")] = None,
    resume: Annotated[Path | None, typer.Option(help="go on with the run in this folder")] = None,
    moved: Annotated[
        bool, typer.Option("--moved", help="with --resume: the folder was moved, not copied")
    ] = False,
    json: o.Json = False,
) -> int:
    """Train over users with user-level differential privacy, without sampling them.

    Without options: 479 made-up users with three of scikit-learn's digits each, DP-FTRL, seconds.
    """
    own = ("config", "out", "resume", "moved", "json")
    given = {k: v for k, v in locals().items() if k not in own and k != "own" and v is not None}
    settings, path = _settings(given, config=config, out=out, resume=resume)
    return _run(settings, path, as_json=json, moved=moved)


def _settings(
    given: dict[str, Any], *, config: Path | None, out: Path | None, resume: Path | None
) -> tuple[Any, Path]:
    from datetime import datetime

    from noshuffle.cli.federated_settings import FederatedSettings
    from noshuffle.cli.settings import check_new_folder, kept_settings, read_toml
    from noshuffle.errors import InvalidInput

    if resume is not None:
        if given or config or out:
            raise InvalidInput("--resume takes all settings from the run folder; give it alone")
        record = kept_settings(resume, kind="federated")
        record.pop("kind")
        return FederatedSettings.of(record), resume
    from_file = read_toml(config, table="federated") if config is not None else {}
    if {"epsilon", "noise_multiplier"} & set(given):  # one on the command line replaces either
        from_file = {k: v for k, v in from_file.items() if k not in ("epsilon", "noise_multiplier")}
    settings = FederatedSettings.of({**from_file, **given})
    out = out or Path("runs") / f"federated-{settings.task}-{datetime.now():%Y%m%d-%H%M%S}"
    check_new_folder(out)
    return settings, out


def _run(settings: Any, path: Path, *, as_json: bool, moved: bool) -> int:
    import sys

    from rich.console import Console

    from noshuffle.cli.federated_job import Stopped, run_job
    from noshuffle.cli.federated_view import closing_table, stop_on_signals, to_record, watching

    console = Console(stderr=True, quiet=as_json)
    try:
        with stop_on_signals() as is_stopped, watching(console, settings) as (watch, say):
            result = run_job(
                settings, path, moved=moved, watch=watch, say=say, is_stopped=is_stopped
            )
    except Stopped:
        line = f"noshuffle: stopped after a round; go on with noshuffle federated --resume {path}"
        print(line, file=sys.stderr)
        return 130
    if as_json:
        import json

        print(json.dumps(to_record(settings, result), indent=2, ensure_ascii=False))
    else:
        closing_table(settings, result)
    return 0
