"""Sensitivity against brute force over every pattern, and against the stored oracles."""

from __future__ import annotations

import itertools
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from tests.strategies.patterns import patterns

import noshuffle.strategies as st
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.participation import (
    Epochs,
    FixedSize,
    MinSeparation,
    Poisson,
    Restarted,
    SinglePass,
)
from noshuffle.strategies import gram
from noshuffle.strategies.sensitivity import sensitivity as measure
from noshuffle.strategies.toeplitz_sensitivity import (
    envelope_bound,
    envelope_squared,
    lag_sizes,
    squared_columns,
    toeplitz_epochs,
)

SHARED = Path(os.environ.get("NOSHUFFLE_SHARED", Path(__file__).parents[3] / "shared"))
ORACLES = SHARED / "oracles" / "accounting.json"

ENCODERS = {
    "identity": lambda n: st.identity(),
    "prefix_sum": lambda n: st.release_sums(),
    "sqrt_toeplitz": lambda n: st.sqrt_toeplitz(),
    "sqrt_toeplitz_band4": lambda n: st.sqrt_toeplitz(4),
    "sqrt_toeplitz_band8": lambda n: st.sqrt_toeplitz(8),
    "sqrt_toeplitz_colnorm": lambda n: st.column_normalized(st.sqrt_toeplitz(), n),
}


def epoch_patterns(b, k):
    return [tuple(range(j, b * k, b)) for j in range(b)]


def brute(X, some_patterns):
    """(largest Σ|X_ij|, largest sᵀXs over signs) over the patterns."""
    upper = reached = 0.0
    for p in some_patterns:
        block = X[np.ix_(p, p)]
        upper = max(upper, np.abs(block).sum())
        if np.all(block >= 0):
            reached = max(reached, block.sum())
        else:
            for tail in itertools.product((1, -1), repeat=len(p) - 1):
                s = np.array((1, *tail))
                reached = max(reached, s @ block @ s)
    return upper, reached


def oracle_rows():
    if not ORACLES.exists():
        return []
    entries = json.loads(ORACLES.read_text())["entries"]
    return [e for e in entries if e["group"] == "mf_sens"]


@pytest.mark.skipif(not ORACLES.exists(), reason=f"no oracle file at {ORACLES}")
@pytest.mark.parametrize("row", oracle_rows(), ids=lambda row: row["id"])
def test_oracles(row):
    params = row["params"]
    n = params["n"]
    got = st.sensitivity(
        ENCODERS[params["encoder"]](n),
        MinSeparation(n, params["min_index_distance"], params["max_participations"]),
    )
    assert got.value == pytest.approx(row["value"], abs=row["tolerance"])
    assert got.exact


def random_toeplitz(rng, kind):
    n = 12
    raw = rng.uniform(0.05, 1.0, size=rng.integers(1, 8))
    if kind == "monotone":
        raw = np.sort(raw)[::-1]
    if kind == "signed":
        raw[1:] *= rng.choice([-1, 1], size=len(raw) - 1)
    gains = tuple(rng.uniform(0.5, 2.0, size=n)) if rng.random() < 0.5 else ()
    build = (
        st.banded
        if rng.random() < 0.6
        else lambda c, gains: st.banded_inverse(coefficients=c, gains=gains)
    )
    return build(raw.tolist(), gains=gains), n


