"""Random words into standard normals: Box–Muller over tiles, the same bits on every device.

A stream of normals is cut into tiles of 1024. A tile takes 1024 random 32-bit words w, read as
signed integers; the first half gives signed radii, the second half angles (Box and Muller, 1958):

    u = (w_j + v_j) / 2³¹                 ρ = sign(u)·√(−ln u²)          |u| is uniform on (0, 1)
    a = w_{512+j} / 2³²  in [−½, ½)       z_j = ρ sin πa,  z_{512+j} = ρ cos πa        j = 0 … 511

The angle covers half a circle and the sign of u the other half, so all 64 bits are used. Words
become float32 before anything else, which keeps the relative precision of small u, hence of the
tail, and of small angles; v has 14 scattered bits of the angle word, so that radii in the tail lie
closer than the grid on which noisy values are released. No u is zero, so no infinity can come out;
the largest magnitude is √(92 ln 2) = 7.99, which a true normal exceeds once in 7·10¹⁴ draws.

It is evaluated without the library's functions, so that a number depends on its own two words only,
never on where a chunk, a shard or a thread began, nor on device, vendor or version:

    u = ±2⁻ᵉ·(1+f),  ½ ≤ 1+f < 1           ρ² = 2e ln 2 − 2 ln(1+f)
    t = a² + ⅛                              sin πa = a·S(t),   cos πa = C(t)

with polynomials by Horner's rule: minimax fits, rounded to float32 one coefficient after the other
(relative error of the sine 6e-9 and of the logarithm 1.5e-7, error of the cosine 5e-8). A unit is
taken off the factor of w, so that words that float32 rounds up to 2³¹ do not reach u = 1: no radius
is zero, the least is 3.5e-4.

Every operation is one that all processors round in the same way: +, −, ×, √, and a·b + c rounded
once, which is float64 rounded to float32 here (docs/proofs.md). No state is kept.

>>> zero = torch.zeros(1, 1024, dtype=torch.int32)
>>> out = torch.empty(1, 1024)
>>> normals_(out, words=zero)
>>> round(float(out[0, 0]), 4), round(float(out[0, 512]), 4)
(0.0, 7.9856)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Normals (and random words) in one tile: half of them make radii, half make angles.
TILE = 1024
HALF = TILE // 2

#: Tiles worked on together: by a thread of the C step as many as a cache holds, by torch in
#: ordinary memory as many as it shares out among its threads, on an accelerator as keep it busy.
CPU_CHUNK, TORCH_CHUNK, DEVICE_CHUNK = 32, 128, 16384

SINE = (
    3.8285884857177734,
    -5.833874225616455,
    2.781672716140747,
    -0.6369983553886414,
    0.07753802090883255,
)
COSINE = (
    1.6829167604446411,
    -6.013545036315918,
    4.578469753265381,
    -1.4417455196380615,
    0.21971319615840912,
)
LOG = (
    -1.999999761581421,
    1.0000687837600708,
    -0.6638188362121582,
    0.5436059832572937,
    -0.08042425662279129,
    1.5593502521514893,
    2.1477081775665283,
    2.361654758453369,
)
LN2 = 0.6931471824645996

#: 4u = SPREAD·w + (shift, see below). The factor is a unit below 2⁻²⁹, so that words that float32
#: rounds up to 2³¹ do not reach u = 1.
SPREAD = 2.0**-29 - 2.0**-53

#: The shift is BASE·(k + ½)/2¹⁴ with k the first 14 bits of SCATTER times the angle word (modulo
#: 2³²): they become these digits of a float32 between BASE and 2·BASE, of which BASE is taken off.
SCATTER = 0x9E3779B1 - 2**32
SHIFT_DIGITS, SHIFT_ONES, BASE = 0x7FFE00, 0x31000100, 2.0**-29

#: The low bytes of the radius word and of the angle word of a pair, of which the conversion to
#: float32 keeps little, decide how its two numbers are rounded (`grid`): they become these digits
#: of a float32, and the last one is always set, half a unit.
RADIUS_DIGITS, ANGLE_DIGITS, MIDDLE_DIGIT = 0x7F80, 0x7F8000, 0x40

#: Largest magnitude that can come out.
LARGEST = math.sqrt(92 * math.log(2))


def normals_(out: Tensor, *, words: Tensor, weight: float = 1.0, accumulate: bool = False) -> None:
    """out = weight·z, or out += weight·z, with z the normals of `words` (both tiles × 1024).

    For every device; the C step and the GPU kernel do the same operations.
    """
    # v = 4u, since the exponent of a float32 below 4 is 128 − e: a product with it is exact.
    shift = ((words[:, HALF:] * SCATTER >> 9) & SHIFT_DIGITS | SHIFT_ONES).view(
        torch.float32
    ) - BASE
    v = words[:, :HALF].to(torch.float32).double().mul_(SPREAD).add_(shift).float()
    bits = v.view(torch.int32)
    f = ((bits & 0x7FFFFF) | 0x3F000000).view(torch.float32).sub_(1.0).double()
    rest = (bits & 0x7F800000).double().mul_(-LN2 * 2.0**-22).add_(256 * LN2).float()
    square = _polynomial(f, LOG).mul_(f).add_(rest).float()
    # torch's float32 root on a CPU may miss the last bit; by way of float64 it is exactly rounded.
    r = torch.copysign(square.double().sqrt_().float(), v).mul_(weight)
    a = words[:, HALF:].to(torch.float32).mul_(2.0**-32)
    t = a.double().square_().add_(0.125).float().double()
    sines, cosines = _polynomial(t, SINE).float(), _polynomial(t, COSINE).float()
    for half, z in ((out[:, :HALF], a.mul_(r).mul_(sines)), (out[:, HALF:], r.mul_(cosines))):
        if accumulate:
            half.add_(z)
        else:
            half.copy_(z)


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """Horner's rule in fused multiply-adds; float64 in and out, of float32 values."""
    value = torch.full_like(x, coefficients[-1])
    rounded = torch.empty_like(x, dtype=torch.float32)  # kept: fresh memory at every step is slow
    for c in coefficients[-2::-1]:
        rounded.copy_(value.mul_(x).add_(c))
        value.copy_(rounded)
    return value
