"""Losses of any mechanism, cut batches, unequal composition, small rates: beside enumeration."""

from __future__ import annotations

import itertools
import math
from functools import partial

import numpy as np
import pytest

from noshuffle.accounting import (
    atoms,
    composition,
    fourier,
    gaussian,
    loss_distribution,
    loss_sum,
    mechanisms,
)
from noshuffle.accounting.fourier import AnyRelease, TruncatedRelease, compose
from noshuffle.errors import InvalidInput, Unsupported


def enumerated(epsilons: list[float], total: float) -> float:
    """δ of several randomized responses, outcome by outcome."""
    sure = [1 / (1 + math.exp(-e)) for e in epsilons]
    out = 0.0
    for signs in itertools.product((1, -1), repeat=len(epsilons)):
        p = math.prod(s if sign > 0 else 1 - s for s, sign in zip(sure, signs))
        out += p * max(0.0, -math.expm1(total - sum(s * e for s, e in zip(signs, epsilons))))
    return out


def test_unequal_composition_is_that_of_all_outcomes() -> None:
    epsilons = [0.2, 0.2, 0.5, 1.3, 0.7]
    for total in (0.4, 1.0, 2.0):
        true = enumerated(epsilons, total)
        found = composition.optimal_sequence([(e, 1e-9) for e in epsilons], slack=true)
        assert total <= found.epsilon < total * 1.001
        assert found.delta > true
        even = [sum(epsilons) / 5] * 5  # as if they were equal
        assert enumerated(even, total) < 0.99 * true
    assert composition.optimal_sequence([(0.1, 0.0)], slack=1e-6).epsilon == pytest.approx(
        0.1, rel=1e-3
    )


def test_no_composition_costs_more_than_its_largest_loss() -> None:
    two = compose([AnyRelease(atoms.laplace(scale=25.0), steps=2)])
    assert two.epsilon(delta=1.8e-6) <= 2 / 25 * (1 + 1e-11)
    assert two.epsilon(delta=1.8e-6) > 2 / 25 * (1 - 1e-3)


def test_losses_of_known_mechanisms() -> None:
    noise = mechanisms.Laplace(2.0)
    one = compose([AnyRelease(atoms.laplace(scale=2.0))])
    assert noise.delta(epsilon=0.3) <= one.delta(epsilon=0.3) < 1.001 * noise.delta(epsilon=0.3)
    p, q = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.2, 0.3, 0.4, 0.1])
    there, back = atoms.discrete(p, q)
    for epsilon in (0.0, 0.4):
        gamma = math.exp(epsilon)
        assert there.delta(epsilon) == pytest.approx(np.maximum(p - gamma * q, 0).sum())
        assert back.delta(epsilon) == pytest.approx(np.maximum(q - gamma * p, 0).sum())
    twice = compose([AnyRelease(there, back, steps=2)])
    P, Q = np.outer(p, p), np.outer(q, q)
    true = max(np.maximum(a - math.exp(0.4) * b, 0).sum() for a, b in ((P, Q), (Q, P)))
    assert true <= twice.delta(epsilon=0.4) < true * 1.001
    with pytest.raises(InvalidInput, match="sum to 1"):
        atoms.discrete(p, 2 * q)
    with pytest.raises(InvalidInput, match="add"):
        AnyRelease(there, 2)  # type: ignore[arg-type]


def test_profiles_are_chords() -> None:
    grid = np.linspace(0, 6, 400)
    curve = np.array([gaussian.delta(mu=0.5, epsilon=e) for e in grid])
    true = gaussian.epsilon(mu=1.0, delta=1e-5)
    found = compose([AnyRelease(atoms.profile(grid, curve), steps=4)]).epsilon(delta=1e-5)
    assert true <= found < 1.001 * true
    points = atoms.profile(grid, curve)
    near = points.losses < 1.0  # the far end left out
    careless = atoms.Atoms(points.losses[near], points.masses[near])
    assert compose([AnyRelease(careless, steps=4)]).epsilon(delta=1e-5) < true
    bump = curve.copy()
    bump[200] = 0.5  # a point above the chord of its neighbours says nothing
    assert atoms.profile(grid, bump).delta(1.0) == pytest.approx(points.delta(1.0), rel=1e-3)
    for wrong in (([1.0, 0.5], [0.1, 0.1]), ([0.0], [2.0]), ([-1.0], [0.1])):
        with pytest.raises(InvalidInput, match="profile"):
            atoms.profile(*map(np.array, wrong))


