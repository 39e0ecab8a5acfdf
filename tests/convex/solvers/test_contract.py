"""One contract for every solver: what leaves, how it is said, what is refused, where noise is from.

The twin of "everything published is a function of what was released": the door (noise stream,
`KeyedDraws.release`, the chosen index) is made to answer the same numbers whatever the data, and
two different data sets must then give the same solution bit for bit.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from noshuffle.convex import PrivateLogisticRegression, losses, solvers
from noshuffle.convex.solvers import frank_wolfe_poly as poly_solver
from noshuffle.convex.solvers import noisy_max
from noshuffle.convex.solvers.domains import Ball, Everywhere, L1Ball, LpBall, Simplex
from noshuffle.errors import InvalidInput, NoshuffleError
from noshuffle.noise import NoiseStream
from noshuffle.noise.grid import grid_step
from noshuffle.noise.laws import KeyedDraws
from noshuffle.noise.step_plan import grid_of

N, D = 96, 3
BALL = {"epsilon": 2.0, "delta": 1e-5, "domain": Ball(1.0)}
FREE = {"epsilon": 2.0, "delta": 1e-5}
INF = math.inf

#: name → (solver, loss, settings); argmax solvers publish vertices, the others vectors.
CASES: dict[str, tuple[Callable[..., Any], Any, dict[str, Any]]] = {
    "ftrl": (solvers.ftrl, losses.logistic(), {**BALL, "batch_size": 8}),
    "ftrl, l1": (solvers.ftrl, losses.hinge(), {**BALL, "batch_size": 8, "l1": 0.01}),
    "dp_gd": (solvers.dp_gd, losses.logistic(), {**BALL, "steps": 5}),
    "dp_gd, average": (
        solvers.dp_gd, losses.hinge(), {**BALL, "steps": 5, "output": "average"},
    ),
    "dp_sgd": (solvers.dp_sgd, losses.hinge(), {**BALL, "rate": 0.2, "steps": 5}),
    "dp_svrg": (solvers.dp_svrg, losses.logistic(), {**BALL, "epochs": 2, "steps": 3}),
    "accelerated_srgd": (solvers.accelerated_srgd, losses.logistic(), {**BALL, "steps": 4}),
    "output": (solvers.output_perturbation, losses.logistic(), {**FREE, "ridge": 0.1}),
    "output, pure": (
        solvers.output_perturbation, losses.logistic(), {"epsilon": 2.0, "ridge": 0.1},
    ),
    "objective": (solvers.objective_perturbation, losses.logistic(), {**FREE, "ridge": 0.1}),
    "objective, pure": (
        solvers.objective_perturbation, losses.logistic(), {"epsilon": 2.0, "ridge": 0.1},
    ),
    "phased_sgd": (solvers.phased_sgd, losses.logistic(), BALL),
    "phased_mirror, p = 2": (solvers.phased_mirror_descent, losses.hinge(), {**BALL, "steps": 4}),
    "phased_mirror, p = 1.5": (
        solvers.phased_mirror_descent, losses.hinge(order=3.0),
        {**FREE, "domain": Everywhere(), "p": 1.5, "steps": 4},
    ),
    "dp_gd, p = 3": (
        solvers.dp_gd, losses.logistic(order=1.5, feature_bound=2.0),
        {**FREE, "domain": LpBall(1.0, 3.0), "steps": 5},
    ),
    "frank_wolfe_noisy, root": (
        solvers.frank_wolfe_noisy, losses.logistic(), {**BALL, "steps": 5},
    ),
    "frank_wolfe_noisy, tree": (
        solvers.frank_wolfe_noisy, losses.logistic(), {**BALL, "steps": 5, "aggregation": "tree"},
    ),
    "frank_wolfe_noisy, naive": (
        solvers.frank_wolfe_noisy, losses.logistic(),
        {**BALL, "steps": 5, "aggregation": "naive"},
    ),
    "frank_wolfe_noisy, p = 1.5": (
        solvers.frank_wolfe_noisy, losses.logistic(order=3.0),
        {**FREE, "domain": LpBall(1.0, 1.5), "steps": 5},
    ),
    "frank_wolfe_poly": (
        solvers.frank_wolfe_poly, losses.logistic(order=INF),
        {**FREE, "domain": L1Ball(1.0), "steps": 5},
    ),
    "frank_wolfe_full": (
        solvers.frank_wolfe_full, losses.logistic(order=INF),
        {**FREE, "domain": L1Ball(1.0), "steps": 5},
    ),
    "frank_wolfe_full, listed": (
        solvers.frank_wolfe_full, losses.logistic(),
        {**FREE, "steps": 5, "vertices": np.vstack([np.eye(D), -np.eye(D)])},
    ),
    "frank_wolfe_tree": (
        solvers.frank_wolfe_tree, losses.logistic(order=INF),
        {**FREE, "domain": Simplex(1.0), "phases": 2},
    ),
    "stationary, ball": (
        solvers.frank_wolfe_stationary, losses.sigmoid(), {**BALL, "steps": 5, "rate": 0.3},
    ),
    "stationary, l1": (
        solvers.frank_wolfe_stationary, losses.sigmoid(order=INF),
        {**FREE, "domain": L1Ball(1.0), "steps": 5, "rate": 0.3},
    ),
    "weakly_convex": (
        solvers.weakly_convex, losses.phase(radius=1.0),
        {**BALL, "rounds": 2, "start": np.full(D, 0.3)},
    ),
    "weakly_convex, p = 1.5": (
        solvers.weakly_convex, losses.sigmoid(order=3.0), {**FREE, "rounds": 2, "p": 1.5},
    ),
    "weakly_convex, p = 1": (
        solvers.weakly_convex, losses.sigmoid(order=INF), {**FREE, "rounds": 2, "p": 1.0},
    ),
    "stationary, p = 1.5": (
        solvers.frank_wolfe_stationary, losses.sigmoid(order=3.0),
        {**FREE, "domain": LpBall(1.0, 1.5), "steps": 5, "rate": 0.3},
    ),
    "ftrl_ls": (
        lambda loss, rows, labels, **more: solvers.ftrl_ls(rows, labels, **more), None,
        {**FREE, "radius": 1.0, "batch_size": 8},
    ),
}  # fmt: skip
CHOOSES = {
    "frank_wolfe_full",
    "frank_wolfe_full, listed",
    "frank_wolfe_poly",
    "frank_wolfe_tree",
    "stationary, l1",
}


def data(seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x = losses.fit_into(rng.normal(size=(N, D)), bound=1.0)
    return x, np.where(x[:, 0] + 0.1 * rng.normal(size=N) > 0, 1.0, -1.0)


def solve(name: str, x: Any, y: Any, *, test_seed: Any = "contract") -> Any:
    solver, loss, settings = CASES[name]
    return solver(loss, x, y, test_seed=test_seed, **settings)


def test_every_solver_is_here() -> None:
    tried = {case[0] for case in CASES.values()}
    missing = [n for n in solvers.__all__ if getattr(solvers, n) not in tried]
    # The last two have tests of their own.
    assert missing == ["Solution", "ftrl_ls", "noisy_max"]


@pytest.mark.parametrize("name", CASES)
def test_the_statement_is_complete(name: str) -> None:
    private, tested = (solve(name, *data(), test_seed=s).statement for s in (None, 1))
    asked = CASES[name][2]
    for said in (private, tested):
        assert 0 < said.epsilon <= asked["epsilon"] * (1 + 1e-12)
        assert said.delta == asked.get("delta", 0.0)
        assert said.neighbours in said.headline()
        assert said.sensitivity > 0
        assert said.noise_multiplier > 0
        words = said.words()
        # weakly_convex states the last of its rounds, and says how many rows there are in all.
        assert "is public" in words
        assert f"{N}" in words
        assert "Other runs, searches and baselines on the same data add up" in words
        assert "respects the bounds of the loss object, which were given" in words
        assert "Noise is treated as real-valued" in words
    assert "NOT PRIVATE" not in private.words()
    assert "NOT PRIVATE" in tested.words()


@pytest.mark.parametrize("name", CASES)
def test_seeds_repeat_and_keys_do_not(name: str) -> None:
    first, again, other = (solve(name, *data(), test_seed=s) for s in ("a", "a", "b"))
    np.testing.assert_array_equal(first.weights, again.weights)
    if first.iterates is not None:
        np.testing.assert_array_equal(first.iterates, again.iterates)
    assert first.weights.dtype == np.float64
    if name not in CHOOSES:  # few vertices: the paths differ, the ends may not
        assert not np.array_equal(first.weights, other.weights)
    # Some end at an iterate drawn at random, at times at their start: twelve are not all alike.
    ends = (solve(name, *data(), test_seed=None).weights.tobytes() for _ in range(12))
    assert any(end != first.weights.tobytes() for end in ends)


def with_entry(x: Any, value: Any, dtype: Any = None) -> Any:
    out = np.array(x, dtype=dtype)
    out[np.unravel_index(1, out.shape)] = value
    return out


X, Y = data()
BAD = {
    "complex rows": (X.astype(np.complex128), Y),
    "complex rows, half of them imaginary": (with_entry(X, 0.1j, np.complex64), Y),
    "complex labels": (X, Y + 0j),
    "objects": (X.astype(object), Y),
    "objects that are complex": (with_entry(X, 0.1j, object), Y),
    "labels that are objects": (X, Y.astype(object)),
    "text": (X.astype(str), Y),
    "NaN": (with_entry(X, math.nan), Y),
    "infinity": (with_entry(X, math.inf), Y),
    "NaN labels": (X, with_entry(Y, math.nan)),
    "rows of different lengths": ([[0.1], [0.1, 0.2]], [1.0, -1.0]),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", CASES)
def test_what_is_no_real_number_is_refused_in_one_line(name: str, bad: str) -> None:
    with pytest.raises(InvalidInput) as told:
        solve(name, *BAD[bad])
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("name", [n for n in CASES if n != "ftrl_ls"])
@pytest.mark.parametrize("kind", [np.complex128, object])
def test_derivatives_of_a_loss_of_ones_own_are_real(name: str, kind: Any) -> None:
    """A slope with an imaginary part would be released without noise on it."""
    solver, loss, settings = CASES[name]
    fields = {f: getattr(loss, f) for f in losses.Loss.__dataclass_fields__}
    slope = loss.slope_fn
    fields["slope_fn"] = lambda s, y: slope(s, y).astype(kind)
    with pytest.raises(InvalidInput, match="derivatives of the loss"):
        solver(losses.Loss(**fields), *data(), **settings)


class Door:
    """Every release of a run: on the grid; answered by numbers that know nothing of the data."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, answers: bool) -> None:
        self.released: list[Any] = []
        self._answers, add_, release = answers, NoiseStream.add_, KeyedDraws.release

        def stream(made: NoiseStream, values: Any, *, times: float = 1.0) -> None:
            assert times == 1.0
            step = grid_of(made._plans.at(made.step), scale=made.scale)
            add_(made, values)
            for value in values.values():
                self._take(value.numpy(), step)

        def vector(made: KeyedDraws, value: Any, noise: Any, *, scale: float) -> Any:
            out = release(made, value, noise, scale=scale)
            self._take(out, grid_step(scale))
            return out

        monkeypatch.setattr(NoiseStream, "add_", stream)
        monkeypatch.setattr(KeyedDraws, "release", vector)

    def _take(self, value: Any, step: float) -> None:
        cells = value / step
        assert step > 0
        assert np.array_equal(cells, np.rint(cells))
        self.released.append(value.copy())
        if self._answers:
            rng = np.random.default_rng(len(self.released))
            value[:] = step * rng.integers(-2000, 2000, size=value.shape)


