from __future__ import annotations

import pytest

from noshuffle import participation
from noshuffle.errors import InvalidInput
from noshuffle.participation import (
    AnyOrderEpochs,
    BallsInBins,
    CyclicPoisson,
    Epochs,
    FixedSize,
    MinSeparation,
    Participation,
    Poisson,
    Restarted,
    SinglePass,
    TruncatedPoisson,
    from_dict,
)

EXAMPLES: list[Participation] = [
    SinglePass(7),
    Epochs(3, 5),
    AnyOrderEpochs(3, 5),
    MinSeparation(20, 4, 3),
    Poisson(10, 0.1),
    FixedSize(10, 5, 50),
    CyclicPoisson(10, 4, 0.5),
    BallsInBins(3, 4),
    TruncatedPoisson(10, 0.5, 7, 12),
    Restarted(Epochs(10, 4), 8),
    Restarted(MinSeparation(20, 4, 3), 6),
]


@pytest.mark.parametrize("part", EXAMPLES, ids=lambda p: p.kind)
def test_round_trip_and_words(part: Participation) -> None:
    assert from_dict(part.to_dict()) == part
    assert len(part.words()) > 20
    assert 1 <= part.most <= part.steps


def test_every_participation_is_an_example() -> None:
    public = [getattr(participation, name) for name in participation.__all__]
    kinds = {one for one in public if isinstance(one, type) and issubclass(one, Participation)}
    assert {type(part) for part in EXAMPLES} == kinds - {Participation}


def test_blocks_of_a_restarted_run() -> None:
    assert Restarted(Epochs(5, 4), 8).blocks == (8, 8, 4)
    assert Restarted(Epochs(5, 4), 8).most == 5
    assert Restarted(Epochs(5, 4), 6).most == 2 + 2 + 2 + 1
    # No separation holds across the end of a block.
    assert Restarted(MinSeparation(20, 10, 100), 5).most == 4
    assert Restarted(MinSeparation(20, 10, 3), 5).most == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: SinglePass(0),
        lambda: SinglePass(10**12),
        lambda: SinglePass(2.5),  # type: ignore[arg-type]
        lambda: SinglePass(True),
        lambda: Epochs(3, -1),
        lambda: Epochs(10**6, 10**6),
        lambda: MinSeparation(5, 0, 1),
        lambda: Poisson(5, 0.0),
        lambda: Poisson(5, float("nan")),
        lambda: Poisson(5, 1.5),
        lambda: FixedSize(5, 11, 10),
        lambda: Restarted(Poisson(5, 0.1), 2),  # type: ignore[arg-type]
        lambda: from_dict({"kind": "lottery"}),
    ],
)
def test_bad_input_is_one_line(make: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        make()  # type: ignore[operator]
    assert "\n" not in str(caught.value)
