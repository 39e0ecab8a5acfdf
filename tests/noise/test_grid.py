"""The grid of what is released: exact arithmetic, fair coins, and attacks on low bits that fail."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chi2
from torch import Tensor

from noshuffle.errors import InvalidInput
from noshuffle.noise import NoiseStream, c_step, grid, test_source
from noshuffle.noise.gaussian import HALF, TILE, normals_
from noshuffle.noise.grid import MOST_SPREAD, add_on_grid_, grid_step, jitters_
from noshuffle.noise.layout import Layout
from noshuffle.noise.step_plan import StepPlans, grid_of
from noshuffle.strategies.recipe import Buffered, FeedForward, Forest, Recipe, Recursive, Rows

GAINS = tuple(1.0 / (1 + 0.3 * t) for t in range(12))
RECIPES: dict[str, Recipe] = {
    "identity": FeedForward((1.0,), scale=GAINS),
    "banded inverse": FeedForward((1.0, -0.5, 0.0, -0.1), scale=GAINS),
    "banded": Recursive((0.3, -0.4, 0.2)),
    "blt": Buffered((0.95, 0.6), (-0.1, -0.3)),
    "taps": Buffered((0.9,), (-0.2,), ((3, 0.3), (0, 1.0)), GAINS, GAINS[::-1]),
    "dense": Rows(np.tril(np.random.default_rng(0).standard_normal((12, 12)))),
    "tree": Forest("plain", 12, 5, True),
    "honaker": Forest("honaker", 12, 7, True),
}


# The slow twin: fractions, rounded to the places of a type by hand.


def in_places(value: Fraction, digits: int) -> Fraction:
    """The nearest number with so many binary digits; a tie goes to the even one."""
    if not value:
        return value
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > size
    unit = Fraction(2) ** (exponent - digits + 1)
    return round(value / unit) * unit


def coin_of(words: NDArray[np.int32], element: int) -> Fraction:
    """U of one element of a tile, from the low bytes of its pair of words."""
    j = element % HALF
    byte_of = lambda word: int(word) % 256  # noqa: E731
    u = Fraction(256 * byte_of(words[HALF + j]) + byte_of(words[j])) + Fraction(1, 2)
    u = u / 2**16 - Fraction(1, 2)
    return u if element < HALF else -u


def slow(x: float, n: float, u: Fraction, step: float, *, digits: int) -> float:
    """g·round((x + n)/g + U), with every sum rounded to the digits of the type."""
    y = in_places(Fraction(x) + Fraction(n), digits)
    y = in_places(y + Fraction(step) * u, digits)
    if abs(y) < Fraction(step) * 2 ** (digits - 2):
        return float(round(y / Fraction(step)) * Fraction(step))
    return float(y)


def some_words(seed: int, *, tiles: int = 1, kind: str = "aes") -> Tensor:
    source = test_source(seed=seed, kind=kind)
    layout = Layout.of({"w": (tiles * TILE,)}, chunk_tiles=tiles)
    drawer = source.drawer(layout.chunks, device=torch.device("cpu"))
    drawer.draw_(torch.empty(tiles, TILE), chunk=0, row=3, weight=1.0, accumulate=False)
    words: Tensor = drawer.scratch  # type: ignore[attr-defined]
    return words


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.floats(-30.0, 30.0, width=32),
    st.floats(1e-3, 1e3),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_it_is_the_equation_in_fractions(
    seed: int, where: float, scale: float, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(seed)
    words = some_words(seed)
    x = torch.from_numpy(scale * (where + rng.standard_normal(TILE))).to(dtype)
    n = torch.from_numpy((scale * rng.standard_normal(TILE)).astype(np.float32))
    step, got, coins = grid_step(scale), x.clone(), torch.empty(1, TILE)
    jitters_(coins, words=words, step=step)
    add_on_grid_(got, n, jitters=coins[0], step=step)
    digits = 53 if dtype == torch.float64 else 24
    array = words[0].numpy()
    for j in [0, 1, HALF - 1, HALF, TILE - 1, *rng.integers(TILE, size=20).tolist()]:
        u = coin_of(array, j)
        assert Fraction(float(coins[0, j])) == u * Fraction(step)
        expected = slow(float(x[j]), float(n[j]), u, step, digits=digits)
        wide = torch.tensor(expected, dtype=torch.promote_types(dtype, torch.float32))
        assert got[j] == wide.to(dtype)
        assert abs(expected - float(x[j]) - float(n[j])) < step * (1 + 2**-10)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", ["aes", "philox"])
def test_a_stream_rounds_by_the_words_of_its_newest_row(name: str, kind: str) -> None:
    """The noise of a stream without grid, then the equation, element by element, in all paths."""
    source, shapes = test_source(seed=name, kind=kind), {"w": (2 * TILE,)}
    options = {"scale": 0.37, "steps": 12}
    stream = NoiseStream(RECIPES[name], source, shapes, **options)  # type: ignore[arg-type]
    bare = NoiseStream(RECIPES[name], source, shapes, **options)  # type: ignore[arg-type]
    layout = Layout.of({"w": (2 * TILE,)}, chunk_tiles=2)
    drawer = source.drawer(layout.chunks, device=torch.device("cpu"))
    plans = StepPlans.of(RECIPES[name])
    for t in range(12):
        plan = plans.at(t)
        x = torch.randn(2 * TILE, generator=torch.Generator().manual_seed(t))
        noise = torch.zeros(2 * TILE)
        got = x.clone()
        stream.add_({"w": got})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grid, "grid_step", lambda _: 0.0)
            bare.add_({"w": noise})
        row = max(row for row, _ in plan.draws)
        drawer.draw_(torch.empty(2, TILE), chunk=0, row=row, weight=1.0, accumulate=False)
        words: NDArray[np.int32] = drawer.scratch.numpy()  # type: ignore[attr-defined]
        step = grid_of(plan, scale=0.37)
        for j in (0, 1, 255, 400, 723, 724, 725, 1000, TILE - 1, TILE, 2 * TILE - 1):
            tile, element = divmod(j, TILE)
            u = coin_of(words[tile], element)
            assert float(got[j]) == slow(float(x[j]), float(noise[j]), u, step, digits=24)
            assert float(got[j]) % step == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_strides_and_types_do_not_matter(dtype: torch.dtype) -> None:
    def noisy(x: Tensor) -> Tensor:
        stream = NoiseStream(
            RECIPES["blt"], test_source(seed=4), {"w": (30, 70)}, scale=0.4, steps=2
        )
        stream.add_({"w": torch.zeros(30, 70)})
        stream.add_({"w": x})
        return x

    x = torch.randn(70, 30, generator=torch.Generator().manual_seed(0)).to(dtype).t()
    wide = torch.promote_types(dtype, torch.float32)
    expected = noisy(x.contiguous().to(wide)).to(dtype)
    assert torch.equal(noisy(x.clone()), expected)
    assert torch.equal(noisy(x.clone().contiguous()), expected)


@pytest.mark.parametrize("kind", ["aes", "philox"])
def test_without_noise_nothing_is_rounded(kind: str) -> None:
    x = torch.randn(1000) * 1e-3
    for recipe in RECIPES.values():
        stream = NoiseStream(
            recipe, test_source(seed=1, kind=kind), {"w": (1000,)}, scale=0.0, steps=12
        )
        for value in (x.clone(), x.double(), torch.zeros(1000)):
            before = value.clone()
            stream.add_({"w": value})
            assert torch.equal(value, before)


@pytest.mark.parametrize("scale", [1e-37, 1e-20, 1.0, 1e20, MOST_SPREAD])
def test_what_is_not_finite_or_far_off_stays(scale: float) -> None:
    far = [3e38, -3e38, math.inf, -math.inf, math.nan]
    x = torch.tensor([*far, *([0.0] * 5000)])
    shapes = {"w": (5005,)}
    stream = NoiseStream(FeedForward((1.0,)), test_source(seed=1), shapes, scale=scale, steps=1)
    stream.add_({"w": x})
    assert torch.isnan(x[4])
    if scale < 1e30:
        assert x[:4].tolist() == torch.tensor(far[:4]).tolist()
    assert 0.9 < float(x[5:].double().std()) / scale < 1.1


def test_noise_beyond_every_grid_is_refused() -> None:
    with pytest.raises(InvalidInput, match="1e\\+32 at most"):
        NoiseStream(FeedForward((1.0,)), test_source(seed=1), {}, scale=1e37, steps=1)


def test_the_newest_row_is_new() -> None:
    """The words that round a step must not have served another one's rounding or noise."""
    for recipe in RECIPES.values():
        plans, seen = StepPlans.of(recipe), set[int]()
        for t in range(12):
            rows = [row for row, _ in plans.at(t).draws]
            assert rows == sorted(set(rows))
            assert rows[-1] not in seen
            seen.update(rows)
    nothing = StepPlans.of(Rows(np.zeros((2, 2)))).at(1)
    assert nothing.draws == ((0, 0.0),)
    assert grid_of(nothing, scale=1.0) == 0.0


