"""Secret positions of a plan: how far they overlap, and their ε by Monte Carlo.

Under `BallsInBins` and `SeparatedBins` nobody but the sampler knows at which step a unit takes
part. What the accountants read of the noise are inner products of the columns of C at positions
that a unit may have (`strategies.positions`). Functions take the `Plan` that asks. No state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from noshuffle import accounting
from noshuffle.errors import Unsupported, instance_of
from noshuffle.participation import BallsInBins, DrawnStages, SeparatedBins
from noshuffle.strategies.positions import gram, overlaps, separated_classes, separated_gram

if TYPE_CHECKING:
    from noshuffle.accounting.bins import Overlaps
    from noshuffle.accounting.fresh_positions import FreshPositions
    from noshuffle.accounting.monte_carlo import Interval


def positions(plan: Any, steps: int) -> Overlaps | FreshPositions:
    """How far secret positions overlap in the first `steps` steps; see `Plan.positions`."""
    part = plan.participation
    if isinstance(part, DrawnStages):
        raise Unsupported(
            "positions that are drawn anew in every stage have no overlaps of their own (nor Monte "
            "Carlo); their stages are composed, ask epsilon()"
        )
    if isinstance(part, SeparatedBins):
        epochs = part.most_within(steps)
        return accounting.fresh_positions.FreshPositions(
            separated_classes(plan.strategy, part, plan.steps), epochs
        )
    known = (1, 0.0, plan.sensitivity_after(steps).squared)
    return accounting.bins.Overlaps((known, *overlaps(plan.strategy, _bins_of(plan), steps)[1:]))


def monte_carlo_epsilon(plan: Any, *, samples: int, seed: int | None) -> Interval:
    """ε of the whole run with secret positions by Monte Carlo; see `Plan.monte_carlo`."""
    part, known = plan.participation, plan.positions(plan.steps)
    if isinstance(known, accounting.fresh_positions.FreshPositions):
        assert isinstance(part, SeparatedBins)
        K = separated_gram(plan.strategy, part, plan.steps)
        secret = accounting.monte_carlo.SecretPositions(K, known, periods=known.epochs)
    else:
        K = gram(plan.strategy, _bins_of(plan), plan.steps)
        secret = accounting.monte_carlo.SecretPositions(K, known)
    z, delta = plan.noise_multiplier, plan.delta
    return secret.epsilon(noise_multiplier=z, delta=delta, samples=samples, seed=seed)


def _bins_of(plan: Any) -> BallsInBins:
    instance_of(BallsInBins, participation=plan.participation)
    assert isinstance(plan.participation, BallsInBins)
    return plan.participation
