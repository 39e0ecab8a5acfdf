# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
"""One `StepPlan` on a GPU as one pass over memory: draw, correlate, scale and add, in place.

A program owns a few consecutive tiles of 1024 elements of one tensor. Block c of a tile is one
call of Philox4x32-10 (Salmon et al., SC 2011): words w0, w1 give two radii and w2, w3 two angles,
so that a thread makes four normals of the tile at a time,

    z_c       = ρ(w0) sin w2      z_{256+c} = ρ(w1) sin w3
    z_{512+c} = ρ(w0) cos w2      z_{768+c} = ρ(w1) cos w3

and every access of a warp is one run of neighbours. All draws of a step are summed in registers;
gradient and buffers are read once and written once.

The operations are those of `philox`, `gaussian` and `torch_step`, one by one and each rounded once,
so the noise has the same bits as on a CPU. The compiler must not fuse products and sums by itself
(`enable_fp_fusion` is off); those that `gaussian` fuses say so.

State: none here; see `fused`. The module can be imported without Triton, but not launched.
"""

from __future__ import annotations

from noshuffle.noise import gaussian as constants
from noshuffle.noise.gaussian import COSINE, LN2, LOG, SINE
from noshuffle.noise.gaussian import TILE as TILE_SIZE
from noshuffle.triton_shim import HAS_TRITON as HAS_TRITON
from noshuffle.triton_shim import constant, jit, tl

#: Columns of the region table (see `fused.Regions`), and of the head of a record on the tape.
REGION = constant(10)
HEAD = constant(6)

