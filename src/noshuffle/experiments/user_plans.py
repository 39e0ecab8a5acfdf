"""Mechanisms for one user protected: limits of a user, strategies under them, the noise felt, ε.

    level = z/m · rms over rounds of ‖row t of (decayed sum ∘ momentum) C⁻¹‖,    m clients a round

is what a model feels of the noise multiplier z on its iterates; `felt` is that for z = m = 1.
Settings are those of `settings/figure2.toml`. No state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.signal import lfilter

from noshuffle.participation import MinSeparation, Participation, Poisson
from noshuffle.plan import Plan
from noshuffle.strategies import Strategy, identity, sensitivity, tree
from noshuffle.strategies.base import ToeplitzStrategy

Settings = Mapping[str, Any]


def limits(settings: Settings, *, population: int, cohort: int) -> MinSeparation:
    """What a user may do when `cohort` of `population` users take part in every round."""
    if cohort == settings["clients"]:
        apart, most = settings["separation"], settings["max_participations"]
    else:
        apart = max(1, min(settings["rounds"], population // cohort))
        most = math.ceil(settings["rounds"] / apart)
    return MinSeparation(settings["rounds"], apart, most)


def felt(strategy: Strategy, settings: Settings) -> float:
    """Noise on the iterates for unit draws and one client."""
    noise = lfilter(
        [1.0], [1.0, -settings["momentum"]], strategy.noising(settings["rounds"]), axis=0
    )
    noise = lfilter([1.0], [1.0, -settings["forget"]], noise, axis=0)
    return float(np.sqrt(np.square(noise).sum(1).mean()))


def fitted(name: str, part: MinSeparation, settings: Settings) -> Strategy:
    """The strategy of a mechanism under these limits."""
    from noshuffle.strategies.fit import fit
    from noshuffle.strategies.workload import momentum

    if name == "tree":
        trees = [tree(restart_every=1 << e) for e in range(3, part.steps.bit_length() + 1)]
        return min(trees, key=lambda one: felt(one, settings) * sensitivity(one, part).value)
    if name != "blt":
        return identity()
    short = min(settings["fitted_to"], part.steps)
    apart = min(part.separation, short)
    most = min(part.max_participations, -(-short // apart))
    found = fit("blt", MinSeparation(short, apart, most), workload=momentum(settings["momentum"]))
    strategy = found.strategy
    if short < part.steps and isinstance(strategy, ToeplitzStrategy):
        # Columns that are scaled for a short run would not do for a longer one.
        strategy = replace(strategy, normalized=0)
    return strategy


def user_plan(
    name: str, strategy: Strategy, z: float, settings: Settings, *, population: int, cohort: int
) -> Plan:
    part: Participation = limits(settings, population=population, cohort=cohort)
    if name == "sampled":
        part = Poisson(settings["rounds"], min(1.0, cohort / population))
    return Plan(participation=part, strategy=strategy, noise_multiplier=z, delta=settings["delta"],
                unit="user")  # fmt: skip


def user_epsilon(*given: Any, **more: Any) -> float | None:
    found = user_plan(*given, **more).epsilon()
    return found if math.isfinite(found) else None
