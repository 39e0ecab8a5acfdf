"""Norms of weights: the l_p norm of the sizes of a vector's parts, and what follows from p alone.

    parts                  sizes s                         norm ‖s‖_p, 1 ≤ p ≤ ∞
    Entries()              |w_i|                           l_p
    Groups(labels)         ‖w_g‖₂ of every group           l_{2,p}: p = 1 makes whole groups zero
    SingularValues(m, n)   those of w as an m × n matrix   Schatten: p = 1 nuclear, p = ∞ operator

In all three ‖s‖₂ is the Euclidean norm, and ⟨x, y⟩ ≤ ⟨s(x), s(y)⟩, with equality for one x of any
sizes with the directions of y (Cauchy–Schwarz in a group; von Neumann's trace inequality). So the
dual of ‖·‖_p is ‖·‖_q, q = p/(p−1), of the same parts; linear minimisation, projection on a ball
and the maps ∇ψ, ∇ψ* below are those of l_p on the sizes, directions kept (for matrices: Lewis
1995); and ‖·‖_r ≤ k^{1/r−1/p}‖·‖_p for r ≤ p and k parts. Between norms of different parts the way
leads over the Euclidean one (`times`).

**Regularity.** For r ≥ 2, ‖·‖_r² is 2(r−1)-smooth in ‖·‖_r. Groups (entries are groups of one): for
S(t) = Σ a_g^r, a_g = ‖x_g + t·h_g‖, S'' ≤ r(r−1)Σ a_g^{r−2}‖h_g‖², and (S^{2/r})'' ≤
(2/r)S^{2/r−1}S'' since 2/r ≤ 1; Hölder with r/(r−2) and r/2 leaves 2(r−1)‖h‖_r². Matrices:
‖X+Y‖² + ‖X−Y‖² ≤ 2‖X‖² + 2(r−1)‖Y‖² (Ball, Carlen, Lieb 1994) says that
t → ‖X + tY‖² − (r−1)t²‖Y‖² is midpoint concave, hence concave. By duality ψ = ‖·‖_p²/(2(p−1)) is
1-strongly convex in ‖·‖_p for 1 < p ≤ 2, with ψ* = ((p−1)/2)‖·‖_q². No state.

>>> group = Norm(1.0, Groups(("a", "a", "b")))
>>> group(np.array([3.0, 4.0, -2.0])), group.dual(np.array([3.0, 4.0, -2.0]))
(7.0, 5.0)
>>> nuclear = Norm(1.0, SingularValues(2, 2))
>>> round(nuclear(np.array([1.0, 2.0, 2.0, 4.0])), 9)                    # of rank one
5.0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noshuffle.errors import InvalidInput, instance_of, whole

Array = NDArray[np.float64]
#: Puts new sizes (they may be negative) to the directions of the vector that was split.
Join = Callable[[Array], Array]


class Decomposition:
    """How a vector is seen as parts with sizes."""

    def count(self, d: int) -> int:
        """How many parts a vector of d numbers has; refuses a d that does not fit."""
        return d

    def sizes(self, x: Array) -> Array:
        """Sizes along the last axis, of one vector or of rows."""
        return np.abs(x)

    def split(self, x: Array) -> tuple[Array, Join]:
        """Sizes of one vector, and how to put others in their place."""
        return np.abs(x), lambda sizes: np.sign(x) * sizes

    def normal_size(self, order: float) -> float:
        """(E size^order)^{1/order} of the largest part of a standard normal vector, or above it."""
        return _chi(1, order)

    def cone(self, r: float, count: int, d: int, draws: Any) -> Array:
        """`count` vectors of density ∝ exp(−Σ sizes^r), up to a factor each."""
        self.count(d)
        return np.asarray(
            np.where(draws.random((count, d)) < 0.5, -1.0, 1.0)
            * draws.standard_gamma(1 / r, (count, d)) ** (1 / r)
        )


@dataclass(frozen=True)
class Entries(Decomposition):
    """Every entry is a part."""


@dataclass(frozen=True)
class Groups(Decomposition):
    """Entries with the same label are a part; one label for each entry."""

    labels: tuple[Hashable, ...]

    def __post_init__(self) -> None:
        if not len(self.labels):
            raise InvalidInput("groups need one label for each entry, got none")
        object.__setattr__(self, "labels", tuple(self.labels))

    @cached_property
    def _order(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The group of every entry, entries in the order of their groups, where each begins."""
        numbers = {label: i for i, label in enumerate(dict.fromkeys(self.labels))}
        codes = np.array([numbers[label] for label in self.labels])
        lengths = np.bincount(codes)
        return codes, np.argsort(codes, kind="stable"), np.cumsum(lengths) - lengths

    def count(self, d: int) -> int:
        if d != len(self.labels):
            raise InvalidInput(f"groups have labels for {len(self.labels)} entries, got {d}")
        return len(self._order[2])

    def sizes(self, x: Array) -> Array:
        self.count(x.shape[-1])
        _, order, starts = self._order
        return np.asarray(np.sqrt(np.add.reduceat(np.square(x[..., order]), starts, axis=-1)))

    def split(self, x: Array) -> tuple[Array, Join]:
        sizes = self.sizes(x)
        unit = x / np.where(sizes > 0, sizes, 1.0)[self._order[0]]
        return sizes, lambda new: unit * new[self._order[0]]

    def normal_size(self, order: float) -> float:
        return _chi(int(np.bincount(self._order[0]).max()), order)

    def cone(self, r: float, count: int, d: int, draws: Any) -> Array:
        self.count(d)
        out = draws.standard_normal((count, d))
        lengths = self.sizes(out)
        for g, size in enumerate(np.bincount(self._order[0])):  # ‖w_g‖^r ~ Gamma(d_g/r)
            lengths[:, g] = draws.standard_gamma(size / r, count) ** (1 / r) / lengths[:, g]
        return np.asarray(out * lengths[:, self._order[0]])


