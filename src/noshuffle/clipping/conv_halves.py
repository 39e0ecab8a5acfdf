# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
"""Pictures as tensor cores read them: half precision, channels last, in units of every example.

    halves   x = unit · hi                  10 bits, as TF32 has                  [N, C, H, W]
    pairs    x = unit · (hi + lo)           21 bits, of the 23 of float32         [N, 2·C, H, W]

The unit of an example is a power of two by which its largest entry comes to 2¹⁴ or more, so that no
other example can change how it is rounded. In a pair hi = half(x/unit) and lo = half(x/unit − hi):
|lo| ≤ 2⁻¹¹·|hi| and |x/unit − hi − lo| ≤ max(2⁻²²·|x/unit|, 2⁻²⁵), so that what is 2¹⁷ times
smaller than the largest entry of its example begins to lose bits. The channels of lo come after
those of hi, at every place: as many bytes as float32. State: none. The module can be imported
without Triton, but its kernels not be launched.

>>> x = torch.arange(24.0).reshape(1, 2, 3, 4)
>>> laid_out(x, torch.channels_last).stride()
(24, 1, 8, 2)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from noshuffle.clipping.gpu_kernels import MOST_EXAMPLES
from noshuffle.triton_shim import jit, tl


@jit
def shrink(
    x, out, units, channels, places, x_example, x_channel, x_place, BC: tl.constexpr,
    BP: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """out = half(x / unit) as [B, places, C], the unit of an example being a power of two.

    With PAIR as [B, places, 2·C]: what that leaves of x / unit comes after it.
    """
    example = tl.program_id(0).to(tl.int64)
    own = x + example * x_example
    most = tl.zeros((BC, BP), tl.float32)
    for c in range(0, channels, BC):
        for p in range(0, places, BP):
            channel, place = c + tl.arange(0, BC), p + tl.arange(0, BP)
            mask = (channel < channels)[:, None] & (place < places)[None, :]
            where = channel[:, None] * x_channel + place[None, :] * x_place
            value = tl.abs(tl.load(own + where, mask=mask, other=0.0))
            most = tl.where(value > most, value, most)  # a NaN stays one in any unit
    bits = tl.max(most.to(tl.int32, bitcast=True))  # of numbers that are not negative, in order
    field = tl.minimum(tl.maximum(268 - (bits >> 23), 2), 252)  # the largest comes to 2¹⁴
    factor = (field << 23).to(tl.float32, bitcast=True)
    tl.store(units + example, ((254 - field) << 23).to(tl.float32, bitcast=True))
    for c in range(0, channels, BC):
        for p in range(0, places, BP):
            channel, place = c + tl.arange(0, BC), p + tl.arange(0, BP)
            mask = (channel < channels)[:, None] & (place < places)[None, :]
            where = channel[:, None] * x_channel + place[None, :] * x_place
            value = tl.load(own + where, mask=mask, other=0.0) * factor
            if PAIR:
                first = value.to(tl.float16)
                to = (example * places + place[None, :]) * (2 * channels) + channel[:, None]
                tl.store(out + to, first, mask=mask)
                rest = (value - first.to(tl.float32)).to(tl.float16)
                tl.store(out + to + channels, rest, mask=mask)
            else:
                to = (example * places + place[None, :]) * channels + channel[:, None]
                tl.store(out + to, value.to(tl.float16), mask=mask)


@jit
def turn(x, out, channels, places, BC: tl.constexpr, BP: tl.constexpr):
    """[B, C, places] → [B, places, C] in another type, one tile."""
    example = tl.program_id(2).to(tl.int64)
    channel = tl.program_id(0) * BC + tl.arange(0, BC)
    place = tl.program_id(1) * BP + tl.arange(0, BP)
    mask = (channel < channels)[:, None] & (place < places)[None, :]
    own = example * channels * places
    value = tl.load(x + own + channel[:, None] * places + place[None, :], mask=mask)
    to = out + own + place[None, :] * channels + channel[:, None]
    tl.store(to, value.to(out.dtype.element_ty), mask=mask)


def turned(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in this type with channels last; torch's own copy takes four times as long."""
    last = torch.channels_last
    if not x.is_contiguous() or x.is_contiguous(memory_format=last) or get_proxy_mode() is not None:
        return x.to(dtype, memory_format=last)
    (size, channels), places = x.shape[:2], x.shape[2] * x.shape[3]
    out = torch.empty_like(x, dtype=dtype, memory_format=last)
    grid = -(-channels // 64), -(-places // 64), size
    if max(grid[1:]) > MOST_EXAMPLES:  # an axis of a grid is no longer
        return out.copy_(x)
    turn[grid](x, out, channels, places, BC=64, BP=64)
    return out


def laid_out(t: Tensor, layout: torch.memory_format) -> Tensor:
    """t with the strides of a layout; where an axis has one entry, torch may say so of any."""
    lies_so = t.is_contiguous(memory_format=layout) and 1 not in t.shape
    return t if lies_so else torch.empty_like(t, memory_format=layout).copy_(t)


def halves(x: Tensor, *, pictures: int = 1, is_pair: bool = False) -> tuple[Tensor, Tensor]:
    """x in units of a power of two of each example, as float16 with channels last; the units.

    float16 has the ten bits of TF32, and two of it (`is_pair`) nearly those of float32. What is
    2²⁸ (2¹⁷) times smaller than the largest entry of its example loses some, which no other example
    can change.
    """
    if pictures > 1:
        x = laid_out(x, torch.channels_last)
    elif 1 in x.shape or x.stride(2) != x.shape[3] * x.stride(3):
        x = laid_out(x, torch.contiguous_format)
    size, channels, places = len(x) // pictures, x.shape[1], pictures * x.shape[2] * x.shape[3]
    shape = (len(x), channels * (2 if is_pair else 1), *x.shape[2:])
    out = torch.empty(
        shape, dtype=torch.float16, device=x.device, memory_format=torch.channels_last
    )
    units = torch.empty(size, dtype=torch.float32, device=x.device)
    high, wide = min(64, 1 << (channels - 1).bit_length()), 64
    shrink[(size,)](
        x, out, units, channels, places, pictures * x.stride(0), x.stride(1), x.stride(3),
        BC=max(16, high), BP=wide, PAIR=is_pair, num_warps=8,
    )  # fmt: skip
    return out, units


def pair_sum(pair: Tensor) -> Tensor:
    """hi + lo in float32, without the unit."""
    hi, lo = pair.chunk(2, 1)
    return hi.float().add_(lo)
