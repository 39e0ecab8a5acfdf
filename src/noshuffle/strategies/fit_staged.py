"""Fit two-sided gains for long runs, from a short run of the same shape to the long one.

    b = 12 → 54 → 240 steps an epoch (one participation: 256 → … steps)

Gains, taps and poles of `fit_two_sided` change slowly with the number of steps: the optimum of a
short run, its gains interpolated over the places of an epoch and its slow poles moved with the
length, is within 2 % of the optimum of one five times as long, whose search then needs few of its
expensive evaluations. No randomness: the same call gives the same strategy.

>>> from noshuffle.participation import Epochs
>>> found = fit_staged(Epochs(4, 40), buffers=1, taps=1)
>>> round(found.objective, 2), found.strategy.name
(5.13, 'blt_two_sided')
"""

from __future__ import annotations

import math

import numpy as np

from noshuffle.participation import Participation
from noshuffle.strategies.blt_poles import spaced, stretched
from noshuffle.strategies.fit_forms import Fit, coarser, cost, layout
from noshuffle.strategies.fit_gains import search_gains
from noshuffle.strategies.fit_two_sided import check_two_sided, two_sided_at
from noshuffle.strategies.recipe import Array
from noshuffle.strategies.workload import Workload, prefix

#: Places of the shortest run, for several participations and for one; how much longer the next is.
FIRST_EPOCHS, FIRST_SINGLE, FACTOR = 12, 256, 4.5
#: Smoothing of |·| and iterations of the first and last run; of the first, middle and last run.
TWO_STAGES = ((1e-2, 220), (1e-4, 70))
STAGES = ((1e-2, 160), (1e-3, 120), (1e-4, 40))


def fit_staged(
    participation: Participation,
    *,
    buffers: int = 3,
    taps: int = 12,
    workload: Workload | None = None,
) -> Fit:
    """Two-sided gains for one participation or Epochs.

    Guarantees: the objective is that of the library's own error and sensitivity.
    """
    workload = workload or prefix()
    n, _, k = layout(participation)
    check_two_sided(participation, workload)
    taps = min(taps, k - 1)
    first = FIRST_SINGLE if k == 1 else FIRST_EPOCHS
    sizes = _sizes(first, n // k)
    gains = [np.zeros(k * sizes[0]), np.zeros(k * sizes[0])]
    u = spaced(buffers, 0.3 / sizes[0], 0.6)
    s: Array = 0.3 * np.power(0.6, np.arange(taps, dtype=np.float64))
    for place, size in enumerate(sizes):
        if place:
            before = sizes[place - 1]
            gains = [_finer(values, before, size, epochs=k) for values in gains]
            u = stretched(u, size / before)
        rates = coarser(workload, n, size=k * size).rates(k * size)
        is_last = place == len(sizes) - 1
        stages = STAGES if len(sizes) > 2 else TWO_STAGES
        smoothing, most = stages[-1 if is_last else min(place, 1)]
        found = search_gains(
            gains,
            np.concatenate([u, s]),
            buffers,
            epochs=k,
            rates=rates,
            rounds=(smoothing if k > 1 else 0.0,),
            maxiter=most if k > 1 else 2 * most,
            maxcor=20,
            ftol=1e-9,
            gtol=1e-6,
        )
        gains, (u, s) = found.gains, np.split(found.x, [2 * buffers])
    strategy = two_sided_at(gains, u, s, epochs=k)
    return Fit(strategy, cost(strategy, participation, workload=workload), found.converged)


def _sizes(first: int, last: int) -> list[int]:
    """Places of an epoch from the short run to the long one, in equal ratios."""
    if last <= first:
        return [last]
    count = max(1, round(math.log(last / first) / math.log(FACTOR)))
    return [round(first * (last / first) ** (i / count)) for i in range(count + 1)]


def _finer(values: Array, before: int, size: int, *, epochs: int) -> Array:
    """Gains of every epoch, interpolated to more places."""
    known, at = ((np.arange(count) + 0.5) / count for count in (before, size))
    return np.concatenate([np.interp(at, known, row) for row in values.reshape(epochs, before)])
