"""What a server stands on: its own parameters, and why it refuses a cohort.

Keys and facts are bound as in central training (`training.binding`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor, nn

from noshuffle.clipping.check import trainable
from noshuffle.errors import InvalidInput
from noshuffle.federated.cohort import UserId
from noshuffle.training import guard
from noshuffle.training.ledger import Ledger
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
