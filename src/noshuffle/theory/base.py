"""A statement of theory as a value: sizes in, terms, constants and conditions out.

A theorem inside O(·) has no number of its own: `Bound.value` is then None, and `Bound.order` is
what stands inside the O(·), good for slopes and for comparing terms. Bounds with a `value` are
proved with their constants in docs/proofs-convex.md and hold as they stand.

The texts of the papers are not in this repository. `source` says where a statement comes from; "as
recalled" marks those whose logarithms were not compared with the printed page.

>>> Bound(name="a", quantity="regret", terms={"privacy": 0.5}, is_order=True, conditions=(),
...       source="").words()
'a: regret = O(0.5), the constant is not stated; largest term: privacy'
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from noshuffle.errors import InvalidInput, open_unit, positive, whole

Terms = Mapping[str, float]

LIPSCHITZ = "convex L-Lipschitz losses"
SAMPLED = "rows drawn independently from one distribution, one pass"
HIGH = "probability 1 - beta"
HERE = "constants proved in docs/proofs-convex.md"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a theorem is asked for; `beta` is the probability that its bound fails."""

    n: int
    d: int
    epsilon: float
    delta: float
    beta: float = 0.05
    lipschitz: float = 1.0
    radius: float = 1.0

    def __post_init__(self) -> None:
        whole(n=self.n, at_most=10**12)
        whole(d=self.d, at_most=10**12)
        positive(epsilon=self.epsilon, lipschitz=self.lipschitz, radius=self.radius)
        open_unit(delta=self.delta, beta=self.beta)

    @property
    def scale(self) -> float:
        """L·R: what a loss can vary by."""
        return self.lipschitz * self.radius

    @property
    def per_private_row(self) -> float:
        """√d/(εn), the private term of the Euclidean rates."""
        return math.sqrt(self.d) / (self.epsilon * self.n)


@dataclass(frozen=True)
class Bound:
    """One statement at given sizes: its terms, whether they carry constants, and its conditions."""

    name: str
    quantity: str
    terms: Terms
    is_order: bool
    conditions: tuple[str, ...]
    source: str
    is_lower: bool = False

    @property
    def order(self) -> float:
        """The sum of the terms: what stands inside O(·), or the bound itself."""
        return math.fsum(self.terms.values())

    @property
    def value(self) -> float | None:
        """The number that is promised; None where the paper hides its constant."""
        return None if self.is_order else self.order

    def words(self) -> str:
        """One line: the number, or O(·) of it, and the term that decides."""
        largest = max(self.terms, key=lambda name: self.terms[name])
        if not self.is_order:
            return f"{self.name}: {self.quantity} ≤ {self.order:.3g}; largest term: {largest}"
        letter = "Ω" if self.is_lower else "O"
        return (
            f"{self.name}: {self.quantity} = {letter}({self.order:.3g}), the constant is not "
            f"stated; largest term: {largest}"
        )


def regret(played: Sequence[float], comparator: Sequence[float]) -> float:
    """The regret that the bounds speak of: mean of ℓ(θ_t; d_t) − ℓ(θ*; d_t). Not private."""
    own, other = (np.asarray(part, dtype=float) for part in (played, comparator))
    if own.shape != other.shape or own.ndim != 1 or not len(own):
        raise InvalidInput(
            f"regret needs one loss a round of both, got shapes {own.shape} and {other.shape}"
        )
    return float(np.mean(own - other))


def order_only(
    name: str, quantity: str, terms: Terms, *conditions: str, source: str, is_lower: bool = False
) -> Bound:
    """A statement inside O(·), its logarithms as recalled."""
    recalled = f"{source}; as recalled"
    return Bound(name, quantity, terms, True, conditions, recalled, is_lower)


def proved(name: str, quantity: str, terms: Terms, *conditions: str) -> Bound:
    """A statement with constants that are proved in this project."""
    return Bound(name, quantity, terms, False, conditions, HERE)
