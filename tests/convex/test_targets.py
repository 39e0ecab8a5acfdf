"""Targets that are missing or no numbers are refused before anything is released."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from noshuffle import convex
from noshuffle.errors import InvalidInput

X = np.random.default_rng(0).uniform(0, 1, (60, 2))
ASKED = {"bounds": (0, 1), "target_bounds": (0.1, 1.0), "test_seed": 0}


@pytest.mark.parametrize("bad", [None, float("nan")])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("PrivateLinearRegression", {"solver": "gd"}),
        ("PrivateLinearRegression", {"solver": "sums"}),
        ("PrivateLinearRegression", {"solver": "ftrl"}),
        ("PrivateLinearRegression", {"solver": "objective"}),
        ("PrivateHuberRegressor", {}),
        ("PrivateQuantileRegressor", {}),
        ("PrivatePoissonRegressor", {}),
        ("PrivateGammaRegressor", {}),
    ],
)
def test_one_missing_target_among_objects_is_refused(
    kind: str, settings: dict[str, Any], bad: object
) -> None:
    y = X[:, 0].astype(object)
    y[3] = bad
    with pytest.raises(ValueError, match=r"y must hold numbers|contains NaN"):
        getattr(convex, kind)(**ASKED, **settings).fit(X, y)


def test_text_is_no_target() -> None:
    with pytest.raises(InvalidInput, match="y must hold numbers"):
        convex.PrivateLinearRegression(**ASKED).fit(X, np.array(["many"] * 60))


def test_a_stream_refuses_them_and_goes_on() -> None:
    stream = convex.PrivateLinearRegression(**ASKED, horizon=60)
    y = X[:, 0].astype(object)
    stream.partial_fit(X[:30], y[:30])
    y[31] = None
    with pytest.raises(InvalidInput, match="y must hold numbers"):
        stream.partial_fit(X[30:], y[30:])
    stream.partial_fit(X[32:], y[32:])
    assert np.isfinite(stream.coef_).all()


@pytest.mark.parametrize(
    ("column", "kind"),
    [(["Oslo", "Rome"] * 30, "(object|str)"), (["2026-01-02"] * 60, "datetime64")],
)
def test_columns_of_no_numbers_are_named(column: list[str], kind: str) -> None:
    """scikit-learn and NumPy would say that 'Oslo' is no float, and not in which column."""
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"age": X[:, 0].astype(object), "city": column})
    if "-" in column[0]:
        frame = frame.astype({"age": float, "city": "datetime64[ns]"})
    with pytest.raises(InvalidInput, match=rf"X must hold numbers, got column 'city' \({kind}"):
        convex.PrivateLinearRegression(**ASKED).fit(frame, X[:, 0])


def test_bounds_that_are_no_numbers_are_told_back() -> None:
    with pytest.raises(InvalidInput, match=r"or 'private'; got 'pritvate'"):
        convex.PrivateLinearRegression(bounds="pritvate", target_bounds=(0, 1)).fit(X, X[:, 0])


@pytest.mark.parametrize("classes", ["yes", 3, {}])
def test_classes_are_a_list(classes: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^classes must be a list"):
        convex.PrivateLogisticRegression(bounds=(0, 1), classes=classes).fit(X, X[:, 0] > 0.5)
