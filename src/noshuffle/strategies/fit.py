"""A mechanism by name (`mechanisms` lists them), fitted to a participation and a workload.

`fit` returns the strategy with its error × sensitivity, the figure by which mechanisms compare at
equal privacy; `candidates` fits all that suit a memory limit, `best` takes the least rms error.
Sampled participations have a proof for independent noise alone, orders that change at restarts for
trees and independent noise.

>>> from noshuffle.participation import Epochs, SinglePass
>>> found = fit("sqrt", SinglePass(64))
>>> found.strategy.normalized, round(found.objective, 3)
(64, 2.128)
>>> fit("tree", Epochs(epochs=4, steps_per_epoch=64)).strategy.restart_every
64
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from threadpoolctl import threadpool_limits

from noshuffle.errors import InvalidInput, Unsupported, instance_of, whole
from noshuffle.participation import AnyOrderEpochs, Participation, Restarted
from noshuffle.strategies.fit_forms import Fit, layout
from noshuffle.strategies.fit_two_sided import check_two_sided
from noshuffle.strategies.mechanisms import (
    DEFAULT_BANDS,
    DEFAULT_BUFFERS,
    MECHANISMS,
    OPTIONS,
    STAGED_BUFFERS,
    STAGED_STEPS,
    FitRequest,
    mechanism_of,
)
from noshuffle.strategies.workload import Workload, checked_workload

__all__ = ["MECHANISMS", "best", "candidates", "fit"]

#: Above these sizes `candidates` leaves out what draws all past noise again at every step.
REDRAWN_STEPS = 512
FULL_TREE_STEPS = 2048
#: … and many bands, whose fits take minutes there and come out behind a BLT.
BANDED_STEPS = 2**15


def fit(
    mechanism: str,
    participation: Participation,
    *,
    workload: Workload | None = None,
    **options: Any,
) -> Fit:
    """The named mechanism at its best for the participation and the workload.

    What is not given is chosen: `buffers` of a BLT (the fewest within 0.1 % of the best of one to
    four; a given number is also the limit on the bands of "bsr" and "banded"), `bands`, `taps`,
    and for a tree `variant`, `restart_every` (in steps; the number of steps means one tree) and
    `completion`. Options of other mechanisms have no effect.

    Guarantees: deterministic; `objective` of the result is computed by the library's own error and
    sensitivity, and is never above that of the closed form that the search began with.
    """
    instance_of(Participation, participation=participation)
    workload = checked_workload(workload)
    chosen = mechanism_of(mechanism)
    for name, value in options.items():
        if name not in OPTIONS:
            raise InvalidInput(f"options are {', '.join(OPTIONS)}; got {name!r}")
        OPTIONS[name].check(value)
    chosen.check(participation)
    given = {name: value for name, value in options.items() if value is not None}
    # Small matrices: more threads of BLAS only wait for each other, four fifths of the time.
    threads = 1 if participation.steps <= REDRAWN_STEPS else None
    with threadpool_limits(limits=threads):
        return chosen.fit(FitRequest(participation, workload, given))


def candidates(
    participation: Participation,
    *,
    max_buffers: int | None = None,
    workload: Workload | None = None,
) -> list[Fit]:
    """Every mechanism worth comparing that keeps at most `max_buffers` model-sized tensors.

    Least rms error first. Left out: what redraws all past noise at every step in long runs (sqrt
    and dense above 512 steps, the full tree above 2048), more bands than the separation or than a
    few above 2¹⁵ steps, what has no proof or no error formula for this participation and workload,
    and in long runs BLTs without gains where gains on both sides can be fitted.
    """
    instance_of(Participation, participation=participation)
    workload = checked_workload(workload)
    if max_buffers is not None:
        whole(at_least=0, max_buffers=max_buffers)
    found = []
    for attempt in _attempts(participation, max_buffers=max_buffers, workload=workload):
        try:
            one = attempt()
        except Unsupported:
            continue
        if max_buffers is None or one.strategy.buffers(participation.steps) <= max_buffers:
            found.append(one)
    return sorted(found, key=lambda fit: fit.objective)


def _attempts(
    participation: Participation, *, max_buffers: int | None, workload: Workload
) -> Iterator[Callable[[], Fit]]:
    def named(mechanism: str, **options: Any) -> Callable[[], Fit]:
        return lambda: fit(mechanism, participation, workload=workload, **options)

    yield named("identity")
    if participation.is_sampled:
        return
    n = participation.steps
    yield named("tree")
    if n <= FULL_TREE_STEPS:
        yield named("tree", variant="full")
    if isinstance(participation, Restarted | AnyOrderEpochs):
        return
    separation = layout(participation).separation
    room = DEFAULT_BANDS if max_buffers is None else max_buffers
    for kept in (4, 16) if n <= BANDED_STEPS else (4,):
        yield named("banded_inverse", bands=kept)
    if n <= REDRAWN_STEPS:
        yield named("sqrt")
        yield named("dense")
    if room:
        if n <= BANDED_STEPS:
            yield named("banded", bands=min(separation, room + 1))
        # Without enough room for the automatic choice, the largest that fits is taken.
        limit = room if room < DEFAULT_BUFFERS else None
        yield from _buffered(named, participation, workload, limit)


def _buffered(
    named: Callable[..., Callable[[], Fit]],
    participation: Participation,
    workload: Workload,
    limit: int | None,
) -> Iterator[Callable[[], Fit]]:
    """BLTs, from plain to gains on both sides, which in long runs are fitted alone: they hold all
    others as special cases."""
    n, _, most = layout(participation)
    if n > STAGED_STEPS:
        with suppress(Unsupported):
            check_two_sided(participation, workload)
            yield named("blt_two_sided", buffers=limit and min(limit, STAGED_BUFFERS))
            return
    found: list[Fit] = []

    def of_one_size(mechanism: str) -> Fit:  # that which the first of them settled on
        size = found[0].strategy.buffers(n) if found else limit
        found.append(named(mechanism, buffers=size)())
        return found[-1]

    yield partial(of_one_size, "blt")
    if most > 1:
        yield partial(of_one_size, "blt_tapped")
        yield partial(of_one_size, "blt_gains")
    yield partial(of_one_size, "blt_two_sided")


def best(
    participation: Participation,
    *,
    max_buffers: int | None = None,
    workload: Workload | None = None,
) -> Fit:
    """The candidate with the least rms error × sensitivity within the memory limit."""
    return candidates(participation, max_buffers=max_buffers, workload=workload)[0]
