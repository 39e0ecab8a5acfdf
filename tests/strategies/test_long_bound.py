"""Lower bounds for long runs: held against eigenvalues of the written-out certificate."""

from __future__ import annotations

import numpy as np
import pytest

from noshuffle.errors import Unsupported
from noshuffle.participation import Epochs, MinSeparation, Participation, SinglePass
from noshuffle.strategies.fit import fit
from noshuffle.strategies.long_bound import Certificate, long_bound
from noshuffle.strategies.lower_bound import rms_lower_bound


def written_out(found: Certificate) -> float:
    """‖A U^{1/2}‖_tr / √n by the eigenvalues of A U Aᵀ: the slow twin."""
    places = found.steps // found.turns
    n = places * found.turns
    U = np.zeros((n, n))
    for j in range(places):
        steps = np.arange(j, n, places)
        U[np.ix_(steps, steps)] = found.block(j)
    A = np.tril(np.ones((n, n)))
    values = np.linalg.eigvalsh(A @ U @ A.T)
    return float(np.sqrt(np.maximum(values, 0.0)).sum() / np.sqrt(found.steps))


def check(part: Participation) -> None:
    found = long_bound(part, rounds=1)
    assert np.all(found.weights >= 0)
    assert found.weights.sum() <= 1 + 1e-12  # hence a certificate
    whole = written_out(found)
    assert 0.9985 * whole < found.bound <= whole * (1 + 1e-12)


@pytest.mark.parametrize(
    "part",
    [
        SinglePass(2),
        SinglePass(65),
        Epochs(2, 1),
        Epochs(3, 2),
        Epochs(2, 3),
        Epochs(4, 15),
        Epochs(5, 16),
        MinSeparation(50, 10, 4),
    ],
    ids=str,
)
def test_the_bound_is_that_of_its_certificate(part: Participation) -> None:
    check(part)


@pytest.mark.slow
def test_the_bound_is_that_of_its_certificate_in_a_longer_run() -> None:
    check(Epochs(20, 48))
    check(SinglePass(1500))


def test_it_agrees_with_the_dense_bound_and_is_below_every_strategy() -> None:
    for part in (SinglePass(256), Epochs(4, 16)):
        assert 0.997 < long_bound(part).bound / rms_lower_bound(part) < 1.001
    part = MinSeparation(48, 12, 4)
    assert long_bound(part).bound <= fit("bsr", part).objective
    assert long_bound(Epochs(4, 12)).bound == pytest.approx(long_bound(part).bound, rel=1e-12)


def test_a_certificate_that_claims_more_is_seen() -> None:
    found = long_bound(Epochs(4, 15), rounds=1)
    more = Certificate(found.steps, found.turns, found.weights, found.bound * 1.002)
    assert more.bound > written_out(more)


def test_what_is_too_long_is_refused() -> None:
    with pytest.raises(Unsupported, match="at most"):
        long_bound(SinglePass(10**8))
