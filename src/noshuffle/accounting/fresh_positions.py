"""A fresh secret position in every epoch, for noise that an epoch does not outlive.

A unit is at one of W positions of each of its epochs, drawn anew, and its shifts there reach only
rows of that epoch (no more bands than steps between two positions). The likelihood ratios of the
epochs are then functions of rows of their own, so they compose as independent mechanisms, whatever
is sent adaptively; one epoch is a secret position (`bins`): positions with one residue modulo w
form classes of at least m = ⌊W/w⌋, inner products within a class are at most a, squared norms at
most a + d, and by Kahane's inequality and convexity

    L = e^{√a y − a/2} · (1/m) Σ_j U_j,      U_j = e^{√d y_j − d/2} independent

dominates in both directions. The first factor is a Gaussian mechanism of parameter √a, the second
a distribution on a grid, from above in convex order: its losses log L have masses of P = L · masses
of Q. T epochs are T of each (`fourier`, `atoms`). Epochs that the run cuts off are covered:
positions outside the run have shift 0, which lowers inner products. The best w counts; without any
class it is T Gaussian mechanisms with known positions. No state.

>>> fresh = FreshPositions(classes=((1, 0.0, 1.0), (20, 0.0, 1.0)), epochs=4)
>>> round(fresh.epsilon(noise_multiplier=1.0, delta=1e-5), 2)
2.71
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from noshuffle.accounting import fourier, gaussian
from noshuffle.accounting.atoms import Atoms
from noshuffle.accounting.bins import MeanRatio, ratio_of
from noshuffle.errors import open_unit, positive, whole

#: Most points of a grid of ratios: coarser ones are still from above.
_POINTS = 2**16


@dataclass(frozen=True)
class FreshPositions:
    """(m, a, d) of the classes as in `bins.Overlaps` (the first: no sampling), and the epochs."""

    classes: tuple[tuple[int, float, float], ...]
    epochs: int

    def __post_init__(self) -> None:
        whole(epochs=self.epochs)

    def mu(self, noise_multiplier: float) -> float:
        """The Gaussian parameter without sampling."""
        return math.sqrt(self.classes[0][2] * self.epochs) / noise_multiplier

    def epsilon(self, *, noise_multiplier: float, delta: float) -> float:
        """The least ε that some class shows; never below the truth."""
        return _least(self, noise_multiplier, delta)[0]

    def delta(self, *, noise_multiplier: float, epsilon: float) -> float:
        """An upper bound of δ in both directions."""
        return float(self.deltas(np.array([epsilon]), noise_multiplier=noise_multiplier)[0])

    def deltas(
        self, epsilons: np.ndarray, *, noise_multiplier: float, near: float = 1e-5
    ) -> np.ndarray:
        """The same at many ε, sharpest where δ is about `near`."""
        mu = self.mu(noise_multiplier)
        best = np.array([gaussian.delta(mu=mu, epsilon=float(one)) for one in epsilons])
        for one in self.classes[1:]:
            composed = self.composed(one, noise_multiplier, near)
            if composed is not None:
                best = np.minimum(best, composed.deltas(epsilons, near=near))
        return best

    def sharpest(self, *, noise_multiplier: float, delta: float) -> FreshPositions:
        """With the class alone that is best here: for searches."""
        best = _least(self, noise_multiplier, delta)[1]
        return replace(self, classes=(self.classes[0], *([best] if best else [])))

    def releases(self, *, noise_multiplier: float, delta: float) -> tuple[fourier.Record, ...]:
        """All epochs, by the class that is best here, to be composed with other releases.

        Guarantees: they dominate at every ε and in both directions, not at `delta` alone.
        """
        return _releases(self, noise_multiplier, delta)

    def composed(
        self, one: tuple[int, float, float], noise: float, delta: float
    ) -> fourier.Composed | None:
        """All epochs of one class as loss distributions; None where it has no grid."""
        count, common, own = one
        if count < 2:
            return None
        tail = 1e-3 * delta / self.epochs
        ratio = ratio_of(count, 0.0, own / noise**2, tail=tail, most=_POINTS)
        if ratio is None or ratio.rest > delta:
            return None
        releases: list[fourier.Record] = [fourier.AnyRelease(*losses(ratio), steps=self.epochs)]
        if common > 0:
            known = noise / math.sqrt(common * self.epochs)
            releases.append(fourier.PoissonRelease(known, 1.0))
        return fourier.compose(releases)


@lru_cache(maxsize=256)  # prefixes of a run that have the same epochs ask the same
def _least(
    known: FreshPositions, noise: float, delta: float
) -> tuple[float, tuple[int, float, float] | None]:
    """The least ε, and the class that shows it."""
    positive(noise_multiplier=noise)
    open_unit(delta=delta)
    best, which = gaussian.epsilon(mu=known.mu(noise), delta=delta), None
    for one in known.classes[1:]:
        composed = known.composed(one, noise, delta)
        found = math.inf if composed is None else composed.epsilon(delta=delta)
        if found < best:
            best, which = found, one
    return best, which


@lru_cache(maxsize=64)
def _releases(known: FreshPositions, noise: float, delta: float) -> tuple[fourier.Record, ...]:
    one = _least(known, noise, delta)[1]
    composed = None if one is None else known.composed(one, noise, delta)
    if composed is None:  # as if the positions were known
        return (fourier.PoissonRelease(1 / known.mu(noise), 1.0),)
    return composed.releases


def losses(ratio: MeanRatio) -> tuple[Atoms, Atoms]:
    """A mean of independent ratios as losses of P over Q, and of Q over P, from above."""
    mass = ratio.mass * (1 + 1e-7) + ratio.rounding
    logs, is_zero = np.log(ratio.values[1:]), float(mass[0])
    there = Atoms(logs, ratio.values[1:] * mass[1:], min(1.0, ratio.rest))
    return there, Atoms(-logs[::-1], mass[:0:-1], min(1.0, ratio.rest + is_zero))
