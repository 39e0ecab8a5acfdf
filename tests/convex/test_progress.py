"""The released score as it is shown: what is new is added, nothing is converted twice."""

from __future__ import annotations

import math
import pickle
from unittest.mock import Mock

import numpy as np
import pytest

from noshuffle.convex import PrivateLinearRegression, PrivateLogisticRegression
from noshuffle.convex.progress import Accuracy, ScoredRule


def all_again(rule: ScoredRule, unit: float) -> np.ndarray:
    """The slow twin: every point, at every call."""
    return np.array(rule.curve).reshape(-1, 3) * [1.0, unit, unit]


@pytest.mark.parametrize("seed", range(5))
def test_what_is_shown_is_the_whole_curve(seed: int) -> None:
    draw = np.random.default_rng(seed)
    rule = ScoredRule(Mock(size=2, clip_norm=1.0, watch=None), Accuracy.each)
    unit, before = 1.0, []
    for _ in range(60):
        for _ in range(draw.integers(0, 4)):
            rule.curve.append(tuple(draw.standard_normal(3)))
        if draw.random() < 0.1:
            unit = float(draw.uniform(0.5, 9.0))
        shown = rule.shown(unit)
        np.testing.assert_array_equal(shown, all_again(rule, unit))
        before.append((shown, shown.copy()))
        if draw.random() < 0.05:  # a stream that was loaded
            rule.load({**dict.fromkeys(rule._STATE, 0.0), "curve": rule.curve[:-1], "inner": {}})
    for shown, copy in before:  # nobody's curve changes behind him
        np.testing.assert_array_equal(shown, copy)
        with pytest.raises(ValueError, match="read-only"):
            shown[:1] = 0.0


@pytest.mark.parametrize("kind", [PrivateLogisticRegression, PrivateLinearRegression])
def test_a_stream_that_is_fed_row_by_row_copies_its_curve_rarely(kind: type) -> None:
    rows = 130
    own = {"classes": [0, 1]} if kind is PrivateLogisticRegression else {"target_bounds": (-9, 9)}
    model = kind(
        epsilon=4.0, delta=1e-5, feature_bound=2.0, mechanism="tree", batch_size=1, horizon=rows,
        release_score=True, **own,
    )  # fmt: skip
    draw = np.random.default_rng(0)
    x = draw.uniform(-1, 1, (rows, 2))
    buffers: list[np.ndarray] = []
    for i in range(rows):
        model.partial_fit(x[i : i + 1], [int(x[i, 0] > 0)])
        twin = all_again(model._stream.rule, model._score_unit())
        np.testing.assert_array_equal(model.progress_, twin)
        if not buffers or not np.shares_memory(buffers[-1], model.progress_):
            buffers.append(model.progress_)
    assert len(model.progress_) == rows
    assert len(buffers) <= math.log2(rows) + 2
    assert pickle.loads(pickle.dumps(model)).progress_.shape == (rows, 3)
