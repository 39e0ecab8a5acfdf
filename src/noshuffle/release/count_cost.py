"""What noisy counts of norms cost beside the gradients: one plan pays for both.

The noisy count that steers a clip norm is one more Gaussian mechanism (see `clipping.adaptive`). A
unit that takes part k times is counted k times, μ_count² = k / (2σ_b)², and the gradients get the
noise z_Δ that leaves the plan's μ as it is,

    S²/z_Δ² + k/(2σ_b)² = S²/z²   ⇔   z_Δ = (z⁻² − (2σ_b·S/√k)⁻²)^(−½),

so the statement is unchanged (Andrew et al. 2021, for k = S = 1). Under sampling gradient and count
are drawn by the same coin, and S = k = 1 for the joint release of a step. No state.

>>> from noshuffle.participation import Epochs
>>> from noshuffle.strategies import identity
>>> four = Epochs(epochs=4, steps_per_epoch=10)                     # S² = k = 4
>>> plan = Plan(participation=four, strategy=identity(), noise_multiplier=2.0)
>>> bit_noise_for(plan, share=0.25)
2.0
>>> clip = QuantileClip(initial=1.0, units=100, bit_noise=2.0)
>>> round(joint_multiplier(clip, plan, plan), 12)                   # it costs what was planned
2.0
"""

from __future__ import annotations

import math

from noshuffle.clipping.adaptive import BIT_SENSITIVITY, QuantileClip, gradient_multiplier
from noshuffle.plan import Plan


def count_ratio(plan: Plan) -> float:
    """S/√k; one where a release is sampled."""
    if plan.participation.is_sampled:
        return 1.0
    return math.sqrt(plan.sensitivity.squared / plan.participation.most)


def bit_noise_for(plan: Plan, *, share: float) -> float:
    """The `bit_noise` of counts that take this share of the plan's μ²; more noise takes less."""
    return plan.noise_multiplier * BIT_SENSITIVITY / (count_ratio(plan) * math.sqrt(share))


def joint_multiplier(config: QuantileClip, plan: Plan, held: Plan) -> float:
    """z of one mechanism that costs units of `held` what updates and counts of `plan` cost them.

    The noise was shared out by S/√k of the plan. Units with other limits than planned have another
    ratio, and the share of the counts is another for them.
    """
    own = gradient_multiplier(plan.noise_multiplier, bit_noise=config.noise * count_ratio(plan))
    count = config.noise * count_ratio(held) / BIT_SENSITIVITY
    return float((own**-2 + count**-2) ** -0.5)
