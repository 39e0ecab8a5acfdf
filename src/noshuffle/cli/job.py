"""The main job: data, plan, model, private training, evidence, report."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from noshuffle import datasets
from noshuffle.budget import Budget
from noshuffle.cli.budget import note_baseline
from noshuffle.cli.job_view import JobProgress, JobResult, Say, Stopped, Watch
from noshuffle.cli.kept_fit import kept_fit
from noshuffle.cli.mechanisms import mechanism_named
from noshuffle.cli.settings import TrainSettings
from noshuffle.cli.train_choices import PER_RESTART, composite_of, constraint_of, rows_in_order
from noshuffle.datasets import DataSet
from noshuffle.errors import InvalidInput
from noshuffle.noise import test_source
from noshuffle.optim import FTRL
from noshuffle.participation import (
    Epochs,
    FixedSize,
    MinSeparation,
    Participation,
    Poisson,
    Restarted,
)
from noshuffle.plan import Plan
from noshuffle.release.account import Account
from noshuffle.release.folder import take
from noshuffle.release.units import Ids
from noshuffle.report import write_report
from noshuffle.strategies import Strategy, release_sums
from noshuffle.strategies.workload import cooldown, momentum
from noshuffle.training import Private, RunFolder, fit_model, models, privatize
from noshuffle.training.batches import TensorBatches
from noshuffle.training.loop import Callback, StepProgress


def participation_of(settings: TrainSettings, data: DataSet) -> Participation:
    rows, batch = len(data), settings.batch_size
    if batch > rows:
        raise InvalidInput(f"batch_size must be at most the {rows} training rows, got {batch}")
    steps = settings.epochs * (rows // batch)
    if settings.sampling == "poisson":
        return Poisson(steps, batch / rows)
    if settings.sampling == "fixed":
        return FixedSize(steps, batch, rows)
    if settings.unit == "user":
        return _user_participation(settings, data, steps)
    whole = Epochs(settings.epochs, rows // batch)
    if settings.order != PER_RESTART or settings.restart_every is None:
        return whole
    if settings.restart_every % whole.steps_per_epoch:
        raise InvalidInput(
            f"restart_every must be whole passes of {whole.steps_per_epoch} steps where the order "
            f"changes, got {settings.restart_every}"
        )
    return Restarted(whole, settings.restart_every)


def _user_participation(settings: TrainSettings, data: DataSet, steps: int) -> Participation:
    """The tightest promise that the order of the rows keeps for users.

    Who comes when is treated as public here: the promise is read off the order of the ids.
    """
    if data.units is None:
        raise InvalidInput(f"{data.name} has no user ids; use --unit example")
    batch = settings.batch_size
    per_epoch = len(data) // batch
    step = torch.arange(per_epoch * batch) // batch
    # Distinct (user, step), sorted: the steps of a user stand together, in order.
    pairs = torch.unique(torch.stack([data.units[: per_epoch * batch], step], dim=1), dim=0)
    _, counts = torch.unique_consecutive(pairs[:, 0], return_counts=True)
    end = counts.cumsum(0)
    gaps = pairs[1:, 1] - pairs[:-1, 1]
    inside = gaps[pairs[1:, 0] == pairs[:-1, 0]]
    around = pairs[end - counts, 1] + per_epoch - pairs[end - 1, 1]  # over the end of an epoch
    found = torch.cat([inside, around]) if settings.epochs > 1 else inside
    separation = int(found.min()) if len(found) else per_epoch
    return MinSeparation(steps, max(separation, 1), int(counts.max()) * settings.epochs)


def make_plan(settings: TrainSettings, data: DataSet, strategy: Strategy | None = None) -> Plan:
    """The plan of a run; mechanisms by name are fitted here, unless they were before."""
    participation = participation_of(settings, data)
    if strategy is not None:
        return Plan.fit(
            participation, mechanism=strategy, epsilon=settings.epsilon, delta=settings.delta
        )
    mechanism: str | Strategy = "identity"
    if settings.sampling == "none":
        mechanism = mechanism_named(settings.mechanism)
    if mechanism == "release_sums":
        mechanism = release_sums()
    has_epochs = isinstance(participation, Epochs) and participation.epochs > 1
    if mechanism == "blt_tapped" and not has_epochs:
        mechanism = "blt"  # taps sit at epoch lags: without epochs there are none
    options: dict[str, Any] = {}
    if mechanism == "blt_tapped":
        # Two buffers are as good as more over several epochs; noise is shaped for the momentum.
        options = {"buffers": 2}
        if settings.optimizer in ("ftrl", "sgd"):
            options["workload"] = momentum(settings.momentum)
        mechanism, options = kept_fit(mechanism, participation, **options), {}
    if mechanism == "tree":
        options = {"restart_every": settings.restart_every, "completion": settings.completion}
    return Plan.fit(
        participation,
        mechanism=mechanism,
        epsilon=settings.epsilon,
        noise_multiplier=settings.noise_multiplier,
        delta=settings.delta,
        unit=settings.unit,
        **options,
    )


def make_model(settings: TrainSettings, data: DataSet) -> nn.Module:
    name = settings.model or models.default_for(data.kind, data.shape)
    torch.manual_seed(settings.seed)
    try:
        model = models.build(name, data.shape, data.classes)
        with torch.no_grad():
            model(torch.zeros_like(data.x_test[:1]))
    except (RuntimeError, IndexError):
        raise InvalidInput(
            f"model {name} does not fit {data.name}, whose examples have shape {data.shape}; "
            f"use {models.default_for(data.kind, data.shape)}"
        ) from None
    return model.to(settings.device)


def make_optimizer(settings: TrainSettings, model: nn.Module) -> torch.optim.Optimizer:
    params = [p for p in model.parameters() if p.requires_grad]
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "ftrl": partial(
            FTRL,
            momentum=settings.momentum,
            constraint=constraint_of(settings.constraint),
            composite=composite_of(settings.composite),
        ),
        "sgd": partial(torch.optim.SGD, momentum=settings.momentum),
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "adafactor": torch.optim.Adafactor,
    }
    _leave_compiler_out()
    return kinds[settings.optimizer](params, lr=settings.lr)


def _leave_compiler_out() -> None:
    """Do without torch's compiler, which nothing here uses for an optimizer.

    torch 2.11: the first call of these methods imports all of torch._dynamo (1.6 s) to tell it to
    leave them alone, unless they carry what it would have said.
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if method is not None and "torch._dynamo" not in sys.modules:
            method.__dict__.setdefault("__dynamo_disable", method)


