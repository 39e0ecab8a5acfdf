"""The participation guard: which units of a batch the plan admits at this step.

A guarantee is a maximum over the patterns of steps that a participation allows, so a unit outside
its pattern makes the stated ε false. The rules, for a unit first seen at step j and last at l:

    SinglePass      never seen before
    Epochs          t = j + i·b for a whole i ≥ 1, and t > l
    AnyOrderEpochs  l lies in an earlier epoch
    MinSeparation   t − l ≥ b, and seen fewer than k times
    Restarted       the rule of its base; for Epochs, j starts anew in every block of steps
    sampled         exactly the units that the secret sampler drew for this step

Everything works on whole batches; nothing is kept here (see `units` for the table).

>>> from noshuffle.participation import Epochs
>>> seen = Seen(first=np.array([0, 1]), last=np.array([0, 1]), count=np.array([1, 1]))
>>> is_admitted(Epochs(epochs=3, steps_per_epoch=2), step=2, seen=seen)
array([ True, False])
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noshuffle.errors import ParticipationViolation, Unsupported
from noshuffle.participation import (
    AnyOrderEpochs,
    Epochs,
    MinSeparation,
    Participation,
    Restarted,
    SinglePass,
)
from noshuffle.release.unit_index import in_order, increases
from noshuffle.release.units import Ids, Record, Seen, Spread, UnitTable

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Admission:
    """Leave to release a step: the units admitted, and which rows of the batch are theirs.

    `keep` is one truth value per row (None: all of them); `is_empty` says that nothing of the
    batch may be used, and noise alone is released.
    """

    step: int
    batch: bytes
    identified_by: str
    units: Ids
    keep: Mask | None = None
    is_empty: bool = False
    is_replay: bool = False


def unless_all(keep: Mask) -> Mask | None:
    """`Admission.keep`."""
    return None if keep.all() else keep


def _block(rule: Participation, step: int) -> tuple[Participation, int]:
    """The rule at a step, and the first step that it looks back to."""
    if isinstance(rule, Restarted):
        return rule.participation, step - step % rule.every
    return rule, 0


def starts_anew(participation: Participation, *, step: int, seen: Seen) -> Mask:
    """Whether a unit's first step is forgotten before this one (a new block, or never seen)."""
    is_anew: Mask = (seen.count == 0) | (seen.last < _block(participation, step)[1])
    return is_anew


def is_admitted(participation: Participation, *, step: int, seen: Seen) -> Mask:
    """Truth value per unit.

    Guarantees: a sequence of steps in which every unit passed is a pattern over which the
    sensitivity of this participation was maximised. Restarted keeps separation and total count of
    a MinSeparation base across blocks too, which is stricter than either reading of it.
    """
    never: Mask = seen.count == 0
    if never.all():
        return never
    again = _allows(participation, step, seen.first, seen.last, seen.count)
    return np.asarray(never | again, dtype=bool)


def are_all_admitted(participation: Participation, *, step: int, spread: Spread) -> bool:
    """True only if every unit passes, by the extremes of their records; else look at each.

    MinSeparation and AnyOrderEpochs ask for nothing but a last step and a count that are not too
    large; the others are asked where all have one first and one last step.
    """
    if not spread.known:
        return True
    (first, last, *_), (_, latest, most, _) = spread.low, spread.high
    rule, _ = _block(participation, step)
    if not isinstance(rule, MinSeparation | AnyOrderEpochs) and (first, last) != spread.high[:2]:
        return False
    return bool(_allows(participation, step, first, latest, most))


def is_group_admitted(participation: Participation, *, step: int, record: Record) -> bool:
    """The same answer for units that took part before, with one record between them."""
    return bool(_allows(participation, step, *record))


def _allows(rule: Participation, step: int, first: Any, last: Any, count: Any) -> Any:
    """Whether those who took part before may do so again: numbers, or arrays of one a unit."""
    rule, block = _block(rule, step)
    is_anew = last < block
    if isinstance(rule, SinglePass):
        return count == 0
    if isinstance(rule, AnyOrderEpochs):
        return last < step - step % rule.steps_per_epoch
    if isinstance(rule, Epochs):
        return (is_anew | ((step - first) % rule.steps_per_epoch == 0)) & (last < step)
    if isinstance(rule, MinSeparation):
        return (step - last >= rule.separation) & (count < rule.max_participations)
    raise Unsupported(f"no participation rule is known for {type(rule).__name__}")


def is_content_enough(
    participation: Participation, *, step: int, last: Any, is_read_again: bool = False
) -> bool:
    """Whether batches without ids, last seen then, may be told apart by content at this step.

    Rows are not followed then, so after the first epoch of a block only batches that took part in
    this block come again: rows mixed anew could be in one epoch twice (a shuffled loader that goes
    on in the middle of an epoch does that). Rules that know no epochs ask the same of a pass that
    somebody says is a further one (`is_read_again`).
    """
    rule, block = _block(participation, step)
    if not isinstance(rule, Epochs | AnyOrderEpochs):
        return not is_read_again or bool(np.all(last >= 0))
    if step - rule.steps_per_epoch < block:
        return True
    return bool(np.all(last >= block))


