"""Importance sampling of secret positions: draws of log L, and their weights.

With K and L as in `monte_carlo`, draws come from

    remove   position j shifted s times as far, whose density over Q is L_s
    add      Q moved by −c K·1/b, away from all positions, with density M_c

and what is averaged is Y = value · density / density of the draws, 0 ≤ Y ≤ R. Two ways:

    alone    With κ = max K_jj, κ̄ and K̄ the means of K_jj and of K_ij (times the periods), the mean
             of e^{s·…} is at least the power s ≥ 1 of the mean, and log L at least its mean
             exponent: L_s ≥ L^s e^{−s(s−1)κ/2}, and M_c ≥ e^{c(ε − κ̄/2) − c²K̄/2} where L ≤ e^{−ε}.
             So R = (1/s)(1 − 1/s)^{s−1} e^{−(s−1)(ε − sκ/2)}, and e^{−c(ε − κ̄/2) + c²K̄/2}: least
             at s = ε/κ + ½ and c = (ε − κ̄/2)/K̄, and near δ itself unless amplification is strong.
    mixed    Half of the draws from P (or Q), s or c from a pilot: Y is at most twice the value.
             Losses above log Γ, where the sampling-free bound leaves at most a hundredth of δ, are
             cut off and charged with it: P(L ≥ Γ) ≤ Γ/(Γ − Γ′) · E_Q(L − Γ′)₊, R = 2(1 − e^ε/Γ).

Alone where that R is below a tenth. No state.

>>> K = np.eye(10)
>>> alone_of("remove", K, 1, 0.5) is None, round(alone_of("remove", K, 1, 5.0).tilt, 2)
(True, 5.5)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class MovedDensity:
    """Draws from the moved density only: s or −c, and what bounds Y (the head of this file)."""

    tilt: float
    norm: float
    spread: float

    def reach(self, epsilon: float) -> float:
        """R at this ε; not below 1e-30, on the safe side."""
        s = self.tilt
        if s < 0:
            log_reach = s * (epsilon - self.norm / 2) + s * s * self.spread / 2
        else:
            most = (s - 1) * math.log1p(-1 / s) - math.log(s)
            log_reach = most - (s - 1) * (epsilon - s * self.norm / 2)
        return max(1e-30, math.exp(min(700.0, log_reach)))


def alone_of(side: str, K: Array, periods: int, epsilon: float) -> MovedDensity | None:
    """The best of them, or None where Y could be as large as a tenth."""
    norm = periods * float(K.diagonal().max() if side == "remove" else K.diagonal().mean())
    spread = periods * float(K.mean())
    tilt = epsilon / norm + 0.5 if side == "remove" else (norm / 2 - epsilon) / spread
    found = MovedDensity(tilt, norm, spread)
    is_right = tilt > 1 if side == "remove" else tilt < 0
    return found if is_right and found.reach(epsilon) < 0.1 else None


@dataclass(frozen=True)
class WeightedDraws:
    """log L, and the density of P (Q) over that of the draws, of every sample."""

    log_ratio: Array
    share: Array
    alone: MovedDensity | None = None

    def values(self, side: str, epsilon: float, top: float = math.inf) -> Array:
        gain = epsilon - self.log_ratio if side == "remove" else epsilon + self.log_ratio
        out = -np.expm1(np.minimum(gain, 0.0)) * self.share
        return np.where(self.log_ratio < top, out, 0.0)


def _log_means(exponents: Array) -> Array:
    """log of the mean of e^{…} over positions."""
    top = exponents.max(axis=1, keepdims=True)
    mean = np.exp(exponents - top).mean(axis=1)
    return np.asarray(top[:, 0] + np.log(mean))


@dataclass(frozen=True)
class MovedDraws:
    """Draws of one direction for a Gram matrix K with its Cholesky root, over all periods."""

    side: str
    K: Array
    root: Array
    periods: int

    def draw(
        self, tilt: float, is_mixed: bool, count: int, rng: np.random.Generator
    ) -> tuple[Array, Array]:
        """log L, and L (or one) over the density of the draws, of which half or all are moved.

        By shifts `tilt` times as long ("remove"), or Q by `tilt` (negative: away) along the mean of
        all positions ("add").
        """
        K, is_remove = self.K, self.side == "remove"
        half, along = K.diagonal() / 2, K.mean(axis=1)
        still = 1.0 if is_remove else 0.0
        scale = np.where(rng.random(count) < 0.5, still, tilt) if is_mixed else np.full(count, tilt)
        plain, tilted = np.zeros(count), np.zeros(count)
        for _ in range(self.periods):
            X = rng.standard_normal((count, len(K))) @ self.root.T
            X += scale[:, None] * (K[rng.integers(len(K), size=count)] if is_remove else along)
            plain += _log_means(X - half)
            if not is_remove:
                tilted += tilt * X.mean(axis=1) - tilt**2 * float(along.mean()) / 2
            elif tilt != 1:
                tilted += _log_means(tilt * X - tilt**2 * half)
        if is_remove and tilt == 1:
            return plain, np.ones(count)
        return plain, _share(tilted - plain if is_remove else tilted, is_mixed)


def _share(excess: Array, is_mixed: bool) -> Array:
    """One over the density of the draws, from its logarithm."""
    if is_mixed:
        return np.asarray(2 * np.exp(-np.logaddexp(0.0, np.minimum(excess, 700.0))))
    return np.asarray(np.exp(-np.maximum(excess, -700.0)))
