"""A mechanism by name as a strategy: what it means for who may take part when.

    an object          itself
    BallsInBins        fitted to the order that its positions hide; "best" is what needs the least
                       noise among the best without sampling, cyclic bands and bands of its own
    CyclicPoisson      "best" is banded: as many bands as groups
    other sampling     "best" is independent noise
    unknown length     a BLT that is good up to `reach` steps
    else               fitted to the participation (`strategies.fit`)

A name that does not suit the draws is refused (`strategies.mechanisms`), never replaced. No state.

>>> from noshuffle.participation import Poisson
>>> strategy_for("best", Poisson(steps=10, rate=0.1), workload=Workload()).name
'identity'
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from noshuffle.errors import InvalidInput, Unsupported, one_of, positive, whole
from noshuffle.participation import BallsInBins, CyclicPoisson, Epochs, Participation
from noshuffle.participation.patterns import OPEN
from noshuffle.plan.fit_bins import fit_bins
from noshuffle.plan.guarantee import Terms
from noshuffle.strategies import Strategy, error, identity
from noshuffle.strategies.fit import best
from noshuffle.strategies.fit import fit as fit_strategy
from noshuffle.strategies.fit_blt import fit_blt
from noshuffle.strategies.workload import Workload

#: Steps that the noise of a run of unknown length is made for, unless `reach` says otherwise.
REACH = 10**6


@dataclass(frozen=True, kw_only=True)
class Target:
    """What strategies are judged by: noise × rms at this ε and δ, in clip norms."""

    epsilon: float
    delta: float
    neighbours: str = ""
    workload: Workload

    def __post_init__(self) -> None:
        positive(epsilon=self.epsilon)

    def rms(self, participation: Participation, strategy: Strategy) -> float:
        """The noise that a model would feel, by the participation's own accountant."""
        terms = Terms(
            participation=participation,
            strategy=strategy,
            noise_multiplier=1.0,
            delta=self.delta,
            neighbours=self.neighbours,
        )
        felt = error(strategy, participation.steps, workload=self.workload).rms
        return terms.guarantee.least_noise(self.epsilon) * felt


def strategy_for(
    mechanism: str | Strategy,
    participation: Participation,
    *,
    workload: Workload,
    max_buffers: int | None = None,
    target: Target | None = None,
    options: Mapping[str, Any] | None = None,
) -> Strategy:
    """What `mechanism` means for this participation; `options` are those of its fit."""
    options = dict(options or {})
    if isinstance(mechanism, Strategy):
        if options:
            raise InvalidInput(
                f"{next(iter(options))}= is for a mechanism by name, got the finished strategy "
                f"{mechanism.name!r}; leave it out"
            )
        return mechanism
    if isinstance(participation, BallsInBins):
        order = participation.in_order
        if mechanism == "best" and target is not None:
            unsampled = best(order, max_buffers=max_buffers, workload=workload).strategy
            _, cyclic = best_cyclic(order, target=target, max_buffers=max_buffers)
            return best_in_bins(
                participation, [unsampled, cyclic], target=target, max_buffers=max_buffers
            )
        participation = order
    if isinstance(participation, CyclicPoisson) and mechanism == "best":
        options = {"workload": workload, "bands": participation.groups, **options}
        return fit_strategy("banded", participation, **options).strategy
    if participation.is_sampled and mechanism in ("best", "identity"):
        return identity()
    if participation.steps == OPEN:
        return _open_ended(mechanism, participation, workload, options)
    if mechanism == "best":
        return best(participation, max_buffers=max_buffers, workload=workload).strategy
    return fit_strategy(mechanism, participation, workload=workload, **options).strategy


def _open_ended(
    mechanism: str, participation: Participation, workload: Workload, options: dict[str, Any]
) -> Strategy:
    """Noise without an end: a BLT that is good up to `reach` steps, and private for ever."""
    if mechanism == "identity":
        return identity()
    one_of(("blt", "best"), **{"mechanism of a run of unknown length": mechanism})
    options = {"buffers": 5, **options}
    reach = options.pop("reach", REACH)
    whole(reach=reach)
    return fit_blt(replace(participation, steps=reach), workload=workload, **options).strategy  # type: ignore[type-var]


def best_cyclic(
    order: Epochs, *, target: Target, max_buffers: int | None = None
) -> tuple[CyclicPoisson, Strategy]:
    """The number of groups that needs the least noise, and bands for it.

    Searched downhill on a ladder of factors of about 1.3.
    """
    n, b = order.steps, order.steps_per_epoch
    most = b if max_buffers is None else min(b, max_buffers + 1)
    ladder = sorted({min(most, round(1.3**i)) for i in range(64)})

    @cache
    def tried(place: int) -> tuple[float, CyclicPoisson, Strategy]:
        part = CyclicPoisson(n, ladder[place], ladder[place] / b)
        strategy = strategy_for("best", part, workload=target.workload)
        return target.rms(part, strategy), part, strategy

    place = min(len(ladder) - 1, sum(rung < most / 8 for rung in ladder))
    while True:
        near = [i for i in (place - 1, place, place + 1) if 0 <= i < len(ladder)]
        least = min(near, key=lambda i: tried(i)[0])
        if least == place:
            return tried(place)[1:]
        place = least


def best_in_bins(
    part: BallsInBins,
    candidates: Iterable[Strategy],
    *,
    target: Target,
    max_buffers: int | None = None,
) -> Strategy:
    """What needs the least noise for secret positions: a candidate, or bands fitted to them."""
    own = fit_bins(part, epsilon=target.epsilon, delta=target.delta, workload=target.workload)
    found: list[tuple[float, Strategy]] = []
    for strategy in candidates if own is None else [*candidates, own]:
        if max_buffers is None or strategy.buffers(part.steps) <= max_buffers:
            with suppress(Unsupported):  # trees
                found.append((target.rms(part, strategy), strategy))
    if not found:
        raise Unsupported(
            f"no strategy with at most {max_buffers} buffers is accounted for secret positions; "
            "allow more max_buffers, or use Epochs"
        )
    return min(found, key=lambda each: each[0])[1]
