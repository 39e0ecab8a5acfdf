"""ε of sampled steps where no grid can tell it: rigorous, quick and coarse.

    without sampling   D_γ((1 − q) N₀ + q N₁ ‖ N₀) ≤ q D_γ(N₁ ‖ N₀) for γ ≥ 1 (joint convexity), and
                       likewise the other way round: a step that is drawn is dominated by the same
                       step that is not, and so is their composition (Zhu, Dong, Wang 2022). That is
                       one Gaussian mechanism, with μ² = Σ T/z², whose curve is exact
    Rényi              the bound of the steps as they are drawn (`renyi`), where there is one

Both hold for every δ, so the smaller one does. No state.

>>> round(coarse_epsilon([(0.06, 1e-3, 10)], direction="both", delta=1e-60), 1)
1940.3
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from noshuffle.accounting import gaussian, renyi

#: Directions in which a unit of every batch moves the sum by two clip norms.
TWICE = ("replace", "fixed", "fixed-add-remove")
#: Directions that have a Rényi bound: its sampling, and by how many clip norms a unit moves a sum.
_RENYI = {
    "both": ("poisson", 1.0),
    "remove": ("poisson", 1.0),
    "add": ("poisson", 1.0),
    "fixed": ("fixed", 2.0),
    "fixed-zero": ("fixed", 2.0),
    "fixed-add-remove": ("poisson", 2.0),
}


def coarse_epsilon(
    steps: Sequence[tuple[float, float, int]], *, direction: str, delta: float
) -> float:
    """An upper bound of ε at δ of steps (noise multiplier, rate, number); finite for most floats.

    Guarantees: never below the truth, in the directions of `fourier`.
    """
    moved = 2.0 if direction in TWICE else 1.0
    mu = moved * math.sqrt(math.fsum(number / noise**2 for noise, _, number in steps))
    found = gaussian.epsilon(mu=mu, delta=delta)
    if direction in _RENYI:
        sampling, moved = _RENYI[direction]
        drawn = [(noise / moved, rate, number) for noise, rate, number in steps]
        found = min(found, renyi.compose_epsilon(drawn, delta=delta, sampling=sampling))
    return found
