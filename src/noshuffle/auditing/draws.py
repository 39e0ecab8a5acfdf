"""Are secret draws what the plan says? The sampler of training, under a key of the system.

    place   cyclic draws take their group only; a secret position is the same in every epoch, fresh
            ones are far enough apart; cut batches are not larger than their cap
    size    coins that fell: Binomial(coins, q); batches of a fixed size have it; positions are even
    steps   units that two steps have in common, disjoint pairs of turns: Binomial(pairs, q²)
    units   two units in one step, disjoint pairs: the same (positions: both at one place)

Exact tails, Bonferroni over what is tested; "place" is no matter of chance. That a run used these
draws and no others is what the ledger shows (`noshuffle verify`).

>>> from noshuffle.participation import Poisson
>>> audit_draws(Poisson(steps=40, rate=0.1)).answer
'HOLDS'
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from noshuffle.auditing.answers import HOLDS, REFUTED, Finding
from noshuffle.participation import (
    BallsInBins,
    CyclicPoisson,
    FixedSize,
    Participation,
    TruncatedPoisson,
)
from noshuffle.release.sampler import Sampler
from noshuffle.release.sampler_kinds import make_sampler

#: A finding is believed when chance gives it less often than this.
LEVEL = 1e-6
_POPULATION, _STEPS, _MOST_COINS = 4096, 256, 2**24


@dataclass(frozen=True)
class DrawAudit(Finding):
    """What was drawn in `steps` steps from `population` units, by test: (found, expected, p)."""

    steps: int
    population: int
    tests: dict[str, tuple[float, float, float]]
    kind: ClassVar[str] = "draws"

    @property
    def answer(self) -> str:
        """REFUTED where chance does not explain some count."""
        return HOLDS if min(p for *_, p in self.tests.values()) > LEVEL else REFUTED

    def words(self) -> str:
        counts = "; ".join(
            f"{name}: {found:.0f}, expected {expected:.0f} (p = {p:.2g})"
            for name, (found, expected, p) in self.tests.items()
        )
        return (
            f"{self.answer}: secret draws of {self.steps} steps from {self.population:,} units\n"
            + counts
        )


def audit_draws(part: Participation, *, sampler: Sampler | None = None) -> DrawAudit:
    """Draw as training does, and count; `sampler` in place of the one of training."""
    if sampler is None:
        population = _POPULATION
        if isinstance(part, FixedSize | TruncatedPoisson):
            population = part.population
        if isinstance(part, CyclicPoisson):
            population = max(population, 2 * part.groups)
        sampler = make_sampler(part, population=population, key=os.urandom(32))
    units = sampler.population
    steps = min(part.steps, _STEPS, max(8, _MOST_COINS // units))
    drawn = np.zeros((steps, units), dtype=bool)
    for step in range(steps):
        drawn[step, sampler.draw(step)] = True
    if isinstance(part, BallsInBins):
        tests = _of_positions(drawn, part.steps_per_epoch)
    elif isinstance(part, TruncatedPoisson):
        tests = _of_cut_batches(drawn, part)
    else:
        groups = part.groups if isinstance(part, CyclicPoisson) else 1
        tests = _of_coins(drawn, groups, part)
    share = len(tests)
    whole = {name: (*own[:2], min(1.0, share * own[2])) for name, own in tests.items()}
    return DrawAudit(steps, units, whole)


def _of_coins(
    drawn: NDArray[np.bool_], groups: int, part: Participation
) -> dict[str, tuple[float, float, float]]:
    steps, units = drawn.shape
    rate: float = part.rate  # type: ignore[attr-defined]
    turn = np.arange(units)[None, :] % groups == np.arange(steps)[:, None] % groups
    both = rate * rate
    if isinstance(part, FixedSize):
        sizes = drawn.sum(axis=1)
        size = (float(sizes.max()), float(part.batch), float(np.all(sizes == part.batch)))
        together = rate * (part.batch - 1) / max(units - 1, 1)
    else:
        size = _binomial(int((drawn & turn).sum()), int(turn.sum()), rate)
        together = both
    tests = {"places": _never(drawn & ~turn), "size": size}
    blocks = drawn[: steps - steps % (2 * groups)].reshape(-1, 2, groups, units)
    if len(blocks):
        shared = turn[:groups] & blocks[:, 0] & blocks[:, 1]
        tests["steps"] = _binomial(int(shared.sum()), len(blocks) * units, both)
    pairs = [drawn[group::groups, group::groups] for group in range(min(groups, steps))]
    pairs = [own[:, : own.shape[1] // 2 * 2] for own in pairs]
    seen = sum(int((own[:, ::2] & own[:, 1::2]).sum()) for own in pairs)
    tests["units"] = _binomial(seen, sum(own.size // 2 for own in pairs), together)
    return tests


def _of_positions(drawn: NDArray[np.bool_], b: int) -> dict[str, tuple[float, float, float]]:
    steps, units = drawn.shape
    first = drawn[:b]
    again = [step for step in range(b, steps) if np.any(drawn[step] != drawn[step % b])]
    often = first.sum(axis=0)
    wrong = int((often > 1).sum() if steps < b else (often != 1).sum()) + len(again)
    sizes = first.sum(axis=1)
    worst = int(np.argmax(np.abs(sizes - units / b)))
    found, expected, p = _binomial(int(sizes[worst]), units, 1 / b)
    pairs = first[:, : units // 2 * 2]
    seen = int((pairs[:, ::2] & pairs[:, 1::2]).sum())
    return {
        "places": (float(wrong), 0.0, float(wrong == 0)),
        "size": (found, expected, min(1.0, len(sizes) * p)),
        "units": _binomial(seen, pairs.shape[1] // 2, len(sizes) / b / b),
    }


def _of_cut_batches(
    drawn: NDArray[np.bool_], part: TruncatedPoisson
) -> dict[str, tuple[float, float, float]]:
    """Sizes with their cut, pairs of steps and of units, and who is left out of full batches."""
    steps, units = drawn.shape
    sizes = drawn.sum(axis=1)
    came = np.arange(part.cap)
    mean = float(binom.sf(came, part.population, part.rate).sum())  # of the smaller of K and cap
    tests = {
        "places": _never(sizes > part.cap),
        "size": _binomial(int(sizes.sum()), steps * units, mean / units),
    }
    first = drawn[: steps // 2 * 2].reshape(-1, 2, units)
    shared = int((first[:, 0] & first[:, 1]).sum())
    tests["steps"] = _binomial(shared, len(first) * units, (mean / units) ** 2)
    full = drawn[sizes == part.cap]
    half = units // 2
    front = int(full[:, :half].sum())
    tests["units"] = _binomial(front, int(full.sum()), half / units)
    return tests


def _never(found: NDArray[np.bool_]) -> tuple[float, float, float]:
    return float(found.sum()), 0.0, float(not found.any())


def _binomial(found: int, trials: int, rate: float) -> tuple[float, float, float]:
    """(found, expected, two-sided p)."""
    low, high = binom.cdf(found, trials, rate), binom.sf(found - 1, trials, rate)
    return float(found), trials * rate, min(1.0, 2 * float(min(low, high)))
