"""Golden plans: ε, μ and noise of mechanisms × participations, whole, stopped early and forked.

Strategies with given numbers have closed forms (1e-9). Strategies that are fitted end where an
optimizer stopped, which differs between processors and libraries: their sensitivity and noise are
held to 2e-3, noise × error, which is flat at the optimum, to 3e-4, and a target ε to 1e-9. Noise of
a sampled run is searched for, to 1e-6 (bins: 1e-4), and comes from sums of many terms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
from tests.golden.entries import CLOSED, Entry

import noshuffle as ns
from noshuffle import accounting, strategies
from noshuffle.participation import (
    AnyOrderEpochs,
    BallsInBins,
    CyclicPoisson,
    Epochs,
    FixedSize,
    MinSeparation,
    Participation,
    Poisson,
    Restarted,
    SinglePass,
    TruncatedPoisson,
)
from noshuffle.strategies.base import ToeplitzStrategy
from noshuffle.strategies.recipe import FeedForward

#: What a fit may be off by: its noise, and its noise × error.
FITTED, OPTIMUM = 2e-3, 3e-4
#: Searches for the noise of a sampled run, and sums over its privacy losses.
SEARCHED = 1e-5
DELTA = 1e-5
OPEN = 2000

UNSAMPLED: dict[str, Participation] = {
    "single": SinglePass(64),
    "epochs": Epochs(4, 16),
    "any order": AnyOrderEpochs(4, 16),
    "min separation": MinSeparation(64, 12, 4),
    "restarted": Restarted(Epochs(2, 16), 32),
    "open": SinglePass.open(),
    "open separation": MinSeparation.open(separation=100, max_participations=5),
}
SAMPLED: dict[str, Participation] = {
    "poisson": Poisson(64, 0.05),
    "fixed size": FixedSize(64, 50, 1000),
    "truncated": TruncatedPoisson.of(steps=16, batch=20, population=400),
    "cyclic": CyclicPoisson.of(steps=64, groups=8, batch=25, population=1000),
    "bins": BallsInBins(4, 16),
}
PARTICIPATIONS = UNSAMPLED | SAMPLED
#: Where a run of unknown length is asked, instead of at its end.
ENDS = {"open": OPEN, "open separation": OPEN}

STEPS = 64
_RATES = tuple(1.0 / (1 + 0.05 * t) for t in range(STEPS))
#: Strategies by given numbers: nothing is searched for.
GIVEN: dict[str, strategies.Strategy] = {
    "identity": strategies.identity(),
    "release sums": strategies.release_sums(),
    "tree plain": strategies.tree("plain", restart_every=16),
    "tree honaker": strategies.tree("honaker", restart_every=32),
    "tree honaker completed": strategies.tree("honaker", restart_every=24, completion=True),
    "tree full": strategies.tree("full"),
    "sqrt": strategies.sqrt_toeplitz(),
    "sqrt of momentum": strategies.sqrt_toeplitz(momentum=0.9),
    "bsr": strategies.sqrt_toeplitz(8),
    "banded": strategies.banded((1.0, 0.5, 0.3, 0.2)),
    "banded with signs": strategies.banded((1.0, -0.4, 0.2)),
    "banded gains": strategies.banded((1.0, 0.5), gains=_RATES),
    "banded inverse": strategies.banded_inverse(4),
    "banded inverse given": strategies.banded_inverse(coefficients=(1.0, -0.45, -0.1)),
    "blt": strategies.blt((0.97, 0.6), (0.25, 0.35)),
    "blt of three": strategies.blt((0.99, 0.8, 0.3), (0.1, 0.2, 0.25)),
    "blt with unit columns": strategies.column_normalized(
        strategies.blt((0.97, 0.6), (0.25, 0.35)), STEPS
    ),
    "blt with taps": strategies.blt((0.97, 0.6), (0.25, 0.35), (0.3, 0.2), 16),
    "blt two-sided": strategies.blt(
        (0.97, 0.6), (0.25, 0.35), (0.3,), 16, _RATES[::-1], gains=_RATES
    ),
    "dense": strategies.dense(
        np.tril(np.exp(-0.3 * np.abs(np.subtract.outer(np.arange(64), np.arange(64)))))
    ),
}

Facts = dict[str, Any]


ALL = ("add-remove", "zero-out", "replace-one")
#: Neighbours under which the Rényi accountant is asked, too.
RENYI = {"fixed size": "replace-one"}
#: Strategies that are asked for the other neighbours, too: they double the sensitivity of all.
REPLACED = ("identity", "tree honaker", "banded", "blt", "dense")


def allowed(name: str) -> tuple[str, ...]:
    """Where a strategy is accounted (independent noise that is sampled stands by itself)."""
    places = ["single", "epochs", "min separation"]
    if name == "identity" or name.startswith("tree"):
        places += ["restarted"]
    if name == "identity":
        places += ["any order"]
    if name in ("identity", "tree honaker", "blt", "blt of three"):
        places += ["open", "open separation"]
    if name in ("bsr", "banded", "banded gains"):
        places += ["cyclic"]
    if name in ("blt", "banded", "banded inverse", "dense"):
        places += ["bins"]
    return tuple(places)


def facts(plan: ns.Plan, *, end: int = 0) -> Facts:
    """The numbers of a plan: whole, stopped early, of a group (where that is quick)."""
    end = end or plan.steps
    said = plan.statement(steps=end)
    found: Facts = {
        "z": plan.noise_multiplier,
        "sensitivity": said.sensitivity,
        "epsilon": said.epsilon,
        "mu": said.mu,
        "rho": said.rho,
        "exact": said.exact,
        "neighbours": plan.neighbours,
        "accountant": plan.accountant,
    }
    is_cut = isinstance(plan.participation, TruncatedPoisson)
    early = [end // 4] if is_cut else sorted({1, end // 4, end // 2 + 1})
    found["early"] = {str(t): plan.epsilon_after(t) for t in early}
    found["early mu"] = {str(t): plan.mu(t) for t in early}
    if not is_cut and not isinstance(plan.participation, BallsInBins):
        found["of three"] = plan.epsilon(group=3)
    return found


def given(name: str, where: str, neighbours: str) -> Facts:
    """A strategy by given numbers, by noise multiplier; unsampled also by ε."""
    part = PARTICIPATIONS[where]
    make = partial(ns.Plan.fit, part, mechanism=GIVEN[name], delta=DELTA, neighbours=neighbours)
    found = facts(make(noise_multiplier=3.0), end=ENDS.get(where, 0))
    if part.is_sampled:
        return found
    by_epsilon = make(epsilon=2.0)
    error = strategies.error(by_epsilon.strategy, ENDS.get(where, part.steps))
    return found | {
        "z for 2": by_epsilon.noise_multiplier,
        "epsilon for 2": by_epsilon.epsilon(),
        "rms error": error.rms,
        "max error": error.max,
    }


#: (mechanism, options, participation, workload): what is fitted.
FITS: dict[str, tuple[str, Facts, str, strategies.Workload | None]] = {
    f"{name}, {where}": (name, {}, where, None)
    for name in (
        "tree", "sqrt", "bsr", "bisr", "banded", "banded_inverse", "blt", "dense",
    )
    for where in ("single", "epochs")
} | {
    f"{name}, min separation": (name, {}, "min separation", None)
    for name in ("tree", "bsr", "bisr", "banded", "banded_inverse", "blt")
} | {
    "tree, restarted": ("tree", {}, "restarted", None),
    "blt, open": ("blt", {"reach": OPEN}, "open", None),
    "blt, open separation": ("blt", {"reach": OPEN}, "open separation", None),
    "tree, completed": ("tree", {"completion": True, "restart_every": 24}, "epochs", None),
    "tree, plain": ("tree", {"variant": "plain"}, "epochs", None),
    "tree, full": ("tree", {"variant": "full"}, "single", None),
    "blt, three buffers": ("blt", {"buffers": 3}, "epochs", None),
    "blt_gains, epochs": ("blt_gains", {"buffers": 1, "taps": 2}, "epochs", None),
    "blt_two_sided, single": ("blt_two_sided", {"buffers": 2}, "single", None),
    "blt_two_sided, epochs": ("blt_two_sided", {"buffers": 1}, "epochs", None),
    "blt_tapped, two taps": ("blt_tapped", {"buffers": 2, "taps": 2}, "epochs", None),
    "banded, four bands": ("banded", {"bands": 4}, "min separation", None),
    "best, epochs": ("best", {}, "epochs", None),
    "blt, momentum": ("blt", {}, "epochs", strategies.momentum(0.9)),
    "banded, cooldown": (
        "banded", {}, "epochs", strategies.Workload(0.5, (*(1.0,) * 48, *np.linspace(1, 0.1, 16)))
    ),
}  # fmt: skip


def fit(name: str) -> Facts:
    """A mechanism by name, fitted for ε = 2, and its strategy under another noise."""
    mechanism, options, where, workload = FITS[name]
    part = PARTICIPATIONS[where]
    steps = ENDS.get(where, part.steps)
    plan = ns.Plan.fit(
        part, mechanism=mechanism, epsilon=2.0, delta=DELTA, workload=workload, **options
    )
    again = ns.Plan.fit(part, mechanism=plan.strategy, noise_multiplier=5.0, delta=DELTA)
    error = strategies.error(plan.strategy, steps, workload=workload)
    return {
        "epsilon": plan.epsilon(),
        "z": plan.noise_multiplier,
        "z times error": plan.noise_multiplier * error.rms,
        "half": plan.epsilon_after(steps // 2),
        "epsilon of 5": again.epsilon(),
        "mu of 5": again.mu(),
    }


def sampled(where: str, neighbours: str, accountant: str, mechanism: str = "identity") -> Facts:
    """A sampled run by ε and by noise."""
    part = SAMPLED[where]
    make = partial(
        ns.Plan.fit, part, mechanism=GIVEN.get(mechanism, mechanism), delta=DELTA,
        neighbours=neighbours, accountant=accountant,
    )  # fmt: skip
    found = facts(make(noise_multiplier=1.0))
    if isinstance(part, TruncatedPoisson) and neighbours == "zero-out":
        return found
    plan = make(epsilon=2.0)
    return found | {
        "z for 2": plan.noise_multiplier,
        "epsilon for 2": plan.epsilon(),
    }


def narrower() -> Facts:
    """ε of units that take part less often than the plan allows."""
    found = {}
    for name in ("identity", "tree honaker", "blt", "banded"):
        plan = ns.Plan.fit(Epochs(4, 16), mechanism=GIVEN[name], noise_multiplier=3.0, delta=DELTA)
        for most in (1, 2, 3):
            less = MinSeparation(64, 16, most)
            found[f"{name} {most}"] = [
                plan.epsilon_after(t, participation=less) for t in (1, 20, 64)
            ]
    return found


def tree_nodes() -> Facts:
    """Trees as they are accounted in the literature: by the nodes that a unit touches."""
    plan = ns.Plan.fit(
        SinglePass(1600), mechanism="tree", noise_multiplier=1.13, delta=1e-6,
        tree_accounting="nodes",
    )  # fmt: skip
    return facts(plan)


@dataclass(frozen=True, kw_only=True)
class Fading(ToeplitzStrategy):
    """A strategy of one's own, as docs/tutorials/mechanism.md has it."""

    rate: float = 0.9
    name: ClassVar[str] = "golden fading"

    def coefficients(self, n: int) -> Any:
        return self.rate ** np.arange(n)

    def recipe(self, n: int) -> Any:
        return FeedForward((1.0, -self.rate), scale=self.step_scale(n))

    def buffers(self, n: int) -> int:
        return 0

    def words(self) -> str:
        return "a strategy of one's own"


