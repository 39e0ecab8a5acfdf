"""privatize: check and assemble everything that a private run is made of.

The model must keep examples apart, the optimizer must hold exactly the trainable parameters, the
plan decides noise and participation, and the run folder (if any) must belong to this plan and key.

>>> import torch
>>> from noshuffle import Plan, SinglePass
>>> plan = Plan.fit(SinglePass(steps=3), mechanism="tree", noise_multiplier=2.0)
>>> model = torch.nn.Linear(2, 1)
>>> privatize(model, torch.optim.SGD([model.bias], lr=0.1), plan, clip_norm=1.0, batch_size=4)
Traceback (most recent call last):
    ...
noshuffle.errors.InvalidInput: parameter 'weight' is trainable but not in the optimizer; \
add it, or freeze it with requires_grad_(False)
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from noshuffle.clipping import Clip, Flat, auto, validate
from noshuffle.clipping.adaptive import QuantileClip
from noshuffle.clipping.check import original, trainable
from noshuffle.errors import InvalidInput, Unsupported, one_of, whole
from noshuffle.noise import NoiseStream, Source, new_key
from noshuffle.plan import Plan
from noshuffle.training.fingerprint import secret_of
from noshuffle.training.ledger import Ledger
from noshuffle.training.private import Private
from noshuffle.training.run_folder import Keys, RunFolder
from noshuffle.training.sampler import new_sampling_key
from noshuffle.training.step import Engine, Parts
from noshuffle.training.threshold import threshold_for


def privatize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    *,
    batch_size: int,
    clip_norm: float | None = None,
    clip: Clip | QuantileClip | None = None,
    unit: str | None = None,
    reduce: str = "mean",
    engine: Engine | None = None,
    source: Source | None = None,
    run: RunFolder | str | Path | None = None,
    on_violation: str = "refuse",
    loss_reduction: str = "mean",
) -> Private:
    """Bind a model, an optimizer and a plan.

    Arguments:
        batch_size: the constant that every noisy sum is divided by, whatever arrives.
        clip_norm, clip: bound on one unit's contribution; a number, or `Flat`, `PerLayer`,
            or `QuantileClip` (follows a quantile; identity noise or trees that restart).
        unit: said again to be safe; must equal the plan's ("example" or "user").
        reduce: how the examples of one user become one gradient, "mean" or "sum".
        engine: a clipping engine; by default the one that suits the model.
        source: where noise comes from; a fresh key of the operating system by default.
        run: a folder for ledger, checkpoints and statement; None keeps the ledger in memory.
        on_violation: "refuse" stops at a unit outside its participation, "drop" leaves it out.
        loss_reduction: how losses are reduced in the `loss.backward()` form, "mean" or "sum".
    """
    whole(batch_size=batch_size)
    one_of(("refuse", "drop"), on_violation=on_violation)
    one_of(("mean", "sum"), reduce=reduce, loss_reduction=loss_reduction)
    if (clip_norm is None) == (clip is None):
        raise InvalidInput("give exactly one of clip_norm and clip")
    if unit not in (None, plan.unit):
        raise InvalidInput(f"the plan protects one {plan.unit}, got unit={unit!r}; fit it again")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise Unsupported(
            "DataParallel and DistributedDataParallel would add up raw gradients; privatize the "
            "module inside"
        )
    inner = original(model)
    validate(inner)
    parameters = trainable(inner)
    _check_optimizer(optimizer, parameters)
    device = _one_device(parameters)
    bound_to = clip if clip is not None else Flat(float(clip_norm))  # type: ignore[arg-type]
    folder = run if isinstance(run, RunFolder) or run is None else RunFolder(run)
    keys = _keys(folder, plan, source, device)
    path = None if folder is None else folder.ledger_file
    ledger = Ledger(plan.participation, path=path, unit=plan.unit)
    _bind(ledger, plan, keys.source, bound_to, batch_size)
    threshold = threshold_for(bound_to, plan, keys.source)
    noise = NoiseStream(
        plan.strategy.recipe(plan.steps),
        keys.source,
        {name: tuple(p.shape) for name, p in parameters.items()},
        scale=threshold.noise_scale(plan, tuple(parameters)),
        steps=plan.steps,
        device=device,
    )
    parts = Parts(
        model=inner,
        parameters=parameters,
        optimizer=optimizer,
        engine=engine if engine is not None else auto(inner),
        threshold=threshold,
        noise=noise,
        ledger=ledger,
        planned_batch=batch_size,
        groups_users=plan.unit == "user",
        reduce=reduce,
        drop=on_violation == "drop",
        secret=secret_of(keys.source.key),
    )
    private = Private(model, plan, parts, keys=keys, run=folder, loss_reduction=loss_reduction)
    private.write_statement()
    return private


def _check_optimizer(optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]) -> None:
    """The optimizer moves exactly the parameters that are clipped and noised."""
    given = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    missing = [name for name, p in parameters.items() if id(p) not in given]
    if missing:
        raise InvalidInput(
            f"parameter {missing[0]!r} is trainable but not in the optimizer; add it, or freeze it "
            "with requires_grad_(False)"
        )
    if len(given) > len(parameters):
        raise InvalidInput(
            "the optimizer has trainable parameters that do not belong to the model; their "
            "gradients would not be private"
        )


def _one_device(parameters: dict[str, nn.Parameter]) -> torch.device:
    devices = {p.device for p in parameters.values()}
    if len(devices) != 1:
        raise Unsupported(f"all parameters must be on one device, got {sorted(map(str, devices))}")
    return devices.pop()


def _keys(
    folder: RunFolder | None, plan: Plan, source: Source | None, device: torch.device
) -> Keys:
    if folder is not None and folder.key_file.exists() and source is None:
        source = folder.keys().source
    source = (source if source is not None else Source(new_key())).on(device)
    if folder is None:
        return Keys(source, new_sampling_key())
    return folder.begin(plan, source=source)


def _bind(
    ledger: Ledger, plan: Plan, source: Source, clip: Clip | QuantileClip, batch_size: int
) -> None:
    """What may not change while a run lives."""
    if ledger.meta("forked"):
        raise InvalidInput(
            f"this run was forked after {ledger.meta('forked')} steps and may not go on itself; "
            "continue the fork"
        )
    ledger.bind("plan", plan.hash)
    ledger.bind("key", source.fingerprint)
    ledger.bind("test_key", "yes" if source.is_test else "no")
    ledger.bind("clip", repr(clip))
    ledger.bind("batch_size", str(batch_size))
    ledger.bind("adaptive_clip", "yes" if isinstance(clip, QuantileClip) else "no")
