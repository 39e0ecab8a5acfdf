"""How large a fitted mechanism is where nobody said: bands, buffers, taps, and unit columns.

    bisr    the power of two with the least error, up to the separation
    blt     the fewest buffers within 0.1 % of the best of one to four, then taps and gains
    taps    they reach back whole epochs, so at most k − 1 of k participations are of use

For a single participation every column may be scaled to norm one (arXiv 2509.14334), which is done
where it lowers the error. No state; `fit` is the door.

>>> taps_of("blt_tapped", None, most=4), taps_of("blt_tapped", 2, most=20)
(3, 2)
"""

from __future__ import annotations

from collections.abc import Callable

from threadpoolctl import threadpool_limits

from noshuffle.errors import Unsupported
from noshuffle.participation import Participation
from noshuffle.strategies.base import Strategy, ToeplitzStrategy
from noshuffle.strategies.fit_blt import fit_blt
from noshuffle.strategies.fit_forms import layout
from noshuffle.strategies.fit_two_sided import fit_two_sided
from noshuffle.strategies.fitted import Fit
from noshuffle.strategies.registry import column_normalized
from noshuffle.strategies.toeplitz import banded_inverse, root_coefficients
from noshuffle.strategies.workload import Workload

#: More bands than this are fitted only when asked for.
DEFAULT_BANDS = 2048
#: Buffers that a BLT is tried with, and how much less error one more has to buy.
DEFAULT_BUFFERS = 4
WORTH = 1e-3
#: Redrawn taps that a BLT gets by default; more change the third digit.
DEFAULT_TAPS = 6
#: Longest run whose error with unit columns, O(n²) work, is computed unasked.
NORMALIZED_STEPS = 8192


def closed_form(strategy: Strategy, measure: Callable[[Strategy], float]) -> Fit:
    """A closed form as a fit: nothing to search, so it has converged."""
    value = measure(strategy)
    return Fit(strategy, value, converged=True, iterations=0, start=value)


def with_unit_columns(found: Fit, measure: Callable[[Strategy], float], *, steps: int) -> Fit:
    """The same with unit columns, if that has less error (single participation)."""
    strategy = found.strategy
    if not isinstance(strategy, ToeplitzStrategy) or steps > NORMALIZED_STEPS:
        return found
    scaled = column_normalized(strategy, steps)
    value = measure(scaled)
    if value >= found.objective:
        return found
    return Fit(scaled, value, found.converged, found.iterations, found.start)


def fit_bisr(
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
        return closed_form(build(bands), measure)
    powers = [1 << e for e in range(12) if 1 << e < 2 * min(n, separation)]
    return min(
        (closed_form(build(kept), measure) for kept in powers), key=lambda fit: fit.objective
    )


def taps_of(mechanism: str, taps: int | None, *, most: int) -> int:
    """Taps reach back whole epochs, so there are at most k − 1 of use."""
    if mechanism == "blt":
        return 0
    return min(DEFAULT_TAPS if taps is None else taps, most - 1)


def fit_any_blt(
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
