"""What a training job is made of, from its settings: plan, model, optimizer, order of the rows."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from noshuffle import datasets
from noshuffle.cli.kept_fit import kept_fit
from noshuffle.cli.mechanisms import mechanism_named
from noshuffle.cli.train_choices import PER_RESTART, composite_of, constraint_of, rows_in_order
from noshuffle.cli.train_settings import TrainSettings
from noshuffle.clipping.check import evaluated
from noshuffle.datasets import DataSet
from noshuffle.errors import InvalidInput, one_of
from noshuffle.optim import FTRL
from noshuffle.participation import (
    BallsInBins,
    CyclicPoisson,
    Epochs,
    FixedSize,
    MinSeparation,
    Participation,
    Poisson,
    Restarted,
    TruncatedPoisson,
)
from noshuffle.plan import Plan
from noshuffle.release.units import Ids
from noshuffle.strategies import Strategy, release_sums
from noshuffle.strategies.workload import cooldown, momentum
from noshuffle.training import models

#: Held-out rows that are scored together.
CHUNK = 1000


def participation_of(settings: TrainSettings, data: DataSet) -> Participation:
    rows, batch = len(data), settings.batch_size
    if batch > rows:
        raise InvalidInput(f"batch_size must be at most the {rows} training rows, got {batch}")
    steps = settings.epochs * (rows // batch)
    if settings.sampling != "none":
        return _drawn(settings, rows)
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


def _drawn(settings: TrainSettings, rows: int) -> Participation:
    """The participation of a kind of secret draws."""
    batch, epochs = settings.batch_size, settings.epochs
    per_epoch = rows // batch
    steps, kind = epochs * per_epoch, settings.sampling
    apart = settings.separation or max(1, per_epoch // 8)
    if kind == "fixed":
        return FixedSize(steps, batch, rows)
    if kind == "truncated":
        return TruncatedPoisson.of(steps=steps, batch=batch, population=rows)
    if kind == "cyclic":
        return CyclicPoisson.of(steps=steps, groups=apart, batch=batch, population=rows)
    if kind == "bins":
        return BallsInBins(epochs, per_epoch)
    return Poisson(steps, batch / rows)


def _user_participation(settings: TrainSettings, data: DataSet, steps: int) -> Participation:
    """The tightest promise that the order of the rows keeps for users.

    Who comes when is treated as public here: the promise is read off the order of the ids.
    """
    if data.units is None:
        raise InvalidInput(f"{data.name} has no user ids; use --unit example")
    batch = settings.batch_size
    per_epoch = len(data) // batch
    step = torch.arange(per_epoch * batch, device="cpu") // batch
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


def make_plan(settings: TrainSettings, data: DataSet) -> Plan:
    """The plan of a run; mechanisms by name are fitted here, unless they were before."""
    participation = participation_of(settings, data)
    mechanism: str | Strategy = mechanism_named(settings.mechanism)
    if settings.sampling == "cyclic" and mechanism == "banded":
        mechanism = "best"  # as many bands as lie between two turns
    if mechanism == "release_sums":
        mechanism = release_sums()
    has_epochs = isinstance(participation, Epochs | BallsInBins) and participation.epochs > 1
    if mechanism == "blt_tapped" and not has_epochs:
        mechanism = "blt"  # taps sit at epoch lags: without epochs there are none
    options: dict[str, Any] = {}
    if mechanism == "blt_tapped":
        # Two buffers are as good as more over several epochs; noise is shaped for the momentum.
        options = {"buffers": 2}
        if settings.optimizer in ("ftrl", "sgd"):
            options["workload"] = momentum(settings.momentum)
        order = participation.in_order if isinstance(participation, BallsInBins) else participation
        mechanism, options = kept_fit(mechanism, order, **options), {}
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


def loaded(settings: TrainSettings, say: Callable[[str], None] = lambda _: None) -> DataSet:
    """The data set, or fixed features of its images: each row by itself, so ε does not change."""
    data = datasets.load(settings.data)
    if not len(data.x_test):  # found out after the last step, it would leave a run without a seal
        raise InvalidInput(f"{data.name} has no held-out examples to try the model on; give some")
    if not settings.features:
        return data
    from noshuffle.features import fixed  # only where it is asked for

    shape = data.shape
    if data.kind != "image" or len(shape) != 3 or shape[1] != shape[2]:
        raise InvalidInput(
            f"--features needs square images, those of {data.name} are {data.kind} rows of shape "
            f"{shape}; leave it out"
        )
    one_of(("scattering", "mirrored", "patches"), features=settings.features.partition(":")[0])
    made = fixed(settings.features, channels=shape[0], side=shape[1], device=settings.device)

    many, told = len(data) + len(data.x_test), [time.monotonic(), 0.0]
    say(f"Features of {many:,} images: {settings.features}.")

    def transformed(images: Tensor) -> Tensor:
        out = torch.empty(
            len(images), *made(images[:1].to(settings.device)).shape[1:], device="cpu"
        )
        for at in range(0, len(images), CHUNK):
            part = images[at : at + CHUNK].to(settings.device)
            out[at : at + CHUNK] = made(part)
            told[1] += len(part)
            if time.monotonic() > told[0] + 10:  # seconds
                told[0] = time.monotonic()
                say(f"features of {told[1]:,.0f} of {many:,} images")
        return out

    return replace(
        data, x_train=transformed(data.x_train), x_test=transformed(data.x_test), kind="features"
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
    last = settings.cooldown
    factors = tuple(cooldown(steps, last=last)) if last else (1.0,) * steps
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factors[min(step, steps - 1)])


def row_order(settings: TrainSettings, data: DataSet) -> list[Ids]:
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


def accuracy_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Share of right answers on held-out data (of right characters for text)."""
    right = torch.cat([
        (scores.argmax(1) == target).double().reshape(len(target), -1).mean(1)
        for scores, target in answers(model, x, y)
    ])  # fmt: skip
    return float(right.cpu().mean())


def answers(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Outputs in eval mode and targets of held-out examples, some at a time."""
    device = next(model.parameters()).device
    with evaluated(model), torch.no_grad():
        for begin in range(0, len(x), CHUNK):
            part, target = (t[begin : begin + CHUNK].to(device) for t in (x, y))
            yield model(part), target
