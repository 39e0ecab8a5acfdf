"""The losses of linear models that are built in, each with the bounds that privacy needs.

    f(w; x, y) = φ(⟨x, w⟩, y) + (ridge/2)‖w‖²          ∇f = φ'(⟨x, w⟩, y)·x + ridge·w

    loss            φ(s, y)                      |φ'| at most       φ'' at most     convex
    logistic        log(1 + e^{−ys})             1                  1/4             yes
    hinge           (1 − ys)₊                    1                  not smooth      yes
    smoothed_hinge  hinge, parabola on 1 ± h     1                  1/(2h)          yes
    squared         (s − y)²/2                   B·R + Y            1               yes
    huber           Huber's function of s − y    h                  1               yes
    absolute        |s − y|                      1                  not smooth      yes
    quantile        (y − s)(q − [y < s])         max(q, 1 − q)      not smooth      yes
    poisson         e^s − ys, linear from 0 on   max(1, Y)          1               yes
    gamma           s + y·e^{−s}, linear to ln a max(1, Y/a − 1)    Y/a             yes
    linear          s                            1                  0               yes
    sigmoid         1/(1 + e^{ys})               1/4                √3/18           no, smooth
    phase           |s² − y|                     2·B·R              not smooth      2B²-weakly

The two with a logarithmic link have labels within [0, Y] and [a, Y] and predict e^s: beyond 1
(below the smallest label a) they go on as a line, so that their slopes are bounded.

B (`feature_bound`) bounds the rows, Y (`label_bound`) the labels, R (`radius`) the weights; what
follows from them for a gradient stands in `loss_record`, whose names can be had from here too.

>>> loss = logistic(feature_bound=2.0)
>>> loss.lipschitz, loss.smoothness
(2.0, 1.0)
>>> loss.values(np.zeros(2), np.array([[1.0, 0.0]]), np.array([1.0])).round(4)
array([0.6931])
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from scipy.special import expit

from noshuffle.convex.arrays import Array
from noshuffle.convex.loss_record import Loss as Loss
from noshuffle.convex.loss_record import fit_into as fit_into
from noshuffle.errors import open_unit, positive


def _zero(s: Array, y: Array) -> Array:
    return np.zeros(np.broadcast_shapes(np.shape(s), np.shape(y)))


logistic = partial(
    Loss,
    name="logistic",
    slope_bound=1.0,
    curvature_bound=0.25,
    is_classifier=True,
    is_monotone=True,
    value_fn=lambda s, y: np.logaddexp(0.0, -y * s),
    slope_fn=lambda s, y: -y * expit(-y * s),
    curvature_fn=lambda s, y: expit(s) * expit(-s) + 0 * y,
)
hinge = partial(
    Loss,
    name="hinge",
    slope_bound=1.0,
    curvature_bound=math.inf,
    is_classifier=True,
    is_monotone=True,
    value_fn=lambda s, y: np.maximum(0.0, 1 - y * s),
    slope_fn=lambda s, y: np.where(y * s < 1, -y, 0.0),
    curvature_fn=_zero,
)
absolute = partial(
    Loss,
    name="absolute",
    slope_bound=1.0,
    curvature_bound=math.inf,
    value_fn=lambda s, y: np.abs(s - y),
    slope_fn=lambda s, y: np.sign(s - y),
    curvature_fn=_zero,
)
linear = partial(  # labels are not read
    Loss,
    name="linear",
    slope_bound=1.0,
    curvature_bound=0.0,
    is_monotone=True,
    value_fn=lambda s, y: s + 0 * y,
    slope_fn=lambda s, y: np.ones_like(s),
    curvature_fn=_zero,
)
sigmoid = partial(
    Loss,
    name="sigmoid",
    slope_bound=0.25,
    curvature_bound=math.sqrt(3) / 18,
    weak_curvature=math.sqrt(3) / 18,
    is_classifier=True,
    is_monotone=True,
    value_fn=lambda s, y: expit(-y * s),
    slope_fn=lambda s, y: -y * expit(s) * expit(-s),
    curvature_fn=lambda s, y: -y * expit(s) * expit(-s) * (1 - 2 * expit(s)),
)


def by_label(loss: Loss, negative: float, positive: float) -> Loss:
    """A classifier's loss times a weight that depends on the label; bounds grow by the larger."""
    most = max(negative, positive)

    def times(fn: Any) -> Any:
        return lambda s, y: np.where(y > 0, positive, negative) * fn(s, y)

    return replace(
        loss,
        slope_bound=most * loss.slope_bound,
        curvature_bound=most * loss.curvature_bound,
        value_fn=times(loss.value_fn),
        slope_fn=times(loss.slope_fn),
        curvature_fn=times(loss.curvature_fn),
    )


