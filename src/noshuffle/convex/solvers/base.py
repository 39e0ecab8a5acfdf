"""What all solvers share: the solution, budgets and shares, and the words of a guarantee.

Guarantees are stated as `PrivacyStatement` in one of three currencies (`guarantee`):

    mu        μ-GDP: one (possibly composed) Gaussian mechanism, ε(δ) exact
    rho       ρ-zCDP: sums of Gaussian, generalized Gaussian and exponential mechanisms
    epsilon   a direct proof of ε at δ = 0, or of (ε, δ)

>>> guarantee(mu=1.0, delta=1e-5, sensitivity=2.0, mechanism="m", rows=10).headline()
'(ε = 4.378, δ = 1e-05)-DP per example, zero-out neighbours, exact'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

from noshuffle.accounting import gaussian, gdp, renyi
from noshuffle.accounting.bisection import bracket
from noshuffle.convex.arrays import Array
from noshuffle.errors import InvalidInput, Unsupported, one_of, open_unit, positive
from noshuffle.plan.statement import PrivacyStatement
from noshuffle.release.spending import OTHER_RUNS, TEST_SEED

#: The first is the default of every solver and estimator; the second covers twice as much.
NEIGHBOURS = ("zero-out", "replace-one")
OUTPUTS = ("average", "last")
EVERY_ROW = "every row is read, in any order"
ONE_PASS = "every row is read in one pass, in any order"
_SENTENCES = {
    "replace-one": "Neighbouring data sets differ in one example, which is replaced by any other.",
    "zero-out": "Neighbouring data sets differ in one example, whose contributions become zero.",
    "add-remove": "Neighbouring data sets differ by adding or removing one example.",
}
_KEY = "The key of the noise is drawn from the operating system and stays secret."
_REAL = (
    "Noise is treated as real-valued. Vectors are released on a public grid of 2⁻¹⁰ of their "
    "noise, so that low bits tell nothing; the rest of floating point is not analysed."
)


@dataclass(frozen=True)
class Solution:
    """What a solver returns. All of it is released: weights, iterates and details are covered.

    `details` holds public numbers only (noise, steps, step size): functions of the settings.
    """

    weights: Array
    statement: PrivacyStatement
    iterates: Array | None = None
    details: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


def budget(*, epsilon: float, delta: float) -> float:
    """μ of the largest Gaussian mechanism within (ε, δ)."""
    positive(epsilon=epsilon)
    open_unit(delta=delta)
    return gaussian.mu(epsilon=epsilon, delta=delta)


def rho_budget(*, epsilon: float, delta: float) -> float:
    """The largest ρ whose zCDP conversion is within (ε, δ); found by bisection, safe side."""
    positive(epsilon=epsilon)
    open_unit(delta=delta)
    return _largest_rho(float(epsilon), float(delta))


@lru_cache(maxsize=64)  # it takes longer than a small run
def _largest_rho(epsilon: float, delta: float) -> float:
    def exceeds(rho: float) -> bool:
        return renyi.epsilon_from_rho(rho=rho, delta=delta, real_orders=True) > epsilon

    high = 1.0
    while not exceeds(high):
        high *= 2
    low, _ = bracket(exceeds, 0.0, high)
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


def table_sentences(rows: int) -> tuple[str, ...]:
    """What is assumed of a table and of the settings, beside the mechanism."""
    return (
        f"The number of examples ({rows}) is public, and each is one row of the data.",
        "Every row and label respects the bounds of the loss object, which were given, not "
        "measured; step sizes and all other settings were chosen without looking at the data.",
        OTHER_RUNS,
    )


def guarantee(
    *,
    sensitivity: float,
    mu: float | None = None,
    rho: float | None = None,
    epsilon: float | None = None,
    delta: float = 0.0,
    noise: float | None = None,
    rows: int | None = None,
    neighbours: str = "zero-out",
    is_test: bool = False,
    notes: tuple[str, ...] = (),
    **words: str,
) -> PrivacyStatement:
    """The statement of a release with one of μ, ρ and ε (rows=None: the data is no table).

    `words` are those of `PrivacyStatement`: mechanism, participation, accountant.

    Guarantees: ε at δ is exact for μ, an upper bound otherwise; a test seed is said.
    """
    exact, kind = False, "direct proof"
    if mu is not None:
        exact, kind, rho, noise = True, "exact", mu * mu / 2, sensitivity / mu
        epsilon = gdp.epsilon(mu=mu, slack=0.0, delta=delta)
    elif rho is not None:
        kind = "rdp"
        epsilon = renyi.epsilon_from_rho(rho=rho, delta=delta, real_orders=True)
    elif epsilon is not None and delta == 0:
        rho = epsilon**2 / 2
    assert epsilon is not None
    assert noise is not None
    words = {"participation": EVERY_ROW, "accountant": kind, **words}
    return PrivacyStatement(
        epsilon=epsilon,
        delta=delta,
        mu=mu,
        rho=rho,
        sensitivity=sensitivity,
        squared_sensitivity=sensitivity**2,
        noise_multiplier=noise,
        unit="example",
        neighbours=neighbours,
        exact=exact,
        assumptions=(
            _SENTENCES[neighbours],
            *(table_sentences(rows) if rows is not None else (OTHER_RUNS,)),
            *(() if is_test else (_KEY,)),
            _REAL,
            *notes,
            *((TEST_SEED,) if is_test else ()),
        ),
        participation_checked=True,
        **words,
    )


def split(total: int, parts: int) -> list[slice]:
    """`parts` consecutive slices of equal length (the rest joins the last)."""
    if not 1 <= parts <= total:
        raise InvalidInput(f"needs at least one row per step: {total} rows, {parts} steps")
    size = total // parts
    ends = [*(size * i for i in range(parts)), total]
    return [slice(ends[i], ends[i + 1]) for i in range(parts)]
