"""Lower bounds on ε and μ from guesses about many canaries in one run, without any assumption.

m canaries are in the data or not, by fair coins S_i. From what was released somebody guesses r of
the coins, v of them rightly.

    ε     P[V ≥ v] ≤ P[W ≥ v] + 2mδ·max_i P[v > W ≥ v−i]/i,     W ~ Bin(r, e^ε/(1 + e^ε))
          (Steinke, Nasr & Jagielski, arXiv 2305.08846)
    μ     for f-DP with f̄ = 1 − f, p_i = P[V = i] and every j                     (arXiv 2410.22235)
          Σ_{i≥j} (i/m)·p_i ≤ f̄( Σ_{i≥j} ((r−i+1)/m)·p_{i−1} )

The second comes from turning one coin around: of a uniformly chosen canary, the event "V ≥ j and
its guess is right" under S is the event "V ≥ j−1 and its guess is wrong" when the coin is the other
one; f-DP compares the two probabilities, and f̄ is concave. If P[V ≥ v] were as large as the level,
the least masses p_{v−1}, p_{v−2}, … that these inequalities ask for can be computed downwards; if
they add up to more than one, the claim is refuted. For Gaussian f: f̄⁻¹(y) = Φ(Φ⁻¹(y) − μ).

Both hold for any mechanism, guesser and canaries; `best_guesses` pays for trying several r.

>>> round(epsilon_bound(m=1000, r=200, v=190, delta=1e-5, level=0.05), 2)
2.39
>>> round(mu_bound(m=60000, r=600, v=583, level=0.0125), 2)             # as many as μ = 1 gives
0.79
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, ndtri
from scipy.stats import binom

from noshuffle.auditing.curve import epsilon_of
from noshuffle.auditing.emitted import Array, Coins
from noshuffle.errors import InvalidInput
from noshuffle.rounding import down

#: Shares of the canaries that are guessed about: the surest ones, on either side or all "in".
SHARES = (0.5, 0.2, 0.05, 0.01)


@dataclass(frozen=True)
class Guesses:
    """Guesses about m canaries, and what they prove: ε at δ at least, μ at least.

    `right` lists (guesses, right ones) for every share that was tried.
    """

    m: int
    right: tuple[tuple[int, int], ...]
    epsilon: float
    mu: float
    level: float

    def words(self, delta: float) -> str:
        """ε that is proved, of any mechanism and of a Gaussian one."""
        gaussian = epsilon_of(self.mu, delta=delta)
        any_mechanism, a_gaussian = down(self.epsilon, places=3), down(gaussian, places=3)
        return f"ε ≥ {any_mechanism} (any mechanism), ≥ {a_gaussian} (Gaussian)"


def epsilon_bound(*, m: int, r: int, v: int, delta: float, level: float) -> float:
    """The largest ε (at δ) that is refuted at this level; zero if none is."""

    def is_refuted(epsilon: float) -> bool:
        q = 1 / (1 + math.exp(-epsilon))
        below = binom.cdf(v - 1, r, q) - binom.cdf(v - 1 - np.arange(1, v + 1), r, q)
        most = float((below / np.arange(1, v + 1)).max()) if v else 0.0
        return float(binom.sf(v - 1, r, q)) + 2 * m * delta * most <= level

    return _largest(is_refuted, 100.0)


def mu_bound(*, m: int, r: int, v: int, level: float) -> float:
    """The largest μ of Gaussian differential privacy that is refuted at this level."""

    def is_refuted(mu: float) -> bool:
        # right: Σ_{i≥j} (i/m) p_i;  wrong: Σ_{i≥j} ((r−i)/m) p_i, both for the least masses so far.
        right, wrong, total = level * v / m, level * (r - v) / m, level
        for j in range(v, 0, -1):
            needed = float(ndtr(ndtri(right) - mu))
            mass = max(0.0, (needed - wrong) * m / (r - j + 1))
            right += mass * (j - 1) / m
            wrong += mass * (r - j + 1) / m
            total += mass
            if total > 1:
                return True
        return False

    return _largest(is_refuted, 50.0) if v > r / 2 else 0.0


def _largest(is_refuted: Callable[[float], bool], top: float) -> float:
    """Bisection for the end of what is refuted, from below."""
    if not is_refuted(0.0):
        return 0.0
    low, high = 0.0, top
    while high - low > 1e-3 * max(low, 1e-2):
        middle = (low + high) / 2
        low, high = (middle, high) if is_refuted(middle) else (low, middle)
    return low


def best_guesses(scores: Array, is_in: Coins, *, delta: float, level: float = 0.05) -> Guesses:
    """Guess the surest canaries by their scores, for several r; the best bounds, all paid for."""
    m = len(scores)
    if m < 20 or len(is_in) != m:
        raise InvalidInput(f"give at least 20 scores with one coin each, got {m} and {len(is_in)}")
    order, coins = np.argsort(scores), np.asarray(is_in, dtype=bool)
    right, each = [], level / (2 * len(SHARES))
    for share in SHARES:
        half = max(1, int(share * m / 2))
        for top, bottom in ((half, half), (2 * half, 0)):
            v = int(coins[order[m - top :]].sum() + (~coins[order[:bottom]]).sum())
            right.append((top + bottom, v))
    epsilon = max(epsilon_bound(m=m, r=r, v=v, delta=delta, level=each) for r, v in right)
    mu = max(mu_bound(m=m, r=r, v=v, level=each) for r, v in right)
    return Guesses(m, tuple(right), epsilon, mu, level)
