"""The learning rate that theory suggests, from public numbers alone (docs/proofs-convex.md).

FTRL with rate η reads θ_{t+1} = −η(g_1 + … + g_t + N_t), where g is the mean of B clipped rows and
the noise N_t has standard deviation s in every coordinate (noise multiplier × clip norm × error of
the mechanism / B). R is the norm of the weights worth finding, n the steps, c the clip norm, ρ the
curvature of the loss.

    any convex loss   R²/(2ηn) + η(c² + c s√p)    η = R / √(2n(c² + c s√p))
    smooth losses     R²/(2ηn) + ½η²s²ρc²         η = (R² / (2n s²ρc²))^{1/3}, for the noise
                      R²/(2ηn) + ½ηc²/B           η = R√(B/n)/c, for sampling; and at most 2/(ρc²)

Nothing here touches the guarantee: a wrong R costs accuracy, never privacy.

>>> round(general(radius=1.0, steps=50, clip_norm=1.0, noise=0.0, dimension=10), 3)
0.1
"""

from __future__ import annotations

import math


def general(*, radius: float, steps: int, clip_norm: float, noise: float, dimension: int) -> float:
    """η for any convex loss; `noise` is s, the deviation of one coordinate of the noisy sum."""
    spread = clip_norm**2 + clip_norm * noise * math.sqrt(dimension)
    return radius / math.sqrt(2.0 * steps * spread)


def smooth(
    *, radius: float, steps: int, clip_norm: float, noise: float, batch_size: int, curvature: float
) -> float:
    """η for a smooth loss of curvature ρ."""
    bend = curvature * clip_norm**2
    sampling = radius * math.sqrt(batch_size / steps) / clip_norm
    private = math.inf
    if noise > 0:
        private = (radius**2 / (2.0 * steps * noise**2 * bend)) ** (1.0 / 3.0)
    return min(sampling, private, 2.0 / bend)
