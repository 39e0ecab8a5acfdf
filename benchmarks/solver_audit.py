"""Every convex solver attacked from outside: ε that its answers show, beside the ε that it states.

The loss is linear, so that a row's gradient is the row, whatever the iterate. A row is in the data
(at its bound) or zeroed out, by a fair coin, in one of two ways:

    coordinates   runs in 1,000 dimensions; row i is the unit vector e_i or zero. Coordinates of
                  normal noise are independent, so one run holds as many experiments
    runs          m runs in few dimensions with keys of their own, for laws other than the normal
                  and for chosen vertices

What is looked at is what a solver returns: weights and iterates. On a fifth of the experiments a
direction (Fisher) and a threshold are learned; the others give rates of true and of false alarms,
with exact limits (Clopper, Pearson) that chance passes once in a million (runs: in a thousand), and

    ε ≥ ln((true − δ)/false),     for (ε, δ)-DP of any mechanism, whatever its noise.

δ = 0.01, so that the events which ε is about are common enough to be counted. REFUTED: ε that is
shown exceeds the stated one. A solver that holds is not proved by this: the row may not be the
worst, and iterates that are not returned are not looked at.

Groups of weights and matrices (`Norm(p, parts)`, p = 1: gradients bounded in the largest group, in
the operator norm) have normal noise in a thousand dimensions, too; rows are `_BASIS`, orthogonal to
one another, each with equal parts, so that k parts make it √k long, the longest at that bound.

For l_p, p = 1.5, gradients are bounded in l_3, and of the rows at that bound the one with equal
entries stands out most: its Euclidean length is the largest. Mirror maps are undone before looking.
No state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from scipy.stats import beta

from noshuffle.auditing.answers import HOLDS, REFUTED, Finding
from noshuffle.auditing.canaries import estimate
from noshuffle.auditing.claim import fisher_direction
from noshuffle.auditing.emitted import Array, Coins
from noshuffle.convex import losses, solvers
from noshuffle.convex.solvers.domains import Ball, Domain, Everywhere, L1Ball, LpBall
from noshuffle.optim.norms import Decomposition, Groups, Norm, SingularValues

EPSILON, DELTA = 2.0, 0.01
#: Dimensions of one run; more experiments take more runs.
_WIDTH = 1000
#: Share of false alarms below which no threshold is set.
_LEAST = 0.01
Traces = tuple[Array, Coins]
_SAID: dict[str, Any] = {"epsilon": EPSILON, "delta": DELTA}


@dataclass(frozen=True)
class SolverAudit(Finding):
    """ε that is stated beside what is shown: surely (`shown`), and by the counts (`found`)."""

    name: str
    stated: float
    delta: float
    shown: float
    found: float
    mu: float
    experiments: int
    kind: ClassVar[str] = "solver"

    @property
    def answer(self) -> str:
        return REFUTED if self.shown > self.stated else HOLDS

    def words(self) -> str:
        return (
            f"{self.answer}: {self.name}, stated ε = {self.stated:.4g} at δ = {self.delta:g}; "
            f"{self.experiments:,} experiments show ε ≥ {self.shown:.3g} (counts: {self.found:.3g})"
        )


@dataclass(frozen=True)
class SolverCase:
    """How a solver is attacked: traces of `count` experiments under its own settings."""

    traces: Callable[[int, np.random.Generator], Traces]
    count: int
    level: float = 1e-6


def audit_solver(name: str, *, count: int | None = None, seed: int = 0) -> SolverAudit:
    """Attack one of `SOLVER_CASES`; `seed` draws the coins of the experiments, not the noise."""
    case = SOLVER_CASES[name]
    received, is_in = case.traces(count or case.count, np.random.default_rng(seed))
    pilot = np.arange(len(is_in)) % 5 == 0
    direction = fisher_direction(received[:, pilot], is_in[pilot])
    scores = direction @ received
    sign, threshold = _threshold(scores[pilot], is_in[pilot])
    alarm, inside = sign * (scores[~pilot] - threshold) > 0, is_in[~pilot]
    if sign < 0:  # the events of a row that is not there
        inside = ~inside
    hits, false = int(alarm[inside].sum()), int(alarm[~inside].sum())
    ins, outs = int(inside.sum()), int((~inside).sum())
    low = float(beta.ppf(case.level / 2, hits, ins - hits + 1)) if hits else 0.0
    high = float(beta.ppf(1 - case.level / 2, false + 1, outs - false)) if false < outs else 1.0
    return SolverAudit(
        name,
        EPSILON,
        DELTA,
        shown=_epsilon(low, high),
        found=_epsilon(hits / max(ins, 1), max(false, 1) / max(outs, 1)),
        mu=estimate(scores[~pilot], is_in[~pilot]).mu,
        experiments=len(is_in),
    )


def _epsilon(true: float, false: float) -> float:
    return max(0.0, math.log((true - DELTA) / false)) if true > DELTA else 0.0


def _threshold(scores: Array, is_in: Coins) -> tuple[int, float]:
    """The side and threshold with the largest ε on the experiments that are learned from."""
    best = (0.0, 1, float(np.median(scores)))
    for sign in (1, -1):
        out, into = (scores[~is_in], scores[is_in])[::sign]
        for share in np.geomspace(_LEAST, 0.5, 24):
            at = float(np.quantile(sign * out, 1 - share))
            false = float(np.mean(sign * out > at))
            true = float(np.mean(sign * into > at))
            if false >= _LEAST:
                best = max(best, (_epsilon(true, false), sign, sign * at))
    return best[1], best[2]


def _table(m: int, rows: int, first: int, is_in: Coins) -> Array:
    """m rows from `first` on: unit vectors of those who are in; all others are zero."""
    x = np.zeros((rows, m))
    x[first + np.arange(m), np.arange(m)] = is_in
    return x


def _coordinates(
    solve: Any,
    *,
    times: int,
    place: int = 0,
    read: Callable[[Any], Array] = lambda run: run.weights[None],
    loss: losses.Loss | None = None,
    size: str | None = None,
    **settings: Any,
) -> SolverCase:
    """`times` · m rows, the rows that matter from place · m on; `size` names a batch of m."""

    def once(m: int, draws: np.random.Generator) -> Traces:
        is_in = draws.random(m) < 0.5
        asked = {**_SAID, "domain": Everywhere(), **settings, **({size: m} if size else {})}
        run = solve(loss or losses.linear(), _table(m, times * m, place * m, is_in), None, **asked)
        return np.asarray(read(run)), is_in

    return SolverCase(_repeated(once, _WIDTH), 40_000)


def _directions(
    solve: Any, parts: Decomposition, basis: Array, *, times: int, bend: float = 0.0, **more: Any
) -> SolverCase:
    """times · m rows, the first m of which are those of `basis` or zero; looked at along them."""
    m, d = basis.shape
    norm = Norm(1.0, parts)
    loss = replace(losses.linear(order=math.inf, parts=parts), weak_curvature=bend)

    def once(_: int, draws: np.random.Generator) -> Traces:
        is_in = draws.random(m) < 0.5
        rows = np.zeros((times * m, d))
        rows[:m] = basis * is_in[:, None]
        run = solve(loss, rows, None, **_SAID, domain=Everywhere(), norm=norm, **more)
        return (basis @ norm.regular(d).gradient(run.iterates[1]))[None], is_in

    return SolverCase(_repeated(once, m), 24_000)


def _repeated(once: Callable[[int, np.random.Generator], Traces], width: int) -> Any:
    """The traces of as many runs of `width` experiments as are needed."""

    def traces(m: int, draws: np.random.Generator) -> Traces:
        made = [once(width, draws) for _ in range(-(-m // width))]
        return np.concatenate([t for t, _ in made], axis=1), np.concatenate([c for _, c in made])

    return traces


def _runs(
    solve: Any,
    *,
    rows: int,
    row: Array | float = 1.0,
    others: Array | float = 0.0,
    place: int = 0,
    read: Callable[[Any], Array] = lambda run: run.weights[:1],
    loss: losses.Loss | None = None,
    domain: Domain | None = None,
    **settings: Any,
) -> SolverCase:
    """One row of many is there or not, in every run anew; all others are as they are."""

    def traces(m: int, draws: np.random.Generator) -> Traces:
        is_in = draws.random(m) < 0.5
        found = []
        for coin in is_in:
            x = np.tile(others * np.ones_like(np.atleast_1d(row)), (rows, 1))
            x[place] = coin * row
            asked = {**_SAID, "domain": domain or Everywhere(), **settings}
            found.append(read(solve(loss or losses.linear(), x, None, **asked)))
        return np.array(found).T, is_in

    return SolverCase(traces, 16_000, 1e-3)


def _steps_of(run: Any) -> Array:
    """The vertices (or directions) of Frank–Wolfe from its iterates x ← (1−η)x + ηv."""
    rate, x = run.details["rate"], run.iterates
    return np.asarray((x[1:] - (1 - rate) * x[:-1]) / rate)


def _along(v: Array) -> Array:
    """How far the gradient of a step of Frank–Wolfe on the ball of p = 1.5 leans towards `_EQUAL`.

    The vertex is sign(g)|g|² up to a factor, which the other rows, all `_ASIDE`, fix.
    """
    g = np.sign(v) * np.sqrt(np.abs(v))
    return np.array([(g @ _EQUAL) / (g @ _ASIDE)])


def _least_squares(m: int, draws: np.random.Generator) -> Traces:
    """(x, y) = (e_i, 1) or nothing; a large ridge makes the answer the sum of y x."""
    is_in = draws.random(m) < 0.5
    asked = {**_SAID, "radius": 1.0, "batch_size": m, "mechanism": "identity"}
    run = solvers.ftrl_ls(np.diag(1.0 * is_in), np.ones(m), **asked, regularization=1e6)
    return run.weights[None], is_in


def _choices(m: int, draws: np.random.Generator) -> Traces:
    is_in = draws.random(m) < 0.5
    picks = [
        solvers.noisy_max(
            np.array([1.0, 0.0])[:: 1 if coin else -1], epsilon=EPSILON, sensitivity=1.0
        )
        for coin in is_in
    ]
    return np.array([[float(pick.index == 0) for pick in picks]]), is_in


_PATH: dict[str, Any] = {"read": lambda run: run.iterates[1:]}
_WALK: dict[str, Any] = {"read": _steps_of}
_VERTICES: dict[str, Any] = {"loss": losses.linear(order=math.inf), "domain": L1Ball(1.0)}
_BENT = replace(losses.linear(), weak_curvature=1e-9)
#: A row of l_3 norm one with equal entries, and another at right angles to it.
_EQUAL, _ASIDE = np.full(3, 3 ** (-1 / 3)), np.array([1.0, -1.0, 0.0]) / 2 ** (1 / 3)
#: Eight groups of 125 weights, a row having one of each; 4 × 100 matrices, a row having a signed
#: permutation of four columns (shifts, and signs of Hadamard's matrix).
_GROUPS, _MATRIX = Groups(tuple(np.repeat(range(8), 125).tolist())), SingularValues(4, 100)
_SIGNS = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1.0]])
_BASIS: dict[Decomposition, Array] = {
    _GROUPS: np.tile(np.eye(125), (1, 8)),
    _MATRIX: np.array(
        [
            np.kron(block, np.roll(np.diag(signs), shift, axis=1)).ravel()
            for block in np.eye(25)[:, None]
            for signs in _SIGNS
            for shift in range(4)
        ]
    ),
}
_FW: dict[str, Any] = {"steps": 3, "rate": 0.3, "domain": Ball(1.0)}
#: Of every solver at least one; names with a comma are variants.
SOLVER_CASES: dict[str, SolverCase] = {
    "ftrl": _coordinates(solvers.ftrl, times=3, size="batch_size", **_PATH),
    "ftrl_ls": SolverCase(_repeated(_least_squares, 40), 80_000),
    "dp_gd": _coordinates(solvers.dp_gd, times=1, steps=8, learning_rate=1.0, output="last"),
    "dp_sgd": _coordinates(
        solvers.dp_sgd, times=1, rate=0.5, steps=8, learning_rate=1.0, output="last"
    ),
    "dp_svrg": _coordinates(solvers.dp_svrg, times=1, epochs=1, steps=1, rate=1e-3),
    "accelerated_srgd": _coordinates(
        solvers.accelerated_srgd, times=2, steps=2, domain=Ball(1e6), learning_rate=1e-3
    ),
    "output_perturbation": _coordinates(solvers.output_perturbation, times=1, ridge=1.0),
    "output_perturbation, pure": _runs(solvers.output_perturbation, rows=1, ridge=1.0, delta=0.0),
    "objective_perturbation": _coordinates(solvers.objective_perturbation, times=1, ridge=1.0),
    "objective_perturbation, pure": _runs(
        solvers.objective_perturbation, rows=1, ridge=1.0, delta=0.0
    ),
    "phased_sgd": _coordinates(solvers.phased_sgd, times=2, size="batch_size", **_PATH),
    "phased_mirror_descent": _coordinates(
        solvers.phased_mirror_descent, times=2, steps=4, **_PATH
    ),
    "phased_mirror_descent, p = 1.5": _runs(
        solvers.phased_mirror_descent, rows=2, row=_EQUAL, p=1.5, steps=1,
        loss=losses.linear(order=3.0), noise="generalized",
        read=lambda run: Norm(1.5).gradient(run.weights),
    ),
    "frank_wolfe_noisy": _coordinates(
        solvers.frank_wolfe_noisy, times=6, place=3, **_FW, **_WALK
    ),
    "frank_wolfe_noisy, first batch": _coordinates(
        solvers.frank_wolfe_noisy, times=2, steps=1, rate=0.3, domain=Ball(1.0), **_WALK
    ),
    "frank_wolfe_noisy, tree": _coordinates(
        solvers.frank_wolfe_noisy, times=6, place=3, aggregation="tree", **_FW, **_WALK
    ),
    "frank_wolfe_noisy, naive": _coordinates(
        solvers.frank_wolfe_noisy, times=6, place=3, aggregation="naive", **_FW, **_WALK
    ),
    "frank_wolfe_noisy, p = 1.5": _runs(
        solvers.frank_wolfe_noisy, rows=64, row=_EQUAL, others=_ASIDE, steps=1, rate=0.5,
        loss=losses.linear(order=3.0), domain=LpBall(1.0, 1.5), noise="generalized",
        read=lambda run: _along(_steps_of(run)[0]),
    ),
    "frank_wolfe_full": _runs(solvers.frank_wolfe_full, rows=1, steps=7, **_VERTICES),
    "frank_wolfe_poly": _runs(
        solvers.frank_wolfe_poly, rows=8, steps=3, rate=1e-6, **_VERTICES,
        read=lambda run: _steps_of(run).sum(axis=0),
    ),
    "frank_wolfe_tree": _runs(solvers.frank_wolfe_tree, rows=96, place=64, phases=3, **_VERTICES),
    "frank_wolfe_stationary": _coordinates(
        solvers.frank_wolfe_stationary, times=6, place=3, **_FW, **_WALK
    ),
    "weakly_convex": _coordinates(
        solvers.weakly_convex, times=2, rounds=1, loss=_BENT, domain=Ball(1e3), **_PATH
    ),
    **{
        f"{solve.__name__}, {name}": _directions(solve, parts, _BASIS[parts], **more)
        for solve, more in (
            (solvers.phased_mirror_descent, {"times": 2, "steps": 1}),
            (solvers.weakly_convex, {"times": 1, "rounds": 1, "bend": 1e-9}),
        )
        for name, parts in (("groups", _GROUPS), ("nuclear norm", _MATRIX))
    },
    "noisy_max": SolverCase(_choices, 20_000),
}  # fmt: skip
