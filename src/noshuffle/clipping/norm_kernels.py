# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
"""Gradients of scale and shift of a group norm on a GPU, of every example in one reading.

    weight[b, c] = Σ_k g[b, c, k] · (x[b, c, k] − μ)/√(σ² + ε)        bias[b, c] = Σ_k g[b, c, k]

with μ, σ² over the channels of a group and all positions k. A program takes one group of one
example, reads x three times and g once where a group is large, and each once where it is small
enough to stay in registers. All sums are in float32. State: whether they agreed with torch, by
device and types. The module can be imported without Triton, but its kernels not be launched.

>>> fits(torch.zeros(2, 4, 3, 3), torch.zeros(2, 4, 3, 3))
False
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import functional as F

from noshuffle.clipping.conv_kernels import laid_out
from noshuffle.clipping.gpu_kernels import MOST_EXAMPLES
from noshuffle.errors import Unsupported
from noshuffle.triton_shim import HAS_TRITON as HAS_TRITON
from noshuffle.triton_shim import jit, tl

#: Numbers of a group that a program holds at a time.
MOST_HELD = 8192
#: Fewer numbers than this are no work for a kernel of its own.
FEWEST = 2**18


@jit
def _read(t, channel, at, channels, places, by_channel, by_place, BP: tl.constexpr):
    k = at + tl.arange(0, BP)
    mask = (channel < channels)[:, None] & (k < places)[None, :]
    where = channel[:, None] * by_channel + k[None, :] * by_place
    return tl.load(t + where, mask=mask, other=0.0).to(tl.float32), mask


@jit
def sums(
    x, g, weight, bias, groups, channels, places, eps, x_example, x_channel, x_place,
    g_example, g_channel, g_place, ONCE: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One group of one example; `channels`: of a group."""
    group = tl.program_id(0)
    example = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, BC)
    own_x = x + example * x_example + group * channels * x_channel
    own_g = g + example * g_example + group * channels * g_channel
    many = channels * places
    if ONCE:
        u, mask = _read(own_x, channel, 0, channels, places, x_channel, x_place, BP)
        v, _ = _read(own_g, channel, 0, channels, places, g_channel, g_place, BP)
        mean = tl.sum(u) / many
        off = tl.where(mask, u - mean, 0.0)
        unit = 1.0 / tl.sqrt(tl.sum(off * off) / many + eps)
        both, alone = tl.sum(v * off, 1) * unit, tl.sum(v, 1)
    else:
        first = tl.zeros((BC, BP), tl.float32)
        for at in range(0, places, BP):
            u, _ = _read(own_x, channel, at, channels, places, x_channel, x_place, BP)
            first += u
        mean = tl.sum(first) / many
        second = tl.zeros((BC, BP), tl.float32)
        product = tl.zeros((BC, BP), tl.float32)
        shift = tl.zeros((BC, BP), tl.float32)
        for at in range(0, places, BP):
            u, mask = _read(own_x, channel, at, channels, places, x_channel, x_place, BP)
            v, _ = _read(own_g, channel, at, channels, places, g_channel, g_place, BP)
            off = tl.where(mask, u - mean, 0.0)
            second += off * off
            product += v * off
            shift += v
        unit = 1.0 / tl.sqrt(tl.sum(second) / many + eps)
        both, alone = tl.sum(product, 1) * unit, tl.sum(shift, 1)
    to = (example * groups + group) * channels + channel
    tl.store(weight + to, both, mask=channel < channels)
    tl.store(bias + to, alone, mask=channel < channels)


def channel_sums(x: Tensor, g: Tensor, *, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of scale and shift, [B, C] each in float32; x and g are [B, C, *places]."""
    if get_proxy_mode() is not None:
        raise Unsupported("a kernel leaves no trace")
    is_last = x.dim() == 4 and _is_last(x) and _is_last(g)
    layout = torch.channels_last if is_last else torch.contiguous_format
    x, g = laid_out(x, layout), laid_out(g, layout)
    size, channels = x.shape[:2]
    own, places = channels // groups, x[0, 0].numel()
    across = 1 << (own - 1).bit_length()
    wide = max(16, min(MOST_HELD // across, 1 << (places - 1).bit_length()))
    out = torch.empty(2, size, channels, dtype=torch.float32, device=x.device)
    sums[(groups, size)](
        x, g, out[0], out[1], groups, own, places, eps, x.stride(0), x.stride(1), x.stride(-1),
        g.stride(0), g.stride(1), g.stride(-1), ONCE=places <= wide, BC=across, BP=wide,
        num_warps=4 if across * wide <= 4096 else 8,
    )  # fmt: skip
    return out[0], out[1]


def _is_last(t: Tensor) -> bool:
    return t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous()


def fits(x: Tensor, g: Tensor) -> bool:
    """Whether these are work for the kernel, and it is good here."""
    if not (HAS_TRITON and x.is_cuda) or x.dim() < 3 or x.numel() < FEWEST:
        return False
    if torch.float64 in (x.dtype, g.dtype) or x.shape != g.shape or len(x) > MOST_EXAMPLES:
        return False
    if torch.cuda.is_current_stream_capturing() and not _agrees.cache_info().currsize:
        return False
    return _agrees(x.device, x.dtype, g.dtype)


@lru_cache(maxsize=16)
def _agrees(device: torch.device, x_type: torch.dtype, g_type: torch.dtype) -> bool:
    """Whether the kernel runs here and gives what torch gives."""
    draw = torch.Generator(device=device).manual_seed(7)
    for places in (9, 101):
        shape = (3, 6, places, places)
        x = (torch.randn(shape, device=device, generator=draw) * 3.0 + 5.0).to(x_type)
        g = torch.randn(shape, device=device, generator=draw).to(g_type)
        unit = F.group_norm(x.double(), 2, eps=1e-5)
        try:
            found = channel_sums(x, g, groups=2, eps=1e-5)
        except Exception:  # a compiler may fail in any way; torch can always do it
            return False
        wanted = (unit * g.double()).sum((2, 3)), g.double().sum((2, 3))
        if not all(
            torch.allclose(f.double(), w, rtol=1e-3, atol=1e-2) for f, w in zip(found, wanted)
        ):
            return False
    return True
