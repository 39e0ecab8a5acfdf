"""Which accountant answers for a plan: what is proved, ε of a sampled run, noise for a target ε.

    unsampled          exact      one Gaussian mechanism with μ = S/z
    Poisson, cyclic    fourier    loss distributions of the draws, z/S a draw; or rdp
    FixedSize          fourier    the worst pair (`accounting.fixed_size`); or rdp
    TruncatedPoisson   fourier    with what a full batch costs (`accounting.atoms`)
    BallsInBins        bins       overlaps of the shifts (`accounting.bins`)

Functions take the `Plan` that asks (`noshuffle.plan`). No state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from noshuffle import accounting
from noshuffle.accounting.bisection import bracket
from noshuffle.errors import Unsupported, positive, whole
from noshuffle.participation import (
    BallsInBins,
    CyclicPoisson,
    FixedSize,
    Participation,
    Poisson,
    TruncatedPoisson,
)

if TYPE_CHECKING:
    from noshuffle.accounting.fourier import Composed

Array = np.ndarray
ACCOUNTANTS = ("exact", "rdp", "fourier", "bins")
#: Neighbours and accountant of sampled participations, where nobody said.
_DEFAULTS: dict[type[Participation], tuple[str, str]] = {
    Poisson: ("add-remove", "fourier"),
    FixedSize: ("replace-one", "fourier"),
    CyclicPoisson: ("add-remove", "fourier"),
    BallsInBins: ("add-remove", "bins"),
    TruncatedPoisson: ("add-remove", "fourier"),
}


def defaults(participation: Participation) -> tuple[str, str]:
    """Neighbours and accountant where nobody said."""
    return _DEFAULTS.get(type(participation), ("zero-out", "exact"))


def refuse_what_is_not_proved(plan: Any) -> None:
    """Refuse pairs of participation, neighbours and accountant without a proof."""
    is_whole = isinstance(plan.participation, FixedSize) and plan.participation.rate == 1
    if is_whole and plan.neighbours == "add-remove":
        raise Unsupported(
            f"batches of all {plan.participation.batch} units cannot be drawn without one of them; "
            'use a smaller batch, or neighbours="zero-out"'
        )
    drawn = plan.participation
    is_bins = isinstance(drawn, BallsInBins)
    if is_bins != (plan.accountant == "bins") or (is_bins and plan.neighbours == "replace-one"):
        raise Unsupported(
            "the accountant bins is that of secret positions (BallsInBins), their only one, for "
            f"add-remove or zero-out; got {plan.accountant!r}, {plan.neighbours!r}"
        )
    is_cut = isinstance(plan.participation, TruncatedPoisson)
    if is_cut and (plan.accountant != "fourier" or plan.neighbours == "replace-one"):
        raise Unsupported(
            "batches that are cut (TruncatedPoisson) have the fourier accountant alone, for "
            f"add-remove or zero-out; got {plan.accountant!r}, {plan.neighbours!r}"
        )
    if plan.participation.is_sampled and plan.accountant == "exact":
        raise Unsupported(
            'secret sampling has no closed form; use accountant="fourier" (tight) or "rdp"'
        )
    is_replaced = isinstance(drawn, Poisson | CyclicPoisson) and plan.neighbours == "replace-one"
    if plan.accountant == "rdp" and is_replaced:
        raise Unsupported(
            "replace-one neighbours under Poisson sampling have only the fourier accountant; "
            'use accountant="fourier"'
        )
    if not plan.participation.is_sampled and plan.accountant == "fourier":
        raise Unsupported(
            "without sampling the run is one Gaussian mechanism and the exact curve is tight; "
            'use accountant="exact" (or "rdp" to compare with older papers)'
        )


def sampled_epsilon(plan: Any, steps: int) -> float:
    """ε of so many steps with a secret draw each, as seen by a unit that joins `most` of them."""
    part = plan.participation
    if plan.noise_multiplier == 0:
        return math.inf
    if isinstance(part, BallsInBins):
        epsilon: float = plan.positions(steps).epsilon(
            noise_multiplier=plan.noise_multiplier, delta=plan.delta
        )
        return epsilon
    if plan.accountant == "rdp":
        assert isinstance(part, Poisson | FixedSize | CyclicPoisson)
        sampling, noise = renyi_law(plan)
        turns = part.most_within(steps)
        return accounting.renyi.epsilon(
            noise_multiplier=noise,
            rate=part.rate,
            steps=turns,
            delta=plan.delta,
            sampling=sampling,
        )
    return _epsilon(sampled_release(plan, steps), plan.delta)


@lru_cache(maxsize=64)  # prefixes of a run that have the same turns ask the same
def _epsilon(composed: Composed, delta: float) -> float:
    return composed.epsilon(delta=delta)


def curve_of(plan: Any, steps: int) -> Callable[[Array], Array]:
    """Upper bounds of δ at many ε, both directions, whatever accountant states the plan's ε."""
    part, z = plan.participation, plan.noise_multiplier
    if not part.is_sampled:
        mu = plan.mu(steps)
        return lambda epsilons: np.array(
            [accounting.gaussian.delta(mu=mu, epsilon=float(e)) for e in epsilons]
        )
    if isinstance(part, BallsInBins):
        positions = plan.positions(steps)
        return lambda epsilons: positions.deltas(epsilons, noise_multiplier=z, near=plan.delta)
    composed = sampled_release(plan, steps)

    def curve(epsilons: Array) -> Array:
        nears = (1e-2, plan.delta)
        return np.asarray(np.min([composed.deltas(epsilons, near=near) for near in nears], axis=0))

    return curve


