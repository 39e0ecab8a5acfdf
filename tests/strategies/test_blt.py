"""BLT: published vectors, the streaming form, and every closed form against explicit matrices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.strategies.slow_recipes import materialize

from noshuffle.errors import HorizonExceeded, InvalidInput
from noshuffle.strategies import blt_forms as forms
from noshuffle.strategies.blt import blt, blt_from_poles, inverse_parameters, scales_from_poles
from noshuffle.strategies.blt_gains import (
    encoder_series,
    total_squared_error,
)
from noshuffle.strategies.blt_poles import filter_from, poles, spaced, unbounded, without_cancelled
from noshuffle.strategies.workload import cooldown, momentum, prefix

DECAYS = (0.99977484, 0.99604972, 0.96051578, 0.66840214)
SCALES = (0.02046601, 0.04735538, 0.13962933, 0.28141972)


def random_blt(seed, d=3, *, taps=0, lag=0, n=0):
    rng = np.random.default_rng(seed)
    mixed = np.sort(rng.uniform(0.02, 0.995, 2 * d))[::-1]
    gains = tuple(rng.uniform(0.5, 2.0, n))
    weights = tuple(rng.uniform(-0.4, 0.4, taps))
    filtered = blt_from_poles(mixed[0::2], mixed[1::2], taps=weights, lag=lag)
    return replace(filtered, gains=gains)


def gaps(strategy):
    hat, _ = inverse_parameters(strategy.decays, strategy.scales)
    return 1 - np.asarray(strategy.decays), 1 - hat


def numeric(function, x, step=1e-6):
    columns = np.eye(len(x)) * step
    return np.array([(function(x + e) - function(x - e)) / (2 * step) for e in columns])


# ---- the record


def test_vector_of_the_max_optimal_filter_for_4096_steps():
    hat, inverse_scales = inverse_parameters(DECAYS, SCALES)
    assert hat == pytest.approx((0.99885911, 0.98734501, 0.88051219, 0.26915574), abs=1e-8)
    expected = (-3.27832e-5, -1.048014e-3, -0.030251166, -0.457538471)
    assert inverse_scales == pytest.approx(expected, rel=4e-6)  # the digits printed
    strategy = blt(DECAYS, SCALES)
    sens = np.linalg.norm(strategy.coefficients(4096))
    last = np.linalg.norm(np.cumsum(strategy.noising_coefficients(4096)))
    assert sens == pytest.approx(1.926239, abs=2e-6)
    assert last == pytest.approx(1.929169, abs=2e-6)
    assert sens * last == pytest.approx(3.7160, abs=5e-5)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("taps", "gain_count"), [(0, 0), (2, 0), (3, 20)])
def test_noising_is_the_inverse_and_the_stream_is_the_noising(seed, taps, gain_count):
    n = 20
    strategy = random_blt(seed, 1 + seed % 4, taps=taps, lag=6 if taps else 0, n=gain_count)
    assert strategy.noising(n) @ strategy.encoder(n) == pytest.approx(np.eye(n), abs=1e-9)
    assert materialize(strategy.recipe(n), n) == pytest.approx(strategy.noising(n), abs=1e-11)
    assert strategy.buffers(n) == 1 + seed % 4


def test_coefficients_follow_their_definition():
    strategy = blt((0.4, 0.9), (0.1, 0.2), (0.5,), 3)
    plain = np.array([1.0] + [0.2 * 0.9 ** (i - 1) + 0.1 * 0.4 ** (i - 1) for i in range(1, 8)])
    expected = plain.copy()
    for i in range(3, 8):  # c = plain − 0.5·(c three steps ago)
        expected[i] -= 0.5 * expected[i - 3]
    assert strategy.coefficients(8) == pytest.approx(expected, rel=1e-13)
    assert strategy.decays == (0.9, 0.4)


def test_negative_inverse_decay_and_zero_decay_are_filters_too():
    for strategy in (blt((0.5,), (0.9,)), blt((0.6, 0.0), (0.3, 0.2))):
        assert strategy.noising(9) @ strategy.encoder(9) == pytest.approx(np.eye(9), abs=1e-12)


def test_poles_very_near_one_keep_their_digits():
    theta, hat = 1 - np.array([1e-8, 1e-4]), 1 - np.array([1e-6, 0.3])
    again, _ = inverse_parameters(theta, scales_from_poles(theta, hat))
    assert 1 - again == pytest.approx(1 - hat, rel=1e-8)


def test_a_million_steps_and_normalized_columns():
    assert blt(DECAYS, SCALES, (0.3, 0.1), 5000).coefficients(10**6).shape == (10**6,)
    strategy = blt((0.9, 0.3), (0.2, 0.1), normalized=30)
    assert np.linalg.norm(strategy.encoder(30), axis=0) == pytest.approx(np.ones(30))
    with pytest.raises(HorizonExceeded):
        strategy.encoder(31)


@pytest.mark.parametrize(
    "arguments",
    [
        {"decays": (), "scales": ()},
        {"decays": (0.5,), "scales": (0.1, 0.2)},
        {"decays": (1.0,), "scales": (0.1,)},
        {"decays": (-0.1,), "scales": (0.1,)},
        {"decays": (float("nan"),), "scales": (0.1,)},
        {"decays": (0.5, 0.5), "scales": (0.1, 0.1)},
        {"decays": (0.5,), "scales": (-0.1,)},
        {"decays": (0.5,), "scales": (1.6,)},
        {"decays": (0.5,), "scales": (0.1,), "taps": (0.3,)},
        {"decays": (0.5,), "scales": (0.1,), "lag": 4},
        {"decays": (0.5,), "scales": (0.1,), "taps": (3.0,), "lag": 4},
        {"decays": (0.5,), "scales": (0.1,), "taps": (float("inf"),), "lag": 4},
        {"decays": (0.5,), "scales": (0.1,), "gains": (1.0,), "normalized": 1},
    ],
)
def test_bad_values_are_refused_in_one_line(arguments):
    with pytest.raises(InvalidInput) as refused:
        blt(**arguments)
    assert "\n" not in str(refused.value)


def test_poles_that_do_not_interlace_are_refused():
    with pytest.raises(InvalidInput, match="interlace"):
        blt_from_poles((0.9, 0.8), (0.5, 0.3))


# ---- closed forms and their explicit twins


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("n", "k", "b"), [(28, 4, 7), (25, 4, 7), (28, 1, 0), (28, 2, 7), (9, 9, 1)]
)
def test_sensitivity_of_leftmost_pattern(seed, n, k, b):
    strategy = random_blt(seed)
    columns = strategy.encoder(n)[:, [s * b for s in range(k)]].sum(axis=1)
    value = forms.sensitivity_squared(*gaps(strategy), steps=n, participations=k, separation=b)
    assert value == pytest.approx(columns @ columns, rel=1e-11)


def test_sensitivity_over_very_many_participations_agrees_with_the_plain_sum():
    strategy = random_blt(3)
    n, b = 15_000, 3
    total = np.zeros(n)
    c = strategy.coefficients(n)
    for s in range(n // b):
        total[s * b :] += c[: n - s * b]
    value = forms.sensitivity_squared(*gaps(strategy), steps=n, participations=n // b, separation=b)
    assert value == pytest.approx(total @ total, rel=1e-9)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("offset", [0, 2, 6])
def test_gram_of_co_participating_columns(seed, offset):
    k, b = 4, 7
    strategy = random_blt(seed, taps=2, lag=b)
    matrix = strategy.encoder(k * b)[:, offset::b][:, ::-1]
    gram = forms.block_gram(
        *gaps(strategy), np.asarray(strategy.taps), blocks=k, length=b, offset=offset
    )
    assert gram == pytest.approx(matrix.T @ matrix, abs=1e-11)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("taps", [0, 2, 5])
@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_error_of_toeplitz_workloads(seed, taps, beta):
    n, lag = 31, 7
    strategy = random_blt(seed, taps=taps, lag=lag if taps else 0)
    rows = np.sum((momentum(beta).matrix(n) @ strategy.noising(n)) ** 2, axis=1)
    settings = {
        "steps": n, "momentum": beta, "taps": np.asarray(strategy.taps), "lag": strategy.lag
    }  # fmt: skip
    mean = forms.squared_error(*gaps(strategy), **settings)
    assert mean == pytest.approx(rows.mean(), rel=1e-10)


@pytest.mark.parametrize("decay", [0.9, 0.9 + 1e-9, 0.9 - 5e-6, 0.9 + 1.1e-5])
def test_momentum_equal_or_close_to_an_inverse_decay(decay):
    strategy = blt_from_poles((0.97, 0.8), (decay, 0.5))
    rows = np.sum((momentum(0.9).matrix(40) @ strategy.noising(40)) ** 2, axis=1)
    value = forms.squared_error(*gaps(strategy), steps=40, momentum=0.9)
    assert value == pytest.approx(rows.mean(), rel=1e-6)


def test_error_of_every_step_under_a_schedule():
    n, beta = 40, 0.8
    strategy = random_blt(5)
    workload = momentum(beta, learning_rates=cooldown(n))
    rows = np.sum((workload.matrix(n) @ strategy.noising(n)) ** 2, axis=1)
    values = forms.step_errors(*gaps(strategy), workload.rates(n), momentum=beta)
    assert values == pytest.approx(rows, rel=1e-9)


def test_weighted_sum_on_both_sides_of_its_series():
    for gap in (0.0, 1e-9, 1e-5, 1.9e-4, 2.1e-4, 1e-2, 0.7):
        i = np.arange(100)
        direct = np.sum((100 - i) * (1 - gap) ** i)
        assert forms.weighted(np.array(gap), 100) == pytest.approx(direct, rel=1e-11)


# ---- the O(n) functions with gains, and their gradients


@pytest.mark.parametrize(
    ("taps", "k", "b"), [(0, 1, 20), (0, 4, 5), (2, 4, 5), (3, 4, 5), (6, 4, 5)]
)
def test_error_with_gains_and_its_gradient(taps, k, b):
    n = k * b
    strategy = random_blt(7, 2, taps=taps, lag=b if taps else 0, n=n)
    rows = prefix().matrix(n) @ strategy.noising(n)
    parts = filter_from(unbounded(strategy))

    def value(v):
        return total_squared_error(
            v[:n], v[n : n + 2], v[n + 2 : n + 4], v[n + 4], v[n + 5 :], np.ones(n), lag=b
        )

    weights = np.asarray(strategy.taps)[: k - 1]
    v = np.concatenate(
        [1 / strategy.gain_values(n), parts.hat_decays, parts.nu, [parts.hat_kappa], weights]
    )
    total, pull = value(v)
    assert total == pytest.approx(np.sum(rows**2), rel=1e-10)
    *by_filter, _, by_taps = pull()
    gradient = np.concatenate([np.atleast_1d(part) for part in (*by_filter, by_taps)])
    expected = numeric(lambda x: value(x)[0], v)
    assert gradient == pytest.approx(expected, abs=1e-6 * np.abs(expected).max())


def test_encoder_series_and_its_gradient():
    rng = np.random.default_rng(5)
    strategy = random_blt(6, 2, taps=2, lag=5)
    parts = filter_from(unbounded(strategy))
    v = np.concatenate([parts.decays, parts.r, [parts.kappa], strategy.taps])

    def value(x):
        return encoder_series(x[:2], x[2:4], x[4], x[5:], steps=20, lag=5)

    c, pull = value(v)
    assert c == pytest.approx(strategy.coefficients(20), abs=1e-12)
    weights = rng.normal(size=20)
    gradient = np.concatenate([np.atleast_1d(part) for part in pull(weights)])
    assert gradient == pytest.approx(numeric(lambda x: weights @ value(x)[0], v), abs=1e-6)


def test_free_parameters_round_trip_and_cancelled_pairs_go():
    u = spaced(3, 1e-5, 0.6)
    gap, hat = poles(u)
    assert unbounded(blt_from_poles(1 - gap, 1 - hat)) == pytest.approx(u, rel=1e-6)
    mixed = np.stack([gap, hat], axis=-1).ravel()
    assert mixed == pytest.approx(np.geomspace(1e-5, 0.6, 6), rel=1e-10)
    few = without_cancelled(np.array([0.1, 0.2 * (1 + 1e-9)]), np.array([0.2, 0.5]))
    assert few == (pytest.approx([0.1]), pytest.approx([0.5]))