def distinct(*, step: int, ids: Ids, groups: bool, drop: bool) -> tuple[Ids, Mask | None]:
    """Distinct units in order, and which rows repeat a unit and are dropped (None: none).

    A batch holds every example once; with `groups` the rows of one user form one contribution.
    """
    if increases(ids):  # in order already, as data in file order is
        return ids.copy(), None
    units = in_order(ids)
    if increases(units):
        units.flags.writeable = False
        return units, None
    units, first, often = np.unique(ids, return_index=True, return_counts=True)
    if groups:
        return units, None
    if not drop:
        raise ParticipationViolation(
            f"unit {int(units[often > 1][0])} appears twice in step {step}; a batch holds each "
            "example once (a plan with unit='user' groups the examples of a user)"
        )
    repeat = np.ones(len(ids), dtype=bool)
    repeat[first] = False
    return units, repeat


def why_not(participation: Participation, *, step: int, record: Record) -> str:
    """The rule that a refused unit breaks, in words."""
    rule, _ = _block(participation, step)
    first, last, count = record
    if isinstance(rule, SinglePass):
        return f"it already took part in step {last} and the plan allows one step"
    if isinstance(rule, AnyOrderEpochs):
        return f"it already took part in this epoch, in step {last}, and the plan allows one step"
    if isinstance(rule, Epochs):
        return (
            f"it was seen first in step {first}, so with {rule.steps_per_epoch} steps per epoch it "
            f"may come only every {rule.steps_per_epoch} steps after that (last seen: {last})"
        )
    assert isinstance(rule, MinSeparation)
    if count >= rule.max_participations:
        return f"it already took part {count} times and the plan allows {rule.max_participations}"
    return (
        f"it took part in step {last}, and with a separation of {rule.separation} it may come "
        f"again from step {last + rule.separation} on"
    )


def refuse(participation: Participation, *, step: int, ids: Ids, seen: Seen, mask: Mask) -> None:
    """Raise for the first unit that is not admitted."""
    if mask.all():
        return
    refused = np.flatnonzero(~mask)
    reason = why_not(participation, step=step, record=seen.record(refused[0]))
    others = f" (and {len(refused) - 1} more units of this batch)" if len(refused) > 1 else ""
    raise ParticipationViolation(
        f"unit {int(ids[refused[0]])} may not take part in step {step}{others}: {reason}; keep the "
        "order of the plan, or use on_violation='drop'"
    )


def violations(
    rule: Participation,
    table: UnitTable,
    rows: Iterable[tuple[int, Ids]],
    *,
    by_content: bool = False,
) -> Iterator[str]:
    """Recorded steps with their units once more through the rules; the table learns of them.

    `by_content`: the unit of a step is its batch.
    """
    for step, units in rows:
        if len(np.unique(units)) < len(units):
            yield f"step {step} lists a unit twice"
        seen = table.look_up(units)
        refused = np.flatnonzero(~is_admitted(rule, step=step, seen=seen))
        if len(refused):
            reason = why_not(rule, step=step, record=seen.record(refused[0]))
            unit = int(units[refused[0]])
            yield f"unit {unit} should not have taken part in step {step}: {reason}"
        elif by_content and not is_content_enough(rule, step=step, last=seen.last):
            yield f"the batch of step {step} did not come in the epoch before, and has no ids"
        table.update(units, step=step, first=starts_anew(rule, step=step, seen=seen))


def check_sampled(*, step: int, ids: Ids | None, drawn: Ids, is_partial: bool = False) -> Ids:
    """A sampled step must hold exactly the units that our sampler drew (a part: no others).

    Gives the units in order. `drawn` is in order and holds no unit twice, so units are those drawn
    if they are equal to it in order; only of a part, or to refuse, is more to be asked.
    """
    if ids is None:
        raise ParticipationViolation(
            f"step {step} has no ids, and a sampled plan must know that our sampler drew the batch;"
            " pass ids= the indices that private.sampler gave (noshuffle.training.with_ids has a "
            "DataLoader bring them)"
        )
    units = ids if increases(ids) else in_order(ids)
    is_fine = len(units) == len(drawn) and bool((units == drawn).all())
    if not is_fine and is_partial:
        is_fine = len(np.unique(units)) == len(units) and bool(np.isin(units, drawn).all())
    if not is_fine:
        raise ParticipationViolation(
            f"the batch of step {step} ({len(ids)} units) is not the one that the secret sampler "
            f"drew ({len(drawn)} units); take the batches from private.sampler, in order"
        )
    return units
