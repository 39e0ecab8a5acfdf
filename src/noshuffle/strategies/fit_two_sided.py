"""Fit BLT noise with gains on both sides: C = diag(a)·T(c)·diag(g).

    minimize  sens(C) · rms(A·C⁻¹)   over the poles, the taps, log g and log a² at once

Every place of an epoch is made exactly as sensitive as allowed, as in `fit_gains`, so what is left
is a free minimization with an exact gradient, O(k·n·log n) per evaluation. The search starts from
the fit with gains on one side (`fit_blt`), where a = 1; the value that is reported is that of the
library's own error and sensitivity. For a single participation every column is its own place and g
follows from a. No randomness: the same call gives the same strategy.

>>> from noshuffle.participation import SinglePass
>>> found = fit_two_sided(SinglePass(64), buffers=2)
>>> round(found.objective, 3), found.converged
(2.101, True)
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from noshuffle.errors import Unsupported
from noshuffle.participation import Participation
from noshuffle.strategies.blt import Blt
from noshuffle.strategies.blt_poles import spaced, strategy_at, unbounded
from noshuffle.strategies.fit_blt import check_gains, fit_blt
from noshuffle.strategies.fit_forms import Fit, cost, layout
from noshuffle.strategies.fit_gains import search_gains
from noshuffle.strategies.recipe import Array
from noshuffle.strategies.two_sided_sensitivity import class_sizes
from noshuffle.strategies.workload import Workload, prefix

#: Longest run, and largest steps × epochs (which memory grows with), that is fitted.
STEPS_LIMIT, SIZE_LIMIT = 20_000, 10**6

_SMOOTHING = (1e-2, 1e-3, 1e-4, 1e-5)

#: Starting poles are moved at least this far from where a pole and a zero cancel: partial fractions
#: lose their digits there, and a search that starts without digits does not get away.
_START = (-12.0, 5.0)


def fit_two_sided(
    participation: Participation,
    *,
    buffers: int = 2,
    taps: int = 0,
    workload: Workload | None = None,
) -> Fit:
    """The two-sided gains with the least rms error × sensitivity, for one participation or Epochs.

    Never worse than `fit_blt(…, gains=True)`, from which it starts.
    `taps` (for Epochs) is how many past draws feed the filter besides the present one.
    """
    workload = workload or prefix()
    n, _, k = layout(participation)
    check_two_sided(participation, workload)
    one_sided = fit_blt(participation, buffers=buffers, taps=taps, gains=True, workload=workload)
    start = one_sided.strategy
    assert isinstance(start, Blt)
    rates = workload.rates(n)

    def measured(strategy: Blt) -> float:
        return cost(strategy, participation, workload=workload)

    log_gains = np.log(start.gain_values(n))
    begin = np.clip(unbounded(start), *_START)
    starts = [(log_gains - log_gains.mean(), begin)]
    if len(start.decays) < buffers:  # cancelled there, but perhaps of use here
        starts.append((np.zeros(n), spaced(buffers, 0.3 * k / n, 0.6)))
    best = with_gains(start, start.gain_values(n), np.ones(n))
    value, converged = measured(best), one_sided.converged
    for first, u in starts:
        found = search_gains(
            [first, np.zeros(n)],
            np.concatenate([u, start.taps]),
            len(u) // 2,
            epochs=k,
            rates=rates,
            rounds=_SMOOTHING if k > 1 else (0.0,),
            maxiter=1000 if n <= 512 or k == 1 else 500 if n <= 4096 else 300,
            maxcor=20,
            ftol=1e-8 if k > 1 else 1e-11,
            gtol=1e-6,
        )
        strategy = two_sided_at(found.gains, *np.split(found.x, [len(u)]), epochs=k)
        if (reached := measured(strategy)) < value:
            best, value, converged = strategy, reached, found.converged
    return Fit(best, value, converged)


def check_two_sided(participation: Participation, workload: Workload) -> None:
    """Refuse what the search has no error or sensitivity for."""
    n, _, k = layout(participation)
    if n > STEPS_LIMIT or n * k > SIZE_LIMIT:
        raise Unsupported(
            f"two-sided gains are fitted for at most {STEPS_LIMIT:,} steps and {SIZE_LIMIT:,} "
            f"steps × epochs, got {n:,} steps and {k} epochs; fit a blt with taps, or fewer, "
            "larger steps"
        )
    check_gains(participation, workload)


def two_sided_at(gains: list[Array], u: Array, taps: Array, *, epochs: int) -> Blt:
    """The strategy at a point, every place of an epoch with sensitivity one."""
    log_gains, log_weights = gains
    n = len(log_gains)
    core = strategy_at(u, taps=taps, lag=n // epochs)
    a = np.exp((log_weights - log_weights.mean()) / 2)
    g = np.exp(log_gains)
    squared, _ = class_sizes(core.coefficients(n), a, g, epochs=epochs)
    g /= np.tile(np.sqrt(squared), epochs)
    return with_gains(core, g, a)


def with_gains(strategy: Blt, gains: Array, draw_gains: Array) -> Blt:
    """The filter of a BLT with these gains of the steps and of the draws."""
    g, a = tuple(gains.tolist()), tuple(draw_gains.tolist())
    return replace(strategy, gains=g, draw_gains=a, normalized=0)
