"""Loss-threshold membership attack: who was in the data, by the loss of the final model alone.

    guess "in" where loss ≤ τ;   ROC over τ;   no attack on a μ-GDP model is above Φ(Φ⁻¹(x) + μ)

(Yeom et al. 2018, arXiv 1709.01604.) The attack that anybody can make who may query the model. It
is weak: a curve near the diagonal is no proof of privacy, a curve above the claim is a proof of its
absence. `is_in` must be fair coins, or the attack finds differences between two data sets.

>>> rng = np.random.default_rng(1)
>>> found = attack(rng.normal(size=400), rng.random(400) < 0.5, claimed_mu=1.0)
>>> found.answer, abs(found.area - 0.5) < 0.1
('HOLDS', True)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import beta
from torch import Tensor, nn

from noshuffle.auditing.answers import HOLDS, REFUTED, Finding
from noshuffle.auditing.curve import power
from noshuffle.auditing.emitted import Array, Coins
from noshuffle.clipping.check import evaluated
from noshuffle.errors import InvalidInput

#: False-positive rates at which the curve is compared with the claim, at one level for all.
RATES, LEVEL = (0.001, 0.01, 0.1, 0.3, 0.5), 1e-6


@dataclass(frozen=True)
class Attack(Finding):
    """The ROC of an attack beside the largest that the claim allows."""

    members: int
    others: int
    claimed_mu: float
    area: float
    curve: tuple[tuple[float, float], ...]
    excess: tuple[float, ...]
    kind: ClassVar[str] = "membership"

    @property
    def answer(self) -> str:
        """REFUTED where the attack is surely better than the claim allows."""
        return REFUTED if self.excess else HOLDS

    def words(self) -> str:
        at = dict(self.curve)
        near = min(at, key=lambda x: abs(x - 0.01))
        return (
            f"{self.answer}: loss-threshold attack on the final model, {self.members:,} members "
            f"and {self.others:,} others\narea under the curve {self.area:.4f}; at {near:.2%} "
            f"false positives {at[near]:.2%} of members are found, the claim allows "
            f"{power(self.claimed_mu, max(near, 1e-12)):.2%}"
        )


def attack(losses: Array, is_in: Coins, *, claimed_mu: float) -> Attack:
    """Threshold the losses of members and others. NaN counts as the largest loss."""
    coins = np.asarray(is_in, dtype=bool)
    values = np.nan_to_num(np.asarray(losses, dtype=np.float64), nan=np.inf)
    inside, outside = np.sort(values[coins]), np.sort(values[~coins])
    if min(len(inside), len(outside)) < 4:
        raise InvalidInput("the attack needs at least four members and four others")
    cuts = np.unique(values)
    found = np.searchsorted(inside, cuts, side="right") / len(inside)
    false = np.searchsorted(outside, cuts, side="right") / len(outside)
    x, y = np.append(0.0, false), np.append(0.0, found)
    area = float(np.sum(np.diff(x) * (y[1:] + y[:-1]) / 2))
    excess = tuple(rate for rate in RATES if _is_above(inside, outside, rate, claimed_mu))
    picked = np.unique(np.searchsorted(x, np.geomspace(1e-3, 1.0, 100)).clip(0, len(x) - 1))
    curve = tuple((float(x[i]), float(y[i])) for i in np.unique([0, *picked, len(x) - 1]))
    return Attack(len(inside), len(outside), claimed_mu, area, curve, excess)


def _is_above(inside: Array, outside: Array, rate: float, mu: float) -> bool:
    """Whether the threshold with this share of false positives finds more than the claim allows.

    The threshold comes from one half of the others and both rates from the rest (Clopper–Pearson).
    """
    first, rest = outside[::2], outside[1::2]
    cut = float(np.quantile(first, rate))
    false, found = int((rest <= cut).sum()), int((inside <= cut).sum())
    level = LEVEL / (2 * len(RATES))
    most_false = beta.ppf(1 - level, false + 1, len(rest) - false) if false < len(rest) else 1.0
    least_found = beta.ppf(level, found, len(inside) - found + 1) if found else 0.0
    return bool(least_found > power(mu, min(float(most_false), 1 - 1e-12)))


@torch.no_grad()
def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Array:
    """Cross-entropy of every row under the model in eval mode."""
    with evaluated(model):
        parts = [
            F.cross_entropy(model(x[i : i + 512]), y[i : i + 512], reduction="none")
            for i in range(0, len(x), 512)
        ]
    return np.asarray(torch.cat(parts).double().numpy())
