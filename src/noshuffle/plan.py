"""Plan: every decision that privacy rests on, in one frozen object.

    participation + strategy → sensitivity S → μ = S / z → ε(δ)

S of the first t steps is that of the first t rows of noise that the whole run uses, so a stopped
run, a fork and one user are accounted by the same function (`strategies.prefix_sensitivity`).

z is the noise multiplier: every entry of Z has standard deviation z·ζ, where ζ is the clip norm.
Without sampling the run is exactly one Gaussian mechanism with parameter μ (Balle & Wang 2018);
sampled independent noise has the Fourier and the Rényi accountant. Replacing one unit instead of
zeroing it out doubles S.

>>> from noshuffle.participation import SinglePass
>>> plan = Plan.fit(SinglePass(steps=1600), mechanism="tree", noise_multiplier=1.13, delta=1e-6)
>>> round(plan.statement().epsilon, 2), round(plan.epsilon_after(100), 2)
(16.07, 12.24)
>>> round(replace(plan, tree_accounting="nodes").epsilon(), 2)      # as published
17.67
>>> Plan.from_json(plan.to_json()) == plan
True
"""

from __future__ import annotations

import hashlib
import json
import math
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from noshuffle import participation as participations
from noshuffle import plan_accountant, plan_positions, strategies
from noshuffle.accounting import bins, gaussian, monte_carlo, renyi, tradeoff
from noshuffle.accounting.fresh_positions import FreshPositions
from noshuffle.errors import (
    InvalidInput,
    Unsupported,
    instance_of,
    non_negative,
    one_of,
    open_unit,
    whole,
)
from noshuffle.extension import extended
from noshuffle.participation import (
    AnyOrderEpochs,
    BallsInBins,
    Epochs,
    FixedSize,
    Participation,
)
from noshuffle.plan_strategy import chosen
from noshuffle.sampled_fit import fit_sampled
from noshuffle.statement import PrivacyStatement, sentences, so_far, stopped
from noshuffle.strategies.identity import Identity
from noshuffle.strategies.own import check_own
from noshuffle.strategies.sensitivity import Sensitivity, prefix_sensitivity
from noshuffle.strategies.tree import Tree
from noshuffle.strategies.tree_sensitivity import ACCOUNTINGS as TREE_ACCOUNTINGS
from noshuffle.strategies.workload import Workload, checked_workload

