"""Participations that a secret draw decides: their guarantee rests on its randomness.

Only `release/sampler` may draw them, and a run refuses batches that it did not draw. No state.

>>> TruncatedPoisson.of(steps=10, batch=100, population=1000).largest_draw
148
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

from noshuffle.errors import InvalidInput, whole
from noshuffle.participation.base import InEpochs, Participation
from noshuffle.participation.patterns import Epochs


@dataclass(frozen=True)
class Poisson(Participation):
    """Every unit joins every step by its own secret coin flip of probability `rate`."""

    steps: int
    rate: float
    kind: ClassVar[str] = "poisson"
    is_sampled: ClassVar[bool] = True

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
class BallsInBins(InEpochs):
    """Every unit is at one secret, uniform position of the epoch, the same in every epoch.

    One secret shuffle before the run, into batches of varying sizes (Chua et al. 2024, arXiv
    2412.16802; Choquette-Choo et al. 2024, arXiv 2410.06266).
    """

    kind: ClassVar[str] = "balls-in-bins"
    is_sampled: ClassVar[bool] = True
    keeps_draws: ClassVar[bool] = True

    @property
    def in_order(self) -> Epochs:
        """The same promise without the secret: what strategies are fitted for."""
        return Epochs(self.epochs, self.steps_per_epoch)

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
