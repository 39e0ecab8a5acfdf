"""The normal streams: their law, and that a number depends on its own address only."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from noshuffle.errors import InvalidInput
from noshuffle.noise import Source, new_key, test_source
from noshuffle.noise.gaussian import COSINE, LARGEST, LOG, SINE, TILE, normals_

KINDS = ("aes", "philox")
SCALES = (2 / 3, 3 / 2)


def draw(source: Source, size: int, *, row: int = 0, name: str = "w", start: int = 0) -> np.ndarray:
    out = torch.empty(size)
    source.normal_(out, row=row, name=name, start=start)
    return out.double().numpy()


@pytest.fixture(scope="module", params=KINDS)
def sample(request: pytest.FixtureRequest) -> np.ndarray:
    return draw(test_source(seed="law", kind=request.param), 1 << 20)


def looks_normal(z: np.ndarray) -> bool:
    """Moments within five standard errors, and Kolmogorov–Smirnov at 10^-4."""
    n = len(z)
    errors = [z.mean() * math.sqrt(n), (z.var() - 1) * math.sqrt(n / 2)]
    errors += [(z**3).mean() * math.sqrt(n / 15), ((z**4).mean() - 3) * math.sqrt(n / 96)]
    return max(map(abs, errors)) < 5 and stats.kstest(z, "norm").pvalue > 1e-4


def test_the_law_is_standard_normal(sample: np.ndarray) -> None:
    assert looks_normal(sample)
    assert not any(looks_normal(scale * sample) for scale in SCALES)


def test_halves_of_a_tile_are_each_normal_and_unrelated(sample: np.ndarray) -> None:
    """Sines and cosines share a radius; they must still be independent, squares included."""
    tiles = sample.reshape(-1, 2, TILE // 2)
    sines, cosines = tiles[:, 0].ravel(), tiles[:, 1].ravel()
    assert looks_normal(sines)
    assert looks_normal(cosines)
    root = math.sqrt(len(sines))
    assert abs(np.corrcoef(sines, cosines)[0, 1]) * root < 5
    assert abs(np.corrcoef(sines**2, cosines**2)[0, 1]) * root < 5


@pytest.mark.parametrize("lag", [1, 2, 4, 255, 256, 512, 1024])
def test_no_correlation_along_a_stream(sample: np.ndarray, lag: int) -> None:
    assert abs((sample[lag:] * sample[:-lag]).mean()) * math.sqrt(len(sample) - lag) < 5


def test_tails(sample: np.ndarray) -> None:
    """Exceedance counts at 2 to 4.5 are Poisson around what a normal gives; none is infinite."""
    n = len(sample)
    for level in (2.0, 3.0, 4.0, 4.5):
        for side in (sample, -sample):
            expected = n * stats.norm.sf(level)
            assert stats.poisson.cdf((side > level).sum(), expected) > 1e-5
            assert stats.poisson.sf((side > level).sum() - 1, expected) > 1e-5
    assert np.abs(sample).max() <= LARGEST


def test_extreme_words_give_the_documented_extremes() -> None:
    """Word 0 and −1 are the smallest |u|, the ends the largest; all finite, none beyond 7.99."""
    edge = [0, -1, 1, -2, 2**31 - 1, -(2**31), 2**30, -(2**30)]
    words = torch.zeros(1, TILE, dtype=torch.int32)
    words[0, :512] = torch.tensor(edge).repeat(64)
    words[0, 512:] = torch.tensor(edge).repeat_interleave(64)
    out = torch.empty(1, TILE)
    normals_(out, words=words)
    assert bool(torch.isfinite(out).all())
    assert float(out.abs().max()) == pytest.approx(LARGEST, rel=1e-6)
    assert stats.norm.sf(LARGEST) * 2 == pytest.approx(1 / 7e14, rel=0.05)


@pytest.mark.parametrize("word", [0, -1, 2, -9, 60])
def test_radii_of_the_far_tail_have_no_gaps(word: int) -> None:
    """Both numbers of a pair are released: circles wider apart than the grid rule sums out."""
    words = torch.full((200, TILE), word, dtype=torch.int32)
    words[:, 512:] = torch.randint(-(2**31), 2**31, (200, 512), generator=seeded(word))
    out = torch.empty(200, TILE)
    normals_(out, words=words)
    radii = np.sort(np.hypot(*out.double().numpy().reshape(200, 2, 512).transpose(1, 0, 2)).ravel())
    ends = [math.sqrt(-2 * math.log(abs(word + end) / 2**31)) for end in (2**-6, 1 - 2**-6)]
    inside = radii[(radii > min(ends)) & (radii < max(ends))]
    assert len(inside) > 50_000
    assert np.diff(inside).max() < 2.0**-10


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed + 100)


def float64_twin(words: np.ndarray) -> np.ndarray:
    """Box–Muller as the module states it, with the library's functions in float64."""
    fraction = ((words[:, 512:] * 0x9E3779B1 % 2**32 >> 18) + 0.5) / 2**14
    u = (words[:, :512] + fraction) / 2**31
    radius = np.sign(u) * np.sqrt(-np.log(u**2))
    angle = np.pi * words[:, 512:] / 2**32
    return np.concatenate([radius * np.sin(angle), radius * np.cos(angle)], axis=1)


