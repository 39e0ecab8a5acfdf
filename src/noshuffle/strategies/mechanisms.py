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
joins by one entry, one of your own by `register`.

>>> [option for option in MECHANISMS["tree"].options]
['variant', 'restart_every', 'completion', 'tree_accounting']
>>> MECHANISMS["bisr"].words
'first bands of the inverse square root'
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from noshuffle.errors import InvalidInput, Unsupported, instance_of, one_of, whole
from noshuffle.participation import Participation, Restarted
from noshuffle.strategies.base import Strategy
from noshuffle.strategies.fit_banded import fit_banded, fit_banded_inverse
from noshuffle.strategies.fit_dense import fit_dense
from noshuffle.strategies.fit_forms import cost, layout
from noshuffle.strategies.fit_size import (
    DEFAULT_BANDS,
    closed_form,
    fit_any_blt,
    fit_bisr,
    taps_of,
    with_unit_columns,
)
from noshuffle.strategies.fit_tree import fit_tree
from noshuffle.strategies.fitted import Fit
from noshuffle.strategies.identity import identity
from noshuffle.strategies.registry import add_class
from noshuffle.strategies.toeplitz import sqrt_toeplitz
from noshuffle.strategies.tree import VARIANTS
from noshuffle.strategies.tree_sensitivity import ACCOUNTINGS
from noshuffle.strategies.workload import Workload


