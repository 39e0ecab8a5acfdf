"""Plan: every decision that privacy rests on, in one frozen object.

    participation + strategy → sensitivity S → μ = S / z → ε(δ)

z is the noise multiplier: every entry of Z has standard deviation z·ζ, where ζ is the clip norm.
Without sampling the run is exactly one Gaussian mechanism with parameter μ (Balle & Wang 2018);
sampled independent noise has the Fourier and the Rényi accountant. Replacing one unit instead of
zeroing it out doubles S.

>>> from noshuffle.participation import SinglePass
>>> plan = Plan.fit(SinglePass(steps=1600), mechanism="tree", noise_multiplier=1.13, delta=1e-6)
>>> round(plan.statement().epsilon, 2), round(plan.epsilon_after(100), 2)
(16.07, 12.24)
>>> from dataclasses import replace
>>> round(replace(plan, tree_accounting="nodes").epsilon(), 2)      # as published
17.67
>>> Plan.from_json(plan.to_json()) == plan
True
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from noshuffle import (
    accounting,
    plan_accountant,
    plan_prefix,
    plan_record,
    strategies,
)
from noshuffle.errors import instance_of, non_negative, one_of, open_unit
from noshuffle.participation import AnyOrderEpochs, BallsInBins, Epochs, FixedSize, Participation
from noshuffle.plan_fit import fitted
from noshuffle.plan_statement import statement_of
from noshuffle.statement import PrivacyStatement
from noshuffle.strategies.custom import check_custom
from noshuffle.strategies.identity import Identity
from noshuffle.strategies.positions import overlaps
from noshuffle.strategies.sensitivity import Sensitivity, prefix_sensitivity
from noshuffle.strategies.tree import Tree
from noshuffle.strategies.tree_sensitivity import ACCOUNTINGS as TREE_ACCOUNTINGS
from noshuffle.strategies.workload import Workload

NEIGHBOURS = ("zero-out", "add-remove", "replace-one")
UNITS = ("example", "user")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Participation, strategy, noise and accountant. Nothing here depends on data or model.

    Guarantees: `statement()` holds for every adaptively chosen sequence of contributions with norm
    at most the clip norm, in any order that the participation allows. A noise multiplier of zero
    is accepted (for tests of the arithmetic) and states an infinite ε.

    `tree_accounting` is for trees alone: "tight" (the default) charges for the noise that a tree
    releases, "nodes" for every node that a unit touches, which is never less and gives the figures
    of the literature. Plans that were written before there was a choice are read as "nodes".
    """

    participation: Participation
    strategy: strategies.Strategy
    noise_multiplier: float
    delta: float = 1e-5
    neighbours: str = ""
    unit: str = "example"
    accountant: str = ""
    tree_accounting: str = ""

    def __post_init__(self) -> None:
        instance_of(Participation, participation=self.participation)
        instance_of(strategies.Strategy, strategy=self.strategy)
        non_negative(noise_multiplier=self.noise_multiplier)
        open_unit(delta=self.delta)
        object.__setattr__(self, "noise_multiplier", float(self.noise_multiplier))
        object.__setattr__(self, "delta", float(self.delta))
        neighbours, accountant = plan_accountant.defaults(self.participation)
        object.__setattr__(self, "neighbours", self.neighbours or neighbours)
        object.__setattr__(self, "accountant", self.accountant or accountant)
        one_of(NEIGHBOURS, neighbours=self.neighbours)
        one_of(plan_accountant.ACCOUNTANTS, accountant=self.accountant)
        one_of(UNITS, unit=self.unit)
        if not self.tree_accounting or not isinstance(self.strategy, Tree):
            object.__setattr__(self, "tree_accounting", "tight")
        one_of(TREE_ACCOUNTINGS, tree_accounting=self.tree_accounting)
        check_custom(self.strategy, self.steps)
        plan_accountant.refuse_what_is_not_proved(self)
        _ = self.sensitivity  # refuses correlated noise under sampling, and horizons too short

    @classmethod
    def fit(
        cls,
        participation: Participation,
        *,
        mechanism: str | strategies.Strategy = "blt",
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
        delta: float = 1e-5,
        neighbours: str = "",
        unit: str = "example",
        accountant: str = "",
        tree_accounting: str = "",
        workload: Workload | None = None,
        max_buffers: int | None = None,
        sampling: str = "",
        **options: Any,
    ) -> Plan:
        """Choose the strategy (by name, as an object, or "best") and the noise.

        With mechanism "best", `sampling` says what may be drawn in secret for `Epochs`: "none",
        "poisson", "cyclic", "bins" or "any", which takes the least noise of all (see
        `sampled_fit`).
        Of a run of unknown length (`SinglePass.open()`) `reach` is the number of steps up to which
        its error is to be small; ε holds for every length.

        Exactly one of `epsilon` and `noise_multiplier` is given. The search for the noise ends on
        the safe side: the plan's statement never exceeds `epsilon`.
        """
        plan: Plan = fitted(
            cls,
            participation,
            mechanism=mechanism,
            epsilon=epsilon,
            noise_multiplier=noise_multiplier,
            delta=delta,
            neighbours=neighbours,
            unit=unit,
            accountant=accountant,
            tree_accounting=tree_accounting,
            workload=workload,
            max_buffers=max_buffers,
            sampling=sampling,
            options=options,
        )
        return plan

    @property
    def steps(self) -> int:
        return self.participation.steps

    @cached_property
    def guarded(self) -> Participation:
        """What units are held to: the participation, or a wider one that costs the same."""
        part = self.participation
        is_plain = isinstance(self.strategy, Identity) and not self.strategy.has_gains
        if isinstance(part, Epochs) and is_plain:
            return AnyOrderEpochs(part.epochs, part.steps_per_epoch)
        return part

    @cached_property
    def sensitivity(self) -> Sensitivity:
        """S in units of the clip norm for zero-out neighbours (per step when sampled)."""
        return prefix_sensitivity(
            self.strategy, self.participation, self.steps, tree_accounting=self.tree_accounting
        )

    def sensitivity_after(
        self, steps: int, *, participation: Participation | None = None
    ) -> Sensitivity:
        """S of the first `steps` steps; of fewer patterns where a `participation` is given.

        Guarantees: never below the truth for any pattern that both the participation and the plan
        allow, and never above S of the whole run, which covers its beginning. The participation
        has the plan's number of steps.
        """
        return plan_prefix.sensitivity_after(self, steps, participation)

    def positions(self, steps: int) -> accounting.bins.Overlaps:
        """How far secret positions overlap in the first `steps` steps, for the accountant bins.

        Its first class, no secrecy at all, is an order that everybody knows.
        """
        part = self.participation
        instance_of(BallsInBins, participation=part)
        assert isinstance(part, BallsInBins)
        known = (1, 0.0, self.sensitivity_after(steps).squared)
        return accounting.bins.Overlaps((known, *overlaps(self.strategy, part, steps)[1:]))

    @property
    def multiplier_of_sensitivity(self) -> float:
        """Two when a unit is replaced by another, one when it is zeroed out, added or removed.

        In batches of a fixed size another one takes the place of a unit that is removed.
        """
        part, neighbours = self.participation, self.neighbours
        is_swap = neighbours == "add-remove" and isinstance(part, FixedSize)
        return 2.0 if is_swap or neighbours == "replace-one" else 1.0

    def mu(self, steps: int | None = None) -> float | None:
        """The GDP parameter of the first `steps` steps, or of the run; None under sampling."""
        if self.participation.is_sampled:
            return None
        reach = self.sensitivity_after(self.steps if steps is None else steps)
        return plan_prefix.mu_of(self, reach)

    def epsilon(self, *, group: int = 1) -> float:
        """ε of the whole run at the plan's δ; of any `group` units together where that is given.

        Guarantees: exact for groups (kμ) where it is exact for one, without sampling; else from
        the curve of one unit, by δ(e^{kε} − 1)/(e^ε − 1) at kε.
        """
        if group != 1:
            return plan_accountant.group_epsilon(self, group)
        return self.epsilon_after(self.steps)

    def tradeoff(self, alphas: Any, *, steps: int | None = None) -> Any:
        """The least type II errors at type I errors `alphas` of whoever tells neighbours apart.

        Guarantees: exact without sampling where the sensitivity is; else a lower bound.
        """
        steps, mu = self.steps if steps is None else steps, self.mu(steps)
        if mu is not None:
            return accounting.tradeoff.gaussian_tradeoff(alphas, mu=mu)
        if not self.noise_multiplier:
            return accounting.tradeoff.gaussian_tradeoff(alphas, mu=math.inf)
        curve, top = plan_accountant.curve_of(self, steps), self.epsilon_after(steps)
        return accounting.tradeoff.from_function(alphas, curve, top=max(2 * top, 0.1))

    def epsilon_after(self, steps: int, *, participation: Participation | None = None) -> float:
        """ε spent by the first `steps` steps, for the plan's units or for those of a narrower
        `participation` (see `sensitivity_after`)."""
        return plan_prefix.epsilon_after(self, steps, participation)

    def statement(
        self, *, steps: int | None = None, notes: tuple[str, ...] = ()
    ) -> PrivacyStatement:
        """The guarantee of the run, or of its first `steps` steps, with all its assumptions."""
        return statement_of(self, self.steps if steps is None else steps, notes)

    def to_dict(self) -> dict[str, Any]:
        return plan_record.to_dict(self)

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces, shortest floats; equal plans, equal text."""
        return plan_record.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote; anything else is refused."""
        plan: Plan = plan_record.from_json(cls, text)
        return plan

    @property
    def hash(self) -> str:
        """SHA-256 of the canonical JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()