def test_the_transform_equals_its_float64_twin() -> None:
    rng = np.random.default_rng(0)
    words = rng.integers(-(2**31), 2**31, size=(30, TILE))
    words[0, :512] >>= 24  # the far tail: tiny |u|
    out = torch.empty(30, TILE)
    normals_(out, words=torch.tensor(words, dtype=torch.int32), weight=1.7)
    error = np.abs(out.numpy() - 1.7 * float64_twin(words))
    # A u near 1 is rounded to float32 (6e-8), which moves its small radius by up to 4e-4.
    assert error.max() < 6e-4
    assert np.quantile(error, 0.99) < 1e-6
    assert error[0].max() < 4e-6


def test_the_radius_is_within_three_units_of_the_true_one() -> None:
    """And the angle too: of words that float32 holds, so that nothing but the evaluation errs."""
    rng = np.random.default_rng(3)
    words = rng.integers(-(2**23), 2**23, size=(60, TILE)) << rng.integers(0, 8, size=(60, TILE))
    words[:, 512:] = rng.integers(-(2**23), 2**23, size=(60, 512)) << 8
    out = torch.empty(60, TILE)
    normals_(out, words=torch.tensor(words, dtype=torch.int32))
    true = float64_twin(words)
    sines, cosines = true[:, :512], true[:, 512:]
    radius = np.hypot(sines, cosines)
    assert (np.abs(out.numpy()[:, :512] - sines) / radius).max() < 6 * 2**-24
    assert (np.abs(out.numpy()[:, 512:] - cosines) / radius).max() < 6 * 2**-24


def polynomial(x: np.ndarray, coefficients: tuple[float, ...]) -> np.ndarray:
    return sum((c * x**k for k, c in enumerate(coefficients)), np.zeros_like(x))


def test_the_polynomials_hold_what_they_promise() -> None:
    a = np.linspace(1e-6, 0.5, 10_001)
    t = a**2 + 0.125
    assert np.abs(a * polynomial(t, SINE) / np.sin(np.pi * a) - 1).max() < 6e-9
    assert np.abs(polynomial(t, COSINE) - np.cos(np.pi * a)).max() < 5e-8
    f = np.linspace(-0.5, -1e-6, 10_001)
    assert np.abs(f * polynomial(f, LOG) / (-2 * np.log1p(f)) - 1).max() < 1.6e-7
    assert all(np.float32(c) == c for c in (*SINE, *COSINE, *LOG))


def last_place(value: float) -> int:
    """The exponent of the last binary place of a float32."""
    return math.frexp(value)[1] - 24


@pytest.mark.parametrize(
    ("coefficients", "low", "high", "place"),
    [(SINE, 0.125, 0.375, -26), (COSINE, 0.125, 0.375, -26), (LOG, -0.5, -(2.0**-24), -24)],
)
def test_float64_holds_every_fused_sum(
    coefficients: tuple[float, ...], low: float, high: float, place: int
) -> None:
    """Places of a·b + c in Horner's rule: from the last one of a·b to the first of the sum.

    x is a multiple of 2^place; partial sums keep away from zero, so their last place is known.
    """
    x = np.linspace(low, high, 100_001)
    value = np.full_like(x, coefficients[-1])
    for c in coefficients[-2::-1]:
        last = last_place(float(np.abs(value).min()) * (1 - 1e-6)) + place
        assert last <= last_place(c)
        value = value * x + c
        first = math.frexp(float(np.abs(value).max()) * (1 + 1e-6))[1]
        assert first - last <= 53
    if coefficients is LOG:
        last = last_place(float(np.abs(value).min()) * (1 - 1e-6)) + place
        assert math.frexp(92 * math.log(2))[1] - last <= 53


