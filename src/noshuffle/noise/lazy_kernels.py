# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
"""A touch of lazy noise on a GPU in two passes over the touched rows: draw, then advance.

    normals   block (row, i) of a step  →  four normals, as `row_draws` numbers them
    advance   (S', acc) = F (S, 0) + L ζ of every element, F and L by the length of its row's sleep

In torch operations a touch of a thousand rows is some 250 launches, most of them the generator's;
here it is two. Operations are those of `row_draws` and `lazy`, one by one and each rounded once
(products and sums are not fused), so the noise has the bits of the torch form.

State: none here; see `lazy_fused`. The module can be imported without Triton, but not launched.

>>> callable(normals), callable(advance)
(True, True)
"""

from __future__ import annotations

from contextlib import suppress

from noshuffle.noise.triton_kernels import draw, jit

with suppress(ImportError):  # the functions below are then only read
    import triton.language as tl


@jit
def normals(
    rows,  # int64: the touched rows, counted in the whole table
    words,  # int64 × 7: key (2), tag (2), blocks of a row, blocks that are drawn, step
    out,  # float32: four numbers a block, row after row
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
    k0, k1 = tl.load(words).to(tl.uint32), tl.load(words + 1).to(tl.uint32)
    g0, g1 = tl.load(words + 2).to(tl.uint32), tl.load(words + 3).to(tl.uint32)
    z0, z1, z2, z3 = draw(block, step, 1.0, k0, k1, g0, g1, True, ASSEMBLY)
    at = out + 4 * place
    tl.store(at, z0, mask=is_inside)
    tl.store(at + 1, z1, mask=is_inside)
    tl.store(at + 2, z2, mask=is_inside)
    tl.store(at + 3, z3, mask=is_inside)


@jit
def advance(
    rows,  # int64: the touched rows, counted in this shard
    which,  # int64, per touched row: its map
    maps,  # float64, per map: (D + 1) × (2D + 1), the columns of F that meet S, then L
    fresh,  # float32, per touched row: `stride` numbers, of which D + 1 times the width are used
    state,  # float32: rows × D × width
    out,  # float32: touched rows × width
    scale,  # float64: one number
    width,
    stride,
    total,  # touched rows × width
    D: tl.constexpr,
    COLUMNS: tl.constexpr,  # fresh normals of an element
    SIZE: tl.constexpr,
):
    """Bring the buffers of rows forward, and give the sum of the noise that they slept through."""
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
    tl.store(out + place, total_noise.to(tl.float32), mask=is_inside)
