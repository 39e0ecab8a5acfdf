"""What one unit (an example or a user) may do during a run.

A participation is the promise about the data order on which a guarantee rests. Sensitivity is a
maximum over every pattern of steps that it allows:

    SinglePass      one step, any
    Epochs          steps {j, j+b, j+2b, …}: the same order in every epoch
    MinSeparation   at most k steps, any two at least b apart (index difference)
    Restarted       the base pattern inside every block of `every` steps, and a new order, chosen
                    freely, in the next block (trees that restart)
    Poisson         each step independently with probability `rate` (secret coin flips)
    FixedSize       each step a uniform random subset of `batch` out of `population`
    CyclicPoisson   unit i belongs to group i mod `groups`; step t flips coins for group t mod
                    `groups` only
    BallsInBins     one secret uniform position for every unit, the same in every epoch
    SeparatedBins   a fresh one in every epoch, any two at least `separation` steps apart
    TruncatedPoisson  as Poisson, batches cut to `cap` units at random

The last six are sampled: their guarantee needs the randomness of the draw. Under the first two
(and cut batches) only independent noise (DP-SGD) is accounted, under cyclic draws also noise of at
most `groups` bands, under separated positions of at most `separation` bands, under secret positions
any noise but that of trees.

>>> Epochs(epochs=20, steps_per_epoch=240).steps
4800
>>> MinSeparation(steps=976, separation=97, max_participations=20).most   # not 10: ⌈976/97⌉
11
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self

from noshuffle.errors import InvalidInput, instance_of, one_of, unit_rate, whole


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
        counts = [field.name for field in fields(self) if field.type == "int"]  # type: ignore[arg-type]
        whole(**{name: getattr(self, name) for name in counts})

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

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with `kind` first; `from_dict` is the inverse."""
        return {"kind": self.kind, **asdict(self)}  # type: ignore[call-overload]


@dataclass(frozen=True)
class SinglePass(Participation):
    """Every unit takes part in at most one step, whichever it is."""

    steps: int
    kind: ClassVar[str] = "single-pass"

    def most_within(self, steps: int) -> int:
        return min(1, steps)

    def words(self) -> str:
        return f"each unit takes part in at most one of {self.steps} steps"


@dataclass(frozen=True)
class Epochs(Participation):
    """The same order in every epoch: a unit seen at step j is seen at j + b, j + 2b, …"""

    epochs: int
    steps_per_epoch: int
    kind: ClassVar[str] = "epochs"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(steps=self.steps)

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    def most_within(self, steps: int) -> int:
        return math.ceil(steps / self.steps_per_epoch)

    def words(self) -> str:
        return (
            f"{self.epochs} epochs of {self.steps_per_epoch} steps in the same order: each unit "
            f"takes part once per epoch, always at the same position"
        )


@dataclass(frozen=True)
class MinSeparation(Participation):
    """At most `max_participations` steps, any two at least `separation` apart (t' − t ≥ b)."""

    steps: int
    separation: int
    max_participations: int
    kind: ClassVar[str] = "min-separation"

    def most_within(self, steps: int) -> int:
        return min(self.max_participations, math.ceil(steps / self.separation))

    def words(self) -> str:
        return (
            f"each unit takes part in at most {self.most} of {self.steps} steps, any two of them "
            f"at least {self.separation} apart"
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

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "participation": self.participation.to_dict(),
            "every": self.every,
        }


@dataclass(frozen=True)
class Poisson(Participation):
    """Every unit joins every step by its own secret coin flip of probability `rate`."""

    steps: int
    rate: float
    kind: ClassVar[str] = "poisson"
    is_sampled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        unit_rate(rate=self.rate)

    def words(self) -> str:
        return (
            f"in each of {self.steps} steps every unit is included by an independent secret coin "
            f"flip of probability {self.rate:.6g}"
        )


@dataclass(frozen=True)
class FixedSize(Participation):
    """Every step is a uniform random subset of `batch` out of `population`, no replacement."""

    steps: int
    batch: int
    population: int
    kind: ClassVar[str] = "fixed-size"
    is_sampled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch > self.population:
            raise InvalidInput(
                f"batch must be at most the population ({self.population}), got {self.batch}"
            )

    @property
    def rate(self) -> float:
        return self.batch / self.population

    @property
    def largest_draw(self) -> int:
        return self.batch

    def words(self) -> str:
        return (
            f"each of {self.steps} steps is a secret uniform random subset of {self.batch} out of "
            f"{self.population} units, without replacement"
        )


@dataclass(frozen=True)
class CyclicPoisson(Participation):
    """Step t includes every unit of group t mod `groups` by a secret coin flip of `rate`.

    Who is in which group is public and never changes (unit i is in group i mod `groups`), so two
    steps of one unit are at least `groups` apart (Choquette-Choo et al. 2023, arXiv 2306.08153).
    """

    steps: int
    groups: int
    rate: float
    kind: ClassVar[str] = "cyclic-poisson"
    is_sampled: ClassVar[bool] = True
    keeps_draws: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        unit_rate(rate=self.rate)

    @classmethod
    def of(cls, *, steps: int, groups: int, batch: int, population: int) -> CyclicPoisson:
        """With an expected batch out of a population that `groups` divide evenly (or nearly)."""
        whole(steps=steps, groups=groups, batch=batch, population=population)
        if groups * batch > population:
            raise InvalidInput(
                f"groups * batch must be at most the population ({population}), got "
                f"{groups} * {batch}; use fewer groups or a smaller batch"
            )
        return cls(steps, groups, groups * batch / population)

    def most_within(self, steps: int) -> int:
        return math.ceil(steps / self.groups)

    def words(self) -> str:
        return (
            f"units are in {self.groups} groups that take turns over {self.steps} steps; when its "
            "group's turn comes, every unit is included by an independent secret coin flip of "
            f"probability {self.rate:.6g}"
        )


