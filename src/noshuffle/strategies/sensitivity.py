"""How far one unit can move what is protected: S = max ‖C u‖₂ in units of the clip norm.

    S² = max_π max_{‖u_i‖≤1} Σ_{i,j∈π} ⟨u_i, u_j⟩ X_ij,     X = CᵀC = Σ⁻¹,   Σ = N·Nᵀ

over the patterns π that the participation allows. Only the law of the released noise counts, so N
is the rows of the noising matrix in use: for a run that stopped after t steps, the first t rows
that the whole run would have used. Where C is square and lower triangular (all but trees) that is
its leading block; nothing here forms a matrix unless the strategy is one, or the run is short.

    single pass                     the largest column norm
    cyclic Poisson, bands ≤ groups  the same, for each turn of a unit
    c ≥ 0, non-increasing           ‖Σ_{j<k} C_{:,jb}‖² for both epochs and min-separation
                                    (Kalinin–Lampert, arXiv 2405.13763, Theorem 2)
    bands ≤ separation              columns of one pattern are orthogonal: a dynamic program
    epochs                          max_j Σ_{l,m} |X_{j+lb,j+mb}| in O(n·k)
    BLT of 10⁸ steps (open runs)    the same of an endless run, in closed form (see `blt`)
    min-separation, short run       branch and bound over |X| (see `gram`)
    min-separation, long run        a bound from the largest |X| at every lag
    trees                           closed forms of Σ⁻¹ (see `tree_sensitivity`), or node counts
    gains on both sides             paths of their own (see `two_sided_sensitivity`)
    a mechanism of one's own        its noising matrix, inverted

Guarantees. `value` is never below the truth (beyond 1e-12 relative, for rounding). `exact` is said
only when some unit is known to reach the value; otherwise the value is an upper bound, which costs
noise but never privacy. What has no proved answer raises `Unsupported`.

>>> from noshuffle.participation import Epochs, SinglePass
>>> from noshuffle.strategies.toeplitz import sqrt_toeplitz
>>> round(sensitivity(sqrt_toeplitz(), SinglePass(steps=64)).value, 8)
1.54558989
>>> four = sensitivity(sqrt_toeplitz(), Epochs(epochs=4, steps_per_epoch=16))
>>> round(four.value, 8), four.exact
(3.96062027, True)
>>> prefix_sensitivity(sqrt_toeplitz(), Epochs(epochs=4, steps_per_epoch=16), 1).value
1.0
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from noshuffle.errors import Unsupported, instance_of, whole
from noshuffle.participation import (
    BallsInBins,
    CyclicPoisson,
    Epochs,
    FixedSize,
    MinSeparation,
    Participation,
    Poisson,
    Restarted,
    SinglePass,
    TruncatedPoisson,
)
from noshuffle.strategies import gram
from noshuffle.strategies import toeplitz_sensitivity as toeplitz
from noshuffle.strategies.base import Strategy, ToeplitzStrategy
from noshuffle.strategies.blt import Blt, endless_squared
from noshuffle.strategies.dense import Dense
from noshuffle.strategies.gram import ROUNDING
from noshuffle.strategies.identity import Identity
from noshuffle.strategies.positions import overlaps
from noshuffle.strategies.recipe import Array
from noshuffle.strategies.tree import Tree
from noshuffle.strategies.tree_sensitivity import tree_sensitivity
from noshuffle.strategies.two_sided_sensitivity import largest_column, worst_class

#: Longest run whose coefficients are laid out in memory.
MAX_COEFFICIENTS = 2**26
#: Longest run whose worst min-separation pattern is searched for, if X is not a matrix already.
SEARCH_STEPS = 1024
#: Longest run for which the largest |X| is found at every lag: O(n²) time, O(n) memory.
LAG_STEPS = 2**14
#: Most work, n²·k, that the search over an explicit matrix may begin with.
SEARCH_WORK = 2 * 10**8
#: Longest run of a mechanism of one's own whose noising matrix is inverted.
OWN_STEPS = 2048


@dataclass(frozen=True)
class Sensitivity:
    """S, S², whether S is attained (`exact`) or an upper bound, and why it is only a bound."""

    value: float
    squared: float
    exact: bool
    notes: str = ""


def sensitivity(
    strategy: Strategy, participation: Participation, *, tree_accounting: str = "tight"
) -> Sensitivity:
    """S of the strategy for units that take part as promised.

    `tree_accounting` chooses what a tree is charged for: "tight", the noise that it releases, or
    "nodes", every node that a unit touches, which is larger and gives the published figures.
    """
    instance_of(Participation, participation=participation)
    steps = participation.steps
    return prefix_sensitivity(strategy, participation, steps, tree_accounting=tree_accounting)


def prefix_sensitivity(
    strategy: Strategy, participation: Participation, steps: int, *, tree_accounting: str = "tight"
) -> Sensitivity:
    """S of the first `steps` steps of a run that was planned for all of the participation.

    Guarantees: the noise is that of the whole run's rows, cut off after `steps`; never that of a
    strategy made anew for a shorter run.
    """
    instance_of(Participation, participation=participation)
    instance_of(Strategy, strategy=strategy)
    whole(at_most=participation.steps, steps=steps)
    if isinstance(participation, Restarted) and isinstance(participation.participation, SinglePass):
        participation = participation.participation
    plain = type(strategy) is Identity and not strategy.has_gains
    if isinstance(participation, BallsInBins):
        top = overlaps(strategy, participation, steps)[0][2]
        secret = _record(top, top, "at one position; the amplified accountant counts its secrecy")
        known = prefix_sensitivity(strategy, participation.in_order, steps)
        return min(secret, known, key=lambda each: each.squared)
    if isinstance(participation, CyclicPoisson) and not plain:
        return _one_turn(strategy, participation, steps)
    if isinstance(participation, Poisson | FixedSize | CyclicPoisson | TruncatedPoisson):
        if plain:
            return _record(1.0, 1.0, "per step; the amplified accountant composes the steps")
        raise Unsupported(
            f"{participation.kind} sampling is accounted for independent noise only, got the "
            f"strategy {strategy.name!r}; use identity(), or Epochs or MinSeparation"
        )
    if plain:
        most = float(participation.most_within(steps))
        return _record(most, most)
    if type(strategy) is Tree:
        squared, why = tree_sensitivity(strategy, participation, steps, accounting=tree_accounting)
        return Sensitivity(math.sqrt(squared), squared, exact=not why, notes=why)
    if isinstance(participation, Restarted):
        raise Unsupported(
            f"an order that changes between restarts is proved for trees and identity only, got "
            f"the strategy {strategy.name!r}; use MinSeparation over the whole run"
        )
    if not isinstance(participation, SinglePass | Epochs | MinSeparation):
        raise Unsupported(f"no sensitivity is proved under {type(participation).__name__}")
    if isinstance(strategy, ToeplitzStrategy):
        by = _two_sided if strategy.has_draw_gains else _toeplitz
        return by(strategy, participation, steps)
    if type(strategy) is Dense:
        return _explicit(_gram(strategy.encoder(steps)), participation)
    return _explicit(_inverse_covariance(strategy, participation.steps, steps), participation)


def _one_turn(strategy: Strategy, participation: CyclicPoisson, n: int) -> Sensitivity:
    """The largest column, for encoders with no more diagonals than lie between turns of a unit.

    The steps of a unit are then so far apart that their columns share no row: each of its turns is
    seen in rows of its own, as one sampled Gaussian step with the noise over its column norm
    (docs/proofs.md, "Groups that take turns").
    """
    bands = participation.groups
    is_long = n > MAX_COEFFICIENTS
    if isinstance(strategy, ToeplitzStrategy) and not (strategy.has_draw_gains or is_long):
        c, g = strategy.coefficients(n), strategy.gain_values(n)
        is_banded = not np.any(c[bands:])
        columns = toeplitz.squared_columns(c, g)
    elif type(strategy) is Dense:
        C = strategy.encoder(n)
        is_banded = not np.any(np.tril(C, -bands)) and not np.any(np.triu(C, 1))
        columns = np.sum(C * C, axis=0)
    else:
        is_banded, columns = False, np.zeros(1)
    if not is_banded:
        raise Unsupported(
            f"{participation.kind} sampling is accounted for noise of at most {bands} bands (its "
            f"groups), got the strategy {strategy.name!r}; use the mechanism banded"
        )
    largest = float(columns.max())
    return _record(largest, largest, "per turn; the amplified accountant composes the turns")


def _record(upper: float, reached: float, notes: str = "") -> Sensitivity:
    """Exact if a unit reaches the upper bound, up to rounding."""
    if not math.isfinite(upper):
        raise Unsupported(
            "the encoder grows beyond floating point over this many steps, so its sensitivity is "
            "not known; use smaller coefficients or taps, or fewer steps"
        )
    exact = reached >= upper * (1 - ROUNDING)
    notes = notes if exact else "upper bound: inner products of columns change sign or order"
    return Sensitivity(value=math.sqrt(upper), squared=upper, exact=exact, notes=notes)


def _toeplitz(
    strategy: ToeplitzStrategy, participation: SinglePass | Epochs | MinSeparation, n: int
) -> Sensitivity:
    is_endless = type(strategy) is Blt and not strategy.taps and not strategy.has_gains
    if n > MAX_COEFFICIENTS and is_endless and not isinstance(participation, Epochs):
        assert isinstance(strategy, Blt)
        k, b = participation.most_within(n), getattr(participation, "separation", n)
        return _record(*endless_squared(strategy, separation=b, most=k, steps=n))
    if n > MAX_COEFFICIENTS:
        raise Unsupported(
            f"the sensitivity of {strategy.name!r} is computed for at most {MAX_COEFFICIENTS:,} "
            f"steps, got {n:,}; use a tree or fewer, larger steps"
        )
    c, g = strategy.coefficients(n), strategy.gain_values(n)
    with np.errstate(over="ignore", invalid="ignore"):
        columns = toeplitz.squared_columns(c, g)
    if not np.all(np.isfinite(columns)):
        return _record(math.inf, 0.0)
    if isinstance(participation, SinglePass):
        return _record(float(columns.max()), float(columns.max()))
    b, k = _spacing(participation, n)
    if not strategy.has_gains:
        upper = toeplitz.envelope_squared(c, separation=b, most=k)
        summed = toeplitz.summed_columns(c, separation=b, most=k)
        reached = float(np.sum(summed * summed))
        if reached >= upper * (1 - ROUNDING):
            return _record(upper, reached)
    if isinstance(participation, Epochs):
        return _record(*toeplitz.toeplitz_epochs(c, g, steps_per_epoch=b))
    if not np.any(c[b:]):  # orthogonal columns; without gains they shrink, so early is worst
        early = float(columns[::b][:k].sum())
        squared = gram.best_sum(columns, separation=b, most=k) if strategy.has_gains else early
        return _record(squared, squared)
    if n <= SEARCH_STEPS and n * n * k <= SEARCH_WORK:
        return _explicit(_gram(ToeplitzStrategy.encoder(strategy, n)), participation)
    upper = toeplitz.envelope_bound(c, g, separation=b, most=k)
    if n <= LAG_STEPS:
        sizes = toeplitz.lag_sizes(c, g, first=b)
        upper = min(upper, gram.lag_bound(columns, sizes, separation=b, most=k))
    return _record(upper, 0.0)


def _spacing(part: Epochs | MinSeparation, n: int) -> tuple[int, int]:
    """Least distance, and most participations, within the first n steps."""
    gap = part.steps_per_epoch if isinstance(part, Epochs) else part.separation
    return min(gap, n), part.most_within(n)


@lru_cache(maxsize=16)  # plans that differ in their noise alone ask the same
def _two_sided(
    strategy: ToeplitzStrategy, participation: SinglePass | Epochs | MinSeparation, n: int
) -> Sensitivity:
    k, c = participation.most_within(n), strategy.coefficients(n)
    a, g = strategy.draw_gain_values(n), strategy.gain_values(n)
    with np.errstate(over="ignore", invalid="ignore"):
        if k == 1:
            squared = largest_column(c, a, g)
            return _record(squared, squared)
        if isinstance(participation, Epochs):
            # The steps of the last epoch that are not in use have gain zero.
            missing = k * participation.steps_per_epoch - n
            c, a, g = (np.append(values, np.zeros(missing)) for values in (c, a, g))
            upper, is_attained = worst_class(c, a, g, epochs=k)
            return _record(upper, upper if is_attained else 0.0)
    if n <= SEARCH_STEPS and n * n * k <= SEARCH_WORK:
        return _explicit(_gram(strategy.encoder(n)), participation)
    raise Unsupported(
        f"two-sided gains under min-separation are searched for at most {SEARCH_STEPS} steps, got "
        f"{n:,}; use Epochs if the order is the same in every epoch, or a plain blt"
    )


def _gram(C: Array) -> Array:
    return np.asarray(C.T @ C)


def _explicit(X: Array, participation: SinglePass | Epochs | MinSeparation) -> Sensitivity:
    """From Σ⁻¹ of the steps in use."""
    if isinstance(participation, SinglePass):
        squared = float(np.diagonal(X).max())
        return _record(squared, squared)
    b, k = _spacing(participation, len(X))
    if isinstance(participation, Epochs):
        upper, pattern_gram = gram.worst_epoch(X, steps_per_epoch=b)
        return _record(upper, gram.attained(pattern_gram))
    if len(X) ** 2 * k > SEARCH_WORK:
        sizes = gram.lag_sizes(X)
        return _record(gram.lag_bound(np.diagonal(X), sizes, separation=b, most=k), 0.0)
    upper, pattern, _ = gram.search(X, separation=b, most=k)
    return _record(upper, gram.attained(X[np.ix_(pattern, pattern)]))


def _inverse_covariance(strategy: Strategy, horizon: int, steps: int) -> Array:
    """Σ⁻¹ of the first `steps` rows that a run of `horizon` steps uses."""
    from scipy.linalg import cho_factor, cho_solve

    if horizon > OWN_STEPS:
        raise Unsupported(
            f"the strategy {strategy.name!r} is not built in; its noise is measured for at most "
            f"{OWN_STEPS} steps, got {horizon}; derive it from ToeplitzStrategy, or use fewer steps"
        )
    rows = strategy.noising(horizon)[:steps]
    try:
        factor = cho_factor(rows @ rows.T, lower=True)
    except np.linalg.LinAlgError:
        raise Unsupported(
            f"the noise of the strategy {strategy.name!r} leaves a combination of steps without "
            "noise, so it has no finite sensitivity; give every step a draw of its own"
        ) from None
    return np.asarray(cho_solve(factor, np.eye(steps)))
