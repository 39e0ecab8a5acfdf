"""ε of a plan with secret draws, by Monte Carlo of the attacker's likelihood ratio.

The rows that the stream emits, whitened (Σ = M·Mᵀ), are N(0, 1) without a unit (Q) and, with it, a
mixture over what may have been drawn (P):

    Poisson, cyclic         turns that touch different rows: `turns`, c² = (Σ⁻¹)_tt / z²
    fixed size              twice c: whoever comes in replaces somebody, who sends −c or the same
    Poisson with a cap      from below an attack, from above a label that is told: `capped`
    balls in bins           one position for all epochs: `positions`, K = sums of Σ⁻¹ / z²
    separated bins          a position in every epoch of the unit, whose beginning is public

Either way δ(ε) = E_P (1 − e^{ε − loss})₊, and the same from Q: "remove" and "add"; under
replace-one the other world sends −c. That these worlds are the worst ones is proved in
docs/proofs.md and not looked at again here. No state; nothing is shared with `accounting`.

>>> from noshuffle.participation import Poisson
>>> found = epsilon_of_draws(Poisson(8, 0.1), np.eye(8), neighbours="", delta=1e-3, numbers=10**6)
>>> found.low < 1.4338 < found.high < 1.45
True
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from noshuffle.auditing.capped import epsilon_of_capped
from noshuffle.auditing.emitted import Array
from noshuffle.auditing.likelihood import LARGEST, NUMBERS, EpsilonRange, widest
from noshuffle.auditing.positions import epsilon_of_positions
from noshuffle.auditing.turns import Labelled, Turn, epsilon_of_turns, plain

#: Inner products of two turns, beside their sizes, that are nothing but rounding.
_APART = 1e-4
#: Beginnings of a unit's epochs that are looked at; by short runs of so many numbers if more.
_BEGINNINGS, _SHORT = 5, 400_000


def epsilon_of_draws(
    part: Any, factor: Array, *, neighbours: str, delta: float, numbers: int = NUMBERS
) -> EpsilonRange | None:
    """ε of the rows that `factor` whitens (Σ_t = F⁻¹F⁻ᵀ·z²); None where nothing is known of them.

    The unit is in the group of a cyclic draw whose turns shift its rows most. Participations are
    recognised by `kind`: another version, which is audited, may lack some classes.
    """
    if not np.all(np.abs(factor) < LARGEST):
        return EpsilonRange(math.inf, math.inf)
    is_replaced = neighbours == "replace-one"
    if part.kind in ("balls-in-bins", "separated-bins"):
        found = _one_position if part.kind == "balls-in-bins" else _fresh_positions
        return None if is_replaced else found(part, factor, delta, numbers)
    is_capped = part.kind == "truncated-poisson" and not is_replaced
    if not is_capped and part.kind not in ("poisson", "fixed-size", "cyclic-poisson"):
        return None
    groups = part.groups if part.kind == "cyclic-poisson" else 1
    shifts = _shifts(factor, groups)
    if shifts is None:
        return None
    if is_capped:
        size = {"rate": part.rate, "cap": part.cap, "population": part.population}
        return epsilon_of_capped(shifts.tolist(), **size, delta=delta, numbers=numbers)
    kinds = ["replace"] if is_replaced else ["remove", "add"]
    if part.kind == "fixed-size" and neighbours == "zero-out":
        kinds = ["opposed", "remove", "opposed add", "remove against"]
    elif part.kind == "fixed-size":
        shifts, kinds = 2 * shifts, ["remove", "add", *["remove add"] * is_replaced]

    def turns(kind: str) -> list[Labelled]:
        names = kind.split()
        named = (names[i % len(names)] for i in range(len(shifts)))
        return [plain(Turn(name, part.rate, c)) for name, c in zip(named, shifts.tolist())]

    return widest([epsilon_of_turns(turns(k), delta=delta, numbers=numbers) for k in kinds])


def _shifts(factor: Array, groups: int = 1) -> Array | None:
    """Sizes of the shifts of a unit's turns, to six digits; None where two touch the same rows."""
    steps = np.arange(len(factor))
    turns = [factor[:, steps % groups == group] for group in range(min(groups, len(factor)))]
    own = max(turns, key=lambda columns: float(np.sum(columns**2)))
    K = own.T @ own
    sizes = np.sqrt(np.diag(K))
    if np.any(np.abs(K - np.diag(sizes**2)) > _APART * np.outer(sizes, sizes)):
        return None
    return np.array([float(f"{size:.6g}") for size in sizes])


def _one_position(part: Any, factor: Array, delta: float, numbers: int) -> EpsilonRange:
    steps, b = np.arange(len(factor)), part.steps_per_epoch
    shifts = np.stack([factor[:, steps % b == j].sum(axis=1) for j in range(b)])
    return epsilon_of_positions([shifts @ shifts.T], delta=delta, numbers=numbers)


def _fresh_positions(part: Any, factor: Array, delta: float, numbers: int) -> EpsilonRange | None:
    """Of the beginnings that are looked at, the one whose epochs show most."""
    n, b = len(factor), part.steps_per_epoch
    gram = factor.T @ factor
    chosen = sorted({round(i) for i in np.linspace(0, min(b, n) - 1, _BEGINNINGS)})
    runs = [_epochs(gram, begin, b, part.choices) for begin in chosen]
    if any(run is None for run in runs):
        return None
    known = [run for run in runs if run]
    if len(known) > 1 and numbers > _SHORT:
        short = [epsilon_of_positions(run, delta=delta, numbers=_SHORT) for run in known]
        near = max(one.low for one in short)
        known = [run for run, one in zip(known, short) if one.high >= near]
    return widest([epsilon_of_positions(run, delta=delta, numbers=numbers) for run in known])


def _epochs(gram: Array, begin: int, length: int, choices: int) -> list[Array] | None:
    """K of every epoch of a unit; outside the run nothing is shifted. None if two share rows."""
    found, n, owner = [], len(gram), np.full(len(gram), -1)
    for number, start in enumerate(range(begin - length if begin else 0, n, length)):
        steps = np.arange(start, start + choices)
        is_inside = (steps >= 0) & (steps < n)
        inside = steps[is_inside]
        if len(inside):
            K = np.zeros((choices, choices))
            K[np.ix_(is_inside, is_inside)] = gram[np.ix_(inside, inside)]
            found.append(K)
            owner[inside] = number
    sizes = np.sqrt(np.diag(gram))
    is_apart = np.abs(gram) <= _APART * np.outer(sizes, sizes)
    is_own = (owner[:, None] == owner) | (owner[:, None] < 0) | (owner < 0)
    return found if np.all(is_apart | is_own) else None
