"""Searches end on the safe side, and close to the edge."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noshuffle.accounting import calibrate
from noshuffle.errors import InvalidInput, Unsupported

ACCOUNTANTS = [("rdp", "poisson"), ("rdp", "fixed"), ("fourier", "poisson"), ("fourier", "fixed")]


@given(
    power=st.floats(0.5, 3),
    scale=st.floats(1e-3, 1e3),
    start=st.floats(1e-4, 1e4),
    jitter=st.floats(0, 1e-7),
)
@settings(max_examples=100, deadline=None)
def test_smallest(power: float, scale: float, start: float, jitter: float) -> None:
    """Also for functions that are only almost monotone."""

    def fn(x: float) -> float:
        return scale * x**-power * (1 + jitter * math.sin(1e9 * x))

    x = calibrate.smallest(fn, 1.0, start=start)
    assert fn(x) <= 1.0
    assert fn(x * (1 - 1e-5)) > 1.0 - 1e-6 or x == 1e-6


@given(edge=st.integers(1, 10**6), start=st.integers(1, 10**6))
@settings(max_examples=100, deadline=None)
def test_largest_whole(edge: int, start: int) -> None:
    assert calibrate.largest_whole(lambda n: n / edge, 1.0, start=start) == edge


def test_search_edges() -> None:
    assert calibrate.smallest(lambda x: 0.0, 1.0) == 1e-6
    assert calibrate.smallest(lambda x: math.inf if x < 2 else 0.5, 1.0) == pytest.approx(2)
    with pytest.raises(Unsupported, match="no value"):
        calibrate.smallest(lambda x: 2.0, 1.0)
    with pytest.raises(InvalidInput, match="NaN"):
        calibrate.smallest(lambda x: math.nan, 1.0)
    assert calibrate.largest_whole(lambda n: 0.0, 1.0, most=1000) == 1000
    with pytest.raises(Unsupported, match="too many"):
        calibrate.largest_whole(lambda n: 2.0, 1.0, start=50)


@pytest.mark.parametrize(("accountant", "sampling"), ACCOUNTANTS)
def test_sampled_searches_are_safe(accountant: str, sampling: str) -> None:
    how = {"accountant": accountant, "sampling": sampling, "delta": 1e-5}
    noise = calibrate.noise_multiplier(epsilon=2.0, rate=0.02, steps=200, tolerance=1e-4, **how)
    at = {"noise_multiplier": noise, "rate": 0.02, "steps": 200, **how}
    assert calibrate.epsilon(**at) <= 2.0
    assert calibrate.epsilon(**at | {"noise_multiplier": noise * 0.999}) > 2.0
    most = calibrate.steps(epsilon=2.0, noise_multiplier=noise, rate=0.02, **how)
    assert 200 <= most <= 203
    assert calibrate.epsilon(**at | {"steps": most}) <= 2.0
    assert calibrate.epsilon(**at | {"steps": most + 1}) > 2.0


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 50.0])
@pytest.mark.parametrize("steps", [1, 1000])
def test_exact_noise(epsilon: float, steps: int) -> None:
    args = {"delta": 1e-6, "steps": steps, "squared_sensitivity": 11.0}
    noise = calibrate.noise_multiplier(epsilon=epsilon, **args)
    assert calibrate.epsilon(noise_multiplier=noise, **args) <= epsilon
    assert calibrate.epsilon(noise_multiplier=noise * (1 - 1e-9), **args) > epsilon
    del args["steps"]
    assert calibrate.steps(epsilon=epsilon, noise_multiplier=noise, **args) == steps


def test_refusals() -> None:
    with pytest.raises(Unsupported, match="fourier"):
        calibrate.noise_multiplier(epsilon=1.0, delta=1e-5, rate=0.1)
    with pytest.raises(InvalidInput, match="accountant"):
        calibrate.noise_multiplier(epsilon=1.0, delta=1e-5, accountant="gdp", rate=0.1)
    with pytest.raises(InvalidInput, match="epsilon"):
        calibrate.noise_multiplier(epsilon=0.0, delta=1e-5)
    with pytest.raises(Unsupported, match="too many"):
        calibrate.steps(epsilon=0.1, delta=1e-5, noise_multiplier=0.5)