FORMAT = "noshuffle-plan/1"
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
        check_own(self.strategy, self.steps)
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
        "poisson", "cyclic", "separated", "bins" or "any", which takes the least
        noise of all but "separated" (see `sampled_fit`).
        Of a run of unknown length (`SinglePass.open()`) `reach` is the number of steps up to which
        its error is to be small; ε holds for every length.

        Exactly one of `epsilon` and `noise_multiplier` is given. The search for the noise ends on
        the safe side: the plan's statement never exceeds `epsilon`.
        """
        if (epsilon is None) == (noise_multiplier is None):
            raise InvalidInput("give exactly one of epsilon and noise_multiplier")
        instance_of(Participation, participation=participation)
        workload = checked_workload(workload)
        if sampling and (accountant or tree_accounting or options):
            named = {"accountant": accountant, "tree_accounting": tree_accounting, **options}
            raise InvalidInput(
                "sampling= compares kinds by their own accountants and fits; leave out "
                + ", ".join(f"{name}=" for name, value in named.items() if value)
            )
        is_bins = isinstance(participation, BallsInBins) and mechanism == "best"
        if is_bins and epsilon is not None and not (neighbours or accountant or options):
            assert isinstance(participation, BallsInBins)
            sampling, participation = "bins", participation.in_order
        if sampling:
            one_of(("best",), mechanism=mechanism)
            plan: Plan = fit_sampled(
                cls.fit,
                participation,
                sampling=sampling,
                epsilon=epsilon,
                delta=delta,
                neighbours=neighbours,
                unit=unit,
                workload=workload,
                max_buffers=max_buffers,
            )
            return plan
        strategy = chosen(
            mechanism,
            participation,
            workload=workload,
            max_buffers=max_buffers,
            tree_accounting=tree_accounting,
            options=options,
        )
        common: dict[str, Any] = {
            "participation": participation,
            "strategy": strategy,
            "delta": delta,
            "neighbours": neighbours,
            "unit": unit,
            "accountant": accountant,
            "tree_accounting": tree_accounting,
        }
        if noise_multiplier is not None:
            return cls(noise_multiplier=noise_multiplier, **common)
        found: Plan = plan_accountant.calibrated(cls(noise_multiplier=1.0, **common), epsilon)
        return found

    def extended(self, **more: Any) -> Plan:
        """A plan that begins as this one does and goes on: a longer run, or another batch size.

        Arguments (all by name; see `noshuffle.extension`):
            epochs: how many more, for plans of epochs.
            steps: how many more, for all others.
            steps_per_epoch: where the batch size changes.
            max_participations: how many more, under MinSeparation.
            after: how many steps of this plan are kept (all of them, unless given).
            mechanism: the noise of the new steps, fitted to them; "continue" for the old noise.
            epsilon: of all steps together; the noise of the new ones is made for it. Without it
                they have the old noise multiplier (under SinglePass, the old ε).

        Guarantees: the noise of the first `after` steps is that of this plan, row by row; ε of the
        new plan covers all of its steps, for units that take part in old and new ones.
        """
        longer: Plan = extended(self, **more)
        return longer

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
        whole(at_least=0, at_most=self.steps, steps=steps)
        part = self.participation if participation is None else participation
        if part.steps != self.steps:
            raise InvalidInput(f"participation must have {self.steps} steps, got {part.steps}")
        if steps == 0:
            return Sensitivity(0.0, 0.0, exact=True)
        if steps == self.steps and part == self.participation:
            return self.sensitivity
        cache: dict[Any, Sensitivity] = self.__dict__.setdefault("_prefixes", {})
        if (steps, part) not in cache:
            why = "upper bound: the whole run's sensitivity"
            found = covered = replace(self.sensitivity, exact=False, notes=why)
            with suppress(Unsupported):  # nothing is proved for this part: the whole run covers it
                found = prefix_sensitivity(
                    self.strategy, part, steps, tree_accounting=self.tree_accounting
                )
            cache[steps, part] = found if found.squared <= covered.squared else covered
        return cache[steps, part]

    def positions(self, steps: int) -> bins.Overlaps | FreshPositions:
        """How far secret positions overlap in the first `steps` steps, for the accountant bins.

        Its first class, no secrecy at all, is an order that everybody knows.
        """
        return plan_positions.positions(self, steps)

    def monte_carlo(self, *, samples: int = 10**6, seed: int | None = None) -> monte_carlo.Interval:
        """ε of the run with secret positions by Monte Carlo, beside the one that the plan states.

        Guarantees: those of `accounting.monte_carlo`. The plan keeps its sampling-free ε.
        """
        return plan_positions.monte_carlo_epsilon(self, samples=samples, seed=seed)

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
        return self._mu(self.sensitivity_after(self.steps if steps is None else steps))

    def _mu(self, reach: Sensitivity) -> float:
        shift = reach.value * self.multiplier_of_sensitivity
        if not shift:
            return 0.0
        return shift / self.noise_multiplier if self.noise_multiplier else math.inf

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
            return tradeoff.gaussian_tradeoff(alphas, mu=mu)
        if not self.noise_multiplier:
            return tradeoff.gaussian_tradeoff(alphas, mu=math.inf)
        curve, top = plan_accountant.curve_of(self, steps), self.epsilon_after(steps)
        return tradeoff.from_function(alphas, curve, top=max(2 * top, 0.1))

    def epsilon_after(self, steps: int, *, participation: Participation | None = None) -> float:
        """ε spent by the first `steps` steps, for the plan's units or for those of a narrower
        `participation` (see `sensitivity_after`)."""
        whole(at_least=0, at_most=self.steps, steps=steps)
        if steps == 0:
            return 0.0
        if self.participation.is_sampled:
            cache: dict[int, float] = self.__dict__.setdefault("_sampled", {})
            if steps not in cache:
                cache[steps] = plan_accountant.sampled_epsilon(self, steps)
            return cache[steps]
        mu = self._mu(self.sensitivity_after(steps, participation=participation))
        if mu == 0 or math.isinf(mu):
            return mu
        if self.accountant == "rdp":
            return renyi.epsilon(noise_multiplier=1 / mu, delta=self.delta)
        return gaussian.epsilon(mu=mu, delta=self.delta)

    def _decisions(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def statement(
        self, *, steps: int | None = None, notes: tuple[str, ...] = ()
    ) -> PrivacyStatement:
        """The guarantee of the run, or of its first `steps` steps, with all its assumptions."""
        steps = self.steps if steps is None else steps
        mu, twice, reach = self.mu(steps), self.multiplier_of_sensitivity, self.sensitivity
        if not self.participation.is_sampled:
            reach = self.sensitivity_after(steps)
        assumptions = sentences(
            self.guarded,
            unit=self.unit,
            neighbours=self.neighbours,
            noise_multiplier=self.noise_multiplier,
            is_exact=reach.exact,
            accountant=self.accountant,
        )
        epsilon = self.epsilon_after(steps)
        if steps < self.steps:
            notes = (*notes, so_far(steps, self.steps))
            if 0 < epsilon < self.epsilon():
                notes = (*notes, stopped(steps))
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
        )

    def to_dict(self) -> dict[str, Any]:
        record = self._decisions()
        record["participation"] = self.participation.to_dict()
        record["strategy"] = self.strategy.to_dict()
        if not isinstance(self.strategy, Tree) or self.tree_accounting == "nodes":
            del record["tree_accounting"]  # as before there was a choice: same text, same hash
        return {"format": FORMAT, **record}

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces, shortest floats; equal plans, equal text."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote; anything else is refused."""
        try:
            record = json.loads(text)
            if record.pop("format") != FORMAT:
                raise KeyError("format")
            record["participation"] = participations.from_dict(record["participation"])
            record["strategy"] = strategies.from_dict(record["strategy"])
            return cls(**{"tree_accounting": "nodes", **record})
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise InvalidInput(
                f"not a {FORMAT} document ({error}); write it with to_json"
            ) from None

    @property
    def hash(self) -> str:
        """SHA-256 of the canonical JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()
