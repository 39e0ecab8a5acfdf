"""Participations that any order of the data keeps, however it was chosen: nothing is drawn.

A unit that was first seen at step j and last at l may take part in step t where

    SinglePass      it was never seen
    Epochs          t = j + i·b for a whole i ≥ 1, and t > l
    AnyOrderEpochs  l lies in an earlier epoch
    MinSeparation   t − l ≥ b, and it was seen fewer than k times
    Restarted       its base says so; for Epochs, j starts anew in every block of steps

No state.

>>> narrowed(Epochs(epochs=5, steps_per_epoch=10), 2)
MinSeparation(steps=50, separation=10, max_participations=2)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from noshuffle.errors import MAX_STEPS, InvalidInput
from noshuffle.participation.base import InEpochs, Mask, Participation, Seen

#: The horizon of a run whose length nobody knows: the longest there is.
OPEN = MAX_STEPS


@dataclass(frozen=True)
class SinglePass(Participation):
    """Every unit takes part in at most one step, whichever it is."""

    steps: int
    kind: ClassVar[str] = "single-pass"

    @classmethod
    def open(cls) -> Self:
        """However long the run will be."""
        return cls(OPEN)

    def most_within(self, steps: int) -> int:
        return min(1, steps)

    def words(self) -> str:
        if self.steps == OPEN:
            return "each unit takes part in at most one step, however many there will be"
        return f"each unit takes part in at most one of {self.steps} steps"

    def admits(self, step: int, seen: Seen) -> Mask:
        return np.asarray(seen.count == 0)

    def why_not(self, step: int, *, first: int, last: int, count: int) -> str:
        return f"it already took part in step {last} and the plan allows one step"


@dataclass(frozen=True)
class Epochs(InEpochs):
    """The same order in every epoch: a unit seen at step j is seen at j + b, j + 2b, …"""

    kind: ClassVar[str] = "epochs"

    def words(self) -> str:
        return (
            f"{self.epochs} epochs of {self.steps_per_epoch} steps in the same order: each unit "
            f"takes part once per epoch, always at the same position"
        )

    def admits(self, step: int, seen: Seen) -> Mask:
        is_its_place = (step - seen.first) % self.steps_per_epoch == 0
        return np.asarray((seen.count == 0) | (is_its_place & (seen.last < step)))

    def why_not(self, step: int, *, first: int, last: int, count: int) -> str:
        b = self.steps_per_epoch
        return (
            f"it was seen first in step {first}, so with {b} steps per epoch it may come only "
            f"every {b} steps after that (last seen: {last}); private.batches(loader) keeps to one "
            "order, and AnyOrderEpochs with mechanism='identity' takes a new one in every epoch"
        )


@dataclass(frozen=True)
class AnyOrderEpochs(InEpochs):
    """A new order in every epoch if one likes: a unit is seen at most once in each of them.

    Under independent noise it costs what `Epochs` costs, at every stopping point: the sensitivity
    of t steps is the root of the participations, of which there are at most ⌈t/b⌉ either way. So
    the guard takes it for `Epochs` there (`Plan.guarded`).
    """

    kind: ClassVar[str] = "epochs-any-order"

    def words(self) -> str:
        return (
            f"{self.epochs} epochs of {self.steps_per_epoch} steps in any order, which may change "
            "from epoch to epoch: each unit takes part at most once per epoch"
        )

    def admits(self, step: int, seen: Seen) -> Mask:
        is_in_earlier_epoch = seen.last < step - step % self.steps_per_epoch
        return np.asarray((seen.count == 0) | is_in_earlier_epoch)

    def why_not(self, step: int, *, first: int, last: int, count: int) -> str:
        return f"it already took part in this epoch, in step {last}, and the plan allows one step"


@dataclass(frozen=True)
class MinSeparation(Participation):
    """At most `max_participations` steps, any two at least `separation` apart (t' − t ≥ b)."""

    steps: int
    separation: int
    max_participations: int
    kind: ClassVar[str] = "min-separation"

    @classmethod
    def open(cls, *, separation: int, max_participations: int) -> Self:
        """However long the run will be."""
        return cls(OPEN, separation, max_participations)

    def most_within(self, steps: int) -> int:
        return min(self.max_participations, math.ceil(steps / self.separation))

    def words(self) -> str:
        many = "steps, however long the run" if self.steps == OPEN else f"of {self.steps} steps"
        return (
            f"each unit takes part in at most {self.most} {many}, any two of them "
            f"at least {self.separation} apart"
        )

    def admits(self, step: int, seen: Seen) -> Mask:
        is_apart = step - seen.last >= self.separation
        again = is_apart & (seen.count < self.max_participations)
        return np.asarray((seen.count == 0) | again)

    def why_not(self, step: int, *, first: int, last: int, count: int) -> str:
        if count >= self.max_participations:
            return f"it already took part {count} times and the plan allows that many"
        return (
            f"it took part in step {last}, and with a separation of {self.separation} it may come "
            f"again from step {last + self.separation} on"
        )


@dataclass(frozen=True)
class Restarted(Participation):
    """The base pattern inside every block of `every` steps; the order may change between blocks."""

    participation: SinglePass | Epochs | MinSeparation
    every: int
    kind: ClassVar[str] = "restarted"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.participation, SinglePass | Epochs | MinSeparation):
            raise InvalidInput(
                "participation must be SinglePass, Epochs or MinSeparation inside Restarted, got "
                f"{type(self.participation).__name__}"
            )

    @property
    def steps(self) -> int:
        return self.participation.steps

    @property
    def base(self) -> Participation:
        return self.participation

    @property
    def blocks(self) -> tuple[int, ...]:
        """Length of every block; only the last may be shorter."""
        full, rest = divmod(self.steps, self.every)
        return (self.every,) * full + ((rest,) if rest else ())

    def most_within(self, steps: int) -> int:
        """The order may change between blocks, so no distance holds across their ends."""
        base, (full, rest) = self.participation, divmod(steps, self.every)
        if isinstance(base, SinglePass):
            return min(1, steps)
        most = full * base.most_within(self.every) + base.most_within(rest)
        return min(most, base.max_participations) if isinstance(base, MinSeparation) else most

    def words(self) -> str:
        return f"{self.participation.words()}; the order may change after every {self.every} steps"

    def admits(self, step: int, seen: Seen) -> Mask:
        """Separation and count of a MinSeparation base hold across blocks too, which is stricter
        than either reading of it."""
        mask = self.participation.admits(step, seen)
        if isinstance(self.participation, Epochs):
            mask = mask | (seen.last < step - step % self.every)
        return mask

    def begins_anew(self, step: int, seen: Seen) -> Mask:
        return np.asarray((seen.count == 0) | (seen.last < step - step % self.every))

    def why_not(self, step: int, *, first: int, last: int, count: int) -> str:
        return self.participation.why_not(step, first=first, last=last, count=count)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "participation": self.participation.to_dict()}


def narrowed(part: Participation, most: int) -> Participation | None:
    """The same pattern with at most `most` steps of one unit; None where no narrower one is known.

    Guarantees: a unit that the guard admitted `most` times under `part` keeps the narrower one.
    """
    if isinstance(part, MinSeparation):
        return MinSeparation(part.steps, part.separation, min(most, part.max_participations))
    if isinstance(part, Epochs):  # same place in every epoch: at least an epoch apart
        return MinSeparation(part.steps, part.steps_per_epoch, min(most, part.epochs))
    if isinstance(part, SinglePass):
        return part
    if isinstance(part, Restarted) and isinstance(part.participation, MinSeparation):
        # The guard keeps separation and count across blocks too.
        return narrowed(part.participation, most)
    return None