def test_the_square_of_an_angle_may_be_rounded_twice() -> None:
    """fl32(fl64(a² + ⅛)) = fl32(a² + ⅛) for every float32 a up to ½.

    They can differ only if a² + ⅛ is so near to the middle of two float32 numbers that float64
    takes it for the middle. All middles are tried, with the two a next to each.
    """
    low, high = 2**23, 2**24
    close = closer = 0
    for s in range(28, 57):  # a = n/2^s with 2^23 ≤ n < 2^24; for s below 28 float64 has room
        unit = -26  # of float32 below ¼, where all of these sums lie
        first, last = (low * low >> 2 * s + unit - 1) | 1, (high * high >> 2 * s + unit - 1) + 2
        for middle in range(first, last, 2):  # (a² in units of 2^(unit − 1)) is an odd number
            target = middle << 2 * s + unit - 1
            n = math.isqrt(target)
            for candidate in (n, n + 1):
                distance = abs(candidate * candidate - target)
                if low <= candidate < high and distance:
                    close += distance << 20 - unit <= 1 << 2 * s
                    closer += distance << 30 - unit <= 1 << 2 * s
    assert close > 100  # within a thousand times what float64 can tell apart, the search finds some
    assert closer == 0


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(KINDS), st.integers(0, 70_000), st.integers(1, 5_000), st.integers(0, 2**31))
def test_a_shard_is_a_part_of_the_whole(kind: str, start: int, size: int, row: int) -> None:
    source = test_source(seed="shards", kind=kind)
    whole = draw(source, 75_000, row=row)
    np.testing.assert_array_equal(
        draw(source, size, row=row, start=start), whole[start : start + size]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_order_and_threads_do_not_matter(kind: str) -> None:
    source = test_source(seed="order", kind=kind)
    jobs = [(row, name) for row in range(4) for name in ("a", "b", "ü", "a.b")]
    first = {job: draw(source, 3000, row=job[0], name=job[1]) for job in jobs}
    with ThreadPoolExecutor(4) as pool:
        again = pool.map(lambda job: draw(source, 3000, row=job[0], name=job[1]), jobs[::-1])
        for job, value in zip(jobs[::-1], again):
            np.testing.assert_array_equal(value, first[job])
    flat = [value.tobytes() for value in first.values()]
    assert len(set(flat)) == len(jobs)


def test_the_number_of_torch_threads_does_not_matter() -> None:
    before = torch.get_num_threads()
    try:
        drawn = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            drawn.append(draw(test_source(seed=1), 200_001))
    finally:
        torch.set_num_threads(before)
    np.testing.assert_array_equal(drawn[0], drawn[1])
    np.testing.assert_array_equal(drawn[0], drawn[2])


@pytest.mark.parametrize("kind", KINDS)
def test_streams_of_rows_names_keys_and_kinds_are_uncorrelated(kind: str) -> None:
    n = 100_000
    base = draw(test_source(seed=1, kind=kind), n)
    others = [
        draw(test_source(seed=1, kind=kind), n, row=1),
        draw(test_source(seed=1, kind=kind), n, name="v"),
        draw(test_source(seed=2, kind=kind), n),
        draw(test_source(seed=1, kind="aes" if kind == "philox" else "philox"), n),
    ]
    for other in others:
        assert abs((base * other).mean()) * math.sqrt(n) < 5


def test_golden_values_hold_across_versions() -> None:
    """Frozen first numbers: a change here makes old runs impossible to resume."""
    for kind, expected in GOLDEN.items():
        got = draw(
            test_source(seed="golden", kind=kind), 3, row=12, name="layer.weight", start=1022
        )
        np.testing.assert_array_equal(got, expected)


GOLDEN = {
    "aes": (-0.9502289295196533, -0.6299509406089783, -1.8947629928588867),
    "philox": (0.063896544277668, -1.510346531867981, 0.14402985572814941),
}


def test_keys() -> None:
    assert len(new_key()) == 32
    assert new_key() != new_key()
    real = Source(key=new_key())
    assert not real.is_test
    assert test_source(seed=3).is_test
    assert real.key.hex() not in repr(real)
    assert repr(real.key) not in repr(real)
    assert real.fingerprint == Source(key=real.key, kind="philox").fingerprint
    assert real.fingerprint != Source(key=new_key()).fingerprint
    assert bytes.fromhex(real.fingerprint) not in real.key


def test_auto_takes_aes_in_memory_and_philox_on_an_accelerator() -> None:
    source = test_source(seed=3)
    assert source.on(torch.device("cpu")).kind == "aes"
    assert source.on(torch.device("cuda")).kind == "philox"
    np.testing.assert_array_equal(draw(source, 10), draw(test_source(seed=3, kind="aes"), 10))


def test_bad_input_is_refused_in_one_line() -> None:
    source = test_source(seed=3)
    with pytest.raises(InvalidInput, match="contiguous float32"):
        source.normal_(torch.empty(4, dtype=torch.float64), row=0, name="w")
    with pytest.raises(InvalidInput, match="contiguous float32"):
        source.normal_(torch.empty(4, 4).t(), row=0, name="w")
    with pytest.raises(InvalidInput, match="start of 'w'"):
        source.normal_(torch.empty(4), row=0, name="w", start=-1)
    with pytest.raises(InvalidInput, match="kind must be one of"):
        test_source(seed=3, kind="mersenne")
    with pytest.raises(InvalidInput, match="32 bytes"):
        Source(key=b"short")
    source.normal_(torch.empty(0), row=0, name="w")
    scalar = torch.empty(())
    source.normal_(scalar, row=0, name="w")
    assert float(scalar) == draw(source, 1)[0]
