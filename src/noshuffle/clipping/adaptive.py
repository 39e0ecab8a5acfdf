"""A clip norm that follows a quantile of the gradient norms, privately.

Andrew, Thakkar, McMahan, Ramaswamy, "Differentially private learning with adaptive clipping"
(2021). With γ the wanted fraction below the threshold and m the planned number of units a step,

    count = Σ_u (1[‖g_u‖ ≤ C] − ½) + N(0, σ_b²),     b̃ = count/m + ½,     C ← C · exp(−η (b̃ − γ))

Each unit moves the count by ½ (zero-out neighbours): a Gaussian mechanism with noise multiplier
2σ_b. Gradients and count together cost what one release with multiplier z costs if the gradients
use z_Δ = (z⁻² − (2σ_b)⁻²)^(−½).

The estimate moves at every step, the threshold in force only where the mechanism allows a change
(`may_change`). Two thresholds in a row give the noisy count back to the last bit, so it must come
rounded to the grid of its noise (`release.threshold`). State: a value; `update` returns the next.

>>> config = QuantileClip(initial=1.0, units=100)
>>> state = start(config)
>>> state = update(state, -50.0, config=config, may_change=False)    # nobody below: must grow
>>> state.threshold, round(state.estimate, 4)
(1.0, 1.1052)
>>> round(gradient_multiplier(1.0, bit_noise=config.noise), 4)
1.005
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from noshuffle.clipping.factor import Flat
from noshuffle.errors import InvalidInput, open_unit, positive, whole

#: How far one unit moves the shifted count.
BIT_SENSITIVITY = 0.5
#: How far one noisy count moves the logarithm of the estimate.
LARGEST_EXPONENT = 50.0


@dataclass(frozen=True, kw_only=True)
class QuantileClip:
    """Which quantile to follow, how fast, and with how much noise on the count.

    `units` is the planned number of units a step (never the realised one); `bit_noise` is
    `units`/20 if not given. The threshold stays within `smallest` and `largest`.
    """

    initial: float
    units: int
    quantile: float = 0.5
    rate: float = 0.2
    bit_noise: float | None = None
    smallest: float = 1e-6
    largest: float = 1e6

    def __post_init__(self) -> None:
        positive(initial=self.initial, rate=self.rate, smallest=self.smallest, largest=self.largest)
        open_unit(quantile=self.quantile)
        whole(units=self.units)
        if self.bit_noise is not None:
            positive(bit_noise=self.bit_noise)
        if not self.smallest <= self.initial <= self.largest:
            raise InvalidInput(
                f"initial must lie between smallest ({self.smallest}) and largest "
                f"({self.largest}), got {self.initial}"
            )

    @property
    def noise(self) -> float:
        """Standard deviation of the noise on the count."""
        return self.units / 20 if self.bit_noise is None else float(self.bit_noise)


@dataclass(frozen=True)
class QuantileState:
    """`threshold` is the clip norm in force, `estimate` where the quantile is thought to be."""

    threshold: float
    estimate: float

    @property
    def clip(self) -> Flat:
        return Flat(self.threshold)

    def state_dict(self) -> dict[str, float]:
        return {"threshold": self.threshold, "estimate": self.estimate}


def start(config: QuantileClip) -> QuantileState:
    """The state before the first step."""
    return QuantileState(config.initial, config.initial)


def shifted_count(norms: Tensor, state: QuantileState, *, present: Tensor | None = None) -> float:
    """Σ over present units of 1[norm ≤ estimate] − ½, before noise.

    Guarantees: one unit changes the result by at most ½ under zero-out, by at most 1 under
    replacement. A NaN or infinite norm counts as above the estimate. Not private by itself.
    """
    # NumPy adds a few hundred numbers up in a fraction of torch's time
    below = norms.detach().cpu().numpy() <= state.estimate
    if present is not None:
        below = below[present.cpu().numpy()]
    return float(np.count_nonzero(below)) - BIT_SENSITIVITY * below.size


def update(
    state: QuantileState, noisy_count: float, *, config: QuantileClip, may_change: bool
) -> QuantileState:
    """Move the estimate by a noisy count on the grid; the threshold follows if it may change."""
    if not math.isfinite(noisy_count):
        raise InvalidInput(f"noisy_count must be finite, got {noisy_count!r}")
    fraction = noisy_count / config.units + BIT_SENSITIVITY
    exponent = -config.rate * (fraction - config.quantile)
    moved = state.estimate * math.exp(min(max(exponent, -LARGEST_EXPONENT), LARGEST_EXPONENT))
    moved = min(max(moved, config.smallest), config.largest)
    return QuantileState(moved if may_change else state.threshold, moved)


def gradient_multiplier(noise_multiplier: float, *, bit_noise: float) -> float:
    """z_Δ: the noise multiplier of the gradients that leaves room for the count within z."""
    positive(noise_multiplier=noise_multiplier, bit_noise=bit_noise)
    left = noise_multiplier**-2 - (bit_noise / BIT_SENSITIVITY) ** -2
    if left <= 0:
        raise InvalidInput(
            f"bit_noise must exceed noise_multiplier/2 = {noise_multiplier / 2:.6g}, got "
            f"{bit_noise!r}: the count alone would spend the whole budget"
        )
    return float(left**-0.5)
