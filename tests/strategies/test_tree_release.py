"""What a tree's released noise costs: reference values, and twins that invert the covariance."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from tests.strategies.patterns import patterns

from noshuffle.participation import Epochs, MinSeparation, Restarted, SinglePass
from noshuffle.strategies import prefix_sensitivity, tree
from noshuffle.strategies import sensitivity as measure
from noshuffle.strategies import tree_search as searches
from noshuffle.strategies import tree_sensitivity as trees
from noshuffle.strategies.tree_factor import Part, carry_of, energies


@pytest.mark.parametrize(
    ("strategy", "participation", "nodes", "tight"),
    [
        (tree(), SinglePass(1024), 11, 9.466),
        (tree(restart_every=120, completion=True), Epochs(20, 60), 196, 157.7),
        (tree(restart_every=200, completion=True), Epochs(20, 100), 216, 182.9),
        (tree("plain"), Epochs(16, 16), 560, 440),
        (tree("plain"), SinglePass(1024), 11, 11),
        (tree("full"), Epochs(16, 16), 560, 560),
        (tree(), MinSeparation(2000, 314, 6), 79, 70.30),
    ],
)
def test_node_counts_and_tight_values(strategy, participation, nodes, tight):
    got = measure(strategy, participation)
    assert got.squared == pytest.approx(tight, rel=3e-4)
    assert got.exact
    counted = measure(strategy, participation, tree_accounting="nodes")
    assert counted.squared == nodes
    assert counted.exact == (nodes == tight)


@settings(max_examples=60, deadline=None)
@given(
    some.sampled_from(["plain", "honaker", "full"]),
    some.integers(1, 90),
    some.none() | some.integers(1, 90),
    some.booleans(),
    some.integers(1, 100),
    some.data(),
)
def test_closed_forms_are_the_inverted_covariance(variant, n, every, completion, period, data):
    strategy = tree(variant, every, completion and every is not None)
    rows = strategy.noising(n)
    start, real, full = data.draw(some.sampled_from(list(strategy.blocks(n))))
    used = data.draw(some.integers(1, real))
    end = start + used
    X = np.linalg.inv(rows[:end] @ rows[:end].T)
    assert X.min() > -1e-9, "equal contributions would not be the worst"
    if start:
        assert np.abs(X[:start, start:]).max() < 1e-9, "trees are independent of each other"
    X = X[start:, start:]
    expected = [X[c::period, c::period].sum() for c in range(min(period, used))]
    got = energies(variant, Part(used, real, full), period=period)
    np.testing.assert_allclose(got, expected, rtol=1e-9)


@settings(max_examples=80, deadline=None)
@given(
    some.sampled_from(["plain", "honaker"]),
    some.integers(1, 18),
    some.none() | some.integers(1, 9),
    some.booleans(),
    some.integers(1, 8),
    some.integers(1, 5),
    some.booleans(),
    some.data(),
)
def test_the_search_finds_the_worst_pattern(variant, n, every, completion, b, k, limited, data):
    strategy = tree(variant, every, completion and every is not None)
    t = data.draw(some.integers(1, n))
    rows = strategy.noising(n)[:t]
    X = np.linalg.inv(rows @ rows.T)
    expected = max(X[np.ix_(p, p)].sum() for p in patterns(t, b, k))
    parts = [Part(min(real, t - s), real, full) for s, real, full in strategy.blocks(n) if s < t]
    is_limited = limited or k < -(-t // b)
    search = searches.TreeSearch(b, k, is_limited, carry_of(variant))
    assert search.best(parts).max() == pytest.approx(expected, rel=1e-9)


def test_equal_trees_are_joined_by_doubling():
    for count in (2, 3, 7, 12):
        part = Part(6, 6, 8)
        search = searches.TreeSearch(4, 30, False, 0.5)
        one_by_one = search._part(part, is_first=True)
        for done in range(1, count):
            one_by_one = search._join(one_by_one, search._part(part), (6 * done, 6), is_first=True)
        again = searches.TreeSearch(4, 30, False, 0.5).best([part] * count)
        assert again.max() == pytest.approx(one_by_one[:, 1].max(), rel=1e-12)


def test_what_is_out_of_reach_is_a_labelled_bound(monkeypatch):
    promise = MinSeparation(300, 10, 30)
    tight = measure(tree(), promise)
    trees.tree_sensitivity.cache_clear()
    trees._search.cache_clear()
    monkeypatch.setattr(searches, "MOST_PAIRS", 10)
    bound = measure(tree(), promise)
    assert not bound.exact
    assert bound.squared == trees.tree_squared_sensitivity(tree(), promise) > tight.squared
    monkeypatch.setattr(trees, "TIGHT_STEPS", 100)
    assert not measure(tree(), SinglePass(128)).exact
    assert measure(tree(), SinglePass(128)).squared == 8
    trees.tree_sensitivity.cache_clear()
    trees._search.cache_clear()


def test_a_million_steps_are_exact():
    """A path with turns: Σ over the rows that hold one step, added by hand."""
    n = 1 << 20
    got = prefix_sensitivity(tree(), SinglePass(n), n)
    assert got.exact
    worst = 0.0
    for leaf in (0, 0x55555, 0xAAAAA, 0x2AAAA, 0x15555, 0xFFFFF):
        total = 0.0
        for height in range(21):
            node = leaf >> height
            if node % 2:
                continue  # a right child has no row
            ones = next((d for d in range(height) if not leaf >> (height - 1 - d) & 1), height)
            total += (2 - 2.0**-ones) ** 2 / sum(4.0**-d for d in range(height + 1))
        worst = max(worst, total)
    assert got.squared == pytest.approx(worst, rel=1e-12)


def test_restarted_orders_add_up_block_by_block():
    strategy = tree(restart_every=60, completion=True)
    promise = Restarted(Epochs(12, 20), 120)
    whole = measure(strategy, promise).squared
    rows = strategy.noising(240)
    X = np.linalg.inv(rows @ rows.T)
    blocks = [X[s : s + 120, s : s + 120] for s in (0, 120)]
    assert whole == pytest.approx(
        sum(max(x[j::20, j::20].sum() for j in range(20)) for x in blocks), rel=1e-9
    )
