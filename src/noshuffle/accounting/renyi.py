"""Rényi and zero-concentrated privacy of Gaussian mechanisms, and the way back to (ε, δ).

Rényi divergences add up over steps, D(α) = Σ steps · D_step(α). Two conversions:

    classical    ε = min_α D(α) + log(1/δ)/(α − 1)                    [1]
    cks          ε = min_α D(α) + log(1 − 1/α) − log(δα)/(α − 1)      [2]

([1] Mironov, 2017; [2] Canonne, Kamath, Steinke, 2020), and with "cks" ε = 0 where for some α
δ ≥ √(1 − e^{−D}) (Bretagnolle and Huber). Every α gives a valid bound; `orders=None` takes the
customary list, `real_orders=True` the best real α. zCDP is the case D(α) = ρα. These are upper
bounds: for Gaussians without sampling the exact curve is 4 to 8 % smaller (`gaussian`), with
Poisson sampling `fourier` is tighter. No state.

>>> round(epsilon(noise_multiplier=1.0, rate=0.01, steps=1000, delta=1e-5), 6)
2.101365
>>> round(epsilon_from_rho(rho=0.5, delta=1e-5, conversion="classical", real_orders=True), 6)
5.298526
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from scipy.optimize import brentq, minimize_scalar

from noshuffle.accounting import renyi_curves
from noshuffle.errors import (
    InvalidInput,
    non_negative,
    number_tuple,
    one_of,
    open_unit,
    positive,
    record_list,
    unit_rate,
    whole,
)

#: 1.1 to 10.9 by 0.1, 11 to 63, and four large orders: the list published figures use.
DEFAULT_ORDERS: tuple[float, ...] = (
    *(1 + k / 10 for k in range(1, 100)),
    *map(float, range(11, 64)),
    128.0,
    256.0,
    512.0,
    1024.0,
)
CONVERSIONS = ("cks", "classical")
SAMPLINGS = ("poisson", "fixed")

#: (noise_multiplier, rate, steps) of equal steps.
Steps = tuple[float, float, int]


def divergence(
    *, noise_multiplier: float, order: float, rate: float = 1.0, sampling: str = "poisson"
) -> float:
    """Rényi divergence of one step: exact for Poisson sampling (add/remove), a bound for fixed.

    Guarantees: not below the truth but for rounding (1e-12 relative). With sampling="fixed" the
    neighbours differ by replacement and noise_multiplier counts the noise in that sensitivity
    (twice the clip norm).
    """
    positive(noise_multiplier=noise_multiplier)
    unit_rate(rate=rate)
    one_of(SAMPLINGS, sampling=sampling)
    positive(order=order)
    _check_orders((order,))
    return float(_curve(noise_multiplier, rate, sampling, (order,))[0])


def curve(
    steps: Iterable[Steps], *, orders: Sequence[float] | None = None, sampling: str = "poisson"
) -> np.ndarray:
    """Divergences at `orders` of any composition, given as (noise_multiplier, rate, steps)."""
    one_of(SAMPLINGS, sampling=sampling)
    chosen = _chosen(orders)
    _check_orders(chosen)
    total = np.zeros(len(chosen))
    for (noise_multiplier, rate), count in _merged(steps).items():
        total += count * _curve(noise_multiplier, rate, sampling, chosen)
    return total


def epsilon(
    *,
    noise_multiplier: float,
    delta: float,
    rate: float = 1.0,
    steps: int = 1,
    sampling: str = "poisson",
    conversion: str = "cks",
    orders: Sequence[float] | None = None,
    real_orders: bool = False,
    squared_sensitivity: float = 1.0,
) -> float:
    """ε at the given δ of `steps` equal steps; an upper bound.

    Guarantees: holds for add/remove (and zero-out) neighbours under Poisson sampling, for
    replace-one under "fixed" (noise_multiplier then counts the noise in the doubled sensitivity).
    Zero noise, δ outside (0, 1), NaN and infinity are refused.
    """
    positive(noise_multiplier=noise_multiplier, squared_sensitivity=squared_sensitivity)
    record = (noise_multiplier / math.sqrt(squared_sensitivity), rate, steps)
    return compose_epsilon(
        [record],
        delta=delta,
        sampling=sampling,
        conversion=conversion,
        orders=orders,
        real_orders=real_orders,
    )


def delta(
    *,
    noise_multiplier: float,
    epsilon: float,
    rate: float = 1.0,
    steps: int = 1,
    sampling: str = "poisson",
    conversion: str = "cks",
    orders: Sequence[float] | None = None,
    squared_sensitivity: float = 1.0,
) -> float:
    """δ at the given ε of `steps` equal steps; an upper bound, at most 1."""
    positive(noise_multiplier=noise_multiplier, squared_sensitivity=squared_sensitivity)
    non_negative(epsilon=epsilon)
    record = (noise_multiplier / math.sqrt(squared_sensitivity), rate, steps)
    chosen = _chosen(orders)
    divergences = curve([record], orders=chosen, sampling=sampling)
    return delta_from_curve(chosen, divergences, epsilon=epsilon, conversion=conversion)


def compose_epsilon(
    steps: Iterable[Steps],
    *,
    delta: float,
    sampling: str = "poisson",
    conversion: str = "cks",
    orders: Sequence[float] | None = None,
    real_orders: bool = False,
) -> float:
    """ε of unequal steps, given as (noise_multiplier, rate, steps); an upper bound."""
    open_unit(delta=delta)
    one_of(CONVERSIONS, conversion=conversion)
    if real_orders and orders is not None:
        raise InvalidInput("give either orders or real_orders=True, not both")
    records = [(*key, count) for key, count in _merged(steps).items()]
    if real_orders and all(rate == 1 for _, rate, _ in records):
        rho = sum(count / (2 * sigma**2) for sigma, _, count in records)
        return epsilon_from_rho(rho=rho, delta=delta, conversion=conversion, real_orders=True)
    chosen = _chosen(orders)
    divergences = curve(records, orders=chosen, sampling=sampling)
    best = epsilon_from_curve(chosen, divergences, delta=delta, conversion=conversion)
    if not real_orders:
        return best

    def at(log_gap: float) -> float:
        order = 1 + math.exp(log_gap)
        value = curve(records, orders=(order,), sampling=sampling)
        return epsilon_from_curve((order,), value, delta=delta, conversion=conversion)

    each = [
        epsilon_from_curve((a,), (d,), delta=delta, conversion=conversion)
        for a, d in zip(chosen, divergences)
    ]
    i = int(np.argmin(each))
    low, high = chosen[max(i - 1, 0)], chosen[min(i + 1, len(chosen) - 1)]
    found = minimize_scalar(
        at,
        bounds=(math.log(low - 1), math.log(high - 1)),
        method="bounded",
        options={"xatol": 1e-6},
    )
    return min(best, float(found.fun))


def epsilon_from_rho(
    *,
    rho: float,
    delta: float,
    conversion: str = "cks",
    orders: Sequence[float] | None = None,
    real_orders: bool = False,
) -> float:
    """ε at δ of a ρ-zCDP mechanism: D(α) = ρα."""
    non_negative(rho=rho)
    open_unit(delta=delta)
    one_of(CONVERSIONS, conversion=conversion)
    if real_orders and orders is not None:
        raise InvalidInput("give either orders or real_orders=True, not both")
    if not real_orders:
        chosen = np.asarray(_chosen(orders))
        return epsilon_from_curve(chosen, rho * chosen, delta=delta, conversion=conversion)
    if rho == 0:
        return 0.0
    if conversion == "classical":
        return rho + 2 * math.sqrt(-rho * math.log(delta))

    # The derivative of the bound in α is ρ + log(δα)/(α − 1)²: one sign change, found exactly.
    def slope(log_gap: float) -> float:
        gap = math.exp(log_gap)
        return rho * gap**2 + math.log(delta) + math.log1p(gap)

    ends = math.log(1e-12), min(math.log(-math.log(delta) / rho) / 2, -math.log(delta)) + 1e-9
    root = ends[0] if slope(ends[0]) >= 0 else float(brentq(slope, *ends, xtol=1e-15))
    order = 1 + math.exp(root)
    return epsilon_from_curve((order,), (rho * order,), delta=delta, conversion="cks")


def epsilon_from_curve(
    orders: Sequence[float] | np.ndarray,
    divergences: Sequence[float] | np.ndarray,
    *,
    delta: float,
    conversion: str = "cks",
) -> float:
    """The best ε that divergences at several orders imply; never below 0."""
    open_unit(delta=delta)
    one_of(CONVERSIONS, conversion=conversion)
    a, d = _checked(orders, divergences)
    if conversion == "classical":
        return max(0.0, float(np.min(d - math.log(delta) / (a - 1))))
    if np.any(delta**2 + np.expm1(-d) > 0):
        return 0.0
    # D + log(1 − 1/α) − log(δα)/(α − 1), with log(1 − 1/α) = log(α − 1) − log α
    values = d + np.log1p(-1 / a) - (math.log(delta) + np.log(a)) / (a - 1)
    return max(0.0, float(np.min(values)))


def delta_from_curve(
    orders: Sequence[float] | np.ndarray,
    divergences: Sequence[float] | np.ndarray,
    *,
    epsilon: float,
    conversion: str = "cks",
) -> float:
    """The best δ that divergences at several orders imply; never above 1."""
    non_negative(epsilon=epsilon)
    one_of(CONVERSIONS, conversion=conversion)
    a, d = _checked(orders, divergences)
    if conversion == "classical":
        return math.exp(min(0.0, float(np.min((a - 1) * (d - epsilon)))))
    tail = (a - 1) * (d - epsilon + np.log1p(-1 / a)) - np.log(a)
    with np.errstate(divide="ignore"):
        total_variation = 0.5 * np.log(-np.expm1(-d))
    return math.exp(min(0.0, float(np.min(np.minimum(tail, total_variation)))))


def _checked(
    orders: Sequence[float] | np.ndarray, divergences: Sequence[float] | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    a = np.asarray(number_tuple(orders=orders))
    d = np.asarray(number_tuple(divergences=divergences))
    _check_orders(tuple(a))
    if a.shape != d.shape:
        raise InvalidInput(f"orders and divergences must pair up, got {a.shape} and {d.shape}")
    if np.any(np.isnan(d)) or np.any(d < 0):
        raise InvalidInput("divergences must be numbers >= 0, got a negative one or NaN")
    return a, d


def _chosen(orders: Sequence[float] | None) -> tuple[float, ...]:
    return DEFAULT_ORDERS if orders is None else number_tuple(orders=orders)


def _check_orders(orders: Sequence[float]) -> None:
    if not orders or not all(1 < a < math.inf for a in orders):
        raise InvalidInput(f"orders must be finite numbers above 1, got {list(orders)[:5]!r}")


def _merged(steps: Iterable[Steps]) -> dict[tuple[float, float], int]:
    """Equal steps counted together; NumPy scalars and integers become plain floats here."""
    out: dict[tuple[float, float], int] = {}
    for noise_multiplier, rate, count in record_list(3, steps=steps):
        positive(noise_multiplier=noise_multiplier)
        unit_rate(rate=rate)
        whole(steps=count)
        key = (float(noise_multiplier), float(rate))
        out[key] = out.get(key, 0) + int(count)
    if not out:
        raise InvalidInput("steps must hold at least one (noise_multiplier, rate, steps) record")
    return out


def _curve(sigma: float, rate: float, sampling: str, orders: Sequence[float]) -> np.ndarray:
    if sampling == "fixed":
        return renyi_curves.fixed_size(noise_multiplier=sigma, rate=rate, orders=orders)
    one: Callable[[float], float] = lambda a: renyi_curves.poisson(  # noqa: E731
        noise_multiplier=sigma, rate=rate, order=a
    )
    return np.array([one(a) for a in orders])
