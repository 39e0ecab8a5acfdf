"""Report-noisy-max: the index of the best score, and nothing else, with Δ the score sensitivity.

    laplace           argmax score + Lap(2Δ/ε)                 ε-DP                ρ = ε²/2
    gumbel            argmax score + Gumbel(2Δ/ε)              ε-DP                ρ = ε²/8
    permute-and-flip  argmax score + Exp(2Δ/ε)                 ε-DP                ρ = ε²/2

Gumbel noise makes it the exponential mechanism, P[i] ∝ e^{ε·score_i/(2Δ)}, whose bounded range
gives the smaller ρ (Cesar, Rogers 2021; Dong, Durfee, Rogers 2020). Exponential noise is
permute-and-flip (McKenna, Sheldon 2020; Ding et al. 2021), never worse in expected score than
Gumbel at equal ε. If one unit can move all scores in one direction only, Δ/ε is enough
(`is_monotone`). That is so for counts when a unit is added, removed or zeroed out, never when it is
replaced: it takes one candidate's vote away and gives it to another, so replace-one neighbours are
refused with `is_monotone`. (Why 2Δ/ε: docs/proofs-convex.md.)

Only an index is published: scores and noise never leave, and there are no low bits to hide.

>>> noisy_max(np.array([0.0, 50.0, 1.0]), epsilon=2.0, sensitivity=1.0, test_seed=0).index
1
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from noshuffle.accounting.mechanisms import ReportNoisyMax
from noshuffle.convex.arrays import Array, real_array
from noshuffle.convex.solvers.base import guarantee
from noshuffle.convex.solvers.problem import source_of
from noshuffle.errors import InvalidInput, Unsupported, one_of, positive
from noshuffle.noise.laws import KeyedDraws
from noshuffle.plan.statement import PrivacyStatement
from noshuffle.release.account import Account, check_budget
from noshuffle.release.spending import OTHER_RUNS

NOISES = ("laplace", "gumbel", "permute-and-flip")
NEIGHBOURS = ("zero-out", "replace-one", "add-remove")


@dataclass(frozen=True)
class Choice:
    """The released index and its guarantee."""

    index: int
    statement: PrivacyStatement


def choose(scores: Array, *, scale: float, noise: str, draws: KeyedDraws) -> int:
    """argmax of scores plus noise of the given scale; the arithmetic, without bookkeeping."""
    one_of(NOISES, noise=noise)
    if noise == "laplace":
        drawn = draws.laplace(0.0, scale, len(scores))  # location, then scale
    elif noise == "gumbel":
        drawn = draws.gumbel(0.0, scale, len(scores))
    else:
        drawn = draws.exponential(scale, len(scores))
    return int(np.argmax(scores + drawn))


def noise_scale(*, epsilon: float, sensitivity: float, is_monotone: bool = False) -> float:
    """2Δ/ε, or Δ/ε where all scores move in one direction."""
    positive(epsilon=epsilon, sensitivity=sensitivity)
    return (1 if is_monotone else 2) * sensitivity / epsilon


def rho(*, epsilon: float, noise: str) -> float:
    """zCDP of one choice at pure ε."""
    one_of(NOISES, noise=noise)
    known = "gumbel" if noise == "gumbel" else "laplace"
    return ReportNoisyMax(scale=2.0 / epsilon, noise=known).rho


def noisy_max(
    scores: Array,
    *,
    epsilon: float,
    sensitivity: float,
    noise: str = "permute-and-flip",
    is_monotone: bool = False,
    neighbours: str = "zero-out",
    test_seed: int | str | None = None,
    budget: Account | None = None,
) -> Choice:
    """The index of a nearly largest score.

    Guarantees: pure ε if every score moves by at most `sensitivity` between neighbours (and all
    in one direction if `is_monotone`, which the statement repeats). Scores that are not finite are
    refused, which reveals nothing for scores that are bounded by construction.
    """
    one_of(NEIGHBOURS, neighbours=neighbours)
    if is_monotone and neighbours == "replace-one":
        raise Unsupported(
            "scores do not all move in one direction when a unit is replaced; use is_monotone="
            "False, or neighbours='zero-out'"
        )
    values = real_array(scores=scores)
    if values.ndim != 1 or not len(values) or not np.all(np.isfinite(values)):
        raise InvalidInput("scores must be a list of finite numbers with at least one entry")
    scale = noise_scale(epsilon=epsilon, sensitivity=sensitivity, is_monotone=is_monotone)
    source = source_of(test_seed)
    said = [f"Every score moves by at most {sensitivity:g} between neighbours."]
    if is_monotone:
        said.append("Between neighbours all scores move in one direction, as counts do.")
    statement = guarantee(
        epsilon=epsilon,
        sensitivity=sensitivity,
        noise=scale,
        mechanism=f"report-noisy-max over {len(values)} scores, {noise} noise",
        neighbours=neighbours,
        is_test=source.is_test,
        notes=tuple(said),
    )
    if budget is not None:
        check_budget(budget)
        charge = budget.reserve("noisy_max", statement)
        charge.settle(statement)
        statement = statement.counted_in(charge.words(), OTHER_RUNS)
    index = choose(values, scale=scale, noise=noise, draws=KeyedDraws(source, name="draws"))
    return Choice(index, statement)
