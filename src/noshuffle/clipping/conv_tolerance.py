# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
"""The tolerance for rounding in norms of convolutions on a GPU: one formula for all ways.

The sizes of a batch decide whether kernels take a norm (`conv_kernels`), inner products of windows
(`conv_gram`, `gram`) or a written gradient, so that one long example may change it for all others.
Each way bounds what it adds itself; another one rounds in another way, by E1 and E2. From

    N_i² = ‖G_i‖² + τ²,    f_i = c/N_i    follows    ‖f_1 G_1 − f_2 G_2‖ ≤ 2c·(E1 + E2)/N_1

so τ has to be the same on all ways, a number of the example alone, and no smaller than E. Of

    w_k, g_k                    window and output gradient at position k
    R = Σ_k ‖g_k‖‖w_k‖          `reach`, the norm if nothing cancelled
    S = Σ_k ‖g_k‖²‖w_k‖²        `spread`, its square if all were orthogonal
    n                           the positions with g_k ≠ 0: padding changes none of them

comes, for C·taps inputs and O outputs of the layer,

    N² = (‖G‖·(1 + growth) + moved·√S)² + share·R² + rest
    few positions     share = allowance + 2⁻²⁰, rest = 0
    many              share = γ², rest = 2⁻¹⁴·S
    γ = u·(√n/4 + 2) + 2⁻²⁹·min(n, 2¹⁴),  u = 2⁻²⁴

Few are those that any way takes inner products of, n·(C·taps + O) < 4·C·taps·O; these are off by
√allowance·R, and in pairs 2⁻²⁰·R² (`conv_gram`). growth and moved are what `gram` has where torch
may round factors of products to TF32, else 0. For many, u·(…) is what sums in float32 lose
(`conv_windows`). Tensor cores round towards zero, by 2⁻²⁷ a term of the sum so far, which on
average is at most R/4 where it comes back to nothing at a steady pace. Pictures that are rounded to
ten bits have entries of g_k w_kᵀ moved by 2⁻¹⁰ of each, independently: by 2⁻¹⁰·√S in all, of which
2⁻⁷·√S is eight times. Squared apart from the norm, these raise ordinary ones, for which R is about
√n·‖G‖, by 2⁻¹⁵ of themselves, and those of 2²⁰ positions by 0.1 %; without the limit of 2¹⁴ these
would be more than doubled.

`add_tolerance` does it on the GPU, from squared lengths at every place that come with the copies of
x and g (`conv_halves`). NaN and ∞ of an example stay in its norm; without g it is 0. State: whether
the kernel agreed with the plain form, by device.

>>> few_below(576, 64), few_below(4608, 512)
(231, 1844)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from noshuffle.clipping import gram
from noshuffle.clipping.forms import DenseGradient, OuterGradient, _norms
from noshuffle.clipping.gram import TENSOR_CORE, allowance, smallest
from noshuffle.clipping.products import roundoff
from noshuffle.clipping.tolerance import RoundingTolerance
from noshuffle.triton_shim import HAS_TRITON, KernelTest, constant, jit, tl

Pair = tuple[int, int]
#: Of windows and g, [B, K]; or, squared, of x and g, [blocks of channels, N, H, W], to be added up.
Lengths = tuple[Tensor, Tensor]
#: What pairs leave out of inner products; eight times what ten bits move a product by, squared.
PAIRS, ROUNDED = 2.0**-20, constant(2.0**-14)
#: γ: of sums in float32, of tensor cores, and for how many positions these are counted.
UNIT, CORES, MOST_COUNTED = constant(2.0**-24), constant(TENSOR_CORE / 4.0), constant(2.0**14)


def few_below(inputs: int, outputs: int) -> int:
    """Positions from which on no way takes inner products."""
    return -(-4 * inputs * outputs // (inputs + outputs))


def tolerance(t: Tensor, inputs: int, outputs: int) -> RoundingTolerance:
    """The numbers of the formula on t's device."""
    moved = roundoff(t.new_empty(0, dtype=torch.float32))
    growth = TENSOR_CORE * (inputs + outputs) if moved > 0.0 else 0.0
    share = allowance(torch.float32, inputs, outputs) + PAIRS
    return RoundingTolerance(smallest(torch.float32), growth, moved, share)


def _number(value: Any) -> float:
    """Of a constant, which Triton wraps."""
    return float(getattr(value, "value", value))


