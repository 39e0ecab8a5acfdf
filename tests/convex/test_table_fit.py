"""Whole tables behind the estimators: choice, sensitivity, noise law, evidence, audit."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse
from scipy.stats import beta
from sklearn.base import clone

import noshuffle
from noshuffle.accounting import gaussian
from noshuffle.convex import (
    PrivateLinearRegression,
    PrivateLogisticRegression,
    PrivateSVC,
)
from noshuffle.convex.given_bounds import NoBounds
from noshuffle.convex.gradient_rule import GradientRule
from noshuffle.convex.losses import logistic, squared
from noshuffle.convex.margins import PerMargin, Softmax
from noshuffle.convex.schedule import steps_for
from noshuffle.errors import InvalidInput, NoshuffleError, Unsupported
from noshuffle.integrations.estimator_search import private_search
from noshuffle.release.verify import verify


def table(n: int = 3000, p: int = 4, seed: int = 0) -> tuple[Any, Any]:
    """Columns of unequal spread far from zero, which a step on raw columns would not resolve."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, p))
    x = np.clip(0.6 + 0.1 * z * 0.5 ** np.arange(p), 0, 1)
    return x, (z @ np.resize([1.0, -1.0], p) + 0.3 * rng.normal(size=n) > 0).astype(int)


def quick(**settings: Any) -> PrivateLogisticRegression:
    return PrivateLogisticRegression(**{"bounds": (0, 1), "classes": [0, 1], **settings})


@pytest.mark.parametrize("mechanism", ["blt", "tree"])
def test_a_named_mechanism_is_never_replaced(mechanism: str) -> None:
    """blt, the default of "ftrl", became independent noise under "auto" without a word."""
    x, y = table(200)
    model = quick(test_seed=0, mechanism=mechanism).fit(x, y)
    assert (model.solver_, model.plan_.strategy.name) == ("ftrl", mechanism)
    with pytest.raises(Unsupported, match="solver='gd' has no mechanism; use solver='ftrl'"):
        quick(solver="gd", mechanism=mechanism).fit(x, y)


def test_auto_takes_gd_and_says_so() -> None:
    x, y = table()
    model = quick(test_seed=0).fit(x, y)
    assert (model.solver_, model.plan_.steps) == ("gd", model.n_steps_)
    assert model.score(x, y) > 0.9
    assert model.privacy_.epsilon == pytest.approx(1.0)
    assert model.privacy_.exact
    words = model.privacy_.words()
    assert "Solver gd was taken, from public settings alone" in words
    assert "progressive_score_" not in words
    assert math.isnan(model.progressive_score_)
    by_stream = quick(test_seed=0, batch_size=100).fit(x, y)
    assert by_stream.solver_ == "ftrl"
    assert "batch_size given" in by_stream.privacy_.words()
    assert by_stream.score(x, y) < model.score(x, y)
    assert quick(solver="gd", passes=5, test_seed=0).fit(x, y).n_steps_ == 5


