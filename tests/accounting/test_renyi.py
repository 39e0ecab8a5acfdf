"""Rényi curves against slow twins: the signed series of the paper, signed finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_ndtr

from noshuffle.accounting import fourier, renyi, renyi_curves
from noshuffle.errors import InvalidInput


def signed_series(sigma: float, q: float, order: float, terms: int = 400) -> float:
    """Mironov, Talwar, Zhang (2019), section 3.3: two alternating series split at z."""
    z = sigma**2 * math.log(1 / q - 1) + 0.5
    total, binomial = 0.0, 1.0
    for i in range(terms):
        j = order - i
        for power, reach in ((i, z - i), (j, j - z)):
            log_term = (
                (order - power) * math.log1p(-q)
                + power * math.log(q)
                + power * (power - 1) / (2 * sigma**2)
                + float(log_ndtr(reach / sigma))
            )
            total += binomial * math.exp(log_term)
        binomial *= (order - i) / (i + 1)
    return math.log(total) / (order - 1)


@pytest.mark.parametrize(
    ("sigma", "q", "order"), [(1.0, 0.01, 2.5), (2.0, 0.05, 7.3), (0.8, 0.02, 4.7), (1.5, 0.1, 3.1)]
)
def test_fractional_orders_match_the_signed_series(sigma: float, q: float, order: float) -> None:
    fast = renyi.divergence(noise_multiplier=sigma, rate=q, order=order)
    assert fast == pytest.approx(signed_series(sigma, q, order), rel=1e-7)


@given(
    sigma=st.floats(0.2, 30),
    q=st.floats(-5, -0.05).map(lambda x: 10**x),
    order=st.integers(2, 60),
)
@settings(max_examples=60, deadline=None)
def test_quadrature_meets_the_finite_sum_at_whole_orders(
    sigma: float, q: float, order: int
) -> None:
    exact = renyi_curves._whole_order(sigma, q, order)
    assert renyi_curves._real_order(sigma, q, float(order)) == pytest.approx(exact, abs=1e-9)


@given(
    sigma=st.floats(-2.6, -2.1).map(lambda x: 10**x),
    q=st.floats(-5, -0.05).map(lambda x: 10**x),
    order=st.floats(1.05, 3.95),
)
@settings(max_examples=20, deadline=None)
def test_little_noise_is_not_below_the_integral(sigma: float, q: float, order: float) -> None:
    """Its points took gigabytes; without sampling it is larger by α/(α − 1)·log 1/q at most."""
    whole = renyi_curves.poisson(noise_multiplier=sigma, rate=1.0, order=order)
    exact = float(np.logaddexp(0.0, renyi_curves._real_order(sigma, q, order))) / (order - 1)
    assert exact <= whole * (1 + 1e-12)
    assert whole <= exact + order / (order - 1) * math.log(1 / q) + 1e-9 * whole


@pytest.mark.parametrize("order", [1.1, 2.0, 30.7])
def test_any_noise_has_a_divergence(order: float) -> None:
    for exponent in range(-200, 0, 7):
        found = renyi.divergence(noise_multiplier=10.0**exponent, rate=0.01, order=order)
        assert found <= order / 2 * 10.0 ** (-exponent) * 10.0 ** (-exponent) * (1 + 1e-12)


@pytest.mark.parametrize("sigma", [0.5, 0.8, 1.3])
def test_even_moments_match_signed_differences(sigma: float) -> None:
    moments = renyi_curves._even_moments(sigma, 8)
    for n in (2, 4, 6, 8):
        signed = math.fsum(
            (-1) ** (n - l) * math.comb(n, l) * math.exp(l * (l - 1) / (2 * sigma**2))
            for l in range(n + 1)
        )
        assert math.exp(moments[n // 2]) == pytest.approx(signed, rel=1e-8)


def test_composition_adds_and_order_does_not_matter() -> None:
    steps = [(1.0, 0.01, 100), (2.0, 1.0, 3), (1.0, 0.01, 50)]
    one = renyi.curve([(1.0, 0.01, 150)]) + renyi.curve([(2.0, 1.0, 3)])
    np.testing.assert_allclose(renyi.curve(steps), one, rtol=1e-12)
    assert renyi.compose_epsilon(steps, delta=1e-5) == renyi.compose_epsilon(
        steps[::-1], delta=1e-5
    )


def test_whole_numbers_and_numpy_scalars_are_not_dropped() -> None:
    """Another library forgets the count when the noise is an integer or a float32."""
    plain = renyi.epsilon(noise_multiplier=2.0, rate=0.01, steps=400, delta=1e-5)
    assert renyi.epsilon(noise_multiplier=2, rate=0.01, steps=400, delta=1e-5) == plain
    odd = renyi.epsilon(
        noise_multiplier=np.float32(2.0), rate=0.01, steps=np.int64(400), delta=1e-5
    )
    assert odd == plain


@given(
    sigma=st.floats(0.6, 10),
    q=st.floats(0.001, 0.9),
    steps=st.integers(1, 5000),
    delta=st.floats(-10, -3).map(lambda x: 10**x),
)
@settings(max_examples=8, deadline=None)
def test_delta_and_epsilon_are_inverse_and_above_the_lower_bound(
    sigma: float, q: float, steps: int, delta: float
) -> None:
    args = {"noise_multiplier": sigma, "rate": q, "steps": steps}
    epsilon = renyi.epsilon(**args, delta=delta)
    assert renyi.delta(**args, epsilon=epsilon) <= delta * (1 + 1e-9)
    assert renyi.epsilon(**args, delta=delta, real_orders=True) <= epsilon
    low = fourier.epsilon(**args, delta=delta, bound="lower")
    assert low <= epsilon * (1 + 1e-12)


def test_fixed_size_is_above_and_monotone() -> None:
    orders = renyi.DEFAULT_ORDERS
    loose = renyi_curves.fixed_size(noise_multiplier=1.0, rate=0.02, orders=orders)
    tight = renyi_curves.fixed_size(noise_multiplier=1.0, rate=0.01, orders=orders)
    assert np.all(tight < loose)
    assert np.all(tight <= np.array(orders) / 2)
    whole = renyi_curves.fixed_size(noise_multiplier=3.0, rate=1.0, orders=(2.0,))
    assert whole[0] == pytest.approx(1 / 9)


def test_refusals() -> None:
    with pytest.raises(InvalidInput, match="orders"):
        renyi.divergence(noise_multiplier=1.0, order=1.0)
    with pytest.raises(InvalidInput, match="noise_multiplier"):
        renyi.epsilon(noise_multiplier=0.0, delta=1e-5)
    with pytest.raises(InvalidInput, match="steps"):
        renyi.epsilon(noise_multiplier=1.0, delta=1e-5, steps=0)
    with pytest.raises(InvalidInput, match="steps"):
        renyi.epsilon(noise_multiplier=1.0, delta=1e-5, steps=10**12)
    with pytest.raises(InvalidInput, match="conversion"):
        renyi.epsilon(noise_multiplier=1.0, delta=1e-5, conversion="moments")
    with pytest.raises(InvalidInput, match="sampling"):
        renyi.epsilon(noise_multiplier=1.0, delta=1e-5, sampling="shuffle")
    with pytest.raises(InvalidInput, match="not both"):
        renyi.epsilon(noise_multiplier=1.0, delta=1e-5, orders=(2.0,), real_orders=True)
    with pytest.raises(InvalidInput, match="at least one"):
        renyi.compose_epsilon([], delta=1e-5)
