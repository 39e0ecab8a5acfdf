"""`noshuffle train`: train in the order of the data, keep the evidence, draw the report."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from noshuffle.cli import promise, start
from noshuffle.cli.from_record import given, takes
from noshuffle.cli.run_home import check_fork
from noshuffle.cli.settings import RunOptions, folder
from noshuffle.cli.train_settings import TrainSettings


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """Options of `noshuffle train`."""

    fork_of: Path | None = folder(None, promise.FORK_HELP, "--fork")

    def __post_init__(self) -> None:
        check_fork(self.fork_of, resume=self.resume)


@takes(given(TrainSettings), TrainOptions)
def train(stated: dict[str, Any], run: TrainOptions) -> int:
    """Train a model with differential privacy, in the natural order of the data.

    Without options: the digits that ship with scikit-learn, a small CNN, DP-FTRL, under a minute.
    What is not given comes from the data set; the run folder keeps what was used.
    """
    settings, path = run.settings_and_folder("train", TrainSettings, stated)
    with start.imports():
        from noshuffle.cli.job import run_job
        from noshuffle.cli.job_view import JobWords, run_and_tell

    job = partial(run_job, fork_of=run.fork_of)
    return run_and_tell("train", job, settings, path, run, JobWords())
