/* Squared norms of sum_t g_t a_t^T per example, from inner products of its steps; many maps at once.

   What gram.bounded says, in one reading of a and of g, in chunks of CHUNK columns that stay in the
   first-level cache while all tiles of inner products take their part of them. The sums of g over
   steps (the gradients of a bias) come along.

   Rounding. A lane adds up CHUNK / LANES products in single precision: sixteen or eight with one
   rounding each where the processor multiplies and adds at once, else three with two each, less the
   first sum. All else is double precision. So an inner product of length n is wrong by at most
   min(16, n / 16 + 1), min(8, n / 8 + 1) or min(5, n / 4 + 1) roundings of |x||y|, below the
   1 + sqrt(n) that gram.allowance has room for. Threads take examples as they come; each of them is
   added up in one order, so that no bit depends on who came when. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#define CHUNK 256
#define ACROSS 4                       /* a tile of inner products: DOWN x ACROSS */
#elif defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define LANES 8
#define CHUNK 64
#define ACROSS 2
#else
#define LANES 8
#define CHUNK 24
#define ACROSS 2
#endif
#define DOWN 4
#define LONGEST 64                     /* steps, as in native_steps.py */
#define TILES (LONGEST / DOWN * (LONGEST / ACROSS + DOWN / ACROSS) / 2)

typedef float Single __attribute__((vector_size(4 * LANES), aligned(4)));
typedef float Eight __attribute__((vector_size(32), aligned(4)));
typedef double Double __attribute__((vector_size(64)));
typedef double Table[LONGEST][LONGEST];
typedef Double Tile[DOWN][ACROSS];     /* eight sums of each inner product, not yet added up */

/* rows of numbers: example b, step t begins at b * example + t * step */
typedef struct {
    const float *from;
    int64_t width, example, step;
} Rows;
typedef struct {
    int64_t examples, steps;
    Rows a, g;
    double *squares;                   /* one per example */
    float *sums;                       /* examples x width of g, or null: not wanted */
    double *sum_squares;               /* of those, one per example */
} Map;
typedef struct {
    int64_t next, count;
    const Map *maps;
    double unit, tiny;                 /* roundoff of single precision; its smallest normal number */
} StepsJob;

static inline double added(Double v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

/* sum += eight numbers in double precision */
static inline void add_eight(Double *sum, const float *x) {
#if defined(__AVX512F__)
    *sum += (Double)_mm512_cvtps_pd(_mm256_loadu_ps(x));
#else
    *sum += __builtin_convertvector(*(const Eight *)x, Double);
#endif
}

/* sum += the lanes in double precision, by two where there are sixteen */
static inline void add_lanes(Double *sum, const Single *lanes) {
#if defined(__AVX512F__)
    __m256 low = _mm512_castps512_ps256((__m512)*lanes);
    __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)*lanes, 1));
    *sum += (Double)_mm512_add_pd(_mm512_cvtps_pd(low), _mm512_cvtps_pd(high));
#else
    *sum += __builtin_convertvector(*lanes, Double);
#endif
}

/* sums += the products of rows and others over a chunk of columns, a multiple of LANES */
static inline void tile(Tile sums, const float *const *row, const float *const *other,
                        int64_t width) {
    Single part[DOWN][ACROSS] = {0};
    for (int64_t j = 0; j < width; j += LANES) {
        Single y[ACROSS];
        for (int k = 0; k < ACROSS; k++) y[k] = *(const Single *)(other[k] + j);
        for (int i = 0; i < DOWN; i++) {
            Single x = *(const Single *)(row[i] + j);
            for (int k = 0; k < ACROSS; k++) part[i][k] += x * y[k];
        }
    }
    for (int i = 0; i < DOWN; i++)
        for (int k = 0; k < ACROSS; k++) add_lanes(&sums[i][k], &part[i][k]);
}

