"""BLT noise with two scalars per step: one on what is released, one on what is drawn.

    C = diag(a)·T(c)·diag(g),      C⁻¹Z = diag(1/g)·T(1/c)·diag(1/a)·Z

with c of a buffered linear Toeplitz filter with taps (see `blt`), gains g > 0 and draw gains a > 0:
z_r enters the filter as z_r / a_r, at its own step and at every tap, and the noise of step t is
divided by g_t. Gains alone can only reweigh the columns of C (Henzinger–Upadhyay, arXiv
2509.14334); together with draw gains all rows and columns of the filter's matrix are free in scale,
which comes close to the best matrix there is, for no memory beyond the buffers of the filter. This
is no Toeplitz strategy, on purpose: what is proved for T(c)·diag(g) does not hold here.

Sensitivity. For k epochs of b steps in the same order a unit of class j touches the columns j + lb:

    X_{i−L,i} = g_{i−L} g_i P_L[i],     P_L[i] = Σ_s a_{i+s}² c_s c_{s+L}        (s < n − i)
    S² ≤ max_j Σ_{l,m} |X_{j+lb,j+mb}|,    with equality where one sign per epoch makes all X ≥ 0.

All P_{mb} are one product of the Hankel matrix (a_{i+s}²) with the k sequences c_s c_{s+mb}, made
for a few rows at a time: O(n²·k) multiplications, O(n·k) memory, and every number is a plain sum
of products, whose rounding has a simple bound (a Fourier transform would be quicker, but smears
the error of the largest entry over all others).

>>> strategy = two_sided((0.5,), (0.3,), gains=(1.0, 1.0, 2.0), draw_gains=(1.0, 3.0, 1.0))
>>> strategy.encoder(3)
array([[1.  , 0.  , 0.  ],
       [0.9 , 3.  , 0.  ],
       [0.15, 0.3 , 2.  ]])
>>> bool(np.allclose(strategy.noising(3) @ strategy.encoder(3), np.eye(3)))
True
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from noshuffle.errors import InvalidInput, Unsupported, number_tuple, whole
from noshuffle.strategies import gram
from noshuffle.strategies.base import Strategy, dense_size, leading_gains, lower_toeplitz
from noshuffle.strategies.blt import Blt
from noshuffle.strategies.recipe import Array, Buffered, Recipe

#: Longest run, and most work n²·k, for which the products are made.
MOST_STEPS = 2**15
MOST_WORK = 10**11
#: Rows of the Hankel matrix that are worked on together.
_ROWS = 128
#: Unit roundoff of double precision.
_UNIT = 2.0**-53
#: Largest relative allowance for rounding under which a value still counts as attained.
_ATTAINED = 5e-12


@dataclass(frozen=True)
class TwoSidedBlt(Strategy):
    """C = diag(a)·T(C_BLT(x) / S(x^lag))·diag(g); a run is at most as long as its gains.

    Decays, scales, taps and lag are those of `Blt`, with the same limits.
    """

    decays: tuple[float, ...] = ()
    scales: tuple[float, ...] = ()
    taps: tuple[float, ...] = ()
    lag: int = 0
    gains: tuple[float, ...] = ()
    draw_gains: tuple[float, ...] = ()
    name: ClassVar[str] = "blt_two_sided"

    def __post_init__(self) -> None:
        core = Blt(decays=self.decays, scales=self.scales, taps=self.taps, lag=self.lag)
        for field in ("decays", "scales", "taps"):  # sorted, and plain numbers
            object.__setattr__(self, field, getattr(core, field))
        for field in ("gains", "draw_gains"):
            values = number_tuple(**{field: getattr(self, field)})
            object.__setattr__(self, field, values)
            if not all(0 < value < np.inf for value in values):
                raise InvalidInput(f"{field} must be finite numbers > 0; got one that is not")
        if len(self.gains) != len(self.draw_gains) or not self.gains:
            raise InvalidInput(
                "a two-sided blt needs one gain and one draw gain per step, got "
                f"{len(self.gains)} gains and {len(self.draw_gains)} draw gains"
            )

    @property
    def core(self) -> Blt:
        """The filter alone: T(c) without any gains."""
        return Blt(decays=self.decays, scales=self.scales, taps=self.taps, lag=self.lag)

    def gain_values(self, n: int) -> Array:
        """g_0 … g_{n−1}; a run may be shorter than its gains were made for, never longer."""
        whole(steps=n)
        return leading_gains(self.gains, n)

    def draw_gain_values(self, n: int) -> Array:
        """a_0 … a_{n−1}."""
        whole(steps=n)
        return leading_gains(self.draw_gains, n)

    def encoder(self, n: int) -> Array:
        g, a = self.gain_values(n), self.draw_gain_values(n)
        dense_size(n)
        return np.asarray(a[:, None] * lower_toeplitz(self.core.coefficients(n)) * g)

    def noising(self, n: int) -> Array:
        g, a = self.gain_values(n), self.draw_gain_values(n)
        dense_size(n)
        return np.asarray(lower_toeplitz(self.core.noising_coefficients(n)) / g[:, None] / a)

    def noising_rows(self, n: int) -> Iterator[Array]:
        """The rows of `noising(n)`, each up to its diagonal, without the matrix."""
        gains, scale = self.gain_values(n).tolist(), 1.0 / self.draw_gain_values(n)
        backwards = np.ascontiguousarray(self.core.noising_coefficients(n)[::-1])
        for t, gain in enumerate(gains):
            yield backwards[n - 1 - t :] * scale[: t + 1] / gain

    def recipe(self, n: int) -> Recipe:
        plain = self.core.recipe(n)
        assert isinstance(plain, Buffered)
        scale, draw_scale = 1.0 / self.gain_values(n), 1.0 / self.draw_gain_values(n)
        return replace(plain, scale=tuple(scale.tolist()), draw_scale=tuple(draw_scale.tolist()))

    def buffers(self, n: int) -> int:
        return len(self.decays)

    def words(self) -> str:
        return f"{self.core.words()}, one gain per step and one per draw"


#: BLT noise with the gains g of the steps and the gains a of the draws.
two_sided = TwoSidedBlt


def from_one_sided(strategy: Blt, *, steps: int) -> TwoSidedBlt:
    """The same matrix for runs of `steps` steps, with every draw gain one."""
    filter_ = strategy.decays, strategy.scales, strategy.taps, strategy.lag
    return TwoSidedBlt(*filter_, tuple(strategy.gain_values(steps)), (1.0,) * steps)


def lag_products(c: Array, a: Array, *, lag: int, count: int) -> tuple[Array, Array]:
    """P_{m·lag}[i] for m < count in row m (zero for i < m·lag), and the same sums of sizes.

    Guarantees. The computed P differ from the exact sums by at most n·2⁻⁵³ (to first order) times
    the second array, whatever the order of summation.
    """
    n = len(c)
    products = np.zeros((count, n))
    for m in range(min(count, -(-n // lag))):
        products[m, : n - m * lag] = c[: n - m * lag] * c[m * lag :]
    weights = np.concatenate([a * a, np.zeros(_ROWS)])
    sums = np.zeros((count, n))
    sizes = np.zeros((count, n)) if np.any(products < 0) else sums
    for first in range(0, n, _ROWS):
        last = min(first + _ROWS, n)
        used = min(count, (last - 1) // lag + 1)  # lags that reach back from these rows
        width = n - first
        hankel = np.array(sliding_window_view(weights[first:], width)[: last - first])
        sums[:used, first:last] = products[:used, :width] @ hankel.T
        if sizes is not sums:
            sizes[:used, first:last] = np.abs(products[:used, :width]) @ hankel.T
    for m in range(1, count):
        sums[m, : m * lag] = 0.0
        sizes[m, : m * lag] = 0.0
    return sums, sizes


def _check_size(n: int, k: int) -> None:
    if n > MOST_STEPS or n * n * k > MOST_WORK:
        raise Unsupported(
            f"the sensitivity of two-sided gains is computed for at most {MOST_STEPS:,} steps and "
            f"steps² × epochs <= {MOST_WORK:.0e}, got {n:,} steps and {k} epochs; use gains on one "
            "side, or fewer, larger steps"
        )


def largest_column(c: Array, a: Array, g: Array) -> float:
    """max_i X_ii with an allowance for rounding: S² for a single participation.

    Guarantees. Not below the exact value for the c, a and g that are given.
    """
    n = len(c)
    _check_size(n, 1)
    sums, _ = lag_products(c, a, lag=n, count=1)
    return float((g * g * sums[0]).max()) * (1 + (n + 16) * _UNIT)


def class_sizes(c: Array, a: Array, g: Array, *, epochs: int) -> tuple[Array, Array]:
    """Σ_{l,m} |X_{j+lb,j+mb}| of every class j, and how much rounding may have taken from it."""
    n = len(c)
    b = n // epochs
    sums, sizes = lag_products(c, a, lag=b, count=epochs)
    total, rounding = np.zeros(b), np.zeros(b)
    for m in range(epochs):
        both = g[: n - m * b] * g[m * b :] * (2.0 if m else 1.0)
        total += (both * np.abs(sums[m, m * b :])).reshape(-1, b).sum(axis=0)
        rounding += (both * sizes[m, m * b :]).reshape(-1, b).sum(axis=0)
    # n additions and four products in every entry, at most 2k additions of entries.
    return total, rounding * ((n + 2 * epochs + 16) * _UNIT)


def worst_class(c: Array, a: Array, g: Array, *, epochs: int) -> tuple[float, bool]:
    """(upper bound on S² for epochs in the same order, whether a unit attains it).

    Guarantees. The bound holds in exact arithmetic for the c, a and g that are given. It counts as
    attained when signs are found under which the worst class reaches it, up to rounding.
    """
    n = len(c)
    _check_size(n, epochs)
    total, rounding = class_sizes(c, a, g, epochs=epochs)
    upper = total + rounding
    j = int(np.argmax(upper))
    reached = gram.attained(_gram_of(c, a, g, range(j, n, n // epochs)))
    return float(upper[j]), bool(reached >= upper[j] * (1 - _ATTAINED))


def _gram_of(c: Array, a: Array, g: Array, columns: range) -> Array:
    """X for a few columns, each written out."""
    written = np.zeros((len(columns), len(c)))
    for row, column in enumerate(columns):
        written[row, column:] = g[column] * a[column:] * c[: len(c) - column]
    return np.asarray(written @ written.T)