@dataclass(frozen=True)
class SingularValues(Decomposition):
    """The vector is a matrix of so many rows and columns, row after row."""

    rows: int
    columns: int

    def __post_init__(self) -> None:
        whole(rows=self.rows, columns=self.columns)

    def count(self, d: int) -> int:
        if d != self.rows * self.columns:
            raise InvalidInput(f"a matrix of {self.rows} × {self.columns} has not {d} entries")
        return min(self.rows, self.columns)

    def sizes(self, x: Array) -> Array:
        self.count(x.shape[-1])
        matrices = x.reshape(*x.shape[:-1], self.rows, self.columns)
        return np.asarray(np.linalg.svd(matrices, compute_uv=False), dtype=np.float64)

    def split(self, x: Array) -> tuple[Array, Join]:
        self.count(len(x))
        left, sizes, right = np.linalg.svd(x.reshape(self.rows, self.columns), full_matrices=False)
        return sizes, lambda new: np.asarray((left * new) @ right).ravel()

    def normal_size(self, order: float) -> float:
        return math.sqrt(self.rows) + math.sqrt(self.columns)

    def cone(self, r: float, count: int, d: int, draws: Any) -> Array:
        if r == 2:
            return np.asarray(draws.standard_normal((count, d)))
        raise InvalidInput(
            f"noise of the Schatten norm of order {r:g} has no exact sampler; use noise='normal'"
        )


def _chi(d: int, order: float) -> float:
    """(E χ_d^order)^{1/order}."""
    from scipy.special import gammaln

    log = gammaln((d + order) / 2) - gammaln(d / 2)
    return float(math.sqrt(2) * math.exp(log / order))


ENTRIES = Entries()


@dataclass(frozen=True)
class Norm:
    """The norm of order p of a vector's parts."""

    p: float
    parts: Decomposition = ENTRIES

    def __post_init__(self) -> None:
        instance_of(Real, **{"the order of a norm": self.p})
        if not self.p >= 1:  # also refuses NaN
            raise InvalidInput(f"the order of a norm must be at least 1, got {self.p!r}")
        instance_of(Decomposition, parts=self.parts)

    @property
    def q(self) -> float:
        """The order of the dual norm."""
        if math.isinf(self.p):
            return 1.0
        return self.p / (self.p - 1) if self.p > 1 else math.inf

    @property
    def dual(self) -> Norm:
        return Norm(self.q, self.parts)

    def __call__(self, x: Array) -> float:
        return float(self.rows(x[None])[0])

    def rows(self, x: Array) -> Array:
        """The norm of every row."""
        sizes = self.parts.sizes(x)
        if self.p in (1, 2, math.inf):
            return np.asarray(np.linalg.norm(sizes, ord=self.p, axis=-1))
        most = np.max(sizes, axis=-1, keepdims=True)  # powers of numbers in [0, 1] do not overflow
        unit = np.where((most > 0) & (most < math.inf), most, 1.0)
        return np.asarray(unit[..., 0] * np.linalg.norm(sizes / unit, ord=self.p, axis=-1))

    def times(self, other: Norm, d: int) -> float:
        """The least C known with other(x) ≤ C·self(x) for all x of d numbers."""
        if self.parts != other.parts and 2 not in (self.p, other.p):
            return self.times(_EUCLIDEAN, d) * _EUCLIDEAN.times(other, d)
        # The Euclidean norm is that of order 2 of any parts.
        k = (other if self.p == 2 else self).parts.count(d)
        return float(k ** max(0.0, 1 / other.p - 1 / self.p))

    def regular(self, d: int) -> Norm:
        """The norm of order max(p, 1 + 1/ln k): ψ is strongly convex, ‖·‖_p at most e times it."""
        k = self.parts.count(d)
        return Norm(max(self.p, 1 + 1 / max(math.log(k), 1.0)), self.parts)

    def spread(self, d: int) -> float:
        """A bound on E‖z‖ of a standard normal z, by moments: k^{1/s}(E size^s)^{1/s}, s ≤ p."""
        k = self.parts.count(d)
        s = min(self.p, max(2.0, 2 * math.log(k)))
        over = k ** max(0.0, 1 / self.p - 1 / 2) * math.sqrt(d)
        by_moments = k ** (1 / s) * self.parts.normal_size(s) if self.p >= 2 else math.inf
        return float(min(over, by_moments))

    def gradient(self, x: Array) -> Array:
        """∇ψ(x), ψ = ‖·‖_p²/(2(p−1)), 1 < p ≤ 2; on sizes ‖s‖_p^{2−p}s^{p−1}/(p−1)."""
        return self._power_map(x, self.p, 1 / (self.p - 1))

    def dual_map(self, y: Array) -> Array:
        """∇ψ*(y), the inverse of `gradient`; on sizes (p−1)‖s‖_q^{2−q}s^{q−1}."""
        return self._power_map(y, self.q, self.p - 1)

    def _power_map(self, x: Array, order: float, factor: float) -> Array:
        if self.p == 2:
            return x
        sizes, join = self.parts.split(x)
        largest = float(np.max(sizes))
        if largest == 0:
            return np.zeros_like(x)
        scaled = sizes / largest  # degree one overall, so the largest size factors out
        norm = float(np.sum(scaled**order)) ** (1 / order)
        return join(factor * largest * norm ** (2 - order) * scaled ** (order - 1))


_EUCLIDEAN = Norm(2.0)