@pytest.mark.parametrize("kind", ["monotone", "positive", "signed"])
@pytest.mark.parametrize("seed", range(25))
def test_random_toeplitz_never_below_the_truth_and_exact_means_exact(kind, seed):
    rng = np.random.default_rng(seed)
    strategy, n = random_toeplitz(rng, kind)
    C = strategy.encoder(n)
    X = C.T @ C
    b = int(rng.choice([1, 2, 3, 4, 6]))
    k = int(rng.integers(1, 6))
    trials = [
        (SinglePass(n), [(j,) for j in range(n)]),
        (Epochs(n // b, b), epoch_patterns(b, n // b)),
        (MinSeparation(n, b, k), patterns(n, b, k)),
    ]
    for participation, allowed in trials:
        upper, reached = brute(X, allowed)
        got = st.sensitivity(strategy, participation)
        assert got.squared >= reached * (1 - 1e-12)
        assert got.squared <= upper * (1 + 1e-11), "the search finds the best bound from |X|"
        assert got.value == pytest.approx(math.sqrt(got.squared))
        if got.exact:
            assert got.squared == pytest.approx(reached, rel=1e-11)
        else:
            assert got.notes.startswith("upper bound")
        if np.all(X >= 0):
            assert got.exact


@pytest.mark.parametrize("seed", range(15))
def test_dense_search_against_brute_force(seed):
    rng = np.random.default_rng(seed)
    n = 11
    C = np.tril(rng.normal(size=(n, n))) * 0.4
    if seed % 2:
        C = np.abs(C)
    np.fill_diagonal(C, rng.uniform(0.5, 1.5, n))
    strategy = st.dense(C)
    for b, k in [(1, 2), (1, 5), (2, 4), (3, 4), (5, 2), (20, 3)]:
        upper, reached = brute(C.T @ C, patterns(n, b, k))
        got = st.sensitivity(strategy, MinSeparation(n, b, k))
        assert got.squared == pytest.approx(upper, rel=1e-11)
        assert got.exact == (reached >= upper * (1 - 1e-12))
        assert got.squared >= reached * (1 - 1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_every_bound_is_above_the_searched_value(seed):
    rng = np.random.default_rng(100 + seed)
    n = 60
    c = rng.normal(size=n) * np.exp(-rng.uniform(0, 0.2) * np.arange(n))
    c[0] = 1.5
    g = rng.uniform(0.5, 2.0, n)
    C = st.banded(c.tolist(), gains=tuple(g)).encoder(n)
    X = C.T @ C
    for b, k in [(7, 3), (15, 4), (1, 2), (30, 9)]:
        most = min(k, math.ceil(n / b))
        value, _, proved = gram.search(X, separation=b, most=most)
        assert proved
        exact_lags = lag_sizes(c, g, first=b)
        np.testing.assert_allclose(exact_lags[b:], gram.lag_sizes(X)[b:], rtol=1e-9, atol=1e-12)
        columns = squared_columns(c, g)
        np.testing.assert_allclose(columns, np.diagonal(X), rtol=1e-12)
        slack = 1 - 1e-12
        assert gram.lag_bound(columns, exact_lags, separation=b, most=most) >= value * slack
        assert envelope_bound(c, g, separation=b, most=most) >= value * slack
        ones = np.ones(n)
        bare = st.banded(c.tolist()).encoder(n)
        value, _, _ = gram.search(bare.T @ bare, separation=b, most=most)
        assert envelope_squared(c, separation=b, most=most) >= value * slack
        assert envelope_bound(c, ones, separation=b, most=most) >= value * slack


def test_bounds_meet_the_closed_form_for_falling_coefficients():
    c = st.sqrt_toeplitz().coefficients(200)
    for b, k in [(10, 20), (10, 3), (64, 2), (199, 2), (1, 7)]:
        closed = envelope_squared(c, separation=b, most=k)
        columns = np.zeros(200)
        for j in range(k):
            if j * b < 200:
                columns[j * b :] += c[: 200 - j * b]
        assert closed == pytest.approx(math.fsum(columns**2), rel=1e-13)
        assert envelope_bound(c, np.ones(200), separation=b, most=k) == pytest.approx(closed)


def test_unfinished_search_is_still_a_bound():
    rng = np.random.default_rng(3)
    C = np.tril(rng.normal(size=(40, 40)))
    X = C.T @ C
    value, _, proved = gram.search(X, separation=2, most=8)
    rough, pattern, finished = gram.search(X, separation=2, most=8, limit=10)
    assert not finished
    assert rough >= value
    assert proved
    assert np.abs(X[np.ix_(pattern, pattern)]).sum() <= rough


def test_long_runs_fall_back_to_labelled_bounds(monkeypatch):
    module = __import__("sys").modules["noshuffle.strategies.sensitivity"]
    strategy = st.blt((0.95, 0.4), (0.2, 0.2), taps=(0.3, 0.2), lag=20)
    participation = MinSeparation(100, 20, 5)
    searched = measure(strategy, participation)
    monkeypatch.setattr(module, "SEARCH_STEPS", 10)
    by_lags = measure(strategy, participation)
    monkeypatch.setattr(module, "LAG_STEPS", 10)
    by_envelope = measure(strategy, participation)
    assert searched.squared <= by_lags.squared <= by_envelope.squared
    assert not by_lags.exact
    assert not by_envelope.exact
    matrix = st.dense(strategy.encoder(100))
    fine = measure(matrix, participation)
    monkeypatch.setattr(module, "SEARCH_WORK", 10)
    coarse = measure(matrix, participation)
    assert fine.squared == pytest.approx(searched.squared)
    assert coarse.squared >= fine.squared
    assert not coarse.exact


@pytest.mark.parametrize("seed", range(8))
def test_epochs_agree_with_the_explicit_matrix(seed):
    rng = np.random.default_rng(seed)
    epochs, b = int(rng.integers(1, 7)), int(rng.integers(1, 7))
    n = max(1, epochs * b - int(rng.integers(0, b)))  # the last epoch may be a part of one
    c = rng.normal(size=n)
    c[0] = 2.0
    g = rng.uniform(0.3, 2.0, n)
    C = st.banded(c.tolist(), gains=tuple(g)).encoder(n)
    upper, block = gram.worst_epoch(C.T @ C, steps_per_epoch=b)
    fast, reached = toeplitz_epochs(c, g, steps_per_epoch=b)
    assert fast == pytest.approx(upper, rel=1e-12)
    assert reached == pytest.approx(max(gram.attained(block), block.sum()), rel=1e-11)


def test_best_sum_against_all_patterns():
    rng = np.random.default_rng(0)
    for _ in range(30):
        n, b, k = int(rng.integers(1, 11)), int(rng.integers(1, 6)), int(rng.integers(1, 6))
        values = rng.uniform(size=n)
        want = max(sum(values[list(p)]) for p in patterns(n, b, k))
        assert gram.best_sum(values, separation=b, most=k) == pytest.approx(want)


def test_signs_are_found_whenever_they_exist():
    rng = np.random.default_rng(1)
    for _ in range(30):
        k = int(rng.integers(1, 9))
        base = rng.uniform(size=(k, k)) * (rng.random((k, k)) < 0.7)
        base = base + base.T + np.eye(k)
        s = rng.choice([-1.0, 1.0], size=k)
        assert gram.attained(base * np.outer(s, s)) == pytest.approx(base.sum())


def test_long_runs_lose_no_digits():
    n, b, k = 100_000, 700, 50
    c = st.sqrt_toeplitz().coefficients(n)
    exact = math.fsum(x * x for x in c)
    got = st.sensitivity(st.sqrt_toeplitz(), SinglePass(n))
    assert got.squared == pytest.approx(exact, rel=1e-14)
    column = np.zeros(n)
    for j in range(k):
        column[j * b :] += c[: n - j * b]
    got = st.sensitivity(st.sqrt_toeplitz(), MinSeparation(n, b, k))
    assert got.squared == pytest.approx(math.fsum(x * x for x in column), rel=1e-13)
    assert got.exact


def test_bands_up_to_the_separation_are_orthogonal():
    signed = st.banded([1.0, -0.5, 0.7, -0.2])
    got = st.sensitivity(signed, MinSeparation(100_000, 4, 50))
    assert got.exact
    assert got.squared == pytest.approx(50 * 1.78, rel=1e-14)
    assert st.sensitivity(signed, Epochs(10, 4)).exact
    normalized = st.column_normalized(st.sqrt_toeplitz(8), 5000)
    got = st.sensitivity(normalized, MinSeparation(5000, 8, 20))
    assert got.exact
    assert got.squared == pytest.approx(20, rel=1e-13)


def test_two_participations_are_always_exact():
    """With two steps one sign makes the cross term positive."""
    strategy = st.banded([1.0, -0.8, 0.1])
    got = st.sensitivity(strategy, Epochs(2, 1))
    assert got.exact
    assert got.squared == pytest.approx(1 + 0.64 + 1 + 2 * 0.8)


def test_identity_counts_participations():
    assert st.sensitivity(st.identity(), Epochs(20, 240)).squared == 20
    assert st.sensitivity(st.identity(), MinSeparation(976, 97, 20)).squared == 11
    assert st.sensitivity(st.identity(), Restarted(Epochs(4, 10), 20)).squared == 4
    for sampled in (Poisson(10, 0.1), FixedSize(10, 5, 50)):
        assert st.sensitivity(st.identity(), sampled).value == 1


@pytest.mark.parametrize(
    ("strategy", "participation"),
    [
        (st.sqrt_toeplitz(), Poisson(10, 0.1)),
        (st.tree(), Poisson(10, 0.1)),
        (st.column_normalized(st.identity(), 10), FixedSize(10, 5, 50)),
        (st.blt((0.5,), (0.2,)), Restarted(Epochs(2, 5), 5)),
        (st.dense([[1.0], [0.5, 1.0]]), Restarted(MinSeparation(2, 1, 2), 1)),
        (st.sqrt_toeplitz(), SinglePass(10**8)),
        (st.banded_inverse(coefficients=[1.0, -2.0]), SinglePass(3000)),
        (st.banded_inverse(coefficients=[1.0, -2.0]), Epochs(3, 1000)),
        (st.banded_inverse(coefficients=[1.0, -2.0]), MinSeparation(600, 10, 5)),
    ],
)
def test_no_answer_is_one_line(strategy, participation):
    with pytest.raises(Unsupported) as caught:
        st.sensitivity(strategy, participation)
    assert "\n" not in str(caught.value)


def test_restarted_single_pass_is_a_single_pass():
    restarted = Restarted(SinglePass(64), 16)
    for strategy in (st.sqrt_toeplitz(), st.tree(), st.banded([1.0, 0.5])):
        assert st.sensitivity(strategy, restarted) == st.sensitivity(strategy, SinglePass(64))


def test_tree_values_known_from_the_literature():
    cifar = st.tree(restart_every=2000, completion=True)
    nodes = {"tree_accounting": "nodes"}
    got = st.sensitivity(cifar, Restarted(Epochs(100, 100), 2000), **nodes)
    assert (got.squared, got.exact) == (4129, False)
    got = st.sensitivity(st.tree(), MinSeparation(2000, 314, 6), **nodes)
    assert (got.squared, got.exact) == (79, False)
    got = st.sensitivity(st.tree("plain"), SinglePass(1600), **nodes)
    assert (got.squared, got.exact) == (11, True)
    with pytest.raises(InvalidInput, match="tree_accounting must be one of tight, nodes"):
        st.sensitivity(st.tree(), SinglePass(4), tree_accounting="leaves")
    loose = st.sensitivity(st.tree(restart_every=50), Restarted(MinSeparation(200, 20, 4), 50))
    assert not loose.exact
