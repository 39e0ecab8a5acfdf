"""Strategies and noise of the studies, fitted beforehand and shipped as `settings/fitted.json`.

    strategies["blt/20x100"]          the strategy for 20 passes of 100 steps
    noise["blt/20x100/2/1e-05"]       its noise multiplier at ε = 2, δ = 1e-5
    strategies["cyclic@2/20x100"]     bands for groups that take turns, as many as are best at ε = 2

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

from noshuffle.participation import CyclicPoisson, Epochs, Participation, Poisson
from noshuffle.plan import Plan
from noshuffle.release.files import read_json, write_json
from noshuffle.sampled_fit import alternatives
from noshuffle.strategies import Strategy, from_dict
from noshuffle.strategies.fit import fit
from noshuffle.strategies.toeplitz import Banded
from noshuffle.strategies.workload import momentum as heavy_ball

FILE = resources.files("noshuffle.experiments") / "settings" / "fitted.json"
WHOLE = "the whole run"
#: Characters of a strategy that is shipped.
LONGEST = 10_000
#: What a line of a study fits: mechanism by its name in `fit`, options, and whether to momentum.
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
#: δ at which the number of groups is chosen; the noise is that of the δ that is asked for.
CYCLIC_DELTA = 1e-5


@cache
def _kept() -> dict[str, dict[str, Any]]:
    path = Path(str(FILE))
    return read_json(path) if path.is_file() else {"strategies": {}, "noise": {}}


def _key(name: str, epochs: int, per_epoch: int) -> str:
    return f"{name}/{epochs}x{per_epoch}"


def strategy(name: str, *, epochs: int, per_epoch: int) -> Strategy:
    """The strategy of a line for passes in one order."""
    key, kept = _key(name, epochs, per_epoch), _kept()["strategies"]
    if key not in kept and name.startswith("cyclic@"):
        at = {"epsilon": float(name.partition("@")[2]), "delta": CYCLIC_DELTA}
        how: dict[str, Any] = {**at, "kinds": ("cyclic",), "workload": heavy_ball(BETA)}
        rows = alternatives(Plan.fit, Epochs(epochs, per_epoch), **how)
        kept[key] = rows[0].plan.strategy.to_dict()
    if key not in kept:
        mechanism, options, is_heavy = MECHANISMS[name]
        workload = heavy_ball(BETA) if is_heavy else None
        if options.get("restart_every") == WHOLE:
            options = {**options, "restart_every": epochs * per_epoch}
        found = fit(mechanism, Epochs(epochs, per_epoch), workload=workload, **options)
        kept[key] = found.strategy.to_dict()
    return from_dict(kept[key])


def noise(
    name: str, *, epochs: int, per_epoch: int, epsilon: float, delta: float, rate: float
) -> float:
    """The noise multiplier of a line at ε; `rate` is the share of the data in one batch."""
    key, kept = f"{_key(name, epochs, per_epoch)}/{epsilon:g}/{delta:g}", _kept()["noise"]
    is_sampled = name == "amplified" or name.startswith("cyclic@")
    if is_sampled and abs(rate * per_epoch - 1) > 1e-9:  # some rows of a pass are left over
        key += f"/{rate:.9g}"
    if key not in kept:
        part: Participation = Epochs(epochs, per_epoch)
        if name == "amplified":
            part = Poisson(part.steps, rate)
        made = strategy(name, epochs=epochs, per_epoch=per_epoch)
        if name.startswith("cyclic@"):
            part = CyclicPoisson(part.steps, groups(made), groups(made) * rate)
        kept[key] = Plan.fit(part, mechanism=made, epsilon=epsilon, delta=delta).noise_multiplier
    return float(kept[key])


def groups(strategy: Strategy) -> int:
    """Groups that take turns under a banded strategy: one for each band."""
    assert isinstance(strategy, Banded)
    return len(strategy.bands)


def save() -> None:
    """Write what was fitted into the file that ships, but strategies with a number a step."""
    kept = _kept()
    short = {k: v for k, v in kept["strategies"].items() if len(json.dumps(v)) <= LONGEST}
    levels = {k: v for k, v in kept["noise"].items() if "/".join(k.split("/")[:2]) in short}
    write_json(Path(str(FILE)), {"strategies": short, "noise": levels})
