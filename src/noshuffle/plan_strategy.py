"""The strategy of a plan, by the name of its mechanism and who may take part when.

    an object          itself
    BallsInBins        fitted to the order that its positions hide
    CyclicPoisson      "best" is banded: as many bands as groups
    other sampling     "best" is independent noise
    unknown length     a BLT that is good up to `reach` steps
    else               fitted to the participation (`strategies.fit`)

Called by `Plan.fit`. No state.

>>> from noshuffle.participation import Poisson
>>> from noshuffle.strategies.workload import checked_workload
>>> sampled = Poisson(steps=10, rate=0.1)
>>> chosen("best", sampled, workload=checked_workload(None)).name
'identity'
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from noshuffle.errors import one_of, whole
from noshuffle.participation import BallsInBins, CyclicPoisson, Participation
from noshuffle.participation.patterns import OPEN
from noshuffle.strategies import Strategy, identity
from noshuffle.strategies.fit import best as best_fit
from noshuffle.strategies.fit import fit as fit_strategy
from noshuffle.strategies.fit_blt import fit_blt
from noshuffle.strategies.workload import Workload

#: Steps that the noise of a run of unknown length is made for, unless `reach` says otherwise.
REACH = 10**6


def chosen(
    mechanism: str | Strategy,
    participation: Participation,
    *,
    workload: Workload,
    max_buffers: int | None = None,
    tree_accounting: str = "",
    options: dict[str, Any] | None = None,
) -> Strategy:
    """What `mechanism` means for this participation; `options` are those of its fit."""
    options = dict(options or {})
    if isinstance(mechanism, Strategy):
        return mechanism
    if isinstance(participation, BallsInBins):
        return _fitted(mechanism, participation.in_order, workload, max_buffers, options)
    if isinstance(participation, CyclicPoisson) and mechanism == "best":
        options = {"workload": workload, "bands": participation.groups, **options}
        return fit_strategy("banded", participation, **options).strategy
    if participation.is_sampled and mechanism in ("best", "identity"):
        return identity()
    if tree_accounting and mechanism != "best":
        options["tree_accounting"] = tree_accounting
    return _fitted(mechanism, participation, workload, max_buffers, options)


def _fitted(
    mechanism: str,
    participation: Participation,
    workload: Workload,
    max_buffers: int | None,
    options: dict[str, Any],
) -> Strategy:
    if participation.steps == OPEN:
        return _open_ended(mechanism, participation, workload, options)
    if mechanism == "best":
        return best_fit(participation, max_buffers=max_buffers, workload=workload).strategy
    return fit_strategy(mechanism, participation, workload=workload, **options).strategy


def _open_ended(
    mechanism: str, participation: Participation, workload: Workload, options: dict[str, Any]
) -> Strategy:
    """Noise without an end: a BLT that is good up to `reach` steps, and private for ever."""
    if mechanism == "identity":
        return identity()
    one_of(("blt", "best"), **{"mechanism of a run of unknown length": mechanism})
    options = {"buffers": 5, **options}
    reach = options.pop("reach", REACH)
    whole(reach=reach)
    return fit_blt(replace(participation, steps=reach), workload=workload, **options).strategy  # type: ignore[type-var]
