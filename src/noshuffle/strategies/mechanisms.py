"""The registry of mechanisms: what can be fitted by name, with which options.

    identity         independent noise (DP-SGD)
    tree             binary tree; restart and completion chosen where they are not given
    sqrt             square root of the workload          bsr    … its first `bands` coefficients
    bisr             first `bands` coefficients of the inverse square root
    banded           best `bands` coefficients of C       banded_inverse    … of C⁻¹
    blt              best buffered linear Toeplitz        blt_tapped        … with taps by epochs
    blt_gains        … with taps and one gain per step    blt_two_sided     … and one per draw
    dense            best matrix, small runs

`fit`, `Plan.fit`, comparisons and the command line read this table and nothing else: a mechanism
joins by one entry, one of your own by `own.register`. Sizes that are not given are settled here:
bisr takes the power of two with the least error, up to the separation; a blt the fewest buffers
within 0.1 % of the best of one to four (or fewer, once one more buys next to nothing), then taps
and gains; two-sided gains of long runs have
three buffers and twelve taps. For a single participation columns are
scaled to norm one (arXiv 2509.14334) where that lowers the error.

>>> [option for option in MECHANISMS["tree"].options]
['variant', 'restart_every', 'completion', 'tree_accounting']
>>> MECHANISMS["bisr"].words
'first bands of the inverse square root'
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from threadpoolctl import threadpool_limits

from noshuffle.errors import Unsupported, instance_of, one_of, whole
from noshuffle.participation import CyclicPoisson, Participation, Restarted
from noshuffle.strategies.base import Strategy, ToeplitzStrategy, column_normalized
from noshuffle.strategies.fit_banded import fit_banded, fit_banded_inverse
from noshuffle.strategies.fit_blt import fit_blt
from noshuffle.strategies.fit_dense import fit_dense
from noshuffle.strategies.fit_forms import Fit, FitLayout, cost, layout
from noshuffle.strategies.fit_staged import fit_staged
from noshuffle.strategies.fit_tree import fit_tree
from noshuffle.strategies.fit_two_sided import fit_two_sided
from noshuffle.strategies.identity import identity
from noshuffle.strategies.toeplitz import banded_inverse, root_coefficients, sqrt_toeplitz
from noshuffle.strategies.tree import VARIANTS
from noshuffle.strategies.tree_sensitivity import ACCOUNTINGS
from noshuffle.strategies.workload import Workload

#: More bands than this are fitted only when asked for.
DEFAULT_BANDS = 2048
#: Buffers that a BLT is tried with, and how much less error one more has to buy.
DEFAULT_BUFFERS = 4
WORTH = 1e-3
#: Redrawn taps that a BLT gets by default; more change the third digit.
DEFAULT_TAPS = 6
#: Longest run whose error with unit columns, O(n²) work, is computed unasked; of a BLT, O(n).
NORMALIZED_STEPS, NORMALIZED_BLT_STEPS = 8192, 4_000_000
#: From here on two-sided gains are fitted in stages, with so many buffers and taps.
STAGED_STEPS, STAGED_BUFFERS, STAGED_TAPS = 512, 3, 12


@dataclass(frozen=True)
class FitRequest:
    """What a mechanism is fitted to; `options` holds only what was given."""

    participation: Participation
    workload: Workload
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def layout(self) -> FitLayout:
        """Steps, separation and most participations."""
        return layout(self.participation)

    @property
    def bands(self) -> int | None:
        """As given, or as many as the buffers allow."""
        bands, buffers = self.options.get("bands"), self.options.get("buffers")
        return buffers + 1 if bands is None and buffers is not None else bands

    def measure(self, strategy: Strategy) -> float:
        """Rms error × sensitivity of a candidate."""
        return cost(strategy, self.participation, workload=self.workload)

    def closed_form(self, strategy: Strategy) -> Fit:
        """A closed form as a fit: nothing to search, so it has converged."""
        return Fit(strategy, self.measure(strategy), converged=True)


@dataclass(frozen=True)
class Option:
    """An option that mechanisms take by this name: its type, and what it must be."""

    name: str
    kind: type
    words: str
    choices: tuple[str, ...] = ()
    at_least: int = 1

    def check(self, value: Any) -> None:
        """Refuse what is not of the kind; None means not given."""
        if value is None:
            return
        if self.choices:
            one_of(self.choices, **{self.name: value})
        elif self.kind is int:
            whole(at_least=self.at_least, **{self.name: value})
        else:
            instance_of(self.kind, **{self.name: value})


@dataclass(frozen=True)
class Mechanism:
    """One mechanism: its fit, the names of its options, and where it applies.

    `is_restarted`: proved for orders that change at restarts; `is_sampled`: proved for secret
    draws; `is_cyclic`: proved for groups that take turns.
    """

    name: str
    words: str
    fit: Callable[[FitRequest], Fit]
    options: tuple[str, ...] = ()
    is_restarted: bool = False
    is_sampled: bool = False
    is_cyclic: bool = False

    def check(self, participation: Participation) -> None:
        """Refuse what has no proof."""
        is_fine = self.is_sampled or (self.is_cyclic and isinstance(participation, CyclicPoisson))
        if participation.is_sampled and not is_fine:
            raise Unsupported(
                f"{participation.kind} sampling is accounted for independent noise only, got the "
                f"mechanism {self.name!r}; use identity, or Epochs or MinSeparation"
            )
        if isinstance(participation, Restarted) and not self.is_restarted:
            raise Unsupported(
                "an order that changes between restarts is proved for trees and identity only, got "
                f"the mechanism {self.name!r}; use MinSeparation over the whole run"
            )


OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        Option("bands", int, "bands of banded mechanisms"),
        Option("buffers", int, "buffers of a BLT; the limit on bands of bsr and banded"),
        Option("taps", int, "epoch taps of a BLT", at_least=0),
        Option("variant", str, "plain, honaker or full", choices=VARIANTS),
        Option("restart_every", int, "steps per tree"),
        Option("completion", bool, "virtual empty steps before a restart"),
        Option("tree_accounting", str, "tight or nodes", choices=ACCOUNTINGS),
    )
}


def _identity(request: FitRequest) -> Fit:
    return request.closed_form(identity())


def _tree(request: FitRequest) -> Fit:
    names = MECHANISMS["tree"].options
    given = {name: value for name, value in request.options.items() if name in names}
    return fit_tree(request.participation, workload=request.workload, **given)


def _unit_columns(request: FitRequest, found: Fit) -> Fit:
    """For one participation: unit columns, if they have less error."""
    n, _, most = request.layout
    strategy = found.strategy
    if most > 1 or n > NORMALIZED_STEPS or not isinstance(strategy, ToeplitzStrategy):
        return found
    scaled = column_normalized(strategy, n)
    value = request.measure(scaled)
    return found if value >= found.objective else replace(found, strategy=scaled, objective=value)


def _sqrt(request: FitRequest) -> Fit:
    strategy = sqrt_toeplitz(momentum=request.workload.beta)
    return _unit_columns(request, request.closed_form(strategy))


def _kept_bands(request: FitRequest) -> int:
    return request.bands or min(request.layout.separation, DEFAULT_BANDS)


def _bsr(request: FitRequest) -> Fit:
    kept = min(_kept_bands(request), request.layout.steps)
    return request.closed_form(sqrt_toeplitz(kept, momentum=request.workload.beta))


def _bisr(request: FitRequest) -> Fit:
    n, separation, _ = request.layout

    def build(kept: int) -> Fit:
        root = root_coefficients(min(kept, n), sign=1, momentum=request.workload.beta)
        return request.closed_form(banded_inverse(coefficients=root.tolist()))

    if request.bands is not None:
        return build(request.bands)
    powers = [1 << e for e in range(12) if 1 << e < 2 * min(n, separation)]
    return min(map(build, powers), key=lambda fit: fit.objective)


def _banded(request: FitRequest) -> Fit:
    bands, workload = _kept_bands(request), request.workload
    return _unit_columns(request, fit_banded(request.participation, bands=bands, workload=workload))


def _banded_inverse(request: FitRequest) -> Fit:
    bands, workload = request.bands or 16, request.workload
    return _unit_columns(
        request, fit_banded_inverse(request.participation, bands=bands, workload=workload)
    )


def _blt(request: FitRequest, *, name: str) -> Fit:
    """A BLT of the given size, or the smallest that is about as good as the best.

    The size is chosen without gains, which take longest to fit. With one participation gains are
    unit columns: they cost nothing, so they are always tried. Taps reach back whole epochs, so at
    most k − 1 of k participations are of use.
    """
    n, _, most = request.layout
    buffers = request.options.get("buffers")
    if name == "blt_two_sided" and n > STAGED_STEPS:
        with threadpool_limits(limits=1):
            return fit_staged(
                request.participation,
                buffers=buffers or STAGED_BUFFERS,
                taps=request.options.get("taps", STAGED_TAPS),
                workload=request.workload,
            )
    taps = 0 if name == "blt" else min(request.options.get("taps", DEFAULT_TAPS), most - 1)

    def build(size: int, gains: bool = False) -> Fit:
        sizes: dict[str, Any] = {"buffers": size, "taps": taps, "workload": request.workload}
        with threadpool_limits(limits=1):  # tiny matrices: more threads only wait for each other
            if gains and name == "blt_two_sided":
                return fit_two_sided(request.participation, **sizes)
            return fit_blt(request.participation, gains=gains, **sizes)

    has_gains = name in ("blt_gains", "blt_two_sided")
    if buffers is not None and has_gains:
        return build(buffers, gains=True)
    sizes = [buffers] if buffers is not None else range(1, DEFAULT_BUFFERS + 1)
    fits: dict[int, Fit] = {}
    for size in sizes:
        fits[size] = build(size)
        less = fits.get(size - 1)
        if less is not None and fits[size].objective > less.objective * (1 - WORTH / 2):
            break  # a further one buys less still
    enough = min(found.objective for found in fits.values()) * (1 + WORTH)
    size = next(size for size, found in fits.items() if found.objective <= enough)
    if has_gains:
        return build(size, gains=True)
    if most == 1 and n <= NORMALIZED_BLT_STEPS:
        with suppress(Unsupported):  # no unit columns for this workload
            return min(fits[size], build(size, gains=True), key=lambda found: found.objective)
    return fits[size]


def _dense(request: FitRequest) -> Fit:
    return fit_dense(request.participation, workload=request.workload)


_BANDS, _BUFFERS, _TAPS = ("bands", "buffers"), ("buffers",), ("buffers", "taps")
_TREE = ("variant", "restart_every", "completion", "tree_accounting")

MECHANISMS: dict[str, Mechanism] = {
    entry.name: entry
    for entry in (
        Mechanism(
            "identity", "independent noise (DP-SGD)", _identity, is_restarted=True, is_sampled=True
        ),
        Mechanism("tree", "binary tree aggregation", _tree, _TREE, is_restarted=True),
        Mechanism("sqrt", "square root of the workload", _sqrt),
        Mechanism("bsr", "first bands of the square root", _bsr, _BANDS, is_cyclic=True),
        Mechanism("bisr", "first bands of the inverse square root", _bisr, _BANDS),
        Mechanism("banded", "best bands of the encoder", _banded, _BANDS, is_cyclic=True),
        Mechanism("banded_inverse", "best bands of the inverse encoder", _banded_inverse, _BANDS),
        *(
            Mechanism(name, words, partial(_blt, name=name), options)
            for name, words, options in (
                ("blt", "buffered linear Toeplitz", _BUFFERS),
                ("blt_tapped", "buffered linear Toeplitz with taps by epochs", _TAPS),
                ("blt_gains", "tapped, with one gain per step", _TAPS),
                ("blt_two_sided", "tapped, with gains per step and per draw", _TAPS),
            )
        ),
        Mechanism("dense", "best matrix, for small runs", _dense),
    )
}


def mechanism_of(name: str) -> Mechanism:
    """The entry of this name."""
    one_of(tuple(MECHANISMS), mechanism=name)
    return MECHANISMS[name]
