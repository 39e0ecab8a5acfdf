# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
"""Gradients of every example of a convolution on a GPU, neither written out nor unfolded.

    G_b[o, (c, r)] = Σ_k g[b, o, k] · x[b, c, k·stride + r·dilation − padding]

is one product of matrices an example. A program holds a tile of G_b in registers, a window of x
being addressed where it lies, by two small tables over positions k: where a window begins, and
which of its taps r lie inside the picture (a bit each). The same loop then gives either

    squares   ‖G_b‖²                     of each tile, to be added up in float64
    total     Σ_b f_b·G_b                with f_b = 0 leaving b out, whatever it holds

so what is added up is what the norms were taken of, rounding included: no room has to be left for
it. (Norms over few positions and many channels are cheaper by `conv_gram`.) State: none. The module
can be imported without Triton, but its kernels not be launched.

>>> taps_inside((3, 3), (3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1), out=(3, 3))[0]
432
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from noshuffle.clipping import conv_gram
from noshuffle.clipping.gpu_kernels import MOST_EXAMPLES
from noshuffle.errors import Unsupported
from noshuffle.triton_shim import HAS_TRITON as HAS_TRITON
from noshuffle.triton_shim import constant, jit, tl

Pair = tuple[int, int]
Tile = tuple[int, int, int, int]
#: What adding up the squares of a tile may lose.
ROOM = constant(1.0 + 2.0**-16)
#: Programs that keep a large GPU busy.
PROGRAMS = 1056
#: Bits of a table entry: more taps than that are somebody else's work.
MOST_TAPS = 31


@jit
def _both(
    x, g, starts, inside, places, taps, rows, is_row, is_col, at, positions, g_row, g_place,
    ALIGN: tl.constexpr, EVEN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """g[rows, at:at+BK] and windows[columns, at:at+BK]."""
    k = at + tl.arange(0, BK)
    here = k < positions
    if EVEN:
        start, bits = tl.load(starts + k), tl.load(inside + k)
        u = tl.load(g + rows[:, None] * g_row + k[None, :] * g_place, mask=is_row, other=0.0)
    else:
        start = tl.load(starts + k, mask=here, other=0)
        bits = tl.load(inside + k, mask=here, other=0)
        of_g = rows[:, None] * g_row + k[None, :] * g_place
        u = tl.load(g + of_g, mask=is_row & here[None, :], other=0.0)
    is_in = ((bits[None, :] >> taps[:, None]) & 1) != 0
    v = tl.load(x + places[:, None] + (start * ALIGN)[None, :], mask=is_in & is_col, other=0.0)
    return u, v.to(u.dtype)


@jit
def walk(
    x, g, out, factors, starts, inside, examples, each, outputs, positions,
    x_example, x_channel, x_high, x_wide, g_example, g_row, g_place, pad_high, pad_wide,
    step_high, step_wide, tiles_across,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, TAPS_WIDE: tl.constexpr, ALIGN: tl.constexpr,
    IS_TOTAL: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of the gradients of `each` examples, one after the other."""
    tile = tl.program_id(0)
    first = tl.program_id(1).to(tl.int64) * each
    rows = tile // tiles_across * BM + tl.arange(0, BM)
    columns = tile % tiles_across * BN + tl.arange(0, BN)
    is_row = (rows < outputs)[:, None]
    is_col = (columns < CHANNELS * TAPS)[:, None]
    channel, taps = columns % CHANNELS, columns // CHANNELS  # neighbours in memory side by side
    taps = tl.minimum(taps, TAPS - 1)
    tap_high, tap_wide = taps // TAPS_WIDE, taps % TAPS_WIDE
    places = channel * x_channel + (tap_high * step_high - pad_high) * x_high
    places += (tap_wide * step_wide - pad_wide) * x_wide
    total = tl.zeros((BM, BN), tl.float32)
    table = tl.zeros((BM, BN), tl.float32)
    # One loop over the parts of all examples, so that loads go on while an example is finished.
    for i in range(0, tl.minimum(each, examples - first).to(tl.int32) * PARTS):
        b, part = first + i // PARTS, i % PARTS
        own_row, own_col = is_row, is_col
        if IS_TOTAL:
            factor = tl.load(factors + b)
            own_row = (rows < tl.where(factor != 0.0, outputs, 0))[:, None]
            own_col = (columns < tl.where(factor != 0.0, CHANNELS * TAPS, 0))[:, None]
        u, v = _both(
            x + b * x_example, g + b * g_example, starts, inside, places, taps, rows, own_row,
            own_col, part * BK, positions, g_row, g_place, ALIGN, EVEN, BK,
        )  # fmt: skip
        table = tl.dot(u, tl.trans(v), table, input_precision="tf32")
        if part == PARTS - 1:
            if IS_TOTAL:
                total += table * factor
            else:
                size = tl.sum(table * table)
                tl.store(out + b * tl.num_programs(0) + tile, size.to(tl.float64) * ROOM)
            table = tl.zeros((BM, BN), tl.float32)
    if IS_TOTAL:
        where = tl.program_id(1).to(tl.int64) * outputs * CHANNELS * TAPS
        # as the weight lies: [outputs, channels, taps]
        to = where + rows[:, None] * (CHANNELS * TAPS) + (channel * TAPS + taps)[None, :]
        tl.store(out + to, total, mask=is_row & (columns < CHANNELS * TAPS)[None, :])


