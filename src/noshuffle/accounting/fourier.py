"""Subsampled Gaussians accounted by their privacy-loss distribution, composed by FFT.

The loss of T independent steps is the sum of their losses, S = L_1 + … + L_T under P, and

    δ(ε) = E[(1 − e^{ε − S})₊]

`loss_distribution` puts each step on one grid from above (or below); sums are products of Fourier
transforms. The method is that of Koskela et al. (2020) and Gopi et al. (2021); the discretisation
is that of Doroshenko et al. (2022). Masses are multiplied by e^{λ·loss} before the transform and
divided after it, with λ at the saddle point, which makes small δ as accurate as large ones.

    bound="upper"   never below the truth         bound="lower"   never above the truth
    direction       "remove", "add", "both" (the larger) or "replace" (replace-one neighbours);
                    "fixed", "fixed-zero" and "fixed-add-remove" where every step is a uniform batch
                    of a fixed size, rate = batch/population: one unit replaced, zeroed out, or
                    added or removed; noise_multiplier always counts the noise in one clip norm

The grid follows from the steps (`grid=None`); memory is bounded whatever their number. At small
rates the upper bound adds up rare, large losses apart (`rare_losses`), and the lower one is loose.
What is composed: `releases`.

>>> round(epsilon(noise_multiplier=1.0, rate=0.01, steps=1000, delta=1e-5), 3)
1.828
>>> round(epsilon(noise_multiplier=1.0, rate=0.01, steps=1000, delta=1e-5, bound="lower"), 3)
1.828
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from noshuffle.accounting import gaussian, rare_losses
from noshuffle.accounting.atoms import Atoms
from noshuffle.accounting.loss_sum import curve_of, delta_of, epsilon_of
from noshuffle.accounting.releases import COMMON, RECORDS, SIDES, TWICE
from noshuffle.accounting.releases import AnyRelease as AnyRelease
from noshuffle.accounting.releases import MixtureRelease as MixtureRelease
from noshuffle.accounting.releases import PoissonRelease as PoissonRelease
from noshuffle.accounting.releases import Record as Record
from noshuffle.accounting.releases import TruncatedRelease as TruncatedRelease
from noshuffle.accounting.scout import Block, choose_step
from noshuffle.errors import (
    InvalidInput,
    instance_of,
    non_negative,
    one_of,
    open_unit,
    positive,
    record_list,
)

BOUNDS = ("upper", "lower")
DIRECTIONS = tuple(SIDES)
#: How much coarser the grid is that shows that a direction is not the larger one.
_COARSE = 8.0


@dataclass(frozen=True)
class Composed:
    """Several releases, adaptively composed: a value that answers questions about ε and δ."""

    releases: tuple[Record, ...]
    direction: str = "both"
    grid: float | None = None

    def __post_init__(self) -> None:
        one_of(DIRECTIONS, direction=self.direction)
        if self.grid is not None:
            positive(grid=self.grid)
        if not self.releases:
            raise InvalidInput("releases must hold at least one PoissonRelease, got none")
        for release in self.releases:
            instance_of(RECORDS, releases=release)
            if self.direction not in COMMON and not isinstance(release, PoissonRelease):
                raise InvalidInput(f"direction {self.direction!r} is for PoissonRelease only")

    def epsilon(self, *, delta: float, bound: str = "upper") -> float:
        """ε at δ.

        Guarantees: an upper bound is never below the truth and a lower bound never above it, up
        to rounding that is itself bounded and added (subtracted); both are usually within 1e-4
        relative. Without sampling the exact Gaussian curve is used. Infinite if no grid that
        fits into memory can show that δ is reached. δ outside (0, 1) is refused.
        """
        open_unit(delta=delta)
        one_of(BOUNDS, bound=bound)
        mu, sides = self._parts()
        if not sides[0]:
            return gaussian.epsilon(mu=mu, delta=delta)
        is_upper = bound == "upper"
        if self.grid is None and is_upper:
            try:
                return self._least_epsilon(sides, delta)
            except InvalidInput:  # there is no grid that memory holds
                return math.inf
        step = self.grid or choose_step(sides, is_upper=is_upper, delta=delta)
        return max(epsilon_of(side, delta=delta, is_upper=is_upper, step=step) for side in sides)

    def _least_epsilon(self, sides: list[list[Block]], delta: float) -> float:
        """The larger upper bound of the sides; a coarse grid first for the one that is smaller."""
        top, step = 0.0, choose_step(sides, is_upper=True, delta=delta)
        for i, side in enumerate(sides):
            if i and epsilon_of(side, delta=delta, is_upper=True, step=_COARSE * step) <= top:
                continue
            found = rare_losses.epsilon_of(side, delta=delta)
            if found == math.inf:
                found = epsilon_of(side, delta=delta, is_upper=True, step=step)
            if i and found > top:  # the grid was chosen for the first side
                step = choose_step(sides[i:], is_upper=True, delta=delta)
                found = min(found, epsilon_of(side, delta=delta, is_upper=True, step=step))
            top = max(top, min(found, _most(side)))
        return top

    def delta(self, *, epsilon: float, bound: str = "upper") -> float:
        """δ at ε, with the guarantees of `epsilon`; between 0 and 1."""
        non_negative(epsilon=epsilon)
        one_of(BOUNDS, bound=bound)
        mu, sides = self._parts()
        if not sides[0]:
            return gaussian.delta(mu=mu, epsilon=epsilon)
        is_upper = bound == "upper"
        step, top = self.grid or choose_step(sides, is_upper=is_upper, epsilon=epsilon), 0.0
        for i, side in enumerate(sides):
            given: dict[str, Any] = {"epsilon": epsilon, "is_upper": is_upper}
            if i and is_upper and delta_of(side, step=_COARSE * step, **given) <= top:
                continue
            is_free = self.grid is None and is_upper
            found = rare_losses.delta_of(side, epsilon=epsilon) if is_free else math.inf
            top = max(top, found if found < math.inf else delta_of(side, step=step, **given))
        return top

    def deltas(self, epsilons: np.ndarray, *, near: float) -> np.ndarray:
        """Upper bounds of δ at many ε from one transform a direction, sharpest where δ is `near`.

        Guarantees: those of `delta`, at every ε.
        """
        open_unit(near=near)
        mu, sides = self._parts()
        if not sides[0]:
            return np.array([gaussian.delta(mu=mu, epsilon=float(one)) for one in epsilons])
        step = self.grid or choose_step(sides, is_upper=True, delta=near)
        curves = [curve_of(side, epsilons, delta=near, step=step) for side in sides]
        return np.asarray(np.max(curves, axis=0))

    def _parts(self) -> tuple[float, list[list[Block]]]:
        """μ of the steps without sampling if there are no others, and the blocks per direction.

        Steps at rate 1 are one Gaussian mechanism: their 1/σ² add up (times 4 if replaced).
        """
        inverse_variance = 0.0
        sampled: dict[Record, int] = {}
        for release in self.releases:
            if isinstance(release, PoissonRelease) and release.rate == 1:
                inverse_variance += release.steps / release.noise_multiplier**2
            else:
                key = replace(release, steps=1)
                sampled[key] = sampled.get(key, 0) + release.steps
        mu = math.sqrt(inverse_variance) * (2 if self.direction in TWICE else 1)
        if not sampled:
            return mu, [[]]
        if inverse_variance > 0:
            sampled[PoissonRelease(1 / math.sqrt(inverse_variance), 1.0)] = 1
        sides = SIDES[self.direction]
        return mu, [[(r.pair(side), n) for r, n in sampled.items()] for side in sides]


def _most(side: list[Block]) -> float:
    """The largest loss that there is, which may be less than the grid can tell."""
    tops = [
        count * float(np.max(pair.losses[pair.masses > 0]))
        if isinstance(pair, Atoms) and pair.infinity == 0
        else math.inf
        for pair, count in side
    ]
    return max(0.0, sum(tops)) * (1 + 1e-12)


def compose(
    releases: Iterable[Record | Sequence[float]],
    *,
    direction: str = "both",
    grid: float | None = None,
) -> Composed:
    """The composition of releases; plain (noise_multiplier, rate, steps) triples are welcome."""
    instance_of(Iterable, releases=releases)
    records: list[Record] = []
    for item in releases:
        if isinstance(item, RECORDS):
            records.append(item)
        else:
            records += [PoissonRelease(*row) for row in record_list(3, releases=[item])]
    return Composed(tuple(records), direction, grid)


def epsilon(
    *,
    noise_multiplier: float,
    rate: float,
    steps: int,
    delta: float,
    bound: str = "upper",
    **how: Any,
) -> float:
    """ε at δ of `steps` sampled Gaussian steps; `how` is the direction and the grid.

    Guarantees: see `Composed.epsilon`.
    """
    composed = Composed((PoissonRelease(noise_multiplier, rate, steps),), **how)
    return composed.epsilon(delta=delta, bound=bound)


def delta(
    *,
    noise_multiplier: float,
    rate: float,
    steps: int,
    epsilon: float,
    bound: str = "upper",
    **how: Any,
) -> float:
    """δ at ε of the same; see `Composed.delta`."""
    composed = Composed((PoissonRelease(noise_multiplier, rate, steps),), **how)
    return composed.delta(epsilon=epsilon, bound=bound)
