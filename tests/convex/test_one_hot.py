"""Categories found in private: the exact δ beside brute force, noise, budgets, tables."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.pipeline import make_pipeline

from noshuffle import Budget
from noshuffle.accounting import gaussian
from noshuffle.accounting.sparse_histogram import SparseHistogram
from noshuffle.convex import PrivateLogisticRegression, PrivateOneHot
from noshuffle.errors import BudgetExceeded, InvalidInput


def brute_delta(law: SparseHistogram, epsilon: float, *, gone: int, come: int) -> float:
    """∫ (p − e^ε q)₊ over outcomes: values shown or not, and a real number for what is shared."""
    hidden = norm.cdf((law.threshold - 1) / law.sigma)
    shared = law.squared_sensitivity - gone - come
    mu = math.sqrt(shared) / law.sigma
    # All hidden: shared counts have density φ(z − μ) under D, φ(z) under D'.
    both = [hidden**gone, hidden**come]

    def above(z: float) -> float:
        return max(both[0] * norm.pdf(z - mu) - math.exp(epsilon) * both[1] * norm.pdf(z), 0.0)

    if mu == 0:
        overlap = max(both[0] - math.exp(epsilon) * both[1], 0.0)
    else:
        start = (epsilon + math.log(both[1] / both[0])) / mu + mu / 2
        overlap = quad(above, start, start + 40, epsabs=1e-13, limit=400)[0]
    return 1 - hidden**gone + overlap


@pytest.mark.parametrize("neighbours", ["zero-out", "replace-one"])
@pytest.mark.parametrize(("sigma", "threshold", "columns"), [(1.5, 3.0, 1), (2.0, 5.0, 3)])
def test_delta_beside_brute_force(neighbours, sigma, threshold, columns) -> None:
    law = SparseHistogram(sigma=sigma, threshold=threshold, columns=columns, neighbours=neighbours)
    for epsilon in (0.1, 1.0):
        pairs = [(g, c) for g in range(columns + 1) for c in range(columns + 1)
                 if neighbours == "replace-one" or 0 in (g, c)]  # fmt: skip
        slow = max(brute_delta(law, epsilon, gone=g, come=c) for g, c in pairs)
        assert law.delta(epsilon) == pytest.approx(slow, rel=1e-9)
        rest = gaussian.delta(mu=law.mu, epsilon=epsilon)
        assert law.delta(epsilon) <= law.slack + (1 - law.slack) * rest


def test_calibration_is_tight_and_covers() -> None:
    for columns, neighbours in ((1, "zero-out"), (7, "zero-out"), (2, "replace-one")):
        law = SparseHistogram.fit(epsilon=0.7, delta=1e-5, columns=columns, neighbours=neighbours)
        assert 0.99e-5 < law.delta(0.7) <= 1e-5
        lower = SparseHistogram(
            sigma=law.sigma, threshold=0.97 * law.threshold, columns=columns,
            neighbours=neighbours,
        )  # fmt: skip
        quieter = SparseHistogram(
            sigma=law.sigma / 1.1, threshold=law.threshold, columns=columns, neighbours=neighbours
        )
        assert lower.delta(0.7) > 1e-5
        assert quieter.delta(0.7) > 1e-5


def test_what_one_row_alone_has_is_shown_as_often_as_stated() -> None:
    """At a threshold of two deviations: 2.3 % of single values, and counts have the noise σ."""
    one_hot = PrivateOneHot(epsilon=8.0, delta=0.02)
    law = SparseHistogram.fit(epsilon=8.0, delta=0.02, columns=1)
    x = np.array([f"v{i}" for i in range(4000)] + ["w"] * 4000, dtype=object)[:, None]
    one_hot.set_params(test_seed=1).fit(x)
    shown = sum(name != "w" for name in one_hot.categories_[0]) / 4000
    assert law.slack == pytest.approx(norm.sf((law.threshold - 1) / law.sigma), rel=1e-9)
    assert 0.6 * law.slack < shown < 1.4 * law.slack
    counts = [PrivateOneHot(epsilon=8.0, delta=0.02, test_seed=k).fit(x[-400:]).counts_[0][0]
              for k in range(60)]  # fmt: skip
    assert 0.7 < np.std(counts) / law.sigma < 1.3
    assert abs(np.mean(counts) - 400) < 4 * law.sigma / math.sqrt(60)


def test_statement_and_budget(tmp_path) -> None:
    x = np.array([["a", "b"]] * 300, dtype=object)
    made = PrivateOneHot(epsilon=0.5, delta=1e-7, test_seed=0).fit(x)
    assert (made.privacy_.epsilon, made.privacy_.delta) == (0.5, 1e-7)
    assert any("NOT PRIVATE" in s for s in made.privacy_.assumptions)
    assert made.law_.delta(0.5) <= 1e-7
    budget = Budget(tmp_path / "b", epsilon=1.0, delta=1e-6)
    paid = PrivateOneHot(epsilon=0.5, delta=1e-7, budget=budget).fit(x)
    cost = budget.total()
    assert cost.mu == pytest.approx(paid.law_.mu)
    assert cost.slack == pytest.approx(paid.law_.slack)
    assert 0.3 < budget.total().epsilon(1e-6) < 0.5  # μ and s, not (ε, δ) as it is
    with pytest.raises(BudgetExceeded):
        PrivateOneHot(epsilon=1.5, delta=1e-7, budget=budget).fit(x)
    tight = Budget(tmp_path / "tight", epsilon=1.0, delta=1.01e-7)
    with pytest.raises(BudgetExceeded):  # μ would fit; s beside it does not
        PrivateOneHot(epsilon=0.9, delta=1e-7, budget=tight).fit(x)
    assert tight.total().mu == tight.total().slack == 0
    free = PrivateOneHot(categories=[["a"], ["b", "c"]], budget=budget).fit(x)
    assert free.privacy_ is None
    assert budget.total().mu == cost.mu
    np.testing.assert_array_equal(free.transform(x[:1]), [[1, 1, 0]])


def test_units_of_several_rows() -> None:
    """A unit adds k values of a column, once each, and noise and threshold are those of k·m."""
    k, epsilon, delta = 4, 8.0, 0.02
    asked = {"epsilon": epsilon, "delta": delta, "rows_per_unit": k}
    law = SparseHistogram.fit(epsilon=epsilon, delta=delta, columns=2 * k)
    # 300 units with every value of both columns; the last one has some of them more often.
    values = np.array([["a", 1], ["b", 2], ["c", 3], ["d", 4]] * 300, dtype=object)
    own = [["f", 6], ["e", 6], ["e", 5], ["d", 4], ["c", 3], ["c", 2], ["b", 2], ["a", 1]]
    x = np.vstack([values, np.array([["e", 5]] * 300 + [["f", 6]] * 300 + own, dtype=object)])
    ids = np.concatenate([np.repeat(np.arange(300), 4), np.arange(1000, 1600), [7000] * 8])
    gone = np.where((ids == 7000)[:, None], None, x)
    with_it, without = (
        PrivateOneHot(**asked, test_seed=0).fit(table, ids=ids) for table in (x, gone)
    )
    assert with_it.law_ == law
    assert with_it.categories_ == without.categories_ == [list("abcdef"), [1, 2, 3, 4, 5, 6]]
    apart = [a - b for a, b in zip(with_it.counts_, without.counts_)]
    np.testing.assert_allclose(apart, [[1, 1, 1, 0, 1, 0], [1, 1, 1, 0, 0, 1]], atol=0.01)
    assert np.sum(np.square(apart)) == pytest.approx(law.squared_sensitivity, rel=0.01)
    told = with_it.privacy_
    assert (told.unit, told.epsilon, told.delta) == ("user", epsilon, delta)
    assert any("at most 4 of its values" in s for s in told.assumptions)
    assert not any("each is one row" in s for s in told.assumptions)
    # Right and wrong scale: the noise of one row a unit is no guarantee for k.
    counts = [PrivateOneHot(**asked, test_seed=i).fit(values, ids=ids[:1200]).counts_
              for i in range(12)]  # fmt: skip
    spread = np.std(np.array(counts) - 300)
    assert 0.75 < spread / law.sigma < 1.3
    row = SparseHistogram.fit(epsilon=epsilon, delta=delta, columns=2)
    assert not 0.75 < spread / row.sigma < 1.3
    less = SparseHistogram(sigma=row.sigma, threshold=row.threshold, columns=2 * k)
    assert less.delta(epsilon) > 5 * delta > 5 * law.delta(epsilon) * 0.999
    for settings, given, match in (
        ({}, ids, "came twice"),
        ({"rows_per_unit": 2}, None, "needs ids"),
        ({"rows_per_unit": 2}, ids[1:], "one id for each of"),
        ({"rows_per_unit": 0}, ids, "rows_per_unit"),
    ):
        with pytest.raises(InvalidInput, match=match):
            PrivateOneHot(**settings).fit(x, ids=given)
    plain = PrivateOneHot(test_seed=0).fit(values, ids=range(1200))
    assert plain.counts_[0].tolist() == PrivateOneHot(test_seed=0).fit(values).counts_[0].tolist()


def test_tables_of_every_kind() -> None:
    import pandas as pd

    draws = np.random.default_rng(0)
    city = draws.choice(["Oslo", "Rome", "Bonn"], size=3000, p=[0.5, 0.4, 0.1])
    frame = pd.DataFrame({"city": city, "size": draws.choice([36, 38], size=3000)})
    frame.loc[0, "city"] = "Atlantis"
    frame.loc[1, "city"] = None
    one_hot = PrivateOneHot(categories={"size": [36, 38]}, test_seed=0).fit(frame)
    assert one_hot.categories_ == [["Bonn", "Oslo", "Rome"], [36, 38]]
    names = one_hot.get_feature_names_out().tolist()
    assert names == ["city=Bonn", "city=Oslo", "city=Rome", "size=36", "size=38"]
    assert one_hot.transform(frame[:2])[:, :3].sum() == 0  # rare or empty: no indicator
    again = pickle.loads(pickle.dumps(one_hot))
    np.testing.assert_array_equal(again.transform(frame), one_hot.transform(frame))
    assert clone(one_hot).get_params() == one_hot.get_params()
    frame["income"] = draws.uniform(0, 10, size=3000)
    y = np.where(city == "Oslo", "yes", "no")
    found = PrivateOneHot(test_seed=0)
    columns = make_column_transformer((found, ["city"]), remainder="passthrough")
    model = PrivateLogisticRegression(bounds=(0, 40), classes=["no", "yes"], test_seed=0)
    assert make_pipeline(columns, model).fit(frame, y).score(frame, y) > 0.85
    with pytest.raises(InvalidInput, match="no column"):
        PrivateOneHot(categories={"town": ["a"]}).fit(frame)
    with pytest.raises(InvalidInput, match="each of 3"):
        PrivateOneHot(categories=[["a"]]).fit(frame)
    with pytest.raises(InvalidInput, match="'private'"):
        PrivateOneHot(categories="auto").fit(frame)


def test_equal_cells_have_one_form_whoever_comes_first() -> None:
    """The form that is shown must not be that of one row, nor its type that of the column."""
    import pandas as pd

    usual = [1, 2] * 150
    for other in (True, 1.0, np.int8(1), np.float32(1), np.True_):
        shown = [
            PrivateOneHot(test_seed=0).fit(np.array([*cells, None], dtype=object)[:, None])
            for cells in ([1, *usual], [other, *usual])
        ]
        names = [made.get_feature_names_out().tolist() for made in shown]
        assert names[0] == names[1] == ["x0=1", "x0=2"]
        assert [type(name) for name in shown[1].categories_[0]] == [int, int]
    rows = [[0.0], [0.5]] * 150
    for first in (-0.0, "rare", 10**30, None):  # one text among numbers leaves them numbers
        made = PrivateOneHot(test_seed=0).fit([[first], *rows])
        assert repr(made.categories_) == "[[0, 0.5]]"
    when = pd.Timestamp("2020-01-01", tz="UTC")
    cells = [when.tz_convert("Asia/Tokyo"), pd.NA, pd.NaT, float("nan"), "", *[when] * 300]
    made = PrivateOneHot(test_seed=0).fit(pd.DataFrame({"when": pd.Series(cells, dtype=object)}))
    assert made.categories_ == [["2020-01-01 00:00:00+00:00"]]
    assert made.transform(pd.DataFrame({"when": [when]})).tolist() == [[1.0]]
    given = PrivateOneHot(categories=[[b"a", True]]).fit(np.array([[b"a"], [1]], dtype=object))
    np.testing.assert_array_equal(
        given.transform(np.array([[b"a"], [1.0]], dtype=object)), np.eye(2)
    )


def test_complex_numbers_are_refused_in_the_words_of_scikit_learn() -> None:
    with pytest.raises(InvalidInput, match="Complex data not supported"):
        PrivateOneHot(test_seed=0).fit(np.ones((5, 1), dtype=complex))
