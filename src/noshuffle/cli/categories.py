"""Categories of text columns for `noshuffle fit`: given, or found within the ε of the run.

    --categories city=Rome,Oslo       public: costs nothing
    --categories private              found by `PrivateOneHot` for all other columns of text

The choice is a Gaussian mechanism μ₁ that fails with probability s; what is left for the model is
μ₂² = μ² − μ₁², μ being the largest with s + (1 − s)·δ_μ(ε) ≤ δ, so that both together are (ε, δ)-
private (`accounting.gdp`). The model's own run, its folder and its ledger state ε₂, and a sentence
says what stood before it. State: what was chosen.
"""

from __future__ import annotations

import math
from typing import Any

from noshuffle.cli.budget import opened
from noshuffle.errors import InvalidInput
from noshuffle.rounding import up

#: Share of μ² for the choice, and of δ for what it may cost to fail.
SHARE, SLACK = 0.1, 0.25


class CategoryChoice:
    """Called with all columns of text and the ids, says which values become indicators."""

    def __init__(self, asked: Any) -> None:
        self._asked = asked
        self.epsilon_left: float = asked.epsilon
        self._sentence: tuple[str, ...] = ()
        self._given: dict[str, list[str]] = {}
        self._is_private = False
        for text in asked.categories or ():
            name, mark, listed = text.partition("=")
            if text == "private":
                self._is_private = True
            elif mark and listed:
                self._given[name] = list(dict.fromkeys(v.strip() for v in listed.split(",")))
            else:
                raise InvalidInput(
                    f"--categories must be private, or COLUMN=a,b,c as in city=Rome,Oslo; got "
                    f"{text!r}"
                )

    def __call__(self, texts: dict[str, list[str]], ids: list[str] | None) -> dict[str, list[str]]:
        unlisted = {name: column for name, column in texts.items() if name not in self._given}
        found = dict(self._given)
        if self._is_private and unlisted:
            found |= self._find(unlisted, ids)
        return found

    def _find(self, texts: dict[str, list[str]], ids: list[str] | None) -> dict[str, list[str]]:
        import numpy as np

        from noshuffle.accounting import gaussian, gdp
        from noshuffle.convex import PrivateOneHot

        epsilon, delta = self._asked.epsilon, self._asked.delta
        most = gaussian.mu(epsilon=epsilon, delta=delta * (1 - SLACK))
        share = gaussian.epsilon(mu=math.sqrt(SHARE) * most, delta=delta * SLACK)
        chosen = PrivateOneHot(
            epsilon=share,
            delta=delta * SLACK,
            rows_per_unit=self._asked.rows_per_unit,
            budget=opened(self._asked.budget),
            test_seed=self._asked.test_seed,
        ).fit(np.array(list(texts.values()), dtype=object).T, ids=ids)
        assert chosen.law_ is not None
        mu, slack = chosen.law_.mu, chosen.law_.slack
        whole = gdp.capacity(epsilon=epsilon, delta=delta, slack=slack)
        left = gaussian.epsilon(mu=math.sqrt(whole**2 - mu**2), delta=delta)
        self.epsilon_left = min(left, epsilon)
        self._sentence = (
            f"Before this run, categories of {len(texts)} text columns were chosen from the same "
            f"rows by noisy counts (ε = {up(share, digits=4)}, δ = {up(delta * SLACK)}); with "
            f"this run that is (ε = {up(epsilon)}, δ = {up(delta)}).",
        )
        found = zip(texts, chosen.categories_)
        return {name: [str(value) for value in values] for name, values in found}

    def words(self) -> tuple[str, ...]:
        """What the statement of the model has to say of the choice."""
        return self._sentence
