"""What a run costs: sensitivity, μ, ε, δ curves and the least noise, one class per accountant.

    participation      accountant   class            how
    without sampling   exact        Gaussian         one Gaussian mechanism with μ = S/z
                       rdp          RenyiGaussian    its Rényi bound
    Poisson, cyclic    fourier      Composed         loss distributions of the draws, z/S a draw
    FixedSize          fourier      Composed         the worst pair (`accounting.fixed_size`)
    TruncatedPoisson   fourier      Composed         with what a full batch costs
    any of them        rdp          Renyi            Rényi bound of a draw (not of cut batches)
    BallsInBins        bins         SecretPositions  overlaps of the shifts (`accounting.bins`)

`PROVED` is that table with the neighbours; what it does not have is refused.

S of the first t steps is that of the first t rows of noise that the whole run uses, so a stopped
run, a fork and one user are accounted by the same function (`strategies.prefix_sensitivity`).

>>> from noshuffle.participation import SinglePass
>>> from noshuffle.strategies import tree
>>> terms = Terms(participation=SinglePass(8), strategy=tree(), noise_multiplier=2.0)
>>> type(terms.guarantee).__name__, terms.neighbours, round(terms.guarantee.epsilon(8), 3)
('Gaussian', 'zero-out', 4.048)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from noshuffle import accounting
from noshuffle.accounting.bisection import bracket
from noshuffle.errors import (
    InvalidInput,
    Unsupported,
    instance_of,
    non_negative,
    one_of,
    open_unit,
    whole,
)
from noshuffle.participation import (
    BallsInBins,
    CyclicPoisson,
    FixedSize,
    Participation,
    Poisson,
    TruncatedPoisson,
)
from noshuffle.strategies import Strategy
from noshuffle.strategies.custom import check_custom
from noshuffle.strategies.positions import overlaps
from noshuffle.strategies.sensitivity import Sensitivity, prefix_sensitivity
from noshuffle.strategies.tree import Tree
from noshuffle.strategies.tree_sensitivity import ACCOUNTINGS as TREE_ACCOUNTINGS

Array = np.ndarray
Curve = Callable[[Array], Array]
ACCOUNTANTS = ("exact", "rdp", "fourier", "bins")
NEIGHBOURS = ("zero-out", "add-remove", "replace-one")


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a guarantee follows from. A `Plan` is these, and the unit that is protected."""

    participation: Participation
    strategy: Strategy
    noise_multiplier: float
    delta: float = 1e-5
    neighbours: str = ""
    accountant: str = ""
    tree_accounting: str = ""

    def __post_init__(self) -> None:
        instance_of(Participation, participation=self.participation)
        instance_of(Strategy, strategy=self.strategy)
        non_negative(noise_multiplier=self.noise_multiplier)
        open_unit(delta=self.delta)
        object.__setattr__(self, "noise_multiplier", float(self.noise_multiplier))
        object.__setattr__(self, "delta", float(self.delta))
        accountant, (_, neighbours) = next(iter(_proved(self.participation).items()))
        object.__setattr__(self, "neighbours", self.neighbours or neighbours[0])
        object.__setattr__(self, "accountant", self.accountant or accountant)
        one_of(NEIGHBOURS, neighbours=self.neighbours)
        one_of(ACCOUNTANTS, accountant=self.accountant)
        if not self.tree_accounting or not isinstance(self.strategy, Tree):
            object.__setattr__(self, "tree_accounting", "tight")
        one_of(TREE_ACCOUNTINGS, tree_accounting=self.tree_accounting)
        check_custom(self.strategy, self.steps)
        self._refuse_what_is_not_proved()
        _ = self.sensitivity  # refuses correlated noise under sampling, and horizons too short

    def _refuse_what_is_not_proved(self) -> None:
        part, proved = self.participation, _proved(self.participation)
        if self.accountant not in proved or self.neighbours not in proved[self.accountant][1]:
            others = "; or ".join(
                f'accountant="{name}" with neighbours {" or ".join(neighbours)}'
                for name, (_, neighbours) in proved.items()
            )
            raise Unsupported(
                f"nothing is proved for {type(part).__name__} by the accountant "
                f"{self.accountant!r} and neighbours {self.neighbours!r}; use {others}"
            )
        if isinstance(part, FixedSize) and part.rate == 1 and self.neighbours == "add-remove":
            raise Unsupported(
                f"batches of all {part.batch} units cannot be drawn without one of them; use a "
                'smaller batch, or neighbours="zero-out"'
            )

    @property
    def steps(self) -> int:
        return self.participation.steps

    @cached_property
    def guarantee(self) -> Guarantee:
        """ε, δ and noise by the accountant of these terms."""
        return _proved(self.participation)[self.accountant][0](self)

    @cached_property
    def sensitivity(self) -> Sensitivity:
        """S in units of the clip norm for zero-out neighbours (per step when sampled)."""
        return prefix_sensitivity(
            self.strategy, self.participation, self.steps, tree_accounting=self.tree_accounting
        )

    @cached_property
    def _prefixes(self) -> dict[tuple[int, Participation], Sensitivity]:
        return {}

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
        if (steps, part) not in self._prefixes:
            why = "upper bound: the whole run's sensitivity"
            found = covered = replace(self.sensitivity, exact=False, notes=why)
            with suppress(Unsupported):  # nothing is proved for this part: the whole run covers it
                found = prefix_sensitivity(
                    self.strategy, part, steps, tree_accounting=self.tree_accounting
                )
            is_less = found.squared <= covered.squared
            self._prefixes[steps, part] = found if is_less else covered
        return self._prefixes[steps, part]

    @property
    def multiplier_of_sensitivity(self) -> float:
        """Two when a unit is replaced by another, one when it is zeroed out, added or removed.

        In batches of a fixed size another one takes the place of a unit that is removed.
        """
        part, neighbours = self.participation, self.neighbours
        is_swap = neighbours == "add-remove" and isinstance(part, FixedSize)
        return 2.0 if is_swap or neighbours == "replace-one" else 1.0

    def positions(self, steps: int) -> accounting.bins.Overlaps:
        """How far secret positions overlap in the first `steps` steps, for the accountant bins.

        Its first class, no secrecy at all, is an order that everybody knows.
        """
        part = self.participation
        instance_of(BallsInBins, participation=part)
        assert isinstance(part, BallsInBins)
        known = (1, 0.0, self.sensitivity_after(steps).squared)
        return accounting.bins.Overlaps((known, *overlaps(self.strategy, part, steps)[1:]))


