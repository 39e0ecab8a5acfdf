# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
"""Kernels for clipping: norms of Σ_t g_t a_tᵀ without T×T matrices, and factors per example.

`tiles` takes one example and one pair of blocks of steps (p, q) with p ≤ q, forms

    A = a_p a_qᵀ,   G = g_p g_qᵀ        (tensor cores, added up in float32)

and writes five numbers: the sum of A∘G (twice, if p < q: the other half is its mirror image), and
from the diagonal the sums of ‖a_t‖²‖g_t‖², ‖a_t‖‖g_t‖, ‖a_t‖ and ‖g_t‖, where a squared length is
increased by what may have vanished below the smallest float32. `join_tiles` adds the tiles of an
example up in float64 and adds what rounding may have taken and what vanished, as `gram.bounded`
does. `beside` makes its five numbers of a gradient that is written out; `of_both` makes them of
entries of A and G that torch has multiplied, in the place of forty operations. `rescale` multiplies
every example by its factor, in float32, and rounds once; `wipe_` takes examples of factor zero out
in place. State: none. The module can be imported without Triton, but its kernels not be launched.

>>> callable(tiles)
True
"""

from __future__ import annotations

import torch
from torch import Tensor

from noshuffle.clipping.tolerance import RoundingTolerance
from noshuffle.triton_shim import HAS_TRITON as HAS_TRITON
from noshuffle.triton_shim import jit, tl

BLOCK = 128
RUN = 4096
#: Examples of one launch: the second axis of a grid is no longer.
MOST_EXAMPLES = 2**16 - 1


@jit
def _inner(x, stride, rows, cols, wide, steps, table, BK: tl.constexpr):
    """table + x[rows] x[cols]ᵀ, over `wide` entries."""
    k = tl.arange(0, BK)
    left = x + rows[:, None] * stride + k[None, :]
    right = x + cols[None, :] * stride + k[:, None]
    is_row, is_col = rows[:, None] < steps, cols[None, :] < steps
    for done in range(0, wide, BK):
        u = tl.load(left + done, mask=is_row & (k[None, :] + done < wide), other=0.0)
        v = tl.load(right + done, mask=is_col & (k[:, None] + done < wide), other=0.0)
        table = tl.dot(u, v, table)
    return table


@jit
def _long(table, is_own, wide, tiny):
    """√(table[t, t] + wide·tiny) of the steps that are here, else 0; float64."""
    own = tl.sum(tl.where(is_own, tl.maximum(table, 0.0), 0.0), 1).to(tl.float64)
    is_here = tl.max(is_own.to(tl.int32), 1) > 0
    return tl.where(is_here, tl.sqrt(own + wide * tl.cast(tiny, tl.float64)), 0.0)


