"""Train the runs of one cell one after the other: a line of a task, several ε, rates or trials.

    order    rows of the file, pass after pass, in one order; sampled lines: secret draws of the run
    noise    that of `fitted` for the line's participation at ε; none, and no clip, if not private
    scores   accuracy of the last iterate, and of the average of iterates (decay 0.99), on rows that
             were not trained on: held-out training rows in a search, test rows in the end

Guarantees: each run by itself is private with its ε (`one_run`). What all of them cost together,
and choosing among them, is not counted. State: the data on the device.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from noshuffle.datasets import load
from noshuffle.errors import DataUnavailable, InvalidInput
from noshuffle.experiments import fitted, one_run
from noshuffle.experiments.figure import Request
from noshuffle.experiments.lines import StudyLine, StudyTask
from noshuffle.experiments.runner import to_stderr
from noshuffle.features import fixed
from noshuffle.participation import Epochs
from noshuffle.plan import Plan
from noshuffle.strategies import identity
from noshuffle.strategies.workload import cooldown
from noshuffle.training.models import build

DECAY = 0.99
#: Rows whose features are told of by a digest.
DIGESTED = 100
#: Clip norm of runs without privacy.
UNCLIPPED = 1e6


class StudyRows:
    """The rows that a cell trains and scores on, on its device."""

    def __init__(self, task: StudyTask, asked: Request, *, is_search: bool) -> None:
        data = _data(task.data, task.stands_in, asked.device, task.features)
        self.name, self.classes, self.features = data[:3]
        x, y, x_test, y_test = data[3:]
        self.shape = tuple(x.shape[1:])
        whole = task.rows or len(x)
        if not task.held_out < whole <= len(x):
            raise InvalidInput(f"{task.name} needs {whole} training rows, {len(x)} are there")
        cut = whole - task.held_out if is_search else whole
        self.x, self.y = x[:cut], y[:cut]
        self.scored = (x[cut:whole], y[cut:whole]) if is_search else (x_test, y_test)


@cache
def _data(name: str, stands_in: str, device: str, features: str) -> tuple[Any, ...]:
    """Name, classes, features and tensors of a data set, or of the one that stands in for it.

    Features are told with a digest: that searches and final figures had the same ones.
    """
    try:
        found = load(name)
    except DataUnavailable:
        if not stands_in:
            raise
        found = load(stands_in)
    x, y, x_test, y_test = (
        part.to(device) for part in (found.x_train, found.y_train, found.x_test, found.y_test)
    )
    if features:
        channels, side = x.shape[1:3]
        transform = fixed(features, channels=channels, side=side, device=device, say=to_stderr)
        x, x_test = transform(x), transform(x_test)
        told = hashlib.sha256(x[:DIGESTED].cpu().numpy().tobytes()).hexdigest()[:16]
        features = f"{features}, {x[0].numel()} numbers, {told}"
    return found.name, found.classes, features, x, y, x_test, y_test


def train(
    task: StudyTask,
    line: StudyLine,
    runs: Sequence[tuple[float, float, int]],
    asked: Request,
    *,
    is_search: bool,
) -> dict[str, Any]:
    """Train (ε, learning rate, trial) for every run; scores and how they were made, as JSON."""
    began, settings = time.perf_counter(), asked.settings
    rows = StudyRows(task, asked, is_search=is_search)
    epochs, per_epoch = task.layout(len(rows.x), line.times)
    steps, batch = epochs * per_epoch, task.batch * line.times
    seed = settings["search_seed"] if is_search else settings["first_seed"]
    is_fast = asked.device.startswith("cuda")
    if is_fast:
        torch.backends.cudnn.benchmark = True
    records, form = [], ""
    for epsilon, rate, trial in runs:
        plan = Plan(
            participation=Epochs(epochs, per_epoch), strategy=identity(), noise_multiplier=0.0
        )
        if line.fit:
            plan = fitted.plan(
                line.fit_at(epsilon),
                epochs=epochs,
                per_epoch=per_epoch,
                epsilon=epsilon,
                delta=settings["delta"],
                rate=batch / len(rows.x),
            )
        private = one_run.train(
            lambda: build(task.model, rows.shape, rows.classes),
            plan,
            rows.x,
            rows.y,
            np.arange(len(rows.x)),
            batch_size=batch,
            clip_norm=settings["clip_norm"] if line.fit else UNCLIPPED,
            learning_rate=rate,
            momentum=line.momentum,
            learning_rates=cooldown(steps, last=settings["cooldown"]),
            seed=seed + trial,
            augment=task.augment or None,
            average=DECAY,
            half=task.half and is_fast,
        )
        assert private.average is not None
        last = one_run.accuracy(private.model, *rows.scored)
        with private.average.in_place():
            averaged = one_run.accuracy(private.model, *rows.scored)
        records.append(
            {
                "epsilon": epsilon,
                "learning_rate": rate,
                "trial": trial,
                "seed": seed + trial,
                "strategy": plan.strategy.words(),
                "noise_multiplier": plan.noise_multiplier,
                "noise_rms": fitted.predicted(plan, momentum=line.momentum) if line.fit else 0.0,
                "accuracy": last,
                "averaged": averaged,
            }
        )
        form = private.why
        if is_fast:
            del private
            gc.collect()  # a captured graph refers to itself, and its memory is large
            torch.cuda.empty_cache()
    return {
        "runs": records,
        "title": task.title,
        "data": rows.name,
        "features": rows.features,
        "rows": len(rows.x),
        "steps": steps,
        "batch": batch,
        "epochs": epochs,
        "delta": settings["delta"],
        "form": form,
        "seconds": round(time.perf_counter() - began, 2),
    }
