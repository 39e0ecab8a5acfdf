"""BLT noise with two scalars per step: one on what is released, one on what is drawn.

    C = diag(a)·T(c)·diag(g),      C⁻¹Z = diag(1/g)·T(1/c)·diag(1/a)·Z

with c of a buffered linear Toeplitz filter with taps (see `blt`), gains g > 0 and draw gains a > 0:
z_r enters the filter as z_r / a_r, at its own step and at every tap, and the noise of step t is
divided by g_t. Gains alone can only reweigh the columns of C (Henzinger–Upadhyay, arXiv
2509.14334); together with draw gains all rows and columns of the filter's matrix are free in scale,
which comes close to the best matrix there is, for no memory beyond the buffers of the filter.

This is no Toeplitz strategy, on purpose: what is proved for T(c)·diag(g) does not hold here.

What a run keeps between steps: one tensor per decay.

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
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from noshuffle.errors import HorizonExceeded, InvalidInput, number_tuple, whole
from noshuffle.strategies.base import Strategy, dense_size, lower_toeplitz
from noshuffle.strategies.blt import Blt, Numbers
from noshuffle.strategies.recipe import Array, Buffered, Recipe


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

    def _first(self, values: tuple[float, ...], n: int) -> Array:
        whole(steps=n)
        if n > len(values):
            raise HorizonExceeded(f"gains cover {len(values)} steps, {n} were asked for; fit again")
        return np.array(values[:n], dtype=np.float64)

    def gain_values(self, n: int) -> Array:
        """g_0 … g_{n−1}; a run may be shorter than its gains were made for, never longer."""
        return self._first(self.gains, n)

    def draw_gain_values(self, n: int) -> Array:
        """a_0 … a_{n−1}."""
        return self._first(self.draw_gains, n)

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
        return Buffered(
            decays=plain.decays,
            scales=plain.scales,
            taps=plain.taps,
            scale=tuple((1.0 / self.gain_values(n)).tolist()),
            draw_scale=tuple((1.0 / self.draw_gain_values(n)).tolist()),
        )

    def buffers(self, n: int) -> int:
        return len(self.decays)

    def words(self) -> str:
        return f"{self.core.words()}, one gain per step and one per draw"


def two_sided(
    decays: Numbers,
    scales: Numbers,
    *,
    gains: Numbers,
    draw_gains: Numbers,
    taps: Numbers = (),
    lag: int = 0,
) -> TwoSidedBlt:
    """BLT noise with the gains g of the steps and the gains a of the draws."""
    return TwoSidedBlt(
        decays=number_tuple(decays=decays),
        scales=number_tuple(scales=scales),
        taps=number_tuple(taps=taps),
        lag=lag,
        gains=number_tuple(gains=gains),
        draw_gains=number_tuple(draw_gains=draw_gains),
    )


def from_one_sided(strategy: Blt, *, steps: int) -> TwoSidedBlt:
    """The same matrix for runs of `steps` steps, with every draw gain one."""
    return two_sided(
        strategy.decays,
        strategy.scales,
        taps=strategy.taps,
        lag=strategy.lag,
        gains=strategy.gain_values(steps),
        draw_gains=np.ones(steps),
    )
