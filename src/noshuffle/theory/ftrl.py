"""DP-FTRL and its peers: regret and excess risk (Kairouz et al. 2021, arXiv 2103.00039).

Losses are convex and L-Lipschitz on a ball of radius R around the start, regret is per example (its
mean over the stream), neighbours are zero-out.

    theorem_4_1       regret, any oblivious stream      LR(1/√n + √(√d ln²(1/δ) ln(1/β)/(εn)))
    corollary_4_2     risk of the average iterate       the same, √(ln(1/β)/n) in front
    theorem_4_3       regret, least squares, i.i.d.     L²R²(√(ln n/n) + √(d ln⁵(n/β) ln(1/δ))/(εn))
    ftrl_regret       as 4.1, constants proved here     LR√(2(1 + zE(√d + √(2 ln(n/β))))/n)
    ftrl_risk         as 4.2, constants proved here     ftrl_regret at β/2 + 2LR√(2 ln(2/β)/n)
    sgd_regret        DP-SGD without amplification      LR√((B + dz²T/n)/n), T = ⌈n/B⌉, proved here

>>> sizes = Sizes(n=10_000, d=100, epsilon=1.0, delta=1e-6)
>>> theorem_4_1(sizes).value is None, round(ftrl_regret(sizes).order, 3)
(True, 0.413)
>>> print(theorem_4_1(sizes).words())
Theorem 4.1: regret = O(0.766), the constant is not stated; largest term: privacy
"""

from __future__ import annotations

import math
from dataclasses import replace

from noshuffle.accounting import gaussian
from noshuffle.errors import Unsupported, positive, whole
from noshuffle.theory.base import HIGH, LIPSCHITZ, SAMPLED, Bound, Sizes, order_only, proved

KAIROUZ = "Kairouz et al. 2021, arXiv 2103.00039"
BALL = "comparator within R of the start"
OBLIVIOUS = "stream fixed beforehand (oblivious adversary)"


def tree_noise(sizes: Sizes) -> float:
    """Theorem 3.1: σ = √(2⌈lg n⌉ ln(1/δ))/ε in units of L. Condition: ε ≤ 2 ln(1/δ).

    Published form, kept for comparison only: a leaf sits in ⌊lg n⌋ + 1 nodes, one more than ⌈lg n⌉
    where n is a power of two, so this noise can miss its ε (8.48 for 8 at n = 1024, δ = 1e-5).
    """
    log = math.log(1 / sizes.delta)
    if sizes.n < 2:
        raise Unsupported("theorem 3.1 has no noise for one row; it needs n >= 2, got 1")
    if sizes.epsilon > 2 * log:
        raise Unsupported(
            f"theorem 3.1 needs epsilon <= 2 ln(1/delta) = {2 * log:.4g}, got {sizes.epsilon:g}"
        )
    return math.sqrt(2 * math.ceil(math.log2(sizes.n)) * log) / sizes.epsilon


def tree_spread(sizes: Sizes) -> float:
    """z·E of a plain tree: the largest deviation of a prefix sum's noise, in units of L.

    z = √(⌊lg n⌋ + 1)/μ(ε, δ), the exact Gaussian curve and all nodes of a leaf; a prefix of
    t ≤ n rows is a sum of popcount(t) ≤ ⌊lg(n + 1)⌋ nodes.
    """
    n = int(sizes.n)
    levels = n.bit_length()
    most = (n + 1).bit_length() - 1
    return math.sqrt(levels * most) / gaussian.mu(epsilon=sizes.epsilon, delta=sizes.delta)


def theorem_4_1(sizes: Sizes) -> Bound:
    """Regret of DP-FTRL with the best λ."""
    return _ftrl("Theorem 4.1", "regret", sizes, 1.0, (LIPSCHITZ, BALL, OBLIVIOUS))


def corollary_4_2(sizes: Sizes) -> Bound:
    """Excess risk of the average iterate of DP-FTRL (online to batch)."""
    first = math.sqrt(math.log(1 / sizes.beta))
    conditions = (LIPSCHITZ, "all models within R", SAMPLED)
    return _ftrl("Corollary 4.2", "excess risk", sizes, first, conditions)


def _ftrl(name: str, what: str, s: Sizes, first: float, conditions: tuple[str, ...]) -> Bound:
    if s.delta > 1 / s.n:
        # ln n of the tree is swallowed by ln(1/δ), which takes δ ≤ 1/n.
        raise Unsupported(f"{name} is stated for delta <= 1/n = {1 / s.n:.3g}, got {s.delta:g}")
    inside = math.sqrt(s.d) * math.log(1 / s.delta) ** 2 * math.log(1 / s.beta)
    terms = {
        "optimisation": s.scale * first / math.sqrt(s.n),
        "privacy": s.scale * math.sqrt(inside / (s.epsilon * s.n)),
    }
    return order_only(name, what, terms, *conditions, "delta <= 1/n", HIGH, source=KAIROUZ)


def theorem_4_3(sizes: Sizes) -> Bound:
    """Regret of DP-FTRL-LS: squared loss, ‖x‖ ≤ L, |y| ≤ LR, models within R."""
    s, scale = sizes, sizes.scale**2
    if s.n < 2:
        raise Unsupported(f"theorem 4.3 needs n >= 2, got {s.n}")
    logs = math.sqrt(math.log(s.n / s.beta) ** 5 * math.log(1 / s.delta))
    terms = {
        "optimisation": scale * math.sqrt(math.log(s.n) / s.n),
        "privacy": scale * logs * s.per_private_row,
    }
    data = "squared loss, rows within L, labels within LR"
    return order_only("Theorem 4.3", "regret", terms, data, SAMPLED, HIGH, source=KAIROUZ)


