"""`noshuffle train` and `noshuffle federated`: train privately, keep the evidence, draw the report.

The first sums over examples in the order of the data, the second over users that come when they
like, each of them protected.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from noshuffle.cli import start
from noshuffle.cli.federated_settings import FederatedSettings
from noshuffle.cli.from_record import given, takes
from noshuffle.cli.settings import KeptTrainSettings, RunOptions, TrainSettings
from noshuffle.cli.train_extension import TrainOptions, extend_run


@takes(given(TrainSettings), TrainOptions)
def train(stated: dict[str, Any], run: TrainOptions) -> int:
    """Train a model with differential privacy, in the natural order of the data.

    Without options: the digits that ship with scikit-learn, a small CNN, DP-FTRL, under a minute.
    What is not given comes from the data set; the run folder keeps what was used.
    """
    if run.extend is not None:
        settings, path = extend_run(run, stated)
    else:
        if run.resume is not None:  # an extension whose process was killed
            from noshuffle.release.extension import finish
            from noshuffle.release.folder import RunFolder

            finish(RunFolder(run.resume))
        settings, path = run.settings_and_folder("train", KeptTrainSettings, stated)
    with start.imports():
        from noshuffle.cli.job import run_job
        from noshuffle.cli.job_view import JobWords, run_and_tell

    job = partial(run_job, on_replay=run.on_replay)
    return run_and_tell("train", job, settings, path, run, JobWords())


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
