"""Square-root, banded and banded-inverse strategies against their power series."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from noshuffle.errors import HorizonExceeded, InvalidInput
from noshuffle.strategies import banded, banded_inverse, momentum, sqrt_toeplitz
from noshuffle.strategies.recipe import FeedForward, Recursive
from noshuffle.strategies.toeplitz import root_coefficients


def multiply(a, b):
    """Product of two power series, one term at a time."""
    return np.array([math.fsum(a[j] * b[i - j] for j in range(i + 1)) for i in range(len(a))])


def test_square_root_coefficients_are_central_binomials():
    exact = [float(Fraction(math.comb(2 * i, i), 4**i)) for i in range(60)]
    np.testing.assert_allclose(sqrt_toeplitz().coefficients(60), exact, rtol=1e-13)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.9, 0.95])
@pytest.mark.parametrize("alpha", [1.0, 0.999, 0.7])
def test_square_of_the_root_is_the_workload(alpha, beta):
    n = 80
    c = sqrt_toeplitz(momentum=beta, decay=alpha).coefficients(n)
    workload = multiply(alpha ** np.arange(n), beta ** np.arange(n))
    np.testing.assert_allclose(multiply(c, c), workload, rtol=1e-11)
    if alpha == 1.0:
        np.testing.assert_allclose(multiply(c, c), momentum(beta).coefficients(n), rtol=1e-11)
    inverse = sqrt_toeplitz(momentum=beta, decay=alpha).noising_coefficients(n)
    np.testing.assert_allclose(multiply(c, inverse), np.eye(n)[0], atol=1e-12)


@pytest.mark.parametrize("beta", [0.4, 0.9])
def test_momentum_root_is_the_product_of_two_plain_roots(beta):
    n = 50
    r = root_coefficients(n, sign=-1)
    product = multiply(r, r * beta ** np.arange(n))
    got = sqrt_toeplitz(momentum=beta).coefficients(n)
    np.testing.assert_allclose(got, product, rtol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_shortest_runs(n, beta):
    strategy = sqrt_toeplitz(momentum=beta)
    assert strategy.coefficients(n).shape == (n,)
    np.testing.assert_allclose(strategy.noising(n) @ strategy.encoder(n), np.eye(n), atol=1e-15)


def test_truncations_keep_the_first_coefficients():
    full = sqrt_toeplitz()
    np.testing.assert_array_equal(sqrt_toeplitz(4).coefficients(9)[:4], full.coefficients(4))
    assert not sqrt_toeplitz(4).coefficients(9)[4:].any()
    d = banded_inverse(4).noising_coefficients(9)
    np.testing.assert_array_equal(d[:4], full.noising_coefficients(4))
    assert not d[4:].any()
    np.testing.assert_allclose(multiply(banded_inverse(4).coefficients(9), d), np.eye(9)[0])


def test_recipes_and_buffers():
    assert isinstance(sqrt_toeplitz().recipe(10), FeedForward)
    assert len(sqrt_toeplitz().recipe(10).weights) == 10
    assert sqrt_toeplitz().buffers(10) == 0
    assert isinstance(sqrt_toeplitz(4).recipe(10), Recursive)
    assert sqrt_toeplitz(4).buffers(10) == 3
    assert sqrt_toeplitz(4).buffers(2) == 1
    assert isinstance(banded_inverse(4).recipe(10), FeedForward)
    assert banded_inverse(4).buffers(10) == 0
    assert banded([1.0, 0.5, 0.2]).recipe(10) == Recursive(weights=(1.0, -0.5, -0.2))
    assert banded([2.0, 1.0]).recipe(10) == Recursive(weights=(0.5, -0.5))
    assert banded([1.0, 0.5, 0.2]).buffers(10) == 2


def test_coefficients_stay_sound_over_a_million_steps():
    c = sqrt_toeplitz().coefficients(10**6)
    assert np.all(np.diff(c) < 0)
    assert c[-1] == pytest.approx(1 / math.sqrt(math.pi * (10**6 - 0.75)), rel=1e-10)


def test_normalized_columns_have_norm_one():
    strategy = sqrt_toeplitz(normalized=30)
    np.testing.assert_allclose(np.linalg.norm(strategy.encoder(30), axis=0), 1.0, rtol=1e-14)
    with pytest.raises(HorizonExceeded, match="30 steps, 31"):
        strategy.encoder(31)


@pytest.mark.parametrize(
    "build",
    [
        lambda: banded([]),
        lambda: banded([0.0, 1.0]),
        lambda: banded([-1.0]),
        lambda: banded([1.0, math.nan]),
        lambda: banded([math.inf]),
        lambda: banded(["one"]),
        lambda: banded(3),
        lambda: banded_inverse(),
        lambda: banded_inverse(2, coefficients=[1.0]),
        lambda: banded_inverse(coefficients=[-1.0, 1.0]),
        lambda: banded_inverse(0),
        lambda: banded_inverse(2.5),
        lambda: sqrt_toeplitz(0),
        lambda: sqrt_toeplitz(-3),
        lambda: sqrt_toeplitz(10**12),
        lambda: sqrt_toeplitz(momentum=1.0),
        lambda: sqrt_toeplitz(momentum=math.nan),
        lambda: sqrt_toeplitz(decay=1.5),
        lambda: sqrt_toeplitz(normalized=-1),
        lambda: sqrt_toeplitz(gains=(1.0, 0.0)),
        lambda: banded([1.0], gains=(1.0,), normalized=1),
    ],
)
def test_bad_input_is_one_line(build):
    with pytest.raises(InvalidInput) as caught:
        build()
    assert "\n" not in str(caught.value)
