"""Where to look for ε of a sum of losses: the tilt λ, the window of the sum, and the grid step.

The rough moments K(t) = log E e^{tS} of the sum, from an outline of every loss, give Chernoff's ε
or δ, whichever was not asked for,

    δ ≤ e^{K(t) − tε} t^t/(1+t)^{1+t},

the tilt that puts the mean of the tilted sum at ε, and the reach of what lies outside it with
probability 1e-11. The step h costs about T(λ+1)h²/12 in ε, which is how it is chosen. Nothing
rigorous depends on any of it: `loss_sum` bounds what a poor choice costs. No state.

>>> from noshuffle.accounting.mixture import remove_pair
>>> found = scout_of([(remove_pair(noise_multiplier=1.0, rate=0.01), 1000)], log_delta=-11.5)
>>> found.low < found.centre < found.high
True
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import logsumexp, xlogy

from noshuffle.accounting.atoms import Atoms, Blend, Loss
from noshuffle.accounting.loss_cells import loss_range, support
from noshuffle.accounting.mixture import Joined

Array = np.ndarray
#: A loss, and of how many steps it is that.
Block = tuple[Loss, int]

#: ε may be wrong by about this, relative, through the grid.
ACCURACY = 2e-5
#: Most points of the window and of one step: bounds the memory (about 60 bytes each).
MOST_POINTS = 2**22
#: Tilted mass that the window may miss on either side.
OUTSIDE = 1e-11


@dataclass(frozen=True)
class Scout:
    """λ, the centre and reach of the tilted sum, and ε, from a rough quadrature."""

    tilt: float
    up: float
    down: float
    centre: float
    low: float
    high: float
    epsilon: float
    log_delta: float


def scout_of(
    blocks: Sequence[Block],
    *,
    log_delta: float | None = None,
    epsilon: float | None = None,
    cap: float = math.inf,
) -> Scout:
    """Where to look, for losses up to the cap: rough log-moments K(t) on a list of t."""
    t = np.concatenate([-np.geomspace(1e4, 1e-4, 50), [0.0], np.geomspace(1e-4, 1e5, 140)])
    total, mean = np.zeros(len(t)), np.zeros(len(t))
    for pair, count in blocks:
        loss, log_p = outline(pair, one_tail(blocks, log_delta))
        loss, log_p = loss[loss <= cap], log_p[loss <= cap]
        exponent = t[:, None] * loss[None, :] + log_p
        peak = exponent.max(axis=1)
        weight = np.exp(exponent - peak[:, None])
        sums = weight.sum(axis=1)
        total += count * (peak + np.log(sums))
        mean += count * (weight @ loss) / sums
    positive = t > 0
    s = t[positive]
    # δ ≤ e^{K(t) − tε} t^t/(1+t)^{1+t}, the largest value of (1 − e^{ε−s})₊ e^{−t(s−ε)}
    log_factor = xlogy(s, s) - xlogy(1 + s, 1 + s)
    if epsilon is None:
        assert log_delta is not None
        each = (total[positive] + log_factor - log_delta) / s
        i = int(np.argmin(each))
        epsilon = max(0.0, float(each[i]))
    else:
        each = total[positive] + log_factor - s * epsilon
        i = int(np.argmin(each))
        log_delta = float(min(each[i], 0.0))
    # The tilt puts the mean of the sum at ε, or below it where moments explode just above.
    least = int(np.flatnonzero(positive)[0])
    k = min(max(int(np.searchsorted(mean, epsilon)) - 1, least), len(t) - 2)
    tilt, gain, centre = float(t[k]), total - total[k], float(mean[k])
    reach = -math.log(OUTSIDE)
    ups = (gain[k + 1 :] + reach) / (t[k + 1 :] - tilt)
    downs = (gain[:k] + reach) / (tilt - t[:k])
    up, down = int(np.argmin(ups)), int(np.argmin(downs))
    return Scout(
        tilt=tilt,
        up=float(t[k + 1 + up]) - tilt,
        down=tilt - float(t[down]),
        centre=centre,
        low=-float(downs[down]),
        high=max(float(ups[up]), epsilon),
        epsilon=epsilon,
        log_delta=log_delta,
    )


def choose_step(
    sides: Sequence[Sequence[Block]],
    *,
    is_upper: bool,
    delta: float | None = None,
    epsilon: float | None = None,
) -> float:
    """Grid step: accurate for the first side, and bounded memory for every side."""
    log_delta = None if delta is None else math.log(delta)
    scout = scout_of(sides[0], log_delta=log_delta, epsilon=epsilon)
    steps = sum(count for _, count in sides[0])
    widest = scout.high - scout.low
    scale = max(scout.epsilon, 0.02 * widest)
    step = math.sqrt(12 * ACCURACY * scale / (steps * (scout.tilt + 1)))
    step = min(step, 0.2 / (scout.tilt + 1), widest / 64)
    for pair, _ in (block for side in sides for block in side):
        if not is_upper and pair.anchor != 0:  # below needs several points inside the bulk
            step = min(step, max(abs(pair.anchor) / 4, step / 16))
        ends = loss_range(pair, one_tail(sides[0], scout.log_delta - 30))
        widest = max(widest, ends[1] - ends[0])
    is_hopeless = scout.log_delta < -650  # δ = 0 in floats: no need to be fine
    return max(step, 1.1 * widest / (2**14 if is_hopeless else MOST_POINTS))


def outline(pair: Loss, tail: float, points: int = 801) -> tuple[Array, Array]:
    """Some losses and the logarithms of their P-masses, for rough estimates."""
    if isinstance(pair, Joined):
        parts = [outline(part, tail, points) for part in (pair.under, pair.over)]
        kept = [(parts[0][0] < 0), (parts[1][0] > 0)]
        losses, masses = (
            [part[i][keep] for part, keep in zip(parts, kept, strict=True)] for i in (0, 1)
        )
        rest = max(1 - float(sum(np.exp(mass).sum() for mass in masses)), 1e-300)
        return np.concatenate([[0.0], *losses]), np.concatenate([[math.log(rest)], *masses])
    if isinstance(pair, Blend):
        found = [(math.log(w), *outline(part, tail, points)) for w, part in pair.parts if w > 0]
        return (
            np.concatenate([loss for _, loss, _ in found]),
            np.concatenate([log_w + log_p for log_w, _, log_p in found]),
        )
    if isinstance(pair, Atoms):
        with np.errstate(divide="ignore"):
            return pair.losses, np.log(pair.masses)
    x = np.linspace(*support(pair, tail), points)
    with np.errstate(divide="ignore"):
        log_p = np.log(pair.density(x))
    return pair.loss(x), log_p - logsumexp(log_p)


def one_tail(blocks: Sequence[Block], log_delta: float | None) -> float:
    """P-mass of one step that may go to infinity: together a millionth of δ."""
    steps = sum(count for _, count in blocks)
    log_tail = (-690.0 if log_delta is None else log_delta) - math.log(steps) - 14
    return min(math.exp(max(log_tail, -690.0)), 1e-12)
