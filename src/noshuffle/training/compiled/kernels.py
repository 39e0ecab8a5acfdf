# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
"""From per-example gradients in one matrix to the clipped sum, in three kernels.

The matrix of `flat` holds a row per example: gradients written out in its first columns,
inputs and output gradients of linear layers behind them. One kernel takes the norms of the rows
and makes the factors, one adds up the first columns, one forms the products of the others. A row
with factor zero is not read at all, so what it holds (NaN included) cannot reach the sum. Every
addition has its fixed place: the same bits in every run. State: none.

>>> callable(row_factors)
True
"""

from __future__ import annotations

from noshuffle.triton_shim import HAS_TRITON as HAS_TRITON
from noshuffle.triton_shim import jit, tl


@jit
def square_of(row, begin, count, BLOCK: tl.constexpr):
    """Σ v² over `count` columns from `begin` on."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        at = start + lane
        v = tl.load(row + begin + at, mask=at < count, other=0.0)
        total += v * v
    return tl.sum(total, axis=0)


@jit
def row_factors(
    matrix,  # float32, rows × width
    width,
    dense,  # columns that are gradients written out
    pairs,  # int64 × 5, per linear layer: first input column, inputs, first output column, …
    count,  # linear layers
    losses,  # float32, per row
    keep,  # uint8, per row: whether it counts
    extra,  # float64, per row: squared norm of what is not in the matrix
    aim,  # float64: the norm to clip to
    factor,  # float32, per row: out
    report,  # float32, 3 × rows: out; loss, norm, is-bad
    rows,
    BLOCK: tl.constexpr,
):
    """f = min(1, aim/norm), or 0 for a row that is left out or not finite."""
    b = tl.program_id(0)
    row = matrix + b.to(tl.int64) * width
    total = square_of(row, 0, dense, BLOCK).to(tl.float64) + tl.load(extra + b)
    for r in range(count):
        pair = pairs + r * 5
        inputs, outputs = tl.load(pair + 1), tl.load(pair + 3)
        a = square_of(row, tl.load(pair), inputs, BLOCK).to(tl.float64)
        g = square_of(row, tl.load(pair + 2), outputs, BLOCK).to(tl.float64)
        # Squares that underflow hide at most 1.2e-38 each; the other factor may be large.
        total += (a + inputs.to(tl.float64) * 1.2e-38) * (g + outputs.to(tl.float64) * 1.2e-38)
    loss = tl.load(losses + b)
    is_kept = tl.load(keep + b).to(tl.int32) != 0
    # Comparisons with NaN are false.
    is_fine = (total <= 1e300) & (tl.abs(loss) <= 3.4e38)
    f = tl.load(aim) / tl.sqrt(tl.maximum(total, 1e-300))
    # Below 2⁻¹²⁶ float32 holds a factor to a few bits only, perhaps too large: nothing is added.
    is_held = f >= 1.1754943508222875e-38
    f = tl.where(is_kept & is_fine & is_held, tl.minimum(f, 1.0), 0.0)
    tl.store(factor + b, f.to(tl.float32))
    tl.store(report + b, loss)
    tl.store(report + rows + b, tl.where(is_kept, tl.sqrt(total), 0.0).to(tl.float32))
    is_bad = is_kept & (is_fine == 0)
    tl.store(report + 2 * rows + b, is_bad.to(tl.float32))


@jit
def user_sum(
    matrix,
    width,
    table,  # int32: rows user by user; from `users` on, where those of each user begin
    users,
    losses,
    out,  # float32, users × width
    own,  # float32, per user: 0, or NaN where a loss is not finite
    IS_MEAN: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out[u, j] = Σ over the rows b of user u of matrix[b, j], or their mean."""
    u = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    begin, end = tl.load(table + users + u), tl.load(table + users + u + 1)
    total = tl.zeros([COLUMNS], tl.float32)
    spoiled = 0.0
    for k in range(begin, end):
        b = tl.load(table + k).to(tl.int64)
        total += tl.load(matrix + b * width + column, mask=column < width, other=0.0)
        spoiled += tl.load(losses + b) * 0.0
    if IS_MEAN:
        total = total / tl.maximum(end - begin, 1).to(tl.float32)
    tl.store(out + u.to(tl.int64) * width + column, total, mask=column < width)
    if tl.program_id(1) == 0:
        tl.store(own + u, spoiled)


@jit
def dense_sum(
    matrix,
    width,
    dense,
    factor,
    rows,
    out,  # float32: the sum of the written-out columns
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out[j] = Σ_b f_b · matrix[b, j]."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, rows, ROWS):
        b = start + tl.arange(0, ROWS)
        f = tl.load(factor + b, mask=b < rows, other=0.0)
        is_used = (f != 0.0)[:, None] & (column < dense)[None, :]
        place = b.to(tl.int64)[:, None] * width + column[None, :]
        total += tl.load(matrix + place, mask=is_used, other=0.0) * f[:, None]
    tl.store(out + column, tl.sum(total, axis=0), mask=column < dense)


@jit
def pair_sum(
    matrix,
    width,
    tiles,  # int32 × 3, per program: pair, tile of outputs, tile of inputs
    pairs,
    factor,
    rows,
    out,  # float32; the fifth entry of a pair says where its product begins
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """out[o, i] = Σ_b f_b · g[b, o] · a[b, i]."""
    tile = tiles + tl.program_id(0) * 3
    pair = pairs + tl.load(tile) * 5
    first_in, inputs = tl.load(pair), tl.load(pair + 1)
    first_out, outputs = tl.load(pair + 2), tl.load(pair + 3)
    o = tl.load(tile + 1) * OUTPUTS + tl.arange(0, OUTPUTS)
    i = tl.load(tile + 2) * INPUTS + tl.arange(0, INPUTS)
    total = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    for start in range(0, rows, ROWS):
        b = start + tl.arange(0, ROWS)
        f = tl.load(factor + b, mask=b < rows, other=0.0)
        is_used = f != 0.0
        row = b.to(tl.int64) * width
        where_g = row[None, :] + first_out + o[:, None]
        g = tl.load(matrix + where_g, mask=is_used[None, :] & (o < outputs)[:, None], other=0.0)
        where_a = row[:, None] + first_in + i[None, :]
        a = tl.load(matrix + where_a, mask=is_used[:, None] & (i < inputs)[None, :], other=0.0)
        total = tl.dot(g * f[None, :], a, total, input_precision="ieee")
    where = tl.load(pair + 4) + o[:, None] * inputs + i[None, :]
    tl.store(out + where, total, mask=(o < outputs)[:, None] & (i < inputs)[None, :])