def custom() -> Facts:
    plan = ns.Plan.fit(Epochs(4, 16), mechanism=Fading(), noise_multiplier=3.0, delta=DELTA)
    return facts(plan)


def zero_noise() -> Facts:
    plan = ns.Plan.fit(Epochs(4, 16), mechanism=GIVEN["blt"], noise_multiplier=0.0, delta=DELTA)
    return {"epsilon": plan.epsilon(), "mu": plan.mu()}


def users() -> Facts:
    """The unit is a user: the same numbers, other words."""
    plan = ns.Plan.fit(
        MinSeparation(64, 12, 4), mechanism=GIVEN["blt"], epsilon=1.0, delta=1e-6, unit="user"
    )
    said = plan.statement()
    return facts(plan) | {"headline": said.headline()}


def forked(mechanism: str, where: str, steps: tuple[int, ...]) -> Facts:
    """ε of runs that were forked: as many steps each, every run on from a copy of the last one."""
    part = PARTICIPATIONS[where]
    plan = ns.Plan.fit(part, mechanism=GIVEN[mechanism], noise_multiplier=4.0, delta=DELTA)
    found: Facts = {}
    with TemporaryDirectory() as place:
        for number, count in enumerate(steps):
            old, new = (Path(place) / str(number - i) for i in (1, 0))
            with_run = _sums(plan, new, old if number else None)
            for _ in range(count):
                with_run.add(np.zeros(0), **_ids(with_run, part))
            said = with_run.statement()
            with_run.close()
            found[f"run {number}"] = {
                "epsilon": said.epsilon, "mu": said.mu, "rho": said.rho, "exact": said.exact,
            }  # fmt: skip
    return found