def renyi_law(plan: Any) -> tuple[str, float]:
    """The sampling whose Rényi bound covers a step, and the noise in what a unit moves.

    In a batch of a fixed size that is two clip norms. Removed or added, the worst pair is that of
    Poisson sampling; a zero is one of the units that may take the place of another.
    """
    z = plan.noise_multiplier / plan.sensitivity.value
    if not isinstance(plan.participation, FixedSize):
        return "poisson", z
    return ("poisson" if plan.neighbours == "add-remove" else "fixed"), z / 2


def direction_of(plan: Any) -> str:
    """The direction of the Fourier accountant by participation and neighbours."""
    if isinstance(plan.participation, FixedSize):
        return {"zero-out": "fixed-zero", "add-remove": "fixed-add-remove"}.get(
            plan.neighbours, "fixed"
        )
    return "replace" if plan.neighbours == "replace-one" else "both"


def sampled_release(plan: Any, steps: int) -> Composed:
    """The first steps of a plan with secret draws (not of positions), as a loss distribution."""
    part, z = plan.participation, plan.noise_multiplier / plan.sensitivity.value
    if isinstance(part, TruncatedPoisson):
        is_zeroed = plan.neighbours == "zero-out"
        cut = accounting.fourier.TruncatedRelease(
            z, part.rate, part.cap, part.population, steps, is_zeroed
        )
        return accounting.fourier.compose([cut])
    assert isinstance(part, Poisson | FixedSize | CyclicPoisson)
    return accounting.fourier.compose(
        [(z, part.rate, part.most_within(steps))], direction=direction_of(plan)
    )


def group_epsilon(plan: Any, size: int) -> float:
    """ε of any `size` units together, at the plan's δ: kμ, or the group's curve under sampling.

    Units that go one by one leave fewer to draw from, and such that come find more.
    """
    whole(group=size)
    if size == 1 or plan.noise_multiplier == 0:
        return float(plan.epsilon())
    if not plan.participation.is_sampled:
        return accounting.gaussian.epsilon(mu=size * plan.mu(), delta=plan.delta)
    curve, low, high = curve_of(_for_group(plan, size), plan.steps), 0.0, float(plan.epsilon())
    most = math.inf
    if isinstance(plan.participation, BallsInBins):  # as if they were known
        mu = plan.positions(plan.steps).mu(plan.noise_multiplier)
        most = accounting.gaussian.epsilon(mu=size * mu, delta=plan.delta)

    def fits(epsilon: float) -> bool:
        delta = min(1.0, float(curve(np.array([epsilon]))[0]))
        grown = accounting.composition.group(epsilon=epsilon, delta=delta, size=size)
        return bool(grown.delta <= plan.delta)

    while not fits(high):
        low, high = high, 1.5 * high + 0.01
        if high > min(1e4, most):
            return most
    return min(most, size * bracket(fits, low, high, tolerance=1e-3)[1])


def _for_group(plan: Any, size: int) -> Any:
    """The plan whose curve covers every one of `size` units that go or come one after another."""
    part = plan.participation
    if plan.neighbours != "add-remove":
        return plan
    if isinstance(part, FixedSize):
        left = part.population - size + 1
        if part.batch >= left:
            raise Unsupported(
                f"batches of {part.batch} of {part.population} units cannot be drawn where {size} "
                'are removed; use a smaller group, or neighbours="zero-out"'
            )
        return replace(plan, participation=replace(part, population=left))
    if isinstance(part, TruncatedPoisson):
        return replace(plan, participation=replace(part, population=part.population + size - 1))
    return plan


def _kept_below(plan: Any, epsilon: float, z: float, *, step: float) -> Any:
    """The plan with noise z, or with the next more that keeps its ε at the target or below.

    Steps double, so that it ends where ε is so large (1e300) that its last digits are lost.
    """
    while replace(plan, noise_multiplier=z).epsilon() > epsilon:
        z, step = z * (1 + step), 2 * step
    return replace(plan, noise_multiplier=z)


def calibrated(plan: Any, epsilon: float | None) -> Any:
    """The plan with the smallest noise whose ε does not exceed the target."""
    positive(epsilon=epsilon)
    assert epsilon is not None
    if plan.accountant == "exact":
        shift = plan.sensitivity.value * plan.multiplier_of_sensitivity
        z = shift / accounting.gaussian.mu(epsilon=epsilon, delta=plan.delta)
        return _kept_below(plan, epsilon, z, step=1e-13)  # last-digit rounding
    part, start = plan.participation, 1.0
    if isinstance(part, BallsInBins):
        z = plan.positions(part.steps).noise_multiplier(epsilon=epsilon, delta=plan.delta)
        return _kept_below(plan, epsilon, z, step=1e-5)  # its bisection ends above
    if isinstance(part, Poisson | FixedSize | CyclicPoisson | TruncatedPoisson):
        mu = accounting.gaussian.mu(epsilon=epsilon, delta=plan.delta)  # the central limit is near
        turns, rate = part.most_within(part.steps), min(part.rate, 0.999)
        start = plan.sensitivity.value / math.sqrt(math.log1p((mu / rate) ** 2 / turns))
    z = accounting.calibrate.smallest(
        lambda z: replace(plan, noise_multiplier=z).epsilon(), target=epsilon, start=start
    )
    return replace(plan, noise_multiplier=z)
