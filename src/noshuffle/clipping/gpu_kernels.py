# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
"""Kernels for clipping: norms of Σ_t g_t a_tᵀ without T×T matrices, and factors per example.

`tiles` takes one example and one pair of blocks of steps (p, q) with p ≤ q, forms

    A = a_p a_qᵀ,   G = g_p g_qᵀ        (tensor cores, added up in float32)

and writes three numbers: the sum of A∘G (twice, if p < q: the other half is its mirror image), and
from the diagonal ‖a_t‖²‖g_t‖² and ‖a_t‖‖g_t‖. Inputs are read as they are: in half precision, or
float32 as TF32. `close` adds the tiles of an example up in float64 and leaves room for rounding, as
`gram.bounded` does. `rescale` multiplies every example by its factor, in float32, and rounds once.
State: none. The module can be imported without Triton, but its kernels not be launched.

>>> callable(tiles)
True
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

jit: Callable[[Any], Any]
try:
    import triton
    import triton.language as tl

    jit, HAS_TRITON = triton.jit, True
except ImportError:
    HAS_TRITON = False

    def jit(function: Any) -> Any:
        """Leave the text as it is: nothing here runs without Triton."""
        return function


BLOCK = 128
RUN = 4096


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
def tiles(
    a, g, out, steps, wide_a, wide_g, a_example, a_step, g_example, g_step, blocks,
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
    both = of_a * of_g
    own = tl.where(rows[:, None] == cols[None, :], tl.maximum(both, 0.0), 0.0)
    where = out + (example * tl.num_programs(0) + pair) * 3
    tl.store(where, tl.sum(both) * tl.where(p == q, 1.0, 2.0))
    tl.store(where + 1, tl.sum(own))
    tl.store(where + 2, tl.sum(tl.sqrt(own)))


@jit
def close(parts, out, pairs, grow, moved, room, MANY: tl.constexpr):
    """(√total·grow + moved·√spread)² + room·reach² of one example."""
    example = tl.program_id(0)
    k = tl.arange(0, MANY)
    where = parts + (example * pairs + k) * 3
    total = tl.sum(tl.load(where, mask=k < pairs, other=0.0).to(tl.float64))
    spread = tl.sum(tl.load(where + 1, mask=k < pairs, other=0.0).to(tl.float64))
    reach = tl.sum(tl.load(where + 2, mask=k < pairs, other=0.0).to(tl.float64))
    total = tl.where(total < 0.0, 0.0, total)  # a NaN stays one
    norm = tl.sqrt(total) * grow.to(tl.float64) + moved.to(tl.float64) * tl.sqrt(spread)
    tl.store(out + example, norm * norm + room.to(tl.float64) * reach * reach)


@jit
def scale(x, factors, out, size, SIZE: tl.constexpr):
    """out = x·factor, `size` entries an example."""
    example = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    value = tl.load(x + example * size + k, mask=k < size, other=0.0).to(tl.float32)
    factor = tl.load(factors + example).to(tl.float32)
    tl.store(out + example * size + k, (value * factor).to(out.dtype.element_ty), mask=k < size)


def squares(a: Tensor, g: Tensor, *, grow: float, moved: float, room: float) -> Tensor:
    """Squared norm per example, [B] in float64, with room for rounding."""
    a = a if a.stride(2) == 1 else a.contiguous()
    g = g if g.stride(2) == 1 else g.contiguous()
    examples, steps, _ = a.shape
    blocks = -(-steps // BLOCK)
    pairs = blocks * (blocks + 1) // 2
    parts = torch.empty(examples, pairs, 3, device=a.device)
    is_half = a.dtype != torch.float32
    tiles[(pairs, examples)](
        a, g, parts, steps, a.shape[2], g.shape[2],
        a.stride(0), a.stride(1), g.stride(0), g.stride(1), blocks,
        SIDE=BLOCK, BK=64 if is_half else 32, num_warps=8, num_stages=3 if is_half else 4,
    )  # fmt: skip
    out = torch.empty(examples, dtype=torch.float64, device=a.device)
    many = 1 << (pairs - 1).bit_length()
    close[(examples,)](parts, out, pairs, grow, moved, room, MANY=many)
    return out


def rescale(x: Tensor, factors: Tensor) -> Tensor:
    """x[b]·factors[b], rounded once to the type of x; x is contiguous."""
    out = torch.empty_like(x)
    size = x[0].numel()
    scale[(-(-size // RUN), len(x))](x, factors, out, size, SIZE=RUN, num_warps=8)
    return out
