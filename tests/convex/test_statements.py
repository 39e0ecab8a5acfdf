"""What an estimator says of itself: test seeds, bounds, other fits; and what it refuses to read."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from noshuffle.convex import (
    PrivateLinearRegression,
    PrivateLogisticRegression,
    PrivateScaler,
    PrivateSVC,
)
from noshuffle.errors import InvalidInput, ParticipationViolation
from noshuffle.plan.statement import UNCHECKED
from noshuffle.release.folder import RunFolder
from noshuffle.release.history import History
from noshuffle.release.spending import OTHER_RUNS as OTHERS
from noshuffle.release.verify import verify

KINDS = [PrivateLogisticRegression, PrivateSVC, PrivateLinearRegression]


def table(n: int = 300) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, size=(n, 3))
    return x, (x[:, 0] > 0).astype(int)


def quick(kind: Any = PrivateLogisticRegression, **more: Any) -> Any:
    fixed = {} if kind is PrivateLinearRegression else {"classes": [0, 1]}
    return kind(**fixed, **{"mechanism": "tree", "batch_size": 20, **more})


def is_marked(model: Any) -> bool:
    return any(s.startswith("NOT PRIVATE") for s in model.privacy_.assumptions)


@pytest.mark.parametrize("kind", KINDS)
def test_a_test_seed_is_said_whatever_becomes_of_the_parameter(kind: Any, tmp_path: Path) -> None:
    x, y = table()
    model = quick(kind, test_seed=3).partial_fit(x[:100], y[:100])
    assert is_marked(model)
    model.set_params(test_seed=None)
    assert is_marked(model)
    model.partial_fit(x[100:150], y[100:150])
    assert is_marked(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert is_marked(other)
    model.save(tmp_path / "s")
    again = kind.load(tmp_path / "s")
    assert again.test_seed is None
    assert is_marked(again)
    assert is_marked(again.partial_fit(x[150:], y[150:]))
    again.save(tmp_path / "s")
    assert is_marked(kind.load(tmp_path / "s"))
    # A new fit draws a key of its own, and a clone has nothing to say yet.
    assert not hasattr(clone(model), "privacy_")
    assert not is_marked(clone(model).partial_fit(x, y))
    assert not is_marked(model.fit(x, y))


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_of_the_system_is_not_called_a_test_seed(kind: Any, tmp_path: Path) -> None:
    x, y = table()
    model = quick(kind).partial_fit(x[:100], y[:100])
    model.set_params(test_seed="later").partial_fit(x[100:], y[100:])
    assert not is_marked(model)
    model.save(tmp_path / "s")
    assert not is_marked(kind.load(tmp_path / "s"))
    assert is_marked(model.fit(x, y))


def said(**settings: Any) -> str:
    return "\n".join(quick(**settings).fit(*table()).privacy_.assumptions)


def test_bounds_are_said_to_be_chosen_where_there_are_any() -> None:
    assert "No bounds of columns were given" in said()
    assert "bounds were given, not measured" in said(bounds=(-1, 1))
    assert "feature_bound were given" in said(feature_bound=1.0)
    assert "bounds and feature_bound were given" in said(bounds=(-1, 1), feature_bound=1.0)
    default = said(kind=PrivateLinearRegression)
    assert "No bounds of columns were given" in default
    assert "target_bounds is (-1.0, 1.0), its default." in default
    given = said(kind=PrivateLinearRegression, target_bounds=(-1, 2))
    assert "one by one. target_bounds were given" in given
    assert "No bounds" not in said(bounds=(-1, 1))
    for text in (said(), said(bounds=(-1, 1))):
        assert OTHERS in text.split("\n")
        assert "Bounds, horizon" not in text


def taken_in(run: Path) -> list[list[int]]:
    """The units of every step on record."""
    taken: list[list[int]] = []
    History.read(RunFolder(run), on_step=lambda _, units: taken.append(units.tolist()))
    return taken


def test_rows_of_one_table_cannot_come_twice_and_are_told_apart_by_their_places(
    tmp_path: Path,
) -> None:
    x, y = table()
    for passes, name in ((1, "once"), (2, "twice")):
        model = quick(passes=passes).fit(x, y, run=tmp_path / name)
        assert model.privacy_.participation_checked
        assert verify(tmp_path / name).participation_checked
        assert (
            taken_in(tmp_path / name) == [[*range(i, i + 20)] for i in range(0, 300, 20)] * passes
        )
    assert quick().fit(x, y).privacy_.participation_checked
    assert PrivateScaler(bounds=(-1, 1), test_seed=0).fit(x).privacy_.participation_checked


def test_a_stream_without_ids_says_that_nobody_checked_who_came(tmp_path: Path) -> None:
    """Its caller may send a row twice, and both count as new ones."""
    x, y = table()
    model = quick(horizon=300).partial_fit(x[:100], y[:100], run=tmp_path / "run")
    model.partial_fit(x[:100], y[:100])
    assert not model.privacy_.participation_checked
    assert UNCHECKED in model.privacy_.headline()
    assert not verify(tmp_path / "run").participation_checked
    model = quick().fit(x, y).partial_fit(x, y)  # the rows of the table may be among the new ones
    assert not model.privacy_.participation_checked
    model.save(tmp_path / "s")
    assert not quick().load(tmp_path / "s").privacy_.participation_checked
    assert not verify(tmp_path / "s" / "phase-2").participation_checked


def test_a_stream_with_ids_was_checked(tmp_path: Path) -> None:
    x, y = table()
    model = quick(horizon=300).partial_fit(x[:100], y[:100], ids=range(100), run=tmp_path / "run")
    assert model.privacy_.participation_checked
    assert verify(tmp_path / "run").participation_checked
    with pytest.raises(ParticipationViolation, match="came twice"):
        model.partial_fit(x[:1], y[:1], ids=[0])


def test_a_fit_begins_a_run_and_goes_on_with_none(tmp_path: Path) -> None:
    x, y = table()
    quick(horizon=300).partial_fit(x[:100], y[:100], run=tmp_path / "run")
    for act in (quick().fit, quick(horizon=300).partial_fit):
        with pytest.raises(InvalidInput, match="holds a run, and a fit begins a new one"):
            act(x, y, run=tmp_path / "run")


def test_a_scaler_in_front_is_not_covered() -> None:
    """In a pipeline that scales by the data one row moves all others before the private fit."""
    last = PrivateLogisticRegression(bounds=(-3, 3), classes=[0, 1], epsilon=4.0)
    model = make_pipeline(StandardScaler(), last)
    words = "\n".join(model.fit(*table())[-1].privacy_.assumptions)
    assert "a scaler, imputer or encoder that was fitted to the rows before is not covered" in words


def test_a_search_says_that_its_fits_add_up() -> None:
    search = GridSearchCV(quick(), {"radius": [1.0, 10.0]}, cv=2).fit(*table())
    assert OTHERS in search.best_estimator_.privacy_.assumptions


def complex_inputs() -> dict[str, tuple[Any, Any]]:
    x, y = table(60)
    objects = x.astype(object)
    objects[0, 0] = 1j
    return {
        "rows": (x + 0j, y),
        "rows, single precision": ((x + 1j).astype(np.complex64), y),
        "lists": ((x[:5] + 1j).tolist(), y[:5]),
        "objects": (objects, y),
        "sparse": (sparse.csr_array(x + 1j), y),
        "labels": (x, y + 0j),
        "labels, objects": (x, np.array([1j, *y[1:]], dtype=object)),
    }


@pytest.mark.parametrize("name", complex_inputs())
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("error")
def test_complex_numbers_are_refused_in_one_line(kind: Any, name: str) -> None:
    x, y = complex_inputs()[name]
    for act in ("fit", "partial_fit"):
        with pytest.raises(InvalidInput, match="real numbers") as told:
            getattr(quick(kind), act)(x, y)
        assert "\n" not in str(told.value)
    if "labels" not in name:
        fitted = quick(kind, test_seed=1).fit(*table())  # no key: the same rows again and again
        with pytest.raises(InvalidInput, match="real numbers"):
            fitted.predict(x)


def test_complex_frames_are_refused() -> None:
    pandas = pytest.importorskip("pandas")
    x, y = table(60)
    frame = pandas.DataFrame(x, columns=list("abc"))
    frame["b"] = frame["b"] + 1j
    with pytest.raises(InvalidInput, match="real numbers"):
        quick().fit(frame, y)
    with pytest.raises(InvalidInput, match="real numbers"):
        quick(PrivateLinearRegression).fit(frame[["a", "c"]], pandas.Series(y + 0j))
