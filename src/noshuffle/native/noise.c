/* A whole step of AES noise on a CPU.

   Operation by operation what gaussian.normals_in_torch_, words.AesWords, torch_step.correlate_ and
   grid say: only integer operations and +, -, x, roots and multiply-adds, each exactly rounded
   (contraction is switched off). add_noise runs them one after the other on a tile of 1024 numbers
   at a time, so that nothing but the buffers and the values leaves the first-level cache:

       words = AES(key, row . block)     u = sum of w normals(words)     y = correlate(u)
       value <- grid(value + y) times

   Threads that are given the same step take its pieces from one counter as they come. */
#if defined(__AVX512F__) && !defined(__clang__)
/* GCC (12) tunes for the first processors with registers of 512 bits, and leaves half of them free */
#pragma GCC target("prefer-vector-width=512")
#endif
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "noise_constants.h"

/* a b + c rounded once; see gaussian.py for why float64 has room for all of it */
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

/* a tile of out = weight z, or out += weight z */
static inline void normals(const int32_t *restrict words, float *restrict out, float weight,
                           int accumulate) {
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

/* a tile; inner, outer: one number per buffer; decays: the same, or null; store: a buffer, or -1 */
static inline void correlate(float *restrict y, const float *restrict u, float *const *state,
                             int buffers, const float *inner, const float *decays,
                             const float *outer, int store, float gain) {
    for (int j = 0; j < TILE; j++) y[j] = u[j];
    for (int b = 0; b < buffers; b++) {
        float c = inner[b], d = decays ? decays[b] : 0, *restrict s = state[b];
        if (c != 0 && decays)
            for (int j = 0; j < TILE; j++) {
                y[j] += s[j] * c;
                s[j] = s[j] * d + u[j];
            }
        else if (decays) for (int j = 0; j < TILE; j++) s[j] = s[j] * d + u[j];
        else if (c != 0) for (int j = 0; j < TILE; j++) y[j] += s[j] * c;
    }
    if (store >= 0) memcpy(state[store], y, TILE * sizeof *y);
    for (int j = 0; j < TILE; j++) y[j] *= gain;
    for (int b = 0; b < buffers; b++) {
        float c = outer[b], *restrict s = state[b];
        if (c != 0) for (int j = 0; j < TILE; j++) y[j] += s[j] * c;
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
#define ON_GRID(NAME, TYPE, PLACES) \
static inline void NAME(TYPE *restrict value, const float *restrict noise, \
                        const int32_t *restrict words, float step, TYPE times) { \
    const TYPE middle = step * PLACES; \
    if (step == 0) \
        for (int j = 0; j < TILE; j++) value[j] = (value[j] + noise[j]) * times; \
    else \
        for (int j = 0; j < HALF; j++) { \
            float d = jitter(words[j], words[HALF + j], step); \
            TYPE a = (value[j] + noise[j]) + d, b = (value[HALF + j] + noise[HALF + j]) - d; \
            value[j] = ((a + middle) - middle) * times; \
            value[HALF + j] = ((b + middle) - middle) * times; \
        } \
}
ON_GRID(on_grid, float, 0x1.8p23f)
ON_GRID(on_grid_double, double, 0x1.8p52)

#include "aes.h"

/* tiles of one stream: where they lie in the stream, in the buffers, and in a value; the round keys
   of its name, one schedule after the other */
typedef struct {
    const char *schedules;
    int64_t tile, tiles, flat, value, begin, end, lead;
} Piece;

typedef struct {
    int64_t next, count, stride;
    const Piece *pieces;
    float *const *values;
    const uint64_t *rows;
    const int32_t *keys;               /* per draw which schedule of the name; null: the first */
    const float *weights, *inner, *decays, *outer;
    float *state;
    int draws, buffers, store;
    float gain, grid, times;
    int is_double;                     /* what all values are */
    double factor;                     /* times, for them */
} NoiseJob;

/* numbers [first, last) of a tile, which begins at `value` */
#define RELEASE(NAME, TYPE, GRID) \
static inline void NAME(TYPE *value, const float *noise, const int32_t *words, int64_t first, \
                        int64_t last, float step, TYPE times) { \
    if (first == 0 && last == TILE) { \
        GRID(value, noise, words, step, times); \
        return; \
    } \
    TYPE part[TILE] __attribute__((aligned(64))) = {0}; \
    memcpy(part + first, value + first, (last - first) * sizeof *part); \
    GRID(part, noise, words, step, times); \
    memcpy(value + first, part + first, (last - first) * sizeof *part); \
}
RELEASE(release, float, on_grid)
RELEASE(release_double, double, on_grid_double)

void add_noise(NoiseJob *job) {
    int32_t words[TILE] __attribute__((aligned(64)));
    float u[TILE] __attribute__((aligned(64))), y[TILE] __attribute__((aligned(64)));
    const NoiseJob s = *job;
    float *soon[s.buffers + 2]; /* the buffers of a tile, then its values, for the prefetch */
    int64_t p;
    while ((p = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < s.count) {
        const Piece piece = s.pieces[p];
        for (int64_t t = 0; t < piece.tiles; t++) {
            /* element e of the value is element lead + e - begin of the piece */
            int64_t from = piece.begin - piece.lead + t * TILE, first = t ? 0 : piece.lead;
            int64_t last = piece.end - from < TILE ? piece.end - from : TILE;
            float *value = s.values[piece.value] + (s.is_double ? 2 * from : from);
            for (int b = 0; b < s.buffers; b++)
                soon[b] = s.state + b * s.stride + (piece.flat + t) * TILE;
            soon[s.buffers] = value, soon[s.buffers + 1] = value + TILE;
            for (int d = 0; d < s.draws; d++) {
                const char *schedule = piece.schedules + (s.keys ? SCHEDULE * s.keys[d] : 0);
                keystream(words, schedule, s.rows[d], (piece.tile + t) * (TILE / 4), soon,
                          d ? 0 : s.buffers + 1 + s.is_double);
                normals(words, u, s.weights[d], d > 0);
            }
            const float *noise = u;
            if (s.buffers) {
                correlate(y, u, soon, s.buffers, s.inner, s.decays, s.outer, s.store, s.gain);
                noise = y;
            }
            /* the words are those of the last draw, the newest */
            if (s.is_double)
                release_double((double *)value, noise, words, first, last, s.grid, s.factor);
            else release(value, noise, words, first, last, s.grid, s.times);
        }
    }
}
