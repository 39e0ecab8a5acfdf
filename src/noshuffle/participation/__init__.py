"""What one unit (an example or a user) may do during a run.

A participation is the promise about the data order on which a guarantee rests. Sensitivity is a
maximum over every pattern of steps that it allows:

    SinglePass      one step, any
    Epochs          steps {j, j+b, j+2b, …}: the same order in every epoch
    AnyOrderEpochs  one step in every epoch, any; what Epochs means to independent noise
    MinSeparation   at most k steps, any two at least b apart (index difference)
    Restarted       the base pattern inside every block of `every` steps, and a new order, chosen
                    freely, in the next block (trees that restart)
    Poisson         each step independently with probability `rate` (secret coin flips)
    FixedSize       each step a uniform random subset of `batch` out of `population`
    CyclicPoisson   unit i belongs to group i mod `groups`; step t flips coins for group t mod
                    `groups` only
    BallsInBins     one secret uniform position for every unit, the same in every epoch
    TruncatedPoisson  as Poisson, batches cut to `cap` units at random

The last five are sampled: their guarantee needs the randomness of the draw. Under the first two
(and cut batches) only independent noise (DP-SGD) is accounted, under cyclic draws also noise of at
most `groups` bands, under secret positions any noise but that of trees.

>>> Epochs(epochs=20, steps_per_epoch=240).steps
4800
>>> MinSeparation(steps=976, separation=97, max_participations=20).most   # not 10: ⌈976/97⌉
11
"""

from __future__ import annotations

from typing import Any

from noshuffle.errors import InvalidInput, instance_of, one_of
from noshuffle.participation.base import Mask, Participation, Seen
from noshuffle.participation.draws import (
    BallsInBins,
    CyclicPoisson,
    FixedSize,
    Poisson,
    TruncatedPoisson,
)
from noshuffle.participation.patterns import (
    AnyOrderEpochs,
    Epochs,
    MinSeparation,
    Restarted,
    SinglePass,
    narrowed,
)

__all__ = [
    "AnyOrderEpochs",
    "BallsInBins",
    "CyclicPoisson",
    "Epochs",
    "FixedSize",
    "Mask",
    "MinSeparation",
    "Participation",
    "Poisson",
    "Restarted",
    "Seen",
    "SinglePass",
    "TruncatedPoisson",
    "from_dict",
    "narrowed",
]

_KINDS: dict[str, type[Participation]] = {
    cls.kind: cls
    for cls in (
        SinglePass,
        Epochs,
        AnyOrderEpochs,
        MinSeparation,
        Poisson,
        FixedSize,
        CyclicPoisson,
        BallsInBins,
        TruncatedPoisson,
        Restarted,
    )
}


def from_dict(record: dict[str, Any]) -> Participation:
    """The participation that `to_dict` wrote."""
    instance_of(dict, participation=record)
    fields = dict(record)
    kind = fields.pop("kind", None)
    one_of(tuple(_KINDS), **{"participation kind": kind})
    try:
        if kind == Restarted.kind:
            fields["participation"] = from_dict(fields["participation"])
        return _KINDS[kind](**fields)
    except (TypeError, KeyError, AttributeError) as problem:  # a field that is missing, or unknown
        raise InvalidInput(f"the participation {kind!r} cannot be read: {problem}") from None
