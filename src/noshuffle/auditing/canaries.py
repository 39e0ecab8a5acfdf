"""Canaries: examples of known participation and orthogonal directions, and what they show of μ.

A model gets one number more for each canary. The loss of canary i is size·w_i and nothing else, so
that its gradient is a multiple of e_i, clipped like everybody's to the clip norm ζ. Fair coins
decide which canaries are in the data; those that are take part in the steps of the worst pattern u
of the plan. With ĝ_i the released sums of coordinate i over all steps, in units of ζ, and X = Σ⁻¹,

    T_i = uᵀ X ĝ_i / (z·√(uᵀ X u))   is   N(μ_u·S_i, 1),       μ_u = √(uᵀ X u)/z

the most powerful statistic there is (white box: all iterates). The attack on the final model alone
sees the sum of each coordinate. Two means and one spread give

    μ̂ = (mean T | in − mean T | out) / spread,        variance 1/n₁ + 1/n₀ + μ²/(2(n₁+n₀))

(compare arXiv 2606.12733, 2302.07956). A user is a canary with several examples of one id: if they
were clipped one by one, μ̂ would be as many times the claim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from scipy.special import ndtri
from torch import Tensor, nn

from noshuffle.auditing.curve import MuEstimate
from noshuffle.auditing.emitted import Array, Coins, emitted_rows
from noshuffle.auditing.prefixes import whitening
from noshuffle.auditing.worst import worst
from noshuffle.clipping import ModelLoss
from noshuffle.errors import InvalidInput, Unsupported, whole
from noshuffle.plan import Plan


class CanaryModel(nn.Module):
    """A model with one number for each canary; `forward(x, which)`, which = `count` for people."""

    def __init__(self, inner: nn.Module, count: int) -> None:
        super().__init__()
        self.inner, self.count = inner, count
        self.canary = nn.Embedding(count + 1, 1, padding_idx=count)
        nn.init.zeros_(self.canary.weight)

    def forward(self, x: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), self.canary(which).flatten()


def canary_loss(count: int, *, size: float) -> ModelLoss:
    """Cross-entropy of people, size·w_i of canary i, row by row."""

    def losses(model: nn.Module, x: Tensor, which: Tensor, y: Tensor) -> Tensor:
        outputs, own = model(x, which)
        people = F.cross_entropy(outputs, y, reduction="none")
        return torch.where(which < count, size * own, people)

    return ModelLoss(losses, by_row=True)


@dataclass(frozen=True, eq=False)
class Canaries:
    """Who the canaries are, when they come, and how their traces are read.

    `examples` is how many examples one canary has in each of its steps (of one user).
    """

    plan: Plan
    count: int
    is_in: Coins
    examples: int = 1

    @staticmethod
    def of(plan: Plan, *, count: int, examples: int = 1) -> Canaries:
        """Toss the coins."""
        whole(count=count, examples=examples)
        if plan.participation.is_sampled or not plan.noise_multiplier:
            raise Unsupported("canaries need a plan with noise and without sampling")
        if examples > 1 and plan.unit != "user":
            raise InvalidInput(f"several examples of one canary need unit='user', not {plan.unit}")
        coins = np.random.default_rng().random(count) < 0.5
        return Canaries(plan, count, coins, examples)

    @cached_property
    def _precision(self) -> Array:
        """X = Σ⁻¹ of the noise over steps, for a noise multiplier of one."""
        rows = emitted_rows(self.plan.strategy.recipe(self.plan.steps), steps=self.plan.steps)
        factor = whitening(rows @ rows.T)
        return np.asarray(factor.T @ factor)

    @cached_property
    def pattern(self) -> tuple[int, ...]:
        """The steps that canaries in the data take part in: the worst that the plan allows."""
        return worst(self._precision, self.plan.guarded).pattern

    @property
    def mu(self) -> float:
        """What the statistic can reach: √(uᵀXu)/z."""
        X, own = self._precision, self.pattern
        return math.sqrt(float(X[np.ix_(own, own)].sum())) / self.plan.noise_multiplier

    def rows(self, step: int) -> Tensor:
        """The canaries in the batch of this step, each as often as it has examples."""
        own = np.flatnonzero(self.is_in) if step in self.pattern else np.empty(0, dtype=np.int64)
        return torch.from_numpy(np.repeat(own, self.examples))

    def scores(self, released: Array) -> Array:
        """T of every canary, from steps × count released sums in units of the clip norm."""
        weights = self._precision[list(self.pattern)].sum(axis=0)
        return np.asarray(weights @ released / (self.plan.noise_multiplier**2 * self.mu))

    def final_scores(self, released: Array) -> Array:
        """The sum over all steps, which the final model of plain SGD shows."""
        return np.asarray(released.sum(axis=0))

    def final_mu(self) -> float:
        """What the final model can show of μ: k/√(1ᵀΣ1)/z."""
        spread = math.sqrt(float(np.linalg.inv(self._precision).sum()))
        return len(self.pattern) / spread / self.plan.noise_multiplier


def estimate(scores: Array, is_in: Coins) -> MuEstimate:
    """μ̂ from the scores of canaries that are in the data and of those that are not."""
    inside, outside = scores[is_in], scores[~is_in]
    n1, n0 = len(inside), len(outside)
    if min(n1, n0) < 10:
        raise InvalidInput(f"give at least 10 canaries on either side, got {n1} and {n0}")
    pooled = (n1 * inside.var() + n0 * outside.var()) / (n1 + n0 - 2)
    mu = float((inside.mean() - outside.mean()) / math.sqrt(pooled))
    error = math.sqrt(1 / n1 + 1 / n0 + mu * mu / (2 * (n1 + n0)))
    ends = [mu + float(ndtri(q)) * error for q in (0.025, 0.975, 5e-7)]
    return MuEstimate(mu, *ends)
