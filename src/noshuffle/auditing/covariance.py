"""Covariance audit: the noise that left, over many coordinates, against the law that was planned.

Coordinates without data (or with empty batches) show the noise alone: an n × d sample Y of N(0, S),
S = z²Σ planned. With S = L·Lᵀ and W = L⁻¹Y,

    scale      ‖W‖² ~ χ²(n·d)                                              exact
    entries    √d·(WWᵀ/d)_ij and √(d/2)·((WWᵀ/d)_ii − 1) are N(0, 1)       Bonferroni over all
    worst      μ̂² = max_u uᵀŜ⁻¹u,   uᵀS⁻¹u = uᵀŜ⁻¹u·χ²(d−n+1)/d             exact for fixed u

Pattern and signs of the worst u are found on one half of the coordinates and measured on the other,
so that its interval is honest. Noise that is used twice leaves a combination of steps bare: Ŝ is
singular, and μ̂ = ∞. A fixed filter (the canaries' statistic) does not see that.

>>> from noshuffle import Plan, SinglePass
>>> plan = Plan.fit(SinglePass(8), mechanism="sqrt", noise_multiplier=2.0)
>>> Y = released_noise(plan, coordinates=2000)
>>> audit_noise(Y, plan).answer, audit_noise(0.8 * Y, plan).answer
('HOLDS', 'REFUTED')
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from scipy.special import ndtr
from scipy.stats import chi2

from noshuffle.auditing.answers import HOLDS, REFUTED, Finding
from noshuffle.auditing.curve import MuEstimate
from noshuffle.auditing.emitted import Array, emitted_rows
from noshuffle.auditing.prefixes import whitening
from noshuffle.auditing.worst import worst
from noshuffle.errors import InvalidInput, whole
from noshuffle.participation import Participation
from noshuffle.plan import Plan
from noshuffle.release.release import Release
from noshuffle.rounding import up

#: A finding is believed when chance gives it less often than this.
LEVEL = 1e-6
#: Variance in some direction, beside the planned one, that is nothing but rounding to the grid.
_BARE = 1e-4


@dataclass(frozen=True)
class NoiseAudit(Finding):
    """The law of the noise of a run beside the planned one, and μ of the worst unit under it."""

    steps: int
    coordinates: int
    claimed_mu: float
    estimate: MuEstimate
    delta: float
    scale: float
    p_scale: float
    p_entries: float
    worst_entry: tuple[int, int]
    pattern: tuple[int, ...]
    kind: ClassVar[str] = "noise"

    @property
    def is_planned(self) -> bool:
        """Whether chance explains the difference between this noise and the planned one."""
        return min(self.p_scale, self.p_entries) > LEVEL / 2

    @property
    def answer(self) -> str:
        """REFUTED where the noise is not the planned one, or protects less than claimed."""
        return HOLDS if self.is_planned and self.estimate.sure <= self.claimed_mu else REFUTED

    def words(self) -> str:
        own, (i, j) = self.estimate, self.worst_entry
        bare = "; some combination of steps has no noise at all" if math.isinf(own.mu) else ""
        return (
            f"{self.answer}: the noise of {self.steps} steps over {self.coordinates:,} coordinates"
            f"\nscale: {self.scale:.5f} of the planned one (p = {self.p_scale:.2g}); least likely "
            f"entry: steps {i} and {j} (p = {self.p_entries:.2g})"
            f"\nworst unit: {own}, claimed {up(self.claimed_mu, places=4)}; "
            f"ε at δ = {up(self.delta)}: {own.epsilons(self.delta)[0]:.4g}{bare}"
        )


def released_noise(plan: Plan, *, coordinates: int, steps: int | None = None) -> Array:
    """What leaves by the door when nobody takes part: noise alone, steps × coordinates."""
    release = Release.begin(plan, {"w": (coordinates,)}, clip=1.0)
    nobody, rows = release.identify(np.empty(0, dtype=np.int64)), []
    for step in range(steps or plan.steps):
        values = {"w": torch.zeros(coordinates, device="cpu")}
        release.close(release.admit(step, nobody), values)
        rows.append(values["w"].double().numpy())
    return np.array(rows)


def audit_noise(noise: Array, plan: Plan, *, claimed_mu: float | None = None) -> NoiseAudit:
    """Compare noise (steps × coordinates, in units of the clip norm) with what the plan adds."""
    n = len(noise)
    rows = emitted_rows(plan.strategy.recipe(plan.steps), steps=n, horizon=plan.steps)
    claim = plan.mu(n) if claimed_mu is None else claimed_mu
    if claim is None or not plan.noise_multiplier:
        raise InvalidInput("a covariance audit needs a plan with noise and without sampling")
    covariance = plan.noise_multiplier**2 * (rows @ rows.T)
    twice = plan.multiplier_of_sensitivity
    return compare(noise, covariance, plan.guarded, claim / twice, plan.delta, twice=twice)


def compare(
    noise: Array,
    covariance: Array,
    participation: Participation,
    claimed_mu: float,
    delta: float,
    *,
    twice: float = 1.0,
) -> NoiseAudit:
    """The same against any planned covariance; `claimed_mu` for zero-out neighbours."""
    n, d = noise.shape
    whole(at_least=4 * n + 40, coordinates=d)
    white = whitening(covariance) @ noise
    sample = white @ white.T / d
    scale = float(np.trace(sample)) / n
    tail = float(chi2.cdf(scale * n * d, n * d))
    scores = math.sqrt(d) * (sample - np.eye(n))
    scores[np.diag_indices(n)] /= math.sqrt(2)
    at = np.unravel_index(int(np.argmax(np.abs(scores))), scores.shape)
    i, j = sorted(int(index) for index in at)
    p_entries = min(1.0, n * (n + 1) * float(ndtr(-abs(scores[i, j]))))
    half, rest, m = noise[:, : d // 2], noise[:, d // 2 :], d - d // 2
    is_bare = bool(np.linalg.eigvalsh(sample)[0] < _BARE)
    X = _precision(half, ridge=1e-9 if is_bare else 0.0)
    pattern = worst(X, participation).pattern
    if is_bare:
        found = MuEstimate(*(math.inf,) * 4)
    else:
        signs = np.sign(np.linalg.eigh(X[np.ix_(pattern, pattern)])[1][:, -1])
        X = _precision(rest)[np.ix_(pattern, pattern)]
        squared, freedom = float(signs @ X @ signs) / m, m - n + 1
        quantiles = (freedom, *chi2.ppf((0.025, 0.975, LEVEL / 2), freedom))
        found = MuEstimate(*(twice * math.sqrt(squared * float(q)) for q in quantiles))
    return NoiseAudit(
        steps=n,
        coordinates=d,
        claimed_mu=twice * claimed_mu,
        estimate=found,
        delta=delta,
        scale=math.sqrt(scale),
        p_scale=2 * min(tail, 1 - tail),
        p_entries=p_entries,
        worst_entry=(i, j),
        pattern=pattern,
    )


def _precision(noise: Array, *, ridge: float = 0.0) -> Array:
    """The inverse of the sample covariance."""
    S = noise @ noise.T / noise.shape[1]
    return np.asarray(np.linalg.inv(S + ridge * float(np.trace(S)) * np.eye(len(S))))
