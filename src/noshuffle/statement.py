"""PrivacyStatement: a guarantee that never travels without its assumptions.

(ε, δ)-differential privacy means: for every event E and every pair of neighbouring data sets,
P[run(D) ∈ E] ≤ e^ε · P[run(D') ∈ E] + δ. Which pairs are neighbours, what one unit is, and what was
assumed about the order of the data are part of the claim, so they are part of the record.

>>> statement = PrivacyStatement(
...     epsilon=1.0, delta=1e-5, mu=0.268, rho=0.0359, sensitivity=1.0, squared_sensitivity=1.0,
...     noise_multiplier=3.73, unit="example", neighbours="zero-out", participation="one step",
...     mechanism="independent noise", accountant="exact", exact=True, assumptions=("a.",))
>>> print(statement.headline())
(ε = 1, δ = 1e-05)-DP per example, zero-out neighbours, exact
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any


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

    def headline(self) -> str:
        """The number and what it is a number of, in one line."""
        kind = "exact" if self.exact else "upper bound"
        return (
            f"(ε = {self.epsilon:.4g}, δ = {self.delta:g})-DP per {self.unit}, "
            f"{self.neighbours} neighbours, {kind}"
        )

    def words(self) -> str:
        """The whole statement as text a person can read without the code."""
        lines = [
            self.headline(),
            f"mechanism: {self.mechanism}",
            f"participation: {self.participation}",
            f"noise: standard deviation {self.noise_multiplier:.6g} × clip norm on every row of Z; "
            f"sensitivity {self.sensitivity:.6g} (squared {self.squared_sensitivity:.6g})",
        ]
        if self.mu is not None and self.rho is not None:
            lines.append(
                f"as one Gaussian mechanism: μ = {self.mu:.6g} (GDP), ρ = {self.rho:.6g} (zCDP)"
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
