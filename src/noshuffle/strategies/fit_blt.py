"""Fit a BLT: buffers, epoch taps and per-step gains, for a participation and a workload.

    minimize  sens(C) · rms(A·C⁻¹)   over   1 > θ_1 > θ̂_1 > θ_2 > … > θ̂_d > 0,  taps s,  gains g

over the free parameters of `blt_poles` (Dvijotham et al., arXiv 2404.16706; McMahan et al., arXiv
2408.08868). Without taps the objective is a closed form, as quick for 10⁶ steps as for ten. Taps
make co-participating columns nearly orthogonal, and the sensitivity sums |⟨c_j, c_{j+lb}⟩|, which
has its kinks just there: the search smooths them, less and less, and the value reported is that of
the unsmoothed bound. Several fixed starts, no randomness: the same call gives the same strategy. A
buffer whose pole cancels against a zero is dropped, so fewer buffers than asked may come back.

>>> from noshuffle.participation import SinglePass
>>> found = fit_blt(SinglePass(1024), buffers=2)
>>> round(found.objective, 3), found.converged
(3.084, True)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from noshuffle.errors import Unsupported, whole
from noshuffle.participation import Epochs, Participation
from noshuffle.strategies import blt_forms as forms
from noshuffle.strategies.blt import Blt
from noshuffle.strategies.blt_poles import (
    ValueGradient,
    bounds,
    differentiate,
    poles,
    spaced,
    strategy_at,
    stretched,
    unbounded,
)
from noshuffle.strategies.fit_forms import Fit, layout, lbfgs
from noshuffle.strategies.fit_gains import TAP_BOUNDS, fit_gains, fit_normalized, scheduled_error
from noshuffle.strategies.recipe import Array
from noshuffle.strategies.toeplitz_sensitivity import class_sums
from noshuffle.strategies.workload import Workload, prefix

#: Horizon up to which learning-rate schedules (O(n) per evaluation) and gains are fitted.
SCHEDULE_LIMIT, GAINS_LIMIT = 200_000, 20_000

#: Epochs up to which taps are fitted: the search keeps all inner products of k columns.
TAPS_LIMIT = 256

#: Above so many steps taps and poles are those of a shorter run of as many epochs.
TAPS_STEPS = 50_000

MAX_BUFFERS = 12

#: Iterations from every start; the two that are ahead then go on.
_SCREENING = 20


@dataclass(frozen=True)
class Task:
    """What is minimized: sensitivity for k participations b apart, times the rms of A·C⁻¹."""

    steps: int
    participations: int
    separation: int
    workload: Workload

    @property
    def rates(self) -> Array | None:
        return None if self.workload.is_toeplitz else self.workload.rates(self.steps)


def fit_blt(
    participation: Participation,
    *,
    buffers: int = 2,
    taps: int = 0,
    gains: bool = False,
    workload: Workload | None = None,
) -> Fit:
    """The BLT with the least rms error × sensitivity, never worse than its closed-form start.

    `taps` (for Epochs) is how many past draws feed the filter besides the present one. `gains`
    gives every step its own scale: for a single participation unit columns (`normalized`), for
    Epochs n optimized numbers.
    """
    whole(at_most=MAX_BUFFERS, buffers=buffers)
    whole(at_least=0, taps=taps)
    steps, separation, most = layout(participation)
    task = Task(steps, most, separation, workload or prefix())
    _check(task, participation, taps=taps, gains=gains)
    return _fitted(task, buffers, min(taps, task.participations - 1), gains)


@lru_cache(maxsize=64)
def _fitted(task: Task, buffers: int, taps: int, gains: bool) -> Fit:
    """One search, from the fit with less; kept, because several mechanisms start from the same."""
    if gains:
        plain = _fitted(task, buffers, taps, False)
        if task.participations == 1:
            return fit_normalized(plain, steps=task.steps, rates=task.rates)
        return fit_gains(
            plain, steps=task.steps, epochs=task.participations, rates=task.rates, buffers=buffers
        )
    if taps and task.steps > TAPS_STEPS and task.rates is None:
        return _taps_of_shorter_run(task, buffers, taps)
    if taps:
        return _fit_taps(task, _fitted(task, buffers, 0, False), buffers, taps)
    return _fit_poles(task, buffers)


def _check(task: Task, participation: Participation, *, taps: int, gains: bool) -> None:
    beta, n = task.workload.beta, task.steps
    if taps or gains:
        check_gains(participation, task.workload if gains else prefix())
    if taps and task.participations == 1:
        raise Unsupported("taps need Epochs with at least 2 epochs; fit without taps")
    if taps and task.participations > TAPS_LIMIT:
        raise Unsupported(
            f"taps are fitted for at most {TAPS_LIMIT} epochs, got {task.participations}; fit "
            "without taps"
        )
    if task.rates is not None and n > SCHEDULE_LIMIT:
        raise Unsupported(
            f"a learning-rate schedule is fitted for at most {SCHEDULE_LIMIT} steps, got {n}; fit "
            "for a constant learning rate (the guarantee does not depend on it)"
        )
    if taps and task.rates is not None and beta:
        raise Unsupported(
            "taps under a schedule are fitted without momentum; leave out the "
            "schedule or the taps (the guarantee does not depend on the workload)"
        )
    if gains and task.participations > 1 and n > GAINS_LIMIT:
        raise Unsupported(
            f"gains over several epochs are fitted for at most {GAINS_LIMIT} steps, got {n}; fit "
            "with taps only"
        )


def check_gains(participation: Participation, workload: Workload) -> None:
    """Refuse gains (or taps, with prefix sums) where no proof or no search is known."""
    if layout(participation).most > 1 and not isinstance(participation, Epochs):
        raise Unsupported(
            "taps and gains over several participations are proved for Epochs (same order every "
            "epoch) only; fit a plain blt for MinSeparation"
        )
    if workload.beta:
        raise Unsupported("gains are fitted without momentum; fit them for prefix sums")


# ---- objectives: log of the squared error and of the squared sensitivity, with gradients


def _log_error(task: Task, x: Array, d: int) -> ValueGradient:
    rates = task.rates
    if rates is not None and not task.workload.beta:
        return scheduled_error(x, d, rates, lag=task.separation if len(x) > 2 * d else task.steps)

    def function(point: forms.Numbers) -> forms.Numbers:
        gap, hat = poles(point[..., : 2 * d])
        if rates is not None:
            errors = forms.step_errors(gap, hat, rates, momentum=task.workload.beta)
            return np.asarray(np.log(np.mean(errors, axis=-1)))
        squared = forms.squared_error(
            gap,
            hat,
            steps=task.steps,
            momentum=task.workload.beta,
            taps=point[..., 2 * d :],
            lag=task.separation if len(x) > 2 * d else 0,
        )
        return np.asarray(np.log(squared))

    return differentiate(function, x)


def _log_sensitivity(
    task: Task, x: Array, d: int, smoothing: float, places: Sequence[int]
) -> ValueGradient:
    k, b = task.participations, task.separation

    def function(point: forms.Numbers) -> forms.Numbers:
        gap, hat = poles(point[..., : 2 * d])
        taps = point[..., 2 * d :]
        if not taps.shape[-1]:
            squared = forms.sensitivity_squared(
                gap, hat, steps=task.steps, participations=k, separation=b
            )
            return np.asarray(np.log(squared))
        classes = []
        for offset in places:
            gram = forms.block_gram(gap, hat, taps, blocks=k, length=b, offset=offset)
            classes.append(np.sum(np.sqrt(gram * gram + smoothing**2), axis=(-1, -2)))
        logs = np.log(np.stack(classes, axis=-1))
        top = np.max(logs.real, axis=-1, keepdims=True)
        heat = max(smoothing, 1e-9) / 10  # log-sum-exp: a smooth maximum over the places
        return np.asarray(top[..., 0] + heat * np.log(np.sum(np.exp((logs - top) / heat), axis=-1)))

    return differentiate(function, x)


def _objective(
    task: Task, x: Array, d: int, smoothing: float = 0.0, places: Sequence[int] = (0,)
) -> ValueGradient:
    error, by_error = _log_error(task, x, d)
    sensitivity, by_sensitivity = _log_sensitivity(task, x, d, smoothing, places)
    return (error + sensitivity) / 2, (by_error + by_sensitivity) / 2


# ---- searches


def _fit_poles(task: Task, d: int) -> Fit:
    n, b = task.steps, task.separation
    starts = [spaced(d, 0.3 / n, 0.6), spaced(d, 0.3 / n, 0.95), spaced(d, 2.0 / n, 0.8)]
    if task.participations > 1:
        starts += [spaced(d, 0.3 / b, 0.6), spaced(d, 1.0 / b, 0.9), spaced(d, 0.1, 0.9)]
    loss = partial(_objective, task, d=d)

    def search(x: Array, most: int) -> Any:
        return lbfgs(loss, x, bounds(d), maxiter=most, maxcor=40, ftol=1e-14, gtol=1e-7)

    first = sorted((search(x, _SCREENING) for x in starts), key=lambda found: float(found.fun))
    best = min((search(each.x, 500) for each in first[:2]), key=lambda found: float(found.fun))
    return Fit(strategy_at(best.x), float(np.exp(best.fun)), bool(best.success))


def _tapped_value(task: Task, x: Array, d: int) -> tuple[float, int]:
    """(log objective, worst place) with the exact bound over every place of an epoch."""
    c = strategy_at(x[: 2 * d], taps=x[2 * d :], lag=task.separation).coefficients(task.steps)
    squared, _ = class_sums(c, np.ones(task.steps), steps_per_epoch=task.separation)
    return (_log_error(task, x, d)[0] + float(np.log(squared.max()))) / 2, int(squared.argmax())


def _taps_of_shorter_run(task: Task, d: int, p: int) -> Fit:
    """Taps as in a run of TAPS_STEPS, whose poles are moved with the length; or none."""
    plain, b = _fitted(task, d, 0, False), TAPS_STEPS // task.participations
    short = replace(task, steps=b * task.participations, separation=b)
    found = _fitted(short, d, p, False).strategy
    assert isinstance(found, Blt)
    if not found.taps:
        return plain
    u = stretched(unbounded(found), task.separation / b)
    x = np.concatenate([u, found.taps])
    value, _ = _tapped_value(task, x, len(u) // 2)
    if np.exp(value) >= plain.objective:
        return plain
    strategy = strategy_at(u, taps=found.taps, lag=task.separation)
    return Fit(strategy, float(np.exp(value)), True)


def _fit_taps(task: Task, plain: Fit, d: int, p: int) -> Fit:
    b, limits = task.separation, bounds(d) + [TAP_BOUNDS] * p
    best_x, best, converged = None, np.log(plain.objective), False
    for low, high in ((0.3 / b, 0.6), (1.0 / b, 0.9)):
        x = np.concatenate([spaced(d, low, high), 0.3 * 0.6 ** np.arange(p)])
        places = [0]
        for attempt in range(3):
            for smoothing in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)[3 * bool(attempt) :]:
                loss = partial(_objective, task, d=d, smoothing=smoothing, places=tuple(places))
                found = lbfgs(loss, x, limits, maxiter=300, maxcor=40, ftol=1e-13, gtol=1e-7)
                x = found.x
            value, place = _tapped_value(task, x, d)
            if value < best:
                best_x, best, converged = x, value, bool(found.success)
            if place in places:
                break
            places.append(place)
    if best_x is None:
        return plain
    strategy = strategy_at(best_x[: 2 * d], taps=best_x[2 * d :], lag=b)
    return Fit(strategy, float(np.exp(best)), converged)
