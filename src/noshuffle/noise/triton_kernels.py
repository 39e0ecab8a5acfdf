# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
"""One `Move` on a GPU as one pass over memory: draw, correlate, scale and add, in place.

A program owns a few consecutive tiles of 1024 elements of one tensor. Block c of a tile is one
call of Philox4x32-10 (Salmon et al., SC 2011): words w0, w1 give two radii and w2, w3 two angles,
so that a thread makes four normals of the tile at a time,

    z_c       = ρ(w0) sin w2      z_{256+c} = ρ(w1) sin w3
    z_{512+c} = ρ(w0) cos w2      z_{768+c} = ρ(w1) cos w3

and every access of a warp is one run of neighbours. All draws of a step are summed in registers;
gradient and buffers are read once and written once.

With EXACT the operations are those of `philox`, `gaussian` and `correlate`, one by one and each
rounded once, so the noise has the same bits as on a CPU. Otherwise products and sums fuse and the
quotient is approximate: faster, and equal to a few units of the last place of a radius or angle.

State: none here. Tables, buffers and the step counter lie on the device; see `fused`. This module
can be imported without Triton (so that tools can read it), but its functions cannot be launched.

>>> callable(move)
True
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from noshuffle.noise.constants import LN2, LOG, ROOT_HALF_BITS, SINE
from noshuffle.noise.constants import TILE as TILE_SIZE

jit: Callable[[Any], Any]
constant: Callable[[Any], Any]
try:
    import triton
    import triton.language as tl

    jit, constant, HAS_TRITON = triton.jit, tl.constexpr, True
except ImportError:
    HAS_TRITON = False

    def jit(function: Any) -> Any:
        """Leave the text as it is: nothing here runs without Triton."""
        return function

    def constant(value: Any) -> Any:
        """A plain number."""
        return value


#: Columns of the region table (see `fused.Regions`), and of the head of a record on the tape.
REGION = constant(10)
HEAD = constant(5)

TILE = constant(TILE_SIZE)
BLOCKS = constant(TILE_SIZE // 4)
S0, S1, S2, S3, S4 = (constant(c) for c in SINE)
L0, L1, L2 = (constant(c) for c in LOG)
#: The exponent is taken as e·2²³, still in place, and the power of two goes into this factor.
LN2_PLACED = constant(LN2 * 2.0**-23)
ROOT_HALF = constant(ROOT_HALF_BITS)


@jit
def philox(x0, x1, x2, x3, k0, k1):
    """Ten rounds. The 64-bit products become one wide multiplication each."""
    for _ in tl.static_range(10):
        p0 = x0.to(tl.uint64) * 0xD2511F53
        p1 = x2.to(tl.uint64) * 0xCD9E8D57
        x0 = (p1 >> 32).to(tl.uint32) ^ x1 ^ k0
        x2 = (p0 >> 32).to(tl.uint32) ^ x3 ^ k1
        x1 = p1.to(tl.uint32)
        x3 = p0.to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return x0, x1, x2, x3


@jit
def minus(x):
    """−x as a change of sign, which costs nothing; Triton's own minus is a subtraction from 0."""
    return x * -1.0


