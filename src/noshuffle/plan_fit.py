"""How a plan is fitted: the strategy by name, as an object or the best one, then its noise.

    participation, mechanism → strategy (`plan_strategy`) → least noise within ε (`calibrated`)

Secret positions and draws have fits of their own (`sampled_fit`). The `Plan` that asks is given as
a class (`noshuffle.plan`). No state.
"""

from __future__ import annotations

from typing import Any

from noshuffle import plan_accountant, strategies
from noshuffle.errors import InvalidInput, instance_of, one_of
from noshuffle.participation import BallsInBins, Participation
from noshuffle.plan_strategy import chosen
from noshuffle.sampled_fit import fit_sampled
from noshuffle.strategies.workload import Workload, checked_workload


def fitted(
    kind: Any,
    participation: Participation,
    *,
    mechanism: str | strategies.Strategy,
    epsilon: float | None,
    noise_multiplier: float | None,
    delta: float,
    neighbours: str,
    unit: str,
    accountant: str,
    tree_accounting: str,
    workload: Workload | None,
    max_buffers: int | None,
    sampling: str,
    options: dict[str, Any],
) -> Any:
    """The plan of this kind that `Plan.fit` was asked for; it says what the arguments are."""
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
        return fit_sampled(
            kind.fit,
            participation,
            sampling=sampling,
            epsilon=epsilon,
            delta=delta,
            neighbours=neighbours,
            unit=unit,
            workload=workload,
            max_buffers=max_buffers,
        )
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
        return kind(noise_multiplier=noise_multiplier, **common)
    return plan_accountant.calibrated(kind(noise_multiplier=1.0, **common), epsilon)
