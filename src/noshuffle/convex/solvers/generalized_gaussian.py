"""The generalized Gaussian mechanism: noise shaped like the norm ‖·‖_q of l_p geometry, 1 < p ≤ 2.

Gradients live in the dual norm q = p/(p−1) ≥ 2. Noise in R^d with density ∝ exp(−‖z‖_r²/(2σ²)),
r = min(q, max(2, 2 ln d)) (Bassily, Guzmán, Nandi 2021), is a length times the cone measure:

    z = ϱ·w/‖w‖_r,   ϱ = σ√(2·Gamma(d/2)),   w_i = ± Gamma(1/r)^{1/r},   so E‖z‖_r² = dσ² exactly.

A query of sensitivity Δ in ‖·‖_q has ρ-zCDP with (docs/proofs-convex.md)

    ρ = κΔ²/(2σ²),   κ = (r−1)·d^{2(1/r−1/q)},      exact for p = 2, where this is the Gaussian.

Not stable under sums: noise may be correlated only through released values. No state.

>>> shape = Shape(p=2.0, d=7)
>>> shape.r, shape.kappa
(2.0, 1.0)
>>> round(deviation(shape, sensitivity=1.0, rho=0.5), 6)       # N(0, 1): ρ = 1/2
1.0
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from noshuffle.convex.arrays import Array
from noshuffle.convex.solvers.problem import Problem
from noshuffle.errors import InvalidInput, non_negative, positive, whole
from noshuffle.noise.laws import KeyedDraws

#: release(value, scale=σ) → value plus noise, on the grid.
Releaser = Callable[..., Array]


@dataclass(frozen=True)
class Shape:
    """Geometry of the noise: exponent p of the primal norm and the dimension."""

    p: float
    d: int

    def __post_init__(self) -> None:
        whole(d=self.d)
        if not 1 < self.p <= 2:
            raise InvalidInput(f"p must lie in (1, 2], got {self.p!r}; p = 1 uses noisy_max")

    @property
    def q(self) -> float:
        """Order of the dual norm, in which sensitivity is measured."""
        return self.p / (self.p - 1)

    @property
    def r(self) -> float:
        """Order of the norm in the density."""
        return min(self.q, max(2.0, 2 * math.log(self.d)))

    @property
    def is_normal(self) -> bool:
        """Whether this is the Gaussian, whose releases compose exactly."""
        return self.r == 2

    @property
    def kappa(self) -> float:
        """Smoothness of ‖·‖_r², times the cost of measuring in ‖·‖_q."""
        return (self.r - 1) * math.exp(2 * (1 / self.r - 1 / self.q) * math.log(self.d))


def spending(problem: Problem, shape: Shape) -> tuple[float, dict[str, Any]]:
    """(ρ to spend, the currency of the statement): exactly μ where the noise is normal.

    Normal noise of deviation σ on sensitivity √κΔ is μ-GDP with μ²/2 = κΔ²/(2σ²), and adaptive
    releases of it compose exactly (Dong, Roth, Su 2022); other shapes have ρ-zCDP.
    """
    if shape.is_normal:
        return problem.mu**2 / 2, {"mu": problem.mu}
    return problem.rho, {"rho": problem.rho}


def deviation(shape: Shape, *, sensitivity: float, rho: float) -> float:
    """σ of one ρ-zCDP release.

    Guarantees: κΔ²/(2σ²) ≤ ρ as evaluated.
    """
    positive(sensitivity=sensitivity, rho=rho)
    sigma = sensitivity * math.sqrt(shape.kappa / (2 * rho))
    while shape.kappa * sensitivity**2 / (2 * sigma**2) > rho:
        sigma = math.nextafter(sigma, math.inf)
    return sigma


def sample(shape: Shape, *, sigma: float, count: int, draws: KeyedDraws) -> Array:
    """`count` draws, count × d. For p = 2 they are Gaussian of standard deviation σ.

    Guarantees: exact in law but for floating point; σ = 0 gives zeros.
    """
    non_negative(sigma=sigma)
    whole(count=count)
    d, r = shape.d, shape.r
    if shape.is_normal:
        return sigma * draws.standard_normal((count, d))
    sizes = draws.standard_gamma(1 / r, (count, d)) ** (1 / r)
    signs = np.where(draws.random((count, d)) < 0.5, -1.0, 1.0)
    norms = np.sum(sizes**r, axis=1) ** (1 / r)
    lengths = sigma * np.sqrt(2 * draws.standard_gamma(d / 2, count))
    return np.asarray(signs * sizes * (lengths / norms)[:, None])


def releaser(problem: Problem, shape: Shape, *, steps: int) -> Releaser:
    """Releases of `steps` vectors, each with noise of this shape and a `scale` σ of its own.

    Guarantees: every release lies on a public grid of 2⁻¹⁰σ. For p = 2 the noise is that of the
    library's noise stream; a step beyond `steps` is refused there.
    """
    if shape.is_normal:
        return problem.gaussians(steps=steps)

    def release(value: Array, *, scale: float) -> Array:
        noise = sample(shape, sigma=scale, count=1, draws=problem.draws)[0]
        return problem.draws.release(value, noise, scale=scale)

    return release
