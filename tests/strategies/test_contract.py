"""One contract over every strategy: inverse, stream, causality, round trip, privacy, error.

A new strategy joins by one line in CASES.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import fields, is_dataclass
from functools import cache

import numpy as np
import pytest
from tests.strategies.patterns import patterns
from tests.strategies.slow_recipes import materialize

import noshuffle.strategies as st
from noshuffle.errors import InvalidInput, NoshuffleError, Unsupported
from noshuffle.participation import Epochs, MinSeparation, Restarted, SinglePass
from noshuffle.strategies import recipe as recipes
from noshuffle.strategies.blt import blt
from noshuffle.strategies.registry import _BUILT_IN

N = 12
RISING = tuple(np.linspace(0.6, 1.7, N).tolist())
LOWER = np.tril(np.random.default_rng(7).normal(size=(N, N)), -1) * 0.3 + np.eye(N)

CASES = {
    "identity": st.identity(),
    "identity-gains": st.column_normalized(st.identity(), N),
    "release-sums": st.release_sums(),
    "release-sums-normalized": st.column_normalized(st.release_sums(), N),
    "tree-plain": st.tree("plain"),
    "tree-honaker": st.tree("honaker"),
    "tree-full": st.tree("full"),
    "tree-plain-restart": st.tree("plain", restart_every=5),
    "tree-honaker-restart": st.tree("honaker", restart_every=4),
    "tree-full-restart": st.tree("full", restart_every=6),
    "tree-plain-completion": st.tree("plain", restart_every=3, completion=True),
    "tree-honaker-completion": st.tree("honaker", restart_every=5, completion=True),
    "tree-full-completion": st.tree("full", restart_every=5, completion=True),
    "sqrt": st.sqrt_toeplitz(),
    "sqrt-normalized": st.sqrt_toeplitz(normalized=N),
    "sqrt-gains": st.sqrt_toeplitz(gains=RISING),
    "sqrt-momentum": st.sqrt_toeplitz(momentum=0.9, decay=0.99),
    "sqrt-bands": st.sqrt_toeplitz(3),
    "sqrt-bands-normalized": st.sqrt_toeplitz(4, normalized=N + 3),
    "bisr": st.banded_inverse(4),
    "bisr-gains": st.banded_inverse(4, gains=RISING[::-1]),
    "inverse-signed": st.banded_inverse(coefficients=[1.2, 0.5, -0.4, 0.3]),
    "banded": st.banded([1.0, 0.6, 0.3]),
    "banded-signed": st.banded([1.5, -0.6, 0.3, 0.4], gains=RISING),
    "banded-one": st.banded([2.0]),
    "blt": st.blt((0.95, 0.5), (0.2, 0.3)),
    "blt-normalized": st.blt((0.95, 0.5), (0.2, 0.3), normalized=N),
    "blt-taps": st.blt((0.95, 0.5), (0.2, 0.3), taps=(0.3, 0.2), lag=3),
    "blt-taps-gains": st.blt((0.9,), (0.4,), taps=(0.3,), lag=4, gains=RISING),
    "blt-two-sided": blt((0.95, 0.5), (0.2, 0.3), gains=RISING, draw_gains=RISING[::-1]),
    "blt-two-sided-taps": blt(
        (0.9,), (0.4,), taps=(0.3, -0.2), lag=3, gains=(*RISING, 1.0), draw_gains=(0.7, *RISING)
    ),
    "dense": st.dense(LOWER),
    "dense-positive": st.dense(np.abs(LOWER)),
}
#: What later steps do to earlier rows: these plan with the horizon in view.
NEEDS_HORIZON = {name for name in CASES if "full" in name or "completion" in name}

every_case = pytest.mark.parametrize("name", CASES)


@every_case
@pytest.mark.parametrize("n", [1, 2, 5, 8, N])
def test_noising_inverts_the_encoder(name, n):
    strategy = CASES[name]
    C, M = strategy.encoder(n), strategy.noising(n)
    assert C.shape[1] == M.shape[0] == n
    assert C.shape[0] == M.shape[1] >= n
    np.testing.assert_allclose(M @ C, np.eye(n), atol=1e-12)


@every_case
@pytest.mark.parametrize("n", [1, 2, 5, 8, N])
def test_the_stream_is_the_matrix(name, n):
    strategy = CASES[name]
    recipe = strategy.recipe(n)
    assert recipes.rows(recipe, n) == strategy.encoder(n).shape[0]
    np.testing.assert_allclose(materialize(recipe, n), strategy.noising(n), atol=1e-12)


@every_case
def test_nothing_looks_ahead(name):
    """A protected row is complete before any step reads its noise."""
    strategy = CASES[name]
    C, M = strategy.encoder(N), strategy.noising(N)
    if C.shape[0] == N:
        assert not np.triu(C, 1).any()
        assert not np.triu(M, 1).any()
        assert np.all(np.diagonal(C) > 0)
    for row in range(C.shape[0]):
        steps, readers = np.flatnonzero(C[row]), np.flatnonzero(np.abs(M[:, row]) > 1e-14)
        if len(steps) and len(readers):
            assert readers[0] >= steps[-1]


@every_case
def test_json_round_trip(name):
    strategy = CASES[name]
    record = json.loads(json.dumps(strategy.to_dict()))
    again = st.from_dict(record)
    assert again == strategy
    assert hash(again) == hash(strategy)
    assert again.to_dict() == strategy.to_dict()
    one, two = strategy.recipe(N), again.recipe(N)
    np.testing.assert_array_equal(materialize(one, N), materialize(two, N))


@every_case
def test_is_a_frozen_record_with_words(name):
    strategy = CASES[name]
    assert is_dataclass(strategy)
    with pytest.raises(AttributeError):
        setattr(strategy, fields(strategy)[0].name, None)
    assert strategy.name
    assert strategy.words()
    assert "\n" not in strategy.words()


@every_case
def test_buffers_are_counted(name):
    for n in (1, 2, N):
        buffers = CASES[name].buffers(n)
        assert isinstance(buffers, int)
        assert buffers >= 0


@every_case
def test_a_shorter_run_is_a_prefix(name):
    strategy = CASES[name]
    if name in NEEDS_HORIZON:
        pytest.skip("its last tree depends on the horizon")
    whole, part = strategy.noising(N), strategy.noising(7)
    rows = part.shape[1]
    np.testing.assert_allclose(whole[:7, :rows], part, atol=1e-13)
    assert not whole[:7, rows:].any()


@cache
def allowed(participation, steps):
    """Every pattern of the first `steps` steps."""
    if isinstance(participation, SinglePass):
        return [(t,) for t in range(steps)]
    if isinstance(participation, Epochs):
        b = participation.steps_per_epoch
        return [tuple(range(j, steps, b)) for j in range(min(b, steps))]
    if isinstance(participation, MinSeparation):
        b, k = participation.separation, participation.max_participations
        return list(patterns(steps, b, k))
    base, every = participation.participation, participation.every
    blocks = [
        [()] + [tuple(s + t for t in p) for p in allowed(base, min(every, steps - s))]
        for s in range(0, steps, every)
    ]
    whole = [sum(parts, ()) for parts in itertools.product(*blocks)]
    most = 1 if isinstance(base, SinglePass) else getattr(base, "max_participations", steps)
    return [p for p in whole if 0 < len(p) <= most]


def reached(X, pattern):
    """The largest sᵀXs over signs: what one unit certainly can do."""
    block = X[np.ix_(pattern, pattern)]
    if np.all(block > -1e-14 * np.abs(block).max()):
        return block.sum()
    signs = all_signs(len(pattern))
    return ((signs @ block) * signs).sum(axis=1).max()


@cache
def all_signs(count):
    """One in a row; the first is positive, since −s does what s does."""
    return np.array([(1, *s) for s in itertools.product((1, -1), repeat=count - 1)])


PARTICIPATIONS = [
    SinglePass(N),
    SinglePass(7),
    Epochs(1, N),
    Epochs(4, 3),
    Epochs(3, 4),
    Epochs(2, 5),
    MinSeparation(N, 1, 2),
    MinSeparation(N, 3, 4),
    MinSeparation(N, 4, 2),
    MinSeparation(11, 5, 9),
    MinSeparation(N, 40, 3),
    Restarted(SinglePass(N), 5),
    Restarted(Epochs(4, 3), 6),
    Restarted(Epochs(2, 6), 4),
    Restarted(MinSeparation(N, 2, 3), 6),
    Restarted(MinSeparation(N, 3, 9), 5),
]


@every_case
@pytest.mark.parametrize("participation", PARTICIPATIONS, ids=str)
def test_sensitivity_of_every_prefix_covers_every_pattern(name, participation):
    """The twin: Σ = N·Nᵀ of the first t rows of the whole run, inverted; all patterns tried."""
    strategy, n = CASES[name], participation.steps
    every = getattr(strategy, "restart_every", None)
    if isinstance(participation, Restarted) and not isinstance(
        participation.participation, SinglePass
    ):
        is_plain = strategy == st.identity()
        if not is_plain and (every is None or participation.every % every):
            with pytest.raises(NoshuffleError):
                st.sensitivity(strategy, participation)
            return
    rows = strategy.noising(n)
    before = 0.0
    for t in range(1, n + 1):
        X = np.linalg.inv(rows[:t] @ rows[:t].T)
        truth = max(reached(X, p) for p in allowed(participation, t))
        got = st.prefix_sensitivity(strategy, participation, t)
        assert got.squared >= truth * (1 - 1e-10)
        assert got.value == pytest.approx(np.sqrt(got.squared), rel=1e-15)
        if got.exact:
            assert got.squared == pytest.approx(truth, rel=1e-10)
            assert truth >= before * (1 - 1e-10), "a longer run never costs less"
            before = truth
        elif every is not None and isinstance(participation, Restarted):
            assert "separation across the end" in got.notes or "every node" in got.notes
        elif name.startswith("tree"):
            assert "full" in name, "only parts of least-squares trees have no search"
            assert isinstance(participation, MinSeparation)
        else:
            assert X.min() < 0, "only sign changes make a short run inexact"
    assert st.sensitivity(strategy, participation) == st.prefix_sensitivity(
        strategy, participation, n
    )


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("tree")])
@pytest.mark.parametrize("participation", PARTICIPATIONS[:11], ids=str)
def test_the_node_count_is_never_less(name, participation):
    strategy, n = CASES[name], participation.steps
    C = strategy.encoder(n)
    counted = max(reached(C.T @ C, p) for p in allowed(participation, n))
    for t in range(1, n + 1):
        nodes = st.prefix_sensitivity(strategy, participation, t, tree_accounting="nodes")
        tight = st.prefix_sensitivity(strategy, participation, t)
        assert nodes.squared >= tight.squared * (1 - 1e-12)
        assert not nodes.exact or nodes.squared == pytest.approx(tight.squared, rel=1e-12)
    assert nodes.squared == pytest.approx(counted, rel=1e-12)


@every_case
@pytest.mark.parametrize(
    "workload",
    [st.prefix(), st.momentum(0.9), st.momentum(0.5, learning_rates=RISING)],
    ids=["prefix", "momentum", "schedule"],
)
def test_error_is_that_of_the_explicit_product(name, workload):
    strategy = CASES[name]
    for n in (1, 6, N):
        rows = np.linalg.norm(workload.matrix(n) @ strategy.noising(n), axis=1)
        got = st.error(strategy, n, workload=workload)
        np.testing.assert_allclose(got.per_step, rows, rtol=1e-11)
        assert got.max == pytest.approx(rows.max(), rel=1e-11)
        assert got.rms == pytest.approx(np.sqrt(np.mean(rows**2)), rel=1e-11)


@every_case
@pytest.mark.parametrize("steps", [0, -1, 2.5, None, 10**12])
def test_bad_horizons_are_refused(name, steps):
    for action in (CASES[name].encoder, CASES[name].noising):
        with pytest.raises(NoshuffleError) as caught:
            action(steps)
        assert "\n" not in str(caught.value)


def test_every_builder_has_a_case():
    assert {type(strategy) for strategy in CASES.values()} == set(_BUILT_IN)


@pytest.mark.parametrize(
    "action",
    [
        lambda: st.from_dict({}),
        lambda: st.from_dict([]),
        lambda: st.from_dict({"name": "banded"}),
        lambda: st.from_dict({"name": "banded", "bands": [1.0], "colour": "red"}),
        lambda: st.from_dict({"name": "tree", "colour": "red"}),
    ],
)
def test_bad_records_are_refused_in_one_line(action):
    with pytest.raises(InvalidInput) as caught:
        action()
    assert "\n" not in str(caught.value)
    with pytest.raises(Unsupported, match="'nonesuch' is not known here: import the module"):
        st.from_dict({"name": "nonesuch"})


def test_column_normalisation_is_for_toeplitz_strategies():
    assert st.column_normalized(st.sqrt_toeplitz(gains=(1.0, 2.0)), 9).normalized == 9
    with pytest.raises(Unsupported, match="Toeplitz"):
        st.column_normalized(st.tree(), 9)
    with pytest.raises(InvalidInput):
        st.column_normalized(st.identity(), 0)


def test_a_module_cannot_take_the_place_of_a_measure():
    for name in ("sensitivity", "error"):
        measure = getattr(st, name)
        setattr(st, name, sys.modules[f"noshuffle.strategies.{name}"])
        assert getattr(st, name) is measure


def test_public_names_are_there():
    assert sorted(st.__all__) == st.__all__
    for name in st.__all__:
        assert callable(getattr(st, name)), name


@pytest.mark.parametrize(
    "first",
    [
        "from noshuffle.strategies.sensitivity import Sensitivity",
        "import noshuffle.strategies.error, noshuffle.strategies.registry",
    ],
)
def test_measures_are_functions_whatever_was_imported_first(first):
    check = (
        "; import noshuffle.strategies as st"
        "; from noshuffle.strategies.sensitivity import Sensitivity, sensitivity"
        "; from noshuffle.strategies.error import Error, error"
        "; import types; assert st.sensitivity is sensitivity and st.error is error"
        "; assert isinstance(st.error, types.FunctionType), st.error"
    )
    subprocess.run([sys.executable, "-c", first + check], check=True)
