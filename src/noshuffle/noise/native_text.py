"""The inner loops of the noise in C; `native` builds them and holds them against their twins.

Operation by operation what `gaussian.normals_in_torch_`, `philox.philox`, `aes.AesWords`,
`correlate.correlate_in_torch_` and `grid` say: only integer operations and +, −, ×, √ and
multiply-adds, each exactly rounded. `add_noise` runs them one after the other on a tile of 1024
numbers at a time, so that nothing but the buffers and the values leaves the first-level cache:

    words = AES(key, row · block)     u = Σ w·normals(words)     y = correlate(u)
    value ← grid(value + y) · times

Threads that are given the same step take its pieces from one counter as they come. The AES part is
there on processors with AES instructions only (`aes_ready`), in blocks of four where they have
them; elsewhere the words come from the `cryptography` package.

>>> "add_noise" in text() and "#define TILE 1024" in text()
True
"""

from __future__ import annotations

from noshuffle.noise.constants import (
    ANGLE_DIGITS,
    BASE,
    COSINE,
    HALF,
    LN2,
    LOG,
    MIDDLE_DIGIT,
    RADIUS_DIGITS,
    SCATTER,
    SHIFT_DIGITS,
    SHIFT_ONES,
    SINE,
    SPREAD,
    TILE,
)

