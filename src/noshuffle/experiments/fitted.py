"""Strategies and noise of the studies, fitted beforehand and shipped as `settings/fitted.json`.

    strategies["blt/20x100"]          the strategy for 20 passes of 100 steps
    noise["blt/20x100/2/1e-05"]       its noise multiplier at ε = 2, δ = 1e-5
    strategies["blt~0.97/20x100"]     the same for momentum 0.97 (0.9 where none is named)
    strategies["cyclic@2/20x100"]     bands for groups that take turns, as many as are best at ε = 2
    strategies["bins@2/20x100"]       bands for one secret position a unit, fitted at ε = 2

Fitting and calibration take a CPU minutes that a GPU would wait for. What is not in the file is
fitted when it is asked for; `python -m noshuffle.experiments.accuracy FIGURE …` adds what figures
need. Nothing here depends on data. State: the file as it was read, and what was fitted since.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from noshuffle.bins_fit import fit_bins
from noshuffle.participation import BallsInBins, CyclicPoisson, Epochs, Participation, Poisson
from noshuffle.plan import Plan
from noshuffle.release.files import read_json, write_json
from noshuffle.sampled_fit import alternatives
from noshuffle.strategies import Strategy, error, from_dict
from noshuffle.strategies.fit import fit
from noshuffle.strategies.fit_blt import TAPS_LIMIT
from noshuffle.strategies.toeplitz import Banded
from noshuffle.strategies.workload import momentum as heavy_ball

FILE = resources.files("noshuffle.experiments") / "settings" / "fitted.json"
WHOLE = "the whole run"
#: Characters of a strategy that is shipped.
LONGEST = 10_000
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
def _kept() -> dict[str, dict[str, Any]]:
    path = Path(str(FILE))
    return read_json(path) if path.is_file() else {"strategies": {}, "noise": {}}


def _key(name: str, epochs: int, per_epoch: int) -> str:
    return f"{name}/{epochs}x{per_epoch}"


def strategy(name: str, *, epochs: int, per_epoch: int) -> Strategy:
    """The strategy of a line for passes in one order."""
    key, kept = _key(name, epochs, per_epoch), _kept()["strategies"]
    kind, _, at = name.partition("@")
    if key not in kept and kind in AMPLIFIED:
        how: dict[str, Any] = {"epsilon": float(at), "delta": FITTED_DELTA}
        how["workload"] = heavy_ball(BETA)
        if kind == "cyclic":
            rows = alternatives(Plan.fit, Epochs(epochs, per_epoch), **how, kinds=(kind,))
            kept[key] = rows[0].plan.strategy.to_dict()
        else:
            own = fit_bins(BallsInBins(epochs, per_epoch), **how)
            assert own is not None, "no study is so long"
            kept[key] = own.to_dict()
    if key not in kept:
        kind, _, beta = name.partition("~")
        mechanism, options, is_heavy = MECHANISMS[kind]
        workload = heavy_ball(float(beta or BETA)) if is_heavy else None
        if mechanism == "blt_tapped" and epochs > TAPS_LIMIT:
            mechanism, options = "blt", {"buffers": options["buffers"]}
        if options.get("restart_every") == WHOLE:
            options = {**options, "restart_every": epochs * per_epoch}
        found = fit(mechanism, Epochs(epochs, per_epoch), workload=workload, **options)
        kept[key] = found.strategy.to_dict()
    return from_dict(kept[key])


def plan(
    name: str, *, epochs: int, per_epoch: int, epsilon: float, delta: float, rate: float
) -> Plan:
    """The plan of a line at ε; `rate` is the share of the data in one batch."""
    key, kept = f"{_key(name, epochs, per_epoch)}/{epsilon:g}/{delta:g}", _kept()["noise"]
    part: Participation = Epochs(epochs, per_epoch)
    made, kind = strategy(name, epochs=epochs, per_epoch=per_epoch), name.partition("@")[0]
    if kind == "amplified":
        part = Poisson(part.steps, rate)
    elif kind == "cyclic":
        part = CyclicPoisson(part.steps, groups(made), groups(made) * rate)
    elif kind == "bins":
        part = BallsInBins(epochs, per_epoch)
    if kind in ("amplified", "cyclic") and abs(rate * per_epoch - 1) > 1e-9:  # rows are left over
        key += f"/{rate:.9g}"
    common: dict[str, Any] = {"mechanism": made, "delta": delta}
    if key not in kept:
        kept[key] = Plan.fit(part, epsilon=epsilon, **common).noise_multiplier
    return Plan.fit(part, noise_multiplier=float(kept[key]), **common)


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


def save() -> None:
    """Write what was fitted into the file that ships, but strategies with a number a step."""
    kept = _kept()
    short = {k: v for k, v in kept["strategies"].items() if len(json.dumps(v)) <= LONGEST}
    levels = {k: v for k, v in kept["noise"].items() if "/".join(k.split("/")[:2]) in short}
    write_json(Path(str(FILE)), {"strategies": short, "noise": levels})
