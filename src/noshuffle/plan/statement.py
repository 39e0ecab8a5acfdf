"""PrivacyStatement: a guarantee that never travels without its assumptions.

(ε, δ)-differential privacy means: for every event E and every pair of neighbouring data sets,
P[run(D) ∈ E] ≤ e^ε · P[run(D') ∈ E] + δ. Which pairs are neighbours, what one unit is, and what was
assumed about the order of the data are part of the claim, so they are part of the record. Every
assumption is one plain sentence (`sentences`): something that somebody outside the mathematics must
make true; a run folder repeats them word for word.

>>> statement = PrivacyStatement(
...     epsilon=1.0, delta=1e-5, mu=0.268, rho=0.0359, sensitivity=1.0, squared_sensitivity=1.0,
...     noise_multiplier=3.73, unit="example", neighbours="zero-out", participation="one step",
...     mechanism="independent noise", accountant="exact", exact=True, assumptions=("a.",))
>>> print(statement.headline())
(ε = 1, δ = 1e-05)-DP per example, zero-out neighbours, exact
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist
from typing import Any

from noshuffle.errors import MAX_STEPS
from noshuffle.participation import FixedSize, Participation, Restarted, TruncatedPoisson
from noshuffle.plan.guarantee import Terms
from noshuffle.rounding import factor_up, up

#: How often an attacker of `meaning` accuses somebody who did not take part.
FALSE_ALARMS = 0.01
#: Stands beside ε where units had no names: a loader that shuffles may bring them back unseen.
UNCHECKED = (
    "Participation was not checked: no names were given, so an example that came twice was counted "
    "as two."
)
#: What a sentence begins with that says that no ε holds.
_VOID = "NOT PRIVATE"
_STOPPED = "No result decided to stop after step"


def meaning(
    epsilon: float,
    delta: float,
    mu: float | None = None,
    *,
    unit: str = "example",
    neighbours: str = "zero-out",
    found: float | None = None,
) -> str:
    """What ε means, in two sentences for everybody.

    An attacker whose test accuses a share α of those who did not take part finds at most
    min(e^ε·α + δ, 1 − e^−ε·(1 − δ − α)) of those who did, and for one Gaussian mechanism at most
    Φ(Φ⁻¹(α) + μ) (Dong, Roth, Su 2019). `found`: a bound on that share from elsewhere, such as the
    trade-off curve of a sampled plan. Where a unit is replaced, somebody takes part either way:
    the attacker tells which of two it was.

    >>> meaning(1.0, 1e-5).rpartition(", ")[2]
    'finds at most 2.8 % of those who did.'
    """
    factor = math.exp(min(epsilon, 700.0))
    bounds = [factor * FALSE_ALARMS + delta, 1 - (1 - delta - FALSE_ALARMS) / factor]
    if mu is not None:
        normal = NormalDist()
        bounds.append(normal.cdf(normal.inv_cdf(FALSE_ALARMS) + mu))
    if found is not None:
        bounds.append(found)
    shown = factor_up(factor) if epsilon <= 700 else f"e^{math.ceil(epsilon)}"
    share = math.ceil(1000 * min(bounds)) / 10
    most = f"at most {share:g} %" if share < 100 else "possibly all"
    rare = f"{100 * FALSE_ALARMS:g} %"
    odds = (
        "changes the odds of anything that is seen of this by at most a factor of "
        f"{shown} (up to δ = {up(delta)})."
    )
    if neighbours == "replace-one":
        return (
            f"Whether one {unit} took part or any other in its place {odds} Whoever guesses which "
            f"of the two it was, and takes {rare} of the others for it, recognises {most} of those "
            "that it was."
        )
    return (
        f"Whether one {unit} took part or not {odds} Whoever guesses who took part, and "
        f"accuses {rare} of those who did not, finds {most} of those who did."
    )


@dataclass(frozen=True, kw_only=True)
class PrivacyStatement:
    """One guarantee with everything it rests on. `mu` and `rho` are None under sampling."""

    epsilon: float
    delta: float
    mu: float | None
    rho: float | None
    sensitivity: float
    squared_sensitivity: float
    noise_multiplier: float
    unit: str
    neighbours: str
    participation: str
    mechanism: str
    accountant: str
    exact: bool
    assumptions: tuple[str, ...]
    #: Whether somebody saw which units came when.
    participation_checked: bool = True

    @property
    def not_private(self) -> tuple[str, ...]:
        """Why no ε holds, where assumptions say so."""
        return tuple(said.replace(f"{_VOID}: ", "") for said in voids(self.assumptions))

    def headline(self) -> str:
        """The number and what it is a number of, in one line; that it does not hold, where an
        assumption says so; that nobody checked who took part, where nobody could."""
        kind, void = "exact" if self.exact else "upper bound", ""
        if self.not_private:
            kind, void = "does not hold", f"{_VOID}: "
        unchecked = "" if self.participation_checked else f". {UNCHECKED}"
        return (
            f"{void}(ε = {up(self.epsilon, digits=4)}, δ = {up(self.delta)})-DP per {self.unit}, "
            f"{self.neighbours} neighbours, {kind}{unchecked}"
        )

    def words(self) -> str:
        """The whole statement as text a person can read without the code."""
        lines = [
            self.headline(),
            f"mechanism: {self.mechanism}",
            f"participation: {self.participation}",
            f"noise: standard deviation {self.noise_multiplier:.6g} × clip norm, drawn anew in "
            f"every step; sensitivity {up(self.sensitivity)} "
            f"(squared {up(self.squared_sensitivity)})",
        ]
        if self.mu is not None and self.rho is not None:
            lines.append(
                f"as one Gaussian mechanism: μ = {up(self.mu)} (GDP), ρ = {up(self.rho)} (zCDP)"
            )
        lines.append("this holds provided that:")
        lines.extend(f"  - {sentence}" for sentence in self.assumptions)
        return "\n".join(lines)

    def with_assumptions(self, *sentences: str) -> PrivacyStatement:
        """The same statement with further sentences, each said once."""
        new = tuple(s for s in sentences if s not in self.assumptions)
        return replace(self, assumptions=self.assumptions + new)

    def counted_in(self, words: str, instead_of: str) -> PrivacyStatement:
        """The statement of a run that draws on a budget: `words` for the sentence about others."""
        said = tuple(words if one == instead_of else one for one in self.assumptions)
        return replace(self, assumptions=said)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON. An infinite ε (no noise: no privacy) becomes null."""
        record = asdict(self)
        record["assumptions"] = list(self.assumptions)
        for key in ("epsilon", "mu", "rho"):
            if record[key] is not None and not math.isfinite(record[key]):
                record[key] = None
        return record

    def __str__(self) -> str:
        return self.words()


