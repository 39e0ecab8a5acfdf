"""Gains on both sides: explicit twins of every form, honest sensitivity, fits, and refusals."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from tests.strategies.lower_bound import rms_lower_bound
from tests.strategies.slow_recipes import materialize

import noshuffle.strategies as st
from noshuffle.errors import HorizonExceeded, InvalidInput, Unsupported
from noshuffle.participation import (
    CyclicPoisson,
    Epochs,
    MinSeparation,
    Poisson,
    Restarted,
    SinglePass,
)
from noshuffle.strategies.blt import blt
from noshuffle.strategies.blt_gains import classes_squared, gram_diagonals, tap_weights
from noshuffle.strategies.blt_poles import spaced
from noshuffle.strategies.fit import candidates, fit
from noshuffle.strategies.fit_blt import fit_blt
from noshuffle.strategies.fit_gains import tight_error
from noshuffle.strategies.fit_two_sided import STEPS_LIMIT, fit_two_sided
from noshuffle.strategies.recipe import Buffered
from noshuffle.strategies.sensitivity import SEARCH_STEPS
from noshuffle.strategies.two_sided_sensitivity import (
    MOST_STEPS,
    class_sizes,
    lag_products,
    largest_column,
    worst_class,
)
from noshuffle.strategies.workload import cooldown, momentum, prefix


def some(n, *, seed=0, taps=(), lag=0):
    rng = np.random.default_rng(seed)
    gains, draws = np.exp(rng.normal(0, 0.4, (2, n)))
    return blt((0.9, 0.3), (0.2, 0.3), gains=gains, draw_gains=draws, taps=taps, lag=lag)


def inner_products(strategy, n):
    C = strategy.encoder(n)
    return C.T @ C


def test_the_matrix_is_the_product_of_its_three_parts():
    strategy = some(9, taps=(0.4, -0.2), lag=3)
    T = st.blt((0.9, 0.3), (0.2, 0.3), taps=(0.4, -0.2), lag=3).encoder(9)
    g, a = np.diag(strategy.gains), np.diag(strategy.draw_gains)
    np.testing.assert_allclose(strategy.encoder(9), a @ T @ g, rtol=1e-14)
    np.testing.assert_allclose(strategy.noising(9), np.linalg.inv(a @ T @ g), atol=1e-12)
    for row, written in zip(strategy.noising(9), strategy.noising_rows(9)):
        np.testing.assert_allclose(row[: len(written)], written, rtol=1e-14)
        assert not row[len(written) :].any()


def test_the_recipe_scales_draws_at_their_own_step_and_at_taps():
    strategy = some(9, taps=(0.4, -0.2), lag=3)
    recipe = strategy.recipe(9)
    assert isinstance(recipe, Buffered)
    assert len(recipe.scale) == len(recipe.draw_scale) == 9
    plain = Buffered(recipe.decays, recipe.scales, recipe.taps)
    scaled = np.diag(recipe.scale) @ materialize(plain, 9) @ np.diag(recipe.draw_scale)
    np.testing.assert_allclose(materialize(recipe, 9), scaled, rtol=1e-14)


def test_unit_draw_gains_are_gains_on_one_side():
    one = st.blt((0.9, 0.4), (0.2, 0.1), taps=(0.3,), lag=4, gains=np.linspace(0.5, 2, 12))
    two = replace(one, draw_gains=(1.0,) * 12)
    np.testing.assert_array_equal(one.encoder(12), two.encoder(12))
    for participation in (SinglePass(12), Epochs(3, 4), MinSeparation(12, 3, 3)):
        expected, got = st.sensitivity(one, participation), st.sensitivity(two, participation)
        assert got.value == pytest.approx(expected.value, rel=1e-12)
        assert got.exact == expected.exact
    np.testing.assert_allclose(st.error(one, 12).per_step, st.error(two, 12).per_step, rtol=1e-13)


def test_no_toeplitz_path_can_take_it_for_its_own():
    """The same filter with gains on one side has another sensitivity, and is another record."""
    strategy = some(6)
    one_sided = replace(strategy, draw_gains=())
    assert st.sensitivity(strategy, Epochs(2, 3)) != st.sensitivity(one_sided, Epochs(2, 3))
    assert (strategy.name, one_sided.name) == ("blt_two_sided", "blt")
    with pytest.raises(Unsupported, match="Toeplitz"):
        st.column_normalized(strategy, 6)
    flat = blt((0.0,), (0.4,), gains=np.ones(8), draw_gains=np.arange(1, 9))
    with pytest.raises(Unsupported, match="bands"):
        st.sensitivity(flat, CyclicPoisson.of(steps=8, groups=4, batch=5, population=200))
    for name, other in (("blt", strategy), ("blt_two_sided", one_sided)):
        with pytest.raises(InvalidInput, match="these fields"):
            st.from_dict(other.to_dict() | {"name": name})


# ---- sensitivity


@pytest.mark.parametrize("n", [1, 5, 127, 128, 300])
@pytest.mark.parametrize("is_signed", [False, True])
def test_lag_products_equal_the_explicit_inner_products(n, is_signed):
    rng = np.random.default_rng(n)
    c, a = rng.normal(size=n) if is_signed else rng.random(n), np.exp(rng.normal(size=n))
    C = a[:, None] * np.array([[c[t - j] if t >= j else 0.0 for j in range(n)] for t in range(n)])
    X, size = C.T @ C, np.abs(C).T @ np.abs(C)
    for lag in {1, 2, max(1, n // 3), n}:
        count = min(-(-n // lag), 40)
        sums, sizes = lag_products(c, a, lag=lag, count=count)
        for m in range(count):
            np.testing.assert_allclose(sums[m, m * lag :], np.diagonal(X, m * lag), atol=1e-11)
            np.testing.assert_allclose(sizes[m, m * lag :], np.diagonal(size, m * lag), rtol=1e-11)
            assert not sums[m, : m * lag].any()


@pytest.mark.parametrize("seed", range(6))
def test_epochs_are_never_below_the_truth_in_exact_arithmetic(seed):
    """Whole numbers up to 2²⁰: the truth is known to the last digit."""
    rng = np.random.default_rng(seed)
    k, b = 4, 5
    n = k * b
    low = -9 if seed % 2 else 0
    c, a, g = rng.integers(low, 10, n), rng.integers(1, 10, n), rng.integers(1, 10, n)
    C = [[int(a[t] * c[t - j] * g[j]) if t >= j else 0 for j in range(n)] for t in range(n)]
    truth = 0
    for j in range(b):
        steps = range(j, n, b)
        entries = [sum(C[t][i] * C[t][m] for t in range(n)) for i in steps for m in steps]
        truth = max(truth, sum(abs(x) for x in entries))
    columns = max(sum(C[t][j] ** 2 for t in range(n)) for j in range(n))
    c, a, g = c.astype(float), a.astype(float), g.astype(float)
    upper, is_attained = worst_class(c, a, g, epochs=k)
    assert truth <= upper <= truth * (1 + 1e-11)
    assert is_attained or low < 0
    assert columns <= largest_column(c, a, g) <= columns * (1 + 1e-13)


@pytest.mark.parametrize("seed", range(8))
def test_rounding_is_allowed_for(seed):
    """Against sums in extended precision, for gains over many orders of magnitude."""
    rng = np.random.default_rng(seed)
    k, b = 3, 40
    n = k * b
    c, a, g = rng.normal(size=n), np.exp(rng.normal(0, 4, n)), np.exp(rng.normal(0, 4, n))
    wide = [x.astype(np.longdouble) for x in (c, a, g)]
    C = wide[1][:, None] * np.tril(wide[0][np.arange(n)[:, None] - np.arange(n)]) * wide[2]
    X = np.abs(C.T @ C)
    truth = [X[j::b, j::b].sum() for j in range(b)]
    total, rounding = class_sizes(c, a, g, epochs=k)
    assert np.all(total + rounding >= truth)
    assert np.all(total <= truth + rounding)
    assert largest_column(c, a, g) >= np.diagonal(X).max()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("k", "b"), [(2, 9), (3, 4), (6, 2), (1, 7), (5, 1)])
def test_epochs_cover_every_class_and_every_sign(seed, k, b):
    taps = tuple(np.random.default_rng(seed).uniform(-0.9, 0.9, min(k - 1, 2)))
    strategy = some(k * b + 3, seed=seed, taps=taps, lag=b if taps else 0)
    X = inner_products(strategy, k * b)
    got = st.sensitivity(strategy, Epochs(k, b))
    blocks = [X[j::b, j::b] for j in range(b)]
    signs = [np.array(s) for s in itertools.product((1, -1), repeat=k)]
    reached = max(s @ block @ s for block in blocks for s in signs)
    bound = max(np.abs(block).sum() for block in blocks)
    assert reached * (1 - 1e-12) <= got.squared
    assert got.squared == pytest.approx(bound, rel=1e-11)
    if got.exact:
        assert got.squared == pytest.approx(reached, rel=1e-11)
    else:
        assert X.min() < 0
        assert got.notes


def test_sign_changes_are_said_to_be_a_bound():
    strategy = blt((0.5,), (0.3,), gains=np.ones(6), draw_gains=np.ones(6), taps=(0.9, 0.9), lag=2)
    X = inner_products(strategy, 6)[::2, ::2]
    assert min(np.prod(np.sign(X[np.triu_indices(3, 1)])), 0) < 0  # no signs make all positive
    assert not st.sensitivity(strategy, Epochs(3, 2)).exact


def test_a_shorter_run_may_not_be_longer():
    strategy = some(12)
    assert st.sensitivity(strategy, SinglePass(5)).exact
    assert st.error(strategy, 5).rms > 0
    for action in (
        lambda: st.sensitivity(strategy, SinglePass(13)),
        lambda: st.sensitivity(strategy, Epochs(13, 1)),
        lambda: st.error(strategy, 13),
        lambda: strategy.encoder(13),
        lambda: strategy.noising(13),
        lambda: strategy.recipe(13),
    ):
        with pytest.raises(HorizonExceeded, match="cover 12 steps"):
            action()


def test_what_has_no_proof_is_refused():
    long = SEARCH_STEPS + 2
    strategy = some(long)
    with pytest.raises(Unsupported, match="min-separation"):
        st.sensitivity(strategy, MinSeparation(long, 600, 2))
    assert st.sensitivity(strategy, MinSeparation(long, long, 9)).exact  # one participation
    for participation in (Poisson(9, 0.1), Restarted(Epochs(3, 3), 3)):
        with pytest.raises(Unsupported):
            st.sensitivity(strategy, participation)
    assert st.sensitivity(strategy, Restarted(SinglePass(9), 3)).exact
    endless = blt((0.5,), (0.1,), gains=np.ones(2**16), draw_gains=np.ones(2**16))
    with pytest.raises(Unsupported, match="at most"):
        st.sensitivity(endless, SinglePass(MOST_STEPS + 1))
    with pytest.raises(Unsupported, match="at most"):
        st.error(endless, 2**16, workload=momentum(0.9))
    with pytest.raises(Unsupported, match="at most"):
        endless.encoder(2**16)


def test_growth_beyond_floating_point_is_refused():
    strategy = blt((0.5,), (0.1,), gains=(1e200,) * 4, draw_gains=(1e150,) * 4)
    for participation in (SinglePass(4), Epochs(2, 2)):
        with pytest.raises(Unsupported, match="floating point"):
            st.sensitivity(strategy, participation)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gains": ()}, "one gain and one draw gain"),
        ({"gains": (1.0,)}, "1 gains and 2 draw gains"),
        ({"gains": (1.0, 0.0)}, "gains must be finite"),
        ({"draw_gains": (1.0, np.nan)}, "draw_gains must be finite"),
        ({"draw_gains": (1.0, -1.0)}, "draw_gains must be finite"),
        ({"decays": (1.0,)}, "decays must lie"),
        ({"scales": (0.1, 0.1)}, "as many scales"),
        ({"lag": 3}, "without taps"),
    ],
)
def test_bad_values_are_refused_in_one_line(changes, message):
    good = {"decays": (0.5,), "scales": (0.1,), "gains": (1.0, 1.0), "draw_gains": (1.0, 1.0)}
    with pytest.raises(InvalidInput, match=message) as caught:
        blt(**(good | changes))
    assert "\n" not in str(caught.value)


# ---- forms of the search


@pytest.mark.parametrize("n", [1, 11, 24])
@pytest.mark.parametrize(("p", "lag"), [(0, 24), (2, 6), (5, 7)])
def test_the_error_form_is_the_explicit_norm(n, p, lag):
    rng = np.random.default_rng(p)
    d, a, taps = np.exp(rng.normal(size=n)), np.exp(rng.normal(size=n)), rng.normal(0, 0.4, p)
    decays, nu, kappa = np.array([0.8, 0.3]), np.array([0.4, -0.2]), 0.9
    filtered = np.exp(np.arange(n)[:, None] * np.log(decays)) @ nu
    filtered[0] += kappa
    series = filtered.copy()
    for m, tap in enumerate(taps, start=1):
        if m * lag < n:
            series[m * lag :] += tap * filtered[: n - m * lag]
    T = np.array([[series[t - s] if t >= s else 0.0 for s in range(n)] for t in range(n)])
    expected = np.sum((np.cumsum(d[:, None] * T, axis=0) / a) ** 2)
    omega, _ = tap_weights(1 / a**2, taps, lag=lag)
    sums, _ = gram_diagonals(d, decays, nu, kappa, lag=lag, count=len(omega))
    assert sum(w @ x for w, x in zip(omega, sums)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("k", [1, 3, 12])
def test_the_classes_of_the_search_are_those_of_the_measure(k):
    rng = np.random.default_rng(k)
    c, a, g = rng.normal(size=12), np.exp(rng.normal(size=12)), np.exp(rng.normal(size=12))
    squared, _ = classes_squared(c, g, a * a, epochs=k)
    np.testing.assert_allclose(squared, class_sizes(c, a, g, epochs=k)[0], rtol=1e-11)
    smooth, _ = classes_squared(c, g, a * a, epochs=k, smoothing=0.1)
    assert np.all(smooth >= squared * (1 - 1e-12))


@pytest.mark.parametrize(("k", "d", "p"), [(1, 1, 0), (1, 3, 0), (4, 2, 2), (3, 1, 2), (6, 2, 0)])
def test_the_gradient_is_that_of_differences(k, d, p):
    n, rng = 24, np.random.default_rng(k)
    point = np.concatenate([rng.normal(0, 0.3, 2 * n), spaced(d, 0.05, 0.6), [0.3, -0.2][:p]])
    rates = np.linspace(1.0, 0.3, n)

    def value(x):
        gains = [x[:n], x[n : 2 * n]]
        return tight_error(gains, x[2 * n :], d, epochs=k, rates=rates, smoothing=0.02)

    steps = 1e-6 * np.eye(len(point))
    numeric = [(value(point + e)[0] - value(point - e)[0]) / 2e-6 for e in steps]
    np.testing.assert_allclose(value(point)[1], numeric, rtol=1e-5, atol=1e-8)


# ---- fits


def measured(strategy, participation, workload=None):
    """rms error × sensitivity from the explicit matrices."""
    n = participation.steps
    X = np.abs(inner_products(strategy, n))
    if isinstance(participation, Epochs):
        b = participation.steps_per_epoch
        squared = max(X[j::b, j::b].sum() for j in range(b))
    else:
        squared = X.diagonal().max()
    B = (workload or prefix()).matrix(n) @ strategy.noising(n)
    return np.sqrt(squared * np.sum(B**2) / n)


FITS = [  # participation, buffers, taps, at most this
    (SinglePass(64), 4, 0, 2.1004),
    (SinglePass(256), 4, 0, 2.528),
    (Epochs(4, 16), 2, 3, 4.453),
    (Epochs(4, 16), 1, 0, 4.70),
]


@pytest.mark.parametrize(("participation", "buffers", "taps", "most"), FITS)
def test_fits_report_what_they_measure_and_beat_one_side(participation, buffers, taps, most):
    found = fit_two_sided(participation, buffers=buffers, taps=taps)
    one = fit_blt(participation, buffers=buffers, taps=taps, gains=True)
    assert found.strategy.name == "blt_two_sided"
    assert found.objective == pytest.approx(measured(found.strategy, participation), rel=1e-10)
    assert rms_lower_bound(participation) < found.objective < most
    assert found.objective < one.objective
    assert found.converged
    assert found.strategy.buffers(participation.steps) <= buffers
    assert st.sensitivity(found.strategy, participation).value == pytest.approx(1, rel=1e-10)
    X = np.abs(inner_products(found.strategy, participation.steps))
    b = participation.steps_per_epoch if isinstance(participation, Epochs) else participation.steps
    tight = [X[j::b, j::b].sum() for j in range(b)]
    np.testing.assert_allclose(tight, 1.0, rtol=1e-10)


def test_two_fits_are_equal():
    fits = [fit_two_sided(Epochs(3, 4), buffers=1, taps=2) for _ in range(2)]
    assert fits[0] == fits[1]


def test_a_schedule_is_fitted_for():
    workload = st.Workload(learning_rates=cooldown(48))
    found = fit_two_sided(Epochs(4, 12), buffers=1, taps=2, workload=workload)
    one = fit_blt(Epochs(4, 12), buffers=1, taps=2, gains=True, workload=workload)
    expected = measured(found.strategy, Epochs(4, 12), workload)
    assert found.objective == pytest.approx(expected, rel=1e-10)
    assert found.objective < one.objective


@pytest.mark.parametrize(
    "participation", [SinglePass(1), SinglePass(2), Epochs(1, 3), Epochs(2, 1), Epochs(3, 1),
                      MinSeparation(9, 9, 4)]
)  # fmt: skip
def test_tiny_runs(participation):
    found = fit_two_sided(participation, buffers=2)
    assert found.objective == pytest.approx(
        st.error(found.strategy, participation.steps).rms
        * st.sensitivity(found.strategy, participation).value
    )
    assert found.objective >= rms_lower_bound(participation) * (1 - 1e-9)


def test_by_name_and_among_the_candidates():
    found = fit("blt_two_sided", Epochs(2, 4), buffers=1, taps=1)
    assert found == fit_two_sided(Epochs(2, 4), buffers=1, taps=1)
    for participation in (Epochs(2, 4), SinglePass(8)):
        names = [one.strategy.name for one in candidates(participation, max_buffers=1)]
        assert names.index("blt_two_sided") < names.index("blt")


@pytest.mark.parametrize(
    ("participation", "options"),
    [
        (MinSeparation(12, 3, 3), {}),
        (Poisson(12, 0.1), {}),
        (Restarted(Epochs(3, 4), 4), {}),
        (SinglePass(12), {"workload": momentum(0.9)}),
        (SinglePass(12), {"taps": 1}),
        (SinglePass(STEPS_LIMIT + 1), {}),
        (Epochs(1000, 20), {}),
    ],
)
def test_what_is_not_fitted_is_refused(participation, options):
    with pytest.raises(Unsupported) as caught:
        fit_two_sided(participation, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options", [{"buffers": 0}, {"taps": -1}])
def test_bad_options(options):
    with pytest.raises(InvalidInput):
        fit_two_sided(Epochs(3, 4), **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("participation", "buffers", "taps", "most"),
    [
        (SinglePass(1024), 4, 0, 2.9572),
        (SinglePass(4096), 4, 0, 3.395),
        (Epochs(4, 64), 3, 3, 5.2730),
        (Epochs(16, 4), 3, 15, 12.17),
        (Epochs(20, 100), 2, 6, 18.63),
        (Epochs(20, 240), 2, 6, 19.78),
    ],
)
def test_larger_fits(participation, buffers, taps, most):
    found = fit_two_sided(participation, buffers=buffers, taps=taps)
    assert found.objective < most
    assert st.sensitivity(found.strategy, participation).value == pytest.approx(1, rel=1e-10)
