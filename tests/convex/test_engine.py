"""The engine against slow twins: clipping, noise, FTRL, sums, phases, memory."""

from __future__ import annotations

import gc
import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse
from scipy.optimize import check_grad
from scipy.special import log_softmax
from sklearn.base import clone

from noshuffle.convex import PrivateLinearRegression, PrivateLogisticRegression
from noshuffle.convex.linear_rule import LinearRule, general_rate, smooth_rate
from noshuffle.convex.losses import hinge, logistic, smoothed_hinge, squared
from noshuffle.convex.margins import PerMargin, Softmax
from noshuffle.convex.moments import ball_least_squares, moments, unpack
from noshuffle.convex.phases import PhaseBudget, make_phase, next_phase, statement_of
from noshuffle.convex.rows import RowMap
from noshuffle.convex.stream import LearningStream
from noshuffle.convex.sums_rule import SumsRule
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.noise import test_source as source_of
from noshuffle.release.folder import RunFolder
from noshuffle.release.history import History
from noshuffle.release.verify import verify
from noshuffle.strategies import blt

RNG = np.random.default_rng(5)
START = RNG.bit_generator.state
SQUARED, HINGE = PerMargin(squared(radius=math.inf)), PerMargin(hinge())
LOSSES = [
    (PerMargin(logistic()), 1),
    (Softmax(), 4),
    (PerMargin(smoothed_hinge()), 1),
    (PerMargin(smoothed_hinge(width=0.2)), 3),
    (SQUARED, 1),
]


@pytest.fixture(autouse=True)
def _from_the_start() -> None:
    """The same data for a test, whichever others ran before it."""
    RNG.bit_generator.state = START


def targets(loss: Any, n: int, outputs: int) -> Any:
    if loss is SQUARED:
        return RNG.uniform(-1, 1, size=n)
    return RNG.integers(max(outputs, 2), size=n)


def value(loss: Any, margins: Any, y: Any) -> Any:
    """The loss of every row."""
    if isinstance(loss, Softmax):
        return -log_softmax(margins, axis=1)[np.arange(len(y)), y]
    return loss.phi.value_fn(margins, loss.targets(margins, y)).sum(1)


@pytest.mark.parametrize(("loss", "outputs"), LOSSES)
def test_residual_is_the_gradient_within_its_bounds(loss: Any, outputs: int) -> None:
    for _ in range(20):
        y = targets(loss, 1, outputs)
        m = RNG.normal(size=outputs) * 2
        wrong = check_grad(
            lambda v, y=y: value(loss, v[None], y)[0],
            lambda v, y=y: loss.residual(v[None], y)[0],
            m,
        )
        assert wrong < 1e-5
        r = loss.residual(m[None], y)[0]
        assert np.linalg.norm(r) <= loss.lipschitz(outputs) + 1e-12
        step = RNG.normal(size=outputs) * 1e-3
        change = loss.residual((m + step)[None], y)[0] - r
        assert np.linalg.norm(change) <= loss.curvature() * np.linalg.norm(step) * (1 + 1e-6)


def test_hinge_is_the_limit_of_its_smooth_form() -> None:
    m, y = RNG.normal(size=(200, 3)), RNG.integers(3, size=200)
    round_hinge = PerMargin(smoothed_hinge(width=1e-9))
    np.testing.assert_allclose(value(round_hinge, m, y), value(HINGE, m, y), atol=1e-8)
    np.testing.assert_allclose(round_hinge.residual(m, y), HINGE.residual(m, y))


def rule(loss: Any, outputs: int, clip: float, **more: Any) -> LinearRule:
    return LinearRule(loss, features=6, outputs=outputs, clip_norm=clip, radius=1.0, **more)