def raised(squared: Tensor, lengths: Lengths, widths: Pair, how: RoundingTolerance) -> Tensor:
    """N² from ‖G‖² [B], and ‖w_k‖ and ‖g_k‖ [B, K]; float64."""
    long_w, long_g = (t.double() for t in lengths)
    count = (long_g > 0.0).sum(1)
    spread, reach, lost = gram._beside(long_w, long_g, widths=widths, tiny=how.tiny)
    norm = (squared.double() + lost).sqrt() * (1.0 + how.growth) + how.moved * spread.sqrt()
    n = count.double()
    share = _number(UNIT) * (n.sqrt() / 4.0 + 2.0)
    share += _number(CORES) * n.clamp_max(_number(MOST_COUNTED))
    many = share.square() * reach.square() + _number(ROUNDED) * spread
    few = how.allowance * reach.square()
    return norm.square() + torch.where(count < few_below(*widths), few, many)


@jit
def add_tolerance(
    parts, of_x, of_g, starts, inside, out, many, positions, x_block, g_block, x_example, x_high,
    pad_high, pad_wide, step_high, step_wide, inputs, outputs, few, tiny, growth, moved, share,
    TAPS: tl.constexpr, TAPS_WIDE: tl.constexpr, ALIGN: tl.constexpr, X_BLOCKS: tl.constexpr,
    G_BLOCKS: tl.constexpr, WINDOWED: tl.constexpr, MANY: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """N² of one example; not WINDOWED: `of_x` and `of_g` are lengths of windows, [B, K]."""
    example, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BK)
    least = tl.cast(tiny, tl.float64)
    spread, reach = tl.zeros((BK,), tl.float64), tl.zeros((BK,), tl.float64)
    sum_w, sum_g = tl.zeros((BK,), tl.float64), tl.zeros((BK,), tl.float64)
    count = tl.zeros((BK,), tl.int32)
    for done in range(0, positions, BK):
        k = done + lane
        here = k < positions
        own_w, own_g = tl.zeros((BK,), tl.float64), tl.zeros((BK,), tl.float64)
        for j in range(0, G_BLOCKS):
            at = of_g + j * g_block + example * positions + k
            own_g += tl.load(at, mask=here, other=0.0).to(tl.float64)
        if WINDOWED:
            start = tl.load(starts + k, mask=here, other=0) * ALIGN
            bits = tl.load(inside + k, mask=here, other=0)
            for i in range(0, TAPS * X_BLOCKS):
                tap, j = i // X_BLOCKS, i % X_BLOCKS
                place = (tap // TAPS_WIDE * step_high - pad_high) * x_high
                place += tap % TAPS_WIDE * step_wide - pad_wide
                at = of_x + j * x_block + example * x_example + (start + place)
                is_in = here & (((bits >> tap) & 1) != 0)
                own_w += tl.load(at, mask=is_in, other=0.0).to(tl.float64)
        else:
            own_w += tl.load(of_x + example * positions + k, mask=here, other=0.0).to(tl.float64)
            own_w, own_g = own_w * own_w, own_g * own_g
        count += (own_g > 0.0).to(tl.int32)
        own_w = tl.where(here, tl.sqrt(own_w + inputs * least), 0.0)
        own_g = tl.where(here, tl.sqrt(own_g + outputs * least), 0.0)
        spread += own_w * own_w * own_g * own_g
        reach += own_w * own_g
        sum_w += own_w
        sum_g += own_g
    total = tl.zeros((MANY,), tl.float64)
    for done in range(0, many, MANY):
        k = done + tl.arange(0, MANY)
        total += tl.load(parts + example * many + k, mask=k < many, other=0.0).to(tl.float64)
    all_w, all_g = tl.sum(sum_w), tl.sum(sum_g)
    lost = inputs * all_g * all_g + outputs * all_w * all_w + 1.0 * positions * positions
    far, along, n = tl.sum(spread), tl.sum(reach), tl.sum(count)
    norm = tl.sqrt(tl.sum(total) + least * lost) * (1.0 + tl.cast(growth, tl.float64))
    norm += tl.cast(moved, tl.float64) * tl.sqrt(far)
    counted = n.to(tl.float64)
    gamma = UNIT * (tl.sqrt(counted) / 4.0 + 2.0) + CORES * tl.minimum(counted, MOST_COUNTED)
    more = gamma * gamma * along * along + ROUNDED * far
    more = tl.where(n < few, tl.cast(share, tl.float64) * along * along, more)
    tl.store(out + example, norm * norm + more)


def _sizes(positions: int, many: int) -> dict[str, int]:
    """What is in hand at once, and warps."""
    block = min(1024, max(16, 1 << (positions - 1).bit_length()))
    several = min(256, max(16, 1 << (many - 1).bit_length()))
    return {"BK": block, "MANY": several, "num_warps": 8 if block > 512 else 4}


def of_tiles(
    parts: Tensor,
    lengths: Lengths,
    tables: tuple[Tensor, Tensor, int],
    *,
    kernel: Pair,
    how: tuple[Pair, Pair, Pair],
    pictures: int,
    widths: Pair,
) -> Tensor:
    """N² [B] in float64 from the squared norms of tiles [B, tiles]; tables: of lengths of x.

    Nothing that is read in units of its example vanishes, and what does so elsewhere does it in
    norm and sum: nothing is added for that, so that an example without g has norm 0.
    """
    (of_x, of_g), (starts, inside, unit), (_, padding, dilation) = lengths, tables, how
    examples, many = parts.shape
    positions = pictures * of_g[0, 0].numel()
    out = torch.empty(examples, dtype=torch.float64, device=parts.device)
    add_tolerance[(examples,)](
        parts, of_x, of_g, starts, inside, out, many, positions, of_x.stride(0), of_g.stride(0),
        pictures * of_x.stride(1), of_x.stride(2), *padding, *dilation, *widths, few_below(*widths),
        *tolerance(parts, *widths)._replace(tiny=0.0), TAPS=kernel[0] * kernel[1],
        TAPS_WIDE=kernel[1], ALIGN=unit, X_BLOCKS=len(of_x), G_BLOCKS=len(of_g), WINDOWED=True,
        **_sizes(positions, many),
    )  # fmt: skip
    return out


def _of_lengths(squared: Tensor, lengths: Lengths, widths: Pair, how: RoundingTolerance) -> Tensor:
    """`raised` by the kernel, from lengths."""
    long_w, long_g, squared = (t.contiguous() for t in (*lengths, squared))
    examples, positions = long_w.shape
    out = torch.empty(examples, dtype=torch.float64, device=squared.device)
    add_tolerance[(examples,)](
        squared, long_w, long_g, out, out, out, 1, positions, 0, 0, 0, 0, 0, 0, 0, 0, *widths,
        few_below(*widths), *how, TAPS=1, TAPS_WIDE=1, ALIGN=1, X_BLOCKS=1, G_BLOCKS=1,
        WINDOWED=False, **_sizes(positions, 1),
    )  # fmt: skip
    return out


@KernelTest
def _agrees(device: torch.device) -> bool:
    """Whether the kernel runs here on lengths, and agrees with the plain form."""
    draw = torch.Generator(device=device).manual_seed(7)
    squared, *lengths = torch.rand(3, 3, 1300, device=device, generator=draw)
    squared, widths = squared[:, 0].contiguous(), (72, 200)
    lengths[1][1, 60:] = 0.0  # one with few positions
    how = RoundingTolerance(smallest(torch.float32), growth=3e-7, moved=2.0**-9, allowance=1e-6)
    try:
        found = _of_lengths(squared, (lengths[0], lengths[1]), widths, how)
    except Exception:  # a compiler may fail in any way; the plain form is always there
        return False
    wanted = raised(squared, (lengths[0], lengths[1]), widths, how)
    return torch.allclose(found, wanted, rtol=1e-6, atol=0.0)


def _has_kernel(t: Tensor) -> bool:
    if not (HAS_TRITON and t.is_cuda) or get_proxy_mode() is not None:
        return False
    return _agrees(t.device)


def of_windows(outer: OuterGradient, written: Tensor | None = None) -> Tensor:
    """N² of gradients whose windows are written down: by inner products, or written out as well."""
    a, g = outer.a, outer.g
    widths = a.shape[2], g.shape[2]
    how = tolerance(g, *widths)
    if written is None and not outer.is_small():
        return gram.raised(a, g, how)
    squared = DenseGradient(outer.dense() if written is None else written).squares()
    lengths = _norms(a, stretch=64), _norms(g, stretch=64)
    run = _of_lengths if _has_kernel(squared) else raised
    return run(squared, lengths, widths, how)
