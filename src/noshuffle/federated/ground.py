"""What a server stands on: its own parameters, its keys, the facts it is bound to, its refusals.

Free functions for `server`; the facts are those that central training writes, so that one
`verify` reads both kinds of run folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from noshuffle.clipping import Flat
from noshuffle.clipping.adaptive import QuantileClip
from noshuffle.clipping.check import trainable
from noshuffle.errors import InvalidInput
from noshuffle.federated.cohort import UserId
from noshuffle.noise import Source, new_key
from noshuffle.plan import Plan
from noshuffle.training import guard
from noshuffle.training.ledger import Ledger
from noshuffle.training.run_folder import Keys, RunFolder
from noshuffle.training.sampler import new_sampling_key
from noshuffle.training.units import Ids, Seen


def own_parameters(given: nn.Module | Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """Copies of a module's trainable parameters, or of named tensors."""
    named = trainable(given) if isinstance(given, nn.Module) else given
    own = {}
    for name, value in named.items():
        if not value.is_floating_point():
            raise InvalidInput(f"{name!r} is {value.dtype}; only floating point can be trained")
        own[name] = nn.Parameter(value.detach().clone())
    if not own or len({p.device for p in own.values()}) != 1:
        raise InvalidInput("a server needs at least one trainable tensor, all on one device")
    return own


def check_optimizer(optimizer: torch.optim.Optimizer, own: Mapping[str, nn.Parameter]) -> None:
    """The update rule moves exactly the parameters that get clipped and noised."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held != {id(p) for p in own.values()}:
        raise InvalidInput(
            f"optimizer_fn must hold exactly the parameters it is given ({len(own)}), it holds "
            f"{len(held)}; pass the whole list on"
        )


def keys_of(
    folder: RunFolder | None, plan: Plan, source: Source | None, device: torch.device
) -> Keys:
    """The secrets of a run: those in its folder, or the source given, or fresh ones."""
    if folder is not None and folder.key_file.exists() and source is None:
        source = folder.keys().source
    source = (source if source is not None else Source(new_key())).on(device)
    if folder is None:
        return Keys(source, new_sampling_key())
    return folder.begin(plan, source=source)


def bind_facts(
    ledger: Ledger, plan: Plan, source: Source, *, clip: Flat | QuantileClip, cohort_size: int
) -> None:
    """What may not change while a run lives; the same facts as in central training."""
    if ledger.meta("forked"):
        raise InvalidInput(
            f"this run was forked after {ledger.meta('forked')} steps and may not go on itself; "
            "continue the fork"
        )
    ledger.bind("plan", plan.hash)
    ledger.bind("key", source.fingerprint)
    ledger.bind("test_key", "yes" if source.is_test else "no")
    ledger.bind("clip", repr(clip))
    ledger.bind("batch_size", str(cohort_size))
    ledger.bind("adaptive_clip", "yes" if isinstance(clip, QuantileClip) else "no")


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
