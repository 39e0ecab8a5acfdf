"""LossReading: the factor and the reduction between a loss and the terms of its examples.

    ∂L/∂output_i = s · r_i · ∂ℓ_i/∂output_i          s: factor,  r: by `kind`, `count` and `weights`

`loss_graph` reads it off a graph; here is what follows from it for a batch of some size. No state.

>>> LossReading(factor=0.125, kind="mean", count=12).multiplier(4)
32.0
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

#: A whole number up to this is a constant of the loss; a larger one may be a count of the batch.
CONSTANT = 16
ODD_FACTOR = (
    "the loss is multiplied by {factor:g}, which tells of the whole batch or says nothing; leave "
    "the factor out (a batch that must not count: private.step with no rows)"
)
SELECTED = (
    "the loss is a mean over the selected tokens (or rows) of the whole batch, so that one example "
    "moves the weight of all others; use private.step, which takes the mean inside each example"
)
UNLIKE = (
    "the terms of this loss are divided by different numbers (labels are left out or weighted, one "
    "is a sum and one a mean), which reach the clip; use private.step, and weight_decay of the "
    "optimizer instead of a penalty on weights"
)


@dataclass(frozen=True)
class LossReading:
    """What lies between a loss and the terms of its examples."""

    factor: float = 1.0
    kind: str = "sum"  # "mean", "labels" (a mean with the weights of labels)
    count: int = 0  # numbers under the mean
    weights: Tensor | None = field(default=None, repr=False)  # of the labels, flat
    refusal: str = ""
    reached: frozenset[int] = frozenset()  # the outputs that it uses, by sequence number
    divisor: float = 0.0  # of a sum: what it was divided by first, which is in the factor too
    is_plain: bool = True  # whether the factor (that divisor apart) is of numbers of Python
    terms: tuple[LossReading, ...] = ()

    @property
    def is_uniform(self) -> bool:
        """Whether all labels have the same weight."""
        if self.terms:
            return all(term.is_uniform for term in self.terms)
        return self.weights is None or bool((self.weights == self.weights[:1]).all())

    @property
    def numbers(self) -> int:
        """How many numbers are under the mean."""
        return self.count if self.weights is None else self.weights.numel()

    def settled(self, size: int) -> LossReading:
        """The same for a batch of this size: sums that were divided by it are means, and terms are
        added up, or refused."""
        if not self.terms:
            return self._as_mean() if self.divisor == size else self
        terms = [term.settled(size) for term in self.terms]
        counts = {term.numbers for term in terms if term.kind != "sum"} - {0}
        terms = [t._as_mean() if {t.divisor} == counts else t for t in terms]
        kind, factor, refusal = _added(terms)
        count = math.gcd(*(t.numbers for t in terms))
        return replace(
            self,
            factor=self.factor * factor,
            kind=kind,
            count=count,
            refusal=self.refusal or refusal or (UNLIKE if count % size else ""),
            terms=(),
        )

    def scaled(self, factor: float) -> LossReading:
        """The same with one more factor on the whole."""
        if not (math.isfinite(factor) and factor > 0.0):
            return replace(self, refusal=self.refusal or ODD_FACTOR.format(factor=factor))
        return replace(self, factor=self.factor * factor)

    def _as_mean(self) -> LossReading:
        return replace(self, kind="mean", factor=self.factor * self.divisor, divisor=0.0)

    def multiplier(self, size: int) -> float | Tensor:
        """What turns ∂L/∂output_i into ∂ℓ_i/∂output_i for a batch of this size: 1/(s·r_i)."""
        if self.kind == "labels" and self.weights is not None:
            own = self.weights.reshape(size, -1).sum(1)
            return torch.where(own > 0, own.sum() / own, 0.0) / self.factor
        return (size if self.kind == "mean" else 1) / self.factor

    def by_row(self, grad: Tensor) -> Tensor:
        """∂ℓ_i/∂output_i for every row, of ∂L/∂output."""
        by, wide = self.multiplier(len(grad)), grad.detach()
        wide = wide.float() if wide.dtype in (torch.float16, torch.bfloat16) else wide
        if isinstance(by, Tensor):
            by = by.to(wide).reshape(-1, *[1] * (wide.dim() - 1))
        return wide * by

    def refused(self, size: int) -> str:
        """Why the loss of a batch of this size is refused, if it is."""
        return self.refusal or (SELECTED if self.numbers % size else "")


def _added(terms: list[LossReading]) -> tuple[str, float, str]:
    """Kind and factor of a sum of terms, and why it is refused, if it is.

    The factor of a mean is a weight that the user gave it, and stays; as a tensor it may have been
    computed from the batch. That of a sum may be one over a count of the batch, and is taken out;
    beside another sum, a small whole number or one over it is a weight (the −½ of a VAE).
    """
    refusal, own = next((t.refusal for t in terms if t.refusal), ""), 1.0
    whole = all(t.is_uniform for t in terms)
    kinds = {"mean" if t.kind == "labels" else t.kind for t in terms}
    if "sum" in kinds:
        own = max(abs(t.factor) for t in terms)
        weights = [t.factor / own for t in terms]
        is_one = all(math.isclose(w, weights[0]) for w in weights) and weights[0] > 0.0
        is_plain = all(t.is_plain and t.divisor == terms[0].divisor for t in terms)
        whole = whole and (is_one or (is_plain and all(map(_is_constant, weights))))
    if not whole or len(kinds) > 1:
        refusal = refusal or UNLIKE
    elif "mean" in kinds and not all(t.is_plain for t in terms):
        refusal = refusal or (
            "a term of this loss is multiplied by a tensor, which may have been computed from the "
            "whole batch; give its weight as a number, float(weight), if it was not"
        )
    return kinds.pop(), own, refusal


def _is_constant(weight: float) -> bool:
    """Whether a weight of at most 1 is one over a small whole number."""
    turned = 1.0 / abs(weight) if weight else math.inf
    return turned <= CONSTANT and math.isclose(turned, round(turned))