# The law of the coins.


def independence(u: NDArray[np.float64], *labels: NDArray[np.int64]) -> float:
    """P-value of a chi-square test that U is uniform within each group of each labelling."""
    bins = np.minimum((u + 0.5) * 64, 63).astype(int)
    worst = 1.0
    for label in labels:
        groups = int(label.max()) + 1
        table = np.bincount(label * 64 + bins, minlength=64 * groups).reshape(groups, 64)
        expected = table.sum(1, keepdims=True) / 64
        value = float(((table - expected) ** 2 / expected).sum())
        worst = min(worst, float(chi2.sf(value, 63 * groups)))
    return worst


@pytest.mark.parametrize("kind", ["aes", "philox"])
def test_coins_are_uniform_whatever_the_number_they_round(kind: str) -> None:
    words = some_words(11, tiles=600, kind=kind)
    z, coins = torch.empty(600, TILE), torch.empty(600, TILE)
    normals_(z, words=words)
    for half in (slice(0, HALF), slice(HALF, TILE)):
        x = z[:, half].double().numpy().ravel()
        fine = x.astype(np.float32).view(np.int32) & 15  # the last digits of the number itself
        size = np.minimum(np.abs(x) * 4, 12).astype(int)
        labels = ((x > 0).astype(int), size, fine.astype(int), (x / 2**-10 % 16).astype(int))
        jitters_(coins, words=words, step=1.0)
        assert independence(coins[:, half].double().numpy().ravel(), *labels) > 1e-4
        # The highest bytes of the words are those that make the number: a wrong mask is seen.
        jitters_(coins, words=words >> 24, step=1.0)
        assert independence(coins[:, half].double().numpy().ravel(), *labels) < 1e-9


