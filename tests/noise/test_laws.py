"""Laws from keyed words: distributions, tails, keys, the grid, and one owner."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
from scipy.stats import kstest

from noshuffle.errors import Unsupported
from noshuffle.noise import NoiseStream, Source, new_key
from noshuffle.noise import test_source as source_of
from noshuffle.noise.grid import grid_step
from noshuffle.noise.laws import KeyedDraws
from noshuffle.strategies import identity


def draws(seed: object = 0, name: str = "laws") -> KeyedDraws:
    return KeyedDraws(source_of(seed=str(seed)), name=name)


LAWS = {
    "uniform": (lambda d, n: d.random(n), "uniform", ()),
    "exponential": (lambda d, n: d.exponential(2.0, n), "expon", (0, 2.0)),
    "laplace": (lambda d, n: d.laplace(0.5, 2.0, n), "laplace", (0.5, 2.0)),
    "gumbel": (lambda d, n: d.gumbel(0.5, 2.0, n), "gumbel_r", (0.5, 2.0)),
    "normal": (lambda d, n: d.standard_normal(n), "norm", ()),
    "gamma 0.05": (lambda d, n: d.standard_gamma(0.05, n), "gamma", (0.05,)),
    "gamma 1": (lambda d, n: d.standard_gamma(1.0, n), "gamma", (1.0,)),
    "gamma 20": (lambda d, n: d.gamma(20, 2.0, n), "gamma", (20, 0, 2.0)),
}


@pytest.mark.parametrize("law", LAWS)
def test_law(law: str) -> None:
    """Kolmogorov–Smirnov at 1e-7, at the right scale and not at two thirds of it."""
    fn, dist, args = LAWS[law]
    found = fn(draws(law), 40_000)
    assert kstest(found, dist, args=args).pvalue > 1e-7
    assert kstest(found * 2 / 3, dist, args=args).pvalue < 1e-7
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 6 / math.sqrt(40_000)


def test_a_uniform_keeps_its_digits_near_zero() -> None:
    """A word of zeros is no zero, and the second word fills what the first leaves open."""
    made = draws()
    for high, low, expected in (
        (0, 0, 2.0**-129),
        (0, 2**63, 2.0**-65),
        (2**64 - 1, 0, 1 - 2.0**-53),
    ):
        made._left = np.array([high, low], dtype=np.uint64)
        assert made.random(1)[0] == pytest.approx(expected, rel=1e-12)
    made._left = np.array([2**64 - 1] * 4, dtype=np.uint64)
    assert np.all(made.random(2) < 1)


def test_coins_and_integers() -> None:
    made = draws()
    for rate in (0.01, 0.3, 1.0):
        share = made.coins(rate, 40_000).mean()
        assert abs(share - rate) <= 6 * math.sqrt(rate * (1 - rate) / 40_000)
    counts = np.bincount([made.integers(2, 7) for _ in range(5000)], minlength=7)
    assert counts[:2].tolist() == [0, 0]
    assert np.all(np.abs(counts[2:] - 1000) < 6 * math.sqrt(800))


def test_words_depend_on_key_and_name_and_are_used_once() -> None:
    same = [draws(1).random(3000) for _ in range(2)]
    np.testing.assert_array_equal(*same)
    pieces = draws(1)
    cut = np.concatenate([pieces.random(1), pieces.random(2)])
    assert len(np.unique(np.concatenate([cut, pieces.random(5000)]))) == 5003
    assert not np.intersect1d(same[0], draws(2).random(3000)).size
    assert not np.intersect1d(same[0], draws(1, name="other").random(3000)).size
    keys = [KeyedDraws(Source(new_key()), name="laws") for _ in range(2)]
    assert not np.intersect1d(*(k.random(100) for k in keys)).size
    assert draws().is_test
    assert not keys[0].is_test


def test_a_release_is_on_the_grid_and_near_the_sum() -> None:
    made, value = draws(), np.linspace(-3, 3, 4000)
    noise = made.laplace(0.0, 0.7, 4000)
    out = made.release(value, noise, scale=0.7)
    step = grid_step(0.7)
    assert np.array_equal(out / step, np.rint(out / step))
    off = (out - value - noise) / step
    assert np.abs(off).max() <= 1
    # A hat of variance at most 1/6 around the real number: unbiased, not rounded to nearest.
    assert abs(off.mean()) < 6 * math.sqrt(1 / 6 / 4000)
    assert np.abs(off).max() > 0.6
    np.testing.assert_array_equal(made.release(value, 0 * value, scale=0.0), value)


def test_it_has_one_owner() -> None:
    with pytest.raises(Unsupported, match="neither copied nor pickled"):
        copy.deepcopy(draws())


def test_its_words_are_not_those_of_a_noise_stream() -> None:
    """Normals of a stream and of the laws under one key are unrelated (names differ)."""
    import torch

    source, n = source_of(seed=5), 20_000
    stream = NoiseStream(identity().recipe(1), source, {"a": (n,)}, scale=1.0, steps=1)
    value = torch.zeros(n)
    stream.add_({"a": value})
    other = KeyedDraws(source, name="b").standard_normal(n)
    assert abs(np.corrcoef(value.numpy(), other)[0, 1]) < 6 / math.sqrt(n)
