"""What all solvers share: the solution record, the randomness, and the words of a guarantee.

Randomness. `generator(None)` is a Philox stream (Salmon et al. 2011; 128-bit key, 256-bit counter)
whose key comes from the operating system for every call: nothing is seeded from time, process or a
counter that could repeat. Philox passes every statistical test but is no cipher. A `test_seed`
makes a run reproducible by anyone who knows it, hence not private, and the statement says so.

Guarantees are stated as `PrivacyStatement` in one of three currencies:

    gaussian_statement   μ-GDP: one (possibly composed) Gaussian mechanism, ε(δ) exact
    rho_statement        ρ-zCDP: sums of Gaussian, generalized Gaussian and exponential mechanisms
    pure_statement       ε at δ = 0

>>> generator("example").normal() == generator("example").normal()
True
>>> gaussian_statement(mu=1.0, delta=1e-5, sensitivity=2.0, mechanism="m", rows=10).headline()
'(ε = 4.377, δ = 1e-05)-DP per example, replace-one neighbours, exact'
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from noshuffle.accounting import gaussian, renyi
from noshuffle.convex.losses import Array
from noshuffle.errors import InvalidInput, Unsupported, one_of, open_unit, positive
from noshuffle.statement import PrivacyStatement

NEIGHBOURS = ("replace-one", "zero-out")
_SENTENCES = {
    "replace-one": "Neighbouring data sets differ in one example, which is replaced by any other.",
    "zero-out": "Neighbouring data sets differ in one example, whose contributions become zero.",
    "add-remove": "Neighbouring data sets differ by adding or removing one example.",
}


@dataclass(frozen=True)
class Solution:
    """What a solver returns. All of it is released: weights, iterates and details are covered.

    `details` holds public numbers only (noise, steps, step size): functions of the settings.
    """

    weights: Array
    statement: PrivacyStatement
    iterates: Array | None = None
    details: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


def generator(test_seed: int | str | None) -> np.random.Generator:
    """A stream keyed by the operating system, or by a named test seed (then not private)."""
    if test_seed is None:
        key = os.urandom(16)
    else:
        text = f"noshuffle convex test seed {test_seed!r}".encode()
        key = hashlib.blake2b(text, digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


def budget(*, epsilon: float, delta: float) -> float:
    """μ of the largest Gaussian mechanism within (ε, δ)."""
    positive(epsilon=epsilon)
    open_unit(delta=delta)
    return gaussian.mu(epsilon=epsilon, delta=delta)


def rho_budget(*, epsilon: float, delta: float) -> float:
    """The largest ρ whose zCDP conversion is within (ε, δ); found by bisection, safe side."""
    positive(epsilon=epsilon)
    open_unit(delta=delta)
    low, high = 0.0, 1.0

    def meets(rho: float) -> bool:
        return renyi.epsilon_from_rho(rho=rho, delta=delta, real_orders=True) <= epsilon

    while meets(high):
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if meets(middle) else (low, middle)
    if low == 0:
        raise Unsupported(f"no zCDP budget is found for epsilon={epsilon:g}, delta={delta:g}")
    return low


def contribution(neighbours: str) -> float:
    """How many single gradients two neighbours can differ by: 2 replaced, 1 zeroed out.

    Adding and removing rows is refused: rows are cut into batches by their place, so all rows
    behind the one that goes would move to other batches (and n, a divisor, would change).
    """
    one_of(NEIGHBOURS, neighbours=neighbours)
    return 2.0 if neighbours == "replace-one" else 1.0


def sentences(
    *, neighbours: str, rows: int | None, test_seed: object, notes: tuple[str, ...]
) -> tuple[str, ...]:
    """The assumptions of a solver's guarantee, each one plain sentence (rows=None: no table)."""
    out: tuple[str, ...] = (_SENTENCES[neighbours],)
    if rows is not None:
        out += (
            f"The number of examples ({rows}) is public, and each is one row of the data.",
            "Every row and label respects the bounds of the loss object, which were given, not "
            "measured; step sizes and all other settings were chosen without looking at the data.",
        )
    out += (
        "The key of the noise is drawn from the operating system and stays secret.",
        "Noise is treated as real-valued; the rounding of floating point is not analysed.",
        *notes,
    )
    if test_seed is not None:
        out += ("A test seed was given: the noise can be reproduced, so nothing is private.",)
    return out


