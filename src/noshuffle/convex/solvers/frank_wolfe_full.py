"""Private Frank–Wolfe on full gradients: every step a vertex by report-noisy-max.

    v_t = noisy argmin over vertices of ⟨v, ∇F(w_t)⟩,    w_{t+1} = (1−η_t)w_t + η_t·v_t,
    η_t = 2/(t+2),  t = 0 … T−1

(Talwar, Thakurta, Zhang 2015.) One row moves every score by at most Δ = c·L·D/n: the data part of
the mean gradient moves by cL/n in the norm of the rows, and D bounds the vertices in its dual norm
(l1 for rows bounded entry by entry, whatever d is). A choice with Gumbel noise of scale b is the
exponential mechanism at ε = 2Δ/b, which is ε²/8-zCDP (bounded range), so T of them, each free to
depend on the ones before, cost ρ = TΔ²/(2b²):

    b = Δ·√(T/(2ρ)).                  (Laplace and permute-and-flip cost ε²/2: b twice as large)

Only vertices leave, never a score. The noisy choice is within b·(ln J + 1) of the best in
expectation, J vertices, and with curvature 4βD² the last iterate is within

    8βD²/(T + 2) + b·(ln J + 1)

of the optimum. Unless given, `steps` minimises that with an eighth of its first term, closer to
what problems have than the worst case (chosen on synthetic ones; any T is private). The excess is
(ln J/(εn))^{2/3}: d may be far above n. State: the iterate.

>>> from noshuffle.convex.losses import linear
>>> from noshuffle.convex.solvers.domains import L1Ball
>>> x = np.tile([[0.1, -1.0, 0.2]], (2000, 1))
>>> run = frank_wolfe_full(linear(order=math.inf), x, None, epsilon=1.0, delta=1e-6,
...                        domain=L1Ball(1.0), steps=20, test_seed=0)
>>> bool(run.weights[1] > 0.8), run.statement.epsilon <= 1
(True, True)
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from noshuffle.convex.arrays import Array, real_array
from noshuffle.convex.loss_record import require
from noshuffle.convex.solvers.base import Solution
from noshuffle.convex.solvers.frank_wolfe_poly import CHOICE_COST
from noshuffle.convex.solvers.noisy_max import choose
from noshuffle.convex.solvers.problem import Problem, solver
from noshuffle.errors import InvalidInput, Unsupported, one_of, whole

#: Steps that the default looks at.
_MOST_STEPS = 4096


def choice_noise(*, steps: int, move: float, rho: float, noise: str = "gumbel") -> float:
    """Scale b of the noise on scores that move by at most `move`, for `steps` choices within ρ."""
    one_of(tuple(CHOICE_COST), noise=noise)
    return CHOICE_COST[noise] * move * math.sqrt(steps / (2 * rho))


def best_steps(*, move: float, bend: float, rho: float, vertices: int, noise: str) -> int:
    """argmin over T of bend/(T + 2) + b(T)·(ln J + 1), bend = βD²; public numbers only."""
    t = np.arange(1, _MOST_STEPS + 1)
    lost = choice_noise(steps=1, move=move, rho=rho, noise=noise) * (math.log(vertices) + 1)
    return int(t[np.argmin(bend / (t + 2) + np.sqrt(t) * lost)])


@solver()
def frank_wolfe_full(
    problem: Problem,
    *,
    steps: int | None = None,
    noise: str = "gumbel",
    vertices: Any = None,
) -> Solution:
    """T noisy vertices of an l1 ball or simplex, or of the hull of `vertices` (one in each row).

    Guarantees: ρ-zCDP of all chosen vertices, hence of every iterate, convex or not: nothing but
    the choices reads the data.
    """
    loss, d = problem.loss, problem.d
    corners = _listed(vertices, d)
    if corners is None and not problem.domain.is_polytope:
        raise Unsupported(
            "Frank–Wolfe by noisy choice needs L1Ball, Simplex or vertices=, got "
            f"{type(problem.domain).__name__}"
        )
    if corners is None:
        count = len(problem.domain.scores(np.zeros(d)))
        size = problem.domain.reach(loss.row_norm.dual, d)
    else:
        count, size = len(corners), float(loss.row_norm.dual.rows(corners).max())
    require(loss, "Frank–Wolfe by noisy choice", radius=size, convex=False, smooth=True)
    move = problem.c * loss.lipschitz * size / problem.n
    if steps is None:
        bend = (loss.smoothness + loss.ridge) * size**2
        steps = best_steps(move=move, bend=bend, rho=problem.rho, vertices=count, noise=noise)
    whole(steps=steps)
    scale = choice_noise(steps=steps, move=move, rho=problem.rho, noise=noise)
    w = problem.start() if corners is None else corners.mean(axis=0)
    for t in range(steps):
        g = problem.gradient(w) / problem.n + loss.ridge * w
        scores = -(problem.domain.scores(g) if corners is None else corners @ g)
        pick = choose(scores, scale=scale, noise=noise, draws=problem.draws)
        v = problem.domain.vertex(pick, d) if corners is None else corners[pick]
        w = w + 2 / (t + 2) * (v - w)
    return problem.solution(
        w,
        {"noise": scale, "steps": float(steps)},
        rho=problem.rho,
        sensitivity=move,
        noise=scale,
        mechanism=f"{steps} vertices by report-noisy-max on full gradients, {noise} noise",
    )


def _listed(vertices: Any, d: int) -> Array | None:
    if vertices is None:
        return None
    corners = real_array(vertices=vertices)
    if corners.ndim != 2 or corners.shape[1] != d or not np.isfinite(corners).all():
        raise InvalidInput(f"vertices must be finite points of {d} numbers each, one in each row")
    return corners
