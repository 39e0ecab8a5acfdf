# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
"""Gradients of every example of a convolution on a GPU, neither written out nor unfolded.

    G_b[o, (c, r)] = Σ_k g[b, o, k] · x[b, c, k·stride + r·dilation − padding]

is one product of matrices an example. A program holds a tile of G_b in registers, a window of x
being addressed where it lies, by two small tables over positions k: where a window begins, and
which of its taps r lie inside the picture (a bit each). The same loop then gives either

    squares   ‖G_b‖²                     of each tile, to be added up in float64
    total     Σ_b f_b·G_b                with f_b = 0 leaving b out, whatever it holds

so what is added up is what the norms were taken of, rounding included: an example keeps its bound
without a tolerance for it. Norms have one all the same (`conv_tolerance`): another batch may have
them found in another way. (Over few positions and many channels `conv_gram` is cheaper.)

Full single precision comes as pairs (`conv_halves`), whose product takes three on tensor cores,

    (g_hi + g_lo)·(x_hi + x_lo) ≈ g_lo·x_hi + g_hi·x_lo + g_hi·x_hi

added up in float32; g_lo·x_lo, at most 2⁻²² of the whole, is left out of norms and sum alike.

State: none. The module can be imported without Triton, but its kernels not be launched.

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

from noshuffle.clipping import conv_gram, conv_tolerance
from noshuffle.clipping.conv_halves import laid_out
from noshuffle.clipping.graph_memory import hold
from noshuffle.triton_shim import HAS_TRITON as HAS_TRITON
from noshuffle.triton_shim import constant, jit, tl

Pair = tuple[int, int]
Tile = tuple[int, int, int, int, int, int]
#: What adding up the squares of a tile may lose.
ROOM = constant(1.0 + 2.0**-16)
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
    PAIR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
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
    # Its table is added when it is whole: parts that cancel may be larger than all the rest.
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
        if PAIR:  # lo lies behind hi; the same places, so only the loads are new
            low_u, low_v = _both(
                x + b * x_example + CHANNELS * x_channel, g + b * g_example + outputs * g_row,
                starts, inside, places, taps, rows, own_row, own_col, part * BK, positions, g_row,
                g_place, ALIGN, EVEN, BK,
            )  # fmt: skip
            more = tl.dot(low_u, tl.trans(v))
            more = tl.dot(u, tl.trans(low_v), more)
            more = tl.dot(u, tl.trans(v), more)
            table += more  # tensor cores round towards zero; this, once a part, to the nearest
        else:
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
    starts, inside, unit = _tables(x.device, kernel, size, out, how, strides, pictures)
    return hold(starts), hold(inside), unit


def tile(
    outputs: int, columns: int, positions: int, *, is_total: bool, kind: str, is_roomy: bool = True
) -> Tile:
    """Rows, columns and positions of G_b in hand at once; warps, how far ahead they load, programs.

    Measured on an H200 (layers of 32 to 512 channels). A sum holds two tables, so half the rows,
    and every group of examples leaves a table of the whole gradient to be added up, so a quarter of
    the programs: 0.5 to 0.75 of the time that 1,056 took. Positions: 128 bytes of them, or the few
    that there are. They and the warps are the same for norms and sum, which then add up in the same
    order: fewer than four warps use tensor cores in another way. `kind`: "half", "pair" or "float".
    `is_roomy`: 160 KiB of shared memory a program.

    In pairs there is a table more, and three products wait for each other: small tiles (74 KiB),
    of which two (sums) or three (norms) fill each other's waits. Norms of 64 to 256 channels take
    0.24 to 0.30 ms with half the columns where they took 0.30 to 0.40 (WRN-16-4, 500 images).
    """
    high, across = (max(16, 1 << (many - 1).bit_length()) for many in (outputs, columns))
    deep = min(64 if kind == "half" else 32, max(16, 1 << (positions - 1).bit_length()))
    if kind == "pair":
        rows, columns = (64, 128) if is_total else (128, 64)
        return min(rows, high), min(columns, across), deep, 4, 5 if is_roomy else 4, 1056
    if high <= 32:
        return high, min(64 if is_total else 128, across), deep, 2, 3, 528
    if not is_total:
        return min(128, high), min(128, across), deep, 4, 2, 528 if positions > deep else 1056
    stages = 2 if deep == 16 else 5 if is_roomy else 3
    return min(64, high), min(128 if positions > deep else 64, across), deep, 4, stages, 264


@lru_cache(maxsize=256)
def evenly(examples: int, tiles: int, *, parts: int, at_once: int) -> int:
    """Examples of a program such that those which run at once also end at about the same time.

    Programs come in rounds of `at_once`, of which the last may be nearly empty; each loads ahead
    before it begins, which takes as long as a few parts of an example. At most four rounds: a sum
    has a table for each group of examples.

    >>> evenly(500, 5, parts=32, at_once=396), evenly(500, 72, parts=2, at_once=396)
    (7, 46)
    """
    fewest = -(-examples // max(1, 4 * at_once // tiles))

    def length(each: int) -> int:
        return -(-tiles * -(-examples // each) // at_once) * (each * parts + 6)

    return min(range(examples, fewest - 1, -1), key=length, default=1)


@lru_cache(maxsize=16)
def _processors(device: torch.device) -> int:
    found = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return int(found.multi_processor_count) if found else 132


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
    is_pair: bool,
    factors: Tensor | None,
) -> Tensor:
    x, g = (laid_out(t, torch.channels_last) for t in (x, g))
    channels, outputs = (t.shape[1] // (2 if is_pair else 1) for t in (x, g))
    examples = len(x) // pictures
    _, padding, dilation = how
    starts, inside, unit = _tables_for(x, g, kernel, how, pictures)
    taps, positions = kernel[0] * kernel[1], pictures * g.shape[2] * g.shape[3]
    high, across, deep, warps, stages, programs = tile(
        outputs,
        channels * taps,
        positions,
        is_total=factors is not None,
        kind="pair" if is_pair else "float" if g.dtype is torch.float32 else "half",
        is_roomy=_is_roomy(x.device),
    )
    tiles_across = -(-channels * taps // across)
    tiles = -(-outputs // high) * tiles_across
    each = -(-examples // max(1, min(examples, -(-programs // tiles))))
    if is_pair:
        at_once = (3 if factors is None else 2) * _processors(x.device)
        each = evenly(examples, tiles, parts=-(-positions // deep), at_once=at_once)
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
        "PAIR": is_pair, "BM": high, "BN": across, "BK": deep, "num_warps": warps,
        "num_stages": stages,
    }  # fmt: skip
    walk[(tiles, groups)](*given, **options)
    return result


def squares(
    x: Tensor,
    g: Tensor,
    *,
    kernel: Pair,
    how: tuple[Pair, Pair, Pair],
    pictures: int = 1,
    is_pair: bool = False,
    lengths: conv_tolerance.Lengths | None = None,
) -> Tensor:
    """‖G_b‖² of every example, [B] in float64, with `ROOM`; `how`: stride, padding, dilation.

    An example may have several pictures, one after the other: G_b is the sum over them. `is_pair`:
    x and g have each number as two, with twice the channels. `lengths` of both make it the norm
    that other ways give, too (`conv_tolerance`).

    Guarantees: never below what `total` adds of the example at factor one.
    """
    positions, inputs = pictures * g.shape[2] * g.shape[3], x.shape[1] * kernel[0] * kernel[1]
    outputs = g.shape[1]
    if is_pair:
        inputs, outputs = inputs // 2, outputs // 2
    is_half = x.dtype is g.dtype and g.dtype is not torch.float32
    if is_half and conv_gram.pays(positions, inputs, outputs):
        x, g = (laid_out(t, torch.channels_last) for t in (x, g))
        tables = _tables_for(x, g, kernel, how, pictures)
        return conv_gram.squares(
            x, g, tables, kernel=kernel, how=how, pictures=pictures, is_pair=is_pair
        )
    parts = _launch(x, g, kernel, how, pictures, is_pair, None)
    if lengths is None:
        return parts.sum(1)
    tables = _tables_for(lengths[0].transpose(0, 1), g, kernel, how, pictures)
    return conv_tolerance.of_tiles(
        parts, lengths, tables, kernel=kernel, how=how, pictures=pictures, widths=(inputs, outputs)
    )


def total(
    x: Tensor,
    g: Tensor,
    factors: Tensor,
    *,
    kernel: Pair,
    how: tuple[Pair, Pair, Pair],
    pictures: int = 1,
    is_pair: bool = False,
) -> Tensor:
    """Σ_b factors[b]·G_b in float32, as the weight lies; what has factor zero may hold anything."""
    return _launch(x, g, kernel, how, pictures, is_pair, factors.float().contiguous()).sum(0)
