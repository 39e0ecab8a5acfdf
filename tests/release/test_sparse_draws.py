"""Draws by count: the distribution of coins; older runs go on with a word for every unit."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from noshuffle.participation import CyclicPoisson, FixedSize, Poisson, TruncatedPoisson
from noshuffle.plan import Plan
from noshuffle.release.keys import KeyRing
from noshuffle.release.sampler import DRAWS, Sampler
from noshuffle.release.sampler_kinds import make_sampler
from noshuffle.release.seal import _draws
from noshuffle.release.sparse_draws import BITS, counts, drawn_count, drawn_subset
from noshuffle.strategies import identity
from noshuffle.training import privatize

KEY = b"0123456789abcdef" * 2
MANY = 20_000


def words_of(seed: int) -> Any:
    luck = np.random.default_rng(seed)
    return lambda many: luck.integers(0, 2**64, size=many, dtype=np.uint64)


@pytest.mark.parametrize("rate", [0.5, 0.1, 1 / 3, 0.999, 2.0**-60])
@pytest.mark.parametrize("units", [1, 2, 7, 40])
def test_a_table_is_the_binomial_distribution_to_128_bits(units: int, rate: float) -> None:
    table, q, passed = counts(units, rate), Fraction(rate), Fraction(0)
    for k in range(units):
        passed += math.comb(units, k) * q**k * (1 - q) ** (units - k)
        at = k - table.first
        told = table.below[at] if 0 <= at < len(table.below) else (0 if at < 0 else 2**BITS)
        assert abs(told - passed * 2**BITS) < 2


@pytest.mark.parametrize(
    ("units", "rate"), [(60_000, 250 / 60_000), (10**6, 1 / 32), (10**7, 1e-6)]
)
def test_a_table_of_many_units(units: int, rate: float) -> None:
    table = counts(units, rate)
    found = np.array([value / 2**BITS for value in table.below])
    truth = stats.binom.cdf(table.first + np.arange(len(found)), units, rate)
    np.testing.assert_allclose(found, truth, atol=1e-11)
    assert not np.allclose(found, stats.binom.cdf(np.arange(len(found)), units, 1.01 * rate))


def test_counts_at_the_ends_of_a_table() -> None:
    table = counts(5, 0.25)
    assert (table.count(0), table.count(2**BITS - 1)) == (0, 5)
    assert all(table.count(value) == k + 1 for k, value in enumerate(table.below))
    assert all(table.count(value - 1) == k for k, value in enumerate(table.below))


@pytest.mark.parametrize(
    ("units", "size"), [(6, 0), (6, 1), (6, 2), (6, 3), (6, 4), (6, 6), (5, 3)]
)
def test_every_subset_is_equally_likely(units: int, size: int) -> None:
    words, seen = words_of(units * 10 + size), dict.fromkeys(combinations(range(units), size), 0)
    for _ in range(3000):
        seen[tuple(drawn_subset(units, size, words).tolist())] += 1
    found = np.array(list(seen.values()))
    assert ((found - found.mean()) ** 2).sum() / found.mean() < stats.chi2.ppf(
        1 - 1e-9, max(len(found) - 1, 1)
    )


def test_words_of_an_incomplete_round_are_passed_over() -> None:
    """Of 2⁶⁴ words, 2⁶⁴ mod 3 = 1 is too many for a third each."""
    given = iter([np.array([2**64 - 1, 4], dtype=np.uint64), np.array([5], dtype=np.uint64)])
    assert drawn_subset(3, 1, lambda _: next(given)).tolist() == [1]


def test_a_subset_goes_on_until_it_has_enough() -> None:
    given = iter([np.array([4, 4, 4], dtype=np.uint64), np.array([4, 9, 2], dtype=np.uint64)])
    assert drawn_subset(10, 2, lambda _: next(given)).tolist() == [4, 9]


def hits_of(sampler: Sampler, population: int) -> NDArray[np.bool_]:
    hits = np.zeros((sampler.steps, population), dtype=bool)
    for step, ids in enumerate(sampler):
        assert ids.dtype == np.int64
        assert (np.diff(ids) > 0).all()
        hits[step, ids] = True
    return hits


@pytest.mark.parametrize("by_count", [False, True])
@pytest.mark.parametrize("kind", ["poisson", "cyclic"])
def test_rates_counts_and_independence(kind: str, by_count: bool) -> None:
    rate, steps, groups = 0.01, 300, 1 if kind == "poisson" else 2
    rule = Poisson(steps, rate) if kind == "poisson" else CyclicPoisson(steps, groups, rate)
    hits = hits_of(make_sampler(rule, key=KEY, population=MANY, by_count=by_count), MANY)
    if kind == "cyclic":
        turns = [hits[turn::2, turn::2] for turn in range(2)]
        assert sum(t.sum() for t in turns) == hits.sum()
        hits = np.concatenate(turns)
    room = 5 * math.sqrt(rate * (1 - rate) / hits.size)
    assert abs(hits.mean() - rate) < room
    assert not any(abs(hits.mean() - wrong * rate) < room for wrong in (2 / 3, 3 / 2))
    sizes = hits.sum(1)
    many = hits.shape[1] * rate * (1 - rate)
    assert abs(sizes.var() / many - 1) < 5 * math.sqrt(2 / len(sizes))
    each = hits.sum(0)  # of every unit: first and last as often as those between
    assert abs(each.var() / (len(hits) * rate * (1 - rate)) - 1) < 0.1
    assert abs(hits[:, [0, -1]].mean() - rate) < 5 * math.sqrt(rate / (2 * len(hits)))
    for one, other in ((hits[1:], hits[:-1]), (hits[:, 1:], hits[:, :-1])):
        both = (one & other).mean()
        assert abs(both - rate**2) < 5 * math.sqrt(rate**2 / one.size)


def test_a_truncated_draw_is_cut_to_its_cap() -> None:
    part = TruncatedPoisson(steps=200, rate=0.01, cap=190, population=MANY)
    hits = hits_of(make_sampler(part, key=KEY), MANY)
    sizes = hits.sum(1)
    assert sizes.max() == 190
    full = stats.binom.sf(189, MANY, 0.01)
    assert abs((sizes == 190).mean() - full) < 5 * math.sqrt(full * (1 - full) / 200)
    assert abs(hits[:, : MANY // 2].sum() / hits.sum() - 0.5) < 5 * 0.5 / math.sqrt(hits.sum())


@pytest.mark.parametrize(("population", "rate"), [(100, 0.3), (8192, 0.01), (MANY, 0.2), (MANY, 1)])
def test_other_draws_are_those_of_a_word_for_every_unit(population: int, rate: float) -> None:
    rule = Poisson(5, rate)
    sampler = make_sampler(rule, key=KEY, population=population)
    older = make_sampler(rule, key=KEY, population=population, by_count=False)
    for step in range(5):
        drawn = np.arange(population)
        if rate < 1:
            drawn = drawn[older._words(step, population) < np.uint64(int(rate * 2**64))]
        assert np.array_equal(sampler.draw(step), drawn)
        assert np.array_equal(older.draw(step), drawn)


def test_an_older_definition_of_rare_draws_stays() -> None:
    older = make_sampler(Poisson(2, 0.001), key=KEY, population=MANY, by_count=False)
    below = np.uint64(int(0.001 * 2**64))
    assert np.array_equal(older.draw(1), np.flatnonzero(older._words(1, MANY) < below))
    fixed = make_sampler(FixedSize(2, 5, MANY), key=KEY, by_count=False)
    order = np.argsort(fixed._words(1, MANY), kind="stable")
    assert np.array_equal(fixed.draw(1), np.sort(order[:5]))


def test_counts_take_the_first_two_words() -> None:
    half = iter([np.array([2**63, 0], dtype=np.uint64)])
    assert drawn_count(2, 0.5, lambda _: next(half)) == 1


@pytest.mark.parametrize("is_older", [False, True])
def test_a_run_keeps_to_the_draws_that_it_began_with(tmp_path: Path, is_older: bool) -> None:
    rule, x = Poisson(6, 0.001), torch.randn(MANY, 2)
    plan = Plan(participation=rule, strategy=identity(), noise_multiplier=1.0)

    def opened() -> Any:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        return privatize(model, sgd, plan, clip_norm=1.0, batch_size=20, run=tmp_path / "run")

    drawn = []
    for life in range(2):
        private = opened()
        if life:
            private.resume()
        ledger = private._parts.release.ledger
        if is_older and not life:  # what a version before this one left behind
            ledger.bind("population", str(MANY))
        for ids in private.sampler(MANY):
            drawn.append(ids)
            batch = (x[torch.from_numpy(ids)], torch.zeros(len(ids), 1))
            private.advance(torch.nn.functional.mse_loss, batch, ids=ids)
            if len(drawn) == 3:
                private.save()
                break
        assert ledger.meta(DRAWS[0]) == (None if is_older else DRAWS[1])
        rows, facts = list(ledger.rows()), ledger.facts()
        ring: KeyRing = private._parts.release._ring
        assert list(_draws(ring, plan, rows, facts)) == []
        other = {**facts, DRAWS[0]: DRAWS[1] if is_older else None}
        assert list(_draws(ring, plan, rows, other)) != []
        for step, ids in enumerate(drawn):
            sampler = make_sampler(
                rule, key=ring.sampling_key, population=MANY, by_count=not is_older
            )
            assert np.array_equal(sampler.draw(step), ids)
        private.close()
    assert len(drawn) == 6