@jit
def shrink(
    x, out, units, channels, places, x_example, x_channel, x_place, BC: tl.constexpr,
    BP: tl.constexpr,
):  # fmt: skip
    """out = half(x / unit) as [B, places, C], the unit of an example being a power of two."""
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


def halves(x: Tensor, *, pictures: int = 1) -> tuple[Tensor, Tensor]:
    """x in units of a power of two of each example, as float16 with channels last; the units.

    float16 has the ten bits of TF32. What is 2²⁸ times smaller than the largest entry of its
    example loses some, which no other example can change.
    """
    if pictures > 1:
        x = laid_out(x, torch.channels_last)
    elif 1 in x.shape or x.stride(2) != x.shape[3] * x.stride(3):
        x = laid_out(x, torch.contiguous_format)
    size, channels, places = len(x) // pictures, x.shape[1], pictures * x.shape[2] * x.shape[3]
    out = torch.empty_like(x, dtype=torch.float16, memory_format=torch.channels_last)
    units = torch.empty(size, dtype=torch.float32, device=x.device)
    high, wide = min(64, 1 << (channels - 1).bit_length()), 64
    shrink[(size,)](
        x, out, units, channels, places, pictures * x.stride(0), x.stride(1), x.stride(3),
        BC=max(16, high), BP=wide, num_warps=8,
    )  # fmt: skip
    return out, units


def taps_inside(
    kernel: Pair, size: Pair, *, stride: Pair, padding: Pair, dilation: Pair, out: Pair
) -> list[int]:
    """For every position, which taps of its window lie inside a picture of that size, a bit each.

    Taps and positions are counted row by row.
    """
    found = []
    for p, q in product(range(out[0]), range(out[1])):
        bits = 0
        for tap, (r, s) in enumerate(product(range(kernel[0]), range(kernel[1]))):
            h = p * stride[0] + r * dilation[0] - padding[0]
            w = q * stride[1] + s * dilation[1] - padding[1]
            bits |= (0 <= h < size[0] and 0 <= w < size[1]) << tap
        found.append(bits)
    return found