@dataclass(frozen=True)
class Guarantee:
    """What one accountant says of the first steps of a run. `terms` are those of the whole run."""

    terms: Terms

    def mu(self, steps: int, participation: Participation | None = None) -> float | None:
        """The GDP parameter of the first steps, if they are one Gaussian mechanism."""
        return None

    def epsilon(self, steps: int, participation: Participation | None = None) -> float:
        """ε at the plan's δ. A narrower `participation` counts where nothing is sampled."""
        raise NotImplementedError

    def curve(self, steps: int) -> Curve:
        """Upper bounds of δ at many ε, both directions."""
        raise NotImplementedError

    def least_noise(self, epsilon: float) -> float:
        """The smallest noise multiplier whose ε does not exceed the target."""
        return accounting.calibrate.smallest(
            self._epsilon_with, target=epsilon, start=self._first_noise(epsilon)
        )

    def _first_noise(self, epsilon: float) -> float:
        return 1.0

    def _epsilon_with(self, noise_multiplier: float) -> float:
        """ε of the whole run with other noise."""
        terms = replace(self.terms, noise_multiplier=noise_multiplier)
        return replace(self, terms=terms).epsilon(terms.steps)

    def _kept_below(self, epsilon: float, z: float, *, step: float) -> float:
        """z, or the next more that keeps ε at the target or below.

        Steps double, so that it ends where ε is so large (1e300) that its last digits are lost.
        """
        while self._epsilon_with(z) > epsilon:
            z, step = z * (1 + step), 2 * step
        return z

    def of_group(self, size: int) -> float:
        """ε of any `size` units together, at the plan's δ, for the whole run.

        Units that go one by one leave fewer to draw from, and such that come find more.
        """
        terms, steps = self.terms, self.terms.steps
        curve = replace(self, terms=_for_group(terms, size)).curve(steps)
        low, high, most = 0.0, self.epsilon(steps), self._of_known_group(size)

        def fits(epsilon: float) -> bool:
            delta = min(1.0, float(curve(np.array([epsilon]))[0]))
            grown = accounting.composition.group(epsilon=epsilon, delta=delta, size=size)
            return bool(grown.delta <= terms.delta)

        while not fits(high):
            low, high = high, 1.5 * high + 0.01
            if high > min(1e4, most):
                return most
        return min(most, size * bracket(fits, low, high, tolerance=1e-3)[1])

    def _of_known_group(self, size: int) -> float:
        """ε of a group as if nothing of the draws were secret."""
        return math.inf


