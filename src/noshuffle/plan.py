"""Plan: every decision that privacy rests on, in one frozen object.

    participation + strategy → sensitivity S → μ = S / z → ε(δ)

z is the noise multiplier: every entry of Z has standard deviation z·ζ, where ζ is the clip norm.
Without sampling the whole run is exactly one Gaussian mechanism with parameter μ, so ε comes from
the exact curve (Balle & Wang 2018). With Poisson or fixed-size sampling and independent noise it
comes from the Fourier accountant or from Rényi divergences. Replacing one unit instead of zeroing
it out doubles S.

>>> from noshuffle.participation import SinglePass
>>> plan = Plan.fit(SinglePass(steps=1600), mechanism="tree", noise_multiplier=1.13, delta=1e-6)
>>> round(plan.statement().epsilon, 2)
17.67
>>> Plan.from_json(plan.to_json()) == plan
True
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from noshuffle import participation as participations
from noshuffle import strategies
from noshuffle.accounting import calibrate, fourier, gaussian, renyi
from noshuffle.errors import (
    InvalidInput,
    Unsupported,
    instance_of,
    non_negative,
    one_of,
    open_unit,
    positive,
    whole,
)
from noshuffle.guarantee import sentences
from noshuffle.participation import FixedSize, Participation, Poisson, prefix_of
from noshuffle.statement import PrivacyStatement
from noshuffle.strategies.fit import best as best_fit
from noshuffle.strategies.fit import fit as fit_strategy
from noshuffle.strategies.sensitivity import Sensitivity
from noshuffle.strategies.workload import Workload, checked_workload

FORMAT = "noshuffle-plan/1"
NEIGHBOURS = ("zero-out", "add-remove", "replace-one")
ACCOUNTANTS = ("exact", "rdp", "fourier")
UNITS = ("example", "user")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Participation, strategy, noise and accountant. Nothing here depends on data or model.

    Guarantees: `statement()` holds for every adaptively chosen sequence of contributions with norm
    at most the clip norm, in any order that the participation allows. A noise multiplier of zero
    is accepted (for tests of the arithmetic) and states an infinite ε.
    """

    participation: Participation
    strategy: strategies.Strategy
    noise_multiplier: float
    delta: float = 1e-5
    neighbours: str = ""
    unit: str = "example"
    accountant: str = ""

    def __post_init__(self) -> None:
        instance_of(Participation, participation=self.participation)
        instance_of(strategies.Strategy, strategy=self.strategy)
        non_negative(noise_multiplier=self.noise_multiplier)
        open_unit(delta=self.delta)
        object.__setattr__(self, "noise_multiplier", float(self.noise_multiplier))
        object.__setattr__(self, "delta", float(self.delta))
        sampled = self.participation.is_sampled
        if not self.neighbours:
            default = "zero-out"
            if isinstance(self.participation, Poisson):
                default = "add-remove"
            elif isinstance(self.participation, FixedSize):
                default = "replace-one"
            object.__setattr__(self, "neighbours", default)
        if not self.accountant:
            name = "exact"
            if sampled:
                name = "fourier" if isinstance(self.participation, Poisson) else "rdp"
            object.__setattr__(self, "accountant", name)
        one_of(NEIGHBOURS, neighbours=self.neighbours)
        one_of(ACCOUNTANTS, accountant=self.accountant)
        one_of(UNITS, unit=self.unit)
        self._refuse_what_is_not_proved()

    def _refuse_what_is_not_proved(self) -> None:
        if isinstance(self.participation, FixedSize):
            if self.neighbours == "add-remove":
                raise Unsupported(
                    "batches of a fixed size are accounted for replace-one (or zero-out) "
                    "neighbours, not add-remove; use --neighbours replace-one or Poisson sampling"
                )
            if self.accountant != "rdp":
                raise Unsupported(
                    "batches of a fixed size have only the rdp accountant, got "
                    f"{self.accountant!r}; use --accountant rdp"
                )
        if isinstance(self.participation, Poisson) and self.accountant == "exact":
            raise Unsupported(
                "Poisson sampling has no closed form; use --accountant fourier (tight) or rdp"
            )
        if (
            isinstance(self.participation, Poisson)
            and self.accountant == "rdp"
            and self.neighbours == "replace-one"
        ):
            raise Unsupported(
                "replace-one neighbours under Poisson sampling have only the fourier accountant; "
                "use --accountant fourier"
            )
        if not self.participation.is_sampled and self.accountant == "fourier":
            raise Unsupported(
                "without sampling the run is one Gaussian mechanism and the exact curve is tight; "
                "use --accountant exact (or rdp to compare with older papers)"
            )
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
        workload: Workload | None = None,
        max_buffers: int | None = None,
        **options: Any,
    ) -> Plan:
        """Choose the strategy (by name, as an object, or "best") and the noise.

        Exactly one of `epsilon` and `noise_multiplier` is given. The search for the noise ends on
        the safe side: the plan's statement never exceeds `epsilon`.
        """
        if (epsilon is None) == (noise_multiplier is None):
            raise InvalidInput("give exactly one of epsilon and noise_multiplier")
        instance_of(Participation, participation=participation)
        workload = checked_workload(workload)
        if isinstance(mechanism, strategies.Strategy):
            strategy = mechanism
        elif participation.is_sampled and mechanism in ("best", "identity"):
            strategy = strategies.identity()
        elif mechanism == "best":
            strategy = best_fit(participation, max_buffers=max_buffers, workload=workload).strategy
        else:
            strategy = fit_strategy(mechanism, participation, workload=workload, **options).strategy
        common: dict[str, Any] = {
            "participation": participation,
            "strategy": strategy,
            "delta": delta,
            "neighbours": neighbours,
            "unit": unit,
            "accountant": accountant,
        }
        if noise_multiplier is not None:
            return cls(noise_multiplier=noise_multiplier, **common)
        return _calibrated(cls(noise_multiplier=1.0, **common), epsilon)

    @property
    def steps(self) -> int:
        return self.participation.steps

    @cached_property
    def sensitivity(self) -> Sensitivity:
        """S in units of the clip norm for zero-out neighbours (per step when sampled)."""
        return strategies.sensitivity(self.strategy, self.participation)

    @property
    def multiplier_of_sensitivity(self) -> float:
        """Two when a unit is replaced by another, one when it is zeroed out, added or removed."""
        return 2.0 if self.neighbours == "replace-one" else 1.0

    def mu(self) -> float | None:
        """The GDP parameter of the whole run; None under sampling, where there is none."""
        if self.participation.is_sampled:
            return None
        shift = self.sensitivity.value * self.multiplier_of_sensitivity
        return shift / self.noise_multiplier if self.noise_multiplier else math.inf

    def epsilon(self) -> float:
        """ε of the whole run at the plan's δ."""
        return _epsilon(self)

    def epsilon_after(self, steps: int) -> float:
        """ε spent by the first `steps` steps (rounded up to whole epochs; never too small)."""
        whole(at_least=0, at_most=self.steps, steps=steps)
        if steps == 0:
            return 0.0
        if steps == self.steps:
            return self.epsilon()
        return self._epsilon_of_prefix(prefix_of(self.participation, steps))

    def _epsilon_of_prefix(self, prefix: Participation) -> float:
        cache: dict[Participation, float] = self.__dict__.setdefault("_prefixes", {})
        if prefix not in cache:
            try:
                part = Plan(**{**self._decisions(), "participation": prefix})
                cache[prefix] = min(part.epsilon(), self.epsilon())
            except Unsupported:  # a prefix without a closed form is covered by the whole run
                cache[prefix] = self.epsilon()
        return cache[prefix]

    def _decisions(self) -> dict[str, Any]:
        return {
            "participation": self.participation,
            "strategy": self.strategy,
            "noise_multiplier": self.noise_multiplier,
            "delta": self.delta,
            "neighbours": self.neighbours,
            "unit": self.unit,
            "accountant": self.accountant,
        }

    def statement(self, *, notes: tuple[str, ...] = ()) -> PrivacyStatement:
        """The guarantee with all its assumptions."""
        mu = self.mu()
        twice = self.multiplier_of_sensitivity
        assumptions = sentences(
            self.participation,
            unit=self.unit,
            neighbours=self.neighbours,
            noise_multiplier=self.noise_multiplier,
            is_exact=self.sensitivity.exact,
            accountant=self.accountant,
        )
        return PrivacyStatement(
            epsilon=self.epsilon(),
            delta=self.delta,
            mu=mu,
            rho=None if mu is None else mu * mu / 2,
            sensitivity=self.sensitivity.value * twice,
            squared_sensitivity=self.sensitivity.squared * twice * twice,
            noise_multiplier=self.noise_multiplier,
            unit=self.unit,
            neighbours=self.neighbours,
            participation=self.participation.words(),
            mechanism=self.strategy.words(),
            accountant=self.accountant,
            exact=self.sensitivity.exact and self.accountant == "exact",
            assumptions=assumptions + notes,
        )

    def to_dict(self) -> dict[str, Any]:
        record = self._decisions()
        record["participation"] = self.participation.to_dict()
        record["strategy"] = self.strategy.to_dict()
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
            return cls(**record)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise InvalidInput(
                f"not a {FORMAT} document ({error}); write it with to_json"
            ) from None

    @property
    def hash(self) -> str:
        """SHA-256 of the canonical JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def _epsilon(plan: Plan) -> float:
    z, part = plan.noise_multiplier, plan.participation
    if z == 0:
        return math.inf
    if isinstance(part, Poisson):
        if plan.accountant == "rdp":
            return renyi.epsilon(
                noise_multiplier=z, rate=part.rate, steps=part.steps, delta=plan.delta
            )
        direction = "replace" if plan.neighbours == "replace-one" else "both"
        return fourier.epsilon(
            noise_multiplier=z,
            rate=part.rate,
            steps=part.steps,
            delta=plan.delta,
            direction=direction,
        )
    if isinstance(part, FixedSize):
        return renyi.epsilon(
            noise_multiplier=z / 2,  # one swap moves the clipped sum by at most 2ζ
            rate=part.rate,
            steps=part.steps,
            delta=plan.delta,
            sampling="fixed",
        )
    mu = plan.mu()
    assert mu is not None
    if plan.accountant == "rdp":
        return renyi.epsilon(noise_multiplier=1 / mu, delta=plan.delta)
    return gaussian.epsilon(mu=mu, delta=plan.delta)


def _calibrated(plan: Plan, epsilon: float | None) -> Plan:
    """The plan with the smallest noise whose ε does not exceed the target."""
    positive(epsilon=epsilon)
    assert epsilon is not None
    if plan.accountant == "exact":
        shift = plan.sensitivity.value * plan.multiplier_of_sensitivity
        z = shift / gaussian.mu(epsilon=epsilon, delta=plan.delta)
        while replace(plan, noise_multiplier=z).epsilon() > epsilon:  # last-digit rounding
            z = z * (1 + 1e-13)
        return replace(plan, noise_multiplier=z)
    z = calibrate.smallest(
        lambda value: replace(plan, noise_multiplier=value).epsilon(), target=epsilon
    )
    return replace(plan, noise_multiplier=z)
