"""Batches of a fixed size beside all of their subsets, for every kind of neighbours."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest

from noshuffle.accounting import fixed_size, fourier, loss_cells, loss_distribution, mixture

X = np.linspace(-14, 14, 5601)
WIDTH = float(X[1] - X[0])
EPSILONS = (-1.5, -0.5, -0.1, -0.01, 0.0, 0.01, 0.1, 0.5, 1.5)
KINDS = ("add-remove", "zero-out", "replace-one")
DIRECTION = {"add-remove": "fixed-add-remove", "zero-out": "fixed-zero", "replace-one": "fixed"}
SIDES = {
    "add-remove": (fixed_size.removed_pair, fixed_size.added_pair),
    "zero-out": (fixed_size.zeroed_pair, fixed_size.unzeroed_pair),
    "replace-one": (fixed_size.replaced_pair, fixed_size.replaced_pair),
}


def released(sent: list[float], batch: int, noise: float) -> np.ndarray:
    """Density of a step at X: all subsets of `batch` of the units, one as likely as another."""
    density = np.zeros_like(X)
    sums = [sum(chosen) for chosen in itertools.combinations(sent, batch)]
    for mean, count in zip(*np.unique(np.round(sums, 12), return_counts=True)):
        density += count / len(sums) * np.exp(-0.5 * ((X - mean) / noise) ** 2)
    return density / (noise * math.sqrt(2 * math.pi))


def worlds(
    kind: str, own: float, others: list[float], *, batch: int, noise: float, new: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """A step with the unit, and without it; the others are where the unit is not counted."""
    without = {"add-remove": [], "zero-out": [0.0], "replace-one": [new]}[kind]
    return released([own, *others], batch, noise), released([*without, *others], batch, noise)


def hockey_stick(p: np.ndarray, q: np.ndarray, epsilon: float) -> float:
    return float(np.maximum(p - math.exp(epsilon) * q, 0.0).sum()) * WIDTH


def curve(grid: loss_distribution.GridLoss, epsilon: float) -> float:
    gain = np.maximum(-np.expm1(np.minimum(epsilon - grid.losses, 0.0)), 0.0)
    return float(grid.mass @ gain) + grid.infinity


def stated(pair: mixture.Pair | mixture.Joined, epsilon: float) -> float:
    """δ of one step on a fine grid."""
    return curve(_grid(pair), epsilon)


@functools.lru_cache
def _grid(pair: mixture.Pair | mixture.Joined) -> loss_distribution.GridLoss:
    return loss_distribution.above(pair, step=5e-4, tail=1e-15)


@pytest.mark.parametrize("kind", KINDS)
def test_all_subsets_of_all_data_are_covered_and_the_worst_is_met(kind: str) -> None:
    """n = 5, batches of 2, at γ on both sides of 1; one clip norm for two would not cover it."""
    n, batch, noise = 5, 2, 1.3
    rng = np.random.default_rng(16)
    signs = itertools.product((1.0, -0.5), (-1.0, 0.0, 1.0), (-1.0, 1.0), (-1.0, 1.0))
    data = [(own, [a, a, b, b], new) for own, a, b, new in signs]
    data += [(one[0], list(one[1:5]), one[5]) for one in rng.uniform(-1, 1, (9, 6))]
    pairs = [worlds(kind, own, rest, batch=batch, noise=noise, new=new) for own, rest, new in data]
    build = {"noise_multiplier": noise, "rate": batch / n}
    for side, make in enumerate(SIDES[kind]):
        pair, careless = make(**build), make(noise_multiplier=2 * noise, rate=batch / n)
        passed = []
        for epsilon in EPSILONS:
            true = max(hockey_stick(*each[:: -1 if side else 1], epsilon) for each in pairs)
            said = stated(pair, epsilon)
            assert 0.999 * said - 1e-9 < true < said + 1e-6  # a sum over x has its own error
            passed.append(stated(careless, epsilon) / max(true, 1e-9))
        assert min(passed) < 0.7, "half the shift must be refuted by some data"


def test_the_shift_of_poisson_sampling_is_too_small_for_every_kind() -> None:
    """Others that send nothing do not show it: beside them a shift of one clip norm is enough."""
    batch, noise, epsilon = 2, 1.3, 0.5
    poisson = mixture.remove_pair(noise_multiplier=noise, rate=batch / 5)
    for kind in KINDS:
        quiet, loud = (
            hockey_stick(*worlds(kind, 1.0, [rest] * 4, batch=batch, noise=noise), epsilon)
            for rest in (0.0, -1.0)
        )
        assert quiet == pytest.approx(stated(poisson, epsilon), rel=1e-3)
        assert loud > 1.3 * stated(poisson, epsilon)


def test_the_rate_of_the_plan_covers_one_more_and_one_less() -> None:
    """m of n: a unit may go (n − 1 are left) or come (n + 1 are there)."""
    n, batch, noise = 5, 2, 0.9
    pairs = [make(noise_multiplier=noise, rate=batch / n) for make in SIDES["add-remove"]]
    for size, is_met in ((n, True), (n + 1, False)):
        there = worlds("add-remove", 1.0, [-1.0] * (size - 1), batch=batch, noise=noise)
        for epsilon in (0.0, 0.1, 0.3):
            for pair, each in zip(pairs, (there, there[::-1])):
                true, said = hockey_stick(*each, epsilon), stated(pair, epsilon)
                assert true < said + 1e-6
                assert (true > 0.999 * said) == is_met
    fewer = worlds("add-remove", 1.0, [-1.0] * (n - 2), batch=batch, noise=noise)
    assert hockey_stick(*fewer, 0.1) > 1.1 * stated(pairs[0], 0.1), "a group needs another rate"


@pytest.mark.parametrize("kind", KINDS)
def test_two_steps_whose_second_is_chosen_by_what_the_first_showed(kind: str) -> None:
    """δ = ∫ P₁ max over data of H₂(γ Q₁/P₁): the best that anybody can do, by brute force."""
    n, batch, noise, delta = 6, 2, 1.5, 1e-3
    data = itertools.product((1.0,), (-1.0, 0.0, 1.0), (-1.0, 0.0))
    pairs = [
        worlds(kind, own, [rest] * (n - 1), batch=batch, noise=noise, new=new)
        for own, rest, new in data
    ]
    composed = fourier.Composed((fourier.PoissonRelease(noise, batch / n, 2),), DIRECTION[kind])
    epsilon = composed.epsilon(delta=delta)
    assert composed.epsilon(delta=delta, bound="lower") > 0.999 * epsilon
    logs = np.linspace(-6, 6, 2401)
    found = 0.0
    for order in (1, -1):
        steps = [each[::order] for each in pairs]
        second = np.max([[hockey_stick(p, q, e) for e in logs] for p, q in steps], axis=0)
        for p, q in steps:
            at = epsilon + np.log(np.maximum(q, 1e-300)) - np.log(np.maximum(p, 1e-300))
            # convex in e^ε: chords are above it, by nothing at this width
            found = max(found, float(p @ np.interp(at, logs, second, left=1.0)) * WIDTH)
    assert 0.98 * delta < found <= 1.002 * delta
    careless = fourier.epsilon(noise_multiplier=noise, rate=batch / n, steps=2, delta=delta)
    if kind != "zero-out":
        assert careless < 0.75 * epsilon


def test_vectors_are_no_worse_than_numbers() -> None:
    """x and y of any length and angle in the plane, zeroed out: where docs/proofs.md says it is."""
    noise, rate = 1.2, 0.3
    x = np.linspace(-7, 7, 141)
    a, b = np.meshgrid(x, x)
    area = float(x[1] - x[0]) ** 2

    def normal(mean: np.ndarray) -> np.ndarray:
        square = ((a - mean[0]) ** 2 + (b - mean[1]) ** 2) / noise**2
        return np.asarray(np.exp(-square / 2) / (2 * math.pi * noise**2))

    pairs = [make(noise_multiplier=noise, rate=rate) for make in SIDES["zero-out"]]
    said = [[stated(pair, epsilon) for epsilon in EPSILONS] for pair in pairs]
    rng, top = np.random.default_rng(3), np.zeros((2, len(EPSILONS)))
    nothing = normal(np.zeros(2))
    for _ in range(30):
        own, other = rng.normal(size=(2, 2))
        own, other = own / np.linalg.norm(own), other / np.linalg.norm(other)
        own, other = own * rng.uniform(0.5, 1), other * rng.uniform(0, 1)
        p = (1 - rate) * nothing + rate * normal(own - other)
        q = (1 - rate) * nothing + rate * normal(-other)
        for side, (up, down) in enumerate(((p, q), (q, p))):
            for k, epsilon in enumerate(EPSILONS):
                true = float(np.maximum(up - math.exp(epsilon) * down, 0).sum()) * area
                top[side, k] = max(top[side, k], true)
                assert true < said[side][k] + 1e-5
    assert np.all(top[:, 1:-1] > 0.3 * np.array(said)[:, 1:-1])


@pytest.mark.parametrize("make", [*SIDES["zero-out"], fixed_size.replaced_pair])
@pytest.mark.parametrize(("noise", "rate"), [(0.3, 0.01), (1.0, 0.1), (8.0, 0.02), (0.8, 0.6)])
def test_grids_lie_about_the_curve(make, noise: float, rate: float) -> None:
    """Small and large noise: where the loss does not grow everywhere, nothing else is counted."""
    pair = make(noise_multiplier=noise, rate=rate)
    top = -math.log1p(-rate)
    step = min(rate / noise, rate) / 20
    high = loss_distribution.above(pair, step=step, tail=1e-15)
    low = loss_distribution.below(pair, step=step, tail=1e-15)
    assert high.mass.sum() + high.infinity == pytest.approx(1, abs=1e-12)
    assert float(high.mass @ np.exp(-high.losses)) <= 1 + 1e-9
    for epsilon in (-0.9 * top, -0.3 * top, 0.0, 0.3 * top, 2 * top):
        part = pair.over if epsilon >= 0 else pair.under
        x = np.linspace(*loss_cells.support(part, 1e-18), 100_001)
        gain = np.maximum(-np.expm1(np.minimum(epsilon - part.loss(x), 0.0)), 0.0)
        true = float(part.density(x) @ gain) * float(x[1] - x[0])
        assert curve(low, epsilon) <= true * (1 + 1e-6) + 1e-12
        assert true * (1 - 1e-6) - 1e-12 <= curve(high, epsilon) <= 1.02 * true + 1e-9
