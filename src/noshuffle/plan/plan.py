"""Plan: every decision that privacy rests on, in one frozen object.

    participation + strategy → sensitivity S → μ = S / z → ε(δ)

z is the noise multiplier: every entry of Z has standard deviation z·ζ, where ζ is the clip norm.
Without sampling the run is exactly one Gaussian mechanism with parameter μ; sampled runs have the
accountants of `plan.guarantee`. Replacing one unit instead of zeroing it out doubles S.

Equal plans have equal canonical JSON, by whose hash they are known.

>>> from noshuffle.participation import SinglePass
>>> plan = Plan.fit(SinglePass(steps=1600), mechanism="tree", noise_multiplier=1.13, delta=1e-6)
>>> round(plan.statement().epsilon, 2), round(plan.epsilon_after(100), 2)
(16.07, 12.24)
>>> round(replace(plan, tree_accounting="nodes").epsilon(), 2)      # as published
17.67
>>> Plan.from_json(plan.to_json()) == plan
True
>>> [said for said in plan.statement(steps=3).assumptions if said.startswith("So far")]
['So far 3 of 1600 planned steps were released.']
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from noshuffle import accounting, participation, strategies
from noshuffle.errors import InvalidInput, instance_of, one_of, whole
from noshuffle.participation import AnyOrderEpochs, Epochs, Participation
from noshuffle.plan.fit import Target, strategy_for
from noshuffle.plan.guarantee import Terms
from noshuffle.plan.statement import PrivacyStatement, sentences, so_far, stopped
from noshuffle.strategies.identity import Identity
from noshuffle.strategies.tree import Tree
from noshuffle.strategies.workload import Workload, checked_workload

FORMAT = "noshuffle-plan/1"
UNITS = ("example", "user")


@dataclass(frozen=True, kw_only=True)
class Plan(Terms):
    """Participation, strategy, noise and accountant. Nothing here depends on data or model.

    Guarantees: `statement()` holds for every adaptively chosen sequence of contributions with norm
    at most the clip norm, in any order that the participation allows. A noise multiplier of zero
    is accepted (for tests of the arithmetic) and states an infinite ε.

    `tree_accounting` is for trees alone: "tight" (the default) charges for the noise that a tree
    releases, "nodes" for every node that a unit touches, which is never less and gives the figures
    of the literature. A JSON text of a tree that does not say which is read as "nodes".
    """

    unit: str = "example"

    def __post_init__(self) -> None:
        one_of(UNITS, unit=self.unit)
        super().__post_init__()

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
        **options: Any,
    ) -> Plan:
        """Choose the strategy (by name, as an object, or "best") and the noise.

        `options` are those of the mechanism's fit (`strategies.fit`). Of a run of unknown length
        (`SinglePass.open()`) `reach` is the number of steps up to which its error is to be small; ε
        holds for every length.

        Exactly one of `epsilon` and `noise_multiplier` is given. The search for the noise ends on
        the safe side: the plan's statement never exceeds `epsilon`.

        Guarantees: the plan has the participation that was given, so nothing is sampled unless it
        says so; a mechanism that is not proved for it is refused and never replaced.
        """
        if (epsilon is None) == (noise_multiplier is None):
            raise InvalidInput("give exactly one of epsilon and noise_multiplier")
        instance_of(Participation, participation=participation)
        workload, target = checked_workload(workload), None
        if epsilon is not None:
            target = Target(epsilon=epsilon, delta=delta, neighbours=neighbours, workload=workload)
        if tree_accounting and mechanism == "tree":
            options["tree_accounting"] = tree_accounting
        strategy = strategy_for(
            mechanism,
            participation,
            workload=workload,
            max_buffers=max_buffers,
            target=target,
            options=options,
        )
        plan = cls(
            participation=participation,
            strategy=strategy,
            noise_multiplier=1.0 if noise_multiplier is None else noise_multiplier,
            delta=delta,
            neighbours=neighbours,
            unit=unit,
            accountant=accountant,
            tree_accounting=tree_accounting,
        )
        if epsilon is None:
            return plan
        return replace(plan, noise_multiplier=plan.guarantee.least_noise(epsilon))

    @cached_property
    def guarded(self) -> Participation:
        """What units are held to: the participation, or a wider one that costs the same."""
        part = self.participation
        is_plain = isinstance(self.strategy, Identity) and not self.strategy.has_gains
        if isinstance(part, Epochs) and is_plain:
            return AnyOrderEpochs(part.epochs, part.steps_per_epoch)
        return part

    def mu(self, steps: int | None = None) -> float | None:
        """The GDP parameter of the first `steps` steps, or of the run; None under sampling."""
        return self.guarantee.mu(self.steps if steps is None else steps)

    def epsilon(self, *, group: int = 1) -> float:
        """ε of the whole run at the plan's δ; of any `group` units together where that is given.

        Guarantees: exact for groups (kμ) where it is exact for one, without sampling; else from
        the curve of one unit, by δ(e^{kε} − 1)/(e^ε − 1) at kε.
        """
        whole(group=group)
        if group == 1 or self.noise_multiplier == 0:
            return self.epsilon_after(self.steps)
        return self.guarantee.of_group(group)

    @cached_property
    def _sampled(self) -> dict[int, float]:
        return {}

    def epsilon_after(self, steps: int, *, participation: Participation | None = None) -> float:
        """ε spent by the first `steps` steps, for the plan's units or for those of a narrower
        `participation` (see `sensitivity_after`), which counts where nothing is sampled."""
        whole(at_least=0, at_most=self.steps, steps=steps)
        if steps == 0:
            return 0.0
        if not self.participation.is_sampled:
            return self.guarantee.epsilon(steps, participation)
        if steps not in self._sampled:
            self._sampled[steps] = self.guarantee.epsilon(steps)
        return self._sampled[steps]

    def tradeoff(self, alphas: Any, *, steps: int | None = None) -> Any:
        """The least type II errors at type I errors `alphas` of whoever tells neighbours apart.

        Guarantees: exact without sampling where the sensitivity is; else a lower bound.
        """
        steps, mu = self.steps if steps is None else steps, self.mu(steps)
        if mu is None and self.noise_multiplier == 0:
            mu = math.inf
        if mu is not None:
            return accounting.tradeoff.gaussian_tradeoff(alphas, mu=mu)
        curve, top = self.guarantee.curve(steps), self.epsilon_after(steps)
        return accounting.tradeoff.from_function(alphas, curve, top=max(2 * top, 0.1))

    def statement(
        self,
        *,
        steps: int | None = None,
        notes: tuple[str, ...] = (),
        participation_checked: bool = True,
    ) -> PrivacyStatement:
        """The guarantee of the run, or of its first `steps` steps, with all its assumptions.

        `notes` are further assumptions. `participation_checked` is False of a run whose units had
        no names, so that nobody could see whether one came more often than the plan allows.
        """
        steps = self.steps if steps is None else steps
        epsilon, mu = self.epsilon_after(steps), self.mu(steps)
        twice = self.multiplier_of_sensitivity
        reach = self.sensitivity if self.participation.is_sampled else self.sensitivity_after(steps)
        if steps < self.steps:
            notes = (*notes, so_far(steps, self.steps))
            if 0 < epsilon < self.epsilon():
                notes = (*notes, stopped(steps))
        assumptions = sentences(self, self.guarded, unit=self.unit, is_exact=reach.exact)
        return PrivacyStatement(
            epsilon=epsilon,
            delta=self.delta,
            mu=mu,
            rho=None if mu is None else mu * mu / 2,
            sensitivity=reach.value * twice,
            squared_sensitivity=reach.squared * twice * twice,
            noise_multiplier=self.noise_multiplier,
            unit=self.unit,
            neighbours=self.neighbours,
            participation=self.guarded.words(),
            mechanism=self.strategy.words(),
            accountant=self.accountant,
            exact=reach.exact and self.accountant == "exact",
            assumptions=assumptions + notes,
            participation_checked=participation_checked,
        )

    def to_dict(self) -> dict[str, Any]:
        """Every decision, as plain values."""
        record = {field.name: getattr(self, field.name) for field in fields(self)}
        record["participation"] = self.participation.to_dict()
        record["strategy"] = self.strategy.to_dict()
        if not isinstance(self.strategy, Tree) or self.tree_accounting == "nodes":
            del record["tree_accounting"]  # no choice, or what a text without it means
        return {"format": FORMAT, **record}

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces, shortest floats; equal plans, equal text."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote; anything else is refused."""
        try:
            record = json.loads(text)
            if not isinstance(record, dict) or record.pop("format", None) != FORMAT:
                raise InvalidInput(f"not a {FORMAT} document; write one with Plan.to_json")
            record["participation"] = participation.from_dict(record["participation"])
            record["strategy"] = strategies.from_dict(record["strategy"])
            return cls(**{"tree_accounting": "nodes", **record})
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise InvalidInput(
                f"not a {FORMAT} document ({error}); write one with Plan.to_json"
            ) from None

    @property
    def hash(self) -> str:
        """SHA-256 of the canonical JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()