def voids(sentences: Iterable[str]) -> tuple[str, ...]:
    """The sentences that say that no ε holds."""
    return tuple(said for said in sentences if _VOID in said)


_NEIGHBOURS = {
    "zero-out": "Neighbouring data sets differ in one {unit}, whose contributions become zero; "
    "everybody else's steps stay as they are.",
    "add-remove": "Neighbouring data sets differ by adding or removing one {unit}; "
    "everybody else's steps stay as they are.",
    "replace-one": "Neighbouring data sets differ in one {unit}, which is replaced by any other.",
}
#: Where others do not stay when a unit is added or removed.
_DISPLACED = {
    FixedSize: "Neighbouring data sets differ by adding or removing one {unit}; batches are as "
    "large without it, so another takes its place. How many there are is told by the plan, and not "
    "protected.",
    TruncatedPoisson: "Neighbouring data sets differ by adding or removing one {unit}; everybody "
    "else's steps stay as they are, but for one that leaves a full batch for it.",
}


#: What ε rests on, where its accountant is not exact.
_BY_ACCOUNTANT = {
    "rdp": "ε comes from a Rényi-divergence bound, which is above the true value.",
    "fourier": "ε is a rigorous upper bound from a discretised privacy-loss distribution.",
    "bins": "ε is a rigorous upper bound over the secret positions, without Monte Carlo.",
}


def sentences(
    terms: Terms, participation: Participation, *, unit: str, is_exact: bool
) -> tuple[str, ...]:
    """Every assumption behind the statement of a plan whose guard holds units to `participation`;
    `is_exact` is said of the sensitivity."""
    words = _NEIGHBOURS[terms.neighbours]
    if terms.neighbours == "add-remove":
        words = _DISPLACED.get(type(participation), words)
    always = (
        words.format(unit=unit),
        _order(participation),
        f"The contribution of one {unit} to one step is clipped to the clip norm before it is "
        "summed, and the noisy sum is divided by a constant fixed beforehand.",
        "The noise key is drawn from the operating system, stays secret, and no row of noise is "
        "ever used for two different batches.",
        "Every released value is a function of the noisy sums alone: all intermediate models are "
        "covered; raw losses, raw norms and hyper-parameters tuned on the same data are not.",
        "Noise is treated as real-valued; the rounding of floating point is not analysed.",
    )
    sometimes = {
        "There is no noise, hence no privacy.": terms.noise_multiplier == 0,
        "The sensitivity is an upper bound, so the true ε is at most the stated one.": not is_exact,
        _BY_ACCOUNTANT.get(terms.accountant, ""): terms.accountant in _BY_ACCOUNTANT,
        "A secret draw decides about rows that are released at several times: no copy and no "
        "older state of this run goes on beside it.": participation.keeps_draws,
    }
    return (*always, *(said for said, holds in sometimes.items() if holds))


def so_far(released: int, steps: int) -> str:
    """What a statement of an unfinished run adds."""
    if steps == MAX_STEPS:
        return f"So far {released} steps were released; the run has no planned end."
    return f"So far {released} of {steps} planned steps were released."


def stopped(released: int) -> str:
    """What ε of the first steps of a plan rests on.

    A mechanism whose length its own results decide is none of the lengths that they decide
    between: what is proved for it is what was fixed beforehand (Rogers et al., NeurIPS 2016). No
    number: forks take the sentence over, and their ε is that of several runs.
    """
    return (
        f"{_STOPPED} {released}; if one did, this run counts with ε of its whole plan, or within "
        "the limit of the budget that it draws on."
    )


def of_stops(sentences: Iterable[str]) -> list[str]:
    """Those of `stopped` among the sentences of a statement."""
    return [said for said in sentences if _STOPPED in said]


def _order(part: Participation) -> str:
    words = part.words()
    words = words[0].upper() + words[1:]
    if part.is_sampled:
        return f"{words}; the draw is uniform, kept secret, and made by nobody who knows the data."
    if isinstance(part, Restarted):
        return f"{words}; the order itself may be known to the attacker, and need not be random."
    return f"{words}; the order may be chosen by anybody and known to the attacker."
