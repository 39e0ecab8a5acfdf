"""Weights of rows and classes, and rows that miss a value: bounds, twins, statements, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import sparse
from sklearn.metrics import balanced_accuracy_score

from noshuffle.convex import PrivateLinearRegression, PrivateLogisticRegression, PrivateSVC
from noshuffle.convex.gradient_rule import GradientRule
from noshuffle.convex.linear_rule import LinearRule
from noshuffle.convex.losses import by_label, logistic
from noshuffle.convex.margins import PerMargin
from noshuffle.convex.sums_rule import SumsRule
from noshuffle.errors import InvalidInput, Unsupported

RNG = np.random.default_rng(0)
X = RNG.uniform(-1, 1, size=(1500, 3))
Y = (X[:, 0] + 0.5 * RNG.normal(size=1500) > 0.6).astype(int)  # every fifth


def quick(**settings: Any) -> PrivateLogisticRegression:
    kept = {"epsilon": 2.0, "bounds": (-1, 1), "classes": [0, 1], "test_seed": 0}
    return PrivateLogisticRegression(**{**kept, **settings})


def rules() -> list[Any]:
    loss, common = PerMargin(logistic()), {"features": 3, "clip_norm": 1.5, "most_weight": 3.0}
    return [
        LinearRule(loss, outputs=1, radius=1.0, **common),  # type: ignore[arg-type]
        SumsRule(**common),  # type: ignore[arg-type]
        GradientRule(loss=loss, outputs=1, rate=1.0, readings=0, **common),  # type: ignore[arg-type]
        GradientRule(loss=loss, outputs=1, rate=1.0, readings=1, census=2, **common),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize("rule", rules(), ids=lambda r: type(r).__name__)
def test_a_weighted_row_adds_at_most_the_bound(rule: Any) -> None:
    worst = 0.0
    for stage in range(3):
        if hasattr(rule, "_count"):
            rule._count = stage
        for size in (0.1, 1.0, 1e3):
            for i in range(20):
                x, y = size * X[i : i + 1], Y[i : i + 1].astype(float)
                out = [rule.clipped_sum(x, y, np.array([w])) for w in (0.0, 1.0, 3.0)]
                assert not out[0].any()
                worst = max(worst, float(np.linalg.norm(out[2])))
                if stage >= getattr(rule, "_before", 0):  # a reading of columns has no weights
                    np.testing.assert_allclose(out[2], 3.0 * out[1], atol=1e-9)
    assert 1.4 < worst <= 1.5


def test_weights_say_where_their_bound_comes_from() -> None:
    weight = 1.0 + 3.0 * Y
    public = quick().fit(X, Y, weight)
    assert "taken to be public knowledge, their largest" in public.privacy_.words()
    assert public._stream.rule.clip_norm == pytest.approx(4.0 / weight.mean())
    private = quick(max_weight=4.0).fit(X, Y, weight)
    assert private._stream.rule.clip_norm == 4.0
    assert "part of them: clamped to [0, 4], and covered" in private.privacy_.words()
    by_label_alone = quick(class_weight={1: 4.0}).fit(X, Y)
    np.testing.assert_allclose(private.coef_, by_label_alone.coef_, rtol=1e-9)
    np.testing.assert_array_equal(  # the unit of public weights does not matter
        public.coef_, quick().fit(X, Y, 8 * weight).coef_
    )


def test_balanced_counts_are_released() -> None:
    x = np.random.default_rng(1).uniform(-1, 1, size=(6000, 3))
    y = (x[:, 0] > 0.75).astype(int)
    y[:300] = 1 - y[:300]
    plain, fair = quick().fit(x, y), quick(class_weight="balanced").fit(x, y)
    assert fair.n_steps_ == plain.n_steps_ + 1
    counts = fair._stream.rule.counts
    assert 0 < np.abs(counts - np.bincount(y)).max() < 5 * fair.plan_.noise_multiplier
    scores = [balanced_accuracy_score(y, m.predict(x)) for m in (plain, fair)]
    assert scores[1] > scores[0] + 0.02
    for settings in ({"solver": "ftrl"}, {"solver": "objective"}):
        with pytest.raises(Unsupported, match="count classes in private"):
            quick(class_weight="balanced", **settings).fit(x, y)


@pytest.mark.parametrize("solver", ["gd", "ftrl", "objective", "frank_wolfe"])
def test_rows_with_missing_values_count_like_rows_of_weight_zero(solver: str) -> None:
    gaps = X.copy()
    gaps[::5, 1] = np.nan
    model = quick(solver=solver, missing="skip").fit(gaps, Y)
    assert "Rows with missing values add nothing" in model.privacy_.words()
    other = gaps.copy()
    other[::5, 0] = 0.9  # what else such a row holds, and its label, must not matter
    flipped = np.where(np.isnan(gaps[:, 1]), 1 - Y, Y)
    np.testing.assert_array_equal(
        quick(solver=solver, missing="skip").fit(other, flipped).coef_, model.coef_
    )
    if solver == "gd":
        assert model.n_left_out_ != 300
        assert abs(model.n_left_out_ - 300) < 5 * model.plan_.noise_multiplier
    with pytest.raises(ValueError, match="NaN"):
        quick(solver=solver).fit(gaps, Y)
    with pytest.raises(ValueError, match="NaN"):
        model.predict(gaps)


def test_missing_values_of_sparse_rows_and_streams() -> None:
    gaps = X.copy()
    gaps[::5, 1] = np.nan
    dense = quick(missing="skip", mechanism="tree").fit(gaps, Y)
    rows = quick(missing="skip", mechanism="tree").fit(sparse.csr_array(gaps), Y)
    np.testing.assert_allclose(rows.coef_, dense.coef_, rtol=1e-9)
    stream = quick(missing="skip", mechanism="tree", horizon=1500, max_weight=2.0)
    for first in range(0, 1500, 500):
        piece = slice(first, first + 500)
        stream.partial_fit(gaps[piece], Y[piece], sample_weight=np.full(500, 2.0))
    assert stream.privacy_.words().count("Rows with missing values") == 1
    line = PrivateLinearRegression(bounds=(-1, 1), missing="skip", solver="sums", test_seed=0)
    assert line.fit(gaps, X[:, 0]).score(X, X[:, 0]) > 0.3


def test_the_loss_of_weighted_labels() -> None:
    loss = by_label(logistic(), 1.0, 3.0)
    x, y = X[:4], np.array([1.0, -1.0, 1.0, -1.0])
    w = np.array([0.3, -0.2, 0.1])
    expected = np.where(y > 0, 3.0, 1.0) * logistic().slopes(w, x, y)
    np.testing.assert_allclose(loss.slopes(w, x, y), expected)
    assert (loss.lipschitz, loss.smoothness) == (3.0, 0.75)
    heavy = quick(solver="objective", class_weight={1: 4.0}).fit(X, Y)
    assert heavy.predict(X).mean() > quick(solver="objective").fit(X, Y).predict(X).mean()


@pytest.mark.parametrize(
    ("settings", "weight", "match"),
    [
        ({}, [1.0], "one number for each"),
        ({}, -np.ones(1500), ">= 0"),
        ({}, np.zeros(1500), "zero for every row"),
        ({}, np.full(1500, np.inf), "finite"),
        ({}, np.full(1500, 1e308), "too large"),
        ({"max_weight": 0.0}, None, "max_weight"),
        ({"class_weight": {2: 1.0}}, None, "none of the classes"),
        ({"class_weight": {1: -1.0}}, None, "class_weight of 1"),
        ({"class_weight": "fair"}, None, "mapping of classes"),
        ({"missing": "drop"}, None, "missing"),
        ({"solver": "objective"}, np.ones(1500), "use 'gd'"),
        ({"missing": "skip", "release_score": True}, None, "leave it out"),
    ],
)
def test_refusals(settings: dict[str, Any], weight: Any, match: str) -> None:
    with pytest.raises((InvalidInput, Unsupported), match=match) as caught:
        quick(**settings).fit(X, Y, weight)
    assert "\n" not in str(caught.value)


def test_streams_want_their_largest_weight_and_groups_go_by_name() -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.raises(InvalidInput, match="needs max_weight="):
        PrivateSVC(classes=[0, 1]).partial_fit(X[:5], Y[:5], sample_weight=np.ones(5))
    stream = quick(classes=[0, 1], max_weight=2.0, horizon=20).partial_fit(X[:5], Y[:5])
    for later in ({"max_weight": 100.0}, {"class_weight": {1: 50.0}}):  # clipped for 2
        before = stream.get_params()
        with pytest.raises(InvalidInput, match="largest weight of this stream is 2"):
            stream.set_params(**later).partial_fit(X[5:9], Y[5:9], sample_weight=np.full(4, 100.0))
        stream.set_params(**before).partial_fit(X[5:9], Y[5:9], sample_weight=np.full(4, 100.0))
    frame = pandas.DataFrame(X, columns=["a", "b", "c"])
    common = {"penalty": "group", "alpha": 0.05, "mechanism": "tree"}
    by_name = quick(groups={"a": 0, None: 1}, **common).fit(frame, Y)
    by_place = quick(groups=[0, 1, 1], **common).fit(X, Y)
    np.testing.assert_array_equal(by_name.coef_, by_place.coef_)
