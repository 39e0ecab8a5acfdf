"""What a server stands on: its own parameters, and why it refuses a sum, a state or a cohort.

Keys and facts are bound as in central training (`training.binding`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from noshuffle.clipping import ClippedSum
from noshuffle.clipping.check import delicate, trainable
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.federated.cohort import UserId
from noshuffle.training import guard
from noshuffle.training.ledger import Ledger
from noshuffle.training.threshold import COUNT
from noshuffle.training.units import Ids, Seen


def own_parameters(given: nn.Module | Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """Copies of a module's trainable parameters, or of named tensors."""
    if isinstance(given, nn.Module):
        _refuse_statistics(given)
    named = trainable(given) if isinstance(given, nn.Module) else given
    own = {}
    for name, value in named.items():
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
    if isinstance(given, ClippedSum) and (given.bound > clip_norm or len(given.norms) > users):
        raise InvalidInput(
            f"the sum is of {len(given.norms)} deltas clipped to {given.bound:g}; at most {users} "
            f"clipped to {clip_norm:g} were expected"
        )
    values = given.values if isinstance(given, ClippedSum) else given
    found = {name: tuple(value.shape) for name, value in values.items()}
    if found != dict(shapes):
        raise InvalidInput(
            f"the sum must have the tensors {dict(shapes)}, got {found}; sum what clients sent"
        )
    own = {}
    for name in shapes:
        wide = torch.promote_types(values[name].dtype, torch.float32)
        own[name] = values[name].detach().to(wide, copy=True)
    length = math.sqrt(sum(float(v.double().square().sum()) for v in own.values()))
    if not length <= clip_norm * users * (1 + 1e-5):
        raise InvalidInput(
            f"{users} deltas of norm at most {clip_norm:g} cannot sum to norm {length:g}; clip "
            "every delta, then sum"
        )
    return own


def check_state(
    state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], *, rule: str
) -> None:
    """Raise if a saved state is of another model, or of another update rule."""
    saved = {name: tuple(value.shape) for name, value in state["model"].items()}
    for name in {**shapes, **saved}:
        if saved.get(name) != shapes.get(name):
            raise InvalidInput(
                f"this state was saved with {name!r} of shape {saved.get(name)}, the model has "
                f"{shapes.get(name)}; build the server with the model of the run"
            )
    if state.get("rule", rule) != rule:
        raise InvalidInput(
            f"this state was saved with the optimizer {state['rule']}, the server has {rule}; "
            "build it as it was"
        )


def why_not(ledger: Ledger, users: Sequence[UserId], units: Ids) -> str:
    """Why a cohort is refused, in the words of the caller, who knows names and not units."""
    step, rule = ledger.released, ledger.participation
    if rule.is_sampled:
        return (
            f"the cohort of round {step} is not the one that the secret sampler drew; ask exactly "
            "the users of server.sampler(population).draw(round)"
        )
    ids, seen = ledger.units()
    for user, unit in zip(users, units):
        at = int(np.searchsorted(ids, unit))
        if at == len(ids) or ids[at] != unit:
            continue
        one = Seen(*(a[at : at + 1] for a in (seen.first, seen.last, seen.count)))
        if not guard.is_admitted(rule, step=step, seen=one).all():
            first, last, count = (int(a[0]) for a in (one.first, one.last, one.count))
            why = guard.why_not(rule, step=step, first=first, last=last, count=count)
            return f"user {user!r} may not take part in round {step}: {why}; leave the user out"
    return f"the cohort of round {step} is not admitted by the plan; leave out whom it refuses"