def on_top_of_plan(*, rows: int, test_seed: object) -> tuple[str, ...]:
    """What a solver adds to the sentences of a Plan: bounds in the place of clipping."""
    own = sentences(neighbours="zero-out", rows=rows, test_seed=test_seed, notes=())
    bound = "The Lipschitz bound of the loss takes the place of the clip norm; nothing is clipped."
    return (own[1], own[2], bound, *own[5:])


def gaussian_statement(
    *,
    mu: float,
    delta: float,
    sensitivity: float,
    mechanism: str,
    rows: int,
    neighbours: str = "replace-one",
    participation: str = "every row is read, in any order",
    test_seed: object = None,
    notes: tuple[str, ...] = (),
) -> PrivacyStatement:
    """The statement of a μ-GDP release; the noise multiplier is sensitivity / μ."""
    return PrivacyStatement(
        epsilon=gaussian.epsilon(mu=mu, delta=delta) if math.isfinite(mu) else math.inf,
        delta=delta,
        mu=mu,
        rho=mu * mu / 2,
        sensitivity=sensitivity,
        squared_sensitivity=sensitivity**2,
        noise_multiplier=sensitivity / mu,
        unit="example",
        neighbours=neighbours,
        participation=participation,
        mechanism=mechanism,
        accountant="exact",
        exact=True,
        assumptions=sentences(neighbours=neighbours, rows=rows, test_seed=test_seed, notes=notes),
    )


def rho_statement(
    *,
    rho: float,
    delta: float,
    sensitivity: float,
    noise: float,
    mechanism: str,
    rows: int,
    neighbours: str = "replace-one",
    participation: str = "every row is read in one pass, in any order",
    test_seed: object = None,
    notes: tuple[str, ...] = (),
) -> PrivacyStatement:
    """The statement of a ρ-zCDP release: ε(δ) is an upper bound."""
    return PrivacyStatement(
        epsilon=renyi.epsilon_from_rho(rho=rho, delta=delta, real_orders=True),
        delta=delta,
        mu=None,
        rho=rho,
        sensitivity=sensitivity,
        squared_sensitivity=sensitivity**2,
        noise_multiplier=noise,
        unit="example",
        neighbours=neighbours,
        participation=participation,
        mechanism=mechanism,
        accountant="rdp",
        exact=False,
        assumptions=sentences(neighbours=neighbours, rows=rows, test_seed=test_seed, notes=notes),
    )


def pure_statement(
    *,
    epsilon: float,
    sensitivity: float,
    noise: float,
    mechanism: str,
    rows: int | None = None,
    delta: float = 0.0,
    neighbours: str = "replace-one",
    participation: str = "every row is read, in any order",
    test_seed: object = None,
    notes: tuple[str, ...] = (),
) -> PrivacyStatement:
    """The statement of an ε-private release (or of a direct (ε, δ) proof): an upper bound."""
    return PrivacyStatement(
        epsilon=epsilon,
        delta=delta,
        mu=None,
        rho=epsilon**2 / 2 if delta == 0 else None,
        sensitivity=sensitivity,
        squared_sensitivity=sensitivity**2,
        noise_multiplier=noise,
        unit="example",
        neighbours=neighbours,
        participation=participation,
        mechanism=mechanism,
        accountant="direct proof",
        exact=False,
        assumptions=sentences(neighbours=neighbours, rows=rows, test_seed=test_seed, notes=notes),
    )


def split(total: int, parts: int) -> list[slice]:
    """`parts` consecutive slices of equal length (the rest joins the last)."""
    if not 1 <= parts <= total:
        raise InvalidInput(f"needs at least one row per step: {total} rows, {parts} steps")
    size = total // parts
    ends = [*(size * i for i in range(parts)), total]
    return [slice(ends[i], ends[i + 1]) for i in range(parts)]
