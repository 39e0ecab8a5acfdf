"""The door to every strategy: a mechanism by name, fitted to a participation and a workload.

    identity         independent noise (DP-SGD)
    tree             binary tree; restart and completion chosen where they are not given
    sqrt             square root of the workload          bsr    … its first `bands` coefficients
    bisr             first `bands` coefficients of the inverse square root
    banded           best `bands` coefficients of C       banded_inverse    … of C⁻¹
    blt              best buffered linear Toeplitz        blt_tapped        … with taps by epochs
    blt_gains        … with taps and one gain per step    blt_two_sided     … and one per draw
    dense            best matrix, small runs

`fit` returns the strategy with its error × sensitivity, the figure by which mechanisms compare at
equal privacy; `candidates` fits all that suit a memory limit, `best` takes the least rms error.

For a single participation sqrt, blt, banded and banded_inverse get unit columns where that lowers
the error (`fit_size`, which also settles the sizes that are not given). Sampled participations have
a proof for independent noise alone, orders that change at restarts for trees and independent noise.

>>> from noshuffle.participation import Epochs, SinglePass
>>> found = fit("sqrt", SinglePass(64))
>>> found.strategy.normalized, round(found.objective, 3), round(found.start, 3)
(64, 2.128, 2.23)
>>> fit("tree", Epochs(epochs=4, steps_per_epoch=64)).strategy.restart_every
64
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from noshuffle.errors import Unsupported, instance_of, one_of, whole
from noshuffle.participation import Participation, Restarted
from noshuffle.strategies.base import Strategy
from noshuffle.strategies.fit_banded import fit_banded, fit_banded_inverse
from noshuffle.strategies.fit_dense import fit_dense
from noshuffle.strategies.fit_forms import cost, layout
from noshuffle.strategies.fit_size import (
    DEFAULT_BANDS,
    DEFAULT_BUFFERS,
    NORMALIZED_STEPS,
    closed_form,
    fit_any_blt,
    fit_bisr,
    taps_of,
    with_unit_columns,
)
from noshuffle.strategies.fit_tree import fit_tree
from noshuffle.strategies.fitted import Fit
from noshuffle.strategies.identity import identity
from noshuffle.strategies.toeplitz import sqrt_toeplitz
from noshuffle.strategies.tree import VARIANTS
from noshuffle.strategies.workload import Workload, checked_workload

MECHANISMS = (
    "identity",
    "tree",
    "sqrt",
    "bsr",
    "bisr",
    "banded",
    "banded_inverse",
    "blt",
    "blt_tapped",
    "blt_gains",
    "blt_two_sided",
    "dense",
)

#: Above these sizes `candidates` leaves out what draws all past noise again at every step.
REDRAWN_STEPS = 512
FULL_TREE_STEPS = 2048


def fit(
    mechanism: str,
    participation: Participation,
    *,
    workload: Workload | None = None,
    objective: str = "rms",
    buffers: int | None = None,
    bands: int | None = None,
    taps: int | None = None,
    restart_every: int | None = None,
    completion: bool | None = None,
    variant: str = "honaker",
) -> Fit:
    """The named mechanism at its best for the participation and the workload.

    What is not given is chosen: `buffers` of a BLT (the fewest within 0.1 % of the best of one to
    four; a given number is also the limit on the bands of "bsr" and "banded"), `bands`, `taps`,
    and for a tree `restart_every` (in steps; the number of steps means one tree) and `completion`.
    Options of other mechanisms have no effect.

    Guarantees: deterministic; `objective` of the result is computed by the library's own error and
    sensitivity and is never above `start`, the closed form that the search began with.
    """
    instance_of(Participation, participation=participation)
    workload = checked_workload(workload)
    one_of(MECHANISMS, mechanism=mechanism)
    one_of(("rms", "max"), objective=objective)
    one_of(VARIANTS, variant=variant)
    for name, value in (("buffers", buffers), ("bands", bands), ("restart_every", restart_every)):
        if value is not None:
            whole(**{name: value})
    if taps is not None:
        whole(at_least=0, taps=taps)
    _check_proved(mechanism, participation)

    def measure(strategy: Strategy) -> float:
        return cost(strategy, participation, workload=workload, objective=objective)

    if mechanism == "identity":
        return closed_form(identity(), measure)
    if mechanism == "tree":
        return fit_tree(
            participation,
            variant=variant,
            restart_every=restart_every,
            completion=completion,
            workload=workload,
            objective=objective,
        )
    n, separation, most = layout(participation)
    if bands is None and buffers is not None:
        bands = buffers + 1
    if mechanism == "sqrt":
        found = closed_form(sqrt_toeplitz(momentum=workload.beta), measure)
    elif mechanism == "bsr":
        kept = bands or min(separation, DEFAULT_BANDS)
        return closed_form(sqrt_toeplitz(min(kept, n), momentum=workload.beta), measure)
    elif mechanism == "bisr":
        return fit_bisr(bands, n, separation=separation, workload=workload, measure=measure)
    elif mechanism == "banded":
        kept = bands or min(separation, DEFAULT_BANDS)
        found = fit_banded(participation, bands=kept, workload=workload, objective=objective)
    elif mechanism == "banded_inverse":
        found = fit_banded_inverse(
            participation, bands=bands or 16, workload=workload, objective=objective
        )
    elif mechanism == "dense":
        if objective == "max":
            raise Unsupported('a dense strategy is fitted for objective="rms", got "max"')
        return fit_dense(participation, workload=workload)
    else:
        return fit_any_blt(
            participation,
            buffers=buffers,
            taps=taps_of(mechanism, taps, most=most),
            gains=mechanism in ("blt_gains", "blt_two_sided"),
            two_sided=mechanism == "blt_two_sided",
            workload=workload,
            objective=objective,
        )
    return with_unit_columns(found, measure, steps=n) if most == 1 else found


def _check_proved(mechanism: str, participation: Participation) -> None:
    if participation.is_sampled and mechanism != "identity":
        raise Unsupported(
            f"{participation.kind} sampling is accounted for independent noise only, got the "
            f"mechanism {mechanism!r}; use identity, or Epochs or MinSeparation"
        )
    if isinstance(participation, Restarted) and mechanism not in ("identity", "tree"):
        raise Unsupported(
            "an order that changes between restarts is proved for trees and identity only, got the "
            f"mechanism {mechanism!r}; use MinSeparation over the whole run"
        )


def candidates(
    participation: Participation,
    *,
    max_buffers: int | None = None,
    workload: Workload | None = None,
) -> list[Fit]:
    """Every mechanism worth comparing that keeps at most `max_buffers` model-sized tensors.

    Least rms error first. Left out: what redraws all past noise at every step in long runs (sqrt
    and dense above 512 steps, the full tree above 2048), more bands than the separation, and what
    has no proof or no error formula for this participation and workload.
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
    def named(mechanism: str, **options: object) -> Callable[[], Fit]:
        return lambda: fit(mechanism, participation, workload=workload, **options)  # type: ignore[arg-type]

    yield named("identity")
    if participation.is_sampled:
        return
    n = participation.steps
    yield named("tree")
    if n <= FULL_TREE_STEPS:
        yield named("tree", variant="full")
    if isinstance(participation, Restarted):
        return
    _, separation, most = layout(participation)
    room = DEFAULT_BANDS if max_buffers is None else max_buffers
    for kept in (4, 16):
        yield named("banded_inverse", bands=kept)
    if n <= REDRAWN_STEPS:
        yield named("sqrt")
        yield named("dense")
    if room:
        yield named("banded", bands=min(separation, room + 1))
        # Without enough room for the automatic choice, the largest that fits is taken.
        limit = room if room < DEFAULT_BUFFERS else None
        yield named("blt", buffers=limit)
        if most > 1:
            tapped: list[Fit] = []

            def with_taps() -> Fit:
                tapped.append(named("blt_tapped", buffers=limit)())
                return tapped[0]

            def with_gains(mechanism: str) -> Fit:  # of the size that taps settled on
                size = tapped[0].strategy.buffers(n) if tapped else limit
                return named(mechanism, buffers=size)()

            yield with_taps
            yield partial(with_gains, "blt_gains")
            yield partial(with_gains, "blt_two_sided")
        elif n <= NORMALIZED_STEPS:
            yield named("blt_two_sided", buffers=limit)


def best(
    participation: Participation,
    *,
    max_buffers: int | None = None,
    workload: Workload | None = None,
) -> Fit:
    """The candidate with the least rms error × sensitivity within the memory limit."""
    return candidates(participation, max_buffers=max_buffers, workload=workload)[0]
