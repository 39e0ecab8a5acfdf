"""An argument of a wrong kind is one line about that argument, before any noise is drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from noshuffle.convex import losses, solvers
from noshuffle.convex.solvers.domains import Ball, L1Ball
from noshuffle.errors import InvalidInput
from noshuffle.optim.norms import Norm

X = losses.fit_into(np.random.default_rng(0).standard_normal((40, 3)), bound=1.0)
Y = np.where(X[:, 0] > 0, 1.0, -1.0)


@pytest.mark.parametrize(
    ("solve", "wrong"),
    [
        (solvers.dp_gd, {"domain": 2.0}),
        (solvers.dp_gd, {"domain": np.ones(3)}),
        (solvers.dp_gd, {"delta": np.array([1e-6, 1e-6])}),
        (solvers.dp_gd, {"budget": "runs/budget"}),
        (solvers.dp_sgd, {"learning_rate": "slow", "rate": 0.5, "steps": 2}),
        (solvers.phased_mirror_descent, {"p": "two"}),
        (solvers.phased_mirror_descent, {"norm": 1.5}),
        (solvers.phased_mirror_descent, {"prox": 1.0}),
        (solvers.weakly_convex, {"start": np.zeros(2)}),
        (solvers.weakly_convex, {"start": [0.0, np.nan, 0.0]}),
        (solvers.weakly_convex, {"noise": "laplace"}),
        (solvers.frank_wolfe_noisy, {"steps": 0}),
        (solvers.frank_wolfe_stationary, {"rate": 0}),
    ],
)
def test_solvers_say_which_argument_is_wrong(solve: Any, wrong: dict[str, Any]) -> None:
    is_nonconvex = solve in (solvers.weakly_convex, solvers.frank_wolfe_stationary)
    loss = losses.sigmoid() if is_nonconvex else losses.logistic()
    asked = {"epsilon": 1.0, "delta": 1e-6, "domain": Ball(1.0), **wrong}
    named = {"p": "the order of a norm"}.get(next(iter(wrong)), next(iter(wrong)))
    with pytest.raises(InvalidInput, match=f"^{named} must ") as caught:
        solve(loss, X, Y, **asked)
    assert "\n" not in str(caught.value)


def test_a_polytope_solver_takes_no_steps_as_none() -> None:
    with pytest.raises(InvalidInput, match=r"^steps must be"):
        solvers.frank_wolfe_poly(
            losses.logistic(order=np.inf), X, Y, epsilon=1.0, delta=1e-6, domain=L1Ball(1.0),
            steps=0,
        )  # fmt: skip


def test_noisy_max_and_norms() -> None:
    with pytest.raises(InvalidInput, match=r"^budget must be"):
        solvers.noisy_max([1.0, 2.0], epsilon=1.0, sensitivity=1.0, budget=3)
    with pytest.raises(InvalidInput, match=r"^parts must be"):
        Norm(1.0, (0, 0, 1))  # type: ignore[arg-type]
