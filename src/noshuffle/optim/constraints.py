"""Constraint sets for FTRL, each with its exact Euclidean projection.

The quadratic FTRL step over a convex set K is a projection,

    argmin_{θ∈K} ⟨ℓ,θ⟩ + ½‖θ−θ₀‖²  =  Π_K(θ₀ − ℓ),

so a set is a frozen record with one method, `project`. It treats the list of tensors that it is
given (all parameters of one group) as a single vector: an l2 ball bounds their joint norm.
Projections are post-processing of released values and never touch the guarantee.

Simplex and l1 ball use the sorting form of Held, Wolfe and Crowder (1974): the projection is
(u − τ)₊ with the one τ for which the entries add up to the total. Nothing is kept between calls.

>>> import torch
>>> l2_ball(1.0).project([torch.tensor([3.0, 4.0])])[0]
tensor([0.6000, 0.8000])
>>> simplex().project([torch.tensor([2.0, 0.0, 0.0])])[0]
tensor([1., 0., 0.])
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from noshuffle.errors import InvalidInput, instance_of, positive


class Constraint:
    """A closed convex set; `project` returns the nearest point of it, as new tensors."""

    def project(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Π_K of the tensors seen as one vector."""
        raise NotImplementedError


@dataclass(frozen=True)
class L2Ball(Constraint):
    """‖θ‖₂ ≤ radius, over all tensors together."""

    radius: float

    def __post_init__(self) -> None:
        positive(radius=self.radius)

    def project(self, values: Sequence[Tensor]) -> list[Tensor]:
        norm = joint_norm(values)
        if norm <= self.radius:
            return list(values)
        return [v * (self.radius / norm) for v in values]


@dataclass(frozen=True)
class Box(Constraint):
    """low ≤ θ_i ≤ high for every coordinate."""

    low: float
    high: float

    def __post_init__(self) -> None:
        instance_of(numbers.Real, low=self.low, high=self.high)
        if not self.low <= self.high:  # also refuses NaN
            raise InvalidInput(f"box needs low <= high, got low={self.low!r}, high={self.high!r}")

    def project(self, values: Sequence[Tensor]) -> list[Tensor]:
        return [v.clamp(self.low, self.high) for v in values]


@dataclass(frozen=True)
class Simplex(Constraint):
    """θ_i ≥ 0 and Σ θ_i = total, over all tensors together."""

    total: float = 1.0

    def __post_init__(self) -> None:
        positive(total=self.total)

    def project(self, values: Sequence[Tensor]) -> list[Tensor]:
        tau = simplex_threshold(flatten(values), total=self.total)
        return [(v.double() - tau).clamp_min(0.0).to(v.dtype) for v in values]


@dataclass(frozen=True)
class L1Ball(Constraint):
    """‖θ‖₁ ≤ radius, over all tensors together."""

    radius: float

    def __post_init__(self) -> None:
        positive(radius=self.radius)

    def project(self, values: Sequence[Tensor]) -> list[Tensor]:
        sizes = flatten(values).abs()
        if float(sizes.sum()) <= self.radius:
            return list(values)
        tau = simplex_threshold(sizes, total=self.radius)
        return [shrink(v.double(), tau).to(v.dtype) for v in values]


def joint_norm(values: Sequence[Tensor]) -> float:
    """Euclidean norm of all tensors together, added up in float64."""
    return math.sqrt(sum(float(v.double().square().sum()) for v in values))


def flatten(values: Sequence[Tensor]) -> Tensor:
    """All tensors as one float64 vector."""
    return torch.cat([v.detach().double().reshape(-1) for v in values])


def shrink(value: Tensor, threshold: float) -> Tensor:
    """Soft threshold: sign(v)·(|v| − threshold)₊."""
    return value.sign() * (value.abs() - threshold).clamp_min(0.0)


def simplex_threshold(vector: Tensor, *, total: float) -> float:
    """The τ with Σ (u_i − τ)₊ = total.

    Sorted downwards, the entries above τ are the longest prefix whose last entry exceeds
    (prefix sum − total) / prefix length; that quotient is then τ.
    """
    ordered = vector.sort(descending=True).values
    counts = torch.arange(1, len(ordered) + 1, dtype=ordered.dtype, device=ordered.device)
    candidates = (ordered.cumsum(0) - total) / counts
    last = int((ordered > candidates).nonzero()[-1])
    return float(candidates[last])


def l2_ball(radius: float) -> L2Ball:
    """The Euclidean ball around the origin."""
    return L2Ball(radius)


def box(low: float, high: float) -> Box:
    """The same interval for every coordinate."""
    return Box(low, high)


def simplex(total: float = 1.0) -> Simplex:
    """The (scaled) probability simplex."""
    return Simplex(total)


def l1_ball(radius: float) -> L1Ball:
    """The cross-polytope around the origin."""
    return L1Ball(radius)
