"""From the last readings of "gd" to the law of its error: limits of a row, and what was released.

`inference` has the argument: at the answer θ̄ of the descent m gradients and then s sums of
`spread_sum` are released. Here these sums are averaged, cut down to the coordinates that are
learned (no intercept: one less), and told in the coordinates of the estimator. No state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from noshuffle.convex.arrays import Array
from noshuffle.convex.inference import Law, free_clip, law_of, reach
from noshuffle.convex.margins import MarginLoss
from noshuffle.convex.moments import pack, unpack_square


class CurvatureLimits(NamedTuple):
    """Curvature, and squared gradient, up to which a row counts in full."""

    limit: float
    outer_limit: float


def limits(
    loss: MarginLoss, *, features: int, clip_norm: float, most_weight: float, level: float
) -> CurvatureLimits:
    """No more than clipping leaves, nor than a bounded slope, or the curvature where there is none,
    lets expect; `level` is the mean target of models of log y, which bounds their curvature."""
    most = loss.curvature() or 1.0
    limit = most_weight * reach(features) * most * min(1.0, 3.0 * level)
    steep = (most_weight * free_clip(loss.lipschitz(1), features)) ** 2
    return CurvatureLimits(limit, min(clip_norm**2, steep if loss.is_classifier else 2.0 * limit))


def law_of_readings(
    spread: Array,
    slopes: Array,
    answer: Array,
    *,
    fit_intercept: bool,
    spreads: int,
    gradients: int,
    deviation: float,
    gain: float,
    rows: int,
    clip_norm: float,
    bounds: CurvatureLimits,
    ridge: Array,
    unscaled_fn: Callable[[Array], Array],
) -> Law:
    """What is known of the error of the weights, in their own coordinates.

    `spread` and `slopes` are sums of so many released means of `spread_sum` and of gradients, each
    with noise of this `deviation`; gradients were multiplied by `gain`.
    """
    q = len(answer)
    kept = np.arange(q) < q - 1 + int(fit_intercept)
    own, half = np.ix_(kept, kept), q * (q + 1) // 2
    *squares, clipped = np.split(spread / spreads, [half, 2 * half])
    parts = [unpack_square(v, q)[own] for v in squares]
    found = law_of(
        np.concatenate([*(pack(part) for part in parts), clipped]),
        q=int(kept.sum()),
        clip=clip_norm,
        **bounds._asdict(),
        deviation=deviation / math.sqrt(spreads),
        point=answer[kept],
        gradient=slopes[kept] / gradients + ridge[kept] * answer[kept],
        gradient_deviation=gain * deviation / math.sqrt(gradients),
        rows=rows,
        gain=gain,
        ridge=ridge[kept],
    )
    matrix = np.column_stack([unscaled_fn(one[None])[0] for one in np.eye(q)])
    return found.mapped(matrix[:, kept])