@lru_cache(maxsize=256)
def _tables(
    device: torch.device, kernel: Pair, size: Pair, out: Pair, how: tuple[Pair, Pair, Pair],
    strides: tuple[int, int, int], pictures: int,
) -> tuple[Tensor, Tensor, int]:  # fmt: skip
    """Where the window of every position begins, which of its taps are inside, and a common unit.

    The first are given in that unit: a compiler that knows it reads several numbers at once.
    """
    stride, padding, dilation = how
    inside = taps_inside(kernel, size, stride=stride, padding=padding, dilation=dilation, out=out)
    starts = [
        i * strides[0] + p * stride[0] * strides[1] + q * stride[1] * strides[2]
        for i, p, q in product(range(pictures), range(out[0]), range(out[1]))
    ]
    unit = math.gcd(16, *starts)
    both = ([start // unit for start in starts], inside * pictures)
    first, second = (torch.tensor(one, dtype=torch.int32, device=device) for one in both)
    return first, second, unit


def _tables_for(
    x: Tensor, g: Tensor, kernel: Pair, how: tuple[Pair, Pair, Pair], pictures: int
) -> tuple[Tensor, Tensor, int]:
    size, out = (x.shape[2], x.shape[3]), (g.shape[2], g.shape[3])
    strides = (x.stride(0), x.stride(2), x.stride(3))
    return _tables(x.device, kernel, size, out, how, strides, pictures)


def tile(
    outputs: int, columns: int, *, is_total: bool, is_deep: bool = True, is_roomy: bool = True
) -> Tile:
    """Rows and columns of G_b that a program holds, its warps, and how far ahead it loads.

    Measured on an H200 (layers of 64 to 512 channels): a sum holds two tables, so half the rows;
    tables of positions are loaded before what they point to, so a stage more than usual where there
    are several parts of an example (`is_deep`). `is_roomy`: 160 KiB of shared memory a program.
    """
    high, across = (max(16, 1 << (many - 1).bit_length()) for many in (outputs, columns))
    stages = 5 if is_roomy and (is_total or is_deep) else 4 if is_roomy else 3
    return min(64 if is_total else 128, high), min(128, across), 4, stages


@lru_cache(maxsize=16)
def _is_roomy(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    found: Any = torch.cuda.get_device_properties(device)
    return int(getattr(found, "shared_memory_per_block_optin", 0)) >= 160 << 10


def _launch(
    x: Tensor,
    g: Tensor,
    kernel: Pair,
    how: tuple[Pair, Pair, Pair],
    pictures: int,
    factors: Tensor | None,
) -> Tensor:
    if get_proxy_mode() is not None:
        raise Unsupported("a kernel leaves no trace")
    x, g = (laid_out(t, torch.channels_last) for t in (x, g))
    count, channels, outputs, out = *x.shape[:2], g.shape[1], g.shape[2:]
    examples = count // pictures
    _, padding, dilation = how
    starts, inside, unit = _tables_for(x, g, kernel, how, pictures)
    taps, positions = kernel[0] * kernel[1], pictures * out[0] * out[1]
    # 128 bytes, or the few positions that there are
    deep = min(64 if g.dtype != torch.float32 else 32, max(16, 1 << (positions - 1).bit_length()))
    high, across, warps, stages = tile(
        outputs,
        channels * taps,
        is_total=factors is not None,
        is_deep=positions > deep,
        is_roomy=_is_roomy(x.device),
    )
    tiles_across = -(-channels * taps // across)
    tiles = -(-outputs // high) * tiles_across
    groups = max(1, min(examples, -(-PROGRAMS // tiles)))
    each = -(-examples // groups)
    groups = -(-examples // each)
    is_total = factors is not None
    if factors is None:
        result = torch.empty(examples, tiles, dtype=torch.float64, device=x.device)
        factors = result
    else:
        shape = (groups, outputs, channels, *kernel)
        result = torch.empty(shape, dtype=torch.float32, device=x.device)
    given = (
        x, g, result, factors, starts, inside, examples, each, outputs, positions,
        pictures * x.stride(0), *x.stride()[1:], pictures * g.stride(0), g.stride(1), g.stride(3),
        *padding, *dilation, tiles_across,
    )  # fmt: skip
    options: dict[str, Any] = {
        "CHANNELS": channels, "TAPS": taps, "TAPS_WIDE": kernel[1], "ALIGN": unit,
        "IS_TOTAL": is_total, "PARTS": -(-positions // deep), "EVEN": positions % deep == 0,
        "BM": high, "BN": across, "BK": deep, "num_warps": warps, "num_stages": stages,
    }  # fmt: skip
    walk[(tiles, groups)](*given, **options)
    return result


def squares(
    x: Tensor, g: Tensor, *, kernel: Pair, how: tuple[Pair, Pair, Pair], pictures: int = 1
) -> Tensor:
    """‖G_b‖² of every example, [B] in float64, with `ROOM`; `how`: stride, padding, dilation.

    An example may have several pictures, one after the other: G_b is the sum over them.
    """
    positions, inputs = pictures * g.shape[2] * g.shape[3], x.shape[1] * kernel[0] * kernel[1]
    is_half = x.dtype is g.dtype and g.dtype is not torch.float32
    if is_half and conv_gram.pays(positions, inputs, g.shape[1]):
        if get_proxy_mode() is not None:
            raise Unsupported("a kernel leaves no trace")
        x, g = (laid_out(t, torch.channels_last) for t in (x, g))
        tables = _tables_for(x, g, kernel, how, pictures)
        return conv_gram.squares(x, g, tables, kernel=kernel, how=how, pictures=pictures)
    return _launch(x, g, kernel, how, pictures, None).sum(1)


def total(
    x: Tensor,
    g: Tensor,
    factors: Tensor,
    *,
    kernel: Pair,
    how: tuple[Pair, Pair, Pair],
    pictures: int = 1,
) -> Tensor:
    """Σ_b factors[b]·G_b in float32, as the weight lies; what has factor zero may hold anything."""
    return _launch(x, g, kernel, how, pictures, factors.float().contiguous()).sum(0)
