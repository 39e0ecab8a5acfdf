"""Fit per-step gains together with the filter: C = T(c)·diag(g).

Several epochs. For any gains g the division g_{j+lb} ← g_{j+lb} / S_j makes every place j of an
epoch exactly as sensitive as allowed, so the constrained problem becomes the free minimization of

    n·rms² = ‖A·diag(d)·T(1/c)‖²,   d_{j+lb} = S_j / g_{j+lb}

over log g, the poles and the taps at once, by L-BFGS with the exact gradient of `blt_gains`: O(n)
per evaluation. |⟨·,·⟩| is smoothed for the search, less and less; the value that is reported is the
unsmoothed one. The gains that come back are divided by S, so the sensitivity is 1. Gains on both
sides (`fit_two_sided`) are searched in the same way, with T(1/c)·diag(1/a) for T(1/c).

One participation. Every column is its own place, hence unit columns (`normalized`) are forced and
only the poles are searched (Henzinger–Upadhyay, arXiv 2509.14334).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from noshuffle.strategies.blt import Blt
from noshuffle.strategies.blt_gains import (
    classes_squared,
    encoder_series,
    total_squared_error,
)
from noshuffle.strategies.blt_poles import (
    ValueGradient,
    bounds,
    filter_from,
    spaced,
    strategy_at,
    unbounded,
)
from noshuffle.strategies.fit_forms import Fit, lbfgs
from noshuffle.strategies.recipe import Array
from noshuffle.strategies.toeplitz_sensitivity import class_sums

#: Horizon up to which the poles of a column-normalized BLT are searched; above, they are taken
#: from the plain fit, which costs about one part in a thousand.
NORMALIZED_SEARCH_LIMIT = 20_000

#: Smoothing of |·| in one search after the other. More of it, or more rounds, change the sixth
#: digit of the error.
_SMOOTHING = (1e-3, 1e-5)
#: Iterations of a round: of short runs, which take no time, and of others.
_SHORT, _ITERATIONS = 512, (1000, 150)
_GAIN_LIMIT = 12.0
TAP_BOUNDS = (-0.95, 0.95)


def scheduled_error(x: Array, d: int, rates: Array, *, lag: int) -> ValueGradient:
    """log rms² of (poles, taps) under learning rates without momentum, with its gradient."""
    parts = filter_from(x[: 2 * d])
    total, pull = total_squared_error(
        rates, parts.hat_decays, parts.nu, parts.hat_kappa, x[2 * d :], np.ones(len(rates)), lag=lag
    )
    _, by_decays, by_nu, by_kappa, _, by_taps = pull()
    nothing = np.zeros(2 * d + 1)
    by_x = np.concatenate([parts.pull(nothing, by_decays, by_nu, by_kappa), by_taps])
    return float(np.log(total / len(rates))), by_x / total


def tight_error(
    gains: list[Array], x: Array, d: int, *, epochs: int, rates: Array, smoothing: float = 0.0
) -> ValueGradient:
    """log rms once every place is tight, with its gradient by (gains, poles, taps).

    `gains` is [log g], or [log g, log a²] for gains on both sides. Only a·g matters, so the mean of
    log a² is taken out: smoothing must not depend on it.
    """
    n, taps, parts = len(rates), x[2 * d :], filter_from(x[: 2 * d])
    lag, g = n // epochs, np.exp(gains[0])
    weights = np.exp(gains[1] - gains[1].mean()) if len(gains) > 1 else np.ones(n)
    c, pull_c = encoder_series(parts.decays, parts.r, parts.kappa, taps, steps=n, lag=lag)
    squared, pull_squared = classes_squared(c, g, weights, epochs=epochs, smoothing=smoothing)
    allowed = np.sqrt(squared)
    scale = rates * np.tile(allowed, epochs) / g
    total, pull_error = total_squared_error(
        scale, parts.hat_decays, parts.nu, parts.hat_kappa, taps, 1.0 / weights, lag=lag
    )
    by_scale, by_hat, by_nu, by_hat_kappa, by_inverse, by_taps = pull_error()
    by_allowed = (by_scale * scale).reshape(epochs, lag).sum(axis=0) / allowed
    by_c, by_g, by_weights = pull_squared(by_allowed / (2 * allowed))
    by_decays, by_r, by_kappa, by_taps_too = pull_c(by_c)
    gradient = [by_g * g - by_scale * scale]
    if len(gains) > 1:
        by_log = by_weights * weights - by_inverse / weights
        gradient.append(by_log - by_log.mean())
    gradient.append(parts.pull(by_decays, by_r, by_kappa, by_hat, by_nu, by_hat_kappa))
    gradient.append(by_taps + by_taps_too)
    return 0.5 * float(np.log(total / n)), np.concatenate(gradient) * (0.5 / total)


class GainSearch(NamedTuple):
    """Where a search ended: log of the exact objective, gains as in `tight_error`, (u, taps)."""

    value: float
    gains: list[Array]
    x: Array
    converged: bool


def search_gains(
    gains: list[Array],
    x: Array,
    d: int,
    *,
    epochs: int,
    rates: Array,
    rounds: tuple[float, ...],
    **options: float,
) -> GainSearch:
    """The best of one search per smoothing, each from where the one before it ended.

    One gain of n matters about n times less to the error than a pole does, so gains are searched
    in units of √n: all directions are then about equally curved.
    """
    n, size = len(rates), len(gains) * len(rates)
    unit = np.concatenate([np.full(size, np.sqrt(n)), np.ones(len(x))])
    limits = [(-_GAIN_LIMIT / unit[0], _GAIN_LIMIT / unit[0])] * size + bounds(d)
    limits += [TAP_BOUNDS] * (len(x) - 2 * d)

    def cut(v: Array) -> tuple[list[Array], Array]:
        *parts, last = np.split(v * unit, range(n, size + 1, n))
        return parts, last

    def objective(v: Array, smoothing: float) -> ValueGradient:
        parts, last = cut(v)
        value, slope = tight_error(parts, last, d, epochs=epochs, rates=rates, smoothing=smoothing)
        return value, slope * unit

    point = np.concatenate([*gains, x]) / unit
    best, least, converged = point, objective(point, 0.0)[0], len(gains) == 1
    for smoothing in rounds:
        found = lbfgs(objective, point, limits, args=(smoothing,), **options)
        point = found.x
        if (exact := objective(point, 0.0)[0]) < least:
            best, least, converged = point, exact, bool(found.success)
    return GainSearch(least, *cut(best), converged)


def fit_gains(plain: Fit, *, steps: int, epochs: int, rates: Array | None, buffers: int) -> Fit:
    """Gains, poles and taps for `epochs` epochs, from a fit without gains.

    If buffers cancelled in that fit, a second search starts from evenly spaced poles: with gains
    they may be worth having.
    """
    strategy = plain.strategy
    assert isinstance(strategy, Blt)
    eta = np.ones(steps) if rates is None else rates
    lag = steps // epochs
    starts = [unbounded(strategy)]
    if len(strategy.decays) < buffers:
        starts.append(spaced(buffers, 0.3 / lag, 0.6))
    results = [
        search_gains(
            [np.zeros(steps)],
            np.concatenate([u, strategy.taps]),
            len(u) // 2,
            epochs=epochs,
            rates=eta,
            rounds=_SMOOTHING,
            maxiter=_ITERATIONS[steps > _SHORT],
            maxcor=30,
            ftol=1e-10,
        )
        for u in starts
    ]
    best = min(results, key=lambda result: result.value)
    if np.exp(best.value) > plain.objective:  # cannot beat constant gains
        return plain
    u, taps = np.split(best.x, [len(best.x) - len(strategy.taps)])
    fitted, g = strategy_at(u, taps=taps, lag=lag), np.exp(best.gains[0])
    squared, _ = class_sums(fitted.coefficients(steps), g, steps_per_epoch=lag)
    fitted = replace(fitted, gains=tuple(g / np.tile(np.sqrt(squared), epochs)))
    return Fit(fitted, float(np.exp(best.value)), best.converged)


def fit_normalized(plain: Fit, *, steps: int, rates: Array | None) -> Fit:
    """Unit columns for one participation, from a fit without gains."""
    strategy = plain.strategy
    assert isinstance(strategy, Blt)
    eta = np.ones(steps) if rates is None else rates

    def objective(u: Array) -> ValueGradient:
        value, slope = tight_error([np.zeros(steps)], u, len(u) // 2, epochs=1, rates=eta)
        return value, slope[steps:]

    start, converged = unbounded(strategy), plain.converged
    value, _ = objective(start)
    if steps <= NORMALIZED_SEARCH_LIMIT:
        limits = bounds(len(strategy.decays))
        found = lbfgs(objective, start, limits, maxiter=300, maxcor=30, ftol=1e-12, gtol=1e-7)
        if found.fun < value:
            value, converged = float(found.fun), bool(found.success)
            strategy = strategy_at(found.x)
    strategy = replace(strategy, normalized=steps)
    return Fit(strategy, float(np.exp(value)), converged)
