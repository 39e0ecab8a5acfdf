"""Dense optima and lower bounds: certificates against random strategies, and known values."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tests.strategies.lower_bound import patterns, rms_lower_bound

from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.participation import Epochs, MinSeparation, Poisson, SinglePass
from noshuffle.strategies.dense import dense
from noshuffle.strategies.fit_dense import fit_dense, triangular
from noshuffle.strategies.fit_forms import cost
from noshuffle.strategies.sensitivity import sensitivity
from noshuffle.strategies.toeplitz import sqrt_toeplitz
from noshuffle.strategies.workload import Workload, cooldown, momentum, prefix


def random_strategy(rng, n):
    C = np.tril(rng.normal(size=(n, n))) * 0.3
    C[np.diag_indices(n)] = 0.5 + rng.random(n)
    return dense(C)


def true_sensitivity(C, steps, separation, most):
    """By enumeration of patterns and signs: what a unit can really do."""
    worst = 0.0
    for size in range(1, most + 1):
        for pattern in itertools.combinations(range(steps), size):
            if all(b - a >= separation for a, b in itertools.pairwise(pattern)):
                for signs in itertools.product((1, -1), repeat=size):
                    worst = max(worst, float(np.linalg.norm(C[:, list(pattern)] @ signs)))
    return worst


def test_triangular_is_a_lower_factor():
    rng = np.random.default_rng(0)
    R = rng.normal(size=(7, 9))
    C = triangular(R @ R.T)
    np.testing.assert_allclose(C.T @ C, R @ R.T, atol=1e-12)
    assert np.all(np.triu(C, 1) == 0)


@pytest.mark.parametrize(("n", "expected"), [(64, 2.0999), (128, 2.31100125), (256, 2.52441442)])
def test_single_participation_reaches_the_optimum(n, expected):
    found = fit_dense(SinglePass(n), tolerance=1e-5)
    assert found.converged
    assert found.objective == pytest.approx(expected, rel=3e-5)
    assert found.bound <= expected * (1 + 2e-5)
    assert found.gap <= 1e-5
    assert sensitivity(found.strategy, SinglePass(n)).value == pytest.approx(1.0)


def test_default_tolerance_is_met_and_certified():
    found = fit_dense(SinglePass(200))
    assert found.converged
    assert 0 <= found.gap <= 1e-3
    assert rms_lower_bound(SinglePass(200)) == pytest.approx(found.bound, rel=1e-3)


@pytest.mark.parametrize(
    ("participation", "expected"),
    [(Epochs(4, 16), 4.408), (Epochs(16, 4), 12.09), (MinSeparation(64, 16, 4), 4.5853)],
)
def test_masked_optima(participation, expected):
    found = fit_dense(participation, tolerance=1e-4)
    assert found.converged
    assert found.objective == pytest.approx(expected, rel=2e-4)
    assert found.bound <= found.objective <= found.bound * (1 + 1e-4)
    record = sensitivity(found.strategy, participation)
    assert record.exact
    most = 1.0 if isinstance(participation, Epochs) else np.sqrt(participation.most)
    assert record.value == pytest.approx(most, rel=1e-6)


def test_masked_columns_are_orthogonal():
    C = fit_dense(Epochs(3, 6)).strategy.encoder(18)
    X = C.T @ C
    for j in range(6):
        block = X[np.ix_([j, j + 6, j + 12], [j, j + 6, j + 12])]
        np.testing.assert_allclose(block - np.diag(np.diag(block)), 0, atol=1e-12)
        assert np.trace(block) == pytest.approx(1.0)


@pytest.mark.slow
def test_256_steps_in_epochs():
    four = fit_dense(Epochs(4, 64))
    assert four.objective == pytest.approx(5.212, rel=3e-4)
    sixteen = fit_dense(Epochs(16, 16))
    assert sixteen.objective == pytest.approx(13.30, rel=1e-3)
    assert rms_lower_bound(Epochs(4, 64)) >= 5.157
    assert 13.06 <= rms_lower_bound(Epochs(16, 16)) <= sixteen.objective


@pytest.mark.slow
def test_1024_steps_single():
    found = fit_dense(SinglePass(1024))
    assert found.bound <= 2.95545199 <= found.objective <= found.bound * 1.001


@pytest.mark.parametrize(
    ("participation", "table", "optimum"),
    [(Epochs(4, 16), 4.371, 4.408), (Epochs(16, 4), 11.90, 12.09)],
)
def test_epoch_bounds_are_at_least_the_known_ones(participation, table, optimum):
    assert table <= rms_lower_bound(participation) <= optimum


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("steps", "separation", "most"), [(9, 9, 1), (9, 3, 3), (8, 3, 2), (10, 4, 3)]
)
def test_no_strategy_is_below_the_bound(seed, steps, separation, most):
    participation = MinSeparation(steps, separation, most)
    bound = rms_lower_bound(participation)
    rng = np.random.default_rng(seed)
    A = prefix().matrix(steps)
    tries = [random_strategy(rng, steps).encoder(steps), sqrt_toeplitz().encoder(steps), A]
    for C in tries:
        B = A @ np.linalg.inv(C)
        reached = np.sqrt((B**2).sum() / steps) * true_sensitivity(C, steps, separation, most)
        assert reached >= bound
    assert fit_dense(participation).objective >= bound


@pytest.mark.parametrize("participation", [SinglePass(6), Epochs(3, 2)])
def test_the_bound_is_close_from_above_too(participation):
    assert fit_dense(participation).objective <= 1.03 * rms_lower_bound(participation)


def test_patterns_have_equal_gaps_and_reach_the_end():
    assert patterns(7, separation=3, most=3).tolist() == [[0, 3, 6], [1, 4, 7], [2, 5, 7]]
    assert patterns(5, separation=2, most=2).tolist() == [[0, 2], [1, 3], [2, 4]]
    assert patterns(3, separation=3, most=1).tolist() == [[0], [1], [2]]


def test_workloads():
    n = 256
    workload = momentum(0.9)
    found = fit_dense(SinglePass(n), workload=workload, tolerance=1e-4)
    assert found.objective * 0.1 == pytest.approx(1.600, abs=2e-3)  # scaled by 1 − β
    others = (Workload(0.9, cooldown(48)), Workload(0.0, tuple(np.linspace(1, 1 / 48, 48))))
    for participation in (SinglePass(48), Epochs(4, 12), MinSeparation(48, 12, 3)):
        plain = fit_dense(participation).strategy
        for other in others:
            aware = fit_dense(participation, workload=other)
            assert aware.converged
            assert aware.objective < cost(plain, participation, workload=other)
            assert rms_lower_bound(participation, workload=other) <= aware.objective


def test_small_and_refused():
    for n in (1, 2, 3):
        assert fit_dense(SinglePass(n)).gap <= 1e-3
    assert fit_dense(SinglePass(1)).objective == pytest.approx(1.0)
    assert fit_dense(Epochs(3, 1)).objective >= rms_lower_bound(Epochs(3, 1))
    assert fit_dense(Epochs(4, 8)).strategy == fit_dense(Epochs(4, 8)).strategy
    with pytest.raises(Unsupported, match="at most 512 steps"):
        fit_dense(Epochs(4, 256))
    with pytest.raises(Unsupported, match="at most 4096 steps"):
        rms_lower_bound(SinglePass(5000))
    with pytest.raises(Unsupported, match="SinglePass, Epochs or MinSeparation"):
        fit_dense(Poisson(10, 0.1))
    with pytest.raises(InvalidInput, match="learning rates > 0"):
        fit_dense(SinglePass(3), workload=Workload(0.0, (1.0, 0.5, 0.0)))
    with pytest.raises(InvalidInput, match="tolerance"):
        rms_lower_bound(SinglePass(3), tolerance=0.0)