def _sums(plan: ns.Plan, run: Path, old: Path | None) -> ns.PrivateSum:
    from noshuffle.noise import test_source

    source = test_source(seed="fork")
    return ns.PrivateSum(plan, clip=1.0, run=run, fork_of=old, source=source)


def _ids(sums: ns.PrivateSum, part: Participation) -> dict[str, Any]:
    return {"ids": ()} if not part.is_sampled else {}


def gaussian() -> Facts:
    g = accounting.gaussian
    pairs = [(mu, delta) for mu in (0.01, 0.3, 1.0, 5.0) for delta in (1e-9, 1e-5, 0.1)]
    return {
        "epsilon": [g.epsilon(mu=mu, delta=delta) for mu, delta in pairs],
        "delta": [g.delta(mu=mu, epsilon=e) for mu in (0.3, 1.0, 5.0) for e in (0.1, 1.0, 8.0)],
        "mu": [g.mu(epsilon=e, delta=d) for e in (0.1, 1.0, 8.0) for d in (1e-9, 1e-5)],
    }


def calibrated() -> Facts:
    c = accounting.calibrate
    return {
        "exact": c.noise_multiplier(epsilon=1.0, delta=1e-5),
        "rdp": c.noise_multiplier(epsilon=2.0, delta=1e-5, rate=0.01, steps=500, accountant="rdp"),
        "fourier": c.noise_multiplier(
            epsilon=2.0, delta=1e-5, rate=0.01, steps=500, accountant="fourier"
        ),
        "steps": c.steps(epsilon=1.0, delta=1e-5, noise_multiplier=20.0),
    }


