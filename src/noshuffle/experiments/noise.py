"""`noise`: standard deviations of noisy running sums at equal privacy, for every mechanism.

    over steps      one pass, and k passes in the same order           z · ‖row t of A·C⁻¹‖
    single runs     the noise itself, along a run (public seeds)
    over n          10² to 10⁶ steps, beside a lower bound of every mechanism
    memory          buffers that are kept against error
    over ε          correlated noise against sampled DP-SGD: where the lines cross

All values are in units of the clip norm. The bound is ‖A‖_tr/n, the nuclear norm of the prefix sums
over n, with singular values 1/(2 sin((2j−1)π/(4n+2))); up to 1,000 steps the certified one of
`strategies.lower_bound`, which is larger. Nothing is trained and nothing is random but the single
runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from noshuffle.accounting import gaussian
from noshuffle.errors import Unsupported
from noshuffle.experiments.figure import Cell, Figure, Request, Results
from noshuffle.experiments.noise_view import CLAIMS, OVER_EPSILON, POINTS, SHOWN, draw, table
from noshuffle.participation import Epochs, Participation, Poisson, SinglePass
from noshuffle.plan import Plan
from noshuffle.strategies import error
from noshuffle.strategies.lower_bound import rms_lower_bound

#: Longest run for which the certified bound is computed here.
CERTIFIED = 1000


def nuclear_bound(n: int) -> float:
    """‖A‖_tr/n of prefix sums: no mechanism has a smaller max or rms error × sensitivity.

    >>> round(nuclear_bound(64), 3), round(nuclear_bound(4096), 3)
    (2.04, 3.35)
    """
    j = np.arange(1, n + 1)
    return float(np.sum(1 / (2 * np.sin((2 * j - 1) * math.pi / (4 * n + 2)))) / n)


def _parts(settings: Mapping[str, Any]) -> dict[str, Participation]:
    passes, steps = settings["epochs"]
    return {
        "one pass": SinglePass(settings["one_pass"]),
        "epochs": Epochs(epochs=passes, steps_per_epoch=steps),
    }


def _over_steps(
    settings: Mapping[str, Any], where: str, options: Mapping[str, Any], results: Results
) -> dict[str, Any]:
    """Noise over the steps of a run, and single runs of it."""
    part = _parts(settings)[where]
    try:
        plan = Plan.fit(part, epsilon=settings["epsilon"], delta=settings["delta"], **options)
        felt = error(plan.strategy, plan.steps).per_step * plan.noise_multiplier
    except Unsupported as refusal:
        return {"refused": str(refusal)}
    at = np.unique(np.linspace(0, plan.steps - 1, POINTS).astype(int))
    return {
        "steps": (at + 1).tolist(),
        "deviation": felt[at].tolist(),
        "max": float(felt.max()),
        "rms": float(np.sqrt(np.mean(felt**2))),
        "noise_multiplier": plan.noise_multiplier,
        "sensitivity": plan.sensitivity.value,
        "buffers": plan.strategy.buffers(plan.steps),
        "strategy": plan.strategy.words(),
        "runs": [_single_run(plan, seed)[at].tolist() for seed in settings["seeds"]],
    }


def _single_run(plan: Plan, seed: int) -> np.ndarray:
    """The noise in the running sum of one coordinate, step by step."""
    noising = plan.strategy.noising(plan.steps)
    draws = np.random.default_rng(seed).standard_normal(noising.shape[1])
    return np.asarray(np.cumsum(noising @ draws) * plan.noise_multiplier)


def _over_n(options: Mapping[str, Any], n: int, results: Results) -> dict[str, float] | None:
    """Error × sensitivity of one pass over n steps; None where no closed form reaches that far."""
    try:
        plan = Plan.fit(SinglePass(n), noise_multiplier=1.0, **options)
        found, reach = error(plan.strategy, n), plan.sensitivity.value
    except Unsupported:
        return None
    return {"max": reach * found.max, "rms": reach * found.rms}


def _bound(n: int, results: Results) -> float:
    return rms_lower_bound(SinglePass(n)) if n <= CERTIFIED else nuclear_bound(n)


def _memory(
    settings: Mapping[str, Any], mechanism: str, buffers: int, results: Results
) -> dict[str, Any]:
    size: dict[str, Any] = {"buffers": buffers} if mechanism == "blt" else {"bands": buffers + 1}
    plan = Plan.fit(_parts(settings)["epochs"], mechanism=mechanism, noise_multiplier=1.0, **size)
    found = error(plan.strategy, plan.steps)
    return {"buffers": buffers, "rms": plan.sensitivity.value * found.rms}


def _over_epsilon(
    settings: Mapping[str, Any], name: str, epsilon: float, results: Results
) -> float:
    """Rms noise over k passes; "sampled" is DP-SGD with Poisson batches of the same mean size."""
    part = _parts(settings)["epochs"]
    if name != "sampled":
        at_one = results[f"epochs/{name}"]
        mu = [
            gaussian.mu(epsilon=e, delta=settings["delta"]) for e in (settings["epsilon"], epsilon)
        ]
        return float(at_one["rms"] * mu[0] / mu[1])
    passes, steps = settings["epochs"]
    sampled = Poisson(passes * steps, 1 / steps)
    plan = Plan.fit(sampled, mechanism="identity", epsilon=epsilon, delta=settings["delta"])
    return plan.noise_multiplier * error(plan.strategy, part.steps).rms


def _cells(asked: Request) -> Sequence[Cell]:
    settings = asked.settings
    kinds: dict[str, dict[str, Any]] = settings["mechanisms"]
    cells = [
        Cell(f"{where}/{name}", partial(_over_steps, settings, where, options), kind=name)
        for where in ("one pass", "epochs")
        for name, options in kinds.items()
    ]
    for n in settings["lengths"]:
        cells.append(Cell(f"length/bound/{n}", partial(_bound, n), kind="bound"))
        for name in SHOWN:
            options = {**({"buffers": 5} if name == "BLT" else {}), **kinds[name]}
            key = f"length/{name}/{n}"
            cells.append(Cell(key, partial(_over_n, options, n), kind="length"))
    for mechanism, sizes in settings["memory"].items():
        for size in sizes:
            work = partial(_memory, settings, mechanism, size)
            cells.append(Cell(f"memory/{mechanism}/{size}", work, kind="memory"))
    for epsilon in settings["epsilons"]:
        for name in [name for name in OVER_EPSILON if name == "sampled" or name in kinds]:
            needs = () if name == "sampled" else (f"epochs/{name}",)
            noise = partial(_over_epsilon, settings, name, epsilon)
            cells.append(Cell(f"epsilon/{name}/{epsilon:g}", noise, 1.0, "epsilon", needs))
    return cells


FIGURE = Figure(
    name="noise",
    title="noise of running sums at equal privacy",
    cells=_cells,
    table=table,
    draw=draw,
    claims=CLAIMS,
)
