"""Excess risk in l_p: losses Lipschitz in ‖·‖_p on a ball of that norm, 1 ≤ p ≤ ∞.

κ = min(1/(p−1), 2 ln d): smoothness of the squared dual norm. S = βR² + LR for β-smooth losses.

    p = 1       S ln d ln n √ln(1/δ)/(ε√n)                         polyhedral Frank–Wolfe [1]
                S(√(ln d/n) ln n + (ln d ln²n ln(1/δ)/(εn))^⅔)     tree Frank–Wolfe [2]
    1 < p ≤ 2   S(κ/√n + κ√d/(εn^¾))                               noisy Frank–Wolfe, naive [1]
                S(√(κ/n) + κ√d/(εn))                               the same, with a tree [1]
                LR(√(κ/n) + √(κd)/(εn))                            phased mirror descent [2]
    2 ≤ p       d^{½−1/p} LR(1/√n + √d/(εn))                       phased SGD, by embedding
    nonconvex   ln^⅔ d/(εn)^⅓ (p = 1), n^{−⅓} + (√d/(εn))^⅖        Frank–Wolfe gap [3]
    weakly c.   n^{−¼} + (√d/(εn))^⅓                               Moreau gradient, p = 2 [3]
    lower       LR√(ln d/n) (p = 1), LR(1/√n + (p−1)√d/(εn)) (1 < p ≤ 2), each term at most LR

[1] Bassily, Guzmán, Nandi 2021, arXiv 2103.01278; [2] Asi, Feldman, Koren, Talwar 2021;
[3] Bassily, Guzmán, Menart 2021, arXiv 2107.05585. Embedding: ‖w‖₂ ≤ d^{½−1/p}‖w‖_p and
‖g‖₂ ≤ ‖g‖_q for p ≥ 2.

>>> sizes = Sizes(n=10_000, d=100, epsilon=1.0, delta=1e-6)
>>> [bound.name for bound in convex(sizes, p=1.0)]
['polyhedral Frank–Wolfe', 'tree Frank–Wolfe', 'lower bound']
"""

from __future__ import annotations

import math

from noshuffle.errors import InvalidInput, Unsupported, non_negative
from noshuffle.theory.base import LIPSCHITZ, SAMPLED, Bound, Sizes, order_only

NANDI = "Bassily, Guzmán, Nandi 2021, arXiv 2103.01278"
ASI = "Asi, Feldman, Koren, Talwar 2021"
MENART = "Bassily, Guzmán, Menart 2021, arXiv 2107.05585"
RISK = "excess risk"


def kappa(d: int, *, p: float) -> float:
    """min(1/(p−1), 2 ln d), at least 1: how far ‖·‖_q² is from the square of a Euclidean norm."""
    if not 1 <= p <= 2:
        raise InvalidInput(f"kappa is defined for 1 <= p <= 2, got p = {p!r}")
    flat = 2 * math.log(d) if d > 1 else 1.0
    return max(1.0, flat if p == 1 else min(1 / (p - 1), flat))


def convex(sizes: Sizes, *, p: float, smoothness: float = 1.0) -> tuple[Bound, ...]:
    """The table for convex losses at this p: upper bounds, and the lower one where it is known."""
    _checked(p)
    non_negative(smoothness=smoothness)
    if p == 1:
        return _l1(sizes, smoothness)
    if p > 2:
        wider = sizes.d ** (0.5 - 1 / p)
        terms = {name: wider * term for name, term in _euclidean(sizes, 1.0, 1.0).items()}
        return (_upper("phased SGD, embedded", terms, "smooth losses", source="Feldman, Koren, "
                       "Talwar 2020 in the Euclidean ball around the l_p ball"),)  # fmt: skip
    s, k = sizes, kappa(sizes.d, p=p)
    scale = smoothness * s.radius**2 + s.scale
    root = math.sqrt(s.n)
    naive = {"sampling": scale * k / root, "privacy": scale * k * s.per_private_row * s.n**0.25}
    tree = {"sampling": scale * math.sqrt(k) / root, "privacy": scale * k * s.per_private_row}
    lower = {n: min(s.scale, v) for n, v in _euclidean(s, 1.0, p - 1).items()}
    return (
        _upper("noisy Frank–Wolfe, naive", naive, "smooth losses", source=NANDI),
        _upper("noisy Frank–Wolfe, tree", tree, "smooth losses", source=NANDI),
        _upper("phased mirror descent", _euclidean(s, math.sqrt(k), math.sqrt(k)), source=ASI),
        order_only("lower bound", RISK, lower, LIPSCHITZ, SAMPLED, source=NANDI, is_lower=True),
    )


