"""The free parameters of a BLT: numbers u without constraints for interlaced poles.

    1 − t_i = Π_{l>=i} sigmoid(u_l)    for the falling list  t = (θ_1, θ̂_1, θ_2, θ̂_2, …)

Any u gives 1 > θ_1 > θ̂_1 > … > 0, hence scales ω > 0 and coefficients that are >= 0 and fall
(Dvijotham et al., arXiv 2404.16706). Poles are handled as gaps 1 − t, which keep their digits.

>>> gap, hat = poles(np.array([0.0, 0.0]))
>>> float(1 - gap[0]), float(1 - hat[0])
(0.75, 0.5)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from noshuffle.strategies import blt_forms as forms
from noshuffle.strategies.blt import Blt, blt_from_poles, inverse_parameters
from noshuffle.strategies.recipe import Array

ValueGradient = tuple[float, Array]

_STEP = 1e-30


def poles(u: forms.Numbers) -> tuple[forms.Numbers, forms.Numbers]:
    """Gaps (1 − θ, 1 − θ̂) from u."""
    logs = np.cumsum(-forms.log1p(np.exp(-u))[..., ::-1], axis=-1)[..., ::-1]
    gaps = np.exp(logs)
    return gaps[..., 0::2], gaps[..., 1::2]


def bounds(d: int) -> list[tuple[float, float]]:
    """Limits of u: a gap is from 1e-9 up to 1 − 2e-9 of the next one; θ̂_d >= 6e-6."""
    return [(-20.0, 20.0)] * (2 * d - 1) + [(-20.0, 12.0)]


def spaced(d: int, low: float, high: float) -> Array:
    """u for gaps spaced evenly on a log scale between low and high."""
    return _unbounded(np.geomspace(min(low, high / 3), high, 2 * d))


def unbounded(strategy: Blt) -> Array:
    """u of a strategy with positive inverse decays."""
    hat, _ = inverse_parameters(strategy.decays, strategy.scales)
    return _unbounded(1 - np.stack([np.asarray(strategy.decays), hat], axis=-1).ravel())


def _unbounded(gaps: Array) -> Array:
    ratios = np.clip(np.append(gaps[:-1] / gaps[1:], gaps[-1]), 1e-15, 1 - 1e-9)
    return np.asarray(np.log(ratios / (1 - ratios)))


def stretched(u: Array, factor: float) -> Array:
    """u for steps `factor` times as fine: the slowest gap shrinks as 1/factor, a gap of one stays.

    For warm starts: log gaps are moved in proportion to themselves.
    """
    gaps = np.stack(poles(u), axis=-1).ravel()
    return _unbounded(gaps ** (1 - np.log(factor) / np.log(gaps[0])))


def without_cancelled(gap: Array, hat: Array) -> tuple[Array, Array]:
    """Drop neighbours of the list θ_1, θ̂_1, θ_2, … that cancel; one pair always stays."""
    mixed = list(np.stack([gap, hat], axis=-1).ravel())
    i = 0
    while i + 1 < len(mixed) and len(mixed) > 2:
        # The second limit: gaps may differ where the poles 1 − gap themselves no longer do.
        if mixed[i + 1] - mixed[i] < max(1e-7 * mixed[i + 1], 1e-14):
            del mixed[i : i + 2]
            i = 0
        else:
            i += 1
    return np.array(mixed[0::2]), np.array(mixed[1::2])


def strategy_at(u: Array, *, taps: Array | tuple[float, ...] = (), lag: int = 0) -> Blt:
    """The strategy with free parameters u, less what cancels, every decay below 1."""
    gap, hat = without_cancelled(*poles(u))
    tiny = 2.0**-50
    gap, hat = np.maximum(gap, tiny), np.maximum(hat, 2 * tiny)
    return blt_from_poles(1 - gap, 1 - hat, taps=taps, lag=lag if len(taps) else 0)


def differentiate(function: Callable[[forms.Numbers], forms.Numbers], x: Array) -> ValueGradient:
    """Value and gradient by complex steps, all directions at once."""
    value = function(x + 1j * _STEP * np.eye(len(x)))
    return float(value.real[0]), np.asarray(value.imag / _STEP)


@dataclass(frozen=True, eq=False)
class Filter:
    """c = κ + Σ r_j/(1−θ_j x) and 1/c = κ̂ + Σ ν_j/(1−θ̂_j x), with the Jacobian by u."""

    decays: Array
    r: Array
    kappa: float
    hat_decays: Array
    nu: Array
    hat_kappa: float
    jacobian: Array

    def pull(self, *bars: Array | float) -> Array:
        """Derivative by u from those by (θ, r, κ, θ̂, ν, κ̂)."""
        return np.asarray(self.jacobian @ np.concatenate([np.atleast_1d(bar) for bar in bars]))


def filter_from(u: Array) -> Filter:
    """The partial fractions of the BLT with parameters u."""
    d = len(u) // 2
    gap, hat = poles(u + 1j * _STEP * np.eye(2 * d))
    r, kappa = forms.encoder_parts(gap, hat)
    nu, hat_kappa = forms.encoder_parts(hat, gap)
    parts = [1 - gap, r, kappa[:, None], 1 - hat, nu, hat_kappa[:, None]]
    jacobian = np.concatenate(parts, axis=1).imag / _STEP
    first = [np.asarray(part[0].real) for part in parts]
    return Filter(
        first[0], first[1], float(first[2][0]), first[3], first[4], float(first[5][0]), jacobian
    )
