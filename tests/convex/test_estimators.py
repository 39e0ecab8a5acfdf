"""Estimators: the scikit-learn contract, the statement, streams, pickles, refusals."""

from __future__ import annotations

import copy
import math
import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator

from noshuffle import convex
from noshuffle.convex import PrivateLinearRegression, PrivateLogisticRegression, PrivateSVC
from noshuffle.convex.phases import FIRST_PHASE
from noshuffle.errors import HorizonExceeded, InvalidInput, ParticipationViolation, Unsupported
from noshuffle.optim.constraints import L1Ball, l2_ball
from noshuffle.plan.statement import PrivacyStatement
from noshuffle.strategies import tree

QUICK: dict[str, Any] = {"mechanism": "tree", "test_seed": 0}


def blobs(n: int = 3000, p: int = 5, k: int = 2, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    centres = 1.5 * rng.normal(size=(k, p))
    y = rng.integers(k, size=n)
    return centres[y] + rng.normal(size=(n, p)), y


#: To repeat a row is another mechanism than to weigh it: a table with more rows, of which each may
#: do less, so that steps, noise and divisor differ. Weights of a thousand to one leave the lighter
#: class nothing but noise.
WAIVED = {
    "check_sample_weight_equivalence_on_dense_data": "more rows are another mechanism",
    "check_sample_weight_equivalence_on_sparse_data": "more rows are another mechanism",
    "check_class_weight_classifiers": "weights of a thousand to one drown one class in noise",
}
# With a few dozen rows any useful model needs a large ε, hence 50. One model takes the default for
# so few, steps of one row; they are most of the time, so that the others take six rows at once.
LARGE: dict[str, Any] = {"epsilon": 50.0, "delta": 1e-3, "batch_size": 6, **QUICK}
CHECKED = [
    PrivateLogisticRegression(bounds=(-4, 4), **LARGE),
    PrivateSVC(**{**LARGE, "batch_size": None}),
    pytest.param(PrivateSVC(loss="hinge", **LARGE), marks=pytest.mark.slow),
    PrivateLinearRegression(bounds=(-3, 3), target_bounds=(-3, 3), **LARGE),
    PrivateLinearRegression(solver="sums", target_bounds=(-3, 3), **LARGE),
]


@pytest.fixture
def own_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """scikit-learn (1.9) removes those of its checks at the end of a process that workers skip."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.parametrize("model", CHECKED, ids=lambda m: type(m).__name__)
@pytest.mark.filterwarnings("ignore")
def test_scikit_learn_contract(model: Any, own_temporary_files: None) -> None:
    results = check_estimator(model, expected_failed_checks=WAIVED, on_fail=None, on_skip=None)
    failed = [(r["check_name"], r["exception"]) for r in results if r["status"] == "failed"]
    assert failed == []


#: At ε = 1 and without bounds; what a whole table taught cannot go on as a stream, and a few
#: hundred targets outside the default target_bounds teach these regressions nothing.
AT_DEFAULTS = {**WAIVED, "check_fit_score_takes_y": "partial_fit after fit of a table is refused"}
UNBOUNDED = {**AT_DEFAULTS, "check_regressors_train": "targets lie outside the default bounds"}


@pytest.mark.slow
@pytest.mark.parametrize("name", convex.__all__)
@pytest.mark.filterwarnings("ignore")
def test_scikit_learn_contract_at_defaults(name: str, own_temporary_files: None) -> None:
    is_bounded = name in ("PrivateQuantileRegressor", "PrivatePoissonRegressor") or "Gamma" in name
    expected = UNBOUNDED if is_bounded else AT_DEFAULTS
    results = check_estimator(
        getattr(convex, name)(test_seed=0),
        expected_failed_checks=expected,
        on_fail=None,
        on_skip=None,
    )
    assert [r["check_name"] for r in results if r["status"] == "failed"] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_searches_in_processes_frames_and_weights_through_pipelines() -> None:
    x, y = blobs(1500)
    search = GridSearchCV(
        PrivateLogisticRegression(epsilon=4.0, bounds=(-6, 6), classes=[0, 1], test_seed=0),
        {"clip_norm": [0.5, 1.0]},
        n_jobs=2,
        cv=2,
    ).fit(x, y, sample_weight=np.ones(1500))
    assert search.best_score_ > 0.8
    line = make_pipeline(FunctionTransformer(np.arctan), search.best_estimator_)
    name = "privatelogisticregression__sample_weight"
    assert line.fit(x, y, **{name: np.ones(1500)}).score(x, y) > 0.8
    for library in ("pandas", "polars"):
        try:
            frame = __import__(library).DataFrame(dict(zip("abcde", x.T)))
        except ImportError:
            continue
        bounds = {"a": (-6, 6), None: (-5, 5)}
        model = clone(search.best_estimator_).set_params(bounds=bounds).fit(frame, y)
        assert list(model.feature_names_in_) == list("abcde")
        assert model.score(frame, y) > 0.8


def test_a_frame_of_polars_is_learned_and_streamed_as_its_numbers_are() -> None:
    polars = pytest.importorskip("polars")
    x, y = blobs(600)
    frame, series = polars.DataFrame(dict(zip("abcde", x.T))), polars.Series("y", y)
    made: dict[str, Any] = {"epsilon": 4.0, "classes": [0, 1], "test_seed": 0}
    plain = PrivateLogisticRegression(**made, bounds=(-6, 6)).fit(x, y)
    named = PrivateLogisticRegression(**made, bounds={"a": (-6, 6), None: (-6, 6)})
    np.testing.assert_array_equal(named.fit(frame, series).predict(frame), plain.predict(x))
    streams = [PrivateSVC(**made, bounds=(-6, 6), horizon=600) for _ in range(2)]
    for rows in (slice(0, 300), slice(300, 600)):
        ids = range(600)[rows]
        streams[0].partial_fit(frame[rows], series[rows], ids=polars.Series(list(ids)))
        streams[1].partial_fit(x[rows], y[rows], ids=ids)
    np.testing.assert_allclose(streams[0].coef_, streams[1].coef_, rtol=1e-9)


@pytest.mark.parametrize("k", [2, 3, 6])
@pytest.mark.parametrize("kind", [PrivateLogisticRegression, PrivateSVC])
def test_learns_and_states(kind: Any, k: int) -> None:
    x, y = blobs(k=k, seed=k)
    names = np.array([f"class {i}" for i in range(k)])
    model = kind(epsilon=4.0, delta=1e-5, **QUICK).fit(x, names[y])
    assert model.score(x, names[y]) > 0.8
    assert model.progressive_score_ > 0.7
    assert list(model.classes_) == list(names)
    assert model.coef_.shape == ((1 if k == 2 else k), 5)
    said = model.privacy_
    assert isinstance(said, PrivacyStatement)
    assert said.epsilon == pytest.approx(4.0, rel=1e-9)
    assert said.epsilon <= 4.0
    assert any("read from y" in s for s in said.assumptions)
    assert any("NOT PRIVATE" in s for s in said.assumptions)
    given = kind(epsilon=4.0, classes=names, mechanism="tree").fit(x, names[y]).privacy_
    assert not any("read from y" in s or "NOT PRIVATE" in s for s in given.assumptions)


def test_probabilities() -> None:
    for k in (2, 4):
        x, y = blobs(k=k)
        model = PrivateLogisticRegression(epsilon=4.0, **QUICK).fit(x, y)
        p = model.predict_proba(x)
        assert p.shape == (len(x), k)
        np.testing.assert_allclose(p.sum(1), 1.0)
        assert (model.classes_[p.argmax(1)] == model.predict(x)).all()
        np.testing.assert_allclose(np.log(p), model.predict_log_proba(x))
    assert not hasattr(PrivateSVC(), "predict_proba")


@pytest.mark.parametrize("solver", ["ftrl", "sums"])
def test_regression(solver: str) -> None:
    rng = np.random.default_rng(1)
    x = rng.uniform(10, 20, size=(4000, 3))
    y = x @ [1.0, -2.0, 0.5] + 100 + rng.normal(size=4000)
    model = PrivateLinearRegression(
        epsilon=8.0, solver=solver, bounds=(10, 20), target_bounds=(60, 120), clip_norm=2.0, **QUICK
    ).fit(x, y)
    assert model.score(x, y) > 0.8
    np.testing.assert_allclose(model.predict(x), x @ model.coef_ + model.intercept_, rtol=1e-9)
    assert model.progressive_score_ > 0.3


@pytest.mark.parametrize("batch", [1, 7, 64])
@pytest.mark.parametrize(
    "model",
    [
        PrivateLogisticRegression(horizon=500, **QUICK),
        PrivateSVC(horizon=500, penalty="l1", **QUICK),
        PrivateLinearRegression(horizon=500, solver="sums", **QUICK),
    ],
    ids=["logistic", "svc", "sums"],
)
def test_a_stream_equals_a_table_however_it_is_cut(model: Any, batch: int) -> None:
    x, y = blobs(500)
    whole = clone(model).set_params(batch_size=batch).fit(x, y)
    piecewise = clone(model).set_params(batch_size=batch)
    rng, at = np.random.default_rng(batch), 0
    while at < len(x):
        size = int(rng.integers(1, 60))
        piece = slice(at, at + size)
        extra = {} if isinstance(model, PrivateLinearRegression) else {"classes": [0, 1]}
        piecewise.partial_fit(x[piece], y[piece], **extra)
        at += size
    np.testing.assert_allclose(piecewise.coef_, whole.coef_, rtol=1e-9, atol=1e-12)
    assert piecewise.n_steps_ == whole.n_steps_ == math.ceil(500 / batch)
    assert piecewise.progressive_score_ == pytest.approx(whole.progressive_score_)
    assert piecewise.privacy_.epsilon == whole.privacy_.epsilon


def test_sparse_equals_dense() -> None:
    x, y = blobs(600)
    x[np.abs(x) < 1.0] = 0.0
    for settings in ({"bounds": (-2, 3)}, {"feature_bound": 0.7}, {"clip_norm": 0.3}):
        model = PrivateLogisticRegression(**QUICK).set_params(**settings)
        dense = clone(model).fit(x, y)
        rows = clone(model).fit(sparse.csr_array(x), y)
        np.testing.assert_allclose(rows.coef_, dense.coef_, rtol=1e-7, atol=1e-10)
        np.testing.assert_allclose(
            rows.decision_function(sparse.csr_matrix(x)), dense.decision_function(x), atol=1e-8
        )
    with pytest.raises(Unsupported, match="include"):
        PrivateLogisticRegression(bounds=(1, 2), **QUICK).fit(sparse.csr_array(x), y)


def test_coefficients_speak_of_the_original_columns() -> None:
    x, y = blobs()
    x = x * [1, 10, 100, 1, 1] + [0, 50, 0, 0, 30]
    bounds = [(-6, 6), (1, 110), (-600, 600), (-6, 6), (24, 36)]
    model = PrivateLogisticRegression(bounds=bounds, epsilon=8.0, **QUICK).fit(x, y)
    inside = np.clip(x, [b[0] for b in bounds], [b[1] for b in bounds])
    np.testing.assert_allclose(
        model.decision_function(x), inside @ model.coef_[0] + model.intercept_[0], atol=1e-9
    )


def test_l1_gives_exact_zeros_and_group_whole_groups() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6000, 30))
    y = (x[:, :3].sum(1) > 0).astype(int)
    common = {"epsilon": 8.0, **QUICK}
    sparse_model = PrivateLogisticRegression(penalty="l1", alpha=0.05, **common).fit(x, y)
    support = np.flatnonzero(sparse_model.coef_[0])
    assert set(support) == {0, 1, 2}
    groups = np.repeat(np.arange(10), 3)
    grouped = PrivateLogisticRegression(penalty="group", alpha=0.1, groups=groups, **common)
    kept = grouped.fit(x, y).coef_[0].reshape(10, 3)
    assert (kept[0] != 0).all()
    assert (kept[1:] == 0).all()
    multi = (x[:, 0] > 0).astype(int) + (x[:, 1] > 0)
    by_feature = PrivateLogisticRegression(penalty="group", alpha=0.02, **common).fit(x, multi)
    columns = np.linalg.norm(by_feature.coef_, axis=0)
    assert set(np.flatnonzero(columns)) == {0, 1}


def test_a_hundred_thousand_features_ten_of_which_matter() -> None:
    rng, n, d = np.random.default_rng(3), 10_000, 100_000
    true = rng.choice(d, 10, replace=False)
    values = (rng.random((n, 10)) < 0.3) * rng.choice([-1.0, 1.0], size=(n, 10))
    y = (values.sum(1) + 0.3 * rng.normal(size=n) > 0).astype(int)
    at, which = np.nonzero(values)
    rows = np.concatenate([at, np.repeat(np.arange(n), 15)])
    columns = np.concatenate([true[which], rng.integers(d, size=15 * n)])
    cells = np.concatenate([values[at, which], np.ones(15 * n)])
    x = sparse.csr_array((cells, (rows, columns)), shape=(n, d))
    model = PrivateLogisticRegression(
        epsilon=2.0, penalty="l1", alpha=0.006, batch_size=200, **QUICK
    ).fit(x, y)
    assert set(np.flatnonzero(model.coef_[0])) == set(true)


@pytest.mark.parametrize("averaging", ["last", "uniform", "linear"])
def test_constraints_hold(averaging: str) -> None:
    x, y = blobs(1000)
    common = {"epsilon": 0.5, "averaging": averaging, "batch_size": 10, **QUICK}

    def fitted(constraint: Any, radius: float = 0.5) -> Any:
        model = PrivateLogisticRegression(constraint=constraint, radius=radius, **common)
        return model.fit(x, y).coef_[0]

    assert np.linalg.norm(fitted("ball")) <= 0.5 + 1e-9
    assert np.linalg.norm(fitted(l2_ball(0.2))) <= 0.2 + 1e-9
    assert np.abs(fitted("box")).max() <= 0.5 + 1e-9
    assert np.abs(fitted("l1_ball")).sum() <= 0.5 + 1e-9
    simplex = fitted("simplex", 2.0)
    assert (simplex >= -1e-12).all()
    # The first iterate, zero, is no point of the simplex, but it is not averaged in.
    assert simplex.sum() == pytest.approx(2.0)


def test_constraints_hold_or_are_refused_by_every_solver() -> None:
    x, y = blobs(300)
    common: dict[str, Any] = {"epsilon": 1.0, "radius": 0.5, "test_seed": 0}
    kinds: list[Any] = ["ball", "box", "simplex", "l1_ball", L1Ball(0.2)]
    for solver in ("gd", "objective", "frank_wolfe"):
        for kind in kinds[: 3 if solver == "frank_wolfe" else None]:
            with pytest.raises(Unsupported, match=r"has no constraint.*use solver='ftrl'"):
                PrivateLogisticRegression(solver=solver, constraint=kind, **common).fit(x, y)
    for kind, size in zip(kinds[3:], (0.5, 0.2)):
        model = PrivateLogisticRegression(solver="frank_wolfe", constraint=kind, **common).fit(x, y)
        assert np.abs(model.coef_).sum() <= size + 1e-9


def test_copies_carry_no_secret_and_cannot_go_on() -> None:
    x, y = blobs(400)
    model = PrivateLogisticRegression(horizon=1000, mechanism="tree", batch_size=64)
    model.partial_fit(x, y, classes=[0, 1])
    data = pickle.dumps(model)
    assert model._stream.release.secret not in data
    assert len(data) < 20_000
    for other in (pickle.loads(data), copy.deepcopy(model)):
        np.testing.assert_array_equal(other.predict(x), model.predict(x))
        assert other.privacy_ == model.privacy_
        assert not hasattr(other, "progressive_score_")
        with pytest.raises(InvalidInput, match="noise key behind"):
            other.partial_fit(x[:5], y[:5])
    model.partial_fit(x, y)  # the original does go on


def test_ids_and_horizon_are_kept_to() -> None:
    x, y = blobs(100)
    model = PrivateLogisticRegression(horizon=150, **QUICK)
    model.partial_fit(x[:60], y[:60], classes=[0, 1], ids=range(60))
    with pytest.raises(ParticipationViolation, match="id 7 came twice"):
        model.partial_fit(x[:2], y[:2], ids=[100, 7])
    with pytest.raises(ParticipationViolation, match="id 100"):
        model.partial_fit(x[:2], y[:2], ids=[100, 100])
    with pytest.raises(InvalidInput, match="'5' would count as two units"):
        model.partial_fit(x[:2], y[:2], ids=["7", "a"])
    with pytest.raises(InvalidInput, match="one id for each"):
        model.partial_fit(x[:2], y[:2], ids=[200])
    model.partial_fit(x[:1], y[:1], ids=[100])  # a refused call has learned nothing
    with pytest.raises(InvalidInput, match="without in another"):
        model.partial_fit(x[:1], y[:1])
    with pytest.raises(HorizonExceeded, match="horizon of 150"):
        model.partial_fit(x, y, ids=range(1000, 1100))
    assert any("told apart by the ids" in s for s in model.privacy_.assumptions)
    assert model.n_rows_ == 61


def test_unknown_horizon_doubles_at_full_epsilon() -> None:
    x, y = blobs(5 * FIRST_PHASE)
    model = PrivateLogisticRegression(epsilon=1.0, **QUICK)
    for first in range(0, len(x), 300):
        model.partial_fit(x[first : first + 300], y[first : first + 300], classes=[0, 1])
    phases = model._stream.phases
    assert [phase.rows // FIRST_PHASE for phase in phases] == [1, 1, 2, 4]
    assert model.privacy_.epsilon <= 1.0
    assert "4 phases" in model.privacy_.participation
    assert any("length of the stream was not known" in s for s in model.privacy_.assumptions)
    assert model.score(x, y) > 0.8


def test_fit_may_be_followed_by_new_rows() -> None:
    x, y = blobs(2000)
    model = PrivateLogisticRegression(**QUICK).fit(x[:1000], y[:1000])
    model.partial_fit(x[1000:], y[1000:])
    assert model.n_rows_ == 2000
    assert len(model._stream.phases) == 2
    planned = PrivateLogisticRegression(horizon=5000, **QUICK).fit(x, y)
    with pytest.raises(HorizonExceeded, match="from the first row"):
        planned.partial_fit(x, y)


def test_several_passes() -> None:
    x, y = blobs(1000)
    model = PrivateLogisticRegression(passes=3, batch_size=64, **QUICK).fit(x, y, ids=range(1000))
    assert model.n_steps_ == 3 * 16
    assert model.plan_.participation.to_dict()["kind"] == "epochs"
    assert model.privacy_.epsilon <= 1.0
    with pytest.raises(Unsupported, match="passes"):
        PrivateLogisticRegression(passes=2, **QUICK).partial_fit(x, y, classes=[0, 1])
    with pytest.raises(Unsupported, match="passes"):
        PrivateLogisticRegression(passes=2, horizon=2000, **QUICK).fit(x, y)


def test_pipelines_and_cross_validation() -> None:
    x, y = blobs(2000)
    line = make_pipeline(
        FunctionTransformer(np.arctan), PrivateLogisticRegression(epsilon=4.0, **QUICK)
    )
    assert cross_val_score(line, x, y, cv=3).min() > 0.8


def test_no_noise_is_said_to_be_no_privacy() -> None:
    x, y = blobs(500)
    model = PrivateLogisticRegression(epsilon=math.inf, mechanism="identity").fit(x, y)
    assert model.privacy_.epsilon == math.inf
    assert model.score(x, y) > 0.9


def test_noise_is_fresh_by_default_and_a_strategy_may_be_given() -> None:
    x, y = blobs(200)
    model = PrivateLogisticRegression(mechanism=tree("plain"))
    first = model.fit(x, y).coef_
    assert not np.array_equal(first, model.fit(x, y).coef_)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"epsilon": -1.0}, "epsilon"),
        ({"delta": 0.0}, "delta"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"clip_norm": None}, "feature_bound"),
        ({"bounds": [(0, 1)]}, "bounds"),
        ({"bounds": (2, 1)}, "low < high"),
        ({"bounds": (-1.7e308, 1.7e308)}, "other units"),
        ({"bounds": (0, 1e-320)}, "other units"),
        ({"penalty": "l3"}, "penalty"),
        ({"constraint": "cube"}, "constraint"),
        ({"averaging": "mean"}, "averaging"),
        ({"mechanism": "magic"}, "mechanism"),
        ({"batch_size": 0}, "batch_size"),
        ({"groups": [1, 2], "penalty": "group"}, "groups"),
        ({"classes": [0]}, "2 classes"),
        ({"classes": [0, 2]}, "none of the 2 classes"),
    ],
)
def test_refusals_are_one_line(settings: dict[str, Any], match: str) -> None:
    x, y = blobs(50)
    model = PrivateLogisticRegression(**{**QUICK, **settings})
    with pytest.raises(InvalidInput, match=match) as caught:
        model.fit(x, y)
    assert "\n" not in str(caught.value)


def test_sums_refuse_what_has_no_closed_form() -> None:
    x, y = blobs(50)
    for settings in ({"penalty": "l1"}, {"constraint": "box"}):
        with pytest.raises(Unsupported, match="sums"):
            PrivateLinearRegression(solver="sums", **QUICK, **settings).fit(x, y)


def test_pandas_frames() -> None:
    pandas = pytest.importorskip("pandas")
    x, y = blobs(200)
    frame = pandas.DataFrame(x, columns=list("abcde"))
    model = PrivateLogisticRegression(**QUICK).fit(frame, pandas.Series(y))
    assert list(model.feature_names_in_) == list("abcde")