@jit
def quotient(a, b, EXACT: tl.constexpr, ASSEMBLY: tl.constexpr):
    """a / b for a = m − 1, b = m + 1 and √½ ≤ m < √2, where no step can over- or underflow.

    Exact: a Newton step makes r the rounded 1/b, one unit too small where b = 2 − 2⁻²³; one unit
    more is as good elsewhere. Two corrections by the remainder then round correctly, for every m
    and any hardware reciprocal within three units (checked for all of them; see the tests).
    """
    if ASSEMBLY:
        r = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [b], dtype=tl.float32, is_pure=True, pack=1
        )
        if EXACT:
            b = minus(b)
            r = tl.fma(r, tl.fma(b, r, 1.0), r)
            r = (r.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
        q = a * r
        if EXACT:
            q = tl.fma(r, tl.fma(b, q, a), q)
            q = tl.fma(r, tl.fma(b, q, a), q)
    else:
        q = tl.div_rn(a, b)
    return q


@jit
def root(x, EXACT: tl.constexpr, ASSEMBLY: tl.constexpr):
    """√x for x = 0 or 10⁻⁸ < x < 100, where no step can over- or underflow.

    Exact: g → √x and h → 1/(2√x) are improved together, then g is corrected by its remainder,
    which rounds correctly for every x and any hardware root within two units (see the tests).
    """
    if ASSEMBLY:
        if EXACT:
            # The reciprocal root of the maximum is finite at x = 0, and the result is then zero.
            y = tl.inline_asm_elementwise(
                "rsqrt.approx.ftz.f32 $0, $1;",
                "=f,f",
                [tl.maximum(x, 1e-30)],
                dtype=tl.float32,
                is_pure=True,
                pack=1,
            )
            g, h = x * y, 0.5 * y
            miss = tl.fma(minus(g), h, 0.5)
            g, h = tl.fma(g, miss, g), tl.fma(h, miss, h)
            g = tl.fma(tl.fma(minus(g), g, x), h, g)
        else:
            g = tl.inline_asm_elementwise(
                "sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
            )
    else:
        g = tl.sqrt_rn(x)
    return g


@jit
def radius(word, weight, EXACT: tl.constexpr, ASSEMBLY: tl.constexpr):
    """weight·sign(u)·√(−ln u²) with u = (word + ½)/2³¹, the word taken with its sign."""
    u = word.to(tl.int32, bitcast=True).to(tl.float32)
    # The product is exact, so that one rounding or two make no difference.
    u = tl.fma(u, 4.656612873077393e-10, 2.3283064365386963e-10)
    bits = (u * u).to(tl.int32, bitcast=True)
    placed = (bits - ROOT_HALF) & -8388608
    m = (bits - placed).to(tl.float32, bitcast=True)
    s = quotient(m - 1.0, m + 1.0, EXACT, ASSEMBLY)
    q = s * s
    series = (((q * L2 + L1) * q + L0) * q + 2.0) * s
    x = minus(placed.to(tl.float32) * LN2_PLACED + series)
    r = root(x, EXACT, ASSEMBLY).to(tl.int32, bitcast=True)
    sign = u.to(tl.int32, bitcast=True) & -2147483648
    return ((r & 2147483647) | sign).to(tl.float32, bitcast=True) * weight


@jit
def sine(a):
    """sin πa for |a| ≤ ½."""
    q = a * a
    return ((((q * S4 + S3) * q + S2) * q + S1) * q + S0) * a


@jit
def draw(block, row, weight, k0, k1, g0, g1, EXACT: tl.constexpr, ASSEMBLY: tl.constexpr):
    """weight times the four quarters of a tile's normals of one row."""
    w0, w1, w2, w3 = philox(block, row, g0, g1, k0, k1)
    r0 = radius(w0, weight, EXACT, ASSEMBLY)
    r1 = radius(w1, weight, EXACT, ASSEMBLY)
    a0 = w2.to(tl.int32, bitcast=True).to(tl.float32) * 2.3283064365386963e-10
    a1 = w3.to(tl.int32, bitcast=True).to(tl.float32) * 2.3283064365386963e-10
    b0, b1 = 0.5 - tl.abs(a0), 0.5 - tl.abs(a1)
    return r0 * sine(a0), r1 * sine(a1), r0 * sine(b0), r1 * sine(b1)


@jit
def number(pointer):
    """A float32 that the tape keeps among its integers."""
    return tl.load(pointer).to(tl.float32, bitcast=True)


@jit
def get(at):
    """The four quarters of a tile of S."""
    return tl.load(at), tl.load(at + BLOCKS), tl.load(at + 2 * BLOCKS), tl.load(at + 3 * BLOCKS)


@jit
def blend(at, c, v0, v1, v2, v3):
    """v + c·S with S the tile at `at`."""
    s0, s1, s2, s3 = get(at)
    return v0 + s0 * c, v1 + s1 * c, v2 + s2 * c, v3 + s3 * c


@jit
def put(at, v0, v1, v2, v3):
    """S ← v."""
    tl.store(at, v0)
    tl.store(at + BLOCKS, v1)
    tl.store(at + 2 * BLOCKS, v2)
    tl.store(at + 3 * BLOCKS, v3)


@jit
def add(at, before, value, is_inside):
    """Add to the elements of a tensor that lie inside; low precision is rounded once."""
    if before.dtype == tl.float64:
        after = before + value.to(tl.float64)
    else:
        after = (before.to(tl.float32) + value).to(before.dtype)
    tl.store(at, after, mask=is_inside)


@jit
def move(
    owners,  # int32, per program: the region that it works on
    regions,  # int64 × 10, per region: see `fused`
    targets,  # int64, per region: address of the tensor's first element
    tape,  # int32: the records of some steps, one after the other
    offsets,  # int32: where each record begins
    clock,  # int32 × 2: steps of this tape that have begun, this one included, and may begin
    last,  # the record that says NaN, for a step that may not
    places,  # int64 × 2: address of the buffers, and the float32 numbers in each
    ELEMENT: tl.constexpr,  # type of the tensors
    TILES: tl.constexpr,  # tiles of one program
    DECAYS: tl.constexpr,  # buffers, where they decay
    HAS_LISTS: tl.constexpr,  # buffers are named by lists instead
    EXACT: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """One step on all tensors of one type. A record on the tape is

    [draws, inner, outer, store, gain·scale], draws × [row, weight], then with decays
    DECAYS × [inner weight, θ], else inner × [buffer, weight] and outer × [buffer, weight·scale].
    """
    owner = tl.load(owners + tl.program_id(0))
    region = regions + owner * REGION
    begun, announced = tl.load(clock), tl.load(clock + 1)
    index = tl.where(begun <= announced, tl.minimum(begun - 1, last), last)
    record = tape + tl.load(offsets + index)
    pointer = tl.load(targets + owner).to(tl.pointer_type(ELEMENT))
    numel, skip = tl.load(region), tl.load(region + 1)
    k0, k1 = tl.load(region + 5).to(tl.uint32), tl.load(region + 6).to(tl.uint32)
    g0, g1 = tl.load(region + 7).to(tl.uint32), tl.load(region + 8).to(tl.uint32)
    draws, gain = tl.load(record), number(record + 4)
    state, plane = tl.load(places).to(tl.pointer_type(tl.float32)), tl.load(places + 1)
    lane = tl.arange(0, BLOCKS)
    # The tiles of this program, counted from the first one of the region.
    first = (tl.program_id(0) - tl.load(region + 9)) * TILES
    count = tl.minimum(tl.load(region + 2) - first, TILES).to(tl.int32)
    for k in range(count):
        tile = first + k
        block = (tl.load(region + 4) + tile * BLOCKS).to(tl.uint32) + lane.to(tl.uint32)
        # Element 0 of the tile is element `begin` of the tensor; a shard may begin inside a tile.
        begin = tile * TILE - skip
        low = tl.maximum(-begin, 0).to(tl.int32)
        high = tl.minimum(numel - begin, TILE).to(tl.int32)
        is0 = (lane >= low) & (lane < high)
        is1 = (lane + BLOCKS >= low) & (lane + BLOCKS < high)
        is2 = (lane + 2 * BLOCKS >= low) & (lane + 2 * BLOCKS < high)
        is3 = (lane + 3 * BLOCKS >= low) & (lane + 3 * BLOCKS < high)
        # Asked for early, so that it arrives while the normals are made.
        target = pointer + begin + lane
        before0 = tl.load(target, mask=is0, other=0.0)
        before1 = tl.load(target + BLOCKS, mask=is1, other=0.0)
        before2 = tl.load(target + 2 * BLOCKS, mask=is2, other=0.0)
        before3 = tl.load(target + 3 * BLOCKS, mask=is3, other=0.0)
        u0 = tl.zeros([BLOCKS], tl.float32)
        u1, u2, u3 = u0, u0, u0
        entry = record + HEAD
        for _ in range(draws):
            row = tl.load(entry).to(tl.uint32, bitcast=True)
            z0, z1, z2, z3 = draw(block, row, number(entry + 1), k0, k1, g0, g1, EXACT, ASSEMBLY)
            u0, u1, u2, u3 = u0 + z0, u1 + z1, u2 + z2, u3 + z3
            entry += 2
        here = state + (tl.load(region + 3) + tile) * TILE + lane
        y0, y1, y2, y3 = u0, u1, u2, u3
        if DECAYS:
            n0, n1, n2, n3 = get(here)
            for b in tl.static_range(DECAYS):
                s0, s1, s2, s3 = n0, n1, n2, n3
                if b + 1 < DECAYS:
                    # The next buffer is asked for before this one is written, to wait less.
                    n0, n1, n2, n3 = get(here + (b + 1) * plane)
                c, theta = number(entry + 2 * b), number(entry + 2 * b + 1)
                a0, a1, a2, a3 = s0 * theta + u0, s1 * theta + u1, s2 * theta + u2, s3 * theta + u3
                put(here + b * plane, a0, a1, a2, a3)
                y0, y1, y2, y3 = y0 + s0 * c, y1 + s1 * c, y2 + s2 * c, y3 + s3 * c
            y0, y1, y2, y3 = y0 * gain, y1 * gain, y2 * gain, y3 * gain
        if HAS_LISTS:
            for _ in range(tl.load(record + 1)):
                at = here + tl.load(entry).to(tl.int64) * plane
                y0, y1, y2, y3 = blend(at, number(entry + 1), y0, y1, y2, y3)
                entry += 2
            store = tl.load(record + 3)
            if store >= 0:
                put(here + store.to(tl.int64) * plane, y0, y1, y2, y3)
            y0, y1, y2, y3 = y0 * gain, y1 * gain, y2 * gain, y3 * gain
            for _ in range(tl.load(record + 2)):
                at = here + tl.load(entry).to(tl.int64) * plane
                y0, y1, y2, y3 = blend(at, number(entry + 1), y0, y1, y2, y3)
                entry += 2
        add(target, before0, y0, is0)
        add(target + BLOCKS, before1, y1, is1)
        add(target + 2 * BLOCKS, before2, y2, is2)
        add(target + 3 * BLOCKS, before3, y3, is3)