TILE = constant(TILE_SIZE)
BLOCKS = constant(TILE_SIZE // 4)
S0, S1, S2, S3, S4 = (constant(c) for c in SINE)
C0, C1, C2, C3, C4 = (constant(c) for c in COSINE)
L0, L1, L2, L3, L4, L5, L6, L7 = (constant(c) for c in LOG)
SPREAD, BASE = constant(constants.SPREAD), constant(constants.BASE)
SCATTER = constant(constants.SCATTER + 2**32)
SHIFT_DIGITS, SHIFT_ONES = constant(constants.SHIFT_DIGITS), constant(constants.SHIFT_ONES)
#: 2 ln 2 times 128, and by what it shrinks with the exponent, which comes times 2²³.
LN2_WHOLE, LN2_PLACED = constant(256 * LN2), constant(-LN2 * 2.0**-22)
RADIUS_DIGITS = constant(constants.RADIUS_DIGITS)
ANGLE_DIGITS = constant(constants.ANGLE_DIGITS)
MIDDLE_DIGIT = constant(constants.MIDDLE_DIGIT)
#: The bits of 1 as float32.
ONE_BITS = constant(0x3F800000)


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
def fraction(bits, placed, ASSEMBLY: tl.constexpr):
    """m − 1 for the digits of a float32 as a number from ½ to 1, given the bits of its exponent.

    In assembly a subtraction of three terms leaves the sign to be dropped by the next, which costs
    nothing; two masks would be one operation more.
    """
    if ASSEMBLY:
        f = tl.inline_asm_elementwise(
            """{ .reg .s32 i; .reg .f32 m;
            sub.s32 i, $1, $2; add.s32 i, i, 0x3f000000; mov.b32 m, i;
            abs.f32 m, m; add.rn.f32 $0, m, 0fBF800000; }""",
            "=f,r,r",
            [bits, placed],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        f = ((bits & 0x7FFFFF) | 0x3F000000).to(tl.float32, bitcast=True) - 1.0
    return f


@jit
def fused(a, b, c, ASSEMBLY: tl.constexpr):
    """a·b + c rounded once; float64 has room for all of it, see `gaussian`."""
    return tl.fma(a, b, c) if ASSEMBLY else (a.to(tl.float64) * b + c).to(tl.float32)


@jit
def root(x, ASSEMBLY: tl.constexpr):
    """√x for 10⁻⁷ < x < 100, where no step can over- or underflow.

    g → √x and h → 1/(2√x) are improved together, then g is corrected by its remainder, which
    rounds correctly for every x and any hardware root within two units (see the tests).
    """
    if ASSEMBLY:
        y = tl.inline_asm_elementwise(
            "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        g, h = x * y, 0.5 * y
        miss = tl.fma(minus(g), h, 0.5)
        g, h = tl.fma(g, miss, g), tl.fma(h, miss, h)
        g = tl.fma(tl.fma(minus(g), g, x), h, g)
    else:
        g = tl.sqrt_rn(x)
    return g


@jit
def radius(word, angle_word, weight, ASSEMBLY: tl.constexpr):
    """weight·sign(u)·√(−ln u²) with u = (word + v)/2³¹, the word taken with its sign."""
    digits = ((angle_word * SCATTER) >> 9) & SHIFT_DIGITS | SHIFT_ONES
    shift = digits.to(tl.float32, bitcast=True) - BASE
    v = fused(word.to(tl.int32, bitcast=True).to(tl.float32), SPREAD, shift, ASSEMBLY)
    bits = v.to(tl.int32, bitcast=True)
    placed = bits & 0x7F800000
    f = fraction(bits, placed, ASSEMBLY)
    p = fused(f, L7, L6, ASSEMBLY)
    p = fused(fused(p, f, L5, ASSEMBLY), f, L4, ASSEMBLY)
    p = fused(fused(p, f, L3, ASSEMBLY), f, L2, ASSEMBLY)
    p = fused(fused(p, f, L1, ASSEMBLY), f, L0, ASSEMBLY)
    rest = fused(placed.to(tl.float32), LN2_PLACED, LN2_WHOLE, ASSEMBLY)
    r = root(fused(p, f, rest, ASSEMBLY), ASSEMBLY).to(tl.int32, bitcast=True)
    return (r | (bits & -2147483648)).to(tl.float32, bitcast=True) * weight


@jit
def turn(word, ASSEMBLY: tl.constexpr):
    """a, sin(πa)/a and cos πa with a = word/2³², the word taken with its sign."""
    a = word.to(tl.int32, bitcast=True).to(tl.float32) * 2.3283064365386963e-10
    t = fused(a, a, 0.125, ASSEMBLY)
    s = fused(fused(t, S4, S3, ASSEMBLY), t, S2, ASSEMBLY)
    s = fused(fused(s, t, S1, ASSEMBLY), t, S0, ASSEMBLY)
    c = fused(fused(t, C4, C3, ASSEMBLY), t, C2, ASSEMBLY)
    c = fused(fused(c, t, C1, ASSEMBLY), t, C0, ASSEMBLY)
    return a, s, c


@jit
def draw(block, row, weight, k0, k1, g0, g1, ASSEMBLY: tl.constexpr):
    """weight times the four quarters of a tile's normals of one row, and the words they came of."""
    w0, w1, w2, w3 = philox(block, row, g0, g1, k0, k1)
    r0, r1 = radius(w0, w2, weight, ASSEMBLY), radius(w1, w3, weight, ASSEMBLY)
    a0, s0, c0 = turn(w2, ASSEMBLY)
    a1, s1, c1 = turn(w3, ASSEMBLY)
    return r0 * a0 * s0, r1 * a1 * s1, r0 * c0, r1 * c1, w0, w1, w2, w3


@jit
def generator(pointer):
    """Key and tag of Philox from a table of int64."""
    k0, k1 = tl.load(pointer).to(tl.uint32), tl.load(pointer + 1).to(tl.uint32)
    g0, g1 = tl.load(pointer + 2).to(tl.uint32), tl.load(pointer + 3).to(tl.uint32)
    return k0, k1, g0, g1


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
def jitter(radius_word, angle_word, step):
    """The coin of a pair, step·U, from the low bytes of its words; see `grid`."""
    digits = ((radius_word << 7) & RADIUS_DIGITS) | ((angle_word << 15) & ANGLE_DIGITS)
    coin = (digits | (ONE_BITS | MIDDLE_DIGIT)).to(tl.float32, bitcast=True)
    # The product is exact, so that one rounding or two make no difference.
    return tl.fma(coin, step, step * -1.5)


@jit
def add(at, before, value, coin, step, is_inside):
    """Add to the elements of a tensor that lie inside, on the grid; low precision rounds once."""
    if before.dtype == tl.float64:
        after = before + value.to(tl.float64) + coin.to(tl.float64)
        middle = step.to(tl.float64) * 6755399441055744.0  # 1.5·2⁵²
    else:
        after = before.to(tl.float32) + value + coin
        middle = step * 12582912.0  # 1.5·2²³
    # A sum with the middle has no place for less than a step.
    tl.store(at, ((after + middle) - middle).to(before.dtype), mask=is_inside)


@jit
def add_noise(
    owners,  # int32, per program: the region that it works on
    regions,  # int64 × 10, per region: see `fused`
    targets,  # int64, per region: address of the tensor's first element
    tape,  # int32: the records of some steps, one after the other
    offsets,  # int32: where each record begins
    clock,  # int32 × 2: steps of this tape that have begun, this one included, and may begin
    last,  # the record that says NaN, for a step that may not
    places,  # int64 × 4: address of the buffers, numbers in each; keys, how many a region
    ELEMENT: tl.constexpr,  # type of the tensors
    TILES: tl.constexpr,  # tiles of one program
    DECAYS: tl.constexpr,  # buffers, where they decay
    HAS_LISTS: tl.constexpr,  # buffers are named by lists instead
    HAS_RING: tl.constexpr,  # every draw names one of the region's keys
    ASSEMBLY: tl.constexpr,
):
    """One step on all tensors of one type. A record on the tape is

    [draws, inner, outer, store, gain·scale, grid], draws × [row, weight], with a ring draws ×
    [row, weight, segment], then with decays DECAYS × [inner weight, θ], else inner × [buffer,
    weight] and outer × [buffer, weight·scale].
    """
    owner = tl.load(owners + tl.program_id(0))
    region = regions + owner * REGION
    begun, announced = tl.load(clock), tl.load(clock + 1)
    index = tl.where(begun <= announced, tl.minimum(begun - 1, last), last)
    record = tape + tl.load(offsets + index)
    pointer = tl.load(targets + owner).to(tl.pointer_type(ELEMENT))
    numel, skip = tl.load(region), tl.load(region + 1)
    k0, k1, g0, g1 = generator(region + 5)
    draws, gain, step = tl.load(record), number(record + 4), number(record + 5)
    plane = tl.load(places + 1)
    state = tl.load(places).to(tl.pointer_type(tl.float32))
    if HAS_RING:
        keys = tl.load(places + 2).to(tl.pointer_type(tl.int64)) + owner * tl.load(places + 3) * 4
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
        for _ in range(draws - 1):
            row, weight = tl.load(entry).to(tl.uint32, bitcast=True), number(entry + 1)
            if HAS_RING:
                k0, k1, g0, g1 = generator(keys + 4 * tl.load(entry + 2))
            z0, z1, z2, z3, _w0, _w1, _w2, _w3 = draw(block, row, weight, k0, k1, g0, g1, ASSEMBLY)
            u0, u1, u2, u3 = u0 + z0, u1 + z1, u2 + z2, u3 + z3
            entry += 3 if HAS_RING else 2
        # The last draw, the newest, by itself: what its words have to spare decides the rounding,
        # and words that outlived the loop would take registers from it.
        row, weight = tl.load(entry).to(tl.uint32, bitcast=True), number(entry + 1)
        if HAS_RING:
            k0, k1, g0, g1 = generator(keys + 4 * tl.load(entry + 2))
        z0, z1, z2, z3, w0, w1, w2, w3 = draw(block, row, weight, k0, k1, g0, g1, ASSEMBLY)
        u0, u1, u2, u3 = u0 + z0, u1 + z1, u2 + z2, u3 + z3
        coin0, coin1 = jitter(w0, w2, step), jitter(w1, w3, step)
        entry += 3 if HAS_RING else 2
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
        add(target, before0, y0, coin0, step, is0)
        add(target + BLOCKS, before1, y1, coin1, step, is1)
        add(target + 2 * BLOCKS, before2, y2, minus(coin0), step, is2)
        add(target + 3 * BLOCKS, before3, y3, minus(coin1), step, is3)
