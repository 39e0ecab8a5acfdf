"""Random words into standard normals: Box–Muller over tiles, the same bits on every device.

A stream of normals is cut into tiles of 1024. A tile takes 1024 random 32-bit words w, read as
signed integers; the first half gives signed radii, the second half angles (Box and Muller, 1958):

    u = (w_j + 1/2) / 2³¹                 ρ = sign(u)·√(−ln u²)          |u| is uniform on (0, 1]
    a = w_{512+j} / 2³²  in [−½, ½)       z_j = ρ sin πa,  z_{512+j} = ρ cos πa        j = 0 … 511

The angle covers half a circle and the sign of u the other half, so all 64 bits are used. No u is
zero, so no infinity can come out; the largest magnitude is √(64 ln 2) = 6.66, which a true normal
exceeds once in 3.7·10¹⁰ draws. Words become float32 before anything else, which keeps the relative
precision of small u, hence of the tail.

Logarithm and sine are short polynomials in operations that every processor rounds in the same way
(+, −, ×, ÷, √), not the library's: so a number depends on its own two words only, never on where a
chunk, a shard or a thread began, nor on device, vendor or version. cos πa = sin π(½ − |a|).
No state is kept.

>>> zero = torch.zeros(1, TILE, dtype=torch.int32)
>>> out = torch.empty(1, TILE)
>>> normals_(out, words=zero)
>>> round(float(out[0, 0]), 4), round(float(out[0, 512]), 4)
(0.0, 6.6604)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from noshuffle.noise import native
from noshuffle.noise.constants import HALF, LN2, LOG, ROOT_HALF_BITS, SINE, TILE  # noqa: F401  (the doctest uses TILE)

#: Largest magnitude that can come out.
LARGEST = math.sqrt(64 * math.log(2))


def normals_(out: Tensor, *, words: Tensor, weight: float = 1.0, accumulate: bool = False) -> None:
    """out = weight·z, or out += weight·z, with z the normals of `words` (both tiles × 1024).

    Both tensors are contiguous.
    """
    library = native.library() if out.device.type == "cpu" else None
    if library is None:
        normals_in_torch_(out, words=words, weight=weight, accumulate=accumulate)
        return
    library.normals(words.data_ptr(), out.data_ptr(), out.shape[0], weight, accumulate)


def normals_in_torch_(
    out: Tensor, *, words: Tensor, weight: float = 1.0, accumulate: bool = False
) -> None:
    """The same in torch operations, for every device; bit for bit equal to the C loop."""
    u = words[:, :HALF].to(torch.float32)
    # The product with a power of two is exact, so fused or not the sum is rounded once.
    u = u.mul_(2.0**-31).add_(2.0**-32)
    bits = (u * u).view(torch.int32)
    e = (bits - ROOT_HALF_BITS) >> 23
    m = (bits - (e << 23)).view(torch.float32)
    s = (m - 1.0).div_(m + 1.0)
    q = s * s
    series = (q * LOG[2]).add_(LOG[1]).mul_(q).add_(LOG[0]).mul_(q).add_(2.0).mul_(s)
    r = e.to(torch.float32).mul_(LN2).add_(series).neg_()
    # torch's float32 root on a CPU may miss the last bit; by way of float64 it is exactly rounded.
    r = torch.copysign(r.double().sqrt_().float(), u).mul_(weight)
    a = words[:, HALF:].to(torch.float32).mul_(2.0**-32)
    for half, sine in ((out[:, :HALF], _sine(a)), (out[:, HALF:], _sine(0.5 - a.abs()))):
        if accumulate:
            half.add_(r * sine)
        else:
            torch.mul(r, sine, out=half)


def _sine(a: Tensor) -> Tensor:
    """sin πa for |a| ≤ ½."""
    q = a * a
    value = q * SINE[4]
    for c in SINE[3::-1]:
        value = value.add_(c).mul_(q) if c != SINE[0] else value.add_(c).mul_(a)
    return value
