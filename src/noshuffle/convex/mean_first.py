"""The intercept of a regression as a running mean, so that a fit does not lose to the constant.

A regression that finds nothing should predict the mean of its targets with the noise 1/(nμ) that a
private mean has at the same ε. Momentum and short steps leave several times that: of T gradients
each has noise √T/(nμ), and the last few decide. But each of them tells the mean anew. Columns are
centred, the curvature along the intercept is ρ (1 for squares), so b_t − g_t/ρ is the mean of
y − x'θ_t plus noise, and the mean of all of these,

    b_{t+1} = b_t − γ_t·g_t/ρ,     γ_t = (1 + a)/(t + a),     a = T/64,

has noise √((1 + a)²/((1 + 2a)T))·√T/(nμ): that of a private mean for small T, and 1.15 times it
for the largest, where the noise is small and early gradients, which were clipped, are to be
forgotten (weights grow as t^a).

Two things stand against it. A row (x', 1) is √10 long, so that clipping at 1 leaves of a residual
at most 1/√10; where b is farther off than that, nothing tells how far. And columns of which noise
hides the centre would learn what is the intercept's. So the first T₀ steps read rows without their
columns, whose residuals count up to 1, until the mean is known within less than half of 1/√10, and
of the quarter that targets are asked for next to it (`target_window`):

    √(T/T₀)/(nμ) ≤ ⅛     ⟺     T₀ ≥ 64·T/(nμ)²

and at most half of all steps. Where nμ < 9 the mean stays unknown by that, and the rest is not
worth it: then nothing but the intercept is learned, in one step (`schedule`). What a gradient tells
of a mean in other units and with other slopes is for `target_units`, what of a quantile for
`quantile_search`. All from public numbers, or post-processing of what was released; no state.

>>> mean_steps(8, reach=30.0), mean_steps(64, reach=500.0), mean_steps(8, reach=10.0)
(1, 1, 4)
>>> [round(share(t, of=8), 2) for t in (1, 2, 8)]
[1.0, 0.53, 0.14]
"""

from __future__ import annotations

import math

#: The mean is known within one of so many parts; nμ from which on it can be.
_PARTS, _KNOWN = 8.0, 9.0
#: Gradient steps for which weights grow linearly.
LONGEST = 64


def hides_mean(reach: float) -> bool:
    """Whether columns are not worth reading; `reach` is nμ."""
    return reach < _KNOWN


def mean_steps(steps: int, *, reach: float) -> int:
    """T₀ of so many steps; `reach` is nμ."""
    return min((steps + 1) // 2, math.ceil(_PARTS**2 * steps / reach**2))


def share(step: float, *, of: int) -> float:
    """γ of a step, 1 being the first."""
    forgets = of / LONGEST
    return (1.0 + forgets) / (step + forgets)
