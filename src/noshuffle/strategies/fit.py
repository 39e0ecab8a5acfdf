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

For a single participation every column may be scaled to norm one (arXiv 2509.14334); sqrt, blt,
banded and banded_inverse do so where it lowers the error. Sampled participations have a proof for
independent noise alone, orders that change at restarts for trees and independent noise.

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

from threadpoolctl import threadpool_limits

from noshuffle.errors import Unsupported, one_of, whole
from noshuffle.participation import Participation, Restarted
from noshuffle.strategies.base import Strategy, ToeplitzStrategy
from noshuffle.strategies.fit_banded import fit_banded, fit_banded_inverse
from noshuffle.strategies.fit_blt import fit_blt
from noshuffle.strategies.fit_dense import fit_dense
from noshuffle.strategies.fit_forms import cost, layout
from noshuffle.strategies.fit_tree import fit_tree
from noshuffle.strategies.fit_two_sided import fit_two_sided
from noshuffle.strategies.fitted import Fit
from noshuffle.strategies.identity import identity
from noshuffle.strategies.registry import column_normalized
from noshuffle.strategies.toeplitz import banded_inverse, root_coefficients, sqrt_toeplitz
from noshuffle.strategies.tree import VARIANTS
from noshuffle.strategies.workload import Workload, prefix

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

#: More bands than this are fitted only when asked for.
DEFAULT_BANDS = 2048
#: Buffers that a BLT is tried with, and how much less error one more has to buy.
DEFAULT_BUFFERS = 4
WORTH = 1e-3
#: Redrawn taps that a BLT gets by default; more change the third digit.
DEFAULT_TAPS = 6
#: Longest run whose error with unit columns, O(n²) work, is computed unasked.
NORMALIZED_STEPS = 8192
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
    workload = workload or prefix()
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
        return _closed(identity(), measure)
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
        found = _closed(sqrt_toeplitz(momentum=workload.beta), measure)
    elif mechanism == "bsr":
        kept = bands or min(separation, DEFAULT_BANDS)
        return _closed(sqrt_toeplitz(min(kept, n), momentum=workload.beta), measure)
    elif mechanism == "bisr":
        return _bisr(bands, n, separation=separation, workload=workload, measure=measure)
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
        return _blt(
            participation,
            buffers=buffers,
            taps=_taps(mechanism, taps, most=most),
            gains=mechanism in ("blt_gains", "blt_two_sided"),
            two_sided=mechanism == "blt_two_sided",
            workload=workload,
            objective=objective,
        )
    return _normalized(found, measure, steps=n) if most == 1 else found


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


def _closed(strategy: Strategy, measure: Callable[[Strategy], float]) -> Fit:
    """A closed form as a fit: nothing to search, so it has converged."""
    value = measure(strategy)
    return Fit(strategy, value, converged=True, iterations=0, start=value)


def _normalized(found: Fit, measure: Callable[[Strategy], float], *, steps: int) -> Fit:
    """The same with unit columns, if that has less error (single participation)."""
    strategy = found.strategy
    if not isinstance(strategy, ToeplitzStrategy) or steps > NORMALIZED_STEPS:
        return found
    scaled = column_normalized(strategy, steps)
    value = measure(scaled)
    if value >= found.objective:
        return found
    return Fit(scaled, value, found.converged, found.iterations, found.start)


def _bisr(
    bands: int | None,
    n: int,
    *,
    separation: int,
    workload: Workload,
    measure: Callable[[Strategy], float],
) -> Fit:
    """The truncated inverse square root; without `bands` the best power of two."""

    def build(kept: int) -> Strategy:
        root = root_coefficients(min(kept, n), sign=1, momentum=workload.beta)
        return banded_inverse(coefficients=root.tolist())

    if bands is not None:
        return _closed(build(bands), measure)
    powers = [1 << e for e in range(12) if 1 << e < 2 * min(n, separation)]
    return min((_closed(build(kept), measure) for kept in powers), key=lambda fit: fit.objective)


def _taps(mechanism: str, taps: int | None, *, most: int) -> int:
    """Taps reach back whole epochs, so there are at most k − 1 of use."""
    if mechanism == "blt":
        return 0
    return min(DEFAULT_TAPS if taps is None else taps, most - 1)


def _blt(
    participation: Participation,
    *,
    buffers: int | None,
    taps: int,
    gains: bool,
    two_sided: bool,
    workload: Workload,
    objective: str,
) -> Fit:
    """A BLT of the given size, or the smallest that is about as good as the best.

    The size is chosen without gains, which take longest to fit. With one participation gains are
    unit columns: they cost nothing, so they are always tried.
    """

    def build(size: int, scaled: bool) -> Fit:
        with threadpool_limits(limits=1):  # tiny matrices: more threads only wait for each other
            if scaled and two_sided:
                return fit_two_sided(
                    participation, buffers=size, taps=taps, workload=workload, objective=objective
                )
            return fit_blt(
                participation,
                buffers=size,
                taps=taps,
                gains=scaled,
                workload=workload,
                objective=objective,
            )

    if buffers is not None and gains:
        return build(buffers, True)
    sizes = [buffers] if buffers is not None else range(1, DEFAULT_BUFFERS + 1)
    fits = {size: build(size, False) for size in sizes}
    enough = min(found.objective for found in fits.values()) * (1 + WORTH)
    size = next(size for size, found in fits.items() if found.objective <= enough)
    if gains:
        return build(size, True)
    if layout(participation).most > 1 or participation.steps > NORMALIZED_STEPS:
        return fits[size]
    try:
        return min(fits[size], build(size, True), key=lambda found: found.objective)
    except Unsupported:  # no unit columns for this workload or objective
        return fits[size]


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
    workload = workload or prefix()
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
