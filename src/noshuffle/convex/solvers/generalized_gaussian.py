"""Noise for gradients bounded in the dual of any norm of `optim.norms`: normal, or shaped like it.

Rows bound a gradient in the norm ‖·‖_q of k parts. Noise in R^d with density ∝ exp(−‖z‖_r²/(2σ²)),
2 ≤ r ≤ q, of the same parts is a length times the cone measure,

    z = ϱ·w/‖w‖_r,   ϱ = σ√(2·Gamma(d/2)),   w of density ∝ exp(−‖w‖_r^r),   E‖z‖_r² = dσ² exactly,

and a query of sensitivity Δ in ‖·‖_q has ρ-zCDP with (docs/proofs-convex.md)

    ρ = κΔ²/(2σ²),   κ = (r−1)·k^{2(1/r−1/q)}.

    noise="normal"       r = 2: κ = k^{1−2/q}, ‖·‖₂ is the Euclidean norm: exactly μ-GDP, and sums
                         of noise may be correlated
    noise="generalized"  r = min(q, max(2, 2 ln k)) (Bassily, Guzmán, Nandi 2021); not stable
                         under sums, no sampler for matrices

**Normal noise is never worse**, which is why it is the default: it has E‖z‖_q ≤ σ(Σ E s^q)^{1/q},
for entries σk^{1/q}m_q with m_q = (E|g|^q)^{1/q} ≤ √(q−1) (hypercontractivity), so E‖z‖_q ≤
Δ√(d/(2ρ))·√(q−1): what the other law has in the mean of squares at r = q. The tests measure both.
Where rows are bounded in a smaller norm than asked for, κ follows from that one. No state.

>>> shape_of(Norm(1.5), 100)
Shape(d=100, r=2.0, kappa=4.641588833612779, parts=Entries())
>>> round(deviation(shape_of(Norm(2.0), 7), sensitivity=1.0, rho=0.5), 6)       # N(0, 1): ρ = 1/2
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
from noshuffle.errors import non_negative, one_of, positive, whole
from noshuffle.noise.laws import KeyedDraws
from noshuffle.optim.norms import ENTRIES, Decomposition, Norm

#: release(value, scale=σ) → value plus noise, on the grid.
Releaser = Callable[..., Array]
NOISES = ("normal", "generalized")


@dataclass(frozen=True)
class Shape:
    """The law of noise: dimension, order r of the norm in its density, κ."""

    d: int
    r: float = 2.0
    kappa: float = 1.0
    parts: Decomposition = ENTRIES

    @property
    def is_normal(self) -> bool:
        """Whether this is the Gaussian, whose releases compose exactly."""
        return self.r == 2

    def measured(self, reach: float) -> float:
        """A sensitivity in the norm of the rows, in the one in which a statement tells it."""
        return math.sqrt(self.kappa) * reach if self.is_normal else reach

    @property
    def words(self) -> str:
        return "normal" if self.is_normal else f"generalized Gaussian of order {self.r:g}"


def shape_of(norm: Norm, d: int, *, rows: Norm | None = None, noise: str = "normal") -> Shape:
    """The law for weights measured by `norm`, rows being bounded in `rows` (its dual)."""
    whole(d=d)
    one_of(NOISES, noise=noise)
    given = rows or norm.dual
    r = 2.0
    if noise == "generalized":
        r = max(2.0, min(norm.q, 2 * math.log(norm.parts.count(d))))
    kappa = (r - 1) * given.times(Norm(r, norm.parts), d) ** 2
    return Shape(d, r, kappa, norm.parts)


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
    """`count` draws, count × d. For r = 2 they are Gaussian of standard deviation σ.

    Guarantees: exact in law but for floating point; σ = 0 gives zeros.
    """
    non_negative(sigma=sigma)
    whole(count=count)
    d = shape.d
    if shape.is_normal:
        return sigma * draws.standard_normal((count, d))
    drawn = shape.parts.cone(shape.r, count, d, draws)
    norms = Norm(shape.r, shape.parts).rows(drawn)
    lengths = sigma * np.sqrt(2 * draws.standard_gamma(d / 2, count))
    return np.asarray(drawn * (lengths / norms)[:, None])


def releaser(problem: Problem, shape: Shape, *, steps: int) -> Releaser:
    """Releases of `steps` vectors, each with noise of this shape and a `scale` σ of its own.

    Guarantees: every release lies on a public grid of 2⁻¹⁰σ. Normal noise is that of the
    library's noise stream; a step beyond `steps` is refused there.
    """
    if shape.is_normal:
        return problem.gaussians(steps=steps)

    def release(value: Array, *, scale: float) -> Array:
        noise = sample(shape, sigma=scale, count=1, draws=problem.draws)[0]
        return problem.draws.release(value, noise, scale=scale)

    return release
