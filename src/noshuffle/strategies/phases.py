"""One strategy after another: runs that were extended, changed on the way, or begun without an end.

    C = diag(C_1/f_1, C_2/f_2, …),      C⁻¹ = diag(f_1·C_1⁻¹, f_2·C_2⁻¹, …)

Each phase has draws and buffers of its own, so it needs nothing of the phases before it, not even
their keys; f_p is the factor on its noise. A phase may stop before the end that its strategy was
planned for: its rows are the first of that longer run (trees and gains depend on the plan).

X = CᵀC is block-diagonal, so the squared shifts of the phases add up along one pattern:

    single pass        a unit lies in one phase: the largest S_p²/f_p²
    epochs             max_j Σ_p s_p(j)/f_p², s_p(j): of the class j inside phase p
    stages             the same inside every stage; a class of one does not bind the next
    min-separation     Σ_p S_p²(k_p)/f_p², the worst way to spread k over the phases

(docs/proofs.md, "Phases"). The maximum over phases, where a unit lies in several, is wrong.

>>> from noshuffle.strategies.identity import identity
>>> two = Phases(parts=(StrategyPhase(identity(), 4, 2), StrategyPhase(identity(), 3, 3, 2.0)))
>>> np.diag(two.noising(5))
array([1., 1., 2., 2., 2.])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np

from noshuffle.errors import InvalidInput, Unsupported, instance_of, positive, whole
from noshuffle.participation import Epochs, MinSeparation, Participation, SinglePass, Stages
from noshuffle.strategies import toeplitz_sensitivity as toeplitz
from noshuffle.strategies.base import Strategy, ToeplitzStrategy, dense_size
from noshuffle.strategies.recipe import Array, InPhases, Recipe, rows

#: Longest phase whose classes are summed from an explicit matrix.
EXPLICIT_STEPS = 2048

#: (value, whether a unit reaches it) of a strategy's S² under a participation, after some steps.
Squared = Callable[[Strategy, Participation, int], tuple[float, bool]]


class StrategyPhase(NamedTuple):
    """The first `used` rows of a run of `planned` steps, its noise times `factor`."""

    strategy: Strategy
    planned: int
    used: int
    factor: float = 1.0


@dataclass(frozen=True)
class Phases(Strategy):
    """Strategies one after another; see the module."""

    parts: tuple[StrategyPhase, ...] = ()
    name: ClassVar[str] = "phases"

    def __post_init__(self) -> None:
        parts = tuple(StrategyPhase(*part) for part in self.parts)
        if not parts:
            raise InvalidInput("phases needs at least one phase")
        for part in parts:
            instance_of(Strategy, strategy=part.strategy)
            if isinstance(part.strategy, Phases):
                raise InvalidInput("a phase is one strategy; give its phases one by one")
            whole(planned=part.planned)
            whole(at_most=part.planned, used=part.used)
            positive(factor=part.factor)
        object.__setattr__(self, "parts", parts)

    @property
    def steps(self) -> int:
        return sum(part.used for part in self.parts)

    def within(self, n: int) -> Iterator[tuple[int, StrategyPhase]]:
        """(first step, phase) of the first n steps; the last phase is cut there."""
        if n > self.steps:
            raise InvalidInput(f"the phases cover {self.steps} steps, {n} were asked for")
        start = 0
        for part in self.parts:
            if start >= n:
                return
            yield start, part._replace(used=min(part.used, n - start))
            start += part.used

    def encoder(self, n: int) -> Array:
        from scipy.linalg import block_diag

        dense_size(n)
        return np.asarray(
            block_diag(
                *(
                    p.strategy.encoder(matrix_steps(p))[: _draws(p), : p.used] / p.factor
                    for _, p in self.within(n)
                )
            )
        )

    def noising(self, n: int) -> Array:
        from scipy.linalg import block_diag

        dense_size(n)
        return np.asarray(
            block_diag(
                *(
                    p.factor * p.strategy.noising(matrix_steps(p))[: p.used, : _draws(p)]
                    for _, p in self.within(n)
                )
            )
        )

    def recipe(self, n: int) -> Recipe:
        parts = [(p.strategy.recipe(p.planned), p.used, p.factor) for _, p in self.within(n)]
        return InPhases(tuple(parts))  # type: ignore[arg-type]

    def buffers(self, n: int) -> int:
        return max(p.strategy.buffers(p.planned) for _, p in self.within(n))

    def words(self) -> str:
        said = [
            f"{p.used} steps of {p.strategy.words()}"
            + (f" (noise times {p.factor:.6g})" if p.factor != 1 else "")
            for p in self.parts
        ]
        return f"{len(said)} phases with independent noise: {'; then '.join(said)}"

    def to_dict(self) -> dict[str, Any]:
        parts = [[p.strategy.to_dict(), p.planned, p.used, p.factor] for p in self.parts]
        return {"name": self.name, "parts": parts}


def matrix_steps(part: StrategyPhase) -> int:
    """Steps of the matrix that its rows are cut from; no row of a Toeplitz one knows the end."""
    return part.used if isinstance(part.strategy, ToeplitzStrategy) else part.planned


def _draws(part: StrategyPhase) -> int:
    return rows(part.strategy.recipe(part.planned), part.used)


def squared_of_phases(
    strategy: Phases, part: Participation, n: int, *, squared: Squared
) -> tuple[float, float]:
    """S² of the first n steps: an upper bound, and what a unit is known to reach.

    `squared` answers for the strategies of single phases.
    """
    phases = list(strategy.within(n))
    if isinstance(part, SinglePass):
        found = [_alone(p, SinglePass(p.planned), squared) for _, p in phases]
        upper = max(value for value, _ in found)
        return upper, max((value for value, is_reached in found if is_reached), default=0.0)
    if isinstance(part, Epochs):
        return _classes(phases, part.steps_per_epoch, squared)
    if isinstance(part, Stages):
        upper = reached = 0.0
        for first, stage in part.starts():
            own = [
                (start - first, p) for start, p in phases if first <= start < first + stage.steps
            ]
            if any(start + p.used > stage.steps for start, p in own):
                raise Unsupported(_ACROSS)
            if own:
                high, low = _classes(own, stage.steps_per_epoch, squared)
                upper, reached = upper + high, reached + low
        return upper, reached
    if isinstance(part, MinSeparation):
        return _spread(phases, part, squared)
    raise Unsupported(f"phases are accounted without sampling, got {part.kind!r}")


_ACROSS = (
    "noise that is correlated across a change of the batch size is not accounted; begin a phase "
    "where a stage begins (Plan.extended does)"
)


def _alone(p: StrategyPhase, part: Participation, squared: Squared) -> tuple[float, bool]:
    value, is_reached = squared(p.strategy, part, p.used)
    return value / p.factor**2, is_reached


def _classes(
    phases: list[tuple[int, StrategyPhase]], b: int, squared: Squared
) -> tuple[float, float]:
    """max_j of the sums over phases; class j of the run is class j − start inside a phase."""
    sizes, signed = np.zeros(b), np.zeros(b)
    for start, p in phases:
        own, reached = _by_class(p.strategy, p.planned, p.used, b)
        if not len(own):  # no sums by class: the largest stands for all of them
            local = Epochs(-(-p.planned // b), b)
            if local.steps != p.planned:
                local = MinSeparation(p.planned, b, local.epochs)  # type: ignore[assignment]
            value, is_reached = squared(p.strategy, local, p.used)
            own = np.full(b, value)
            reached = own if is_reached and len(phases) == 1 else np.zeros(b)
        sizes += np.roll(own, start % b) / p.factor**2
        signed += np.roll(reached, start % b) / p.factor**2
    j = int(np.argmax(sizes))
    return float(sizes[j]), float(signed[j])


@lru_cache(maxsize=64)
def _by_class(strategy: Strategy, planned: int, used: int, b: int) -> tuple[Array, Array]:
    """Σ |X| and Σ X over the steps of each class; empty where there is no cheap way."""
    if isinstance(strategy, ToeplitzStrategy):
        c, g = strategy.coefficients(used), strategy.gain_values(used)
        with np.errstate(over="ignore", invalid="ignore"):
            return toeplitz.class_sums(c, g, steps_per_epoch=b)
    if planned > EXPLICIT_STEPS:
        return np.zeros(0), np.zeros(0)
    N = strategy.noising(planned)[:used]
    X, out = np.linalg.inv(N @ N.T), np.zeros((2, b))
    for j in range(min(b, used)):
        block = X[j::b, j::b]
        out[:, j] = np.abs(block).sum(), block.sum()
    return out[0], out[1]


def _spread(
    phases: list[tuple[int, StrategyPhase]], part: MinSeparation, squared: Squared
) -> tuple[float, float]:
    """The worst way to spread k participations over the phases.

    The distance across the end of a phase is not asked for: an upper bound, attained where the
    worst pattern of every phase is its earliest and keeps its distance to the next phase.
    """
    k, b = part.max_participations, part.separation
    best = np.full(k + 1, -math.inf)
    best[0] = 0.0
    choice: list[list[int]] = [[] for _ in range(k + 1)]
    for _, p in phases:
        most = min(k, -(-p.used // b))
        gains = [0.0] + [
            _alone(p, MinSeparation(p.planned, b, m), squared)[0] for m in range(1, most + 1)
        ]
        options = [
            max(((best[i - m] + gains[m], m) for m in range(min(i, most) + 1)), key=lambda o: o[0])
            for i in range(k + 1)
        ]
        choice = [choice[i - m] + [m] for i, (_, m) in enumerate(options)]
        best = np.array([value for value, _ in options])
    i = int(np.argmax(best))
    return float(best[i]), _early(phases, choice[i], b)


def _early(phases: list[tuple[int, StrategyPhase]], counts: list[int], b: int) -> float:
    """What the pattern start, start + b, … of every phase reaches; zero if it is not admitted."""
    reached, free = 0.0, 0
    for (start, p), m in zip(phases, counts):
        if not m:
            continue
        if start < free or not isinstance(p.strategy, ToeplitzStrategy) or p.strategy.has_gains:
            return 0.0
        c = p.strategy.coefficients(p.used)
        summed = toeplitz.summed_columns(c, separation=min(b, p.used), most=m)
        reached += float(summed @ summed) / p.factor**2
        free = start + m * b
    return reached