_LOOPS = r"""
#include <stdint.h>
#include <string.h>
#include <math.h>

/* a b + c rounded once; see `gaussian` for why float64 has room for all of it */
static inline float fused(float a, float b, float c) {
#if defined(__FP_FAST_FMAF) || defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return fmaf(a, b, c);
#else
    return (float)((double)a * b + c);
#endif
}

static inline float logarithm(float f, float rest) {
    float p = fused(LOG7, f, LOG6);
    p = fused(fused(p, f, LOG5), f, LOG4);
    p = fused(fused(p, f, LOG3), f, LOG2);
    p = fused(fused(p, f, LOG1), f, LOG0);
    return fused(p, f, rest);
}

static inline float sine(float t) {
    return fused(fused(fused(fused(SINE4, t, SINE3), t, SINE2), t, SINE1), t, SINE0);
}

static inline float cosine(float t) {
    return fused(fused(fused(fused(COSINE4, t, COSINE3), t, COSINE2), t, COSINE1), t, COSINE0);
}

/* out = weight z, or out += weight z */
void normals(const int32_t *restrict words, float *restrict out, int64_t tiles, float weight,
             int accumulate) {
    for (int64_t tile = 0; tile < tiles; tile++, words += TILE, out += TILE)
        for (int j = 0; j < HALF; j++) {
            int32_t bits, digits = (int32_t)((uint32_t)words[HALF + j] * SCATTER >> 9);
            float shift, m;
            digits = (digits & SHIFT_DIGITS) | SHIFT_ONES;
            memcpy(&shift, &digits, 4);
            float v = fused((float)words[j], SPREAD, shift - BASE);
            memcpy(&bits, &v, 4);
            digits = (bits & 0x7fffff) | 0x3f000000;
            memcpy(&m, &digits, 4);
            float rest = fused((float)(bits & 0x7f800000), -LN2 * 0x1p-22f, LN2 * 256);
            float r = copysignf(sqrtf(logarithm(m - 1.0f, rest)), v) * weight;
            float a = (float)words[HALF + j] * 0x1p-32f, t = fused(a, a, 0.125f);
            float first = (r * a) * sine(t), second = r * cosine(t);
            out[j] = accumulate ? out[j] + first : first;
            out[HALF + j] = accumulate ? out[HALF + j] + second : second;
        }
}

/* columns: five rows of `tiles` numbers: first block, key (2), tag (2) */
void philox(int32_t *restrict words, const int64_t *restrict columns, int64_t tiles, uint32_t row) {
    for (int64_t tile = 0; tile < tiles; tile++, words += TILE) {
        uint32_t first = columns[tile], key0 = columns[tiles + tile];
        uint32_t key1 = columns[2 * tiles + tile];
        uint32_t tag0 = columns[3 * tiles + tile], tag1 = columns[4 * tiles + tile];
        for (int b = 0; b < TILE / 4; b++) {
            uint32_t x0 = first + b, x1 = row, x2 = tag0, x3 = tag1, k0 = key0, k1 = key1;
#pragma GCC unroll 10
            for (int round = 0; round < 10; round++) {
                uint64_t p0 = (uint64_t)x0 * 0xD2511F53u, p1 = (uint64_t)x2 * 0xCD9E8D57u;
                x0 = (uint32_t)(p1 >> 32) ^ x1 ^ k0;
                x2 = (uint32_t)(p0 >> 32) ^ x3 ^ k1;
                x1 = (uint32_t)p1;
                x3 = (uint32_t)p0;
                k0 += 0x9E3779B9u;
                k1 += 0xBB67AE85u;
            }
            words[b] = x0;
            words[TILE / 4 + b] = x1;
            words[TILE / 2 + b] = x2;
            words[3 * TILE / 4 + b] = x3;
        }
    }
}

/* inner, outer: one number per buffer; decays: the same, or null; store: a buffer, or -1 */
void correlate(float *restrict y, const float *restrict u, float *const *restrict state,
               int buffers, const float *inner, const float *decays, const float *outer,
               int store, float gain, int64_t tiles) {
    float v[TILE];
    for (int64_t at = 0; at < tiles * TILE; at += TILE) {
        for (int j = 0; j < TILE; j++) v[j] = u[at + j];
        for (int b = 0; b < buffers; b++) {
            float c = inner[b], d = decays ? decays[b] : 0, *s = state[b] + at;
            if (c != 0 && decays)
                for (int j = 0; j < TILE; j++) {
                    v[j] += s[j] * c;
                    s[j] = s[j] * d + u[at + j];
                }
            else if (decays) for (int j = 0; j < TILE; j++) s[j] = s[j] * d + u[at + j];
            else if (c != 0) for (int j = 0; j < TILE; j++) v[j] += s[j] * c;
        }
        if (store >= 0) memcpy(state[store] + at, v, sizeof v);
        for (int j = 0; j < TILE; j++) v[j] *= gain;
        for (int b = 0; b < buffers; b++) {
            float c = outer[b], *s = state[b] + at;
            if (c != 0) for (int j = 0; j < TILE; j++) v[j] += s[j] * c;
        }
        memcpy(y + at, v, sizeof v);
    }
}

/* the coin of a pair, between -step/2 and step/2 */
static inline float jitter(uint32_t radius, uint32_t angle, float step) {
    uint32_t bits;
    float value;
    memcpy(&bits, &step, 4);
    bits |= (radius << 7 & RADIUS_DIGITS) | (angle << 15 & ANGLE_DIGITS) | MIDDLE_DIGIT;
    memcpy(&value, &bits, 4);
    return value - 1.5f * step;
}

/* a tile of values: (value + noise) on the grid, times a factor */
void on_grid(float *restrict value, const float *restrict noise, const int32_t *restrict words,
             float step, float times) {
    const float middle = step * 0x1.8p23f;
    if (step == 0)
        for (int j = 0; j < TILE; j++) value[j] = (value[j] + noise[j]) * times;
    else
        for (int j = 0; j < HALF; j++) {
            float d = jitter(words[j], words[HALF + j], step);
            float a = (value[j] + noise[j]) + d, b = (value[HALF + j] + noise[HALF + j]) - d;
            value[j] = ((a + middle) - middle) * times;
            value[HALF + j] = ((b + middle) - middle) * times;
        }
}
"""