class Gaussian(Guarantee):
    """Nothing is sampled: the run is exactly one Gaussian mechanism (Balle & Wang 2018)."""

    def mu(self, steps: int, participation: Participation | None = None) -> float:
        reach = self.terms.sensitivity_after(steps, participation=participation)
        shift = reach.value * self.terms.multiplier_of_sensitivity
        if not shift:
            return 0.0
        return shift / self.terms.noise_multiplier if self.terms.noise_multiplier else math.inf

    def epsilon(self, steps: int, participation: Participation | None = None) -> float:
        mu = self.mu(steps, participation)
        return mu if mu == 0 or math.isinf(mu) else self._epsilon_of(mu)

    def _epsilon_of(self, mu: float) -> float:
        return accounting.gaussian.epsilon(mu=mu, delta=self.terms.delta)

    def curve(self, steps: int) -> Curve:
        mu = self.mu(steps)
        return lambda epsilons: np.array(
            [accounting.gaussian.delta(mu=mu, epsilon=float(e)) for e in epsilons]
        )

    def least_noise(self, epsilon: float) -> float:
        shift = self.terms.sensitivity.value * self.terms.multiplier_of_sensitivity
        z = shift / accounting.gaussian.mu(epsilon=epsilon, delta=self.terms.delta)
        return self._kept_below(epsilon, z, step=1e-13)  # last-digit rounding

    def of_group(self, size: int) -> float:
        """Exact: k units move the sums k times as far."""
        mu = size * self.mu(self.terms.steps)
        return accounting.gaussian.epsilon(mu=mu, delta=self.terms.delta)


class RenyiGaussian(Gaussian):
    """The same by its Rényi bound, to compare with older papers."""

    def _epsilon_of(self, mu: float) -> float:
        return accounting.renyi.epsilon(noise_multiplier=1 / mu, delta=self.terms.delta)

    def least_noise(self, epsilon: float) -> float:
        return Guarantee.least_noise(self, epsilon)


class Composed(Guarantee):
    """Secret draws by the loss distribution of a step, composed over the turns of a unit."""

    def epsilon(self, steps: int, participation: Participation | None = None) -> float:
        if self.terms.noise_multiplier == 0:
            return math.inf
        return _epsilon(sampled_release(self.terms, steps), self.terms.delta)

    def curve(self, steps: int) -> Curve:
        composed, nears = sampled_release(self.terms, steps), (1e-2, self.terms.delta)

        def curve(epsilons: Array) -> Array:
            found = [composed.deltas(epsilons, near=near) for near in nears]
            return np.asarray(np.min(found, axis=0))

        return curve

    def _first_noise(self, epsilon: float) -> float:
        """Where the central limit would have it."""
        part = self.terms.participation
        assert isinstance(part, Poisson | FixedSize | CyclicPoisson | TruncatedPoisson)
        mu = accounting.gaussian.mu(epsilon=epsilon, delta=self.terms.delta)
        turns, rate = part.most_within(part.steps), min(part.rate, 0.999)
        return self.terms.sensitivity.value / math.sqrt(math.log1p((mu / rate) ** 2 / turns))


class Renyi(Composed):
    """Secret draws by Rényi bounds. Curves are those of the loss distributions, which are below."""

    def epsilon(self, steps: int, participation: Participation | None = None) -> float:
        part = self.terms.participation
        if self.terms.noise_multiplier == 0:
            return math.inf
        assert isinstance(part, Poisson | FixedSize | CyclicPoisson)
        sampling, noise = renyi_law(self.terms)
        return accounting.renyi.epsilon(
            noise_multiplier=noise,
            rate=part.rate,
            steps=part.most_within(steps),
            delta=self.terms.delta,
            sampling=sampling,
        )