def _entries() -> dict[str, Entry]:
    entries: dict[str, Entry] = {}

    def add(name: str, compute: Callable[[], Any], **tolerance: Any) -> None:
        entries[name] = Entry(compute, **tolerance)

    for name in GIVEN:
        for where in allowed(name):
            words: tuple[str, ...] = ("",) if where in SAMPLED else ("zero-out",)
            if where in UNSAMPLED and name in REPLACED:
                words += ("replace-one",)
            for neighbours in words:
                label = ", ".join(filter(None, (f"given {name}", where, neighbours)))
                rtol = SEARCHED if where in SAMPLED else CLOSED
                add(label, partial(given, name, where, neighbours), rtol=rtol)
    for where in SAMPLED:
        is_gridded = where in ("truncated", "bins")  # one accountant, and no replacement
        kinds = ("add-remove", "zero-out") if is_gridded else ALL
        for neighbours in kinds:
            has_renyi = not is_gridded and neighbours == RENYI.get(where, "add-remove")
            for accountant in ("", "rdp") if has_renyi else ("",):
                label = ", ".join(filter(None, (f"sampled {where}", neighbours, accountant)))
                by = partial(sampled, where, neighbours, accountant)
                add(label, by, rtol=1e-4 if where == "bins" else SEARCHED)
    near: dict[str, float] = {"epsilon": CLOSED, "z times error": OPTIMUM}
    for name in FITS:
        add(f"fit {name}", partial(fit, name), rtol=FITTED, by_key=near)
    add("narrower units", narrower)
    add("tree by nodes", tree_nodes)
    add("a strategy of one's own", custom)
    add("no noise", zero_noise)
    add("users", users)
    for mechanism, where, steps in (
        ("identity", "epochs", (5, 64)),
        ("blt", "epochs", (64, 20, 3)),
        ("tree honaker", "single", (30, 64)),
        ("banded", "min separation", (10, 10)),
    ):
        add(f"forked {mechanism}, {where}", partial(forked, mechanism, where, steps))
    add("gaussian", gaussian)
    add("calibrated", calibrated, rtol=SEARCHED)
    return entries


SECTION = _entries()
