"""`noshuffle federated`: train over users that come when they like, each of them protected."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from noshuffle.cli import run_options as run
from noshuffle.cli.run_options import FOLDER, HOW, PRIVACY, option

_USERS, _SERVER, _CLIENT = "Rounds and users", "Server", "Clients"


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
        option(
            PRIVACY,
            "blt (default), tree, banded, … as in plan; best; dp-fedavg: independent noise",
        ),
    ] = None,
    amplified: Annotated[
        bool | None,
        option(PRIVACY, "dp-fedavg with secret Poisson sampling of users", "--amplified"),
    ] = None,
    epsilon: Annotated[
        float | None,
        option(PRIVACY, "target ε of a user (default 8)", "--epsilon", "--target-epsilon"),
    ] = None,
    noise_multiplier: Annotated[
        float | None, option(PRIVACY, "instead of ε: noise standard deviation / clip norm")
    ] = None,
    delta: run.Delta = None,
    clip: Annotated[
        str | None, option(PRIVACY, "bound on a user's update; or adaptive[:QUANTILE[:START]]")
    ] = None,
    rounds: Annotated[int | None, option(_USERS, "number of rounds")] = None,
    clients_per_round: Annotated[int | None, option(_USERS, "users asked a round")] = None,
    separation: Annotated[
        int | None, option(_USERS, "least difference of two rounds of one user (default: derived)")
    ] = None,
    max_participations: Annotated[
        int | None, option(_USERS, "most rounds one user may join (default: derived)")
    ] = None,
    order: Annotated[
        str | None,
        option(
            _USERS, "who comes first: random (default), year (drama: a drifting population), list"
        ),
    ] = None,
    check_in_rate: Annotated[
        float | None, option(_USERS, "share of users that check in, (0, 1] (default 1)")
    ] = None,
    drop_out: Annotated[
        float | None, option(_USERS, "share of asked users that do not answer, [0, 1) (default 0)")
    ] = None,
    server_optimizer: Annotated[
        str | None, option(_SERVER, "ftrl (default), sgd, momentum or adam")
    ] = None,
    server_lr: Annotated[
        float | None, option(_SERVER, "learning rate of the server (default 0.5)")
    ] = None,
    server_momentum: Annotated[
        float | None, option(_SERVER, "momentum of ftrl and momentum (default 0.9)")
    ] = None,
    cooldown: Annotated[
        float | None,
        option(_SERVER, "last part of the run with a falling server rate (default 0.25)"),
    ] = None,
    client_lr: Annotated[float | None, option(_CLIENT, "learning rate of a client")] = None,
    local_epochs: Annotated[int | None, option(_CLIENT, "passes over a user's data")] = None,
    local_steps: Annotated[int | None, option(_CLIENT, "most steps of a client")] = None,
    local_batch: Annotated[
        int | None, option(_CLIENT, "examples of a client's step (all, if the task names none)")
    ] = None,
    proximal: Annotated[float | None, option(_CLIENT, "μ of FedProx (default 0)")] = None,
    engine: Annotated[
        str | None, option(HOW, "process (default; in this one), or flower (its simulation)")
    ] = None,
    vectorise: Annotated[
        bool | None, option(HOW, "train clients together (default: where quicker)")
    ] = None,
    device: run.Device = None,
    seed: Annotated[
        int | None, option(HOW, "seed of initial weights and check-ins (public; default 0)")
    ] = None,
    test_seed: run.TestSeed = None,
    evaluate_every: Annotated[
        int | None, option(HOW, "rounds between evaluations (default: about 20 in all)")
    ] = None,
    baseline: Annotated[
        bool | None, option(HOW, "also train without noise, for comparison")
    ] = None,
    config: run.Config = None,
    json: run.Json = False,
    out: Annotated[
        Path | None, option(FOLDER, "where to (default runs/federated-TASK-TIME)")
    ] = None,
    resume: run.Resume = None,
    moved: run.Moved = False,
    checkpoint_every: Annotated[
        int | None,
        option(FOLDER, "rounds between checkpoints; a crash loses those since (default 1)"),
    ] = None,
) -> int:
    """Train over users with user-level differential privacy, without sampling them.

    Without options: 479 made-up users with three of scikit-learn's digits each, DP-FTRL, seconds.
    What is not given comes from the task; the run folder keeps what was used.

    Examples: noshuffle federated --epsilon 4 · noshuffle federated --task shakespeare --rounds 100
    · noshuffle federated --mechanism dp-fedavg --amplified · noshuffle federated --resume RUN
    """
    given = run.given_settings(locals())
    from noshuffle.cli.federated_settings import FederatedSettings

    settings, path = run.settings_and_folder(
        FederatedSettings.of,
        given,
        kind="federated",
        config=config,
        out=out,
        resume=resume,
        name=lambda made: f"federated-{made.task}",
    )
    return _run(settings, path, as_json=json, moved=moved)


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
