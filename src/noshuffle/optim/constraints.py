"""Convex sets: exact projection, linear minimisation, and the vertices of polytopes.

The quadratic FTRL step over a convex set K is a projection,

    argmin_{θ∈K} ⟨ℓ,θ⟩ + ½‖θ−θ₀‖²  =  Π_K(θ₀ − ℓ),

and Frank–Wolfe methods minimise a linear function over K. All of it is post-processing of released
values; privacy rests on the radius alone, where a bound of a loss depends on it.

    set          project            lmo (argmin ⟨g, v⟩)             vertices
    Everywhere   identity           none (unbounded)                none
    L2Ball       rescale            −R g/‖g‖                        none
    LpBall       roots (`lp_ball`)  dual exponents                  none
    NormBall     on sizes of parts  on sizes (`norm_ball`)          none
    Box          clamp              low or high by the sign of g    corners (not listed)
    L1Ball       sort-threshold     −R sign(g_i) e_i, i = argmax    ±R e_i, 2d of them
    Simplex      sort-threshold     R e_i, i = argmin               R e_i, d of them

`project` takes a list of tensors (all parameters of one group), seen as a single vector: an l2 ball
bounds their joint norm. It takes a vector of numpy too, as everything else here does. Simplex and
l1 ball use the sorting form of Held, Wolfe and Crowder (1974): the projection is (u − τ)₊ with the
one τ for which the entries add up to the total. Nothing is kept between calls.

>>> l2_ball(1.0).project([torch.tensor([3.0, 4.0])])[0]
tensor([0.6000, 0.8000])
>>> simplex().project(np.array([2.0, 0.0, 0.0]))
array([1., 0., 0.])
>>> L1Ball(2.0).lmo(np.array([0.5, -3.0]))
array([0., 2.])
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noshuffle.errors import InvalidInput, Unsupported, instance_of, positive
from noshuffle.optim.norms import Norm

Array = NDArray[np.float64]


class Constraint:
    """A closed convex set; `nearest` is what a set of its own must have.

    `size` is the largest `norm` of the set, `reach(norm, d)` the largest other norm in d
    dimensions (a number is the order of an l_p norm), `euclidean(d)` that of order 2. `inexact`
    bounds the distance from the exact projection, relative to the point and the set, where one is
    found by iteration.
    """

    norm_order: float = 2.0
    is_polytope: ClassVar[bool] = False
    inexact: float = 0.0

    @property
    def norm(self) -> Norm:
        return Norm(self.norm_order)

    @property
    def size(self) -> float:
        return math.inf

    def reach(self, norm: Norm | float, d: int) -> float:
        """‖v‖_order ≤ d^{1/order − 1/p}·‖v‖_p for order < p, and ‖v‖_p beyond."""
        other = norm if isinstance(norm, Norm) else Norm(norm)
        return self.size * self.norm.times(other, d)

    def euclidean(self, d: int) -> float:
        return self.reach(2.0, d)

    def start(self, d: int) -> Array:
        """A point chosen without data: the origin, which most sets hold."""
        return np.zeros(d)

    @overload
    def project(self, values: Array) -> Array: ...
    @overload
    def project(self, values: Sequence[Tensor]) -> list[Tensor]: ...
    def project(self, values: Array | Sequence[Tensor]) -> Array | list[Tensor]:
        """The nearest point of the set, as new values."""
        if not isinstance(values, np.ndarray):
            return self.nearest(values)
        vector = values if values.flags.writeable else values.copy()  # torch warns otherwise
        return np.asarray(self.nearest([torch.from_numpy(vector)])[0].numpy())

    def nearest(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Π_K of the tensors seen as one vector."""
        raise Unsupported(f"{type(self).__name__} has no projection here; use Ball or L1Ball")

    def lmo(self, g: Array) -> Array:
        """argmin_{v∈K} ⟨g, v⟩."""
        raise Unsupported(f"{type(self).__name__} has no linear minimiser; use a bounded set")

    def scores(self, g: Array) -> Array:
        """⟨v, g⟩ of every vertex, without building them."""
        raise Unsupported(f"{type(self).__name__} has no list of vertices; use L1Ball or Simplex")

    def vertex(self, index: int, d: int) -> Array:
        """The vertex with this index."""
        raise Unsupported(f"{type(self).__name__} has no list of vertices; use L1Ball or Simplex")