class SecretPositions(Guarantee):
    """One secret position for every unit."""

    def epsilon(self, steps: int, participation: Participation | None = None) -> float:
        z = self.terms.noise_multiplier
        if z == 0:
            return math.inf
        return self.terms.positions(steps).epsilon(noise_multiplier=z, delta=self.terms.delta)

    def curve(self, steps: int) -> Curve:
        found, z = self.terms.positions(steps), self.terms.noise_multiplier
        return lambda epsilons: found.deltas(epsilons, noise_multiplier=z, near=self.terms.delta)

    def least_noise(self, epsilon: float) -> float:
        found = self.terms.positions(self.terms.steps)
        z = found.noise_multiplier(epsilon=epsilon, delta=self.terms.delta)
        return self._kept_below(epsilon, z, step=1e-5)  # its bisection ends above

    def _of_known_group(self, size: int) -> float:
        mu = self.terms.positions(self.terms.steps).mu(self.terms.noise_multiplier)
        return accounting.gaussian.epsilon(mu=size * mu, delta=self.terms.delta)


#: Accountant → its class, and the neighbours for which it has a proof. The first are the defaults.
_Proofs = dict[str, tuple[type[Guarantee], tuple[str, ...]]]
_COINS = ("add-remove", "zero-out", "replace-one")
_SUBSETS = ("replace-one", "zero-out", "add-remove")
_UNSAMPLED: _Proofs = {"exact": (Gaussian, NEIGHBOURS), "rdp": (RenyiGaussian, NEIGHBOURS)}
_BY_COINS: _Proofs = {"fourier": (Composed, _COINS), "rdp": (Renyi, _COINS[:2])}
PROVED: dict[type[Participation], _Proofs] = {
    Poisson: _BY_COINS,
    CyclicPoisson: _BY_COINS,
    FixedSize: {"fourier": (Composed, _SUBSETS), "rdp": (Renyi, _SUBSETS)},
    TruncatedPoisson: {"fourier": (Composed, _COINS[:2])},
    BallsInBins: {"bins": (SecretPositions, _COINS[:2])},
}


def _proved(part: Participation) -> _Proofs:
    if part.is_sampled and type(part) not in PROVED:
        raise Unsupported(f"no accountant knows the draws of {type(part).__name__}")
    return PROVED.get(type(part), _UNSAMPLED)


@lru_cache(maxsize=64)  # prefixes of a run that have the same turns ask the same
def _epsilon(composed: accounting.fourier.Composed, delta: float) -> float:
    return composed.epsilon(delta=delta)


def sampled_release(terms: Terms, steps: int) -> accounting.fourier.Composed:
    """The first steps of a run with secret draws (not of positions), as a loss distribution."""
    part, z = terms.participation, terms.noise_multiplier / terms.sensitivity.value
    if isinstance(part, TruncatedPoisson):
        is_zeroed = terms.neighbours == "zero-out"
        cut = accounting.fourier.TruncatedRelease(
            z, part.rate, part.cap, part.population, steps, is_zeroed
        )
        return accounting.fourier.compose([cut])
    assert isinstance(part, Poisson | FixedSize | CyclicPoisson)
    return accounting.fourier.compose(
        [(z, part.rate, part.most_within(steps))], direction=direction_of(terms)
    )


def direction_of(terms: Terms) -> str:
    """The direction of the Fourier accountant by participation and neighbours."""
    if isinstance(terms.participation, FixedSize):
        return {"zero-out": "fixed-zero", "add-remove": "fixed-add-remove"}.get(
            terms.neighbours, "fixed"
        )
    return "replace" if terms.neighbours == "replace-one" else "both"


def renyi_law(terms: Terms) -> tuple[str, float]:
    """The sampling whose Rényi bound covers a step, and the noise in what a unit moves.

    In a batch of a fixed size that is two clip norms. Removed or added, the worst pair is that of
    Poisson sampling; a zero is one of the units that may take the place of another.
    """
    z = terms.noise_multiplier / terms.sensitivity.value
    if not isinstance(terms.participation, FixedSize):
        return "poisson", z
    return ("poisson" if terms.neighbours == "add-remove" else "fixed"), z / 2


def _for_group(terms: Terms, size: int) -> Terms:
    """The terms whose curve covers each of `size` units that go or come one after another."""
    part = terms.participation
    if terms.neighbours != "add-remove":
        return terms
    if isinstance(part, FixedSize):
        left = part.population - size + 1
        if part.batch >= left:
            raise Unsupported(
                f"batches of {part.batch} of {part.population} units cannot be drawn where {size} "
                'are removed; use a smaller group, or neighbours="zero-out"'
            )
        return replace(terms, participation=replace(part, population=left))
    if isinstance(part, TruncatedPoisson):
        return replace(terms, participation=replace(part, population=part.population + size - 1))
    return terms