def make_scheduler(
    settings: TrainSettings, optimizer: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Constant learning rate, then linear down over the last part of the run."""
    factors = cooldown(steps, last=settings.cooldown) if settings.cooldown else (1.0,) * steps
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factors[min(step, steps - 1)])


def accuracy_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Share of right answers on held-out data (of right characters for text)."""
    return float(right_answers(model, x, y).mean())


def right_answers(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, *, chunk: int = 1000
) -> torch.Tensor:
    """Of every held-out example, whether the answer is right (the share of its characters)."""
    device = next(model.parameters()).device
    right = []
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for begin in range(0, len(x), chunk):
            scores = model(x[begin : begin + chunk].to(device))
            target = y[begin : begin + chunk].to(device)
            right.append((scores.argmax(1) == target).double().reshape(len(target), -1).mean(1))
    model.train(was_training)
    return torch.cat(right).cpu()


def run_job(
    settings: TrainSettings,
    path: Path,
    *,
    keep_keys: bool = False,
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
    data = datasets.load(settings.data)
    folder = RunFolder(path)
    model = make_model(settings, data)
    say("fitting the mechanism")
    plan = folder.plan() if folder.is_started else make_plan(settings, data)
    if not folder.is_started:
        folder.write_config(settings.to_dict())
    lock = take(path)
    optimizer = make_optimizer(settings, model)
    private = privatize(
        model,
        optimizer,
        plan,
        clip_norm=settings.clip_norm,
        batch_size=settings.batch_size,
        source=None if settings.test_seed is None else test_source(seed=settings.test_seed),
        run=folder,
        budget=budget,
        augment=settings.augment,
        average=settings.average or None,
    )
    if settings.unit == "user":
        private.ledger.bind("public_order", "yes")  # a fact that statement and verify repeat
    batches = _batches(settings, data, private)
    say("training")
    statement = fit_model(
        private,
        batches,
        nn.CrossEntropyLoss(),
        epochs=_passes(settings),
        evaluate=lambda m: {"test_accuracy": accuracy_of(m, data.x_test, data.y_test)},
        evaluate_every=max(1, plan.steps // settings.epochs),
        checkpoint_every=settings.checkpoint_every or _checkpoints(settings, data),
        scheduler=make_scheduler(settings, optimizer, plan.steps),
        callbacks=(_callback(watch, is_stopped),),
    )
    accuracy = accuracy_of(model, data.x_test, data.y_test)
    test = {"words": f"held-out examples of {data.name}", "rows": len(data.x_test)}
    summary = {"kind": "summary", "step": private.steps_done, "test_accuracy": accuracy}
    about = {**test, "is_public": data.is_test_public}
    if private.average is not None:
        with private.average.in_place():
            averaged = accuracy_of(model, data.x_test, data.y_test)
        summary["test_accuracy_of_average"] = averaged
        say(f"average of iterates: {100 * averaged:.2f} % on {test['words']}")
    folder.append_metrics({**summary, "test_data": about})
    write_report(path)  # before the ledger is closed, which then knows of the page
    private.close(keep_keys=keep_keys)
    del lock  # another process may go on with the folder
    baseline = None
    if settings.baseline:
        say("training once more without privacy, for comparison")
        note_baseline(budget, replace(plan, noise_multiplier=0.0).statement())
        baseline = _baseline(settings, data, plan.steps)
    return JobResult(
        path=path,
        plan=plan,
        statement=statement,
        steps=private.steps_done,
        accuracy=accuracy,
        baseline=baseline,
        seconds=time.perf_counter() - began,
    )


def train_quietly(
    settings: TrainSettings, data: DataSet, plan: Plan, *, budget: Account
) -> nn.Module:
    """One run in memory, of which nothing but the model is left."""
    model = make_model(settings, data)
    optimizer = make_optimizer(settings, model)
    private = privatize(
        model,
        optimizer,
        plan,
        clip_norm=settings.clip_norm,
        batch_size=settings.batch_size,
        budget=budget,
    )
    fit_model(
        private,
        _batches(settings, data, private),
        nn.CrossEntropyLoss(),
        epochs=_passes(settings),
        scheduler=make_scheduler(settings, optimizer, plan.steps),
    )
    private.close()
    return model


def _checkpoints(settings: TrainSettings, data: DataSet) -> int | None:
    """Where all passes are listed as one, every pass has a checkpoint still."""
    is_listed = settings.order == PER_RESTART
    return len(data) // settings.batch_size if is_listed else None


def _passes(settings: TrainSettings) -> int:
    """How often the batches are gone through: samples and changing orders are listed once."""
    is_listed = settings.sampling != "none" or settings.order == PER_RESTART
    return 1 if is_listed else settings.epochs


def _callback(watch: Watch | None, is_stopped: Callable[[], bool]) -> Callback:
    """Tells of every step, and stops behind one with everything saved."""
    began, done = time.perf_counter(), count(1)

    def after(where: StepProgress) -> None:
        if watch is not None:
            seconds, accuracy = time.perf_counter() - began, where.metrics.get("test_accuracy")
            epsilon = None if accuracy is None else where.epsilon  # it may take a while
            watch(JobProgress(where.step, where.steps, next(done), seconds, epsilon, accuracy))
        if is_stopped() and where.step < where.steps:
            where.private.save()
            raise Stopped

    return after


def _batches(settings: TrainSettings, data: DataSet, private: Private) -> TensorBatches:
    tensors = (data.x_train.to(settings.device), data.y_train.to(settings.device))
    if settings.sampling != "none":
        return TensorBatches(tensors, private.sampler(len(data)))
    units = data.units.numpy() if settings.unit == "user" and data.units is not None else None
    return TensorBatches(tensors, _order(settings, data), units)


def _order(settings: TrainSettings, data: DataSet) -> list[Ids]:
    """Batches of one pass; of the whole run where the order changes at restarts."""
    per_epoch = len(data) // settings.batch_size
    every = settings.restart_every or settings.epochs * per_epoch
    blocks = -(-settings.epochs * per_epoch // every)
    found = rows_in_order(
        data, settings.order, batch=settings.batch_size, blocks=blocks, seed=settings.seed
    )
    if settings.order != PER_RESTART:
        return found
    passes = [found[k * per_epoch : (k + 1) * per_epoch] for k in range(blocks)]
    owner = [epoch * per_epoch // every for epoch in range(settings.epochs)]
    return [rows for block in owner for rows in passes[block]]


def _baseline(settings: TrainSettings, data: DataSet, steps: int) -> float:
    """The same model, order and optimizer without clipping and noise. Not private, not kept."""
    model = make_model(settings, data)
    optimizer = make_optimizer(settings, model)
    scheduler = make_scheduler(settings, optimizer, steps)
    # Raw gradients are not bounded by a clip norm: a fifth of the rate keeps them stable.
    for group in optimizer.param_groups:
        group["lr"] /= 5
    scheduler.base_lrs = [rate / 5 for rate in scheduler.base_lrs]
    order = _order(settings, data)
    for step in range(steps):
        rows = torch.from_numpy(order[step % len(order)])
        x, y = data.x_train[rows].to(settings.device), data.y_train[rows].to(settings.device)
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        scheduler.step()
    return accuracy_of(model, data.x_test, data.y_test)
