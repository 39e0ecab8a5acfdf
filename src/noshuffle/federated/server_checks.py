"""A server's copies of its parameters, and why it refuses a sum or a cohort."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from noshuffle.clipping import ClippedSum, Flat
from noshuffle.clipping.adaptive import QuantileClip
from noshuffle.clipping.check import delicate, trainable
from noshuffle.errors import InvalidInput, Unsupported, callables, instance_of, whole
from noshuffle.federated.cohort import UserId
from noshuffle.optim.checks import settings_of
from noshuffle.optim.constraints import joint_norm
from noshuffle.plan import Plan
from noshuffle.release.threshold import COUNT
from noshuffle.release.units import Guard, Ids


def check_parts(
    plan: Plan, *, clip: float | QuantileClip, cohort_size: int, optimizer_fn: object
) -> None:
    """What a server is built from, as far as it can be told before anything is written."""
    whole(cohort_size=cohort_size)
    instance_of(Plan, plan=plan)
    callables(optimizer_fn=optimizer_fn)
    if not isinstance(clip, QuantileClip):
        Flat(clip)  # checks the number
    if plan.unit != "user":
        raise InvalidInput(f"federated plans protect a user, got one {plan.unit}; unit='user'")


def own_parameters(given: nn.Module | Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """Copies of a module's trainable parameters, or of named tensors."""
    instance_of((nn.Module, Mapping), parameters=given)
    if isinstance(given, nn.Module):
        _refuse_statistics(given)
        given = trainable(given)
    own = {}
    for name, value in given.items():
        instance_of(Tensor, **{f"parameter {name!r}": value})
        if not value.is_floating_point():
            raise InvalidInput(f"{name!r} is {value.dtype}; only floating point can be trained")
        if name == COUNT:
            raise InvalidInput(f"{name!r} has a noise stream of its own; name the tensor otherwise")
        own[name] = nn.Parameter(value.detach().clone())
    if not own or len({p.device for p in own.values()}) != 1:
        raise InvalidInput("a server needs at least one trainable tensor, all on one device")
    return own


def _refuse_statistics(model: nn.Module) -> None:
    """Raise if a layer would learn statistics of users' data besides its parameters."""
    for name, layer in delicate(model):
        if getattr(layer, "track_running_stats", False) and layer.training:
            raise Unsupported(
                f"layer {name!r} ({type(layer).__name__}) keeps statistics of users' data, which "
                "clients do not send and no noise covers; use nn.GroupNorm, or set it to eval() if "
                "its statistics are public"
            )


def checked_sum(
    given: Mapping[str, Tensor] | ClippedSum,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    users: int,
    clip_norm: float,
) -> dict[str, Tensor]:
    """Copies, refused unless a cohort of this size could have summed to it.

    Half precision is raised to float32; what came in float64 stays so, since rounding a sum would
    let one user move it by more than the clip norm.
    """
    instance_of((Mapping, ClippedSum), **{"the sum": given})
    if isinstance(given, ClippedSum) and (given.bound > clip_norm or len(given.norms) > users):
        raise InvalidInput(
            f"the sum is of {len(given.norms)} deltas clipped to {given.bound:g}; at most {users} "
            f"clipped to {clip_norm:g} were expected"
        )
    values = given.values if isinstance(given, ClippedSum) else given
    instance_of(Tensor, **{f"{name!r} of the sum": value for name, value in values.items()})
    found = {name: tuple(value.shape) for name, value in values.items()}
    if found != dict(shapes):
        raise InvalidInput(
            f"the sum must have the tensors {dict(shapes)}, got {found}; sum what clients sent"
        )
    own = {}
    for name in shapes:
        wide = torch.promote_types(values[name].dtype, torch.float32)
        own[name] = values[name].detach().to(wide, copy=True)
    length = joint_norm(list(own.values()))
    if not length <= clip_norm * users * (1 + 1e-5):
        raise InvalidInput(
            f"{users} deltas of norm at most {clip_norm:g} cannot sum to norm {length:g}; clip "
            "every delta, then sum"
        )
    return own


def rule_of(optimizer: torch.optim.Optimizer) -> str:
    """An update rule that was just made: its name and its settings, but for those that are off.

    Read once, before a schedule moves them: what a server was built with is its builder's word.

    >>> rule_of(torch.optim.SGD([torch.zeros(1)], lr=0.5, momentum=0.9))
    'SGD(lr=0.5, momentum=0.9)'
    """
    groups = [
        ", ".join(f"{name}={_told(value)}" for name, value in group.items() if value)
        for group in settings_of(optimizer)
    ]
    return f"{type(optimizer).__name__}({'; '.join(groups)})"


def _told(value: object) -> str:
    """1 and 1.0 are one setting, and an object is known by its type alone."""
    if isinstance(value, int | float):
        return repr(float(value))
    return repr(value) if isinstance(value, str | tuple) else type(value).__name__


def why_not(guard: Guard, users: Sequence[UserId], units: Ids) -> str:
    """Why a cohort is refused, in the words of the caller, who knows names and not units."""
    step = guard.steps
    if guard.participation.is_sampled:
        return (
            f"the cohort of round {step} is not the one that the secret sampler drew; ask exactly "
            "the users of server.sampler(population).draw(round)"
        )
    at = int(np.flatnonzero(~guard.admits(units))[0])
    why = guard.why_not(int(units[at]))
    return f"user {users[at]!r} may not take part in round {step}: {why}; leave the user out"