def smoothed_hinge(*, width: float = 0.5, **bounds: Any) -> Loss:
    """The hinge with its kink replaced by a parabola on margins 1 ± width (Chaudhuri et al.)."""
    positive(width=width)
    h = width
    return Loss(
        name="smoothed_hinge",
        slope_bound=1.0,
        curvature_bound=1 / (2 * h),
        is_classifier=True,
        is_monotone=True,
        value_fn=lambda s, y: np.where(
            y * s < 1 - h, 1 - y * s, np.maximum(0.0, 1 + h - y * s) ** 2 / (4 * h)
        ),
        slope_fn=lambda s, y: -y * np.clip((1 + h - y * s) / (2 * h), 0.0, 1.0),
        curvature_fn=lambda s, y: np.where(np.abs(1 - y * s) <= h, 1 / (2 * h), 0.0),
        **bounds,
    )


def squared(
    *, radius: float, feature_bound: float = 1.0, label_bound: float = 1.0, **bounds: Any
) -> Loss:
    """(s − y)²/2 for weights within `radius` (infinite: no bound, for those who clip)."""
    if radius != math.inf:
        positive(radius=radius)
    positive(feature_bound=feature_bound, label_bound=label_bound)
    return Loss(
        name="squared",
        slope_bound=feature_bound * radius + label_bound,
        curvature_bound=1.0,
        radius=radius,
        feature_bound=feature_bound,
        label_bound=label_bound,
        value_fn=lambda s, y: 0.5 * (s - y) ** 2,
        slope_fn=lambda s, y: s - y,
        curvature_fn=lambda s, y: _zero(s, y) + 1.0,
        **bounds,
    )


def huber(*, width: float = 1.0, least_slope: float = 0.0, **bounds: Any) -> Loss:
    """Quadratic for residuals within `width`, linear beyond; steeper for a `least_slope` there."""
    positive(width=width)
    h, k = width, max(1.0, least_slope / width)
    return Loss(
        name="huber",
        slope_bound=k * h,
        curvature_bound=k,
        value_fn=lambda s, y: (
            k * np.where(np.abs(s - y) <= h, 0.5 * (s - y) ** 2, h * np.abs(s - y) - 0.5 * h * h)
        ),
        slope_fn=lambda s, y: k * np.clip(s - y, -h, h),
        curvature_fn=lambda s, y: k * (np.abs(s - y) <= h).astype(np.float64),
        **bounds,
    )


def quantile(*, level: float = 0.5, **bounds: Any) -> Loss:
    """The pinball loss, least at the `level` quantile of y (Koenker and Bassett 1978)."""
    open_unit(quantile=level)
    return Loss(
        name="quantile",
        slope_bound=max(level, 1 - level),
        curvature_bound=math.inf,
        value_fn=lambda s, y: np.maximum(level * (y - s), (level - 1) * (y - s)),
        slope_fn=lambda s, y: np.where(s < y, -level, 1 - level),
        curvature_fn=_zero,
        **bounds,
    )


def poisson(*, label_bound: float = 1.0, **bounds: Any) -> Loss:
    """The Poisson deviance with a logarithmic link, for labels within [0, label_bound]."""
    positive(label_bound=label_bound)
    return Loss(
        name="poisson",
        slope_bound=max(1.0, label_bound),
        curvature_bound=1.0,
        label_bound=label_bound,
        least_label=0.0,
        value_fn=lambda s, y: np.exp(np.minimum(s, 0.0)) + np.maximum(s, 0.0) - y * s,
        slope_fn=lambda s, y: np.exp(np.minimum(s, 0.0)) - y,
        curvature_fn=lambda s, y: np.where(s <= 0, np.exp(np.minimum(s, 0.0)), 0.0) + 0 * y,
        **bounds,
    )


def gamma(*, least: float, label_bound: float = 1.0, **bounds: Any) -> Loss:
    """The gamma deviance with a logarithmic link, for labels within [least, label_bound]."""
    open_unit(least=least)
    positive(label_bound=label_bound)
    low = math.log(least)
    return Loss(
        name="gamma",
        slope_bound=max(1.0, label_bound / least - 1),
        curvature_bound=label_bound / least,
        label_bound=label_bound,
        least_label=least,
        value_fn=lambda s, y: (
            s + y * (np.exp(-np.maximum(s, low)) + np.maximum(low - s, 0.0) / least)
        ),
        slope_fn=lambda s, y: 1 - y * np.exp(-np.maximum(s, low)),
        curvature_fn=lambda s, y: np.where(s >= low, y * np.exp(-np.maximum(s, low)), 0.0),
        **bounds,
    )


def phase(*, radius: float, feature_bound: float = 1.0, **bounds: Any) -> Loss:
    """|⟨x, w⟩² − y|, robust phase retrieval: Lipschitz within a radius and weakly convex."""
    positive(radius=radius, feature_bound=feature_bound)
    return Loss(
        name="phase",
        slope_bound=2 * feature_bound * radius,
        curvature_bound=math.inf,
        weak_curvature=2.0,
        radius=radius,
        feature_bound=feature_bound,
        value_fn=lambda s, y: np.abs(s * s - y),
        slope_fn=lambda s, y: 2 * s * np.sign(s * s - y),
        curvature_fn=_zero,
        **bounds,
    )
