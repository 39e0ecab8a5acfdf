"""LinearRule: DP-FTRL for linear models, with penalties, constraint sets and averaging.

    ĝ_t = (Σ_{i in batch} clip(r_i ⊗ (x_i, 1)) + noise) / B
    S_t = S_{t−1} + η ĝ_t                                   h_t = h_{t−1} + η
    W_{t+1} = argmin_{W∈K} ⟨S_t, W⟩ + h_t·r(W) + ½‖W‖²      b_{t+1} = −S_t (free, no penalty)

Kairouz et al. 2021 (arXiv 2103.00039), section 3; the last two lines are `optim.leader`. A row's
gradient is residual ⊗ (x, 1), so its norm is ‖r‖·√(‖x‖²+1) and clipping is a factor on r: one
product with X for the margins, one for the sum, and nothing per row is stored. The noise covers W
and b as one flat vector. Averages of the iterates are post-processing: "uniform" gives every
iterate equal weight (online to batch conversion), "linear" weight t (forgets the start), "last"
takes the newest.

The learning rate that theory suggests comes from public numbers alone: R the norm of the weights
worth finding, n the steps, c the clip norm, s the deviation of the noise in a coordinate of the
running mean gradient, ρ the curvature of the loss (docs/proofs-convex.md). A wrong R costs
accuracy, never privacy.

    any convex loss   R²/(2ηn) + η(c² + c s√p)    η = R / √(2n(c² + c s√p))
    smooth losses     R²/(2ηn) + ½η²s²ρc²         η = (R² / (2n s²ρc²))^{1/3}, for the noise
                      R²/(2ηn) + ½ηc²/B           η = R√(B/n)/c, for sampling; and at most 2/(ρc²)

>>> round(general_rate(radius=1.0, steps=50, clip_norm=1.0, noise=0.0, dimension=10), 3)
0.1
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from noshuffle.clipping.factor import clip_factor
from noshuffle.convex.arrays import CLIP_SLACK, Array, Targets
from noshuffle.convex.margins import MarginLoss
from noshuffle.convex.phases import Phase
from noshuffle.convex.rows import squared_norms
from noshuffle.convex.rule import Rule, Watch
from noshuffle.errors import one_of, positive
from noshuffle.optim.composite import Composite
from noshuffle.optim.constraints import Constraint
from noshuffle.optim.leader import Leader

AVERAGING = ("last", "uniform", "linear")


@dataclass(eq=False)
class LinearRule(Rule):
    """The iterate and its sums. `groups` of features share a penalty; by default each is one."""

    loss: MarginLoss
    features: int
    outputs: int
    clip_norm: float
    radius: float
    fixed_rate: float | None = None
    fit_intercept: bool = True
    averaging: str = "linear"
    composite: Composite | None = None
    constraint: Constraint | None = None
    groups: tuple[NDArray[np.int64], ...] | None = None
    most_weight: float = 1.0
    watch: Watch | None = None

    _STATE: ClassVar[tuple[str, ...]] = ("_theta", "_average", "_count", "learning_rate")

    def __post_init__(self) -> None:
        one_of(AVERAGING, averaging=self.averaging)
        positive(clip_norm=self.clip_norm, radius=self.radius)
        if self.fixed_rate is not None:
            positive(learning_rate=self.fixed_rate)
        k, p = self.outputs, self.features
        self.size, self._bound = k * (p + 1), k * p  # all numbers, and those under penalty and set
        groups: list[NDArray[np.int64]] = [np.arange(k * p).reshape(k, p).T]
        if self.groups is not None:
            groups = [(np.arange(k)[:, None] * p + g).reshape(-1) for g in self.groups]
        sets = {"composite": self.composite, "constraint": self.constraint}
        self._leader = Leader(self.size, free=k, groups=groups, **sets)  # type: ignore[arg-type]
        self.learning_rate, self._count = 0.0, 0
        self._theta, self._average = np.zeros(self.size), np.zeros(self.size)

    @property
    def weights(self) -> Array:
        return self._split(self._theta if self.averaging == "last" else self._average)

    @property
    def iterate(self) -> Array:
        """The newest iterate, at which gradients are taken."""
        return self._split(self._theta)

    def _split(self, flat: Array) -> Array:
        coef, intercept = flat[: self._bound], flat[self._bound :]
        return np.hstack([coef.reshape(self.outputs, -1), intercept[:, None]])

    def start(self, phase: Phase) -> None:
        if self.fixed_rate is not None:
            self.learning_rate = self.fixed_rate
            return
        public: dict[str, Any] = {
            "radius": self.radius,
            "steps": phase.plan.steps,
            "clip_norm": self.clip_norm / self.most_weight,
            "noise": phase.worst_error * self.clip_norm / phase.batch_size,
        }
        curvature, batch = self.loss.curvature(), phase.batch_size
        general = general_rate(**public, dimension=self.size)
        if curvature is None:
            self.learning_rate = general
            return
        smooth = smooth_rate(**public, batch_size=batch, curvature=curvature)
        # A loss that is steep and narrow (Huber's) is smooth in name: what holds for all holds too.
        self.learning_rate = max(smooth, general) if curvature > 1 else smooth

    def clipped_sum(self, x: Any, y: Targets, weight: Array | None = None) -> Array:
        coef = self._theta[: self._bound].reshape(self.outputs, self.features)
        margins = x @ coef.T + self._theta[self._bound :]
        self._show(margins, y, weight)
        residual = self.loss.residual(margins, y)
        norms = np.sqrt(np.einsum("ij,ij->i", residual, residual))
        norms *= np.sqrt(squared_norms(x) + float(self.fit_intercept))
        factor = clip_factor(norms, self.clip_norm / self.most_weight, slack=CLIP_SLACK)
        residual *= (factor if weight is None else factor * weight)[:, None]
        # A row of infinite norm has factor 0; whatever is still not finite contributes nothing.
        if not (is_finite := np.isfinite(residual)).all():
            residual[~is_finite.all(axis=1)] = 0.0
        out = np.zeros(self.size)
        out[: self._bound] = (x.T @ residual).T.reshape(-1)
        if self.fit_intercept:
            out[self._bound :] = residual.sum(axis=0)
        return out

    def update(self, mean: Array, *, step: int) -> None:
        self._theta = self._leader.follow(mean, rate=self.learning_rate)
        if not self.fit_intercept:
            self._theta[self._bound :] = 0.0
        self._count += 1
        if self.averaging != "last":
            share = 1.0 / self._count if self.averaging == "uniform" else 2.0 / (self._count + 1)
            self._average += share * (self._theta - self._average)

    def state(self) -> dict[str, Any]:
        total = torch.from_numpy(self._leader.total.copy())
        return {**super().state(), "total": total, "weight": self._leader.weight}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._leader.total = state["total"].numpy().copy()
        self._leader.weight = state["weight"]


def general_rate(
    *, radius: float, steps: int, clip_norm: float, noise: float, dimension: int
) -> float:
    """η for any convex loss; `noise` is s, the deviation of one coordinate of the noisy sum."""
    spread = clip_norm**2 + clip_norm * noise * math.sqrt(dimension)
    return radius / math.sqrt(2.0 * steps * spread)


def smooth_rate(
    *, radius: float, steps: int, clip_norm: float, noise: float, batch_size: int, curvature: float
) -> float:
    """η for a smooth loss of curvature ρ."""
    bend = curvature * clip_norm**2
    sampling = radius * math.sqrt(batch_size / steps) / clip_norm
    private = math.inf
    if noise > 0:
        private = (radius**2 / (2.0 * steps * noise**2 * bend)) ** (1.0 / 3.0)
    return min(sampling, private, 2.0 / bend)