def ftrl_regret(
    sizes: Sizes, *, spread: float | None = None, batch_size: int = 1, expected: bool = False
) -> Bound:
    """Regret of DP-FTRL with its constants: `spread` is z·E of the mechanism (a tree's if None).

    With B rows a step (n/B steps): R√(2a/n), a = BL² + L²·zE·(√d + √(2 ln(steps/β))), since
    ‖N(0, s²I_d)‖ ≤ s(√d + √(2 ln(1/β'))) but for β' and the noise of all steps is bounded at once;
    `expected` regret has √d alone, and is what the default λ of `convex.solvers.ftrl` is best for.
    """
    s = sizes
    whole(batch_size=batch_size, at_most=s.n)
    steps = -(-s.n // batch_size)
    spread = tree_spread(replace(s, n=steps)) if spread is None else spread
    positive(spread=spread)
    tail = 0.0 if expected else math.sqrt(2 * math.log(steps / s.beta))
    private = spread * (math.sqrt(s.d) + tail)
    # √(a + b) is shown as its two shares, so that they add up to the bound.
    whole_bound = s.scale * math.sqrt(2 * (batch_size + private) / s.n)
    share = batch_size / (batch_size + private)
    terms = {"optimisation": share * whole_bound, "privacy": (1 - share) * whole_bound}
    conditions = LIPSCHITZ, BALL, OBLIVIOUS, "best lambda", "in expectation" if expected else HIGH
    return proved("DP-FTRL, constants", "regret", terms, *conditions)


def ftrl_risk(sizes: Sizes, *, spread: float | None = None, batch_size: int = 1) -> Bound:
    """Excess risk of the average iterate: `ftrl_regret` at β/2 and Hoeffding–Azuma at β/2.

    f_t(w) − f_t(v) lies in an interval of 4LR: its mean misses its expectations by more than
    4LR√(ln(2/β)/(2n)) with probability β/2.
    """
    s = sizes
    online = ftrl_regret(replace(s, beta=s.beta / 2), spread=spread, batch_size=batch_size)
    drawn = 2 * s.scale * math.sqrt(2 * math.log(2 / s.beta) / s.n)
    terms = {**online.terms, "sampling": drawn}
    conditions = LIPSCHITZ, "all models within R", SAMPLED, HIGH
    return proved("DP-FTRL, constants", "excess risk", terms, *conditions)


def sgd_regret(sizes: Sizes, *, batch_size: int = 1) -> Bound:
    """One pass of DP-SGD, every batch with noise for (ε, δ), nothing amplified; expected.

    T = ⌈n/B⌉ projected steps of R/G have regret RG over the stream, G² = Σ E‖g + noise‖² ≤
    L²(nB + Tdz²) (a short last batch has all of its noise), and the noise of a step is independent
    of the model it is evaluated at: mean zero, no other cost. Per example LR√((B + dz²T/n)/n),
    which is LR√((B + dz²/B)/n) where B divides n, least at B = z√d (`best_batch`).
    """
    s = sizes
    whole(batch_size=batch_size, at_most=s.n)
    steps = -(-s.n // batch_size)
    private = s.d * steps / (gaussian.mu(epsilon=s.epsilon, delta=s.delta) ** 2 * s.n)
    total = s.scale * math.sqrt((batch_size + private) / s.n)
    share = batch_size / (batch_size + private)
    terms = {"optimisation": share * total, "privacy": (1 - share) * total}
    conditions = LIPSCHITZ, BALL, OBLIVIOUS, "best rate", "in expectation"
    return proved("DP-SGD without amplification, constants", "regret", terms, *conditions)


def best_batch(sizes: Sizes) -> int:
    """z√d, at most n: where `sgd_regret` is least, LR√(2z√d/n). The order of Theorem 4.1."""
    z = 1 / gaussian.mu(epsilon=sizes.epsilon, delta=sizes.delta)
    return max(1, min(sizes.n, round(z * math.sqrt(sizes.d))))


def table_1(sizes: Sizes) -> tuple[Bound, ...]:
    """Regret guarantees side by side: what was known, and DP-FTRL; logarithms left out.

    Linear losses: Agarwal and Singh 2017 (expected). General convex: Smith and Thakurta 2013,
    DP-FTRL. Least squares: DP-FTRL-LS. `privacy` is where they differ.
    """
    s = sizes
    base, fast = s.scale / math.sqrt(s.n), s.scale * s.per_private_row
    ours = s.scale * s.d**0.25 / math.sqrt(s.epsilon * s.n)
    rows = (
        ("linear, expected", base, fast, "Agarwal, Singh 2017", "linear losses"),
        ("general convex, before", base, fast * math.sqrt(s.n), "Smith, Thakurta 2013", LIPSCHITZ),
        ("general convex, DP-FTRL", base, ours, KAIROUZ, LIPSCHITZ),
        ("least squares, DP-FTRL", base * s.scale, fast * s.scale, KAIROUZ, SAMPLED),
    )
    return tuple(
        order_only(
            f"Table 1, {name}",
            "regret up to logarithms",
            {"optimisation": first, "privacy": second},
            condition,
            source=source,
        )
        for name, first, second, source, condition in rows
    )