_AES = r"""
#if defined(__AES__) && defined(__SSSE3__)
#include <immintrin.h>

int aes_ready(void) { return 1; }

static inline __m128i folded(__m128i k) {
    k = _mm_xor_si128(k, _mm_slli_si128(k, 4));
    return _mm_xor_si128(k, _mm_slli_si128(k, 8));
}

#define EVEN(i, c) a = _mm_xor_si128(folded(a), \
        _mm_shuffle_epi32(_mm_aeskeygenassist_si128(b, c), 0xff)); \
    _mm_storeu_si128(out + i, a);
#define BOTH(i, c) EVEN(i, c) b = _mm_xor_si128(folded(b), \
        _mm_shuffle_epi32(_mm_aeskeygenassist_si128(a, 0), 0xaa)); \
    _mm_storeu_si128(out + i + 1, b);

/* 32 bytes of key into 15 round keys (FIPS 197, 5.2) */
void aes_schedule(const void *key, void *schedule) {
    __m128i *out = schedule;
    __m128i a = _mm_loadu_si128(key), b = _mm_loadu_si128((const __m128i *)key + 1);
    _mm_storeu_si128(out, a);
    _mm_storeu_si128(out + 1, b);
    BOTH(2, 1) BOTH(4, 2) BOTH(6, 4) BOTH(8, 8) BOTH(10, 16) BOTH(12, 32) EVEN(14, 64)
}

/* the keystream of one tile: counters row · block, row · block + 1, … */
#if defined(__VAES__) && defined(__AVX512BW__)
#define LANES 8
void aes_tile(int32_t *words, const void *schedule, uint64_t row, uint64_t block) {
    const __m128i order = _mm_set_epi64x(0x08090a0b0c0d0e0f, 0x0001020304050607);
    const __m512i swap = _mm512_broadcast_i32x4(order);
    const __m512i four = _mm512_set_epi64(4, 0, 4, 0, 4, 0, 4, 0);
    __m512i key[15], counter = _mm512_set_epi64(
        block + 3, row, block + 2, row, block + 1, row, block, row);
    for (int r = 0; r < 15; r++)
        key[r] = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)schedule + r));
    for (int i = 0; i < TILE / 16; i += LANES) {
        __m512i x[LANES];
        for (int l = 0; l < LANES; l++) {
            x[l] = _mm512_xor_si512(_mm512_shuffle_epi8(counter, swap), key[0]);
            counter = _mm512_add_epi64(counter, four);
        }
        for (int r = 1; r < 14; r++)
            for (int l = 0; l < LANES; l++) x[l] = _mm512_aesenc_epi128(x[l], key[r]);
        for (int l = 0; l < LANES; l++)
            _mm512_storeu_si512(words + 16 * (i + l), _mm512_aesenclast_epi128(x[l], key[14]));
    }
}
#else
#define LANES 8
void aes_tile(int32_t *words, const void *schedule, uint64_t row, uint64_t block) {
    const __m128i swap = _mm_set_epi64x(0x08090a0b0c0d0e0f, 0x0001020304050607);
    const __m128i one = _mm_set_epi64x(1, 0);
    __m128i key[15], counter = _mm_set_epi64x(block, row);
    for (int r = 0; r < 15; r++) key[r] = _mm_loadu_si128((const __m128i *)schedule + r);
    for (int i = 0; i < TILE / 4; i += LANES) {
        __m128i x[LANES];
        for (int l = 0; l < LANES; l++) {
            x[l] = _mm_xor_si128(_mm_shuffle_epi8(counter, swap), key[0]);
            counter = _mm_add_epi64(counter, one);
        }
        for (int r = 1; r < 14; r++)
            for (int l = 0; l < LANES; l++) x[l] = _mm_aesenc_si128(x[l], key[r]);
        for (int l = 0; l < LANES; l++)
            _mm_storeu_si128((__m128i *)words + i + l, _mm_aesenclast_si128(x[l], key[14]));
    }
}
#endif
#else
int aes_ready(void) { return 0; }
void aes_schedule(const void *key, void *schedule) {}
void aes_tile(int32_t *words, const void *schedule, uint64_t row, uint64_t block) {}
#endif
"""

