"""Recursions by band matrices against SciPy's filters, in one block and in many."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.signal import fftconvolve, lfilter

from noshuffle.strategies import recursions
from noshuffle.strategies.recursions import convolve, decaying, divided


@pytest.mark.parametrize("order", [0, 1, 7, 40, 300])
@pytest.mark.parametrize("entries", [2**21, 50])
def test_quotients_are_those_of_a_filter(
    monkeypatch: pytest.MonkeyPatch, order: int, entries: int
) -> None:
    monkeypatch.setattr(recursions, "_ENTRIES", entries)
    rng = np.random.default_rng(order)
    c, x = rng.normal(size=order + 1) / (1 + np.arange(order + 1)) ** 2, rng.normal(size=200)
    c[0] = 2.0
    np.testing.assert_allclose(divided(x, c), lfilter([1.0], c, x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.7, -0.3, 1.0])
def test_one_decay(decay: float) -> None:
    x = np.random.default_rng(1).normal(size=300)[::-1]
    before = x.copy()
    np.testing.assert_allclose(decaying(x, decay), lfilter([1.0], [1.0, -decay], x), rtol=1e-9)
    np.testing.assert_array_equal(x, before)


def test_what_has_died_out_is_zero_until_something_comes() -> None:
    x = np.zeros(20_000)
    x[[0, 15_000]] = 1.0
    found = divided(x, np.array([1.0, -0.5]))
    assert found[15_001] == 0.5
    x[15_000] = 0.0
    assert not divided(x, np.array([1.0, -0.5]))[8192:].any()


@pytest.mark.parametrize(("a", "b"), [(3, 500), (200, 100), (400, 400)])
def test_products(a: int, b: int) -> None:
    rng = np.random.default_rng(a)
    x, y = rng.normal(size=a), rng.normal(size=b)
    for n in (50, 300, 1200):
        whole = np.zeros(max(n, a + b))
        whole[: a + b - 1] = fftconvolve(x, y)
        np.testing.assert_allclose(convolve(x, y, n), whole[:n], atol=1e-12)
