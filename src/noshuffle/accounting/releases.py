"""What is composed: equal steps of one kind, each of which is a pair of distributions.

    PoissonRelease     a Gaussian on a Poisson sample, or on one of a fixed size
    MixtureRelease     a Gaussian that moves by one of several sensitivities
    TruncatedRelease   a Gaussian on a Poisson sample that is cut to a cap
    AnyRelease         any mechanism, by its losses (`atoms`)

A pair is what a mechanism gives with and without a unit, seen from one side (`release.pair(side)`).
A direction of neighbours has one side or two, the larger of which counts. No state.

>>> PoissonRelease(1.0, 0.01, steps=100).steps, SIDES["both"]
(100, ('remove', 'add'))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from noshuffle.accounting import fixed_size
from noshuffle.accounting.atoms import Atoms, Blend, truncated_pairs
from noshuffle.accounting.mixture import (
    Joined,
    Pair,
    add_pair,
    mixture_pairs,
    remove_pair,
    replace_pair,
)
from noshuffle.errors import instance_of, number_tuple, positive, unit_rate, whole

#: The sides of each direction, the larger of which counts.
SIDES: dict[str, tuple[str, ...]] = {
    "both": ("remove", "add"),
    "remove": ("remove",),
    "add": ("add",),
    "replace": ("replace",),
    "fixed": ("fixed",),
    "fixed-zero": ("fixed-zero remove", "fixed-zero add"),
    "fixed-add-remove": ("fixed remove", "fixed add"),
}
#: Directions that several kinds of releases have; all others are those of `PoissonRelease`.
COMMON = ("both", "remove", "add")
#: Directions in which a unit of every batch moves the sum by two clip norms.
TWICE = ("replace", "fixed", "fixed-add-remove")
_PAIRS: dict[str, Callable[..., Pair | Joined]] = {
    "remove": remove_pair,
    "add": add_pair,
    "replace": replace_pair,
    "fixed": fixed_size.replaced_pair,
    "fixed-zero remove": fixed_size.zeroed_pair,
    "fixed-zero add": fixed_size.unzeroed_pair,
    "fixed remove": fixed_size.removed_pair,
    "fixed add": fixed_size.added_pair,
}


@dataclass(frozen=True)
class PoissonRelease:
    """`steps` equal steps, each on a sample of rate `rate` (of a fixed size, if "fixed")."""

    noise_multiplier: float
    rate: float
    steps: int = 1

    def __post_init__(self) -> None:
        positive(noise_multiplier=self.noise_multiplier)
        unit_rate(rate=self.rate)
        whole(steps=self.steps)
        object.__setattr__(self, "noise_multiplier", float(self.noise_multiplier))
        object.__setattr__(self, "rate", float(self.rate))

    def pair(self, side: str) -> Pair | Joined:
        """One step, seen from this side."""
        return _PAIRS[side](noise_multiplier=self.noise_multiplier, rate=self.rate)


@dataclass(frozen=True)
class MixtureRelease:
    """`steps` equal steps that move the sum by sensitivities[i] with probability weights[i]."""

    noise_multiplier: float
    sensitivities: tuple[float, ...]
    weights: tuple[float, ...]
    steps: int = 1

    def __post_init__(self) -> None:
        whole(steps=self.steps)
        for name in ("sensitivities", "weights"):
            object.__setattr__(self, name, number_tuple(**{name: getattr(self, name)}))
        self.pair("remove")  # checks the numbers
        object.__setattr__(self, "noise_multiplier", float(self.noise_multiplier))

    def pair(self, side: str) -> Pair:
        """One step, seen from this side."""
        remove, add = mixture_pairs(
            noise_multiplier=self.noise_multiplier,
            sensitivities=self.sensitivities,
            weights=self.weights,
        )
        return remove if side == "remove" else add


@dataclass(frozen=True)
class TruncatedRelease:
    """`steps` equal steps, each on a Poisson sample that is cut to `cap` units."""

    noise_multiplier: float
    rate: float
    cap: int
    population: int
    steps: int = 1
    #: Whether the unit is zeroed out and keeps its place, instead of being added or removed.
    is_zeroed: bool = False

    def __post_init__(self) -> None:
        whole(steps=self.steps)
        self.pair("remove")  # checks the numbers

    def pair(self, side: str) -> Blend:
        """One step, seen from this side."""
        remove, add = truncated_pairs(
            noise_multiplier=float(self.noise_multiplier),
            rate=float(self.rate),
            cap=self.cap,
            population=self.population,
            is_zeroed=self.is_zeroed,
        )
        return remove if side == "remove" else add


@dataclass(frozen=True, eq=False)
class AnyRelease:
    """`steps` equal mechanisms of any kind, by their losses (`atoms`) in the two directions."""

    remove: Atoms
    add: Atoms | None = None
    steps: int = 1

    def __post_init__(self) -> None:
        whole(steps=self.steps)
        instance_of(Atoms, remove=self.remove)
        if self.add is not None:
            instance_of(Atoms, add=self.add)

    def pair(self, side: str) -> Atoms:
        """One of them, seen from this side; the same from both if only one was given."""
        return self.remove if side == "remove" or self.add is None else self.add


Record = PoissonRelease | MixtureRelease | TruncatedRelease | AnyRelease
RECORDS = (PoissonRelease, MixtureRelease, TruncatedRelease, AnyRelease)