/* out = sum of all steps over a chunk of columns, a multiple of LANES; returns its squared length */
static inline double summed(float *out, const float *const *row, int64_t steps, int64_t width) {
    Double length = {0};
    double all[CHUNK] __attribute__((aligned(64))) = {0};
    for (int64_t t = 0; t < steps; t++)
        for (int64_t j = 0; j < width; j += 8) add_eight((Double *)(all + j), row[t] + j);
    for (int64_t j = 0; j < width; j++) out[j] = (float)all[j];
    for (int64_t j = 0; j < width; j += 8) {
        Double rounded = {0};
        add_eight(&rounded, out + j);
        length += rounded * rounded;
    }
    return added(length);
}

/* <x_t, x_s> for t <= s (the others mean nothing) of one example, and the sums, if they are wanted;
   returns the squared length of those */
static double inner(Table table, const Rows *of, int64_t example, int64_t steps, float *sums) {
    const float *x = of->from + example * of->example, *row[LONGEST + DOWN];
    float last[LONGEST][LANES], few[LANES];  /* columns that fill no lane, with zeros behind them */
    Tile tiles[TILES];
    double length = 0;
    int64_t used = 0, whole = of->width / LANES * LANES;
    for (int64_t t = 0; t < steps; t += DOWN)
        for (int64_t s = t; s < steps; s += ACROSS) memset(tiles[used++], 0, sizeof(Tile));
    for (int64_t at = 0; at < of->width;) {
        int64_t width = whole - at < CHUNK ? whole - at : CHUNK, real = width;
        if (width > 0)
            for (int64_t t = 0; t < steps; t++) row[t] = x + t * of->step + at;
        else {
            width = LANES, real = of->width - whole;
            memset(last, 0, steps * sizeof *last);
            for (int64_t t = 0; t < steps; t++)
                row[t] = memcpy(last[t], x + t * of->step + at, real * sizeof(float));
        }
        for (int64_t t = steps; t < steps + DOWN; t++) row[t] = row[steps - 1];
        if (sums && real == width) length += summed(sums + at, row, steps, width);
        else if (sums) {
            length += summed(few, row, steps, width);
            memcpy(sums + at, few, real * sizeof(float));
        }
        Tile *next = tiles;
        for (int64_t t = 0; t < steps; t += DOWN)
            for (int64_t s = t; s < steps; s += ACROSS) tile(*next++, row + t, row + s, width);
        at += real;
    }
    Tile *next = tiles;
    for (int64_t t = 0; t < steps; t += DOWN)
        for (int64_t s = t; s < steps; s += ACROSS, next++)
            for (int i = 0; i < DOWN && t + i < steps; i++)
                for (int k = 0; k < ACROSS && s + k < steps; k++)
                    table[t + i][s + k] = added((*next)[i][k]);
    return length;
}

/* never too small: see gram.sums and gram.bounded; a NaN stays one */
static double bounded(Table one, Table other, const Map *m, double unit, double tiny) {
    double total = 0, reach = 0, long_a = 0, long_g = 0, i = m->a.width, o = m->g.width;
    for (int64_t t = 0; t < m->steps; t++) {
        double a = sqrt(one[t][t] + i * tiny), g = sqrt(other[t][t] + o * tiny), off = 0;
        long_a += a, long_g += g, reach += a * g;
        for (int64_t s = t + 1; s < m->steps; s++) off += one[t][s] * other[t][s];
        total += one[t][t] * other[t][t] + 2 * off;
    }
    total = total < 0 ? 0 : total;
    total += tiny * (i * long_g * long_g + o * long_a * long_a + (double)m->steps * m->steps);
    return total + unit * (2 + sqrt(i) + sqrt(o)) * reach * reach;
}

void steps(StepsJob *job) {
    Table one, other;
    int64_t all = 0, at;
    for (int64_t k = 0; k < job->count; k++) all += job->maps[k].examples;
    while ((at = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < all) {
        const Map *m = job->maps;
        for (; at >= m->examples; m++) at -= m->examples;
        float *sums = m->sums ? m->sums + at * m->g.width : 0;
        inner(one, &m->a, at, m->steps, 0);
        double length = inner(other, &m->g, at, m->steps, sums);
        m->squares[at] = bounded(one, other, m, job->unit, job->tiny);
        if (sums) m->sum_squares[at] = length;
    }
}