@dataclass(frozen=True)
class BallsInBins(Participation):
    """Every unit is at one secret, uniform position of the epoch, the same in every epoch.

    One secret shuffle before the run, into batches of varying sizes (Chua et al. 2024, arXiv
    2412.16802; Choquette-Choo et al. 2024, arXiv 2410.06266).
    """

    epochs: int
    steps_per_epoch: int
    kind: ClassVar[str] = "balls-in-bins"
    is_sampled: ClassVar[bool] = True
    keeps_draws: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(steps=self.steps)

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    @property
    def in_order(self) -> Epochs:
        """The same promise without the secret: what strategies are fitted for."""
        return Epochs(self.epochs, self.steps_per_epoch)

    def most_within(self, steps: int) -> int:
        return math.ceil(steps / self.steps_per_epoch)

    def words(self) -> str:
        return (
            f"every unit has one secret, uniformly random position among {self.steps_per_epoch} "
            f"steps, independent of all others, and takes part there in {self.epochs} epochs"
        )


@dataclass(frozen=True)
class TruncatedPoisson(Participation):
    """Poisson batches out of `population` units; of a larger one, `cap` units stay, at random.

    Batches of a bounded size are what compiled steps want. Whoever joins a full batch displaces
    another unit, which the accountant counts (`accounting.atoms`).
    """

    steps: int
    rate: float
    cap: int
    population: int
    kind: ClassVar[str] = "truncated-poisson"
    is_sampled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        unit_rate(rate=self.rate)

    @classmethod
    def of(cls, *, steps: int, batch: int, population: int, deviations: float = 5.0) -> Self:
        """With an expected batch, cut so many standard deviations above it."""
        whole(batch=batch, population=population)
        if batch > population:
            raise InvalidInput(f"batch must be at most the population ({population}), got {batch}")
        rate = batch / population
        spread = math.sqrt(batch * (1 - rate))
        return cls(steps, rate, min(population, math.ceil(batch + deviations * spread)), population)

    @property
    def largest_draw(self) -> int:
        return self.cap

    def words(self) -> str:
        return (
            f"in each of {self.steps} steps every one of {self.population} units is drawn by an "
            f"independent secret coin flip of probability {self.rate:.6g}; of more than {self.cap} "
            "units a secret, uniformly random subset of that size takes part"
        )


@dataclass(frozen=True)
class SeparatedBins(Participation):
    """A fresh secret position in every epoch, any two of one unit at least `separation` apart.

    Unit i has epochs of its own that begin at steps ≡ i mod steps_per_epoch (which is public, so
    that batches have the same expected size everywhere); in each of them it takes part once, at a
    uniform one of the first steps_per_epoch − separation + 1 steps. Positions that lie outside the
    run are passed over. The scheme of Dong and Ganesh (2026, arXiv 2602.09338) draws the gaps
    between positions from a geometric law instead; here epochs are independent, and compose.
    """

    epochs: int
    steps_per_epoch: int
    separation: int
    kind: ClassVar[str] = "separated-bins"
    is_sampled: ClassVar[bool] = True
    keeps_draws: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(steps=self.steps)
        if self.separation > self.steps_per_epoch:
            raise InvalidInput(
                f"separation must be at most steps_per_epoch ({self.steps_per_epoch}), got "
                f"{self.separation}"
            )

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    @property
    def choices(self) -> int:
        """How many positions of an epoch are drawn from."""
        return self.steps_per_epoch - self.separation + 1

    def most_within(self, steps: int) -> int:
        """Epochs of its own that begin before `steps`, one of them before the run."""
        begun = math.ceil(steps / self.steps_per_epoch)
        return min(begun + 1, math.ceil(steps / self.separation))

    def words(self) -> str:
        return (
            f"every unit has a secret position in each of its epochs of {self.steps_per_epoch} "
            f"steps, drawn anew, uniformly and independently among {self.choices} of them, so that "
            f"any two are at least {self.separation} steps apart, over {self.steps} steps"
        )


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


_KINDS: dict[str, type[Participation]] = {
    cls.kind: cls
    for cls in (
        SinglePass,
        Epochs,
        MinSeparation,
        Poisson,
        FixedSize,
        CyclicPoisson,
        BallsInBins,
        TruncatedPoisson,
        SeparatedBins,
    )
}


def from_dict(record: dict[str, Any]) -> Participation:
    """The participation that `to_dict` wrote."""
    instance_of(dict, participation=record)
    fields = dict(record)
    kind = fields.pop("kind", None)
    one_of((*_KINDS, Restarted.kind), **{"participation kind": kind})
    try:
        if kind != Restarted.kind:
            return _KINDS[kind](**fields)
        base = from_dict(fields["participation"])
        return Restarted(base, fields["every"])  # type: ignore[arg-type]
    except (TypeError, KeyError) as problem:  # a field that is missing, or unknown
        raise InvalidInput(f"the participation {kind!r} cannot be read: {problem}") from None