def slow_sum(made: LinearRule, x: Any, y: Any) -> Any:
    """Build every row's gradient, clip it, add them up."""
    w = made.iterate
    total = np.zeros((made.outputs, made.features + 1))
    for row, target in zip(x, y):
        long = np.append(row, 1.0 if made.fit_intercept else 0.0)
        r = made.loss.residual((w @ np.append(row, 1.0))[None], np.array([target]))[0]
        gradient = np.outer(r, long)
        norm = np.linalg.norm(gradient)
        total += gradient * min(1.0, made.clip_norm / norm if norm else 1.0)
    return np.concatenate([total[:, :-1].ravel(), total[:, -1]])


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize(("loss", "outputs"), [*LOSSES, (HINGE, 3)])
def test_clipped_sum_against_its_slow_twin(loss: Any, outputs: int, intercept: bool) -> None:
    made = rule(loss, outputs, 0.8, fit_intercept=intercept, averaging="last", fixed_rate=0.3)
    made.start(None)  # type: ignore[arg-type]
    made.update(RNG.normal(size=made.size), step=0)
    x, y = RNG.normal(size=(40, 6)), targets(loss, 40, outputs)
    expected = slow_sum(made, x, y)
    np.testing.assert_allclose(made.clipped_sum(x, y), expected, atol=1e-9)
    np.testing.assert_allclose(made.clipped_sum(sparse.csr_array(x), y), expected, atol=1e-9)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3, 1e200, 1e308])
def test_one_row_never_exceeds_the_clip_norm(size: float) -> None:
    for loss, outputs in LOSSES:
        made = rule(loss, outputs, 0.5)
        sums = SumsRule(features=6, clip_norm=0.5, tau=0.7)
        for _ in range(10):
            x, y = size * RNG.uniform(-1, 1, size=(1, 6)), targets(loss, 1, outputs)
            for out in (made.clipped_sum(x, y), sums.clipped_sum(x, y.astype(float))):
                assert np.isfinite(out).all()
                assert np.linalg.norm(out) <= 0.5