@jit
def tiles(
    a, g, out, steps, wide_a, wide_g, a_example, a_step, g_example, g_step, blocks, tiny,
    SIDE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One example, one pair of blocks."""
    pair = tl.program_id(0)
    example = tl.program_id(1).to(tl.int64)
    p = pair * 0
    q = pair
    while q >= blocks - p:  # pairs are numbered row by row of the upper triangle
        q -= blocks - p
        p += 1
    q += p
    rows = p.to(tl.int64) * SIDE + tl.arange(0, SIDE)
    cols = q.to(tl.int64) * SIDE + tl.arange(0, SIDE)
    zero = tl.zeros((SIDE, SIDE), tl.float32)
    of_a = _inner(a + example * a_example, a_step, rows, cols, wide_a, steps, zero, BK)
    of_g = _inner(g + example * g_example, g_step, rows, cols, wide_g, steps, zero, BK)
    is_own = (rows[:, None] == cols[None, :]) & (rows[:, None] < steps)
    long_a = _long(of_a, is_own, wide_a, tiny)
    long_g = _long(of_g, is_own, wide_g, tiny)
    size = long_a * long_g
    where = out + (example * tl.num_programs(0) + pair) * 5
    both = tl.sum(of_a * of_g) * tl.where(p == q, 1.0, 2.0)
    tl.store(where, both.to(tl.float64))
    tl.store(where + 1, tl.sum(size * size))
    tl.store(where + 2, tl.sum(size))
    tl.store(where + 3, tl.sum(long_a))
    tl.store(where + 4, tl.sum(long_g))


@jit
def join_tiles(
    parts, out, pairs, steps, wide_a, wide_g, tiny, growth, moved, share, MANY: tl.constexpr
):
    """(√(total + lost)·(1 + growth) + moved·√spread)² + share·reach² of one example."""
    example = tl.program_id(0)
    k = tl.arange(0, MANY)
    where = parts + (example * pairs + k) * 5
    total = tl.sum(tl.load(where, mask=k < pairs, other=0.0))
    spread = tl.sum(tl.load(where + 1, mask=k < pairs, other=0.0))
    reach = tl.sum(tl.load(where + 2, mask=k < pairs, other=0.0))
    long_a = tl.sum(tl.load(where + 3, mask=k < pairs, other=0.0))
    long_g = tl.sum(tl.load(where + 4, mask=k < pairs, other=0.0))
    lost = wide_a * long_g * long_g + wide_g * long_a * long_a + 1.0 * steps * steps
    # a NaN stays one
    total = tl.where(total < 0.0, 0.0, total) + tl.cast(tiny, tl.float64) * lost
    norm = tl.sqrt(total) * (1.0 + tl.cast(growth, tl.float64))
    beyond = tl.cast(moved, tl.float64) * tl.sqrt(spread)
    norm += tl.where(moved > 0.0, beyond, 0.0)  # 0·∞ would make NaN of what is infinite
    tl.store(out + example, norm * norm + tl.cast(share, tl.float64) * reach * reach)


@jit
def beside(long_a, long_g, squared, parts, steps, wide_a, wide_g, tiny, MANY: tl.constexpr):
    """What `join_tiles` adds up, of one example: its squared norm, and lengths of steps."""
    example, least = tl.program_id(0), tl.cast(tiny, tl.float64)
    spread, reach = tl.zeros((MANY,), tl.float64), tl.zeros((MANY,), tl.float64)
    sum_a, sum_g = tl.zeros((MANY,), tl.float64), tl.zeros((MANY,), tl.float64)
    for done in range(0, steps, MANY):
        k = done + tl.arange(0, MANY)
        own_a = tl.load(long_a + example * steps + k, mask=k < steps, other=0.0).to(tl.float64)
        own_g = tl.load(long_g + example * steps + k, mask=k < steps, other=0.0).to(tl.float64)
        own_a = tl.where(k < steps, tl.sqrt(own_a * own_a + wide_a * least), 0.0)
        own_g = tl.where(k < steps, tl.sqrt(own_g * own_g + wide_g * least), 0.0)
        size = own_a * own_g
        spread += size * size
        reach += size
        sum_a += own_a
        sum_g += own_g
    to = parts + example * 5
    tl.store(to, tl.load(squared + example).to(tl.float64))
    tl.store(to + 1, tl.sum(spread))
    tl.store(to + 2, tl.sum(reach))
    tl.store(to + 3, tl.sum(sum_a))
    tl.store(to + 4, tl.sum(sum_g))


@jit
def of_both(of_a, of_g, out, steps, wide_a, wide_g, tiny, SIZE: tl.constexpr, RUNS: tl.constexpr):
    """The numbers that `join_tiles` adds up, of RUNS·SIZE entries of the tables of one example."""
    example, least = tl.program_id(1).to(tl.int64), tl.cast(tiny, tl.float64)
    total, spread = tl.zeros((SIZE,), tl.float64), tl.zeros((SIZE,), tl.float64)
    sum_a, sum_g = tl.zeros((SIZE,), tl.float64), tl.zeros((SIZE,), tl.float64)
    reach, size = tl.zeros((SIZE,), tl.float64), steps * steps
    for i in range(0, RUNS):
        k = (tl.program_id(0).to(tl.int64) * RUNS + i) * SIZE + tl.arange(0, SIZE)
        here = k < size
        a = tl.load(of_a + example * size + k, mask=here, other=0.0)
        g = tl.load(of_g + example * size + k, mask=here, other=0.0)
        total += (a * g).to(tl.float64)
        is_own = here & (k % (steps + 1) == 0)
        long_a, long_g = tl.where(a < 0.0, 0.0, a), tl.where(g < 0.0, 0.0, g)  # a NaN stays one
        long_a = tl.where(is_own, tl.sqrt(long_a.to(tl.float64) + wide_a * least), 0.0)
        long_g = tl.where(is_own, tl.sqrt(long_g.to(tl.float64) + wide_g * least), 0.0)
        both = long_a * long_g
        spread += both * both
        reach += both
        sum_a += long_a
        sum_g += long_g
    to = out + (example * tl.num_programs(0) + tl.program_id(0)) * 5
    tl.store(to, tl.sum(total))
    tl.store(to + 1, tl.sum(spread))
    tl.store(to + 2, tl.sum(reach))
    tl.store(to + 3, tl.sum(sum_a))
    tl.store(to + 4, tl.sum(sum_g))


@jit
def scale(x, factors, out, size, SIZE: tl.constexpr):
    """out = x·factor, `size` entries an example; with factor zero nothing is read."""
    example = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    factor = tl.load(factors + example).to(tl.float32)
    read = tl.where(factor != 0.0, size, 0)
    value = tl.load(x + example * size + k, mask=k < read, other=0.0).to(tl.float32)
    tl.store(out + example * size + k, (value * factor).to(out.dtype.element_ty), mask=k < size)


@jit
def wipe(x, factors, size, SIZE: tl.constexpr):
    """x = 0 where the factor of an example is zero; nothing else is touched."""
    example = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    written = tl.where(tl.load(factors + example) != 0.0, 0, size)
    zero = tl.zeros((SIZE,), tl.float32).to(x.dtype.element_ty)
    tl.store(x + example * size + k, zero, mask=k < written)


def _tile(steps: int, is_half: bool) -> tuple[int, int, int, int]:
    """Side and depth of a tile, warps and stages: no wider than a short sequence asks for."""
    if steps > BLOCK // 2:
        return BLOCK, 64 if is_half else 32, 8, 3 if is_half else 4
    side = max(16, 1 << (steps - 1).bit_length())
    return side, 128 if is_half else 64, 4, 3


def squares(a: Tensor, g: Tensor, tolerance: RoundingTolerance) -> Tensor:
    """Squared norm per example, [B] in float64, increased by what rounding may have taken."""
    a = a if a.stride(2) == 1 else a.contiguous()
    g = g if g.stride(2) == 1 else g.contiguous()
    examples, steps, _ = a.shape
    wide_a, wide_g = a.shape[2], g.shape[2]
    side, deep, warps, stages = _tile(steps, a.dtype != torch.float32)
    blocks = -(-steps // side)
    pairs = blocks * (blocks + 1) // 2
    parts = torch.empty(examples, pairs, 5, dtype=torch.float64, device=a.device)
    tiles[(pairs, examples)](
        a, g, parts, steps, wide_a, wide_g,
        a.stride(0), a.stride(1), g.stride(0), g.stride(1), blocks, tolerance.tiny,
        SIDE=side, BK=deep, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    out = torch.empty(examples, dtype=torch.float64, device=a.device)
    many = 1 << (pairs - 1).bit_length()
    join_tiles[(examples,)](parts, out, pairs, steps, wide_a, wide_g, *tolerance, MANY=many)
    return out


def of_written(
    squared: Tensor,
    lengths: tuple[Tensor, Tensor],
    widths: tuple[int, int],
    tolerance: RoundingTolerance,
) -> Tensor:
    """The same from the squared norms of written gradients and the lengths ‖a_t‖, ‖g_t‖, [B, T]."""
    examples, steps = lengths[0].shape
    parts, out = (squared.new_empty(examples, n, dtype=torch.float64) for n in (5, 1))
    given = (t.contiguous() for t in (*lengths, squared))
    beside[(examples,)](*given, parts, steps, *widths, tolerance.tiny, MANY=256, num_warps=4)
    join_tiles[(examples,)](parts, out, 1, steps, *widths, *tolerance, MANY=1)
    return out[:, 0]


def of_tables(
    of_a: Tensor, of_g: Tensor, widths: tuple[int, int], tolerance: RoundingTolerance
) -> Tensor:
    """The same from the tables ⟨a_t, a_s⟩ and ⟨g_t, g_s⟩ of every example, [B, T, T]."""
    examples, steps, _ = of_a.shape
    block = min(1024, max(16, 1 << (steps * steps - 1).bit_length()))
    runs = min(8, -(-steps * steps // block))
    pairs = -(-steps * steps // (block * runs))
    parts = torch.empty(examples, pairs, 5, dtype=torch.float64, device=of_a.device)
    out = torch.empty(examples, dtype=torch.float64, device=of_a.device)
    of_both[(pairs, examples)](
        of_a.contiguous(), of_g.contiguous(), parts, steps, *widths, tolerance.tiny,
        SIZE=block, RUNS=runs,
    )  # fmt: skip
    many = 1 << (pairs - 1).bit_length()
    join_tiles[(examples,)](parts, out, pairs, steps, *widths, *tolerance, MANY=many)
    return out


def rescale(x: Tensor, factors: Tensor) -> Tensor:
    """x[b]·factors[b], rounded once to the type of x; x is contiguous.

    Guarantees: where factors[b] is zero the result is zero, whatever x[b] holds.
    """
    out, factors = torch.empty_like(x), factors.reshape(len(x))  # fewer would be read beyond
    size = x[0].numel()
    for own in zip(*(t.split(MOST_EXAMPLES) for t in (x, factors, out)), strict=True):
        scale[(-(-size // RUN), len(own[0]))](*own, size, SIZE=RUN, num_warps=8)
    return out


def wipe_(x: Tensor, factors: Tensor) -> None:
    """Make x[b] zero where factors[b] is, whatever it holds; x is contiguous."""
    factors, size = factors.reshape(len(x)), x[0].numel()
    for own in zip(*(t.split(MOST_EXAMPLES) for t in (x, factors)), strict=True):
        wipe[(-(-size // RUN), len(own[0]))](*own, size, SIZE=RUN, num_warps=8)