_STEP = r"""
/* tiles of one stream: where they lie in the stream, in the buffers, and in a value */
typedef struct {
    const void *schedule;
    int64_t tile, tiles, flat, value, begin, end, lead;
} Piece;

typedef struct {
    int64_t next, count, stride;
    const Piece *pieces;
    float *const *values;
    const uint64_t *rows;
    const float *weights, *inner, *decays, *outer;
    float *state;
    int draws, buffers, store;
    float gain, grid, times;
} Step;

void add_noise(Step *step) {
    int32_t words[TILE] __attribute__((aligned(64)));
    float u[TILE] __attribute__((aligned(64))), y[TILE] __attribute__((aligned(64)));
    float part[TILE] __attribute__((aligned(64)));
    const Step s = *step;
    float *own[s.buffers + 1];
    int64_t p;
    while ((p = __atomic_fetch_add(&step->next, 1, __ATOMIC_RELAXED)) < s.count) {
        const Piece piece = s.pieces[p];
        for (int64_t t = 0; t < piece.tiles; t++) {
            /* the memory that this tile will meet at the end of its long computation */
            float *target = s.values[piece.value] + piece.begin - piece.lead + t * TILE;
            for (int j = 0; j < TILE; j += 16) __builtin_prefetch(target + j, 1, 2);
            for (int b = 0; b < s.buffers; b++)
                for (int j = 0; j < TILE; j += 16)
                    __builtin_prefetch(s.state + b * s.stride + (piece.flat + t) * TILE + j, 1, 2);
            for (int d = 0; d < s.draws; d++) {
                aes_tile(words, piece.schedule, s.rows[d], (piece.tile + t) * (TILE / 4));
                normals(words, u, 1, s.weights[d], d > 0);
            }
            const float *noise = u;
            if (s.buffers) {
                for (int b = 0; b < s.buffers; b++)
                    own[b] = s.state + b * s.stride + (piece.flat + t) * TILE;
                correlate(y, u, own, s.buffers, s.inner, s.decays, s.outer, s.store, s.gain, 1);
                noise = y;
            }
            /* element e of the value is element lead + e - begin of the piece */
            int64_t from = piece.begin - piece.lead + t * TILE, first = t ? 0 : piece.lead;
            int64_t last = piece.end - from < TILE ? piece.end - from : TILE;
            float *value = s.values[piece.value] + from;
            const int is_whole = first == 0 && last == TILE;
            if (!is_whole) memcpy(part + first, value + first, (last - first) * sizeof *part);
            /* the words are those of the last draw, the newest */
            on_grid(is_whole ? value : part, noise, words, s.grid, s.times);
            if (!is_whole) memcpy(value + first, part + first, (last - first) * sizeof *part);
        }
    }
}
"""


def text() -> str:
    """The whole C text, constants included."""
    names = {"LN2": LN2, "SPREAD": SPREAD, "BASE": BASE}
    for name, series in (("SINE", SINE), ("COSINE", COSINE), ("LOG", LOG)):
        names |= {f"{name}{i}": c for i, c in enumerate(series)}
    lines = [f"#define {name} {value.hex()}f" for name, value in names.items()]
    integers = {"TILE": TILE, "HALF": HALF}
    integers |= {"RADIUS_DIGITS": RADIUS_DIGITS, "ANGLE_DIGITS": ANGLE_DIGITS}
    integers |= {"MIDDLE_DIGIT": MIDDLE_DIGIT, "SCATTER": SCATTER}
    integers |= {"SHIFT_DIGITS": SHIFT_DIGITS, "SHIFT_ONES": SHIFT_ONES}
    lines += [f"#define {name} {value}" for name, value in integers.items()]
    return "\n".join(lines) + _LOOPS + _AES + _STEP