@pytest.mark.parametrize("has_grid", [False, True])
def test_a_run_is_ftrl_on_explicit_correlated_noise(
    has_grid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole estimator against Algorithm 1 with the dense C⁻¹ and the raw draws."""
    if not has_grid:
        monkeypatch.setattr("noshuffle.noise.grid.grid_step", lambda _: 0.0)
    n, p, batch = 60, 4, 7
    x, y = RNG.normal(size=(n, p)), RNG.integers(2, size=n)
    strategy = blt(decays=(0.9, 0.5), scales=(0.2, 0.3))
    model = PrivateLogisticRegression(
        epsilon=1.0,
        mechanism=strategy,
        batch_size=batch,
        learning_rate=0.4,
        averaging="uniform",
        penalty="l2",
        alpha=0.05,
        test_seed="t",
    ).fit(x, y)
    steps = math.ceil(n / batch)
    source, z = source_of(seed="PrivateLogisticRegression t"), torch.empty(steps, p + 1)
    for t in range(steps):
        source.on(torch.device("cpu")).normal_(z[t], row=t, name="phase 1")
    scale = model.plan_.noise_multiplier
    noise = scale * strategy.noising(steps) @ z.double().numpy()
    theta, total, mean = np.zeros(p + 1), np.zeros(p + 1), np.zeros(p + 1)
    for t in range(steps):
        rows = np.hstack([x, np.ones((n, 1))])[t * batch : (t + 1) * batch]
        gradient = np.zeros(p + 1)
        for row, target in zip(rows, y[t * batch : (t + 1) * batch]):
            g = (1 / (1 + np.exp(-row @ theta)) - target) * row
            gradient += g * min(1.0, 1.0 / np.linalg.norm(g))
        total += 0.4 * (gradient + noise[t]) / batch
        theta = -total.copy()
        theta[:p] /= 1 + 0.05 * 0.4 * (t + 1)
        mean += theta / steps
    close = 0.4 * steps * scale / batch * 2**-10 if has_grid else 1e-5
    np.testing.assert_allclose(model.coef_[0], mean[:p], rtol=1e-4, atol=close)
    np.testing.assert_allclose(model.intercept_[0], mean[p], rtol=1e-4, atol=close)


def test_noise_of_the_sums_has_the_planned_covariance() -> None:
    """Empty rows leave noise alone; its prefix sums must have the deviation the phase claims."""
    budget = PhaseBudget(1.0, 1e-6, "tree")
    made = SumsRule(features=90, clip_norm=2.0, fit_intercept=False)
    stream = LearningStream(made, budget, source=source_of(seed=3), horizon=12, batch_size=2)
    stream.feed(np.zeros((12, 90)), np.zeros(12))
    claimed = stream.phase.error[-1] * 2.0
    assert made._total.std() == pytest.approx(claimed, rel=0.05)
    assert made._total.std() != pytest.approx(claimed * 1.5, rel=0.05)


def test_sums_without_noise_are_least_squares() -> None:
    x, w = RNG.normal(size=(500, 4)), RNG.normal(size=4)
    y = np.clip((x @ w + 0.3) / 10, -1, 1)
    model = PrivateLinearRegression(
        epsilon=math.inf, solver="sums", clip_norm=1e9, mechanism="identity"
    ).fit(x, y)
    long = np.hstack([x, np.ones((500, 1))])
    best = np.linalg.lstsq(long, y, rcond=None)[0]
    np.testing.assert_allclose(model.coef_, best[:4], atol=1e-8)
    assert model.intercept_ == pytest.approx(best[4], abs=1e-8)


def test_packing_keeps_the_norm() -> None:
    x, y = RNG.normal(size=(7, 5)), RNG.normal(size=7)
    packed = moments(x, y, ratio=0.5)
    assert np.linalg.norm(packed[:15]) == pytest.approx(np.linalg.norm(x.T @ x))
    gram, cross = unpack(packed, 5, ratio=0.5)
    np.testing.assert_allclose(gram, x.T @ x, atol=1e-12)
    np.testing.assert_allclose(cross, y @ x, atol=1e-12)
    weights = RNG.uniform(size=7)
    one_by_one = sum(
        w * moments(x[i : i + 1], y[i : i + 1], ratio=0.5) for i, w in enumerate(weights)
    )
    np.testing.assert_allclose(moments(x, y, ratio=0.5, weights=weights), one_by_one, atol=1e-12)


def test_ridge_in_a_ball_meets_its_optimality_conditions() -> None:
    for _ in range(20):
        a = RNG.normal(size=(4, 4))
        v, u = a @ a.T, RNG.normal(size=4) * 5
        free = ball_least_squares(v, u, ridge=0.3, least_curvature=1e-12)
        np.testing.assert_allclose((v + 0.3 * np.eye(4)) @ free, u, atol=1e-8)
        radius = 0.5 * float(np.linalg.norm(free))
        inside = ball_least_squares(v, u, ridge=0.3, radius=radius)
        assert np.linalg.norm(inside) == pytest.approx(radius)
        slope = u - (v + 0.3 * np.eye(4)) @ inside  # must point outwards along the answer
        cosine = slope @ inside / (np.linalg.norm(slope) * radius)
        assert cosine == pytest.approx(1.0)
        # Curvatures that come from noise alone are raised.
        raised = ball_least_squares(v - 9 * np.eye(4), u, ridge=0.3, least_curvature=0.2)
        values, basis = np.linalg.eigh(v - 9 * np.eye(4))
        expected = basis @ ((basis.T @ u) / np.maximum(values + 0.3, 0.2))
        np.testing.assert_allclose(raised, expected, atol=1e-10)


def test_rows_depend_on_themselves_alone() -> None:
    bounds = [(-1, 2), (5, 9), (0, 3), (-4, -1)]
    made = RowMap.of(bounds, feature_bound=1.0, features=4)
    x = RNG.normal(size=(50, 4)) * 10
    together = made.apply(x)
    for i in range(50):
        np.testing.assert_array_equal(made.apply(x[i : i + 1])[0], together[i])
    assert (np.linalg.norm(together, axis=1) <= 1 + 1e-12).all()
    assert (np.abs(RowMap.of(bounds, feature_bound=None, features=4).apply(x)) <= 1).all()


def test_bounds_by_lows_and_highs_are_told_how_to_turn() -> None:
    bounds = np.zeros(3), np.ones(3)
    with pytest.raises(InvalidInput, match=r"3 pairs.*shape \(2, 3\); .*numpy.transpose"):
        RowMap.of(bounds, feature_bound=None, features=3)
    made = RowMap.of(np.transpose(bounds), feature_bound=None, features=3)
    assert made.high.tolist() == [1.0, 1.0, 1.0]


def test_phases_spend_what_the_budget_allows() -> None:
    budget = PhaseBudget(0.7, 1e-5, "tree", "replace-one")
    done = [next_phase(budget, [], batch_size=None)]
    done.append(next_phase(budget, done, batch_size=None))
    done.append(next_phase(budget, done, batch_size=None))
    assert [phase.rows for phase in done] == [1024, 1024, 2048]
    for phase in done:
        assert 0.69 < phase.plan.epsilon() <= 0.7
    together = statement_of(done, notes=("a note.",))
    assert together.epsilon <= 0.7
    assert together.neighbours == "replace-one"
    assert "a note." in together.assumptions


def test_rates_minimise_what_they_say() -> None:
    common = {"radius": 3.0, "steps": 400, "clip_norm": 0.5, "noise": 0.2}
    eta = smooth_rate(**common, batch_size=10**9, curvature=0.25)  # type: ignore[arg-type]

    def bound(e: float) -> float:
        return 9 / (2 * e * 400) + 0.5 * e**2 * 0.2**2 * 0.25 * 0.5**2

    assert bound(eta) <= min(bound(eta * 0.9), bound(eta * 1.1))
    eta = general_rate(**common, dimension=9)  # type: ignore[arg-type]

    def regret(e: float) -> float:
        return 9 / (2 * e * 400) + e * (0.25 + 0.5 * 0.2 * 3)

    assert regret(eta) <= min(regret(eta * 0.9), regret(eta * 1.1))


@pytest.mark.parametrize("ids", [None, range(100, 123), [f"u{i}" for i in range(23)]])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_run_folder_holds_the_evidence(ids: Any, passes: int, tmp_path: Path) -> None:
    x, y = RNG.normal(size=(23, 2)), RNG.integers(2, size=23)
    model = PrivateLogisticRegression(
        passes=passes, batch_size=5, mechanism="tree", classes=[0, 1]
    ).fit(x, y, ids=ids, run=tmp_path / "run")
    verdict = verify(tmp_path / "run")
    assert not verdict.refuted
    assert verdict.is_verified
    assert verdict.released == 5 * passes
    said = json.loads((tmp_path / "run" / "statement.json").read_text())
    assert said["epsilon"] == model.privacy_.epsilon
    sizes: list[int] = []
    History.read(RunFolder(tmp_path / "run"), on_step=lambda _, units: sizes.append(len(units)))
    assert sizes == [5, 5, 5, 5, 3] * passes
    assert not (tmp_path / "run" / "secret.json").exists()  # finished, so ended
    if passes == 1:  # new rows after a finished run are phases of their own
        more = None if ids is None else [f"v{i}" if isinstance(ids, list) else i for i in range(9)]
        model.partial_fit(x[:9], y[:9], ids=more)
        assert model.n_rows_ == 32


def test_a_stream_in_a_run_folder_ends_with_its_horizon(tmp_path: Path) -> None:
    x, y = RNG.normal(size=(20, 2)), RNG.integers(2, size=20)
    model = PrivateLogisticRegression(horizon=20, batch_size=5, classes=[0, 1], mechanism="tree")
    model.partial_fit(x[:12], y[:12], run=tmp_path / "run")
    assert json.loads((tmp_path / "run" / "statement.json").read_text())["released_steps"] == 2
    with pytest.raises(Unsupported, match="first partial_fit"):
        model.partial_fit(x[12:14], y[12:14], run=tmp_path / "other")
    model.partial_fit(x[12:], y[12:])
    assert verify(tmp_path / "run").is_verified
    with pytest.raises(Unsupported, match="one plan"):
        PrivateLogisticRegression(classes=[0, 1]).partial_fit(x, y, run=tmp_path / "more")


def test_memory_does_not_grow_with_the_rows() -> None:
    def peak(n: int) -> int:
        x = np.zeros((n, 20), dtype=np.float32)
        y = np.arange(n) % 2
        model = PrivateLogisticRegression(mechanism="identity", batch_size=256, classes=[0, 1])
        gc.collect()
        tracemalloc.start()
        model.partial_fit(x[:300], y[:300])
        for first in range(300, n, 5000):
            model.partial_fit(x[first : first + 5000], y[first : first + 5000])
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(60_000)  # plans of its phases are fitted once in a process, which takes more
    assert peak(60_000) < 2 * peak(15_000)  # and not four times; when garbage goes moves both


def test_make_phase_without_noise() -> None:
    phase = make_phase(PhaseBudget(math.inf, 1e-6, "identity"), rows=10, passes=1, batch_size=None)
    assert phase.worst_error == 0.0


def test_phases_draw_independent_noise_under_one_key() -> None:
    class Recorder:
        size, clip_norm, learning_rate, watch = 4000, 1.0, 1.0, None
        weights = np.zeros((1, 1))

        def __init__(self) -> None:
            self.heard: list[Any] = []

        def start(self, phase: Any) -> None:
            pass

        def clipped_sum(self, x: Any, y: Any) -> Any:
            return np.zeros(self.size)

        def update(self, mean: Any, *, step: int) -> None:
            self.heard.append(mean)

    made = Recorder()
    budget = PhaseBudget(1.0, 1e-6, "identity")
    stream = LearningStream(made, budget, source=source_of(seed=0), horizon=None, batch_size=512)
    stream.feed(np.zeros((4096, 1)), np.zeros(4096))
    assert len(made.heard) == 8
    assert [phase.rows for phase in stream.phases] == [1024, 1024, 2048]
    claimed = stream.phase.plan.noise_multiplier / 512
    correlations = np.corrcoef(made.heard) - np.eye(8)
    assert np.abs(correlations).max() < 0.08  # five deviations of a chance correlation
    np.testing.assert_allclose(np.std(made.heard, axis=1), claimed, rtol=0.06)


def test_plain_pieces_skip_checks_and_nothing_else() -> None:
    """Arrays of a stream that goes on are not handed to scikit-learn; lists are its twin."""
    x = RNG.uniform(-1, 1, size=(60, 3))
    y = (x[:, 0] > 0).astype(int)
    kinds = (PrivateLogisticRegression(classes=[0, 1]), PrivateLinearRegression())
    for kind in kinds:
        kind.set_params(horizon=100, mechanism="tree", test_seed=0, batch_size=7)
        target = y if kind is kinds[0] else x[:, 0]
        fast, slow = clone(kind), clone(kind)
        for i in range(60):
            fast.partial_fit(x[i : i + 1], target[i : i + 1])
            slow.partial_fit(x[i : i + 1].tolist(), target[i : i + 1].tolist())
            assert (fast.n_rows_, fast.n_steps_) == (slow.n_rows_, slow.n_steps_)
        np.testing.assert_array_equal(fast.coef_, slow.coef_)
        assert fast.progressive_score_ == slow.progressive_score_
        assert fast.privacy_ == slow.privacy_
        for bad in (np.full((1, 3), np.nan), np.ones((1, 2)), np.ones((1, 3), dtype=complex)):
            with pytest.raises(ValueError, match=r"NaN|features|real numbers"):
                fast.partial_fit(bad, target[:1])


def test_single_rows_wait_for_their_batch_and_change_nothing(tmp_path) -> None:
    """Single rows, summed together, are learned as by hand; who looks at the score changes no bit;
    a save in the middle of a batch keeps rows that wait; a caller may reuse his buffer."""
    x = RNG.uniform(-1, 1, size=(40, 3))
    y = (x[:, 0] > 0).astype(int)
    made = PrivateLogisticRegression(
        classes=[0, 1], horizon=40, mechanism="tree", test_seed=0, batch_size=7, bounds=(-0.5, 0.5)
    )
    whole, single, curious, saved = (clone(made) for _ in range(4))
    for one in (whole, single, curious, saved):
        one.partial_fit(x[:1], y[:1])
    whole.partial_fit(x[1:], y[1:])
    buffer, scores = np.empty((1, 3)), []
    for i in range(1, 40):
        buffer[:] = x[i]
        for one in (single, curious, saved):
            one.partial_fit(buffer, y[i : i + 1])
        scores.append(curious.progressive_score_)
        if i == 17:
            assert saved.save(tmp_path / "m").progressive_score_ == scores[-1]
            saved = PrivateLogisticRegression.load(tmp_path / "m")
            assert saved.progressive_score_ == scores[-1]
    np.testing.assert_array_equal(single.coef_, curious.coef_)
    assert scores[-1] == whole.progressive_score_ == single.progressive_score_
    assert len(set(scores)) > 20
    np.testing.assert_allclose(whole.coef_, single.coef_, atol=1e-9)
    np.testing.assert_allclose(whole.coef_, saved.coef_, atol=1e-9)


def test_an_entry_in_several_parts_is_clamped_once():
    """A sparse row may list a column twice; each part alone would be inside the bounds."""
    parts = (np.array([5.0, 5.0, -0.25]), np.array([0, 0, 1]), np.array([0, 3]))
    rows = sparse.csr_array(parts, shape=(1, 2))
    made = RowMap.of((-1.0, 1.0), feature_bound=None, features=2)
    np.testing.assert_array_equal(made.apply(rows).toarray(), [[1.0, -0.25]])
    assert rows.nnz == 3
