# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
"""Pictures as tensor cores read them: half precision, channels last, in units of every example.

    halves   x = unit · hi                  10 bits, as TF32 has                  [N, C, H, W]
    pairs    x = unit · (hi + lo)           21 bits, of the 23 of float32         [N, 2·C, H, W]

The unit of an example is a power of two by which its largest entry comes to 2¹⁴ or more, so that no
other example can change how it is rounded. In a pair hi = half(x/unit) and lo = half(x/unit − hi):
|lo| ≤ 2⁻¹¹·|hi| and |x/unit − hi − lo| ≤ max(2⁻²²·|x/unit|, 2⁻²⁵), so that what is 2¹⁷ times
smaller than the largest entry of its example begins to lose bits. The channels of lo come after
those of hi, at every place: as many bytes as float32.

With each copy come squared lengths at every place, Σ_c x² of up to 64 channels, [blocks, N, H, W]
in float32 and in units squared, for the tolerance of norms (`conv_tolerance`): they are added up
where the numbers are read anyway. State: none. The module can be imported without Triton, but its
kernels not be launched.

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

#: Places that are read at once, and programs that keep a large GPU busy with it.
TILE, PROGRAMS = 64, 500


@jit
def _read(x, c, p, channels, to, each, x_picture, x_channel, x_place, BC: tl.constexpr,
          BP: tl.constexpr, MANY: tl.constexpr):  # fmt: skip
    """Channels c…, places p… before `to`; with MANY pictures of `each` places may lie apart."""
    channel, place = c + tl.arange(0, BC), p + tl.arange(0, BP)
    mask = (channel < channels)[:, None] & (place < to)[None, :]
    at = place * x_place
    if MANY:
        at = place // each * x_picture + place % each * x_place
    value = tl.load(x + channel[:, None] * x_channel + at[None, :], mask=mask, other=0.0)
    return value, channel, place, mask


@jit
def _largest(x, channels, start, to, each, x_picture, x_channel, x_place, BC: tl.constexpr,
             BP: tl.constexpr, MANY: tl.constexpr):  # fmt: skip
    """The largest |x| as its bits, which are in order; a NaN, that stays one in any unit, is 0."""
    most = tl.zeros((BC, BP), tl.float32)
    for c in range(0, channels, BC):
        for p in range(start, to, BP):
            value, _, _, _ = _read(
                x, c, p, channels, to, each, x_picture, x_channel, x_place, BC, BP, MANY
            )
            value = tl.abs(value)
            most = tl.where(value > most, value, most)
    return tl.max(most.to(tl.int32, bitcast=True))


@jit
def largest(
    x, out, channels, places, each, x_example, x_picture, x_channel, x_place, BC: tl.constexpr,
    BP: tl.constexpr, MANY: tl.constexpr, PER: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The largest |x| of a part of an example."""
    example, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    to = tl.minimum((part + 1) * PER, places)
    most = _largest(
        x + example * x_example, channels, part * PER, to, each, x_picture, x_channel, x_place,
        BC, BP, MANY,
    )  # fmt: skip
    tl.store(out + example * PARTS + part, most)