@dataclass(frozen=True)
class FitRequest:
    """What a mechanism is fitted to; `options` holds only what was given."""

    participation: Participation
    workload: Workload
    objective: str = "rms"
    options: dict[str, Any] = field(default_factory=dict)

    def measure(self, strategy: Strategy) -> float:
        """Error times sensitivity of a candidate."""
        return cost(strategy, self.participation, workload=self.workload, objective=self.objective)

    @property
    def bands(self) -> int | None:
        """As given, or as many as the buffers allow."""
        bands, buffers = self.options.get("bands"), self.options.get("buffers")
        return buffers + 1 if bands is None and buffers is not None else bands


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

    `needs_horizon`: its strategies serve runs of the fitted length only. `is_restarted`: proved for
    orders that change at restarts; `is_sampled`: proved for secret draws.
    """

    name: str
    words: str
    fit: Callable[[FitRequest], Fit]
    options: tuple[str, ...] = ()
    needs_horizon: bool = False
    is_restarted: bool = False
    is_sampled: bool = False

    def check(self, participation: Participation) -> None:
        """Refuse what has no proof."""
        if participation.is_sampled and not self.is_sampled:
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
    return closed_form(identity(), request.measure)


def _tree(request: FitRequest) -> Fit:
    return fit_tree(
        request.participation,
        workload=request.workload,
        objective=request.objective,
        **_given(request, "variant", "restart_every", "completion", "tree_accounting"),
    )


def _given(request: FitRequest, *names: str) -> dict[str, Any]:
    return {name: request.options[name] for name in names if name in request.options}


def _unit_columns(request: FitRequest, found: Fit) -> Fit:
    """For one participation: unit columns, where they lower the error."""
    n, _, most = layout(request.participation)
    return with_unit_columns(found, request.measure, steps=n) if most == 1 else found


def _sqrt(request: FitRequest) -> Fit:
    strategy = sqrt_toeplitz(momentum=request.workload.beta)
    return _unit_columns(request, closed_form(strategy, request.measure))


def _kept_bands(request: FitRequest) -> int:
    return request.bands or min(layout(request.participation).separation, DEFAULT_BANDS)


def _bsr(request: FitRequest) -> Fit:
    kept = min(_kept_bands(request), layout(request.participation).steps)
    strategy = sqrt_toeplitz(kept, momentum=request.workload.beta)
    return closed_form(strategy, request.measure)


def _bisr(request: FitRequest) -> Fit:
    n, separation, _ = layout(request.participation)
    return fit_bisr(
        request.bands,
        n,
        separation=separation,
        workload=request.workload,
        measure=request.measure,
    )


def _banded(request: FitRequest) -> Fit:
    found = fit_banded(
        request.participation,
        bands=_kept_bands(request),
        workload=request.workload,
        objective=request.objective,
    )
    return _unit_columns(request, found)


def _banded_inverse(request: FitRequest) -> Fit:
    found = fit_banded_inverse(
        request.participation,
        bands=request.bands or 16,
        workload=request.workload,
        objective=request.objective,
    )
    return _unit_columns(request, found)


def _blt(request: FitRequest, *, name: str) -> Fit:
    most = layout(request.participation).most
    return fit_any_blt(
        request.participation,
        buffers=request.options.get("buffers"),
        taps=taps_of(name, request.options.get("taps"), most=most),
        gains=name in ("blt_gains", "blt_two_sided"),
        two_sided=name == "blt_two_sided",
        workload=request.workload,
        objective=request.objective,
    )


def _dense(request: FitRequest) -> Fit:
    layout(request.participation)
    if request.objective == "max":
        raise Unsupported('a dense strategy is fitted for objective="rms", got "max"')
    return fit_dense(request.participation, workload=request.workload)


def _blt_entry(name: str, words: str, *, has_gains: bool = False) -> Mechanism:
    options = ("buffers",) if name == "blt" else ("buffers", "taps")
    return Mechanism(name, words, partial(_blt, name=name), options, needs_horizon=has_gains)


MECHANISMS: dict[str, Mechanism] = {
    entry.name: entry
    for entry in (
        Mechanism(
            "identity",
            "independent noise (DP-SGD)",
            _identity,
            is_restarted=True,
            is_sampled=True,
        ),
        Mechanism(
            "tree",
            "binary tree aggregation",
            _tree,
            ("variant", "restart_every", "completion", "tree_accounting"),
            is_restarted=True,
        ),
        Mechanism("sqrt", "square root of the workload", _sqrt),
        Mechanism("bsr", "first bands of the square root", _bsr, ("bands", "buffers")),
        Mechanism("bisr", "first bands of the inverse square root", _bisr, ("bands", "buffers")),
        Mechanism("banded", "best bands of the encoder", _banded, ("bands", "buffers")),
        Mechanism(
            "banded_inverse",
            "best bands of the inverse encoder",
            _banded_inverse,
            ("bands", "buffers"),
        ),
        _blt_entry("blt", "buffered linear Toeplitz"),
        _blt_entry("blt_tapped", "buffered linear Toeplitz with taps by epochs"),
        _blt_entry("blt_gains", "tapped, with one gain per step", has_gains=True),
        _blt_entry("blt_two_sided", "tapped, with gains per step and per draw", has_gains=True),
        Mechanism("dense", "best matrix, for small runs", _dense, needs_horizon=True),
    )
}


def mechanism_of(name: str) -> Mechanism:
    """The entry of this name."""
    one_of(tuple(MECHANISMS), mechanism=name)
    return MECHANISMS[name]


def register(
    cls: type[Strategy],
    *,
    fit: Callable[[FitRequest], Strategy] | None = None,
    words: str = "",
    needs_horizon: bool = False,
) -> type[Strategy]:
    """Make a strategy of your own known by its class attribute `name`; also a class decorator.

    Plans with it can then be read back from JSON, and `Plan.fit(mechanism=NAME)` builds it: by
    `fit`, which gets a `FitRequest`, or as `cls()` where there is none. Every plan checks it
    against its encoder before it is used (`own`).
    """
    name = getattr(cls, "name", "")
    known = MECHANISMS.get(name)
    if known is not None and not isinstance(known.fit, _OwnFit):
        raise InvalidInput(f"a name that is not taken is needed, got {name!r}; choose another")
    add_class(cls)
    build = _OwnFit(cls, fit)
    MECHANISMS[cls.name] = Mechanism(
        cls.name, words or f"registered: {cls.__name__}", build, needs_horizon=needs_horizon
    )
    return cls


@dataclass(frozen=True)
class _OwnFit:
    """The fit of a registered strategy: one candidate, measured."""

    cls: type[Strategy]
    build: Callable[[FitRequest], Strategy] | None

    def __call__(self, request: FitRequest) -> Fit:
        try:
            strategy = self.cls() if self.build is None else self.build(request)
        except TypeError as problem:
            raise InvalidInput(
                f"the mechanism {self.cls.name!r} cannot be built: {problem}; give register a fit="
            ) from None
        instance_of(self.cls, **{"what fit returned": strategy})
        return closed_form(strategy, request.measure)
