"""Participation: what all promises about the order of the data have in common. No state."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from noshuffle.errors import Unsupported, unit_rate, whole

Mask = NDArray[np.bool_]
Steps = NDArray[np.int32]


class Seen(NamedTuple):
    """When each of some units took part first and last, and how often; −1, −1, 0 for never."""

    first: Steps
    last: Steps
    count: Steps  # type: ignore[assignment]  # tuples have a method of that name


class Participation:
    """Base of every participation. `steps` is the horizon, `most` the largest pattern."""

    kind: ClassVar[str] = ""
    is_sampled: ClassVar[bool] = False
    #: Whether one secret draw decides about rows that are released at several times. Two
    #: continuations of one folder then share it, and do not compose as runs of their own.
    keeps_draws: ClassVar[bool] = False

    @property
    def largest_draw(self) -> int | None:
        """The most units that a draw can have, where the participation bounds it."""
        return None

    if TYPE_CHECKING:  # a field in some of the records, computed in others

        @property
        def steps(self) -> int: ...

    def __post_init__(self) -> None:
        kinds = {field.name: field.type for field in fields(self)}  # type: ignore[arg-type]
        counts = {name: getattr(self, name) for name, kind in kinds.items() if kind == "int"}
        whole(**counts)
        for name, value in counts.items():  # NumPy's numbers are no JSON
            object.__setattr__(self, name, int(value))
        if "rate" in kinds:
            unit_rate(rate=getattr(self, "rate"))  # noqa: B009
            object.__setattr__(self, "rate", float(getattr(self, "rate")))  # noqa: B009

    @property
    def base(self) -> Participation:
        """What holds inside a block where the order may change between blocks; else all of it."""
        return self

    @property
    def most(self) -> int:
        """The largest number of steps one unit can take part in."""
        return self.most_within(self.steps)

    def most_within(self, steps: int) -> int:
        """The same, of the first `steps` steps; any of them where the draw decides."""
        return steps

    def words(self) -> str:
        """The promise as one plain sentence."""
        raise NotImplementedError

    def admits(self, step: int, seen: Seen) -> Mask:
        """Which units with this record may take part in a step: one truth value per unit.

        Guarantees: a sequence of steps in which every unit was admitted is a pattern over which
        the sensitivity of this participation was maximised.
        """
        raise Unsupported(f"{self.kind} is a secret draw: the sampler says who takes part")

    def begins_anew(self, step: int, seen: Seen) -> Mask:
        """Which units count this step as their first."""
        return np.asarray(seen.count == 0)

    def why_not(self, step: int, *, first: int, last: int, count: int) -> str:
        """The rule that a refused unit with this record breaks, in words."""
        return f"it took part in step {last}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with `kind` first; `from_dict` is the inverse."""
        return {"kind": self.kind, **asdict(self)}  # type: ignore[call-overload]


@dataclass(frozen=True)
class InEpochs(Participation):
    """Base of those that are laid out in epochs of one length, and meet a unit once in each."""

    epochs: int
    steps_per_epoch: int

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(steps=self.steps)

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    def most_within(self, steps: int) -> int:
        return math.ceil(steps / self.steps_per_epoch)
