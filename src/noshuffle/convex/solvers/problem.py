"""One run of a solver: checked data, its budget, one key, everything that leaves, its statement.

    @solver()
    def name(problem, *, …): …                              called as name(loss, rows, labels, *,
                                                            epsilon=…, delta=…, domain=…, …)

    problem.require("DP-GD", smooth=True)                   the conditions of the proof
    problem.n, problem.d, problem.c                         rows, dimension, gradients that differ
    problem.mu, problem.rho                                 the budget as μ-GDP, as ρ-zCDP
    release = problem.sums(strategy, steps=…, scale=…)      released = release(sum of a step)
    release = problem.gaussians(steps=…)                    released = release(vector, scale=…)
    problem.draws                                           laws other than the normal, coins
    problem.solution(w, details, mu=…, …)                   the answer and its statement

All noise comes from one `Source`: a fresh key of the operating system for every run, or a named
test seed, which anybody can repeat: then the statement says NOT PRIVATE, because the source does.
Sums leave by `release.Release`, in memory: row t of scale·C⁻¹Z on the public grid (`noise.grid`).
`gaussians` has a scale of its own in every step: it releases value/scale with unit noise on the
grid, and multiplies afterwards, so the grid is 2⁻¹⁰·scale. State: the noise streams.

>>> from noshuffle.convex.losses import linear
>>> problem = Problem.of(linear(), np.ones((4, 1)), None, epsilon=1.0, delta=1e-6, test_seed="doc")
>>> out = problem.sums(identity(), steps=1, scale=1.0)(np.array([4.0]))
>>> bool(out[0] != 4.0 and out[0] * 2**10 == np.rint(out[0] * 2**10)), problem.source.is_test
(True, True)
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, update_wrapper
from itertools import count
from numbers import Real
from typing import Any

import numpy as np
import torch

from noshuffle.convex.arrays import Array
from noshuffle.convex.loss_record import Loss, require
from noshuffle.convex.solvers.base import (
    Solution,
    budget,
    contribution,
    guarantee,
    rho_budget,
    table_sentences,
)
from noshuffle.convex.solvers.domains import Domain, Everywhere
from noshuffle.errors import instance_of, open_unit, positive
from noshuffle.noise import Source, new_key, test_source
from noshuffle.noise.laws import KeyedDraws
from noshuffle.optim.norms import Norm
from noshuffle.participation import Participation, SinglePass
from noshuffle.plan import Plan
from noshuffle.release.account import Account, Charge, check_budget
from noshuffle.release.release import Release
from noshuffle.release.spending import OTHER_RUNS, TEST_SEED
from noshuffle.strategies import Strategy, identity

_BOUND = "The Lipschitz bound of the loss takes the place of the clip norm; nothing is clipped."


def source_of(test_seed: int | str | None) -> Source:
    """A fresh key of the operating system, or the one of a named test seed (not private)."""
    return Source(new_key()) if test_seed is None else test_source(seed=f"convex {test_seed}")


@dataclass(frozen=True, eq=False)
class Problem:
    """Rows and labels within the bounds of their loss, and the source of all randomness.

    Guarantees: what `sums` and `gaussians` return is the value plus noise of the asked law on a
    public grid; a step beyond the planned number is refused. Every stream has a name of its own
    under the key, so no noise is used twice, in parts of a problem neither.
    """

    loss: Loss
    x: Array
    y: Array
    domain: Domain
    epsilon: float
    delta: float
    neighbours: str
    source: Source
    draws: KeyedDraws
    _streams: count[int] = field(default_factory=count, repr=False)

    @classmethod
    def of(
        cls,
        loss: Loss,
        rows: Any,
        labels: Any,
        *,
        epsilon: float,
        delta: float,
        domain: Domain | None = None,
        neighbours: str = "zero-out",
        test_seed: int | str | None = None,
    ) -> Problem:
        """A problem whose data keeps the bounds of its loss, and a key for it."""
        contribution(neighbours)  # refuses neighbours that would shift the batches
        place = Everywhere() if domain is None else domain
        instance_of(Domain, domain=place)
        x, y = loss.check(rows, labels)
        positive(epsilon=epsilon)
        instance_of(Real, delta=delta)
        if delta != 0:  # pure ε, for solvers that have it
            open_unit(delta=delta)
        source = source_of(test_seed)
        draws = KeyedDraws(source, name="draws")
        return cls(loss, x, y, place, epsilon, delta, neighbours, source, draws)

    def require(self, solver: str, *, rows: Norm | float = 2.0, **conditions: bool) -> None:
        """Refuse a loss that the solver's proof does not cover (`loss_record.require`).

        `rows` is the norm in which it wants them bounded (a number: the order of an l_p norm).
        """
        norm = rows if isinstance(rows, Norm) else Norm(rows)
        radius = self.domain.reach(self.loss.row_norm.dual, self.d)
        if conditions.get("everywhere"):  # then the domain comes after the release
            radius = 0.0
        require(self.loss, solver, radius=radius, norm=norm, d=self.d, **conditions)

    def part(self, rows: slice) -> Problem:
        """Some of the rows, under the same key."""
        return replace(self, x=self.x[rows], y=self.y[rows])

    @property
    def n(self) -> int:
        return len(self.x)

    @property
    def d(self) -> int:
        return int(self.x.shape[1])

    @property
    def c(self) -> float:
        """How many single gradients two neighbours can differ by: 2 replaced, 1 zeroed out."""
        return contribution(self.neighbours)

    @property
    def radius(self) -> float:
        """The Euclidean radius of the domain; 1 for an unbounded one (step sizes need some)."""
        radius = self.domain.euclidean(self.d)
        return radius if math.isfinite(radius) else 1.0

    @cached_property
    def mu(self) -> float:
        return budget(epsilon=self.epsilon, delta=self.delta)

    @cached_property
    def rho(self) -> float:
        return rho_budget(epsilon=self.epsilon, delta=self.delta)

    def start(self) -> Array:
        """The point of the domain from which solvers start."""
        return self.domain.project(self.domain.start(self.d))

    def gradient(self, w: Array, rows: Any = slice(None)) -> Array:
        """Sum of the gradients of some rows, the ridge left out: what privacy is about."""
        return self.loss.data_gradient(w, self.x[rows], self.y[rows])

    def plan(self, part: Participation, mechanism: Any) -> Plan:
        """The plan that spends the whole budget."""
        return Plan.fit(
            part,
            mechanism=mechanism,
            epsilon=self.epsilon,
            delta=self.delta,
            neighbours=self.neighbours,
        )

    def sums(
        self, strategy: Strategy, *, steps: int, scale: float, size: int | None = None
    ) -> Callable[[Array], Array]:
        """Releases of one value a step: value + row t of scale·C⁻¹Z, on the grid."""
        plan = Plan.fit(
            SinglePass(steps), mechanism=strategy, noise_multiplier=1.0, neighbours="zero-out"
        )
        return self.releases(plan, scale=scale, size=size)

    def releases(
        self, plan: Plan, *, scale: float, size: int | None = None
    ) -> Callable[..., Array]:
        """Releases under a plan, one value a step, with noise of deviation scale·(rows of C⁻¹).

        Their clip norm is scale/z: the bound on one unit, by which a plan's noise multiplier z is
        told.
        """
        name, bound = f"stream {next(self._streams)}", scale / plan.noise_multiplier
        shapes, source = {name: (size or self.d,)}, self.source if self.source.is_test else None
        release = Release(plan, shapes, clip=bound, source=source)

        def released(value: Array) -> Array:
            out = {name: torch.tensor(value, dtype=torch.float64, device="cpu")}
            ticket = release.admit(None)  # the rows of one table are units by their place
            release.close(ticket, out)
            release.finish(ticket)
            return np.asarray(out[name].numpy())

        return released

    def gaussians(self, *, steps: int) -> Callable[..., Array]:
        """Releases of vectors with independent normal noise, each with a `scale` of its own."""
        unit = self.sums(identity(), steps=steps, scale=1.0)

        def release(value: Array, *, scale: float) -> Array:
            return scale * unit(value / scale)

        return release

    def solution(
        self,
        weights: Array,
        details: dict[str, float],
        *,
        iterates: Array | None = None,
        plan: Plan | None = None,
        **record: Any,
    ) -> Solution:
        """What is released, with the statement of a plan or of a record (`base.guarantee`)."""
        is_test = self.source.is_test
        if plan is not None:
            said = (*table_sentences(self.n), _BOUND, *((TEST_SEED,) if is_test else ()))
            return Solution(weights, plan.statement(notes=said), iterates, details)
        record.update(rows=self.n, delta=self.delta, neighbours=self.neighbours, is_test=is_test)
        return Solution(weights, guarantee(**record), iterates, details)

    def reserve(self, account: Account | None, name: str) -> Charge | None:
        """A place in a budget before a solver starts: what (ε, δ) cost with Gaussian noise, or as
        pure ε. Where the proof is another, the rest is asked for before anything leaves."""
        if account is None:
            return None
        check_budget(account)
        record: dict[str, Any] = {"mu": self.mu} if self.delta else {"epsilon": self.epsilon}
        said = self.solution(np.empty(0), {}, sensitivity=1.0, noise=1.0, mechanism=name, **record)
        return account.reserve(name, said.statement)


def charged(charge: Charge | None, found: Solution) -> Solution:
    """A solution that its budget was charged for; raises where it costs too much to leave."""
    if charge is None:
        return found
    charge.settle(found.statement)
    return replace(found, statement=found.statement.counted_in(charge.words(), OTHER_RUNS))


_SHARED = inspect.signature(Problem.of).parameters


class Solver:
    """A solver as users call it; `on` is the function behind it, for solvers that use others."""

    def __init__(self, fn: Callable[..., Solution], *, only: str | None, **defaults: Any) -> None:
        update_wrapper(self, fn)
        self.on = fn
        self._defaults = defaults if only is None else {"neighbours": only}
        shared = [
            p.replace(default=defaults.get(name, p.default))
            for name, p in _SHARED.items()
            if name != "neighbours" or only is None
        ]
        drawn = inspect.signature(Solver.__call__).parameters["budget"]
        own = [drawn, *list(inspect.signature(fn).parameters.values())[1:]]
        self.__signature__ = inspect.Signature([*shared, *own], return_annotation=Solution)

    def __call__(
        self, loss: Loss, rows: Any, labels: Any, *, budget: Account | None = None, **settings: Any
    ) -> Solution:
        asked = self.__signature__.bind(loss, rows, labels, **settings).arguments
        shared = {name: asked.pop(name) for name in _SHARED if name in asked}
        problem = Problem.of(**{**self._defaults, **shared})
        charge = problem.reserve(budget, str(getattr(self, "__name__", "solver")))
        return charged(charge, self.on(problem, **asked))


def solver(
    *, only: str | None = None, **defaults: Any
) -> Callable[[Callable[..., Solution]], Solver]:
    """Make a function of a problem a solver.

    `only` is the one neighbour relation it has; other defaults than those of `Problem.of` follow.
    """
    return lambda fn: Solver(fn, only=only, **defaults)
