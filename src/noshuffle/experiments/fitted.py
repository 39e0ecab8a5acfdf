"""Strategies and noise of the studies by name, fitted when they are asked for.

    blt          a BLT fitted to momentum 0.9
    blt~0.97     the same for momentum 0.97
    cyclic@2     bands for groups that take turns, as many as are best at ε = 2
    bins@2       bands for one secret position a unit, fitted at ε = 2

Nothing here depends on data. State: what this process has fitted.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from noshuffle.participation import BallsInBins, CyclicPoisson, Epochs, Participation, Poisson
from noshuffle.plan import Plan, compare_sampling
from noshuffle.plan.fit_bins import fit_bins
from noshuffle.strategies import Strategy, error
from noshuffle.strategies.fit import fit
from noshuffle.strategies.fit_blt import TAPS_LIMIT
from noshuffle.strategies.toeplitz import Banded
from noshuffle.strategies.workload import momentum as heavy_ball

WHOLE = "the whole run"
#: What a line of a study fits: mechanism by its name in `fit`, options, and whether to momentum.
#: Taps as far as they are fitted: with more passes than that they gain 2 % of the error or less.
MECHANISMS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "blt": ("blt_tapped", {"buffers": 2, "taps": 6}, True),
    "blt_prefix": ("blt_tapped", {"buffers": 2, "taps": 6}, False),
    "blt_gains": ("blt_gains", {"buffers": 2}, False),
    "two_sided": ("blt_two_sided", {"buffers": 2}, False),
    "banded": ("banded", {"bands": 16}, False),
    "tree": ("tree", {}, False),
    "tree_bare": ("tree", {"completion": False}, False),
    "tree_one": ("tree", {"restart_every": WHOLE, "completion": False}, False),
    "identity": ("identity", {}, False),
    "amplified": ("identity", {}, False),
}
BETA = 0.9
#: Lines whose strategy is fitted to their own amplification, at an ε: "cyclic@2".
AMPLIFIED = ("cyclic", "bins")
#: δ at which they are fitted; the noise is that of the δ that is asked for.
FITTED_DELTA = 1e-5


@cache
def strategy(name: str, *, epochs: int, per_epoch: int) -> Strategy:
    """The strategy of a line for passes in one order."""
    kind, _, at = name.partition("@")
    if kind in AMPLIFIED:
        how: dict[str, Any] = {"epsilon": float(at), "delta": FITTED_DELTA}
        how["workload"] = heavy_ball(BETA)
        if kind == "cyclic":
            rows = compare_sampling(Epochs(epochs, per_epoch), kinds=(kind,), **how)
            cyclic: Strategy = rows[0].plan.strategy
            return cyclic
        bins = fit_bins(BallsInBins(epochs, per_epoch), **how)
        assert bins is not None, "no study is so long"
        return bins
    kind, _, beta = name.partition("~")
    mechanism, options, is_heavy = MECHANISMS[kind]
    workload = heavy_ball(float(beta or BETA)) if is_heavy else None
    if mechanism == "blt_tapped" and epochs > TAPS_LIMIT:
        mechanism, options = "blt", {"buffers": options["buffers"]}
    if options.get("restart_every") == WHOLE:
        options = {**options, "restart_every": epochs * per_epoch}
    return fit(mechanism, Epochs(epochs, per_epoch), workload=workload, **options).strategy


@cache
def plan(
    name: str, *, epochs: int, per_epoch: int, epsilon: float, delta: float, rate: float
) -> Plan:
    """The plan of a line at ε; `rate` is the share of the data in one batch."""
    part: Participation = Epochs(epochs, per_epoch)
    made, kind = strategy(name, epochs=epochs, per_epoch=per_epoch), name.partition("@")[0]
    if kind == "amplified":
        part = Poisson(part.steps, rate)
    elif kind == "cyclic":
        part = CyclicPoisson(part.steps, groups(made), groups(made) * rate)
    elif kind == "bins":
        part = BallsInBins(epochs, per_epoch)
    return Plan.fit(part, mechanism=made, epsilon=epsilon, delta=delta)


def groups(strategy: Strategy) -> int:
    """Groups that take turns under a banded strategy: one for each band."""
    assert isinstance(strategy, Banded)
    return len(strategy.bands)


def name_at(name: str, *, momentum: float) -> str:
    """The name of a line's fit at its momentum; fits to prefix sums are the same at any."""
    is_heavy = name in MECHANISMS and MECHANISMS[name][2]
    return f"{name}~{momentum:g}" if is_heavy and momentum != BETA else name


def predicted(plan: Plan, *, momentum: float = BETA) -> float:
    """Noise × rms error of what momentum makes of the sums, in clip norms.

    Rates are compared at equal η/(1−β), what a gradient moves the iterate by in the end, so the
    error is that of (1−β)/(1−BETA) times the sums: equal for all momenta where noise is slow.
    """
    rms = error(plan.strategy, plan.steps, workload=heavy_ball(momentum)).rms
    return plan.noise_multiplier * float(rms) * (1 - momentum) / (1 - BETA)
