# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
"""A convolution of stride 1 in full single precision, on tensor cores.

    y[b, o, k] = Σ_{c, r} x[b, c, k + r·dilation − padding] · v[o, c, r]

Both come as pairs of half-precision numbers (`conv_halves`), x in a unit of every example, v in one
of its own, and a product is three,

    (x_hi + x_lo)·(v_hi + v_lo) ≈ x_lo·v_hi + x_hi·v_lo + x_hi·v_hi

added up in float32: 21 bits, where cuDNN's algorithms in single precision run on other cores, and
those by Fourier transforms take ten times the room of what they read. A program has places of one
example alone, so that what an example holds, a NaN too, stays with it. Used for the gradient at an
input (`conv_input`), whose pairs the norms of the layer have made already. State: whether the
kernel agrees with torch, by device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import functional as F

from noshuffle.clipping.conv_halves import halves, laid_out
from noshuffle.clipping.conv_kernels import HAS_TRITON, MOST_TAPS, Pair, _tables_for
from noshuffle.clipping.shared_copies import copy_of
from noshuffle.clipping.state import is_wrapped
from noshuffle.triton_shim import KernelTest, jit, tl

#: Channels below which a tile would be mostly empty, and work that is not worth a launch.
NARROWEST, LEAST = 16, 2**22


@jit
def convolve(
    x, v, out, units, own, starts, inside, outputs, positions, x_example, x_high, x_wide,
    out_example, out_channel, out_place, pad_high, pad_wide, step_high, step_wide, place_tiles,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, TAPS_WIDE: tl.constexpr, ALIGN: tl.constexpr,
    PARTS: tl.constexpr, EVEN: tl.constexpr, BP: tl.constexpr, BO: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Some outputs at some places of one example."""
    across = tl.program_id(0)
    b = (tl.program_id(1) // place_tiles).to(tl.int64)
    place = tl.program_id(1) % place_tiles * BP + tl.arange(0, BP)
    output = across * BO + tl.arange(0, BO)
    is_here, is_output = place < positions, (output < outputs)[:, None]
    start = tl.load(starts + place, mask=is_here, other=0) * ALIGN
    bits = tl.load(inside + place, mask=is_here, other=0)
    table = tl.zeros((BP, BO), tl.float32)
    for i in range(0, TAPS * PARTS):
        tap, channel = i // PARTS, i % PARTS * BC + tl.arange(0, BC)
        shift = (tap // TAPS_WIDE * step_high - pad_high) * x_high
        shift += (tap % TAPS_WIDE * step_wide - pad_wide) * x_wide
        is_in = (((bits >> tap) & 1) != 0)[:, None]
        from_x = x + b * x_example + (start + shift)[:, None] + channel[None, :]
        from_v = v + output[:, None] * (TAPS * 2 * CHANNELS) + tap * (2 * CHANNELS)
        from_v += channel[None, :]
        is_own = is_output
        if not EVEN:
            is_in = is_in & (channel < CHANNELS)[None, :]
            is_own = is_output & (channel < CHANNELS)[None, :]
        high_x = tl.load(from_x, mask=is_in, other=0.0)
        low_x = tl.load(from_x + CHANNELS, mask=is_in, other=0.0)
        high_v = tl.load(from_v, mask=is_own, other=0.0)
        low_v = tl.load(from_v + CHANNELS, mask=is_own, other=0.0)
        more = tl.dot(low_x, tl.trans(high_v))
        more = tl.dot(high_x, tl.trans(low_v), more)
        more = tl.dot(high_x, tl.trans(high_v), more)
        table += more  # tensor cores round towards zero; this, once a part, to the nearest
    table = table * tl.load(units + b) * tl.load(own)
    to = out + b * out_example + place[:, None] * out_place + output[None, :] * out_channel
    tl.store(to, table, mask=is_here[:, None] & (output < outputs)[None, :])


def tile(outputs: int, positions: int, channels: int) -> tuple[int, int, int, int, int]:
    """Places, outputs and channels in hand at once, warps, and how far ahead they load."""
    places, across, deep = (
        max(16, 1 << (many - 1).bit_length()) for many in (positions, outputs, channels)
    )
    high, wide = min(128, places), min(128, across)
    if high == wide == 128 and deep >= 64:
        return high, wide, 64, 8, 3
    return high, wide, min(32, deep), 4, 3 if high == 128 else 4


def convolved(
    pair: Tensor, units: Tensor, weight: Tensor, *, padding: Pair, dilation: Pair, like: Tensor
) -> Tensor:
    """y in float32, laid out as `like`: x as a pair with its units, the weight [O, C, *taps]."""
    outputs, channels, *kernel = weight.shape
    x = laid_out(pair, torch.channels_last)
    v, own, _ = halves(weight, pictures=outputs, is_pair=True)
    sizes = [n + 2 * p - d * (k - 1) for n, p, d, k in zip(x.shape[2:], padding, dilation, kernel)]
    last = like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous()
    layout = torch.channels_last if last else torch.contiguous_format
    out = torch.empty(len(x), outputs, *sizes, device=x.device, memory_format=layout)
    taps, how = (kernel[0], kernel[1]), ((1, 1), padding, dilation)
    starts, inside, unit = _tables_for(x, out, taps, how, 1)
    positions = sizes[0] * sizes[1]
    high, across, deep, warps, stages = tile(outputs, positions, channels)
    tiles = -(-positions // high)
    options: dict[str, Any] = {
        "CHANNELS": channels, "TAPS": taps[0] * taps[1], "TAPS_WIDE": taps[1], "ALIGN": unit,
        "PARTS": -(-channels // deep), "EVEN": channels % deep == 0, "BP": high, "BO": across,
        "BC": deep, "num_warps": warps, "num_stages": stages,
    }  # fmt: skip
    given = (
        x, v, out, units, own, starts, inside, outputs, positions, x.stride(0), x.stride(2),
        x.stride(3), out.stride(0), out.stride(1), out.stride(3), *padding, *dilation, tiles,
    )  # fmt: skip
    for begin in range(0, len(x), most := max(1, (2**16 - 1) // tiles)):
        part = slice(begin, begin + most)
        own_given = (x[part], v, out[part], units[part], *given[4:])
        convolve[(-(-outputs // across), tiles * len(x[part]))](*own_given, **options)
    return out


def is_work(x: Tensor, outputs: int, kernel: Pair, padding: Pair) -> bool:
    """Whether this convolution of stride 1 is one for the kernel, and it is good here."""
    if not (HAS_TRITON and x.is_cuda and x.dim() == 4 and x.dtype is torch.float32):
        return False
    channels, taps = x.shape[1], kernel[0] * kernel[1]
    if is_wrapped(x) or get_proxy_mode() is not None or min(outputs, channels) < NARROWEST:
        return False
    if taps > MOST_TAPS or min(padding) < 0 or x[:1].numel() >= 2**30:
        return False
    if x.numel() * outputs * taps < LEAST * NARROWEST:
        return False
    return _agrees(x.device)


def by_pairs(x: Tensor, weight: Tensor, *, padding: Pair, dilation: Pair) -> Tensor:
    """The convolution of x, whose pairs somebody may have made in this backward pass."""
    pair, units, _ = copy_of(x, (1, True), lambda t: halves(t, is_pair=True))
    return convolved(pair, units, weight, padding=padding, dilation=dilation, like=x)


@KernelTest
def _agrees(device: torch.device) -> bool:
    """Whether the kernel runs here and gives what torch gives, each of its three products used."""
    draw = torch.Generator(device=device).manual_seed(7)
    for channels, outputs, taps, padding in ((24, 40, (3, 3), (1, 1)), (70, 130, (3, 2), (2, 0))):
        x = torch.randn(5, channels, 13, 11, device=device, generator=draw)
        weight = torch.randn(outputs, channels, *taps, device=device, generator=draw)
        x, weight = (t.half().float().mul_(1.0 + 2.0**-12) for t in (x, weight))
        wanted = F.conv2d(x.double(), weight.double(), None, 1, padding)
        x[2] = torch.nan
        try:
            pair, units, _ = halves(x, is_pair=True)
            how: dict[str, Any] = {"padding": padding, "dilation": (1, 1), "like": x}
            found = convolved(pair, units, weight, **how).double()
        except Exception:  # a compiler may fail in any way; torch's convolution is always there
            return False
        good = [0, 1, 3, 4]
        gap = (found - wanted)[good].norm() / wanted[good].norm()
        if not bool(gap < 1e-5):
            return False
    return True
