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
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from noshuffle.clipping import Clip, Flat, PerExample, auto, validate
from noshuffle.clipping.adaptive import QuantileClip
from noshuffle.clipping.check import original, trainable
from noshuffle.errors import InvalidInput, Unsupported, instance_of, one_of, whole
from noshuffle.noise import Source
from noshuffle.optim.checks import check_optimizer, one_device
from noshuffle.plan import Plan
from noshuffle.release.account import Account
from noshuffle.release.folder import RunFolder
from noshuffle.release.release import Release
from noshuffle.release.spending import APART, INITIAL, TRIED
from noshuffle.training.augment import Augment, augment_of
from noshuffle.training.compiled import compiled_step
from noshuffle.training.private import Private
from noshuffle.training.step_parts import Engine, Parts


def privatize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    *,
    batch_size: int,
    clip_norm: float | None = None,
    clip: Clip | QuantileClip | None = None,
    reduce: str = "mean",
    engine: Engine | None = None,
    isolate: bool = False,
    source: Source | None = None,
    run: RunFolder | str | Path | None = None,
    fork_of: RunFolder | str | Path | None = None,
    save_every: float | None = None,
    on_violation: str = "refuse",
    compile: bool | str = "auto",
    budget: Account | None = None,
    augment: int | Augment | None = None,
    average: float | None = None,
) -> Private:
    """Bind a model, an optimizer and a plan.

    Arguments:
        batch_size: the constant that every noisy sum is divided by, whatever arrives.
        clip_norm, clip: bound on one unit's contribution; a number, or `Flat`, `PerLayer`,
            `QuantileClip` (follows a quantile; identity noise or trees that restart).
        reduce: how the examples of one user become one gradient, "mean" or "sum".
        engine: a clipping engine; by default the one that suits the model.
        isolate: keep examples apart by construction (vmap), which costs time. Otherwise the first
            batch of a kind is tested for examples that influence each other.
        source: where noise comes from; a fresh key of the operating system by default.
        run: a folder for log, checkpoints and statement; None keeps the log in memory.
        fork_of: the folder of a run that ends here, and whose cost this one adds to its own.
        save_every: seconds between two checkpoints of a run in a folder, which are written at the
            end of a step (0: of every one); by default the longer of a minute and twenty times what
            the last one took. One is also written when the process is asked to end, or ends.
        on_violation: "refuse" stops at a unit outside its participation, "drop" leaves it out.
        compile: "auto" captures `private.step` in CUDA graphs where that pays, True also has
            torch's compiler fuse it (some seconds more at the first step), False never does.
            `private.why` says what came of it.
        budget: what all runs on the same data draw on (`noshuffle.Budget`).
        augment: how many augmented copies of every row a step sees (images; or an `Augment`). They
            are one contribution of one row, so ε is the same; `private.step` then needs ids.
        average: decay of an average of iterates, `private.average`: post-processing, free.
    """
    if compile not in ("auto", True, False):
        raise InvalidInput(f"compile must be 'auto', True or False; got {compile!r}")
    one_of(("refuse", "drop"), on_violation=on_violation)
    one_of(("mean", "sum"), reduce=reduce)
    check_arguments(model, optimizer, plan, engine, clip_norm, clip, batch_size)
    bound: Any = clip if clip_norm is None else Flat(float(clip_norm))
    inner = original(model)
    parameters = trainable(inner)
    if engine is None:
        engine = auto(inner, isolate=isolate, planned=batch_size)
    elif isolate:
        raise InvalidInput("isolate goes without engine=; give engine=Ghost(isolate=True) instead")
    is_apart = isinstance(engine, PerExample) or getattr(engine, "isolate", False)
    # A distributed tensor, known by its mesh: the class itself takes seconds to import.
    if sharded := [name for name, p in parameters.items() if hasattr(p, "device_mesh")]:
        raise Unsupported(
            f"this version trains whole parameters on one device, {sharded[0]!r} is sharded; leave "
            "fully_shard out"
        )
    release = Release(
        plan,
        {name: tuple(p.shape) for name, p in parameters.items()},
        clip=bound,
        divisor=batch_size,
        device=one_device(parameters),
        run=run,
        fork_of=fork_of,
        source=source,
        facts={"initial": INITIAL, "isolation": APART if is_apart else TRIED},
        budget=budget,
    )
    try:
        parts = Parts(
            model=inner,
            parameters=parameters,
            optimizer=optimizer,
            engine=engine,
            release=release,
            groups_users=plan.unit == "user",
            reduce=reduce,
            drop=on_violation == "drop",
        )
        private = Private(
            model,
            plan,
            parts,
            augment=augment_of(augment),
            average=average,
            save_every=save_every,
        )
        private.compiled, private.not_compiled = compiled_step(parts, plan, wanted=compile)
    except BaseException:
        release.withdraw()
        release.log.close()
        raise
    return private


def check_arguments(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    engine: Engine | None,
    clip_norm: float | None,
    clip: Clip | QuantileClip | None,
    batch_size: int,
) -> None:
    """Refuse what no private run can be made of."""
    if dist.is_available() and dist.is_initialized() and (ranks := dist.get_world_size()) > 1:
        raise Unsupported(
            f"this version trains on one device, and torch.distributed has {ranks} ranks, of which "
            "each would train a run of its own; start one process, without torchrun"
        )
    whole(batch_size=batch_size)
    if (clip_norm is None) == (clip is None):
        raise InvalidInput("give exactly one of clip_norm and clip")
    if clip_norm is not None:
        Flat(clip_norm)  # checks the number
    elif not all(hasattr(clip, name) for name in ("groups", "bound")):
        instance_of(QuantileClip, **{"clip (a number goes to clip_norm)": clip})
    instance_of(nn.Module, model=model)
    instance_of(torch.optim.Optimizer, optimizer=optimizer)
    instance_of(Plan, plan=plan)
    if engine is not None and not hasattr(engine, "clipped_sum"):
        raise InvalidInput(
            f"engine must be a clipping engine such as noshuffle.clipping.Ghost(), got {engine!r}"
        )
    for name, p in model.named_parameters():
        if isinstance(p, nn.UninitializedParameter):
            raise InvalidInput(
                f"parameter {name!r} has no shape yet (a lazy layer); call the model on a made-up "
                "batch first, and make the optimizer after it"
            )
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise Unsupported(
            "DataParallel and DistributedDataParallel would add up raw gradients; privatize the "
            "module inside"
        )
    inner = original(model)
    validate(inner)
    check_optimizer(optimizer, trainable(inner))
