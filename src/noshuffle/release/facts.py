"""What a run is tied to from its first step on: its update rule, its keys, the facts in its ledger.

Central, distributed and federated training bind the same facts by the same functions, so that one
`verify` reads every run folder, and one refusal says the same thing everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from noshuffle.clipping import Clip
from noshuffle.clipping.adaptive import QuantileClip
from noshuffle.errors import InvalidInput, Unsupported, instance_of
from noshuffle.noise import Source, new_key
from noshuffle.noise.stream import VERSION
from noshuffle.plan import Plan
from noshuffle.release.fingerprint import FORM, of_batch
from noshuffle.release.folder import Keys, RunFolder
from noshuffle.release.ledger import Ledger
from noshuffle.release.sampler import new_sampling_key
from noshuffle.release.units import Ids

#: The fact, and its value, that the rounds of a ledger have prints of this form.
ROUND_PRINTS = ("round_prints", "of the units in order")


def check_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> None:
    """The optimizer moves exactly the parameters that are clipped and noised."""
    instance_of(torch.optim.Optimizer, optimizer=optimizer)
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise Unsupported(
            f"{kind} asks for the loss several times a step, and every answer would need noise of "
            "its own; use another optimizer"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise Unsupported(f"{kind} takes sparse gradients, and private ones are dense; use Adam")
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


def one_device(parameters: Mapping[str, nn.Parameter]) -> torch.device:
    """The device that all parameters are on."""
    devices = {p.device for p in parameters.values()}
    if len(devices) != 1:
        raise Unsupported(f"all parameters must be on one device, got {sorted(map(str, devices))}")
    return devices.pop()


def keys_of(
    folder: RunFolder | None, plan: Plan, source: Source | None, device: torch.device
) -> Keys:
    """The secrets of a run: those in its folder, or the source given, or fresh ones."""
    if source is not None and not isinstance(source, Source):
        raise InvalidInput(
            f"source must be a noshuffle.noise.Source, got {type(source).__name__}; leave it out "
            "for a fresh key"
        )
    if folder is not None and folder.key_file.exists() and source is None:
        source = folder.keys().source
    source = (source if source is not None else Source(new_key())).on(device)
    if folder is None:
        return Keys(source, new_sampling_key())
    return folder.begin(plan, source=source)


def bind_facts(
    ledger: Ledger, plan: Plan, source: Source, *, clip: Clip | QuantileClip, batch_size: int
) -> None:
    """What may not change while a run lives. `batch_size` is the planned divisor."""
    if ledger.meta("forked"):
        raise InvalidInput(
            f"this run was forked after {ledger.meta('forked')} steps and may not go on itself; "
            "continue the fork"
        )
    if ledger.released and ledger.meta("prints") != FORM:
        raise InvalidInput(
            "the fingerprints of this run were written by another version of noshuffle and cannot "
            "be compared with those of this one; go on with that version, or fork the run"
        )
    if ledger.released and ledger.meta("noise") != str(VERSION):
        # A step on record would be repeated with other numbers: the same sum under a second noise.
        raise InvalidInput(
            "this run was begun by another version of noshuffle, whose noise has other numbers "
            f"({ledger.meta('noise') or 'not written down'} there, {VERSION} here); go on with "
            "that version, or fork the run"
        )
    ledger.bind("prints", FORM)
    ledger.bind("noise", str(VERSION))
    ledger.bind("plan", plan.hash)
    ledger.bind("key", source.fingerprint)
    ledger.bind("test_key", "yes" if source.is_test else "no")
    ledger.bind("clip", repr(clip))
    ledger.bind("batch_size", str(batch_size))
    ledger.bind("adaptive_clip", "yes" if isinstance(clip, QuantileClip) else "no")


def round_print(step: int, units: Ids, *, secret: bytes) -> bytes:
    """What stands for the data of a federated round, which its server never sees: who was asked.

    In order of their numbers, as the ledger lists them, so that `verify` can work it out again.
    """
    return of_batch(("federated", step), np.sort(units), secret=secret)