@pytest.mark.parametrize("name", CASES)
def test_every_release_lies_on_the_grid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    door = Door(monkeypatch, answers=False)
    made = Recorded(monkeypatch)
    run = solve(name, *data(), test_seed=None)
    assert bool(door.released) != (name in CHOOSES)
    assert bool(made.chosen) == (name in CHOOSES)
    assert np.isfinite(run.weights).all()


class Recorded:
    """Indices that were chosen; with `answers` the same ones whatever the scores."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, answers: bool = False) -> None:
        self.chosen: list[int] = []
        real = inspect.getmodule(solvers.noisy_max).choose  # type: ignore[union-attr]

        def choose(scores: Any, **settings: Any) -> int:
            index = real(scores, **settings)
            self.chosen.append((7 * len(self.chosen)) % len(scores) if answers else index)
            return self.chosen[-1]

        choosing = (solvers.frank_wolfe_full, solvers.frank_wolfe_poly, solvers.frank_wolfe_tree)
        for solver in choosing:
            monkeypatch.setitem(solver.on.__globals__, "choose", choose)


@pytest.mark.parametrize("name", CASES)
def test_everything_published_is_a_function_of_what_was_released(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for seed in (1, 2):
        with monkeypatch.context() as patch:
            Door(patch, answers=True)
            Recorded(patch, answers=True)
            runs.append(solve(name, *data(seed)))
    first, second = runs
    np.testing.assert_array_equal(first.weights, second.weights)
    if first.iterates is not None:
        np.testing.assert_array_equal(first.iterates, second.iterates)
    assert first.details == second.details
    assert first.statement == second.statement


def test_no_event_of_low_bits_tells_the_data_of_ftrl() -> None:
    """A sum of 0 plus float64 noise n has digits below 2⁻⁵³ where |n| < ½, a sum of 1 never has.

    For such an event one row would need δ ≥ P[event] ≈ 0.04 (ε = 1); on a grid it never occurs.
    """
    events = np.zeros(2)
    for side, row in enumerate((0.0, 1.0)):
        x = np.zeros((2, 400))
        x[0, 0] = row  # one row at its bound, or zeroed out
        for _ in range(20):
            run = solvers.ftrl(
                losses.linear(), x, None, epsilon=1.0, delta=1e-6, domain=Everywhere(),
                regularization=1.0, mechanism="identity",
            )  # fmt: skip
            first = -run.iterates[1]  # the first released sum, exactly: λ = 1
            low = first * 2.0**53
            events[side] += np.sum((np.abs(first) < 0.5) & (low != np.rint(low)))
            step = grid_step(run.statement.noise_multiplier)
            assert np.array_equal(first / step, np.rint(first / step))
    assert events.tolist() == [0, 0]


def test_published_minimisers_lie_on_a_grid_of_public_numbers() -> None:
    for name in ("output", "output, pure", "objective", "objective, pure"):
        run = solve(name, *data(), test_seed=None)
        step = grid_step(run.details["cover" if "cover" in run.details else "noise"])
        assert np.array_equal(run.weights / step, np.rint(run.weights / step))


def test_noisy_max_keeps_the_contract() -> None:
    scores = np.array([0.0, 1.0, 0.5])
    said = noisy_max(scores, epsilon=1.0, sensitivity=1.0).statement.words()
    assert "NOT PRIVATE" not in said
    assert "Other runs" in said
    tested = [noisy_max(scores, epsilon=1.0, sensitivity=1.0, test_seed=3) for _ in range(2)]
    assert tested[0].index == tested[1].index
    assert "NOT PRIVATE" in tested[0].statement.words()
    picks = {noisy_max(scores, epsilon=0.1, sensitivity=1.0).index for _ in range(200)}
    assert picks == {0, 1, 2}  # each is missed by chance with probability below 1e-25
    for bad in (scores + 0j, scores.astype(object), [math.nan], [], [["a"]]):
        with pytest.raises(InvalidInput) as told:
            noisy_max(bad, epsilon=1.0, sensitivity=1.0)
        assert "\n" not in str(told.value)


def test_solvers_are_called_as_documented() -> None:
    for name in ("ftrl", "dp_sgd", "frank_wolfe_poly"):
        parameters = inspect.signature(getattr(solvers, name)).parameters
        assert list(parameters)[:3] == ["loss", "rows", "labels"]
        assert {"epsilon", "delta", "domain", "test_seed"} <= set(parameters)
        assert ("neighbours" in parameters) == (name != "dp_sgd")
    for name, (solver, _, _) in CASES.items():  # one relation by default, that of the estimators
        here = solvers.ftrl_ls if name == "ftrl_ls" else solver
        known = inspect.signature(here).parameters.get("neighbours")
        assert known is None or known.default == "zero-out", name
        assert known is not None or solver in (solvers.dp_sgd, solvers.dp_svrg), name
    for other in (solvers.noisy_max, PrivateLogisticRegression):
        assert inspect.signature(other).parameters["neighbours"].default == "zero-out"
    with pytest.raises(TypeError):
        solvers.dp_sgd(losses.hinge(), *data(), neighbours="replace-one", **CASES["dp_sgd"][2])
    with pytest.raises(NoshuffleError):
        solvers.weakly_convex(losses.sigmoid(ridge=1.0), *data(), **BALL)
    assert poly_solver.__name__ == "frank_wolfe_poly"


def test_parts_of_a_problem_share_no_noise() -> None:
    """weakly_convex releases from every part under one key: no two releases are alike."""
    seen: set[str] = set()
    count = 0
    with pytest.MonkeyPatch.context() as patch:
        door = Door(patch, answers=False)
        torch.manual_seed(0)
        solvers.weakly_convex(
            losses.phase(radius=1.0), np.zeros((64, 40)), np.zeros(64), rounds=4,
            test_seed=0, **BALL,
        )  # fmt: skip
        for value in door.released:
            seen.add(hashlib.sha256(value.tobytes()).hexdigest())
            count += 1
    assert count == len(seen) > 100
