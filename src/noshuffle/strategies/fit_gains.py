"""Fit per-step gains together with the filter: C = T(c)·diag(g).

Several epochs. For any gains g the division g_{j+lb} ← g_{j+lb} / S_j makes every place j of an
epoch exactly as sensitive as allowed, so the constrained problem becomes the free minimization of

    n·rms² = ‖A·diag(d)·T(1/c)‖²,   d_{j+lb} = S_j / g_{j+lb}

over log g, the poles and the taps at once, by L-BFGS with the exact gradient of `blt_gains`: O(n)
per evaluation. |⟨·,·⟩| is smoothed for the search, less and less; the value that is reported is the
unsmoothed one. The gains that come back are divided by S, so the sensitivity is 1.

One participation. Every column is its own place, hence unit columns (`normalized`) are forced and
only the poles are searched (Henzinger–Upadhyay, arXiv 2509.14334).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from scipy.optimize import minimize

from noshuffle.strategies import blt_forms as forms
from noshuffle.strategies.blt import Blt
from noshuffle.strategies.blt_gains import (
    encoder_series,
    sensitivity_classes,
    total_squared_error,
)
from noshuffle.strategies.blt_poles import (
    ValueGradient,
    bounds,
    differentiate,
    filter_from,
    poles,
    spaced,
    strategy_at,
    unbounded,
)
from noshuffle.strategies.fit_forms import Fit
from noshuffle.strategies.recipe import Array

#: Horizon up to which the poles of a column-normalized BLT are searched; above, they are taken
#: from the plain fit, which costs about one part in a thousand.
NORMALIZED_SEARCH_LIMIT = 20_000

#: Smoothing of |·| in one search after the other. More of it, or more rounds, change the sixth
#: digit of the error.
_SMOOTHING = (1e-3, 1e-5)
#: Iterations of a round: of short runs, which take no time, and of others.
_SHORT, _ITERATIONS = 512, (1000, 150)
_TAP_BOUNDS = (-0.95, 0.95)


def scheduled_error(x: Array, d: int, rates: Array, *, lag: int) -> ValueGradient:
    """log rms² of (poles, taps) under learning rates without momentum, with its gradient."""
    parts = filter_from(x[: 2 * d])
    total, pull = total_squared_error(
        rates, parts.hat_decays, parts.nu, parts.hat_kappa, x[2 * d :], lag=lag
    )
    _, by_decays, by_nu, by_kappa, by_taps = pull()
    nothing = np.zeros(2 * d + 1)
    by_x = np.concatenate([parts.pull(nothing, by_decays, by_nu, by_kappa), by_taps])
    return float(np.log(total / len(rates))), by_x / total


def tight_error(
    log_gains: Array, x: Array, d: int, *, epochs: int, rates: Array, smoothing: float = 0.0
) -> tuple[float, Array, Array, Array]:
    """(log error, its gradient by log g, by (poles, taps), S_j) once every place is made tight."""
    n = len(log_gains)
    lag = n // epochs
    g, taps, parts = np.exp(log_gains), x[2 * d :], filter_from(x[: 2 * d])
    c, pull_c = encoder_series(parts.decays, parts.r, parts.kappa, taps, steps=n, lag=lag)
    squared, pull_squared = sensitivity_classes(c, g, epochs=epochs, smoothing=smoothing)
    allowed = np.sqrt(squared)
    scale = rates * np.tile(allowed, epochs) / g
    total, pull_error = total_squared_error(
        scale, parts.hat_decays, parts.nu, parts.hat_kappa, taps, lag=lag
    )
    by_scale, by_hat, by_nu, by_hat_kappa, by_taps = pull_error()
    by_allowed = (by_scale * scale).reshape(epochs, lag).sum(axis=0) / allowed
    by_c, by_g = pull_squared(by_allowed / (2 * allowed))
    by_decays, by_r, by_kappa, by_taps_too = pull_c(by_c)
    by_poles = parts.pull(by_decays, by_r, by_kappa, by_hat, by_nu, by_hat_kappa)
    by_x = np.concatenate([by_poles, by_taps + by_taps_too])
    half = 0.5 / total
    value = 0.5 * float(np.log(total / n))
    return value, half * (by_g * g - by_scale * scale), half * by_x, allowed


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
        _search_gains(np.concatenate([u, strategy.taps]), len(u) // 2, epochs=epochs, rates=eta)
        for u in starts
    ]
    value, best, d, converged, _ = min(results, key=lambda result: result[0])
    iterations = plain.iterations + sum(result[4] for result in results)
    if np.exp(value) > plain.objective:  # cannot beat constant gains: keep what was given
        return replace(plain, iterations=iterations)
    fitted = strategy_at(best[steps : steps + 2 * d], taps=best[steps + 2 * d :], lag=lag)
    g = np.exp(best[:steps])
    squared, _ = sensitivity_classes(fitted.coefficients(steps), g, epochs=epochs)
    fitted = replace(fitted, gains=tuple(g / np.tile(np.sqrt(squared), epochs)))
    return Fit(fitted, float(np.exp(value)), converged, iterations, plain.start)


def _search_gains(
    x: Array, d: int, *, epochs: int, rates: Array
) -> tuple[float, Array, int, bool, int]:
    """(log objective, (log g, u, taps), d, converged, iterations) of one search from g = 1.

    One gain of n matters about n times less to the error than a pole does, so gains are searched
    in units of √n: all directions are then about equally curved.
    """
    steps = len(rates)
    unit = np.concatenate([np.full(steps, np.sqrt(steps)), np.ones(len(x))])

    def objective(v: Array, smoothing: float) -> ValueGradient:
        v = v * unit
        value, by_gains, by_x, _ = tight_error(
            v[:steps], v[steps:], d, epochs=epochs, rates=rates, smoothing=smoothing
        )
        return value, np.concatenate([by_gains, by_x]) * unit

    point = np.concatenate([np.zeros(steps), x])
    most = 12.0 / np.sqrt(steps)
    limits = [(-most, most)] * steps + bounds(d) + [_TAP_BOUNDS] * (len(x) - 2 * d)
    best, value, converged, iterations = point, objective(point, 0.0)[0], True, 0
    for smoothing in _SMOOTHING:
        found = minimize(
            objective,
            point,
            args=(smoothing,),
            jac=True,
            method="L-BFGS-B",
            bounds=limits,
            options={"maxiter": _ITERATIONS[steps > _SHORT], "maxcor": 30, "ftol": 1e-10},
        )
        point, iterations = found.x, iterations + int(found.nit)
        exact = objective(point, 0.0)[0]
        if exact < value:
            best, value, converged = point, exact, bool(found.success)
    return value, best * unit, d, converged, iterations


def _normalized_objective(
    steps: int, rates: Array, *, is_max: bool
) -> Callable[[Array], ValueGradient]:
    def largest(u: forms.Numbers) -> forms.Numbers:
        gap, hat = poles(u)
        norms = np.sqrt(np.cumsum(forms.series(gap, hat, steps) ** 2, axis=-1))[..., ::-1]
        errors = forms.step_errors(gap, hat, rates * norms)
        worst = np.argmax(errors.real, axis=-1)
        return np.asarray(0.5 * np.log(np.take_along_axis(errors, worst[..., None], -1)[..., 0]))

    def mean(u: Array) -> ValueGradient:
        d = len(u) // 2
        value, _, by_u, _ = tight_error(np.zeros(steps), u, d, epochs=1, rates=rates)
        return value, by_u

    return (lambda u: differentiate(largest, u)) if is_max else mean


def fit_normalized(plain: Fit, *, steps: int, rates: Array | None, is_max: bool) -> Fit:
    """Unit columns for one participation, from a fit without gains."""
    strategy = plain.strategy
    assert isinstance(strategy, Blt)
    eta = np.ones(steps) if rates is None else rates
    objective = _normalized_objective(steps, eta, is_max=is_max)
    start = unbounded(strategy)
    value, _ = objective(start)
    best, converged, iterations = None, plain.converged, plain.iterations
    if steps <= NORMALIZED_SEARCH_LIMIT:
        found = minimize(
            objective,
            start,
            jac=True,
            method="L-BFGS-B",
            bounds=bounds(len(strategy.decays)),
            options={"maxiter": 300, "maxcor": 30, "ftol": 1e-12, "gtol": 1e-7},
        )
        iterations += int(found.nit)
        if found.fun < value:
            best, value, converged = found.x, float(found.fun), bool(found.success)
    if best is not None:
        strategy = strategy_at(best)
    strategy = replace(strategy, normalized=steps)
    return Fit(strategy, float(np.exp(value)), converged, iterations, plain.start)