def test_auto_chooses_vertices_where_columns_are_many(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    x = rng.choice([-1.0, 1.0], size=(1000, 1200)).astype(np.float32)
    y = (x[:, 3] > 0).astype(int)
    wide = {"bounds": (-1, 1), "epsilon": 2.0, "test_seed": 0}
    model = quick(**wide).fit(x, y)
    assert (model.solver_, model.n_features_in_) == ("frank_wolfe", 1200)
    assert np.abs(model.coef_).sum() <= 1.0
    assert model.score(x, y) > 0.9  # "gd" has 0.6 there
    assert (
        "Solver frank_wolfe was taken, from public settings alone: 1200" in model.privacy_.words()
    )
    weight = np.ones(1000)
    for more, fitted in (
        ({"penalty": "l2"}, {}),
        ({"bounds": None, "feature_bound": 40.0}, {}),
        ({"epsilon": 0.1}, {}),  # the noise hides all: the intercept
        ({}, {"sample_weight": weight}),
        ({}, {"run": tmp_path / "run"}),
    ):
        assert quick(**{**wide, **more}).fit(x, y, **fitted).solver_ == "gd"


def rules() -> list[GradientRule]:
    common = {"features": 3, "clip_norm": 0.7, "rate": 1.0}
    kinds = ((PerMargin(logistic()), 1), (Softmax(), 4), (PerMargin(squared(radius=np.inf)), 1))
    return [
        GradientRule(loss=loss, outputs=k, readings=r, length=length, **common)  # type: ignore[arg-type]
        for loss, k in kinds
        for r, length in ((1, 3.0), (0, 3.0), (0, 0.0))
    ]


@pytest.mark.parametrize("rule", rules())
def test_one_row_adds_at_most_the_clip_norm(rule: GradientRule) -> None:
    """In readings and in gradients, at iterates far away, for rows of every size."""
    rng, worst = np.random.default_rng(0), 0.0
    for count in (0, rule.readings):
        rule._count = count
        rule._centre, rule._scale = rng.normal(size=3), 10.0 ** rng.uniform(-2, 2, 3)
        for size in (0.0, 1e-3, 1.0, 1e6, 1e200):
            rule._theta = 3.0 * rng.normal(size=rule._theta.shape)
            x = size * rng.normal(size=(30, 3))
            y = rng.integers(2, size=30) if rule.loss.is_classifier else rng.uniform(-1, 1, 30)
            one = [
                float(np.linalg.norm(rule.clipped_sum(x[i : i + 1], y[i : i + 1])))
                for i in range(30)
            ]
            assert np.isfinite(one).all()
            worst = max(worst, *one)
            whole = rule.clipped_sum(x, y)
            gone = rule.clipped_sum(x[1:], y[1:])
            assert np.linalg.norm(whole - gone) <= 0.7 * (1 + 1e-9)
    assert 0.69 < worst <= 0.7


def test_noise_has_the_stated_law(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    update = GradientRule.update

    def watched(self: GradientRule, mean: Any, *, step: int) -> None:
        seen.append(mean.copy())
        update(self, mean, step=step)

    monkeypatch.setattr(GradientRule, "update", watched)
    n = 4000
    x, y = np.zeros((n, 500)), np.tile([0, 1], n // 2)
    model = quick(bounds=(-1, 1), test_seed=3).fit(x, y)
    z = model.plan_.noise_multiplier
    steps = model.plan_.steps
    assert gaussian.epsilon(mu=math.sqrt(steps) / z, delta=1e-6) == pytest.approx(1.0)
    readings = round(steps / 10)
    drawn = np.concatenate([m[1000:] if t < readings else m[:500] for t, m in enumerate(seen)])
    assert len(drawn) > 2000
    spread = float(np.std(drawn * n / z))
    assert abs(spread - 1) < 0.06  # 2/3 and 3/2 of the right scale are far outside


def test_small_tables_learn_the_intercept_only() -> None:
    x, _ = table(200, 20)
    model = quick(epsilon=0.05, test_seed=2).fit(x, np.r_[np.ones(170, int), np.zeros(30, int)])
    assert not model.coef_.any()
    assert model.intercept_[0] > 0
    assert steps_for(rows=100, columns=20, mu=0.03).length == 0
    assert steps_for(rows=200, columns=20, mu=0.06).readings == 0  # columns as they are
    assert steps_for(rows=200, columns=20, mu=0.06, rate=None).length == 0  # numbers


def test_a_run_folder_of_gd_is_verified(tmp_path: Path) -> None:
    x, y = table(400)
    model = quick(epsilon=4.0).fit(x, y, ids=range(400), run=tmp_path / "run")
    verdict = verify(tmp_path / "run")
    assert verdict.is_verified
    assert verdict.released == model.n_steps_


def test_a_batch_is_no_stream(tmp_path: Path) -> None:
    x, y = table(400)
    model = quick(epsilon=4.0, test_seed=0).fit(x, y)
    with pytest.raises(InvalidInput, match="from the first row on"):
        model.partial_fit(x, y)
    model.save(tmp_path / "kept")
    again = PrivateLogisticRegression.load(tmp_path / "kept")
    np.testing.assert_array_equal(again.coef_, model.coef_)
    stream = quick(epsilon=4.0, test_seed=0).partial_fit(x, y)
    assert stream.solver_ == "ftrl"


@pytest.mark.parametrize("solver", ["objective", "frank_wolfe"])
def test_solvers_that_answer_once(solver: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, size=(4000, 5))
    y = (x[:, 0] - x[:, 1] > 0).astype(int)
    settings = {"solver": solver, "bounds": (-1, 1), "test_seed": 0}
    model = quick(**settings).fit(x, y, ids=range(4000))
    assert model.score(x, y) > 0.9
    assert model.privacy_.epsilon == pytest.approx(1.0, rel=1e-6)
    assert model.privacy_.neighbours == "zero-out"
    assert "bounds were given" in model.privacy_.words()
    assert PrivateSVC(**settings, classes=[0, 1]).fit(x, y).score(x, y) > 0.9
    line = PrivateLinearRegression(**settings).fit(x, 0.5 * x[:, 0])
    assert line.score(x, 0.5 * x[:, 0]) > 0.5
    assert quick(**{**settings, "test_seed": None}).fit(x[:50], y[:50]).privacy_.epsilon <= 1
    for bad, more in (
        ({"passes": 1, "batch_size": 5}, {}),
        ({}, {"run": tmp_path / "r"}),
        ({"epsilon": math.inf}, {}),
        ({"classes": [0, 1, 2]}, {}),
    ):
        with pytest.raises(Unsupported, match="use"):
            quick(**{**settings, **bad}).fit(x, y, **more)
    with pytest.raises(InvalidInput, match="none of them twice"):
        quick(**settings).fit(x, y, ids=np.zeros(4000, dtype=int))


def test_other_tables() -> None:
    rng = np.random.default_rng(0)
    centres = rng.uniform(-1, 1, size=(3, 6))
    y = rng.integers(3, size=2000)
    x = np.clip(centres[y] + 0.2 * rng.normal(size=(2000, 6)), -1, 1)
    many = PrivateLogisticRegression(bounds=(-1, 1), classes=[0, 1, 2], test_seed=0).fit(x, y)
    assert (many.solver_, many.coef_.shape) == ("gd", (3, 6))
    assert many.score(x, y) > 0.9
    np.testing.assert_allclose(many.predict_proba(x[:5]).sum(axis=1), 1)
    flat = quick(bounds=(-1, 1), test_seed=0).fit(sparse.csr_array(x), (y == 0).astype(int))
    assert flat.solver_ == "gd"
    assert flat.score(x, (y == 0).astype(int)) > 0.8
    target = x @ np.arange(1.0, 7.0) / 20 + 0.3
    line = PrivateLinearRegression(bounds=(-1, 1), test_seed=0).fit(x, target)
    assert line.solver_ == "gd"
    assert line.score(x, target) > 0.8
    bare = quick(bounds=(-1, 1), fit_intercept=False, test_seed=0).fit(x, (y == 0).astype(int))
    assert bare.intercept_[0] == 0
    assert bare.coef_.any()


def test_bounds_by_name() -> None:
    import pandas as pd

    x, y = table(200, 3)
    frame = pd.DataFrame(x, columns=["a", "b", "c"])
    pairs = [(0, 1), (0.5, 1), (0, 1)]
    by_place = quick(bounds=pairs, test_seed=0).fit(x, y)
    by_name = quick(bounds={"b": (0.5, 1), None: (0, 1)}, test_seed=0).fit(frame, y)
    by_number = quick(bounds={1: (0.5, 1), None: (0, 1)}, test_seed=0).fit(x, y)
    np.testing.assert_array_equal(by_place.coef_, by_name.coef_)
    np.testing.assert_array_equal(by_place.coef_, by_number.coef_)
    with pytest.raises(InvalidInput, match="'d', which is no column"):
        quick(bounds={"d": (0, 1), None: (0, 1)}).fit(frame, y)
    with pytest.raises(InvalidInput, match="cover column 'a'"):
        quick(bounds={"b": (0, 1)}).fit(frame, y)


@pytest.mark.slow
def test_audit_of_gd_finds_a_lower_bound() -> None:
    """The intercept of small fits with and without one row: ε is at least 1, of the 8 stated."""
    x = np.zeros((8, 1))
    labels = np.r_[np.zeros(4, int), np.ones(4, int)]
    told: list[list[float]] = [[], []]
    for side in (0, 1):
        for _ in range(600):
            rows = x.copy()
            rows[0] = 1.0 if side == 0 else 0.0
            told[side].append(
                float(quick(epsilon=8.0, bounds=(-1, 1), delta=1e-5).fit(rows, labels).coef_[0, 0])
            )
    low, high = sorted(told, key=np.mean)
    line = (np.mean(low) + np.mean(high)) / 2
    hits, misses = sum(v > line for v in high), sum(v > line for v in low)
    power = beta.ppf(0.025, hits, 600 - hits + 1)
    false = beta.ppf(0.975, misses + 1, 600 - misses)
    found = math.log(power / false)
    assert 0 < found <= 8.0


@pytest.mark.parametrize("value", [1.79e308, -1.79e308])
@pytest.mark.parametrize("kind", [PrivateLogisticRegression, PrivateLinearRegression, PrivateSVC])
@pytest.mark.parametrize("solver", ["auto", "objective", "ftrl"])
def test_a_row_that_is_too_long_for_a_number_spoils_nothing(
    kind: type, solver: str, value: float
) -> None:
    """Once standardised it is infinite, and infinity times a factor of zero would be NaN."""
    x = np.random.default_rng(0).normal(size=(400, 2)) * 1e-3
    y = (x[:, 0] > 0).astype(int)
    x[5] = value
    settings = (
        {"target_bounds": (0.0, 1.0)} if kind is PrivateLinearRegression else {"classes": [0, 1]}
    )
    if solver == "objective":
        settings |= {"feature_bound": 1.0}
    with np.errstate(all="ignore"):
        model = kind(epsilon=1.0, delta=1e-6, solver=solver, test_seed=0, **settings).fit(x, y)
    assert np.isfinite(model.coef_).all()
    assert np.isfinite(model.intercept_).all()


def test_a_table_without_bounds_is_warned_of() -> None:
    x = np.random.default_rng(0).normal(size=(60, 2))
    y = (x[:, 0] > 0).astype(int)
    with pytest.warns(NoBounds, match="give bounds="):
        PrivateLogisticRegression(epsilon=1.0, classes=[0, 1]).fit(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoBounds)
        PrivateLogisticRegression(epsilon=1.0, classes=[0, 1], bounds=(-4, 4)).fit(x + 9, y)


@pytest.mark.parametrize("is_cloned", [False, True])
def test_a_regression_without_bounds_of_its_targets_is_warned_of(is_cloned: bool) -> None:
    """Targets around 100 are all clamped to 1, and nobody gave the statement those bounds."""
    x = np.random.default_rng(0).normal(size=(60, 2))
    model = PrivateLinearRegression(epsilon=1.0, bounds=(-4, 4))
    model = clone(model) if is_cloned else model
    with pytest.warns(NoBounds, match=r"target_bounds is \(-1.0, 1.0\), its default"):
        model.fit(x, 100 + x[:, 0])
    said = next(s for s in model.privacy_.assumptions if "target_bounds" in s)
    assert said.startswith("bounds were given")
    assert said.endswith("target_bounds is (-1.0, 1.0), its default.")
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoBounds)
        model = PrivateLinearRegression(epsilon=1.0, bounds=(-4, 4), target_bounds=(90, 110))
        model.fit(x + 9, 100 + x[:, 0])
    assert any(s.startswith("bounds and target_bounds were") for s in model.privacy_.assumptions)


def test_so_are_streams() -> None:
    x = np.random.default_rng(2).normal(size=(40, 2))
    for limits in (None, (90.0, 110.0)):
        given: dict[str, Any] = {} if limits is None else {"target_bounds": limits}
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", NoBounds)
            line = PrivateLinearRegression(bounds=(-4, 4), solver="ftrl", **given)
            for rows in (slice(0, 20), slice(20, 40)):
                line.partial_fit(x[rows], 100 + x[rows, 0])
            said = line.privacy_.assumptions
        own = [one for one in told if "target_bounds is (-1.0, 1.0)" in str(one.message)]
        assert len(own) == (limits is None)
        assert any(s.endswith("target_bounds is (-1.0, 1.0), its default.") for s in said) == (
            limits is None
        )


def test_columns_without_bounds_are_warned_of_in_regressions_and_under_a_budget(
    tmp_path: Path,
) -> None:
    x = np.random.default_rng(1).normal(size=(60, 2))
    budget = noshuffle.Budget(tmp_path / "b", epsilon=5.0, delta=1e-5)
    with pytest.warns(NoBounds, match="give bounds="):
        PrivateLinearRegression(target_bounds=(-4, 4), budget=budget).fit(x, x[:, 0])


def test_a_search_is_within_its_epsilon(tmp_path: Path) -> None:
    """Settings that cannot learn lose; what is said is the whole search, and a budget pays it."""
    x, y = table(3000)
    budget = noshuffle.Budget(tmp_path / "b", epsilon=5.0, delta=1e-5)
    grid = [{"alpha": 1e3}, {"alpha": 1e-3}, {"passes": 20, "penalty": None}]
    found = private_search(quick(penalty="l2", solver="gd"), x, y, grid, epsilon=4.0, budget=budget)
    assert found.setting != grid[0]
    assert found.result.score(x, y) > 0.8
    assert found.result.privacy_ is found.statement
    assert found.statement.epsilon == pytest.approx(4.0, rel=1e-3)
    assert found.result.plan_.statement().epsilon < 2.5  # of one run, a third of μ²
    with pytest.raises(NoshuffleError, match="limit"):
        private_search(quick(), x, y, grid, epsilon=4.0, budget=budget)
    with pytest.raises(InvalidInput, match="at least one"):
        private_search(quick(), x, y, [], epsilon=4.0)
    for solver in ("frank_wolfe", "objective"):  # no μ, no composition
        with pytest.raises(Unsupported, match="Gaussian"):
            private_search(quick(solver=solver), x, y, [{}], epsilon=4.0)


def test_the_best_of_a_search_says_what_its_run_said_and_does_not_go_on() -> None:
    x, y = table(400)
    grid = [{"averaging": kind} for kind in ("last", "linear", "uniform")]
    model = PrivateLogisticRegression(bounds=(0, 1), solver="ftrl")
    found = private_search(model, x, y, grid, epsilon=2.0)
    words = found.statement.words()
    assert "The set of classes was read from y" in words
    assert found.result.privacy_ is found.statement
    with pytest.raises(AttributeError, match="progressive"):  # it is raw
        _ = found.result.progressive_score_
    with pytest.raises(InvalidInput, match="copied"):  # it would state the share of one run
        found.result.partial_fit(x, y)
    for name in ("test_seed", "neighbours", "epsilon"):
        with pytest.raises(InvalidInput, match=name):
            private_search(quick(), x, y, [{name: 1}], epsilon=2.0)


def test_rows_are_as_long_as_the_clip_norm_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the noise of the columns' squares floors most deviations: without a stretch 1.35."""
    seen: list[GradientRule] = []
    standardise = GradientRule._standardise

    def watched(self: GradientRule) -> None:
        standardise(self)
        seen.append(self)

    monkeypatch.setattr(GradientRule, "_standardise", watched)
    rng, p = np.random.default_rng(5), 40
    x = rng.normal(size=(3000, p)) * 0.4 * 10 ** rng.uniform(-1, 0, p)
    x = np.clip(x + rng.uniform(-0.5, 0.5, p), -1, 1)
    epsilon = gaussian.epsilon(mu=40 * math.sqrt(p + 1) / len(x), delta=1e-6)
    for seed in range(4):
        quick(epsilon=epsilon, bounds=(-1, 1), test_seed=seed).fit(x, x[:, 0] > 0)
    found = [np.sqrt(np.mean(((x - r._centre) * r._scale) ** 2) * p) for r in seen]
    assert found == pytest.approx([3.0] * 4, abs=0.5)


def test_small_targets_are_not_buried_under_noise_for_their_bounds() -> None:
    """A tenth of the bounds: squared errors were 37 times those of the mean."""
    rng = np.random.default_rng(2)
    x = rng.uniform(-1, 1, (1000, 20))
    y = 0.05 * x @ rng.normal(size=20) / 20**0.5 + 0.01 * rng.normal(size=1000)
    common = {"bounds": (-1, 1), "target_bounds": (-1, 1), "delta": 1e-6}
    hidden = [
        PrivateLinearRegression(epsilon=0.3, test_seed=seed, **common).fit(x, y).score(x, y)
        for seed in range(4)
    ]
    assert np.mean(hidden) > -10
    seen = PrivateLinearRegression(epsilon=30.0, test_seed=0, **common).fit(x, y)
    assert seen.score(x, y) > 0.8


def test_a_gradient_once_seen_is_no_leave_to_follow_noise() -> None:
    """Alike columns, 30 % of the bounds: squared errors were twice those of the mean at ε = 1."""
    rng = np.random.default_rng(4)
    common = rng.normal(size=(3000, 3))
    x = np.clip((common @ rng.normal(size=(3, 20)) + 0.5 * rng.normal(size=(3000, 20))) / 6, -1, 1)
    y = 0.075 * (common @ [0.8, -0.5, 0.3] + 0.5 * rng.normal(size=3000))
    scores = []
    for seed in range(3):
        model = PrivateLinearRegression(epsilon=1.0, bounds=(-1, 1), test_seed=seed)
        scores.append(model.fit(x[:1000], y[:1000]).score(x[1000:], y[1000:]))
    assert np.mean(scores) > 0.2


def test_steps_are_shorter_where_a_class_is_rare() -> None:
    """By the share that the first released gradient tells, or by the number of classes."""
    rng, n, p = np.random.default_rng(3), 3000, 5
    x = rng.uniform(-1, 1, (n, p))
    noisy = x @ rng.normal(size=p) + rng.logistic(size=n)

    def rate(
        share: float, *, worth: float, seed: int = 0, make: type = PrivateLogisticRegression, **more
    ) -> float:
        y = (noisy > np.quantile(noisy, 1 - share)).astype(int)
        epsilon = gaussian.epsilon(mu=worth * math.sqrt(p + 1) / n, delta=1e-6)
        settings = {"epsilon": epsilon, "bounds": (-1, 1), "classes": [0, 1], "test_seed": seed}
        return make(**settings, solver="gd", **more).fit(x, y).learning_rate_

    for share in (0.25, 0.75):  # a run has a deviation of 0.4, the mean of eight one of 0.14
        found = np.mean([rate(share, worth=100, seed=seed) for seed in range(8)])
        assert found == pytest.approx(2.0, abs=0.4)
    assert rate(0.5, worth=100) == pytest.approx(4.0, abs=0.5)
    assert rate(0.05, worth=100) == 1.0
    assert rate(0.05, worth=250) == rate(0.5, worth=10) == 4.0
    assert rate(0.05, worth=10) == 1.0  # a class so rare is easily lost
    assert rate(0.05, worth=100, learning_rate=3.0) == 3.0
    assert rate(0.05, worth=100, make=PrivateSVC) == 1.0
    many = [steps_for(rows=n, columns=p, mu=0.1, rate=4.0, classes=k).rate for k in (2, 4, 10)]
    assert many == [4.0, 2.0, 1.0]


def test_noise_does_not_hide_the_most_frequent_class() -> None:
    """1,000 x 20, a class of one twentieth, ε = 0.1: accuracy was 4 points below that of the most
    frequent class, since gradients of a rare class are small and their noise is not."""
    lost = []
    for seed in range(6):
        rng = np.random.default_rng((9, seed))
        x = np.clip(rng.normal(size=(1000, 20)) / 4, -1, 1)
        margin = x @ rng.normal(size=20) + rng.normal(size=1000)
        y = (margin > np.quantile(margin, 0.95)).astype(int)
        model = PrivateLogisticRegression(
            epsilon=0.1, bounds=(-1, 1), classes=[0, 1], test_seed=seed
        ).fit(x, y)
        lost.append(0.95 - model.score(x, y))
    assert np.mean(lost) < 0.005
