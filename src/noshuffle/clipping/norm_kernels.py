# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
"""Gradients of scale and shift of group and layer norms on a GPU, of every example in one reading.

    weight[b, c] = Σ_k g[b, c, k] · (x[b, c, k] − μ)/√(σ² + ε)        bias[b, c] = Σ_k g[b, c, k]

Group norms: μ, σ² over the channels of a group and all positions k. A program takes one group of
one example, reads x three times and g once where a group is large, and each once where it is small
enough to stay in registers. Layer norms: μ, σ² over all channels of one position; a program takes
some positions of one example. All sums are in float32. State: whether they agreed with torch, by
device and types. The module can be imported without Triton, but its kernels not be launched.

>>> fits(torch.zeros(2, 4, 3, 3), torch.zeros(2, 4, 3, 3))
False
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from noshuffle.clipping.conv_halves import laid_out
from noshuffle.clipping.gpu_kernels import MOST_EXAMPLES
from noshuffle.triton_shim import HAS_TRITON as HAS_TRITON
from noshuffle.triton_shim import KernelTest, jit, tl

#: Numbers of a group that a program holds at a time.
MOST_HELD = 8192
#: Programs that keep a large GPU busy.
PROGRAMS = 1056
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
    x, g = (t if _is_last(t) else laid_out(t, torch.contiguous_format) for t in (x, g))
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


@jit
def row_sums(
    x, g, out, steps, each, width, eps, ROWS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """`each` of the steps of one example, ROWS at a time."""
    part, example = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, WIDE)
    both = tl.zeros((WIDE,), tl.float32)
    alone = tl.zeros((WIDE,), tl.float32)
    for at in range(0, each, ROWS):
        step = part * each + at + tl.arange(0, ROWS)
        is_step = (step < steps) & (at + tl.arange(0, ROWS) < each)
        mask = is_step[:, None] & (lane < width)[None, :]
        where = (example * steps + step)[:, None] * width + lane[None, :]
        u = tl.load(x + where, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(g + where, mask=mask, other=0.0).to(tl.float32)
        off = tl.where(mask, u - (tl.sum(u, 1) / width)[:, None], 0.0)
        unit = 1.0 / tl.sqrt(tl.sum(off * off, 1) / width + eps)
        both += tl.sum(v * off * unit[:, None], 0)
        alone += tl.sum(v, 0)
    to = out + (example * tl.num_programs(0) + part) * 2 * width + lane
    tl.store(to, both, mask=lane < width)
    tl.store(to + width, alone, mask=lane < width)


def layer_sums(x: Tensor, g: Tensor, *, size: int, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of scale and shift of a layer norm over the last axis, [B, width] in float32."""
    width = x.shape[-1]
    steps = x.numel() // (size * width)
    across = 1 << (width - 1).bit_length()
    rows = max(1, min(16, MOST_HELD // across))
    parts = max(1, min(-(-steps // rows), -(-PROGRAMS // size)))
    each = -(-steps // parts)
    out = torch.empty(size, parts, 2, width, dtype=torch.float32, device=x.device)
    row_sums[(parts, size)](x, g, out, steps, each, width, eps, ROWS=rows, WIDE=across, num_warps=8)
    weight, bias = out.sum(1).unbind(1)
    return weight, bias


def _is_last(t: Tensor) -> bool:
    """Whether channels lie last, which torch may say of any picture with an axis of one entry."""
    return t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last) and 1 not in t.shape


def fits(x: Tensor, g: Tensor) -> bool:
    """Whether these are work for the kernel of group norms, and it is good here."""
    return x.dim() >= 3 and _fits(x, g, by_rows=False)


def fits_rows(x: Tensor, g: Tensor, width: int) -> bool:
    """The same of layer norms over a last axis of this width."""
    is_laid_out = x.is_contiguous() and g.is_contiguous()
    return is_laid_out and width <= MOST_HELD and _fits(x, g, by_rows=True)


def _fits(x: Tensor, g: Tensor, *, by_rows: bool) -> bool:
    if not (HAS_TRITON and x.is_cuda) or x.numel() < FEWEST or x.shape != g.shape:
        return False
    if torch.float64 in (x.dtype, g.dtype) or len(x) > MOST_EXAMPLES:
        return False
    return _agrees(x.device, x.dtype, g.dtype, by_rows)


@KernelTest
def _agrees(device: torch.device, x_type: torch.dtype, g_type: torch.dtype, by_rows: bool) -> bool:
    """Whether a kernel runs here and gives what torch gives."""
    draw = torch.Generator(device=device).manual_seed(7)
    shapes: tuple[tuple[int, ...], ...] = ((3, 6, 9, 9), (3, 6, 101, 101))
    if by_rows:
        shapes = ((3, 5, 40), (3, 77, 700))
    for shape in shapes:
        x = (torch.randn(shape, device=device, generator=draw) * 3.0 + 5.0).to(x_type)
        g = torch.randn(shape, device=device, generator=draw).to(g_type)
        try:
            if by_rows:
                found = layer_sums(x, g, size=3, eps=1e-5)
                unit = F.layer_norm(x.double(), shape[-1:], eps=1e-5)
            else:
                found = channel_sums(x, g, groups=2, eps=1e-5)
                unit = F.group_norm(x.double(), 2, eps=1e-5)
        except Exception:  # a compiler may fail in any way; torch can always do it
            return False
        for own, wanted in zip(found, (unit * g.double(), g.double())):
            total = wanted.sum(1 if by_rows else (2, 3))
            if not torch.allclose(own.double(), total, rtol=1e-3, atol=1e-2):
                return False
    return True
