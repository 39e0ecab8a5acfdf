"""Noise or steps for a target ε: monotone searches that end on the safe side.

    smallest(fn, target)         least x with fn(x) ≤ target, fn falling in x
    largest_whole(fn, target)    greatest whole n with fn(n) ≤ target, fn rising in n

What they return has itself been evaluated and meets the target; it is never interpolated. With
the exact Gaussian curve the noise has a closed inverse. Accountants by name:

    exact      one Gaussian without sampling (rate 1): `gaussian`
    rdp        Rényi: `renyi`, sampling "poisson" or "fixed"
    fourier    privacy-loss distribution, sampling "poisson" or "fixed": `fourier`

`options` of the searches are those of `epsilon`: rate, steps, accountant, sampling and
squared_sensitivity, less what is searched for.

>>> round(noise_multiplier(epsilon=1.0, delta=1e-5), 4)
3.7306
>>> round(noise_multiplier(epsilon=2.0, delta=1e-5, rate=0.01, steps=500, accountant="rdp"), 4)
0.927
>>> steps(epsilon=1.0, delta=1e-5, noise_multiplier=20.0)
28
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from functools import cache
from typing import Any

from scipy.optimize import brentq

from noshuffle.accounting import fourier, gaussian, renyi
from noshuffle.errors import (
    MAX_STEPS,
    InvalidInput,
    Unsupported,
    callables,
    instance_of,
    one_of,
    open_unit,
    positive,
    unit_rate,
    whole,
)

ACCOUNTANTS = ("exact", "rdp", "fourier")
#: Where the search for a number ends.
_LEAST, _MOST = 1e-6, 1e12


def smallest(
    fn: Callable[[float], float],
    target: float,
    *,
    start: float = 1.0,
    tolerance: float = 1e-6,
) -> float:
    """The least x > 0, to a relative tolerance, with fn(x) ≤ target, for fn falling in x.

    Guarantees: fn(result) ≤ target has been evaluated. Raises if even 1e12 does not reach the
    target; returns 1e-6 if that already does.
    """
    positive(target=target, start=start, tolerance=tolerance)
    callables(fn=fn)

    @cache
    def value(log_x: float) -> float:
        found = _real(fn(math.exp(log_x)))
        if math.isnan(found):
            raise InvalidInput(f"fn must return numbers, got NaN at {math.exp(log_x)!r}")
        return found

    def excess(log_x: float) -> float:
        v = value(log_x)
        return math.log(v / target) if 0 < v < math.inf else math.copysign(50, v - 1)

    floor, ceiling, stride = math.log(_LEAST), math.log(_MOST), 0.25
    low = high = math.log(min(max(start, _LEAST), _MOST))
    while excess(low) <= 0:
        if low <= floor:
            return _LEAST
        high, low, stride = low, max(low - stride, floor), 2 * stride
    while excess(high) > 0:
        if high >= ceiling:
            raise Unsupported(
                f"no value up to {_MOST:g} meets the target {target:g}; allow a larger one"
            )
        low, high, stride = high, min(high + stride, ceiling), 2 * stride
    x = float(brentq(excess, low, high, xtol=tolerance / 4, maxiter=200))
    nudge = tolerance / 4
    while excess(x) > 0:  # the root may lie on either side; step over it
        x = min(x + nudge, high)
        nudge *= 2
    return math.exp(x if value(x) <= target else high)


def _real(value: object) -> float:
    """What a function under search returned, if it is a number."""
    instance_of(numbers.Real, **{"what fn returns": value})
    return value  # type: ignore[return-value]


def largest_whole(
    fn: Callable[[int], float], target: float, *, start: int = 1, most: int = MAX_STEPS
) -> int:
    """The greatest whole n ≥ 1 with fn(n) ≤ target, for fn rising in n.

    Guarantees: fn(result) ≤ target has been evaluated. Raises if n = 1 is already too many.
    """
    positive(target=target)
    whole(start=start, most=most)
    callables(fn=fn)

    def meets(n: int) -> bool:
        return _real(fn(n)) <= target

    good, bad = 0, most + 1
    n, stride = min(start, most), 2.0
    while good < n < bad and not (good and bad <= most):  # gallop until both sides are known
        if meets(n):
            good, n = n, min(math.ceil(n * stride), most)
        else:
            bad, n = n, max(int(n / stride), 1)
        stride *= stride
    if good == 0:
        raise Unsupported(
            f"even one is too many for the target {target:g}; add noise or allow more epsilon"
        )
    while bad - good > 1:
        middle = math.isqrt(good * bad) if bad > 2 * good and bad <= most else (good + bad) // 2
        middle = min(max(middle, good + 1), bad - 1)
        if meets(middle):
            good = middle
        else:
            bad = middle
    return good


def epsilon(
    *,
    noise_multiplier: float,
    delta: float,
    rate: float = 1.0,
    steps: int = 1,
    accountant: str = "exact",
    sampling: str = "poisson",
    squared_sensitivity: float = 1.0,
) -> float:
    """ε by a named accountant: what the searches below evaluate."""
    positive(noise_multiplier=noise_multiplier, squared_sensitivity=squared_sensitivity)
    open_unit(delta=delta)
    unit_rate(rate=rate)
    whole(steps=steps)
    one_of(ACCOUNTANTS, accountant=accountant)
    one_of(renyi.SAMPLINGS, sampling=sampling)
    noise = noise_multiplier / math.sqrt(squared_sensitivity)
    if accountant == "rdp":
        return renyi.epsilon(
            noise_multiplier=noise, delta=delta, rate=rate, steps=steps, sampling=sampling
        )
    if rate == 1:
        return gaussian.epsilon(mu=math.sqrt(steps) / noise, delta=delta)
    if accountant == "exact":
        raise Unsupported('the exact curve has no sampling (rate 1); use accountant="fourier"')
    common: dict[str, Any] = {"rate": rate, "steps": steps, "delta": delta}
    if sampling == "fixed":  # here noise counts in the whole swap, there in one clip norm
        return fourier.epsilon(noise_multiplier=2 * noise, direction="fixed", **common)
    return fourier.epsilon(noise_multiplier=noise, **common)


_evaluate = epsilon  # the searches have an argument of that name


def _central_limit(
    epsilon: float, delta: float, noise: float, options: dict[str, Any]
) -> tuple[float, float]:
    """μ of (ε, δ), and S/σ²: about μ² = q² T (e^{S/σ²} − 1), which is where searches begin."""
    squared = options.get("squared_sensitivity", 1.0)
    positive(epsilon=epsilon, noise_multiplier=noise, squared_sensitivity=squared)
    return gaussian.mu(epsilon=epsilon, delta=delta), squared / noise**2


def noise_multiplier(
    *, epsilon: float, delta: float, tolerance: float = 1e-6, **options: Any
) -> float:
    """The least noise multiplier for (ε, δ); evaluated there, the accountant says at most ε."""
    rate, steps = options.get("rate", 1.0), options.get("steps", 1)
    unit_rate(rate=rate)
    whole(steps=steps)
    mu, squared = _central_limit(epsilon, delta, 1.0, options)

    def at(noise: float) -> float:
        return _evaluate(noise_multiplier=noise, delta=delta, **options)

    if rate == 1:
        guess = math.sqrt(steps * squared) / mu
        if options.get("accountant") != "rdp":
            while at(guess) > epsilon:
                guess *= 1 + 1e-15
            return guess
    else:
        guess = math.sqrt(squared / math.log1p((mu / rate) ** 2 / steps))
    return smallest(at, epsilon, start=guess, tolerance=tolerance)


def steps(*, epsilon: float, delta: float, noise_multiplier: float, **options: Any) -> int:
    """The most equal steps within (ε, δ), up to `MAX_STEPS`."""
    rate = options.get("rate", 1.0)
    unit_rate(rate=rate)
    mu, per_step = _central_limit(epsilon, delta, noise_multiplier, options)
    per_step = min(per_step, 300.0)
    guess = (mu / rate) ** 2 / math.expm1(per_step) if rate < 1 else mu**2 / per_step
    options |= {"noise_multiplier": noise_multiplier, "delta": delta}
    start = int(min(max(guess, 1), MAX_STEPS))
    return largest_whole(lambda n: _evaluate(steps=n, **options), epsilon, start=start)
