"""Buffered linear Toeplitz noise (BLT), with taps at the epoch lag and gains on both sides.

    C(x) = C_BLT(x) / S(x^b),   C_BLT(x) = 1 + Σ_j ω_j x / (1 − θ_j x),   S(y) = 1 + Σ_i s_i y^i

so the encoder of a plain BLT has c_0 = 1 and c_i = Σ_j ω_j θ_j^{i−1} (Dvijotham et al., arXiv
2404.16706). Its inverse is a BLT again, N_BLT = 1/C_BLT with decays θ̂ and scales ω̂ < 0 (arXiv
2504.21413): θ̂_j is the root of 1 + Σ_i ω_i / (y − θ_i) that lies below θ_j and above θ_{j+1}.
The noise of a run is N_BLT(x)·S(x^b): one buffer per decay, fed with the draw of this step plus
s_i times the draw of i epochs (b steps each) ago, which is drawn again and not stored. Taps make
the columns that one unit touches in different epochs nearly orthogonal, at no memory.

Two scalars per step, one on what is released and one on what is drawn, give

    C = diag(a)·T(c)·diag(g),      C⁻¹Z = diag(1/g)·T(1/c)·diag(1/a)·Z

with gains g > 0 and draw gains a > 0: z_r enters the filter as z_r / a_r, at its own step and at
every tap, and the noise of step t is divided by g_t. Gains alone can only reweigh the columns of C
(Henzinger–Upadhyay, arXiv 2509.14334); together with draw gains all rows and columns of the
filter's matrix are free in scale, which comes close to the best matrix there is, for no memory
beyond the buffers of the filter. Such a record is named "blt_two_sided".

>>> strategy = blt(decays=(0.9, 0.4), scales=(0.2, 0.1))
>>> strategy.coefficients(4).round(4)
array([1.   , 0.3  , 0.22 , 0.178])
>>> bool(np.allclose(strategy.noising(5) @ strategy.encoder(5), np.eye(5)))
True
>>> strategy = blt((0.5,), (0.3,), gains=(1.0, 1.0, 2.0), draw_gains=(1.0, 3.0, 1.0))
>>> strategy.encoder(3)
array([[1.  , 0.  , 0.  ],
       [0.9 , 3.  , 0.  ],
       [0.15, 0.3 , 2.  ]])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np

from noshuffle.errors import InvalidInput, Unsupported, number_tuple, whole
from noshuffle.strategies.base import ToeplitzStrategy, leading_gains
from noshuffle.strategies.recipe import Array, Buffered, Recipe

#: A handful of numbers, as a caller has them.
Numbers = Sequence[float] | Array

#: Largest growth of the coefficients of 1 / S from one epoch to the next that is accepted.
MAX_TAP_GROWTH = 1.5


@dataclass(frozen=True)
class Blt(ToeplitzStrategy):
    """C = diag(a)·T(C_BLT(x) / S(x^lag))·diag(g); decays are sorted from slow to fast.

    Accepted are decays 0 <= θ < 1, all different, and scales ω > 0 for which every decay θ̂ of the
    inverse lies in (−1, 1): the noise then dies out. This holds exactly when Σ ω_j / (1 + θ_j) < 1
    (the fits always give the stronger Σ ω_j / θ_j <= 1, i.e. θ̂ >= 0).
    Taps are accepted when the coefficients of 1 / S grow by at most the factor MAX_TAP_GROWTH per
    epoch. Growth is no privacy matter, the sensitivity is that of the finite matrix; but a C that
    grows for many epochs would lose its digits. Draw gains come with as many gains, and a run is at
    most that long.
    """

    decays: tuple[float, ...] = ()
    scales: tuple[float, ...] = ()
    taps: tuple[float, ...] = ()
    lag: int = 0
    draw_gains: tuple[float, ...] = ()
    name: ClassVar[str] = "blt"

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("decays", "scales", "taps", "draw_gains"):
            object.__setattr__(self, field, number_tuple(**{field: getattr(self, field)}))
        if len(self.decays) != len(self.scales) or not self.decays:
            raise InvalidInput(
                f"blt needs as many scales as decays and at least one of each, got "
                f"{len(self.decays)} decays and {len(self.scales)} scales"
            )
        order = sorted(zip(self.decays, self.scales), reverse=True)
        for field, values in zip(("decays", "scales"), zip(*order)):
            object.__setattr__(self, field, values)
        if not all(0 <= t < 1 for t in self.decays):
            raise InvalidInput(f"decays must lie in [0, 1), got {self.decays}")
        if len(set(self.decays)) < len(self.decays):
            raise InvalidInput(f"decays must all be different, got {self.decays}; merge equal ones")
        if not all(0 < w < np.inf for w in self.scales):
            raise InvalidInput(f"scales must be finite numbers > 0, got {self.scales}")
        if not (total := sum(w / (1 + t) for t, w in order)) < 1:
            raise InvalidInput(
                "scales are too large: sum of scale / (1 + decay) must stay below 1, or the noise "
                f"would grow without limit; got {total:.6g}"
            )
        if self.taps:
            whole(lag=self.lag)
            _check_taps(self.taps)
        elif self.lag:
            raise InvalidInput(f"lag is the distance of taps; got lag={self.lag} without taps")
        if not all(0 < a < np.inf for a in self.draw_gains):
            raise InvalidInput("draw_gains must be finite numbers > 0; got one that is not")
        if self.draw_gains:
            object.__setattr__(self, "name", "blt_two_sided")
            if len(self.gains) != len(self.draw_gains):
                raise InvalidInput(
                    "a two-sided blt needs one gain and one draw gain per step, got "
                    f"{len(self.gains)} gains and {len(self.draw_gains)} draw gains"
                )

    @property
    def has_draw_gains(self) -> bool:
        return bool(self.draw_gains)

    def draw_gain_values(self, n: int) -> Array:
        return leading_gains(self.draw_gains, n) if self.draw_gains else np.ones(n)

    def coefficients(self, n: int) -> Array:
        plain = _impulse_response(np.asarray(self.decays), np.asarray(self.scales), n)
        if not self.taps:
            return plain
        blocks = np.zeros((-(-n // self.lag), self.lag))  # division by S(x^lag), block by block
        blocks.ravel()[:n] = plain
        for i in range(1, len(blocks)):
            for m, s in enumerate(self.taps[:i], start=1):
                blocks[i] -= s * blocks[i - m]
        return np.array(blocks.ravel()[:n])

    def noising_coefficients(self, n: int) -> Array:
        decays, scales = inverse_parameters(self.decays, self.scales)
        plain = _impulse_response(decays, scales, n)
        out = plain.copy()
        for m, s in enumerate(self.taps, start=1):
            if m * self.lag < n:
                out[m * self.lag :] += s * plain[: n - m * self.lag]
        return out

    def recipe(self, n: int) -> Recipe:
        decays, scales = inverse_parameters(self.decays, self.scales)
        # All of them, also those beyond n: what a run keeps does not change when it goes on.
        taps = [(m * self.lag, s) for m, s in enumerate(self.taps, start=1)]
        return Buffered(
            decays=tuple(map(float, decays)),
            scales=tuple(map(float, scales)),
            taps=((0, 1.0), *taps),
            scale=self.step_scale(n),
            draw_scale=tuple((1.0 / self.draw_gain_values(n)).tolist()) if self.draw_gains else (),
        )

    def buffers(self, n: int) -> int:
        return len(self.decays)

    def words(self) -> str:
        d, p = len(self.decays), len(self.taps)
        text = f"buffered linear Toeplitz noise with {d} buffer{'s' * (d > 1)}"
        if p:
            text += f" and {p} tap{'s' * (p > 1)} every {self.lag} steps"
        text += ", one gain per step" if self.has_gains else ""
        return text + (" and one per draw" if self.draw_gains else "")


def _check_taps(taps: tuple[float, ...]) -> None:
    if not all(np.isfinite(taps)):
        raise InvalidInput(f"taps must be finite numbers, got {taps}")
    growth = float(np.max(np.abs(np.roots((1.0, *taps))), initial=0.0))
    if growth > MAX_TAP_GROWTH:
        raise InvalidInput(
            f"taps make the encoder grow {growth:.3g}-fold per epoch, at most {MAX_TAP_GROWTH} is "
            "accepted; use smaller taps"
        )


def _impulse_response(decays: Array, scales: Array, n: int) -> Array:
    """1, Σω, Σωθ, Σωθ², …: powers by exp(i·log θ), so no error builds up along the way."""
    whole(steps=n)
    out = np.zeros(n)
    out[0] = 1.0
    steps = np.arange(n - 1, dtype=np.float64)
    for decay, scale in zip(decays, scales):
        if abs(decay) > 0:
            power = np.exp(steps * np.log(abs(decay)))
            if decay < 0:
                power[1::2] *= -1.0
            out[1:] += scale * power
        elif n > 1:
            out[1] += scale
    return out


def endless_squared(
    strategy: Blt, *, separation: int, most: int, steps: int
) -> tuple[float, float]:
    """S² of a plain BLT that never ends, and what a unit reaches in a run of `steps` steps.

        X_L = Σ_{s≥0} c_s c_{s+L} = c_L + Σ_{i,j} ω_i ω_j θ_j^L / (1 − θ_i θ_j)

    is what two participations L steps apart share; sums of θ < 1 end. X falls with L where c does
    not rise, Σ ω ≤ 1, so k steps exactly b apart are the worst: S² = k X_0 + 2 Σ_m (k − m) X_mb,
    from above for every length, and all of it once the slowest decay has died out.
    """
    theta, omega = np.asarray(strategy.decays), np.asarray(strategy.scales)
    if omega.sum() > 1 or most * separation > steps:
        raise Unsupported(
            "an endless BLT is accounted where its coefficients do not rise (scales sum up to at "
            "most 1) and where the participations fit into the run; fit it by name"
        )
    lags = separation * np.arange(most)
    powers = theta[None, :] ** lags[:, None]
    gap = (1 - theta[:, None]) + theta[:, None] * (1 - theta)  # 1 − θ_i θ_j, with its digits
    shared = (omega[:, None] * omega[None, :] / gap).sum(axis=0)
    own = np.where(lags > 0, (theta[None, :] ** np.maximum(lags - 1, 0)[:, None]) @ omega, 1.0)
    X = own + powers @ shared
    weights = 2.0 * (most - np.arange(most))
    weights[0] = most
    squared = float(weights @ X) * (1 + 1e-12)  # rounding of the sums
    left = steps - int(lags[-1])
    return squared, squared if float(theta.max()) ** (2 * left) < 1e-13 else 0.0


def inverse_parameters(decays: Numbers, scales: Numbers) -> tuple[Array, Array]:
    """(θ̂, ω̂) of the inverse filter of a BLT with ω > 0.

    The roots of 1 + Σ ω_i / (y − θ_i) interlace with θ, one in each interval (θ_{j+1}, θ_j) and
    one below θ_d. Each is found by bisection for its distance below θ_j, which keeps the relative
    precision of that distance (1 − θ may be 1e-8). Partial fractions of Π(1−θx)/Π(1−θ̂x) then give
    ω̂_j = Π_i (θ̂_j − θ_i) / Π_{i≠j} (θ̂_j − θ̂_i).
    """
    theta, omega = np.asarray(decays, dtype=np.float64), np.asarray(scales, dtype=np.float64)
    order = np.argsort(-theta)
    theta, omega = theta[order], omega[order]
    d = len(theta)
    below = np.zeros(d)  # θ_j − θ̂_j
    for j in range(d):
        shifts = theta[j] - theta  # y − θ_i = shifts_i − distance
        low, high = 0.0, float(shifts[j + 1]) if j + 1 < d else float(omega.sum())
        for _ in range(200):
            middle = (low + high) / 2
            if not low < middle < high:
                break
            if 1.0 + np.sum(omega / (shifts - middle)) < 0:
                low = middle  # still too close to the pole at θ_j
            else:
                high = middle
        below[j] = high if high > 0 else low
    gap = (theta[:, None] - theta[None, :]) - below[:, None]  # θ̂_j − θ_i
    between = gap + below[None, :]  # θ̂_j − θ̂_i
    np.fill_diagonal(between, 1.0)
    return theta - below, np.prod(gap, axis=1) / np.prod(between, axis=1)


def scales_from_poles(decays: Numbers, inverse_decays: Numbers) -> Array:
    """ω of the BLT with decays θ whose inverse has decays θ̂ (1 > θ_1 > θ̂_1 > θ_2 > …)."""
    theta, hat = np.asarray(decays, dtype=np.float64), np.asarray(inverse_decays, dtype=np.float64)
    between = theta[:, None] - theta[None, :]
    np.fill_diagonal(between, 1.0)
    products = np.prod(theta[:, None] - hat[None, :], axis=1)
    return np.asarray(products / np.prod(between, axis=1), dtype=np.float64)


#: Buffered linear Toeplitz noise from the encoder's decays θ and scales ω, with taps and gains.
blt = Blt


def blt_from_poles(
    decays: Numbers, inverse_decays: Numbers, *, taps: Numbers = (), lag: int = 0
) -> Blt:
    """The BLT whose encoder has decays θ and whose noise has decays θ̂, interlaced downwards."""
    theta, hat = number_tuple(decays=decays), number_tuple(inverse_decays=inverse_decays)
    mixed = [pole for pair in zip(theta, hat) for pole in pair]
    falls = all(above > below for above, below in pairwise(mixed))
    if len(theta) != len(hat) or not theta or not falls or not (mixed[0] < 1 and mixed[-1] >= 0):
        raise InvalidInput(
            "poles must interlace, 1 > decay_1 > inverse_1 > decay_2 > inverse_2 > … >= 0; got "
            f"decays {theta} and inverse decays {hat}"
        )
    scales = tuple(scales_from_poles(theta, hat))
    return Blt(theta, scales, tuple(taps), lag)
