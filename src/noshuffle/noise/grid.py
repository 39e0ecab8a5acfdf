"""Noisy values are rounded to a public grid at random, so that their low bits say nothing.

    released = g·round((x + n)/g + U),       g = 2^(⌊log₂ σ⌋ − 10),       U uniform on (−½, ½)

with x the sum, n its noise and σ the deviation of what is drawn afresh in this step. The last bits
of x + n in float32 would be those of x (Mironov 2012; Jin et al. 2022); what is released is a
function of the real sum and of coins U that do not depend on x (docs/proofs.md, "Rounding to a
grid"). U costs no random words: it is made of the low bytes of the two words of a pair,

    U = (angle byte + (radius byte + ½)/2⁸)/2⁸ − ½        for the first number of the pair,
                                                          −U for the second

in the newest row of the step, whose words were never used before. With y = x + n,

    released = ((y + g·U) + 1.5·2²³ g) − 1.5·2²³ g        (2⁵² in float64)

since a sum with 1.5·2²³ g has no place for less than g: the same bits on every device. NaN and
infinity stay what they are, and without noise (g = 0) nothing is rounded. No state.

>>> grid_step(3.0) == 2.0**-9, grid_step(0.0)
(True, 0.0)
>>> words = torch.zeros(1, 1024, dtype=torch.int32)
>>> words[0, 512:514] = torch.tensor([128, 192])        # U = 0 and ¼ for the first two numbers
>>> coins = torch.empty(1, 1024)
>>> jitters_(coins, words=words, step=1.0)
>>> value = torch.tensor([2.3, 2.3])
>>> add_on_grid_(value, torch.zeros(2), jitters=coins[0, :2], step=1.0)
>>> value
tensor([2., 3.])
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from noshuffle.errors import InvalidInput
from noshuffle.noise.gaussian import ANGLE_DIGITS, MIDDLE_DIGIT, RADIUS_DIGITS

#: The grid as a power of two below the noise.
BITS = 10
#: Exponents of grids that float32 can work on; noise beyond gets a coarser or a finer grid.
_LOWEST, _HIGHEST = -126, 100
#: The largest deviation of a step's noise, whose fresh part may have 26 times its size: the grid
#: of 2¹¹¹ is the last that lies `BITS` below it, and 2¹² deviations of that are float32 numbers.
MOST_SPREAD = 1e32


def check_spread(scale: float) -> None:
    """Refuse noise whose grid float32 cannot work on."""
    if scale > MOST_SPREAD:
        raise InvalidInput(
            f"noise of deviation {scale:.3g} (noise multiplier times clip norm) is more than sums "
            f"in float32 take, {MOST_SPREAD:g} at most; clip to less, or ask for a larger epsilon"
        )


@lru_cache(maxsize=256)
def grid_step(spread: float) -> float:
    """g for fresh noise of this standard deviation; zero without noise."""
    if not spread > 0.0:
        return 0.0
    return 2.0 ** min(max(math.frexp(spread)[1] - 1 - BITS, _LOWEST), _HIGHEST)


def jitters_(out: Tensor, *, words: Tensor, step: float) -> None:
    """out = step·U from the words of the newest row (both tiles × 1024, or blocks × 4)."""
    half = words.shape[1] // 2
    digits = (words[:, :half] << 7 & RADIUS_DIGITS) | (words[:, half:] << 15 & ANGLE_DIGITS)
    # The coin as the digits of a number between g and 2g, which has the bits of g in front.
    bits = digits | (MIDDLE_DIGIT | int(np.float32(step).view(np.int32)))
    torch.sub(bits.view(torch.float32), 1.5 * step, out=out[:, :half])
    torch.neg(out[:, :half], out=out[:, half:])


def jitter(radius: int, angle: int, *, step: float) -> float:
    """`jitters_` of the first number of one pair of words."""
    digits = (radius << 7 & RADIUS_DIGITS) | (angle << 15 & ANGLE_DIGITS)
    bits = digits | MIDDLE_DIGIT | int(np.float32(step).view(np.int32))
    return float(np.int32(bits).view(np.float32)) - 1.5 * step


def add_on_grid_(target: Tensor, noise: Tensor, *, jitters: Tensor, step: float) -> None:
    """target ← (target + noise) on the grid, in float32 or better, then in the target's type.

    Guarantees: the result is a function of target + noise and of the jitters only. NaN and infinity
    stay; beyond 2¹² deviations of the noise the type's own rounding is all that is left.
    """
    wide = target.to(torch.promote_types(target.dtype, torch.float32)).add_(noise)
    if step:
        middle = step * 1.5 * (2.0**52 if wide.dtype == torch.float64 else 2.0**23)
        wide.add_(jitters).add_(middle).sub_(middle)
    if wide is not target:
        target.copy_(wide)