# How much the likelihood of an answer is distorted.


def distortion(s: float, *, is_random: bool) -> float:
    """Largest error of P(cell | x)/g over x, for noise that is a multiple of s (in units of g)."""
    worst = 0.0
    for offset in np.linspace(0, s, 41):
        t = np.arange(-math.ceil(2 / s), math.ceil(2 / s) + 1) * s + offset
        share = np.maximum(0.0, 1 - np.abs(t)) if is_random else (t >= -0.5) & (t < 0.5)
        worst = max(worst, abs(s * float(np.sum(share)) - 1.0))
    return worst


def test_random_rounding_distorts_by_the_second_order_only() -> None:
    """Few-bit noise, every value counted: s/g with the nearest multiple, (s/g)² with coins."""
    for s in (0.137, 0.0787, 0.0394, 0.0197):
        box, hat = distortion(s, is_random=False), distortion(s, is_random=True)
        assert 0.3 * s < box < 1.5 * s
        assert hat < 0.5 * s**2
    assert distortion(1 / 100.3, is_random=True) < distortion(1 / 10.3, is_random=True) / 50


SIGMA, UNIT = np.float32(0.7), 2.0**-23


def share(x: float, k: int, *, step: float, is_random: bool) -> float:
    """P(cell k | x), over g times the density, for noise 0.7·z with z any float32 of [1, 2).

    As the stream computes it: every z that can come to the cell, and the 2¹⁶ coins by bisection.
    """
    low, high = ((k * step - x + side * 1.6 * step) / float(SIGMA) for side in (-1, 1))
    z = (np.arange(math.floor(low / UNIT), math.ceil(high / UNIT)) * UNIT).astype(np.float32)
    assert 1 <= z[0] <= z[-1] < 2
    n, total = torch.from_numpy(SIGMA * z), 0.0

    def cell(coins: Tensor) -> Tensor:
        value = torch.full(n.shape, x)
        jitters = ((coins.double() + 0.5) / 2**16 - 0.5).mul_(step).float()
        add_on_grid_(value, n, jitters=jitters if is_random else 0 * jitters, step=step)
        return value / step

    for edge in (k, k + 1):  # the first coin that leads to the edge or beyond, 2¹⁶ if none
        first = torch.zeros(n.shape, dtype=torch.int64)
        for bit in range(16, -1, -1):
            more = first + 2**bit
            is_below = (more <= 2**16) & (cell(more - 1) < edge)
            first = torch.where(is_below, more, first)
        total += (1 if edge == k + 1 else -1) * float(first.double().sum())
    return total / 2**16 * UNIT * float(SIGMA) / step


