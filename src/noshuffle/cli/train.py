"""`noshuffle train`: train in the order of the data, keep the evidence, draw the report."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from noshuffle.cli import promise, start
from noshuffle.cli.from_record import check_fields, given, takes
from noshuffle.cli.settings import RunOptions, folder
from noshuffle.cli.train_settings import TrainSettings
from noshuffle.errors import one_of


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """Options of `noshuffle train`."""

    on_replay: str = folder(
        "auto", f"{promise.REPLAY_HELP}; auto: skip on cuda, else refuse",
        check=partial(one_of, ("auto", "refuse", "skip")),
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)


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

    job = partial(run_job, on_replay=run.on_replay)
    return run_and_tell("train", job, settings, path, run, JobWords())
