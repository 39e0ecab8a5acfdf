"""A second fit keeps nothing of the first, and one that was refused or stopped changes nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from noshuffle import convex
from noshuffle.convex import stream_units
from noshuffle.convex.linear_rule import LinearRule
from noshuffle.convex.stream import LearningStream
from noshuffle.errors import InvalidInput, ParticipationViolation, Unsupported
from noshuffle.release.folder import RunFolder
from noshuffle.release.history import History

RNG = np.random.default_rng(0)
X = RNG.uniform(-1, 1, size=(400, 3))
Y = (X[:, 0] + 0.3 * RNG.normal(size=400) > 0).astype(int)
KINDS = sorted(convex.__all__)
SETTINGS: list[dict[str, Any]] = [
    {"epsilon": 8.0, "delta": 1e-3},
    {"bounds": [(-1, 1), (-2, 2), (0, 1)], "neighbours": "replace-one"},
    {"clip_norm": 3.0, "solver": "ftrl", "batch_size": 30},
    {"solver": "objective", "feature_bound": 1.0},
    {"class_weight": {1: 3.0}},
    {"classes": [0, 1, 2], "rows_per_unit": 2},
    {"solver": "sums"},
    {"epsilon": 20.0},
    {"horizon": 500},
    {"test_seed": None, "epsilon": math.inf},
]


def made(kind: str, **settings: Any) -> Any:
    """An estimator with those of the settings that it has."""
    model = getattr(convex, kind)(test_seed=1)
    known = {name: v for name, v in settings.items() if name in model.get_params()}
    return model.set_params(**known)


def table_for(kind: str, rows: int = 400) -> tuple[Any, Any]:
    return X[:rows], Y[:rows] + (kind in ("PrivateGammaRegressor",))


def fitted(model: Any, x: Any, y: Any) -> Any:
    many = getattr(model, "rows_per_unit", None) is not None
    return model.fit(x, y, **({"ids": np.arange(len(x)) // 2} if many else {}))


def told(model: Any) -> dict[str, Any]:
    """All that a model has to say, as text."""
    hidden = ("_stream", "_finished", "_said", "_turn", "_ranges")
    out = {k: v for k, v in vars(model).items() if not k.startswith(hidden)}
    with np.printoptions(precision=6):
        return {name: repr(vars(v) if hasattr(v, "value") else v) for name, v in out.items()}


def same(before: dict[str, Any], model: Any) -> bool:
    """Whether a model has the very attributes that it had."""
    now = {k: v for k, v in vars(model).items() if not k.startswith("_turn")}
    return now.keys() == before.keys() and all(now[k] is before[k] for k in now)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_a_second_fit_keeps_nothing_of_the_first(kind: str) -> None:
    both, defaults = made(kind), made(kind).get_params()
    tried = 0
    for settings in [*SETTINGS, {}]:
        x, y = table_for(kind, 90 if tried % 2 else 120)
        fresh = made(kind, **settings)
        both.set_params(**defaults).set_params(**fresh.get_params())
        try:
            fitted(fresh, x, y)
        except (InvalidInput, Unsupported):
            before = {k: v for k, v in vars(both).items() if not k.startswith("_turn")}
            with pytest.raises((InvalidInput, Unsupported)):
                fitted(both, x, y)
            assert same(before, both)
            continue
        fitted(both, x, y)
        tried += 1
        assert fresh.privacy_ == both.privacy_
        if fresh.test_seed is not None or fresh.epsilon == math.inf:
            assert told(both) == told(fresh)
        assert vars(both).keys() == vars(fresh).keys()
    assert tried >= 4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_that_does_not_end_leaves_the_model_as_it_was(kind: str) -> None:
    x, y = table_for(kind)
    model = fitted(made(kind, bounds=(-1, 1)), x, y)
    before = {k: v for k, v in vars(model).items() if not k.startswith("_turn")}
    wide = np.column_stack([x, x])
    gaps = np.where(np.arange(400)[:, None] == 7, np.inf, x)
    bad: list[tuple[Any, Any, dict[str, Any]]] = [(gaps, y, {}), (wide[:0], y[:0], {})]
    bad += [(wide, y, {"ids": [1] * 400}), (wide, y, {"ids": [1, 2]})]
    if hasattr(model, "classes_"):
        bad += [(wide, np.append(y[1:], 9), {"ids": [1] * 400})]
    if "max_weight" in model.get_params():
        bad += [(wide, y, {"sample_weight": w, "ids": [1] * 400}) for w in (y * 37.0, 5 * x[:, 0])]
    for rows, targets, more in bad:
        with pytest.raises((ValueError, ParticipationViolation)):
            model.fit(rows, targets, **more)
        assert same(before, model)
    for place in (
        "noshuffle.convex.stream.LearningStream._release",
        "noshuffle.convex.stream.LearningStream.close",
    ):
        with mock.patch(place, side_effect=KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                model.fit(wide, y)
            assert same(before, model)


def stream(**settings: Any) -> convex.PrivateLogisticRegression:
    kept: dict[str, Any] = {"classes": [0, 1], "bounds": (-1, 1), "mechanism": "tree"}
    return convex.PrivateLogisticRegression(**{**kept, "test_seed": 0, **settings})


def test_a_refused_weight_does_not_count_in_later_calls() -> None:
    """Whichever check refuses: a row of a stream adds the clip norm of its beginning at most."""
    norms: list[float] = []
    whole = LinearRule.clipped_sum

    def watched(rule: Any, x: Any, y: Any, weight: Any = None) -> Any:
        for i in range(len(y)):
            one = weight if weight is None else weight[i : i + 1]
            norms.append(float(np.linalg.norm(whole(rule, x[i : i + 1], y[i : i + 1], one))))
        return whole(rule, x, y, weight)

    heavy = np.full(50, 37.0)
    with mock.patch.object(LinearRule, "clipped_sum", watched):
        for begin in ("fit", "partial_fit"):
            model = getattr(stream(solver="ftrl", batch_size=10), begin)(X[:50], Y[:50])
            clip = model._stream.rule.clip_norm
            for later in ({"clip_norm": -1.0}, {}):
                settings = {"clip_norm": 1.0, "max_weight": 37.0}
                model.set_params(**{**settings, **later})
                for call in (model.fit, model.partial_fit, model.partial_fit):
                    with pytest.raises((InvalidInput, Unsupported, ParticipationViolation)):
                        call(X[50:100], Y[50:100], sample_weight=heavy, ids=[7] * 50)
            with pytest.raises(InvalidInput, match="largest weight of this stream is 1"):
                model.partial_fit(X[50:100], Y[50:100], sample_weight=heavy)
            model.set_params(max_weight=None).partial_fit(X[50:100], Y[50:100])
            assert 0.1 * clip < max(norms) <= clip


def test_settings_that_a_stream_was_made_with_stay(tmp_path: Path) -> None:
    """Its statement would speak of others, and `load` would make another stream of them."""
    model = stream(batch_size=10).partial_fit(X[:50], Y[:50], ids=range(50))
    changed = {"rows_per_unit": 3, "bounds": None, "epsilon": 8.0}
    for name, value in changed.items():
        before = model.privacy_
        kept = getattr(model, name)
        with pytest.raises(InvalidInput, match=f"{name} of this stream"):
            model.set_params(**{name: value}).partial_fit(X[50:60], Y[50:60], ids=range(50, 60))
        with pytest.raises(InvalidInput, match=f"{name} of this stream"):
            model.save(tmp_path / "s")
        assert model.privacy_ is before
        model.set_params(**{name: kept})
    model.set_params(bounds=[-1, 1.0])  # as it was
    model.partial_fit(X[50:60], Y[50:60], ids=range(50, 60)).save(tmp_path / "s")
    model = convex.PrivateLogisticRegression.load(tmp_path / "s")
    model.partial_fit(X[60:70], Y[60:70], ids=range(60, 70))
    assert (model.n_rows_, model.privacy_.epsilon <= 1.0) == (70, True)


@pytest.mark.parametrize("passes", [1, 2])
def test_ids_of_a_table_are_not_those_of_the_stream_after_it(passes: int, tmp_path: Path) -> None:
    model = stream(solver="ftrl", passes=passes, batch_size=10)
    model.fit(X[:35], Y[:35], ids=range(35))
    model.partial_fit(X[35:115], Y[35:115], ids=range(100, 180))  # phases of 35 and 70
    with pytest.raises(ParticipationViolation):
        model.partial_fit(X[115:116], Y[115:116], ids=[3])
    model.save(tmp_path / "s")
    model.partial_fit(X[115:125], Y[115:125], ids=range(180, 190))
    written: list[list[int]] = []
    phase = RunFolder(tmp_path / "s" / "phase-3")
    History.read(phase, on_step=lambda _, units: written.append(units.tolist()))
    assert written == [list(range(i, i + 10)) for i in (135, 145, 155, 165, 175)]


@pytest.mark.parametrize("rows", [1, 12, 5000])
def test_rows_of_an_interrupted_call_are_not_taken_for_later_ones(
    rows: int, tmp_path: Path
) -> None:
    """Where the interrupt comes before anything is taken, the call may be repeated."""
    x, y = np.tile(X, (15, 1)), np.tile(Y, 15)
    model = stream(batch_size=10)
    model.partial_fit(x[:13], y[:13], ids=range(13))
    late = slice(13, 13 + rows)
    stopped = mock.patch.object(stream_units.StreamUnits, "check", side_effect=KeyboardInterrupt)
    with stopped, pytest.raises(KeyboardInterrupt):
        model.partial_fit(x[late], y[late], ids=range(13, 13 + rows))
    model.partial_fit(x[late], y[late], ids=range(13, 13 + rows))
    more = slice(13 + rows, 14 + rows)
    model, ended = stream(batch_size=10).partial_fit(x[:13], y[:13], ids=range(13)), 0
    whole = LearningStream.feed

    def feed(self: Any, *args: Any) -> None:
        nonlocal ended
        if ended == (rows > 4096):  # ids are there, and rows are not
            raise KeyboardInterrupt
        ended += 1
        whole(self, *args)

    with mock.patch.object(LearningStream, "feed", feed), pytest.raises(KeyboardInterrupt):
        model.partial_fit(x[late], y[late], ids=range(13, 13 + rows))
    with pytest.raises(InvalidInput, match="half-way"):
        model.partial_fit(x[more], y[more], ids=[99_999])
    with pytest.raises(InvalidInput, match="half-way"):
        model.save(tmp_path / "s")


REGRESSORS = [kind for kind in KINDS if "target_bounds" in getattr(convex, kind)().get_params()]


@pytest.mark.parametrize("kind", REGRESSORS)
def test_predictions_stay_in_the_units_of_the_fit(kind: str) -> None:
    """A parameter that is set after a fit is for the next one."""
    rng = np.random.default_rng(5)
    x, y = rng.uniform(-1, 1, (300, 2)), rng.uniform(0.1, 1, 300)
    model = made(kind, target_bounds=(0.1, 1.0), bounds=(-1, 1), epsilon=4.0).fit(x, y)
    told = model.predict(x[:5])
    model.set_params(target_bounds=(0.1, 10.0))
    np.testing.assert_array_equal(model.predict(x[:5]), told)
    again = model.fit(x, 10 * y).predict(x)
    assert again.max() > 1.0
