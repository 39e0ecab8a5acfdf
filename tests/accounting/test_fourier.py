"""The Fourier accountant between its own bounds, against exact curves and a plain convolution."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.special import log_ndtr

from noshuffle.accounting import (
    fourier,
    gaussian,
    loss_cells,
    loss_distribution,
    loss_sum,
    mixture,
    scout,
)
from noshuffle.accounting.bisection import bracket
from noshuffle.errors import InvalidInput


def hockey_stick(pair: mixture.Pair, epsilons: Sequence[float]) -> list[float]:
    """δ(ε) of one step by a fine sum over outcomes, at every ε."""
    low, high = loss_cells.support(pair, 1e-18)
    x = np.linspace(low, high, 400_001)
    loss, density = pair.loss(x), pair.density(x)
    above = [loss > epsilon for epsilon in epsilons]  # all others have a gain of zero
    gains = [-np.expm1(epsilon - loss[at]) for epsilon, at in zip(epsilons, above)]
    return [float(density[at] @ gain) * (x[1] - x[0]) for at, gain in zip(above, gains)]


def grid_delta(grid: loss_distribution.GridLoss, epsilon: float) -> float:
    gain = np.maximum(-np.expm1(np.minimum(epsilon - grid.losses, 0.0)), 0.0)
    return float(grid.mass @ gain) + grid.infinity


BUILD = [mixture.remove_pair, mixture.add_pair, mixture.replace_pair]


@pytest.mark.parametrize("build", BUILD)
@pytest.mark.parametrize(("sigma", "q"), [(1.0, 0.1), (0.5, 0.01), (5.0, 0.02), (0.8, 0.6)])
@pytest.mark.parametrize("cells", [7, 60])
def test_one_step_lies_between_its_grids(build, sigma: float, q: float, cells: int) -> None:
    pair = build(noise_multiplier=sigma, rate=q)
    step = min(q / sigma, q) / cells
    high = loss_distribution.above(pair, step=step, tail=1e-15)
    low = loss_distribution.below(pair, step=step, tail=1e-15)
    assert high.mass.sum() + high.infinity == pytest.approx(1, abs=1e-12)
    assert low.mass.sum() <= 1 + 1e-12
    assert float(low.mass @ np.exp(-low.losses)) <= 1 + 1e-9
    top = -math.log1p(-q)
    epsilons = np.linspace(0, 0.95 * top, 11)
    for epsilon, true in zip(epsilons, hockey_stick(pair, epsilons)):
        assert grid_delta(low, epsilon) <= true * (1 + 1e-6) + 1e-12
        assert grid_delta(high, epsilon) >= true * (1 - 1e-6) - 1e-12


@pytest.mark.parametrize("build", BUILD)
def test_sum_matches_plain_convolution(build) -> None:
    """The tilted transform, its window and its wrapping, against np.convolve."""
    pair = build(noise_multiplier=1.2, rate=0.3)
    step, count = 0.02, 5
    grid = loss_distribution.above(pair, step=step, tail=1e-15)
    mass = grid.mass
    for _ in range(count - 1):
        mass = np.convolve(mass, grid.mass)
    losses = count * (grid.anchor + step * grid.start) + step * np.arange(len(mass))
    for epsilon in (0.1, 0.5, 1.0, 1.4):
        slow = float(mass @ np.maximum(-np.expm1(np.minimum(epsilon - losses, 0.0)), 0.0))
        fast = loss_sum.delta_of([(pair, count)], epsilon=epsilon, is_upper=True, step=step)
        assert slow * (1 - 1e-9) <= fast <= slow * (1 + 1e-6) + 1e-11


@pytest.mark.parametrize("steps", [1, 7, 400, 20_000])
@pytest.mark.parametrize("delta", [0.2, 1e-3, 1e-8, 1e-30, 1e-100])
@pytest.mark.parametrize("side", [0, 1])
def test_gaussian_steps_compose_to_one_gaussian(steps: int, delta: float, side: int) -> None:
    """Without sampling the answer is known exactly, however small δ is."""
    sigma = 2.0 * math.sqrt(steps)
    block = [(BUILD[side](noise_multiplier=sigma, rate=1.0), steps)]
    exact = gaussian.epsilon(mu=math.sqrt(steps) / sigma, delta=delta)
    for is_upper in (True, False):
        step = scout.choose_step([block], is_upper=is_upper, delta=delta)
        found = loss_sum.epsilon_of(block, delta=delta, is_upper=is_upper, step=step)
        assert found == pytest.approx(exact, rel=3e-4, abs=1e-6)
        assert found >= exact if is_upper else found <= exact


@given(
    sigma=st.floats(0.5, 8),
    q=st.floats(-3.5, -0.1).map(lambda x: 10**x),
    steps=st.integers(1, 1000),
    delta=st.floats(-14, -2).map(lambda x: 10**x),
    direction=st.sampled_from(fourier.DIRECTIONS),
)
@example(sigma=1.0, q=0.01, steps=50, delta=1e-14, direction="remove")
@example(sigma=1.0, q=0.01, steps=50, delta=1e-2, direction="both")
@example(sigma=8.0, q=0.5, steps=1000, delta=1e-5, direction="add")
@example(sigma=1.2, q=0.1, steps=300, delta=1e-8, direction="replace")
@settings(max_examples=10, deadline=None)
def test_upper_is_above_lower_and_close(
    sigma: float, q: float, steps: int, delta: float, direction: str
) -> None:
    """Close where the usual loss of a step, −q, lies several points of the grid away from zero.

    The lower bound is a poor one for rare samples under little noise (at worst it is zero).
    """
    composed = fourier.compose([(sigma, q, steps)], direction=direction)
    high = composed.epsilon(delta=delta)
    low = composed.epsilon(delta=delta, bound="lower")
    assert low <= high
    if sigma >= 1 and q >= 0.01 and steps >= 50:
        assert high <= low * 1.02
    assert composed.delta(epsilon=high, bound="lower") <= delta * (1 + 1e-9)
    if low > 0:
        assert composed.delta(epsilon=low) >= delta * (1 - 1e-9)


def test_monotone_in_everything() -> None:
    base = {"noise_multiplier": 1.0, "rate": 0.01, "steps": 1000, "delta": 1e-6}
    here = fourier.epsilon(**base)
    assert fourier.epsilon(**base | {"noise_multiplier": 1.01}) < here
    assert fourier.epsilon(**base | {"rate": 0.0101}) > here
    assert fourier.epsilon(**base | {"steps": 1010}) > here
    assert fourier.epsilon(**base | {"delta": 1.1e-6}) < here
    assert fourier.epsilon(**base | {"direction": "add"}) <= here
    assert fourier.epsilon(**base | {"direction": "replace"}) > here


def test_heterogeneous_steps() -> None:
    split = fourier.compose([(1.0, 0.01, 400), (1, 0.01, 600)])
    whole = fourier.epsilon(noise_multiplier=1.0, rate=0.01, steps=1000, delta=1e-5)
    assert split.epsilon(delta=1e-5) == whole
    mixed = fourier.compose([(1.0, 0.01, 1000), (20.0, 1.0, 4), (3.0, 0.1, 10)])
    high, low = mixed.epsilon(delta=1e-5), mixed.epsilon(delta=1e-5, bound="lower")
    assert whole < low <= high <= low * 1.001
    # sampling with a negligible loss leaves the plain Gaussian part
    almost = fourier.compose([(2.0, 1.0, 3), (100.0, 1e-6, 1)])
    exact = gaussian.epsilon(mu=math.sqrt(3) / 2, delta=1e-6)
    high = almost.epsilon(delta=1e-6)
    assert high == pytest.approx(exact, rel=2e-4)
    assert almost.epsilon(delta=1e-6, bound="lower") <= exact <= high


def test_mixture_of_two_is_poisson_sampling() -> None:
    plain = fourier.compose([(1.3, 0.05, 200)]).epsilon(delta=1e-6)
    two = fourier.compose([fourier.MixtureRelease(1.3, (0.0, 1.0), (0.95, 0.05), 200)])
    assert two.epsilon(delta=1e-6) == pytest.approx(plain, rel=1e-6)


def test_a_given_grid_is_used_and_stays_a_bound() -> None:
    args = {"noise_multiplier": 1.0, "rate": 0.02, "steps": 200, "delta": 1e-5}
    fine = fourier.epsilon(**args)
    coarse = fourier.epsilon(**args, grid=0.02)
    assert fine < coarse < 1.5 * fine
    assert fourier.epsilon(**args, grid=0.02, bound="lower") <= fine
    with pytest.raises(InvalidInput, match="grid must be at least"):
        fourier.epsilon(**args, grid=1e-12)


def test_large_delta_means_zero() -> None:
    args = {"noise_multiplier": 5.0, "rate": 0.001, "steps": 10}
    assert fourier.epsilon(**args, delta=0.1) == 0
    assert fourier.epsilon(**args, delta=0.1, bound="lower") == 0
    assert 0 <= fourier.delta(**args, epsilon=0.0) < 0.01
    assert fourier.delta(**args, epsilon=50.0) < 1e-6
    many = fourier.delta(noise_multiplier=0.5, rate=0.5, steps=200, epsilon=0.0)
    assert many == pytest.approx(1.0, abs=1e-6)


def test_refusals() -> None:
    args = {"noise_multiplier": 1.0, "rate": 0.01, "steps": 10, "delta": 1e-5}
    for name, bad in [
        ("noise_multiplier", 0.0),
        ("noise_multiplier", math.nan),
        ("rate", 0.0),
        ("rate", 1.5),
        ("steps", 0),
        ("steps", 10.0),
        ("steps", 10**12),
        ("delta", 0.0),
        ("delta", 1.0),
        ("direction", "sideways"),
        ("bound", "middle"),
        ("grid", -1.0),
    ]:
        with pytest.raises(InvalidInput, match=name):
            fourier.epsilon(**args | {name: bad})
    with pytest.raises(InvalidInput, match="at least one"):
        fourier.compose([])
    with pytest.raises(InvalidInput, match="sum to 1"):
        fourier.MixtureRelease(1.0, (0.0, 1.0), (0.5, 0.6))
    with pytest.raises(InvalidInput, match="replace"):
        fourier.compose([fourier.MixtureRelease(1.0, (0.0, 1.0), (0.5, 0.5))], direction="replace")


@pytest.mark.parametrize("delta", [1e-20, 1e-50, 1e-200, 1e-295])
@pytest.mark.parametrize(("noise", "rate"), [(0.0341, 1.96e-12), (0.02, 0.1)])
def test_losses_beyond_the_exponential_are_not_squeezed_into_smaller_ones(
    noise: float, rate: float, delta: float
) -> None:
    """One step with hardly any noise: e^loss/rate overflows, and δ was up to 1e97 times too small.

    δ ≥ P(x > a) − e^ε Q(x > a) at every a; with a a little above the one where the loss is ε,
    most of it is the first term.
    """
    epsilon = fourier.epsilon(
        noise_multiplier=noise, rate=rate, steps=1, delta=delta, direction="remove"
    )
    more = epsilon + 1.0  # at a loss of ε + 1 the second term is at most 1/e of the first
    a = noise**2 * (more - math.log(rate)) + 0.5
    log_reached = math.log(rate) + log_ndtr((1 - a) / noise) + math.log(1 - math.exp(-1))
    assert log_reached <= math.log(delta)


def test_small_rates_are_not_charged_for_the_tail_in_every_step() -> None:
    """By one tilt for all steps it is 0.216: the far tail of a single step decides."""
    given = {"noise_multiplier": 0.646, "rate": 3e-6, "steps": 237_501}
    found = fourier.epsilon(**given, delta=1.9e-9)
    assert found == pytest.approx(0.054685, rel=1e-4)
    assert fourier.delta(**given, epsilon=found) == pytest.approx(1.9e-9, rel=1e-3)


@pytest.mark.parametrize(
    ("noise", "rate", "delta"), [(0.6, 1e-3, 1e-5), (0.6, 1e-3, 1e-7), (0.4, 1e-4, 1e-6)]
)
def test_rare_samples_against_two_steps_by_brute_force(
    noise: float, rate: float, delta: float
) -> None:
    given = {"noise_multiplier": noise, "rate": rate, "steps": 2, "direction": "remove"}
    epsilon = fourier.epsilon(**given, delta=delta)
    pair = mixture.remove_pair(noise_multiplier=noise, rate=rate)
    x = np.linspace(-8 * noise, 1 + 8 * noise, 2001)
    p = pair.density(x) * (x[1] - x[0])
    q = p * np.exp(-pair.loss(x))
    true = np.maximum(np.outer(p, p) - math.exp(epsilon) * np.outer(q, q), 0).sum()
    assert 0.999 * delta < true < delta
    assert true < fourier.delta(**given, epsilon=epsilon) < 1.001 * true


def one_step_epsilon(*, noise_multiplier: float, rate: float, delta: float) -> float:
    """ε of one Poisson step, removed: the curve q·δ(log(1 + (e^ε − 1)/q)) of the Gaussian."""

    def is_within(epsilon: float) -> bool:
        inner = math.log1p(math.expm1(epsilon) / rate)
        return rate * gaussian.delta(mu=1 / noise_multiplier, epsilon=inner) <= delta

    return bracket(is_within, 0.0, 100.0, tolerance=1e-12)[0]


@pytest.mark.parametrize("direction", ["both", "remove"])
def test_rare_samples_are_never_below_the_truth(direction: str) -> None:
    rng = np.random.default_rng(len(direction))
    for _ in range(6):
        noise, rate = float(np.exp(rng.uniform(-3, 3))), float(10 ** rng.uniform(-11, -5))
        for delta in (1e-9, float(10 ** rng.uniform(-100, -40))):
            known = one_step_epsilon(noise_multiplier=noise, rate=rate, delta=delta)
            given = {"noise_multiplier": noise, "rate": rate, "steps": 1, "delta": delta}
            assert fourier.epsilon(**given, direction=direction) >= known * (1 - 1e-9) - 1e-300


def test_what_no_grid_can_tell_is_infinite() -> None:
    given = {"noise_multiplier": 0.06, "rate": 1e-3, "steps": 10**6, "delta": 1e-9}
    assert fourier.epsilon(**given) == math.inf