@dataclass(frozen=True)
class Everywhere(Constraint):
    """No constraint."""

    def nearest(self, values: Sequence[Tensor]) -> list[Tensor]:
        return list(values)


@dataclass(frozen=True)
class Sized(Constraint):
    """A ball around zero."""

    radius: float

    def __post_init__(self) -> None:
        positive(radius=self.radius)

    @property
    def size(self) -> float:
        return self.radius


@dataclass(frozen=True)
class L2Ball(Sized):
    """‖θ‖₂ ≤ radius, over all tensors together."""

    def nearest(self, values: Sequence[Tensor]) -> list[Tensor]:
        norm = joint_norm(values)
        if norm <= self.radius:
            return list(values)
        return [v * (self.radius / norm) for v in values]

    def lmo(self, g: Array) -> Array:
        norm = float(np.linalg.norm(g))
        return -g * (self.radius / norm) if norm > 0 else np.zeros_like(g)


@dataclass(frozen=True)
class Box(Constraint):
    """low ≤ θ_i ≤ high for every coordinate."""

    low: float
    high: float
    norm_order = math.inf

    def __post_init__(self) -> None:
        instance_of(numbers.Real, low=self.low, high=self.high)
        if not self.low <= self.high:  # also refuses NaN
            raise InvalidInput(f"box needs low <= high, got low={self.low!r}, high={self.high!r}")

    @property
    def size(self) -> float:
        return max(abs(self.low), abs(self.high))

    def nearest(self, values: Sequence[Tensor]) -> list[Tensor]:
        return [v.clamp(self.low, self.high) for v in values]

    def lmo(self, g: Array) -> Array:
        if not math.isfinite(self.size):
            return super().lmo(g)
        ends = np.where(g > 0, self.low, self.high)
        return np.where(g == 0, min(max(0.0, self.low), self.high), ends)


@dataclass(frozen=True)
class Simplex(Constraint):
    """θ_i ≥ 0 and Σ θ_i = total, over all tensors together."""

    total: float = 1.0
    norm_order = 1.0
    is_polytope = True

    def __post_init__(self) -> None:
        positive(total=self.total)

    @property
    def size(self) -> float:
        return self.total

    def start(self, d: int) -> Array:
        return np.full(d, self.total / d)

    def nearest(self, values: Sequence[Tensor]) -> list[Tensor]:
        tau = simplex_threshold(flatten(values), total=self.total)
        return [(v.double() - tau).clamp_min(0.0).to(v.dtype) for v in values]

    def lmo(self, g: Array) -> Array:
        return self.vertex(int(np.argmin(g)), len(g))

    def scores(self, g: Array) -> Array:
        return self.total * g

    def vertex(self, index: int, d: int) -> Array:
        out = np.zeros(d)
        out[index] = self.total
        return out


@dataclass(frozen=True)
class L1Ball(Sized):
    """‖θ‖₁ ≤ radius, over all tensors together; vertex i < d is +R e_i, vertex d + i is −R e_i."""

    norm_order = 1.0
    is_polytope = True

    def nearest(self, values: Sequence[Tensor]) -> list[Tensor]:
        sizes = flatten(values).abs()
        if float(sizes.sum()) <= self.radius:
            return list(values)
        tau = simplex_threshold(sizes, total=self.radius)
        return [shrink(v.double(), tau).to(v.dtype) for v in values]

    def lmo(self, g: Array) -> Array:
        i = int(np.argmax(np.abs(g)))
        return self.vertex(i if g[i] <= 0 else len(g) + i, len(g))

    def scores(self, g: Array) -> Array:
        return self.radius * np.concatenate([g, -g])

    def vertex(self, index: int, d: int) -> Array:
        out = np.zeros(d)
        out[index % d] = self.radius if index < d else -self.radius
        return out


def joint_norm(values: Sequence[Tensor]) -> float:
    """Euclidean norm of all tensors together, added up in float64."""
    return math.sqrt(sum(float(v.double().square().sum()) for v in values))


def flatten(values: Sequence[Tensor]) -> Tensor:
    """All tensors as one float64 vector."""
    return torch.cat([v.detach().double().reshape(-1) for v in values])


def unflatten(vector: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
    """The same vector as tensors of the shapes and types of these."""
    parts = torch.split(vector, [v.numel() for v in values])
    return [part.reshape(v.shape).to(v) for part, v in zip(parts, values)]


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


l2_ball, l1_ball, box, simplex = L2Ball, L1Ball, Box, Simplex