@jit
def shrink(
    x, out, units, lengths, most, channels, places, each, x_example, x_picture, x_channel, x_place,
    BC: tl.constexpr, BP: tl.constexpr, MANY: tl.constexpr, PER: tl.constexpr,
    PARTS: tl.constexpr, ROOM: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """out = half(x / unit) as [B, places, C], the unit of an example being a power of two.

    With PAIR as [B, places, 2·C]: what that leaves of x / unit comes after it. An example in one
    part has its largest entry looked for here, which is then still near.
    """
    example, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own, to = x + example * x_example, tl.minimum((part + 1) * PER, places)
    if PARTS == 1:
        bits = _largest(own, channels, 0, to, each, x_picture, x_channel, x_place, BC, BP, MANY)
    else:
        lane = tl.arange(0, ROOM)
        bits = tl.max(tl.load(most + example * PARTS + lane, mask=lane < PARTS, other=0))
    field = tl.minimum(tl.maximum(268 - (bits >> 23), 2), 252)  # the largest comes to 2¹⁴
    factor = (field << 23).to(tl.float32, bitcast=True)
    if part == 0:
        tl.store(units + example, ((254 - field) << 23).to(tl.float32, bitcast=True))
    for c in range(0, channels, BC):
        for p in range(part * PER, to, BP):
            value, channel, place, mask = _read(
                own, c, p, channels, to, each, x_picture, x_channel, x_place, BC, BP, MANY
            )
            value *= factor
            block = (c // BC * tl.num_programs(0).to(tl.int64) + example) * places
            tl.store(lengths + block + place, tl.sum(value * value, 0), mask=place < to)
            if PAIR:
                first = value.to(tl.float16)
                where = (example * places + place[None, :]) * (2 * channels) + channel[:, None]
                tl.store(out + where, first, mask=mask)
                rest = (value - first.to(tl.float32)).to(tl.float16)
                tl.store(out + where + channels, rest, mask=mask)
            else:
                where = (example * places + place[None, :]) * channels + channel[:, None]
                tl.store(out + where, value.to(tl.float16), mask=mask)


@jit
def transpose(x, out, lengths, channels, places, BC: tl.constexpr, BP: tl.constexpr):
    """[B, C, places] → [B, places, C] in another type, one tile, and its squared lengths."""
    example = tl.program_id(2).to(tl.int64)
    channel = tl.program_id(0) * BC + tl.arange(0, BC)
    place = tl.program_id(1) * BP + tl.arange(0, BP)
    mask = (channel < channels)[:, None] & (place < places)[None, :]
    own = example * channels * places
    value = tl.load(x + own + channel[:, None] * places + place[None, :], mask=mask, other=0.0)
    to = out + own + place[None, :] * channels + channel[:, None]
    tl.store(to, value.to(out.dtype.element_ty), mask=mask)
    wide = value.to(tl.float32)
    block = (tl.program_id(0) * tl.num_programs(2).to(tl.int64) + example) * places
    tl.store(lengths + block + place, tl.sum(wide * wide, 0), mask=place < places)


@jit
def measure(x, out, channels, places, x_picture, x_channel, x_place, BC: tl.constexpr,
            BP: tl.constexpr, PER: tl.constexpr):  # fmt: skip
    """The squared lengths at some places of a picture."""
    picture, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * PER
    to = tl.minimum(start + PER, places)
    for p in range(start, to, BP):
        total = tl.zeros((BP,), tl.float32)
        for c in range(0, channels, BC):
            value, _, _, _ = _read(
                x + picture * x_picture, c, p, channels, to, 1, 0, x_channel, x_place, BC, BP, False
            )
            value = value.to(tl.float32)
            total += tl.sum(value * value, 0)
        place = p + tl.arange(0, BP)
        tl.store(out + picture * places + place, total, mask=place < to)


def measured(x: Tensor) -> Tensor:
    """Squared lengths of pictures with channels last, which are read once more for it."""
    size, channels, *sides = x.shape
    if get_proxy_mode() is not None:
        return x.float().square().sum(1).unsqueeze(0)
    x, places = laid_out(x, torch.channels_last), sides[0] * sides[1]
    out = torch.empty(1, size, *sides, dtype=torch.float32, device=x.device)
    per, parts = parts_of(size, places)
    deep = min(64, max(16, 1 << (channels - 1).bit_length()))
    how = (channels, places, x.stride(0), x.stride(1), x.stride(3))
    measure[(size, parts)](x, out, *how, BC=deep, BP=TILE, PER=per)
    return out


def turned(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x in this type with channels last, and its squared lengths; torch's copy takes four times
    as long."""
    last = torch.channels_last
    (size, channels), places = x.shape[:2], x.shape[2] * x.shape[3]
    grid = -(-channels // 64), -(-places // 64), size
    is_turned = not x.is_contiguous() or x.is_contiguous(memory_format=last)
    if is_turned or get_proxy_mode() is not None or max(grid[1:]) > MOST_EXAMPLES:
        out = x.to(dtype, memory_format=last)  # an axis of a grid is no longer
        return out, measured(out)
    out = torch.empty_like(x, dtype=dtype, memory_format=last)
    lengths = torch.empty(grid[0], size, *x.shape[2:], dtype=torch.float32, device=x.device)
    transpose[grid](x, out, lengths, channels, places, BC=64, BP=64)
    return out, lengths


def laid_out(t: Tensor, layout: torch.memory_format) -> Tensor:
    """t with the strides of a layout; where an axis has one entry, torch may say so of any."""
    lies_so = t.is_contiguous(memory_format=layout) and 1 not in t.shape
    return t if lies_so else torch.empty_like(t, memory_format=layout).copy_(t)


def parts_of(size: int, places: int) -> tuple[int, int]:
    """Places of a part and parts of an example, so that few examples keep a GPU busy, too.

    >>> parts_of(500, 1024), parts_of(125, 4096), parts_of(1, 100)
    ((1024, 1), (1024, 4), (64, 2))
    """
    tiles = -(-places // TILE)
    per = -(-tiles // min(tiles, -(-PROGRAMS // size)))
    return per * TILE, -(-tiles // per)


def halves(x: Tensor, *, pictures: int = 1, is_pair: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """x in units of a power of two of each example, as float16 with channels last; the units; the
    squared lengths.

    float16 has the ten bits of TF32, and two of it (`is_pair`) nearly those of float32. What is
    2²⁸ (2¹⁷) times smaller than the largest entry of its example loses some, which no other example
    can change.
    """
    if 1 in x.shape or x.stride(2) != x.shape[3] * x.stride(3):
        x = laid_out(x, torch.contiguous_format)
    (channels, each), size = (x.shape[1], x.shape[2] * x.shape[3]), len(x) // pictures
    shape = (len(x), channels * (2 if is_pair else 1), *x.shape[2:])
    out = torch.empty(
        shape, dtype=torch.float16, device=x.device, memory_format=torch.channels_last
    )
    units = torch.empty(size, dtype=torch.float32, device=x.device)
    places, high = pictures * each, min(64, 1 << (channels - 1).bit_length())
    cut_at = max(16, high)
    blocks = -(-channels // cut_at)
    lengths = torch.empty(blocks, len(x), *x.shape[2:], dtype=torch.float32, device=x.device)
    per, parts = parts_of(size, places)
    how = (channels, places, each, pictures * x.stride(0), *(x.stride(i) for i in (0, 1, 3)))
    cut = {"BC": cut_at, "BP": TILE, "MANY": pictures > 1, "PER": per, "PARTS": parts}
    most = units
    if parts > 1:
        most = torch.empty(size * parts, dtype=torch.int32, device=x.device)
        largest[(size, parts)](x, most, *how, **cut, num_warps=8)
    room = 1 << (parts - 1).bit_length()
    given = (x, out, units, lengths, most, *how)
    shrink[(size, parts)](*given, **cut, ROOM=room, PAIR=is_pair, num_warps=8)
    return out, units, lengths


def pair_sum(pair: Tensor) -> Tensor:
    """hi + lo in float32, without the unit."""
    hi, lo = pair.chunk(2, 1)
    return hi.float().add_(lo)
