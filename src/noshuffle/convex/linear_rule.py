"""LinearRule: DP-FTRL for linear models, with penalties, constraint sets and averaging.

    ĝ_t = (Σ_{i in batch} clip(r_i ⊗ (x_i, 1)) + noise) / B
    S_t = S_{t−1} + η ĝ_t                                   h_t = h_{t−1} + η
    W_{t+1} = argmin_{W∈K} ⟨S_t, W⟩ + h_t·r(W) + ½‖W‖²      b_{t+1} = −S_t (free, no penalty)

Kairouz et al. 2021 (arXiv 2103.00039), section 3; the last two lines are `optim.leader`. A row's
gradient is residual ⊗ (x, 1), so its norm is ‖r‖·√(‖x‖²+1) and clipping is a factor on r: one
product with X for the margins, one for the sum, and nothing per row is stored. The noise covers W
and b as one flat vector.

Averages of the iterates are post-processing: "uniform" gives every iterate equal weight (online to
batch conversion), "linear" weight t (forgets the start), "last" takes the newest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from noshuffle.clipping.factor import clip_factor
from noshuffle.convex import rate
from noshuffle.convex.arrays import CLIP_SLACK, Array, Targets
from noshuffle.convex.margins import MarginLoss
from noshuffle.convex.phases import Phase
from noshuffle.convex.rows import squared_norms
from noshuffle.convex.stream import Watch
from noshuffle.errors import one_of, positive
from noshuffle.optim.composite import Composite
from noshuffle.optim.constraints import Constraint
from noshuffle.optim.leader import Leader

AVERAGING = ("last", "uniform", "linear")
_VECTORS, _NUMBERS = ("_theta", "_average"), ("_count", "learning_rate")


@dataclass(frozen=True, eq=False)
class LinearSettings:
    """Everything about the update that is fixed before the data comes."""

    loss: MarginLoss
    features: int
    outputs: int
    clip_norm: float
    radius: float
    learning_rate: float | None = None
    fit_intercept: bool = True
    averaging: str = "linear"
    composite: Composite | None = None
    constraint: Constraint | None = None
    groups: tuple[NDArray[np.int64], ...] | None = None

    def __post_init__(self) -> None:
        one_of(AVERAGING, averaging=self.averaging)
        positive(clip_norm=self.clip_norm, radius=self.radius)
        if self.learning_rate is not None:
            positive(learning_rate=self.learning_rate)

    def leader(self) -> Leader:
        """The update; by default a group is one feature over all margins."""
        k, p = self.outputs, self.features
        groups: list[NDArray[np.int64]] = [np.arange(k * p).reshape(k, p).T]
        if self.groups is not None:
            groups = [(np.arange(k)[:, None] * p + g).reshape(-1) for g in self.groups]
        return Leader(
            k * (p + 1),
            free=k,
            composite=self.composite,
            constraint=self.constraint,
            groups=groups,
        )


class LinearRule:
    """The iterate and its sums. `watch` is shown margins and targets before they are learned."""

    def __init__(self, settings: LinearSettings, *, watch: Watch | None = None) -> None:
        self.settings = settings
        self.clip_norm = settings.clip_norm
        self.watch = watch
        k, p = settings.outputs, settings.features
        self.size = k * (p + 1)
        self.learning_rate = 0.0
        self._leader = settings.leader()
        self._theta = np.zeros(self.size)
        self._average = np.zeros(self.size)
        self._count = 0

    @property
    def weights(self) -> Array:
        """The released answer, outputs × (features + 1), the intercept last."""
        flat = self._theta if self.settings.averaging == "last" else self._average
        return self._split(flat)

    @property
    def iterate(self) -> Array:
        """The newest iterate, at which gradients are taken."""
        return self._split(self._theta)

    def _split(self, flat: Array) -> Array:
        k, p = self.settings.outputs, self.settings.features
        return np.hstack([flat[: k * p].reshape(k, p), flat[k * p :].reshape(k, 1)])

    def start(self, phase: Phase) -> None:
        s = self.settings
        self.learning_rate = s.learning_rate or theory_rate(s, phase)

    def clipped_sum(self, x: Any, y: Targets) -> Array:
        s, k, p = self.settings, self.settings.outputs, self.settings.features
        coef, intercept = self._theta[: k * p].reshape(k, p), self._theta[k * p :]
        margins = x @ coef.T + intercept
        if self.watch is not None:
            self.watch(margins, y)
        residual = s.loss.residual(margins, y)
        norms = np.sqrt(np.einsum("ij,ij->i", residual, residual))
        norms *= np.sqrt(squared_norms(x) + float(s.fit_intercept))
        factor = clip_factor(norms, s.clip_norm, slack=CLIP_SLACK)
        residual *= factor[:, None]
        # A row of infinite norm has factor 0; whatever is still not finite contributes nothing.
        residual[~np.isfinite(residual).all(axis=1)] = 0.0
        out = np.zeros(self.size)
        out[: k * p] = (x.T @ residual).T.reshape(-1)
        if s.fit_intercept:
            out[k * p :] = residual.sum(axis=0)
        return out

    def update(self, mean: Array, *, step: int) -> None:
        s, kp = self.settings, self.settings.outputs * self.settings.features
        self._theta = self._leader.follow(mean, rate=self.learning_rate)
        if not s.fit_intercept:
            self._theta[kp:] = 0.0
        self._count += 1
        if s.averaging != "last":
            t = self._count
            share = 1.0 / t if s.averaging == "uniform" else 2.0 / (t + 1)
            self._average += share * (self._theta - self._average)

    def state(self) -> dict[str, Any]:
        """Everything that changes as rows come, as tensors and plain values."""
        return {
            "_total": torch.from_numpy(self._leader.total.copy()),
            "_weight": self._leader.weight,
            **{name: torch.from_numpy(getattr(self, name).copy()) for name in _VECTORS},
            **{name: getattr(self, name) for name in _NUMBERS},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self._leader.total = state["_total"].numpy().copy()
        self._leader.weight = state["_weight"]
        for name in _VECTORS:
            setattr(self, name, state[name].numpy().copy())
        for name in _NUMBERS:
            setattr(self, name, state[name])


def theory_rate(settings: LinearSettings, phase: Phase) -> float:
    """The default learning rate; see `rate` for where it comes from."""
    noise = phase.worst_error * settings.clip_norm / phase.batch_size
    common = {
        "radius": settings.radius,
        "steps": phase.plan.steps,
        "clip_norm": settings.clip_norm,
        "noise": noise,
    }
    curvature = settings.loss.curvature()
    if curvature is None:
        return rate.general(**common, dimension=settings.outputs * (settings.features + 1))  # type: ignore[arg-type]
    return rate.smooth(**common, batch_size=phase.batch_size, curvature=curvature)  # type: ignore[arg-type]
