# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
"""A touch of lazy noise on a GPU in two passes over the touched rows: draw, then advance.

    normals   block (row, i) of a step  →  four normals and coins, as `row_draws` numbers them
    advance   (S', acc) = F (S, 0) + L ζ of every element, F and L by the length of its row's sleep,
              and the value to be protected plus scale·acc, on the grid

In torch operations a touch of a thousand rows is some 250 launches, most of them the generator's;
here it is two. Operations are those of `row_draws` and `lazy`, one by one and each rounded once
(products and sums are not fused), so the noise has the bits of the torch form.

State: none here; see `lazy_fused`. The module can be imported without Triton, but not launched.
"""

from __future__ import annotations

from noshuffle.noise.triton_kernels import draw, generator, jitter, minus
from noshuffle.triton_shim import jit, tl


@jit
def normals(
    rows,  # int64: the touched rows, counted in the whole table
    words,  # int64 × 7: key (2), tag (2), blocks of a row, blocks that are drawn, step
    out,  # float32: four numbers a block, row after row
    coins,  # float32: the same for the first `coin_blocks` blocks of a row
    coin_blocks,
    total,  # blocks in all
    SIZE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """The normals of a step for rows of a table."""
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    is_inside = place < total
    drawn = tl.load(words + 5)
    row = tl.load(rows + place // drawn, mask=is_inside, other=0)
    block = (row * tl.load(words + 4) + place % drawn).to(tl.uint32)
    step = tl.load(words + 6).to(tl.uint32)
    k0, k1, g0, g1 = generator(words)
    z0, z1, z2, z3, w0, w1, w2, w3 = draw(block, step, 1.0, k0, k1, g0, g1, ASSEMBLY)
    at = out + 4 * place
    tl.store(at, z0, mask=is_inside)
    tl.store(at + 1, z1, mask=is_inside)
    tl.store(at + 2, z2, mask=is_inside)
    tl.store(at + 3, z3, mask=is_inside)
    # Every element is rounded once, by the coins of its first normal.
    has_coins = is_inside & (place % drawn < coin_blocks)
    at = coins + 4 * (place // drawn * coin_blocks + place % drawn)
    u0, u1 = jitter(w0, w2, 1.0), jitter(w1, w3, 1.0)
    tl.store(at, u0, mask=has_coins)
    tl.store(at + 1, u1, mask=has_coins)
    tl.store(at + 2, minus(u0), mask=has_coins)
    tl.store(at + 3, minus(u1), mask=has_coins)


@jit
def advance(
    rows,  # int64: the touched rows, counted in this shard
    which,  # int64, per touched row: its map
    maps,  # float64, per map: (D + 1) × (2D + 1), the columns of F that meet S, then L
    fresh,  # float32, per touched row: `stride` numbers, of which D + 1 times the width are used
    state,  # float32: rows × D × width
    coins,  # float32, per touched row: `coin_stride` numbers, of which the width are used
    out,  # float32: touched rows × width, with the values to be protected in it
    scale,  # float64: one number
    grid,  # step of the grid
    width,
    stride,
    coin_stride,
    total,  # touched rows × width
    D: tl.constexpr,
    COLUMNS: tl.constexpr,  # fresh normals of an element
    SIZE: tl.constexpr,
):
    """Bring the buffers of rows forward, and add the sum of the noise that they slept through."""
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    is_inside = place < total
    touched, element = place // width, place % width
    row = tl.load(rows + touched, mask=is_inside, other=0)
    number = tl.load(which + touched, mask=is_inside, other=0)
    entry = maps + number * ((D + 1) * (2 * D + 1))
    buffer = state + row * (D * width) + element
    draws = fresh + touched * stride + element
    last = entry + D * (2 * D + 1)
    total_noise = tl.zeros([SIZE], tl.float64)
    for j in tl.static_range(D):
        s = tl.load(buffer + j * width, mask=is_inside, other=0.0).to(tl.float64)
        total_noise = total_noise + s * tl.load(last + j, mask=is_inside, other=0.0)
    for j in tl.static_range(COLUMNS):
        z = tl.load(draws + j * width, mask=is_inside, other=0.0).to(tl.float64)
        total_noise = total_noise + z * tl.load(last + D + j, mask=is_inside, other=0.0)
    for i in tl.static_range(D):
        line = entry + i * (2 * D + 1)
        s = tl.load(buffer + i * width, mask=is_inside, other=0.0).to(tl.float64)
        s = s * tl.load(line + i, mask=is_inside, other=0.0)
        for j in tl.static_range(COLUMNS):
            if j <= i:
                z = tl.load(draws + j * width, mask=is_inside, other=0.0).to(tl.float64)
                s = s + z * tl.load(line + D + j, mask=is_inside, other=0.0)
        tl.store(buffer + i * width, s.to(tl.float32), mask=is_inside)
    total_noise = total_noise * tl.load(scale)
    value = tl.load(out + place, mask=is_inside, other=0.0) + total_noise.to(tl.float32)
    coin = tl.load(coins + touched * coin_stride + element, mask=is_inside, other=0.0)
    middle = grid * 12582912.0  # 1.5·2²³: a sum with it has no place for less than a step
    value = ((value + coin * grid) + middle) - middle
    tl.store(out + place, value, mask=is_inside)
