"""`noshuffle federated`: train over users that come when they like, each of them protected."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

#: Headings of the help.
_PRIVACY, _USERS, _SERVER = "Privacy", "Rounds and users", "Server"
_CLIENT, _WHERE, _FOLDER = "Clients", "How it runs", "Run folder"


def _option(heading: str, text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=heading)


def federated(
    task: Annotated[
        str | None,
        typer.Option(
            help="digits (comes with scikit-learn, made-up users), shakespeare, drama, writers"
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="text: lstm, transformer; images: mlp, cnn, linear")
    ] = None,
    mechanism: Annotated[
        str | None,
        _option(
            _PRIVACY,
            "blt (default), tree, banded, … as in plan; best; dp-fedavg: independent noise",
        ),
    ] = None,
    amplified: Annotated[
        bool | None,
        _option(_PRIVACY, "dp-fedavg with secret Poisson sampling of users", "--amplified"),
    ] = None,
    epsilon: Annotated[
        float | None,
        _option(_PRIVACY, "target ε of a user (default 8)", "--epsilon", "--target-epsilon"),
    ] = None,
    noise_multiplier: Annotated[
        float | None, _option(_PRIVACY, "instead of ε: noise standard deviation / clip norm")
    ] = None,
    delta: Annotated[float | None, _option(_PRIVACY, "δ, strictly between 0 and 1")] = None,
    clip: Annotated[
        str | None, _option(_PRIVACY, "bound on a user's update; or adaptive[:QUANTILE[:START]]")
    ] = None,
    rounds: Annotated[int | None, _option(_USERS, "number of rounds")] = None,
    clients_per_round: Annotated[int | None, _option(_USERS, "users asked a round")] = None,
    separation: Annotated[
        int | None, _option(_USERS, "least difference of two rounds of one user (default: derived)")
    ] = None,
    max_participations: Annotated[
        int | None, _option(_USERS, "most rounds one user may join (default: derived)")
    ] = None,
    order: Annotated[
        str | None,
        _option(
            _USERS, "who comes first: random (default), year (drama: a drifting population), list"
        ),
    ] = None,
    check_in_rate: Annotated[
        float | None, _option(_USERS, "share of users that check in, (0, 1] (default 1)")
    ] = None,
    drop_out: Annotated[
        float | None, _option(_USERS, "share of asked users that do not answer, [0, 1) (default 0)")
    ] = None,
    server_optimizer: Annotated[
        str | None, _option(_SERVER, "ftrl (default), sgd, momentum or adam")
    ] = None,
    server_lr: Annotated[
        float | None, _option(_SERVER, "learning rate of the server (default 0.5)")
    ] = None,
    server_momentum: Annotated[
        float | None, _option(_SERVER, "momentum of ftrl and momentum (default 0.9)")
    ] = None,
    cooldown: Annotated[
        float | None,
        _option(_SERVER, "last part of the run with a falling server rate (default 0.25)"),
    ] = None,
    client_lr: Annotated[float | None, _option(_CLIENT, "learning rate of a client")] = None,
    local_epochs: Annotated[int | None, _option(_CLIENT, "passes over a user's data")] = None,
    local_steps: Annotated[int | None, _option(_CLIENT, "most steps of a client")] = None,
    local_batch: Annotated[
        int | None, _option(_CLIENT, "examples of a client's step (all, if the task names none)")
    ] = None,
    proximal: Annotated[float | None, _option(_CLIENT, "μ of FedProx (default 0)")] = None,
    engine: Annotated[
        str | None, _option(_WHERE, "process (default; in this one), or flower (its simulation)")
    ] = None,
    vectorise: Annotated[
        bool | None, _option(_WHERE, "train clients together (default: where quicker)")
    ] = None,
    device: Annotated[str | None, _option(_WHERE, "cpu (default) or cuda")] = None,
    seed: Annotated[
        int | None, _option(_WHERE, "seed of initial weights and check-ins (public; default 0)")
    ] = None,
    test_seed: Annotated[
        str | None, _option(_WHERE, "reproducible noise for tests: NOT PRIVATE")
    ] = None,
    evaluate_every: Annotated[
        int | None, _option(_WHERE, "rounds between evaluations (default: about 20 in all)")
    ] = None,
    baseline: Annotated[
        bool | None, _option(_WHERE, "also train without noise, for comparison")
    ] = None,
    config: Annotated[Path | None, _option(_WHERE, "TOML file with these settings")] = None,
    json: Annotated[bool, _option(_WHERE, "print JSON and nothing else", "--json")] = False,
    out: Annotated[
        Path | None, _option(_FOLDER, "where to (default runs/federated-TASK-TIME)")
    ] = None,
    resume: Annotated[
        Path | None, _option(_FOLDER, "go on with the run in this folder; give it alone")
    ] = None,
    moved: Annotated[
        bool, _option(_FOLDER, "with --resume: the folder was moved, not copied", "--moved")
    ] = False,
    checkpoint_every: Annotated[
        int | None,
        _option(_FOLDER, "rounds between checkpoints; a crash loses those since (default 1)"),
    ] = None,
) -> int:
    """Train over users with user-level differential privacy, without sampling them.

    Without options: 479 made-up users with three of scikit-learn's digits each, DP-FTRL, seconds.
    What is not given comes from the task; the run folder keeps what was used.

    Examples: noshuffle federated --epsilon 4 · noshuffle federated --task shakespeare --rounds 100
    · noshuffle federated --mechanism dp-fedavg --amplified · noshuffle federated --resume RUN
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