def _l1(s: Sizes, smoothness: float) -> tuple[Bound, ...]:
    if s.d < 2 or s.n < 2:
        raise Unsupported(f"the l1 table needs n >= 2 and d >= 2, got n = {s.n}, d = {s.d}")
    scale = smoothness * s.radius**2 + s.scale
    log_d, log_n, log_delta = math.log(s.d), math.log(s.n), math.log(1 / s.delta)
    poly = scale * log_d * log_n * math.sqrt(log_delta) / (s.epsilon * math.sqrt(s.n))
    tree = {
        "sampling": scale * math.sqrt(log_d / s.n) * log_n,
        "privacy": scale * (log_d * log_n**2 * log_delta / (s.epsilon * s.n)) ** (2 / 3),
    }
    lower = {"sampling": min(s.scale, s.scale * math.sqrt(log_d / s.n))}
    return (
        _upper("polyhedral Frank–Wolfe", {"privacy": poly}, "smooth losses", source=NANDI),
        _upper("tree Frank–Wolfe", tree, "smooth losses", source=ASI),
        order_only("lower bound", RISK, lower, LIPSCHITZ, SAMPLED, source=NANDI, is_lower=True),
    )


def nonconvex(sizes: Sizes, *, p: float) -> Bound:
    """The Frank–Wolfe gap that is reached for smooth losses that need not be convex, 1 ≤ p ≤ 2."""
    s = sizes
    _checked(p)
    if p > 2:
        raise Unsupported(f"the nonconvex table covers 1 <= p <= 2, got p = {p:g}")
    if p == 1:
        terms = {"privacy": math.log(max(2, s.d)) ** (2 / 3) / (s.epsilon * s.n) ** (1 / 3)}
    else:
        terms = {"sampling": s.n ** (-1 / 3), "privacy": s.per_private_row**0.4}
    return order_only("stationary Frank–Wolfe", "Frank–Wolfe gap", terms, "smooth losses", SAMPLED,
                      source=MENART)  # fmt: skip


def weakly_convex(sizes: Sizes) -> Bound:
    """The Moreau-envelope gradient of the proximal scheme for weakly convex losses, p = 2."""
    terms = {"sampling": sizes.n**-0.25, "privacy": sizes.per_private_row ** (1 / 3)}
    what = "Moreau gradient norm"
    return order_only(
        "proximal scheme", what, terms, "weakly convex Lipschitz losses", SAMPLED, source=MENART
    )


def _checked(p: float) -> None:
    if not isinstance(p, int | float) or not p >= 1:
        raise InvalidInput(f"p must be a number >= 1 (math.inf for the largest entry), got {p!r}")


def _euclidean(s: Sizes, first: float, second: float) -> dict[str, float]:
    """LR(a/√n + b√d/(εn))."""
    return {
        "sampling": s.scale * first / math.sqrt(s.n),
        "privacy": s.scale * second * s.per_private_row,
    }


def _upper(name: str, terms: dict[str, float], *conditions: str, source: str) -> Bound:
    return order_only(name, RISK, terms, LIPSCHITZ, *conditions, SAMPLED, source=source)
