"""Test somebody else's claim of (ε, δ) from what was recorded, without knowing the mechanism.

Of every canary there is a trace y (what its coordinate received in its steps, `recorder.traces`)
and a coin. On one half of the canaries a direction is learned (Fisher): the mean shift d of those
in the data, the covariance Ŝ of those that are not, w = Ŝ⁻¹d. On the other half scores wᵀy are
judged:

    μ̂       from two means and one spread; its ε at δ if both spreads agree (a Gaussian shift)
    guesses  ε that the coins alone prove, of any mechanism (`one_run`)

A combination of steps in which coordinates have no noise at all (noise that came twice) gives
μ̂ = ∞. REFUTED where either is surely above the claim; a claim that is not reached is not proved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from noshuffle.auditing.answers import HOLDS, REFUTED, Finding
from noshuffle.auditing.canaries import estimate
from noshuffle.auditing.curve import MuEstimate, epsilon_of
from noshuffle.auditing.emitted import Array, Coins
from noshuffle.auditing.one_run import Guesses, best_guesses
from noshuffle.errors import InvalidInput, non_negative, open_unit
from noshuffle.rounding import up

#: Chance that guesses refute a true claim, at most.
LEVEL = 1e-3
#: Variance of a direction, beside the largest, that is no noise but rounding.
_BARE = 1e-8


@dataclass(frozen=True)
class ClaimAudit(Finding):
    """A stranger's ε beside the one that canaries show."""

    name: str
    claimed_epsilon: float
    delta: float
    canaries: int
    participations: int
    estimate: MuEstimate
    guesses: Guesses
    is_shift: bool
    kind: ClassVar[str] = "claim"

    @property
    def answer(self) -> str:
        """REFUTED where the canaries surely show more than the claim."""
        proved = [self.guesses.epsilon, epsilon_of(self.guesses.mu, delta=self.delta)]
        if self.is_shift:
            proved.append(epsilon_of(max(self.estimate.sure, 0.0), delta=self.delta))
        return REFUTED if max(proved) > self.claimed_epsilon else HOLDS

    def words(self) -> str:
        epsilon, low, high = self.estimate.epsilons(self.delta)
        shift = "" if self.is_shift else " (spreads differ: no Gaussian shift, guesses decide)"
        return (
            f"{self.answer}: {self.name}, claimed ε = {up(self.claimed_epsilon, digits=4)} at δ = "
            f"{up(self.delta)}\n{self.canaries:,} canaries in {self.participations} steps each: "
            f"{self.estimate}, ε = {epsilon:.4g} [{low:.4g}, {high:.4g}]{shift}\nproved by guesses "
            f"alone: {self.guesses.words(self.delta)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, and ε of the shift."""
        return {**super().to_dict(), "epsilon": self.estimate.epsilons(self.delta)[0]}


def audit_claim(
    received: NDArray[Any], is_in: Coins, *, epsilon: float, delta: float, name: str = "claim"
) -> ClaimAudit:
    """Judge a claim by traces (participations × canaries) and coins.

    Guarantees: the direction is learned on canaries that are not judged. Traces with NaN or
    infinity are refused.
    """
    non_negative(epsilon=epsilon)
    open_unit(delta=delta)
    Y = np.asarray(received, dtype=np.float64)
    k, count = Y.shape
    if not np.isfinite(Y).all():
        raise InvalidInput("the recorded releases hold NaN or infinity; nothing can be judged")
    if len(is_in) != count or count < 8 * k + 80:
        raise InvalidInput(
            f"give one coin for each canary, and at least {8 * k + 80} canaries for {k} steps; got "
            f"{len(is_in)} coins and {count} canaries"
        )
    learned = np.arange(count) % 2 == 0
    direction = fisher_direction(Y[:, learned], is_in[learned])
    scores, coins = direction @ Y[:, ~learned], is_in[~learned]
    if not np.ptp(scores):
        raise InvalidInput("the recorded coordinates hold neither noise nor canaries")
    proved = best_guesses(scores, coins, delta=delta, level=LEVEL)
    inside, outside = scores[coins], scores[~coins]
    bare = _BARE * float((direction**2) @ Y.var(axis=1))  # beside the same with noise of its own
    apart = float(inside.mean() - outside.mean())
    if max(inside.var(), outside.var()) <= min(bare, 1e-3 * apart**2):
        found, is_shift = MuEstimate(math.inf, math.inf, math.inf, math.inf), True
    else:
        found = estimate(scores, coins)
        error = math.sqrt(2 / len(inside) + 2 / len(outside))
        is_shift = bool(abs(math.log(inside.var() / outside.var())) < 5 * error)
    return ClaimAudit(name, epsilon, delta, len(scores), k, found, proved, is_shift)


def fisher_direction(Y: Array, is_in: Coins) -> Array:
    """Fisher's direction; the bare one where a combination of steps has no noise."""
    shift = Y[:, is_in].mean(axis=1) - Y[:, ~is_in].mean(axis=1)
    noise = Y[:, ~is_in] - Y[:, ~is_in].mean(axis=1, keepdims=True)
    values, vectors = np.linalg.eigh(noise @ noise.T / noise.shape[1])
    along = vectors.T @ shift
    # Noise below rounding counts as rounding, so that a bare direction wins by far.
    weights = along / np.maximum(values, _BARE * values[-1] * 1e-3 + 1e-300)
    return np.asarray(vectors @ weights)
