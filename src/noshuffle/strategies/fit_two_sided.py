"""Fit BLT noise with gains on both sides: C = diag(a)·T(c)·diag(g).

    minimize  sens(C) · rms(A·C⁻¹)   over the poles, the taps, log g and log a² at once

For any g the division g_{j+lb} ← g_{j+lb} / S_j makes every place j of an epoch exactly as
sensitive as allowed, so the constraint is gone and what is left is the free minimization of

    n·rms² = ‖A·diag(d)·T(1/c)·diag(1/a)‖²,   d_{j+lb} = S_j / g_{j+lb},

by L-BFGS with the exact gradient of `two_sided_forms`: O(k·n·log n) per evaluation. The search
starts from the fit with gains on one side (`fit_blt`), where a = 1. |⟨·,·⟩| of co-participating
columns is smoothed, less and less; the value that is reported is that of the library's own error
and sensitivity. For a single participation every column is its own place and g follows from a.

No randomness: the same call gives the same strategy.

>>> from noshuffle.participation import SinglePass
>>> found = fit_two_sided(SinglePass(64), buffers=2)
>>> round(found.objective, 3), found.converged
(2.101, True)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize

from noshuffle.errors import Unsupported, one_of
from noshuffle.participation import Epochs, MinSeparation, Participation, SinglePass
from noshuffle.strategies.blt import Blt
from noshuffle.strategies.blt_gains import encoder_series, gram_diagonals, tap_weights
from noshuffle.strategies.blt_poles import (
    ValueGradient,
    bounds,
    filter_from,
    spaced,
    strategy_at,
    unbounded,
)
from noshuffle.strategies.fit_blt import fit_blt
from noshuffle.strategies.fit_forms import Fit, cost
from noshuffle.strategies.recipe import Array
from noshuffle.strategies.two_sided import TwoSidedBlt, from_one_sided, two_sided
from noshuffle.strategies.two_sided_forms import classes_squared
from noshuffle.strategies.two_sided_gram import class_sizes
from noshuffle.strategies.workload import Workload, prefix

#: Longest run, and largest steps × epochs (which memory grows with), that is fitted.
STEPS_LIMIT, SIZE_LIMIT = 20_000, 10**6

_SMOOTHING = (1e-2, 1e-3, 1e-4, 1e-5)
_GAIN_LIMIT = 12.0
_TAP_BOUNDS = (-0.95, 0.95)

#: Starting poles are moved at least this far from where a pole and a zero cancel: partial fractions
#: lose their digits there, and a search that starts without digits does not get away.
_START = (-12.0, 5.0)


def fit_two_sided(
    participation: Participation,
    *,
    buffers: int = 2,
    taps: int = 0,
    workload: Workload | None = None,
    objective: str = "rms",
) -> Fit:
    """The two-sided gains with the least rms error × sensitivity, for one participation or Epochs.

    Never worse than `fit_blt(…, gains=True)`, from which it starts and whose `start` it reports.
    `taps` (for Epochs) is how many past draws feed the filter besides the present one.
    """
    workload = workload or prefix()
    one_of(("rms", "max"), objective=objective)
    _check(participation, workload=workload, objective=objective)
    one_sided = fit_blt(participation, buffers=buffers, taps=taps, gains=True, workload=workload)
    start = one_sided.strategy
    assert isinstance(start, Blt)
    n, k = participation.steps, participation.most
    rates = workload.rates(n)

    def measured(strategy: TwoSidedBlt) -> float:
        return cost(strategy, participation, workload=workload, objective="rms")

    log_gains = np.log(start.gain_values(n))
    begin = np.clip(unbounded(start), *_START)
    starts = [(np.concatenate([log_gains - log_gains.mean(), np.zeros(n), begin]), len(begin) // 2)]
    if len(start.decays) < buffers:  # cancelled there, but perhaps of use here
        even = spaced(buffers, 0.3 * k / n, 0.6)
        starts.append((np.concatenate([np.zeros(2 * n), even]), buffers))
    best = from_one_sided(start, steps=n)
    value, converged, iterations = measured(best), one_sided.converged, one_sided.iterations
    for first, d in starts:
        point, is_done, count = _search(
            np.concatenate([first, start.taps]), buffers=d, epochs=k, rates=rates
        )
        iterations += count
        strategy = _strategy(_Point(point, n, d), epochs=k)
        if (found := measured(strategy)) < value:
            best, value, converged = strategy, found, is_done
    return Fit(best, value, converged, iterations, one_sided.start)


def _check(participation: Participation, *, workload: Workload, objective: str) -> None:
    if not isinstance(participation, SinglePass | Epochs | MinSeparation):
        raise Unsupported(
            "two-sided gains are fitted for SinglePass or Epochs, got "
            f"{type(participation).__name__}; use identity() under sampling, a tree under restarts"
        )
    n, k = participation.steps, participation.most
    if k > 1 and not isinstance(participation, Epochs):
        raise Unsupported(
            "two-sided gains over several participations are fitted for Epochs (same order every "
            "epoch) only; fit a plain blt for MinSeparation"
        )
    if objective == "max" or workload.beta:
        raise Unsupported(
            "two-sided gains are fitted for rms error without momentum, got "
            f"{'max error' if objective == 'max' else 'momentum'}; fit them for the rms of prefix "
            "sums (the guarantee does not depend on the workload)"
        )
    if n > STEPS_LIMIT or n * k > SIZE_LIMIT:
        raise Unsupported(
            f"two-sided gains are fitted for at most {STEPS_LIMIT:,} steps and {SIZE_LIMIT:,} "
            f"steps × epochs, got {n:,} steps and {k} epochs; fit a blt with taps, or fewer, "
            "larger steps"
        )


def _search(point: Array, *, buffers: int, epochs: int, rates: Array) -> tuple[Array, bool, int]:
    """(best point, whether its search converged, iterations), less smoothing in every round.

    One gain of n matters about n times less to the error than a pole does, so gains are searched
    in units of √n: all directions are then about equally curved.
    """
    n = len(rates)
    unit = np.ones(len(point))
    unit[: 2 * n] = np.sqrt(n)
    limits = [(-_GAIN_LIMIT / unit[0], _GAIN_LIMIT / unit[0])] * (2 * n) + bounds(buffers)
    limits += [_TAP_BOUNDS] * (len(point) - len(limits))

    def objective(x: Array, smoothing: float) -> ValueGradient:
        value, gradient = tight_objective(
            x * unit, buffers=buffers, epochs=epochs, rates=rates, smoothing=smoothing
        )
        return value, gradient * unit

    rounds = _SMOOTHING if epochs > 1 else (0.0,)
    x = point / unit
    best, least, converged, iterations = x, objective(x, 0.0)[0], False, 0
    for smoothing in rounds:
        found = minimize(
            objective,
            x,
            args=(smoothing,),
            jac=True,
            method="L-BFGS-B",
            bounds=limits,
            options={
                "maxiter": 1000 if n <= 512 or epochs == 1 else 500 if n <= 4096 else 300,
                "maxcor": 20,
                "ftol": 1e-8 if epochs > 1 else 1e-11,
                "gtol": 1e-6,
            },
        )
        x, iterations = found.x, iterations + int(found.nit)
        if (exact := objective(x, 0.0)[0]) < least:
            best, least, converged = x, exact, bool(found.success)
    return best * unit, converged, iterations


@dataclass(frozen=True, eq=False)
class _Point:
    """One vector (log g, log a², u, taps), cut into its parts."""

    values: Array
    steps: int
    buffers: int

    @property
    def log_gains(self) -> Array:
        return self.values[: self.steps]

    @property
    def log_weights(self) -> Array:
        return self.values[self.steps : 2 * self.steps]

    @property
    def u(self) -> Array:
        return self.values[2 * self.steps : 2 * (self.steps + self.buffers)]

    @property
    def taps(self) -> Array:
        return self.values[2 * (self.steps + self.buffers) :]


def tight_objective(
    values: Array, *, buffers: int, epochs: int, rates: Array, smoothing: float = 0.0
) -> ValueGradient:
    """log rms once every place is tight, with its gradient by (log g, log a², u, taps)."""
    n = len(rates)
    lag = n // epochs
    point = _Point(values, n, buffers)
    parts, taps, g = filter_from(point.u), point.taps, np.exp(point.log_gains)
    # Only a·g matters, so the mean of log a² is taken out: smoothing must not depend on it.
    weights = np.exp(point.log_weights - point.log_weights.mean())
    c, pull_c = encoder_series(parts.decays, parts.r, parts.kappa, taps, steps=n, lag=lag)
    squared, pull_squared = classes_squared(c, g, weights, epochs=epochs, smoothing=smoothing)
    allowed = np.sqrt(squared)
    scale = rates * np.tile(allowed, epochs) / g
    omega, pull_omega = tap_weights(1.0 / weights, taps, lag=lag)
    sums, pull_sums = gram_diagonals(
        scale, parts.hat_decays, parts.nu, parts.hat_kappa, lag=lag, count=len(omega)
    )
    total = sum(float(w @ x) for w, x in zip(omega, sums))

    by_scale, by_hat, by_nu, by_hat_kappa = pull_sums(omega)
    by_inverse, by_taps = pull_omega(sums)
    by_allowed = (by_scale * scale).reshape(epochs, lag).sum(axis=0) / allowed
    by_c, by_g, by_weights = pull_squared(by_allowed / (2 * allowed))
    by_decays, by_r, by_kappa, by_taps_too = pull_c(by_c)
    by_log_weights = by_weights * weights - by_inverse / weights
    gradient = [
        by_g * g - by_scale * scale,
        by_log_weights - by_log_weights.mean(),
        parts.pull(by_decays, by_r, by_kappa, by_hat, by_nu, by_hat_kappa),
        by_taps + by_taps_too,
    ]
    return 0.5 * float(np.log(total / n)), np.concatenate(gradient) * (0.5 / total)


def _strategy(point: _Point, *, epochs: int) -> TwoSidedBlt:
    """The strategy at a point, every place of an epoch with sensitivity one."""
    n = point.steps
    core = strategy_at(point.u, taps=point.taps, lag=n // epochs)
    a = np.exp((point.log_weights - point.log_weights.mean()) / 2)
    g = np.exp(point.log_gains)
    squared, _ = class_sizes(core.coefficients(n), a, g, epochs=epochs)
    g /= np.tile(np.sqrt(squared), epochs)
    return two_sided(core.decays, core.scales, taps=core.taps, lag=core.lag, gains=g, draw_gains=a)
