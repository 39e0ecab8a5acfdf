"""The main job: data, plan, model, private training, evidence, report."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path

import torch

from noshuffle.budget import Budget
from noshuffle.cli.budget import note_baseline
from noshuffle.cli.job_view import JobProgress, JobResult, Say, Stopped, Watch
from noshuffle.cli.run_home import begun
from noshuffle.cli.train_choices import PER_RESTART
from noshuffle.cli.train_parts import (
    loaded,
    make_model,
    make_optimizer,
    make_plan,
    make_scheduler,
    row_order,
)
from noshuffle.cli.train_settings import TrainSettings
from noshuffle.cli.train_task import TrainTask, task_of
from noshuffle.datasets import DataSet
from noshuffle.noise import test_source
from noshuffle.release.units import Ids
from noshuffle.report import write_report
from noshuffle.training import Private, RunFolder, fit_model, privatize
from noshuffle.training.batches import TensorBatches
from noshuffle.training.loop import Callback, StepProgress


def run_job(
    settings: TrainSettings,
    path: Path,
    *,
    fork_of: Path | None = None,
    watch: Watch | None = None,
    say: Say | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
    budget: Budget | None = None,
) -> JobResult:
    """Train (or resume) the run in `path`, write its evidence and its report.

    Raises `Stopped` after the step during which `is_stopped` came true; everything is saved then.
    """
    say = say or (lambda _: None)
    began = time.perf_counter()
    task, data = task_of(settings.task, loaded(settings, say))
    folder = RunFolder(path)
    model = make_model(settings, data)
    say("fitting the mechanism")
    plan = folder.plan() if folder.is_started else make_plan(settings, data)
    optimizer = make_optimizer(settings, model)
    order = _order(settings, data)  # refused, if it is, before there is a run
    told = {"draws_on_budget": budget is not None, "is_fork": fork_of is not None}
    with nullcontext() if folder.is_started else begun(folder, settings.to_dict(), **told):
        private = privatize(
            model,
            optimizer,
            plan,
            clip_norm=settings.clip_norm,
            batch_size=settings.batch_size,
            source=None if settings.test_seed is None else test_source(seed=settings.test_seed),
            run=folder,
            fork_of=fork_of,
            budget=budget,
            augment=settings.augment,
            average=settings.average or None,
        )
    if settings.unit == "user":
        private._parts.release.bind("public_order", "yes")  # statement and verify repeat it
    batches = _batches(settings, data, private, order)
    say("training")
    try:
        fit_model(
            private,
            batches,
            task.loss_fn,
            epochs=_passes(settings),
            evaluate=lambda m: {task.metric: task.score(m, data)},
            evaluate_every=max(1, plan.steps // settings.epochs),
            checkpoint_every=settings.checkpoint_every or _checkpoints(settings, data),
            scheduler=make_scheduler(settings, optimizer, plan.steps),
            callbacks=(_callback(task, watch, is_stopped),),
        )
    except BaseException:
        private.close()  # another process may go on with the folder
        raise
    score = task.score(model, data)
    test = {"words": f"held-out examples of {data.name}", "rows": len(data.x_test)}
    summary = {"kind": "summary", "step": private.steps_released, task.metric: score}
    about = {**test, "is_public": data.is_test_public}
    if private.average is not None:
        with private.average.in_place():
            averaged = task.score(model, data)
        summary[f"{task.metric}_of_average"] = averaged
        shown = f"{averaged:.4g}" if task.metric == "test_error" else f"{100 * averaged:.2f} %"
        say(f"average of iterates: {shown} on {test['words']}")
    private.close()
    folder.append_metrics({**summary, "test_data": about})
    write_report(path)
    baseline = None
    if settings.baseline:
        say("training once more without privacy, for comparison")
        note_baseline(budget, replace(plan, noise_multiplier=0.0).statement())
        baseline = _baseline(settings, task, data, plan.steps)
    return JobResult(
        path=path,
        plan=plan,
        statement=private.statement(),
        steps=private.steps_released,
        accuracy=None if task.metric == "test_error" else score,
        error=score if task.metric == "test_error" else None,
        baseline=baseline,
        seconds=time.perf_counter() - began,
    )


def _checkpoints(settings: TrainSettings, data: DataSet) -> int | None:
    """Where all passes are listed as one, every pass has a checkpoint still."""
    is_listed = settings.order == PER_RESTART
    return len(data) // settings.batch_size if is_listed else None


def _passes(settings: TrainSettings) -> int:
    """How often the batches are gone through: samples and changing orders are listed once."""
    is_listed = settings.sampling != "none" or settings.order == PER_RESTART
    return 1 if is_listed else settings.epochs


def _callback(task: TrainTask, watch: Watch | None, is_stopped: Callable[[], bool]) -> Callback:
    """Tells of every step, and stops behind one with everything saved."""
    began, done = time.perf_counter(), count(1)

    def after(where: StepProgress) -> None:
        if watch is not None:
            seconds, score = time.perf_counter() - began, where.metrics.get(task.metric)
            epsilon = None if score is None else where.epsilon  # it may take a while
            told = (score, None) if task.metric == "test_accuracy" else (None, score)
            watch(JobProgress(where.step, where.steps, next(done), seconds, epsilon, *told))
        if is_stopped() and where.step < where.steps:
            where.private.save()
            raise Stopped

    return after


def _order(settings: TrainSettings, data: DataSet) -> list[Ids] | None:
    """Rows of every batch, or None where they are drawn in secret."""
    return row_order(settings, data) if settings.sampling == "none" else None


def _batches(
    settings: TrainSettings, data: DataSet, private: Private, order: list[Ids] | None
) -> TensorBatches:
    tensors = (data.x_train.to(settings.device), data.y_train.to(settings.device))
    if order is None:
        return TensorBatches(tensors, private.sampler(len(data)))
    units = data.units.numpy() if settings.unit == "user" and data.units is not None else None
    return TensorBatches(tensors, order, units)


def _baseline(settings: TrainSettings, task: TrainTask, data: DataSet, steps: int) -> float:
    """The same model, order and optimizer without clipping and noise. Not private, not kept."""
    model = make_model(settings, data)
    optimizer = make_optimizer(settings, model)
    scheduler = make_scheduler(settings, optimizer, steps)
    # Raw gradients are not bounded by a clip norm: a fifth of the rate keeps them stable.
    for group in optimizer.param_groups:
        group["lr"] /= 5
    scheduler.base_lrs = [rate / 5 for rate in scheduler.base_lrs]
    order = row_order(settings, data)
    for step in range(steps):
        rows = torch.from_numpy(order[step % len(order)])
        x, y = data.x_train[rows].to(settings.device), data.y_train[rows].to(settings.device)
        optimizer.zero_grad()
        torch.autograd.backward(task.loss_fn(model(x), y))
        optimizer.step()
        scheduler.step()
    return task.score(model, data)
