"""`noshuffle train`: train in the order of the data, keep the evidence, draw the report."""

from __future__ import annotations

from functools import partial
from typing import Any

from noshuffle.cli import start
from noshuffle.cli.from_record import given, takes
from noshuffle.cli.train_extension import TrainOptions, extend_run
from noshuffle.cli.train_settings import KeptTrainSettings, TrainSettings


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
