"""`noshuffle train`: train privately, show progress, keep the evidence, draw the report."""

from __future__ import annotations

from typing import Any

from noshuffle.cli.from_record import given, takes
from noshuffle.cli.run_settings import RunOptions
from noshuffle.cli.settings import TrainSettings


@takes(given(TrainSettings), RunOptions)
def train(stated: dict[str, Any], run: RunOptions) -> int:
    """Train a model with differential privacy, in the natural order of the data.

    Without options: the digits that ship with scikit-learn, a small CNN, DP-FTRL, under a minute.
    What is not given comes from the data set; the run folder keeps what was used.
    """
    settings, path = run.settings_and_folder("train", TrainSettings, stated)
    from noshuffle.cli.job import run_job
    from noshuffle.cli.job_view import JobWords, run_and_tell

    return run_and_tell("train", run_job, settings, path, run, JobWords())
