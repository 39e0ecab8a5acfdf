"""Sets of weights in numpy: projection, linear minimisation, and the vertices of polytopes.

    set            project              lmo (argmin ⟨g, v⟩)              vertices
    Everywhere     identity             none (unbounded)                 none
    Ball           rescale              −R g/‖g‖                         none
    LpBall         none (1 < p < 2)     dual exponents, see `lmo`        none
    Box            clamp                −R sign(g)                       corners (not listed)
    L1Ball         sort-threshold       −R sign(g_i) e_i, i = argmax     ±R e_i, 2d of them
    Simplex        sort-threshold       R e_i, i = argmin                R e_i, d of them

`radius` is the largest norm in the set's own `order`; `scores(g)` lists ⟨v, g⟩ over the vertices
without building them. Everything here is post-processing: no privacy rests on it but `radius`.

>>> L1Ball(2.0).lmo(np.array([0.5, -3.0]))
array([0., 2.])
>>> Ball(1.0).project(np.array([3.0, 4.0]))
array([0.6, 0.8])
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from noshuffle.convex.losses import Array
from noshuffle.errors import InvalidInput, Unsupported, positive


class Domain:
    """A closed convex set that holds the origin (Simplex: that does not)."""

    order: ClassVar[float] = 2.0
    is_polytope: ClassVar[bool] = False

    @property
    def size(self) -> float:
        """The largest norm of the set in its own order."""
        return float(getattr(self, "radius", math.inf))

    @property
    def norm_order(self) -> float:
        """Order of the norm in which `size` is measured."""
        return self.order

    def euclidean(self, d: int) -> float:
        """The largest Euclidean norm of the set in d dimensions (orders 1 to 2: `size` itself)."""
        return self.size

    def start(self, d: int) -> Array:
        """A point of the set, chosen without data."""
        return np.zeros(d)

    def project(self, v: Array) -> Array:
        raise Unsupported(f"{type(self).__name__} has no projection here; use Ball or L1Ball")

    def lmo(self, g: Array) -> Array:
        raise Unsupported(f"{type(self).__name__} has no linear minimiser; use a bounded set")

    def scores(self, g: Array) -> Array:
        raise Unsupported(f"{type(self).__name__} has no list of vertices; use L1Ball or Simplex")

    def vertex(self, index: int, d: int) -> Array:
        raise Unsupported(f"{type(self).__name__} has no list of vertices; use L1Ball or Simplex")


@dataclass(frozen=True)
class Everywhere(Domain):
    """No constraint."""

    def project(self, v: Array) -> Array:
        return v


@dataclass(frozen=True)
class Ball(Domain):
    """‖w‖₂ ≤ radius."""

    radius: float

    def __post_init__(self) -> None:
        positive(radius=self.radius)

    def project(self, v: Array) -> Array:
        norm = float(np.linalg.norm(v))
        return v if norm <= self.radius else v * (self.radius / norm)

    def lmo(self, g: Array) -> Array:
        norm = float(np.linalg.norm(g))
        return -g * (self.radius / norm) if norm > 0 else np.zeros_like(g)


@dataclass(frozen=True)
class LpBall(Domain):
    """‖w‖_p ≤ radius, 1 < p ≤ 2.

    ⟨g, v⟩ ≥ −R‖g‖_q (Hölder), with equality at v_i = −R sign(g_i)(|g_i|/‖g‖_q)^{q−1}.
    """

    radius: float
    p: float

    def __post_init__(self) -> None:
        positive(radius=self.radius)
        if not 1 < self.p <= 2:
            raise InvalidInput(f"p must lie in (1, 2], got {self.p!r}; use L1Ball for p = 1")

    @property
    def norm_order(self) -> float:
        return self.p

    def project(self, v: Array) -> Array:
        return Ball(self.radius).project(v) if self.p == 2 else super().project(v)

    def lmo(self, g: Array) -> Array:
        q = self.p / (self.p - 1)
        largest = float(np.max(np.abs(g)))
        if largest == 0:
            return np.zeros_like(g)
        scaled = np.abs(g) / largest  # powers of numbers in [0, 1] cannot overflow
        weights = (scaled / float(np.sum(scaled**q)) ** (1 / q)) ** (q - 1)
        return np.asarray(-self.radius * np.sign(g) * weights)


@dataclass(frozen=True)
class Box(Domain):
    """|w_i| ≤ radius for every coordinate."""

    radius: float
    order: ClassVar[float] = math.inf

    def __post_init__(self) -> None:
        positive(radius=self.radius)

    def euclidean(self, d: int) -> float:
        return self.radius * math.sqrt(d)

    def project(self, v: Array) -> Array:
        return np.clip(v, -self.radius, self.radius)

    def lmo(self, g: Array) -> Array:
        return -self.radius * np.sign(g)


@dataclass(frozen=True)
class L1Ball(Domain):
    """‖w‖₁ ≤ radius; vertex i < d is +R e_i, vertex d + i is −R e_i."""

    radius: float
    order: ClassVar[float] = 1.0
    is_polytope: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive(radius=self.radius)

    def project(self, v: Array) -> Array:
        sizes = np.abs(v)
        if float(sizes.sum()) <= self.radius:
            return v
        return np.asarray(np.sign(v) * np.maximum(sizes - _threshold(sizes, self.radius), 0.0))

    def lmo(self, g: Array) -> Array:
        i = int(np.argmax(np.abs(g)))
        out = np.zeros_like(g)
        out[i] = -self.radius * np.sign(g[i])
        return out

    def scores(self, g: Array) -> Array:
        return self.radius * np.concatenate([g, -g])

    def vertex(self, index: int, d: int) -> Array:
        out = np.zeros(d)
        out[index % d] = self.radius if index < d else -self.radius
        return out


@dataclass(frozen=True)
class Simplex(Domain):
    """w ≥ 0, Σw = radius."""

    radius: float = 1.0
    order: ClassVar[float] = 1.0
    is_polytope: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive(radius=self.radius)

    def start(self, d: int) -> Array:
        return np.full(d, self.radius / d)

    def project(self, v: Array) -> Array:
        return np.asarray(np.maximum(v - _threshold(v, self.radius), 0.0))

    def lmo(self, g: Array) -> Array:
        return self.vertex(int(np.argmin(g)), len(g))

    def scores(self, g: Array) -> Array:
        return self.radius * g

    def vertex(self, index: int, d: int) -> Array:
        out = np.zeros(d)
        out[index] = self.radius
        return out


def _threshold(v: Array, total: float) -> float:
    """The τ with Σ (v_i − τ)₊ = total (Held, Wolfe, Crowder 1974)."""
    ordered = np.sort(v)[::-1]
    candidates = (np.cumsum(ordered) - total) / np.arange(1, len(v) + 1)
    last = int(np.nonzero(ordered > candidates)[0][-1])
    return float(candidates[last])
