"""`noshuffle federated`: train over users that come when they like, each of them protected."""

from __future__ import annotations

from typing import Any

from noshuffle.cli import start
from noshuffle.cli.federated_settings import FederatedSettings
from noshuffle.cli.from_record import given, takes
from noshuffle.cli.settings import RunOptions


@takes(given(FederatedSettings), RunOptions)
def federated(stated: dict[str, Any], run: RunOptions) -> int:
    """Train over users with user-level differential privacy, without sampling them.

    Without options: 479 made-up users with three of scikit-learn's digits each, DP-FTRL, seconds.
    What is not given comes from the task; the run folder keeps what was used.

    Examples: noshuffle federated --epsilon 4 · noshuffle federated --task shakespeare --rounds 100
    · noshuffle federated --mechanism dp-fedavg --amplified · noshuffle federated --resume RUN
    """
    settings, path = run.settings_and_folder("federated", FederatedSettings, stated)
    with start.imports():
        from noshuffle.cli.federated_job import run_job
        from noshuffle.cli.job_view import JobWords, run_and_tell

    words = JobWords("round", "ε per user ≤", "accuracy on held-out users")
    return run_and_tell("federated", run_job, settings, path, run, words)
