"""Weights of rows and classes: bounds, twins, statements, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from noshuffle.convex import (
    PrivateLogisticRegression,
    PrivateSVC,
)
from noshuffle.convex.gradient_rule import GradientRule
from noshuffle.convex.linear_rule import LinearRule
from noshuffle.convex.losses import by_label, logistic
from noshuffle.convex.margins import PerMargin
from noshuffle.convex.ranges import RangeRule
from noshuffle.convex.sums_rule import SumsRule
from noshuffle.convex.weighting import unit_weights
from noshuffle.errors import InvalidInput, ParticipationViolation, Unsupported
from noshuffle.release.verify import verify

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
        GradientRule(loss=loss, outputs=1, rate=1.0, readings=1, has_many_rows=True, **common),  # type: ignore[arg-type]
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
        ({"solver": "objective"}, np.ones(1500), "use 'gd'"),
    ],
)
def test_refusals(settings: dict[str, Any], weight: Any, match: str) -> None:
    with pytest.raises((InvalidInput, Unsupported), match=match) as caught:
        quick(**settings).fit(X, Y, weight)
    assert "\n" not in str(caught.value)


def test_gaps_are_refused_in_words_that_help() -> None:
    gaps = X.copy()
    gaps[3, 0] = np.nan
    with pytest.raises(InvalidInput, match="X contains NaN; fill the gaps"):
        quick().fit(gaps, Y)
    labels = np.where(Y == 1, "yes", "no").astype(object)
    labels[5] = None
    with pytest.raises(InvalidInput, match="labels of one kind, got NoneType, str"):
        quick(classes=["no", "yes"]).fit(X, labels)


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


@pytest.mark.parametrize("bounds", [(-3, 3), "private"])
def test_all_rows_of_a_unit_together_add_at_most_the_clip_norm(bounds: Any) -> None:
    """In every kind of reading; a unit of many rows adds nearly all of it."""
    rng = np.random.default_rng(3)
    ids = rng.integers(40, size=300)
    x = (rng.normal(size=(40, 3)) * 3)[ids]  # the rows of a unit are alike, and add up
    y = (x[:, 0] > 0).astype(int)
    made = PrivateLogisticRegression(epsilon=8.0, rows_per_unit=2, classes=[0, 1], bounds=bounds)
    most: dict[int, float] = {}

    def sums(rule: Any, x: Any, y: Any, weight: Any = None) -> Any:
        for unit in np.unique(ids):
            own = ids == unit
            norm = np.linalg.norm(whole(rule, x[own], y[own], weight[own])) / rule.clip_norm
            assert norm <= 1
            most[rule_kind(rule)] = max(most.get(rule_kind(rule), 0.0), norm)
        return whole(rule, x, y, weight)

    def rule_kind(rule: Any) -> int:
        """Bounds twice, counts, columns, gradients."""
        if isinstance(rule, RangeRule) and rule._count < rule.lead:
            return -2 if rule._count < rule.repeats else -1
        inner = rule.inner if isinstance(rule, RangeRule) else rule
        return int(min(inner._count, inner._before))

    kind = RangeRule if bounds == "private" else GradientRule
    whole = kind.clipped_sum
    with mock.patch.object(kind, "clipped_sum", sums):
        made.set_params(test_seed=0).fit(x, y, ids=ids.tolist())
    assert len(most) >= 3 + 2 * (bounds == "private")
    assert all(norm > 0.6 for norm in most.values())


@pytest.mark.filterwarnings("ignore")
def test_users_with_several_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(800, size=4000)
    x = rng.uniform(-1, 1, size=(4000, 3))
    y = (x[:, 0] + 0.3 * rng.normal(size=4000) > 0).astype(int)
    made: dict[str, Any] = {"epsilon": 4.0, "bounds": (-1, 1), "classes": [0, 1]}
    model = PrivateLogisticRegression(rows_per_unit=3, **made)
    model.fit(x, y, ids=ids, run=tmp_path / "run")
    assert verify(tmp_path / "run").is_verified
    assert model.score(x, y) > 0.85
    assert "per user" in model.privacy_.headline()
    assert any("at most 3 together" in s for s in model.privacy_.assumptions)
    with pytest.raises(InvalidInput, match="ids"):
        model.fit(x, y)
    with pytest.raises(ParticipationViolation, match="twice"):
        PrivateLogisticRegression(**made).fit(x, y, ids=ids)
    for more in ({"solver": "ftrl"}, {"solver": "objective"}):
        with pytest.raises(Unsupported, match="rows_per_unit"):
            PrivateLogisticRegression(rows_per_unit=3, **more, **made).fit(x, y, ids=ids)
    with pytest.raises(Unsupported, match="rows_per_unit"):
        PrivateLogisticRegression(rows_per_unit=3, **made).partial_fit(x, y, ids=ids)


def test_units_named_by_tensors_are_those_of_their_numbers() -> None:
    ids = np.arange(12) // 4
    for given in (torch.from_numpy(ids), list(torch.from_numpy(ids)), [f"u{i}" for i in ids]):
        assert unit_weights(list(given), 2, rows=12).tolist() == [0.5] * 12
    x, y = np.random.default_rng(0).uniform(-1, 1, size=(12, 2)), np.tile([0, 1], 6)
    model = PrivateLogisticRegression(solver="objective", bounds=(-1, 1), classes=[0, 1])
    with pytest.raises(InvalidInput, match="twice"):
        model.fit(x, y, ids=torch.from_numpy(ids))
