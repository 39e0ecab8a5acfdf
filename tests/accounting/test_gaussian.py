"""The exact Gaussian curve: against many digits, at the edges, and on the safe side."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noshuffle.accounting import gaussian, renyi
from noshuffle.errors import InvalidInput

MU = st.floats(-6, 3).map(lambda x: 10**x)
DELTA = st.floats(-299, -0.302).map(lambda x: 10**x)
EPSILON = st.floats(-6, 5).map(lambda x: 10**x)


def slow_log_delta(mu: float, epsilon: float) -> float:
    """The textbook formula with as many digits as it takes."""
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(80):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        value = mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)
        return float(mpmath.log(value))


@pytest.mark.parametrize("mu", [1e-6, 1e-3, 0.1, 0.7, 3.0, 12.0, 60.0])
@pytest.mark.parametrize("deviations", [-6.0, -2.0, 0.0, 1.5, 6.0, 20.0, 36.0])
def test_log_delta_matches_many_digits(mu: float, deviations: float) -> None:
    epsilon = mu * (deviations + mu / 2)
    if epsilon < 0:
        pytest.skip("no such epsilon")
    slow = slow_log_delta(mu, epsilon)
    assert gaussian.log_delta(mu=mu, epsilon=epsilon) == pytest.approx(slow, abs=1e-12, rel=1e-12)


@given(mu=MU, delta=DELTA)
@settings(max_examples=150, deadline=None)
def test_epsilon_is_on_the_safe_side_and_tight(mu: float, delta: float) -> None:
    epsilon = gaussian.epsilon(mu=mu, delta=delta)
    assert gaussian.log_delta(mu=mu, epsilon=epsilon) <= math.log(delta)
    if epsilon > 0:
        less = epsilon * (1 - 1e-9) - 1e-12 * mu
        assert gaussian.log_delta(mu=mu, epsilon=max(less, 0.0)) > math.log(delta) - 1e-9


@given(epsilon=EPSILON, delta=DELTA)
@settings(max_examples=150, deadline=None)
def test_mu_is_on_the_safe_side_and_inverts(epsilon: float, delta: float) -> None:
    mu = gaussian.mu(epsilon=epsilon, delta=delta)
    assert gaussian.log_delta(mu=mu, epsilon=epsilon) <= math.log(delta)
    back = gaussian.epsilon(mu=mu, delta=delta)
    slope = math.exp(gaussian.log_delta(mu=mu, epsilon=0.0))  # ill-conditioned as δ nears δ(0)
    assert back == pytest.approx(epsilon, rel=1e-9, abs=1e-12 * max(slope, mu))


@given(mu=MU, delta=DELTA, factor=st.floats(1.001, 3))
@settings(max_examples=60, deadline=None)
def test_monotone(mu: float, delta: float, factor: float) -> None:
    here = gaussian.epsilon(mu=mu, delta=delta)
    assert gaussian.epsilon(mu=mu * factor, delta=delta) >= here
    assert gaussian.epsilon(mu=mu, delta=min(delta * factor, 0.99)) <= here


@given(sigma=st.floats(0.05, 50), delta=st.floats(-12, -2).map(lambda x: 10**x))
@settings(max_examples=60, deadline=None)
def test_exact_below_cks_below_classical(sigma: float, delta: float) -> None:
    exact = gaussian.epsilon(mu=1 / sigma, delta=delta)
    real = renyi.epsilon(noise_multiplier=sigma, delta=delta, real_orders=True)
    cks = renyi.epsilon(noise_multiplier=sigma, delta=delta)
    classical = renyi.epsilon(noise_multiplier=sigma, delta=delta, conversion="classical")
    assert exact <= real <= cks * (1 + 1e-12)
    assert cks <= classical


def test_edges() -> None:
    assert gaussian.epsilon(mu=0, delta=1e-5) == 0
    assert gaussian.delta(mu=0, epsilon=0) == 0
    assert gaussian.log_delta(mu=0, epsilon=1) == -math.inf
    assert gaussian.epsilon(mu=1e-9, delta=1e-5) == 0
    assert gaussian.mu(epsilon=0, delta=0.5) == pytest.approx(1.3489795003921634)
    assert gaussian.delta(mu=1e6, epsilon=1.0) == 1
    assert gaussian.epsilon(mu=1e5, delta=1e-5) == pytest.approx(5e9 + 1e5 * 4.2649, rel=1e-8)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0, math.nan])
def test_delta_outside_the_open_interval_is_refused(delta: float) -> None:
    with pytest.raises(InvalidInput, match="strictly between 0 and 1"):
        gaussian.epsilon(mu=1.0, delta=delta)
    with pytest.raises(InvalidInput, match="strictly between 0 and 1"):
        gaussian.mu(epsilon=1.0, delta=delta)


@pytest.mark.parametrize("bad", [-1.0, math.inf, math.nan, "1", True])
def test_bad_mu_and_epsilon_are_refused(bad: float) -> None:
    with pytest.raises(InvalidInput):
        gaussian.epsilon(mu=bad, delta=1e-5)
    with pytest.raises(InvalidInput):
        gaussian.mu(epsilon=bad, delta=1e-5)
    with pytest.raises(InvalidInput):
        gaussian.delta(mu=bad, epsilon=1.0)


def test_an_epsilon_beyond_the_range_of_numbers_is_refused_by_its_name() -> None:
    assert math.isfinite(gaussian.mu(epsilon=1e300, delta=1e-5))
    with pytest.raises(InvalidInput, match=r"^epsilon must be at most"):
        gaussian.mu(epsilon=1e308, delta=1e-5)


@pytest.mark.parametrize(
    ("mu", "delta"), [(9634.622863274148, 1.8309650849063458e-63), (8371.46, 2.2e-308), (1e5, 1e-9)]
)
def test_epsilon_covers_the_rounding_of_large_terms(mu: float, delta: float) -> None:
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(120):
        m, e = mpmath.mpf(mu), mpmath.mpf(gaussian.epsilon(mu=mu, delta=delta))
        true = mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)
        assert true <= delta
