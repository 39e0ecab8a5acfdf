"""Banded Toeplitz fits: gradients against differences, forms against matrices, known optima."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.participation import Epochs, MinSeparation, Poisson, Restarted, SinglePass
from noshuffle.strategies.base import lower_toeplitz, reciprocal
from noshuffle.strategies.fit_banded import _join, _split, fit_banded, fit_banded_inverse
from noshuffle.strategies.fit_forms import (
    cost,
    error_form,
    layout,
    sensitivity_form,
    through_reciprocal,
)
from noshuffle.strategies.toeplitz import banded, banded_inverse, root_coefficients, sqrt_toeplitz
from noshuffle.strategies.workload import Workload, cooldown, momentum, prefix

SCHEDULED = momentum(0.8, learning_rates=cooldown(24))


def slope_by_differences(fn, x, h=1e-6):
    steps = np.eye(len(x)) * h
    return np.array([(fn(x + e)[0] - fn(x - e)[0]) / (2 * h) for e in steps])


def allowed(steps, separation, most):
    """Every pattern with gaps of at least the separation."""
    for size in range(1, most + 1):
        for pattern in itertools.combinations(range(steps), size):
            if all(b - a >= separation for a, b in itertools.pairwise(pattern)):
                yield list(pattern)


def largest(C, patterns):
    size = np.abs(C.T @ C)
    return max(size[np.ix_(p, p)].sum() for p in patterns)


@pytest.mark.parametrize("workload", [prefix(), momentum(0.9), SCHEDULED])
def test_error_form_is_the_matrix(workload):
    d = np.random.default_rng(1).normal(size=24)
    d[0] = 1.0
    form = error_form(24, workload=workload)
    B = workload.matrix(24) @ lower_toeplitz(d)
    value, slope = form(d)
    assert value == pytest.approx((B**2).sum(axis=1).mean(), rel=1e-12)
    np.testing.assert_allclose(slope, slope_by_differences(form, d), rtol=1e-5, atol=1e-6)


def test_a_long_schedule_is_integrated_closely(monkeypatch):
    n = 400
    workload = Workload(0.9, cooldown(n))
    d = reciprocal(root_coefficients(16, sign=-1), n)
    exact, slope = error_form(n, workload=workload)(d)
    monkeypatch.setattr("noshuffle.strategies.fit_forms.COLUMN_BUDGET", 50 * n)
    near, near_slope = error_form(n, workload=workload)(d)
    assert near == pytest.approx(exact, rel=5e-3)
    np.testing.assert_allclose(near_slope[:16], slope[:16], rtol=2e-2)


@pytest.mark.parametrize("seed", range(6))
def test_sensitivity_form_bounds_every_pattern(seed):
    rng = np.random.default_rng(seed)
    n, separation, most = 11, int(rng.integers(2, 5)), int(rng.integers(1, 4))
    c = rng.normal(size=n)
    C = lower_toeplitz(c)
    free, _ = sensitivity_form(n, separation=separation, most=most, is_free=True)(c)
    assert free >= largest(C, allowed(n, separation, most)) - 1e-9
    even, _ = sensitivity_form(n, separation=separation, most=most, is_free=False)(c)
    classes = [list(range(j, n, separation))[:most] for j in range(n)]
    assert even >= largest(C, classes) - 1e-9
    falling = np.sort(np.abs(c))[::-1].copy()
    exact, _ = sensitivity_form(n, separation=separation, most=most, is_free=False)(falling)
    assert exact == pytest.approx(largest(lower_toeplitz(falling), allowed(n, separation, most)))


@pytest.mark.parametrize("is_free", [False, True])
def test_sensitivity_slope(is_free):
    form = sensitivity_form(13, separation=4, most=3, is_free=is_free)
    c = np.random.default_rng(3).normal(size=13)
    np.testing.assert_allclose(form(c)[1], slope_by_differences(form, c), rtol=1e-5, atol=1e-6)


def test_slope_through_the_reciprocal():
    rng = np.random.default_rng(5)
    c = np.append(1.0, 0.3 * rng.normal(size=4))
    weights = rng.normal(size=20)

    def fn(c):
        return float(weights @ reciprocal(c, 20)), None

    d = reciprocal(c, 20)
    found = through_reciprocal(c, d, weights)
    np.testing.assert_allclose(found, slope_by_differences(fn, c), rtol=1e-6, atol=1e-8)


def test_inverse_series_is_the_reciprocal():
    for c in ([2.0], [1.0, 0.9], [1.0, -0.999, 0.1], [1.0, 0.5, 0.375]):
        found = reciprocal(np.array(c), 10_000)
        np.testing.assert_allclose(found, reciprocal(np.array(c), 10_000), rtol=1e-9, atol=1e-99)


def test_split_and_join_are_inverse():
    d = root_coefficients(7, sign=1)
    np.testing.assert_allclose(_join(_split(d))[2], d, atol=1e-12)


@pytest.mark.parametrize(
    ("n", "bands", "expected"),
    [(128, 4, 4.36408459), (1024, 4, 11.5632921), (1024, 16, 6.34279336), (1024, 64, 4.06591344)],
)
def test_known_banded_optima(n, bands, expected):
    found = fit_banded(SinglePass(n), bands=bands)
    assert found.converged
    assert found.objective == pytest.approx(expected, rel=1e-7)
    assert found.objective < cost(sqrt_toeplitz(bands), SinglePass(n), workload=prefix())


def test_known_coefficients_have_unit_norm():
    c = fit_banded(SinglePass(4096), bands=16).strategy.coefficients(16)
    np.testing.assert_allclose(c[:4], [0.393372661, 0.295548585, 0.272684614, 0.261079701], 1e-5)
    assert np.linalg.norm(c) == pytest.approx(1.0)


def test_known_optima_of_several_epochs():
    assert fit_banded(Epochs(4, 64), bands=64).objective == pytest.approx(5.56613357, rel=1e-7)
    assert fit_banded(Epochs(16, 16), bands=16).objective == pytest.approx(14.5502953, rel=1e-7)
    assert fit_banded(SinglePass(1600), bands=1600).objective <= 3.2


@pytest.mark.parametrize("participation", [Epochs(6, 8), MinSeparation(48, 8, 4)])
def test_more_bands_than_the_separation_stay_monotone_and_never_hurt(participation):
    narrow = fit_banded(participation, bands=8)
    wide = fit_banded(participation, bands=20)
    c = wide.strategy.coefficients(48)
    assert np.all(np.diff(c) <= 1e-12)
    assert np.all(c >= 0)
    assert wide.objective <= narrow.objective * (1 + 1e-6)
    C = lower_toeplitz(c)
    b, most = 8, participation.most
    worst = np.sqrt(max((C[:, range(j, 48, b)[:most]].sum(axis=1) ** 2).sum() for j in range(b)))
    B = prefix().matrix(48) @ np.linalg.inv(C)
    assert wide.objective == pytest.approx(worst * np.sqrt((B**2).sum() / 48), rel=1e-9)


@pytest.mark.parametrize(
    ("n", "bands", "expected"),
    [(64, 2, 2.477), (1024, 2, 4.809), (1024, 4, 3.9774), (1024, 16, 3.3295), (4096, 16, 4.2725)],
)
def test_known_inverse_optima(n, bands, expected):
    found = fit_banded_inverse(SinglePass(n), bands=bands)
    assert found.converged
    assert found.objective == pytest.approx(expected, abs=6e-4)
    assert found.objective < cost(banded_inverse(bands), SinglePass(n), workload=prefix())


def test_inverse_over_several_participations():
    epochs = fit_banded_inverse(Epochs(4, 256), bands=4)
    free = fit_banded_inverse(MinSeparation(1024, 256, 4), bands=4)
    assert epochs.objective <= 7.97
    assert epochs.objective <= free.objective + 1e-9 <= 8.19
    assert len(epochs.strategy.bands) == 4


@pytest.mark.parametrize("workload", [momentum(0.9), Workload(0.9, cooldown(96))])
@pytest.mark.parametrize("participation", [SinglePass(96), Epochs(4, 24), MinSeparation(96, 24, 3)])
def test_other_workloads_are_fitted_for(workload, participation):
    for fn, bands in ((fit_banded, 24), (fit_banded_inverse, 6)):
        aware = fn(participation, bands=bands, workload=workload)
        unaware = fn(participation, bands=bands)
        blind = cost(unaware.strategy, participation, workload=workload)
        assert aware.objective < blind
        measured = cost(aware.strategy, participation, workload=workload)
        assert measured == pytest.approx(aware.objective)


def test_fits_are_deterministic_and_small_sizes_work():
    assert fit_banded(Epochs(3, 20), bands=7) == fit_banded(Epochs(3, 20), bands=7)
    for n in (1, 2, 3):
        for bands in (1, 2, 5):
            for fn in (fit_banded, fit_banded_inverse):
                found = fn(SinglePass(n), bands=bands)
                assert np.isfinite(found.objective)
    one = fit_banded(SinglePass(9), bands=1)
    assert one.strategy == banded((1.0,))


def test_refusals():
    with pytest.raises(InvalidInput, match="bands must be"):
        fit_banded(SinglePass(8), bands=0)
    for participation in (Poisson(8, 0.1), Restarted(Epochs(2, 4), 4)):
        with pytest.raises(Unsupported, match="SinglePass, Epochs or MinSeparation"):
            fit_banded(participation, bands=2)
    assert layout(MinSeparation(976, 97, 20)) == (976, 97, 11)