def cut_law(axis: np.ndarray, units: list[float], *, rate: float, cap: int, z: float) -> np.ndarray:
    """Of the noisy sum of a drawn batch that is cut to `cap` of its units, in every order."""
    out = np.zeros_like(axis)
    for drawn in itertools.product((0, 1), repeat=len(units)):
        chance = math.prod(rate if one else 1 - rate for one in drawn)
        came = [value for value, one in zip(units, drawn) if one]
        kept = list(itertools.combinations(came, min(cap, len(came))))
        for each in kept:
            out += chance / len(kept) * np.exp(-((axis - sum(each)) ** 2) / (2 * z * z))
    return out / out.sum()


def test_cut_batches_move_by_two_where_they_are_full() -> None:
    """All subsets, cut to one unit in every order; one sends +1, the others −1."""
    rate, cap, z, others = 0.9, 1, 1.0, 2
    axis = np.linspace(-12, 10, 4001)

    size = {"rate": rate, "cap": cap, "z": z}
    P, Q = (cut_law(axis, [1.0] * own + [-1.0] * others, **size) for own in (1, 0))
    plain = compose([(z, rate, 1)])
    for population in (others, others + 1):  # the unit came beside them, or is one of them
        stated = compose([TruncatedRelease(z, rate, cap, population)])
        for epsilon in (0.2, 1.0, 2.0):
            true = max(np.maximum(a - math.exp(epsilon) * b, 0).sum() for a, b in ((P, Q), (Q, P)))
            assert true <= stated.delta(epsilon=epsilon)
    assert true > 1.5 * plain.delta(epsilon=2.0)  # a cut that nobody counts
    roomy = compose([TruncatedRelease(z, rate, 3, others)])
    assert roomy.delta(epsilon=1.0) == pytest.approx(plain.delta(epsilon=1.0), rel=1e-6)


def test_a_unit_that_is_zeroed_out_keeps_its_place_in_a_full_batch() -> None:
    """All subsets, cut to one unit in every order, for every data in one dimension, at every γ."""
    rate, cap, z, others = 0.6, 1, 1.0, 2
    axis = np.linspace(-12, 12, 4001)

    law = partial(cut_law, axis, rate=rate, cap=cap, z=z)
    data = [(1.0, [rest] * others) for rest in (-1.0, 0.0, 1.0)] + [(1.0, [1.0, -1.0])]
    cases = [(law([own, *rest]), law([0.0, *rest])) for own, rest in data]
    size = {"noise_multiplier": z, "rate": rate, "cap": cap, "population": others + 1}
    pairs = atoms.truncated_pairs(**size, is_zeroed=True)
    removed = atoms.truncated_pairs(**size)
    room = []
    for side in (0, 1):
        high, other = (
            loss_distribution.above(both[side], step=1e-3, tail=1e-15) for both in (pairs, removed)
        )
        for epsilon in (-1.5, -0.8, -0.3, 0.0, 0.3, 0.8, 1.5):
            stated, before = (
                float(one.mass @ np.maximum(-np.expm1(np.minimum(epsilon - one.losses, 0)), 0))
                + one.infinity
                for one in (high, other)
            )
            true = max(
                np.maximum(p - math.exp(epsilon) * q, 0).sum()
                for p, q in (each[:: -1 if side else 1] for each in cases)
            )
            assert true <= stated + 1e-6
            room.append(true / before)
    assert max(room) > 1.01, "the pair of a unit that is removed does not cover it"


def test_losses_that_end_below_an_empty_part_of_the_grid() -> None:
    """Every batch is full: Q over P is N(0) against a half of it, whose losses end at log 2."""
    deviation, axis = 0.15, np.linspace(-2, 2, 40_001)
    there, away = (np.exp(-0.5 * ((axis - m) / deviation) ** 2) for m in (0.0, -1.0))
    cut = compose([TruncatedRelease(0.3, 1.0, 1, 2)], direction="add", grid=1e-3)
    found = cut.epsilon(delta=1e-6)
    true = np.maximum(there - math.exp(found) * (there + away) / 2, 0).sum() / there.sum()
    assert true <= 1e-6
    assert found <= math.log(2) + 1e-3  # which no δ needs more than, but for the grid


def test_what_is_missing_of_one_is_charged() -> None:
    p, q = np.array([0.5, 0.5 - 5e-10]), np.array([0.25, 0.75])
    assert atoms.discrete(p, q)[0].infinity == pytest.approx(5e-10)
    assert atoms.discrete(np.full(10, 0.1), np.full(10, 0.1))[0].infinity == 0


def test_a_sum_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        loss_sum, "_power", lambda parts, lam, points: (np.full(points, np.nan), 0.0)
    )
    with pytest.raises(Unsupported, match="could not be added up"):
        fourier.delta(noise_multiplier=1.0, rate=0.1, steps=10, epsilon=1.0)
