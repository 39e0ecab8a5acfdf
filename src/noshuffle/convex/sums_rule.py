"""SumsRule: DP-FTRL-LS, least squares from private running sums of x̃x̃ᵀ and y x̃.

    V_t = Σ_{i≤t} x̃_i x̃_iᵀ + N_t,   u_t = Σ_{i≤t} y_i x̃_i + n_t            x̃ = (x, 1)
    θ_{t+1} = argmin_{θ∈K} θᵀV_tθ − 2⟨u_t, θ⟩ + λ_t‖θ‖²

Both sums come from one mechanism on the vector (svec(x̃x̃ᵀ), τ·y x̃) of `moments`. One row
contributes a vector of norm

    √(‖x̃‖⁴ + τ²y²‖x̃‖²),

which is clipped jointly: the row gets a weight in [0, 1] that depends on it alone, and the problem
is weighted least squares. With s = clip norm × noise multiplier × error of the mechanism at step t,
λ_t is the expected norm of the noise matrix (`moments.noise_norm`) plus the ridge penalty;
eigenvalues below half of it come from noise alone and are raised to that.
(Kairouz et al. 2021, arXiv 2103.00039, theorem 4.3.) State: V, u and the variance of their noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from scipy import sparse

from noshuffle.clipping.factor import clip_factor
from noshuffle.convex.arrays import CLIP_SLACK, Array, Targets
from noshuffle.convex.moments import ball_least_squares, moments, noise_norm, unpack
from noshuffle.convex.phases import Phase
from noshuffle.convex.rows import squared_norms
from noshuffle.convex.rule import Rule, Watch
from noshuffle.errors import non_negative, positive


@dataclass(eq=False, kw_only=True)
class SumsRule(Rule):
    """The two sums and the answer they give; targets are scaled to [−1, 1] beforehand."""

    features: int
    clip_norm: float
    tau: float = 1.0
    alpha: float = 0.0
    radius: float = math.inf
    fit_intercept: bool = True
    most_weight: float = 1.0
    watch: Watch | None = None

    _STATE: ClassVar[tuple[str, ...]] = ("_total", "_theta", "_rows", "_finished", "_noise")

    def __post_init__(self) -> None:
        positive(clip_norm=self.clip_norm, tau=self.tau)
        non_negative(alpha=self.alpha)
        self._q = self.features + int(self.fit_intercept)
        self.size = self._q * (self._q + 1) // 2 + self._q
        self._total, self._theta = np.zeros(self.size), np.zeros(self._q)
        self._rows = self._finished = self._noise = 0.0
        self.learning_rate = 1.0

    @property
    def weights(self) -> Array:
        out = np.zeros((1, self.features + 1))
        out[0, : self._q] = self._theta
        return out

    def start(self, phase: Phase) -> None:
        # The noise of finished phases stays in the sums.
        self._finished += self._noise**2
        self._phase = phase

    def clipped_sum(self, x: Any, y: Targets, weight: Array | None = None) -> Array:
        # The matrix is dense anyway, so rows are made dense batch by batch.
        rows = x.toarray() if sparse.issparse(x) else x
        margins = rows @ self._theta[: self.features, None]
        self._show(margins + (self._theta[-1] if self.fit_intercept else 0.0), y, weight)
        if self.fit_intercept:
            rows = np.hstack([rows, np.ones((len(rows), 1))])
        squared = squared_norms(rows)
        with np.errstate(over="ignore"):
            norms = np.sqrt(squared) * np.sqrt(squared + (self.tau * y) ** 2)
        factor = clip_factor(norms, self.clip_norm / self.most_weight, slack=CLIP_SLACK)
        factor = factor if weight is None else factor * weight
        return moments(rows, y, ratio=self.tau, weights=factor)

    def update(self, mean: Array, *, step: int) -> None:
        batch = self._phase.batch_size
        self._total += mean * batch
        self._rows += batch
        self._noise = float(self._phase.error[step]) * self.clip_norm
        deviation = math.sqrt(self._finished + self._noise**2)
        gram, cross = unpack(self._total, self._q, ratio=self.tau)
        ridge = noise_norm(deviation, self._q) + self.alpha * self._rows
        self._theta = ball_least_squares(
            gram, cross, ridge=ridge, radius=self.radius, least_curvature=max(ridge / 2.0, 1e-12)
        )
