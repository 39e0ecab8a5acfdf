"""Secret positions of a plan: how far they overlap.

Under `BallsInBins` and `SeparatedBins` nobody but the sampler knows at which step a unit takes
part. What the accountants read of the noise are inner products of the columns of C at positions
that a unit may have (`strategies.positions`). Functions take the `Plan` that asks. No state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from noshuffle import accounting
from noshuffle.errors import Unsupported, instance_of
from noshuffle.participation import BallsInBins, DrawnStages, SeparatedBins
from noshuffle.strategies.positions import overlaps, separated_classes

if TYPE_CHECKING:
    from noshuffle.accounting.bins import Overlaps
    from noshuffle.accounting.fresh_positions import FreshPositions


def positions(plan: Any, steps: int) -> Overlaps | FreshPositions:
    """How far secret positions overlap in the first `steps` steps; see `Plan.positions`."""
    part = plan.participation
    if isinstance(part, DrawnStages):
        raise Unsupported(
            "positions that are drawn anew in every stage have no overlaps of their own; "
            "their stages are composed, ask epsilon()"
        )
    if isinstance(part, SeparatedBins):
        epochs = part.most_within(steps)
        return accounting.fresh_positions.FreshPositions(
            separated_classes(plan.strategy, part, plan.steps), epochs
        )
    known = (1, 0.0, plan.sensitivity_after(steps).squared)
    return accounting.bins.Overlaps((known, *overlaps(plan.strategy, _bins_of(plan), steps)[1:]))


def _bins_of(plan: Any) -> BallsInBins:
    instance_of(BallsInBins, participation=plan.participation)
    assert isinstance(plan.participation, BallsInBins)
    return plan.participation
