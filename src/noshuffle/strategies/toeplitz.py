"""Square-root, banded and banded-inverse Toeplitz strategies.

    sqrt_toeplitz     c(x) = (1−αx)^{−1/2} (1−βx)^{−1/2}, the root of the workload itself: α = 1,
                      β = 0 is the prefix sum (Fichtenberger–Henzinger–Upadhyay, arXiv 2202.11205);
                      with `bands` only the first coefficients are kept (BSR, arXiv 2405.13763)
    banded            any p coefficients of c: C has p bands
    banded_inverse    any p coefficients of 1/c: C⁻¹ has p bands; by default those of (1−x)^{1/2}
                      (BISR, arXiv 2505.12128)

State kept: a banded C remembers its last p−1 outputs (x_t = (z_t − Σ_{i≥1} c_i x_{t−i}) / c_0). A
banded inverse and the full square root remember nothing, as past draws can be made again:
y_t = Σ_i d_i z_{t−i} over p, or over all t+1, of them.

>>> sqrt_toeplitz().coefficients(4)
array([1.    , 0.5   , 0.375 , 0.3125])
>>> banded_inverse(3).noising_coefficients(4)
array([ 1.   , -0.5  , -0.125,  0.   ])
>>> sqrt_toeplitz(4).buffers(1000), banded_inverse(4).buffers(1000)
(3, 0)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from noshuffle.errors import InvalidInput, below_one, number_tuple, unit_rate, whole
from noshuffle.strategies.base import ToeplitzStrategy, padded, reciprocal
from noshuffle.strategies.recipe import Array, FeedForward, Recipe, Recursive


def root_coefficients(n: int, *, sign: int, decay: float = 1.0, momentum: float = 0.0) -> Array:
    """First n coefficients of ((1−αx)(1−βx))^{sign/2}, sign = ±1.

    With h = sign/2, p = α+β and q = αβ, f = (1−px+qx²)^h solves (1−px+qx²) f' = h (2qx−p) f;
    comparing coefficients of x^{i−1} gives the three-term recurrence

        i f_i = p (i−1−h) f_{i−1} − q (i−2−2h) f_{i−2},

    and for β = 0 the product f_i = α f_{i−1} (i−1−h) / i.
    """
    h = 0.5 * sign
    if momentum == 0.0:
        index = np.arange(1, n)
        return np.concatenate([[1.0], np.cumprod(decay * ((index - 1 - h) / index))])
    p, q = decay + momentum, decay * momentum
    out = [1.0, -h * p]
    for i in range(2, n):
        out.append((p * (i - 1 - h) * out[-1] - q * (i - 2 - 2 * h) * out[-2]) / i)
    return np.array(out[:n])


def _recursive(c: Array, scale: tuple[float, ...]) -> Recursive:
    """Solve Σ_i c_i x_{t−i} = z_t for x_t."""
    weights = np.concatenate([[1.0 / c[0]], -c[1:] / c[0]])
    return Recursive(weights=tuple(weights.tolist()), scale=scale)


def _checked(coefficients: Iterable[float]) -> tuple[float, ...]:
    values = number_tuple(coefficients=coefficients)
    if not values:
        raise InvalidInput("coefficients must hold at least one number, got none")
    if not np.all(np.isfinite(values)):
        raise InvalidInput("coefficients must be finite numbers; got one that is not")
    if values[0] <= 0:
        raise InvalidInput(f"the first coefficient must be > 0, got {values[0]!r}")
    return values


@dataclass(frozen=True, kw_only=True)
class SqrtToeplitz(ToeplitzStrategy):
    """The square root of the workload; `bands` = 0 keeps every coefficient."""

    bands: int = 0
    momentum: float = 0.0
    decay: float = 1.0
    name: ClassVar[str] = "sqrt_toeplitz"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(at_least=0, bands=self.bands)
        unit_rate(decay=self.decay)
        below_one(momentum=self.momentum)

    def _root(self, n: int, sign: int) -> Array:
        return root_coefficients(n, sign=sign, decay=self.decay, momentum=self.momentum)

    def coefficients(self, n: int) -> Array:
        kept = min(self.bands or n, n)
        return padded(self._root(kept, -1), n)

    def noising_coefficients(self, n: int) -> Array:
        if self.bands == 0 or self.bands >= n:
            return self._root(n, 1)
        return reciprocal(self._root(self.bands, -1), n)

    def recipe(self, n: int) -> Recipe:
        if self.bands:
            return _recursive(self._root(min(self.bands, n), -1), self.step_scale(n))
        weights = tuple(self._root(n, 1).tolist())
        return FeedForward(weights=weights, scale=self.step_scale(n))

    def buffers(self, n: int) -> int:
        return min(self.bands, n) - 1 if self.bands else 0

    def words(self) -> str:
        kept = f", first {self.bands} bands" if self.bands else ""
        return f"square root of the workload as a Toeplitz matrix{kept}"


@dataclass(frozen=True, kw_only=True)
class _FewBands(ToeplitzStrategy):
    """p coefficients, of c or of 1/c: the first > 0, any sign after it."""

    bands: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "bands", _checked(self.bands))


@dataclass(frozen=True, kw_only=True)
class Banded(_FewBands):
    """C = T(c) with the given coefficients: p bands, p−1 buffers."""

    name: ClassVar[str] = "banded"

    def coefficients(self, n: int) -> Array:
        return padded(np.array(self.bands), n)

    def noising_coefficients(self, n: int) -> Array:
        return reciprocal(np.array(self.bands[:n]), n)

    def recipe(self, n: int) -> Recipe:
        return _recursive(np.array(self.bands[:n]), self.step_scale(n))

    def buffers(self, n: int) -> int:
        return min(len(self.bands), n) - 1

    def words(self) -> str:
        return f"banded Toeplitz noise, {len(self.bands)} bands"


@dataclass(frozen=True, kw_only=True)
class BandedInverse(_FewBands):
    """C⁻¹ = T(d) with p coefficients: noise is a moving sum of draws that are made again."""

    name: ClassVar[str] = "banded_inverse"

    def coefficients(self, n: int) -> Array:
        return reciprocal(np.array(self.bands[:n]), n)

    def noising_coefficients(self, n: int) -> Array:
        return padded(np.array(self.bands), n)

    def recipe(self, n: int) -> Recipe:
        return FeedForward(weights=self.bands[:n], scale=self.step_scale(n))

    def buffers(self, n: int) -> int:
        return 0

    def words(self) -> str:
        return f"banded inverse Toeplitz noise, {len(self.bands)} draws a step"


def sqrt_toeplitz(
    bands: int | None = None,
    *,
    momentum: float = 0.0,
    decay: float = 1.0,
    gains: tuple[float, ...] = (),
    normalized: int = 0,
) -> SqrtToeplitz:
    """Square root of the prefix sum, or of momentum β and weight decay α; `bands` truncates it."""
    if bands is not None:
        whole(bands=bands)
    return SqrtToeplitz(
        bands=bands or 0, momentum=momentum, decay=decay, gains=gains, normalized=normalized
    )


def banded(
    coefficients: Iterable[float], *, gains: tuple[float, ...] = (), normalized: int = 0
) -> Banded:
    """C = T(coefficients): first > 0, any sign after it."""
    return Banded(bands=coefficients, gains=gains, normalized=normalized)  # type: ignore[arg-type]


def banded_inverse(
    bands: int | None = None,
    *,
    coefficients: Iterable[float] | None = None,
    gains: tuple[float, ...] = (),
    normalized: int = 0,
) -> BandedInverse:
    """C⁻¹ with the first `bands` coefficients of (1−x)^{1/2}, or with the coefficients given."""
    if (bands is None) == (coefficients is None):
        raise InvalidInput("give either bands or coefficients to banded_inverse, exactly one")
    if bands is not None:
        whole(bands=bands)
        coefficients = root_coefficients(bands, sign=1).tolist()
    assert coefficients is not None
    return BandedInverse(bands=coefficients, gains=gains, normalized=normalized)  # type: ignore[arg-type]
