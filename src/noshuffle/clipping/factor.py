"""The clip factor: what one unit's gradient is multiplied by. Everything that clips asks here.

    f = min(1, c·(1 − slack)/‖g‖)        so that    f·‖g‖ ≤ c·(1 − slack) < c

`slack` leaves space for rounding in the norm, in the factor and in the product, so that the clipped
gradient is at most c as stored. What becomes of every kind of norm:

    norm                              factor   why
    0, or subnormal                   1        c/0 = ∞, and min(1, ∞) = 1
    at most c·(1 − slack)             1        nothing to clip
    larger                            below 1  f·‖g‖ = c·(1 − slack), to the last bits
    so large that f < 2⁻¹²⁶           0        float32 would hold f to a few bits, perhaps too large
    ∞ (also: its square overflowed)   0        and the gradient must be replaced by zeros, as
    NaN                               0        0·∞ and 0·NaN are not 0
    anything, outside `keep`          0        left out: the same

Norms come in double precision, in which no square of a float32 number overflows or vanishes; those
of half-precision gradients are added up in single precision at least (`products.wide`) and their
own rounding is in the norm already (`forms`). The factor is in double precision, too: at least
2⁻¹²⁶ where it is not 0, so float32 holds it with all its bits.

`training.compiled.kernels.row_factors` (Triton) is a twin of `clip_factor`, held against it where
there is a GPU; every other clip of the package calls it. No state.

>>> norms = torch.tensor([0.0, 0.5, 4.0, 1e300, torch.inf, torch.nan], dtype=torch.float64)
>>> clip_factor(norms, 2.0, slack=0.0).tolist()
[1.0, 1.0, 0.5, 0.0, 0.0, 0.0]
>>> float(clip_factor(4.0, 2.0, slack=0.0))
0.5
"""

from __future__ import annotations

from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noshuffle.clipping.precision import rounds_convolutions, rounds_products

#: Clip to this much below the bound: rounding in the norm and in the product then stays inside.
SLACK = 2.0**-20
#: The same in double precision.
FINE_SLACK = 2.0**-44
#: The same where matrix products keep only ten bits (TF32).
COARSE_SLACK = 2.0**-9
#: The smallest factor that float32 holds with all its bits; a smaller one counts as zero.
LEAST_FACTOR = 2.0**-126

Doubles = NDArray[np.float64]


def slack(*references: Tensor) -> float:
    """How far below the bound to aim, by the precision of the gradients on this device.

    Of several parameters the least precise one decides.
    """
    found = FINE_SLACK
    for t in references:
        if t.dtype is torch.float64:
            continue
        found = max(found, SLACK)
        if t.is_cuda and (rounds_products() or (t.dim() > 2 and rounds_convolutions())):
            return COARSE_SLACK
    return found


@overload
def clip_factor(
    norms: Tensor, clip_norm: float | Tensor, *, slack: float, keep: Tensor | None = None
) -> Tensor: ...


@overload
def clip_factor(
    norms: Doubles | float, clip_norm: float, *, slack: float, keep: Any = None
) -> Doubles: ...


def clip_factor(norms: Any, clip_norm: Any, *, slack: float, keep: Any = None) -> Any:
    """min(1, c·(1 − slack)/norm) of every unit, in double precision; zero outside `keep`.

    `norms`: a tensor, or an array or number of NumPy (the same arithmetic on a few hundred numbers
    of a CPU, in a fraction of torch's time). Never waits for a device.

    Guarantees: the table above.
    """
    aim = clip_norm * (1.0 - slack)
    if isinstance(norms, Tensor):
        factor = (aim / norms.double()).clamp_max(1.0)
        is_used = factor >= LEAST_FACTOR  # false for NaN
        return torch.where(is_used if keep is None else is_used & keep, factor, 0.0)
    with np.errstate(all="ignore"):  # a norm may be 0, NaN or infinite: that is no error
        found = np.minimum(aim / np.asarray(norms, dtype=np.float64), 1.0)
        is_held = found >= LEAST_FACTOR
        return np.where(is_held if keep is None else is_held & keep, found, 0.0)
