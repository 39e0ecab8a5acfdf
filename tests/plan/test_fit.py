"""What `Plan.fit` makes of a mechanism: the one that was named, or a refusal in one line."""

from __future__ import annotations

from typing import Any

import pytest

from noshuffle.errors import InvalidInput, NoshuffleError, Unsupported
from noshuffle.participation import (
    BallsInBins,
    CyclicPoisson,
    Epochs,
    FixedSize,
    Participation,
    Poisson,
    SinglePass,
    TruncatedPoisson,
)
from noshuffle.plan import Plan
from noshuffle.strategies import error, identity
from noshuffle.strategies.mechanisms import MECHANISMS

SAMPLED: dict[str, Participation] = {
    "poisson": Poisson(8, 0.25),
    "fixed": FixedSize(8, 5, 20),
    "truncated": TruncatedPoisson.of(steps=8, batch=5, population=20),
    "cyclic": CyclicPoisson(8, 4, 1.0),
    "bins": BallsInBins(2, 4),
}
#: What is proved beside independent noise. Trees are refused under every draw.
ALSO = {"cyclic": {"bsr", "banded"}, "bins": set(MECHANISMS) - {"tree"}}


@pytest.mark.parametrize("where", SAMPLED)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_named_mechanism_is_never_replaced(where: str, mechanism: str) -> None:
    """Poisson batches with mechanism="blt" trained under independent noise without a word."""
    part, options = SAMPLED[where], {"bands": 2} if mechanism in ("bsr", "banded") else {}
    if mechanism == "identity" or mechanism in ALSO.get(where, ()):
        plan = Plan.fit(part, mechanism=mechanism, noise_multiplier=1.0, **options)
        assert (plan.strategy == identity()) == (mechanism == "identity")
        assert plan.participation == part
        return
    with pytest.raises(Unsupported) as caught:
        Plan.fit(part, mechanism=mechanism, noise_multiplier=1.0, **options)
    said = str(caught.value)
    assert "\n" not in said
    assert repr(mechanism) in said
    assert "use " in said


@pytest.mark.parametrize("part", [Epochs(2, 4), SinglePass(8), *SAMPLED.values()])
def test_a_plan_samples_only_what_it_was_told_to(part: Participation) -> None:
    """Nothing draws in secret by itself, also where that would need less noise."""
    for amount in ({"epsilon": 2.0}, {"noise_multiplier": 1.0}):
        plan = Plan.fit(part, mechanism="best", **amount)
        assert plan.participation == part
    with pytest.raises(NoshuffleError):
        Plan.fit(Epochs(2, 4), mechanism="blt", epsilon=1.0, sampling="any")


def test_best_is_the_least_error_within_the_memory() -> None:
    plan = Plan.fit(SinglePass(64), mechanism="best", epsilon=2.0, max_buffers=2)
    assert plan.strategy.buffers(64) <= 2
    poorer = Plan.fit(SinglePass(64), mechanism="identity", epsilon=2.0)
    felt = plan.noise_multiplier * error(plan.strategy, 64).rms
    assert felt < poorer.noise_multiplier * error(poorer.strategy, 64).rms


@pytest.mark.parametrize(
    ("part", "wrong", "words"),
    [
        (FixedSize(5, 2, 9), {"accountant": "exact"}, 'FixedSize .* use accountant="fourier"'),
        (SinglePass(5), {"accountant": "fourier"}, 'SinglePass .* use accountant="exact"'),
        (Poisson(5, 0.1), {"accountant": "bins"}, 'Poisson .* use accountant="fourier"'),
        (
            Poisson(5, 0.1),
            {"accountant": "rdp", "neighbours": "replace-one"},
            'accountant="fourier" with neighbours add-remove or zero-out or replace-one',
        ),
        (SAMPLED["truncated"], {"accountant": "rdp"}, 'TruncatedPoisson .* use accountant="four'),
        (BallsInBins(2, 3), {"neighbours": "replace-one"}, 'BallsInBins .* use accountant="bins"'),
    ],
)
def test_what_is_not_proved_is_refused(
    part: Participation, wrong: dict[str, Any], words: str
) -> None:
    with pytest.raises(Unsupported, match=words) as caught:
        Plan.fit(part, mechanism="identity", epsilon=1.0, **wrong)
    assert "\n" not in str(caught.value)


def test_a_finished_strategy_takes_no_options() -> None:
    with pytest.raises(InvalidInput, match="bands= is for a mechanism by name"):
        Plan.fit(SinglePass(5), mechanism=identity(), epsilon=1.0, bands=3)