@pytest.mark.parametrize("k", [2000, 2001])
def test_the_arithmetic_of_float32_distorts_no_more(k: int) -> None:
    """Two candidates for a sum explain an answer equally well, where the density is the same."""
    rng = np.random.default_rng(k)
    step = grid_step(float(SIGMA))
    sums = [float(np.float32(x)) for x in rng.uniform(-0.3, 0.2, size=12)]
    coins = [share(x, k, step=step, is_random=True) for x in sums]
    nearest = [share(x, k, step=step, is_random=False) for x in sums]
    assert max(coins) - min(coins) < 2**-22
    assert max(nearest) - min(nearest) > 2**-14
    assert abs(coins[0] - 1) < 2**-11  # ties make even cells larger than odd ones, for everybody


# The attack: which candidates for the sum could not have given the answer?


def is_possible(
    released: NDArray[np.float32], x: NDArray[np.float32], *, step: float
) -> NDArray[np.bool_]:
    """Whether some noise that float32 can hold leads from x to what was released."""
    found = np.zeros(x.shape, dtype=bool)
    bits = (released - x).view(np.int32)
    for i in range(-3, 4):
        y = x + (bits + i).astype(np.int32).view(np.float32)
        found |= np.abs(y - released) < step if step else y == released
    return found


@pytest.mark.parametrize("kind", ["aes", "philox"])
def test_no_candidate_is_ruled_out_by_low_bits(kind: str) -> None:
    rng = np.random.default_rng(5)
    size, scale = 50_000, 0.7
    truth, other = (rng.standard_normal((2, size)) * 0.3).astype(np.float32)
    seen = {}
    for has_grid in (True, False):
        value = torch.from_numpy(truth.copy())
        with pytest.MonkeyPatch.context() as patch:
            if not has_grid:
                patch.setattr(grid, "grid_step", lambda _: 0.0)
            source = test_source(seed=2, kind=kind)
            stream = NoiseStream(FeedForward((1.0,)), source, {"w": (size,)}, scale=scale, steps=1)
            stream.add_({"w": value})
        step = grid_step(scale) if has_grid else 0.0
        got = value.numpy()
        assert is_possible(got, truth, step=step).all()
        seen[has_grid] = 1 - is_possible(got, other, step=step).mean()
        if has_grid:
            assert not (got % step).any()
    assert seen[True] == 0.0
    assert seen[False] > 0.01


def test_all_forms_agree_on_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    if c_step.library() is None:
        pytest.skip("no C compiler here, so there is one form only")

    def run() -> Tensor:
        stream = NoiseStream(
            RECIPES["honaker"], test_source(seed=9), {"w": (40_000,)}, scale=0.2, steps=12
        )
        value = torch.randn(40_000, generator=torch.Generator().manual_seed(0))
        for _ in range(12):
            stream.add_({"w": value}, times=0.9)
        return value

    fast = run()
    monkeypatch.setattr(c_step, "library", lambda: None)
    assert torch.equal(fast, run())
