/* Squared norms of sum_t g_t a_t^T per example, from inner products of its steps; many maps at once.

   What gram.bounded says, in one reading of a and of g, in pieces of PIECE columns that stay in the
   second-level cache. The sums of g over steps (the gradients of a bias) come along.

   Rounding. A lane adds up COLUMNS / LANES products in single precision: eight with one rounding
   each where the processor multiplies and adds at once, else three with two each, less the first
   sum. All else is double precision. So an inner product of length n is wrong by at most
   min(8, n / 8 + 1) or min(5, n / 4 + 1) roundings of |x||y|, below the 1 + sqrt(n) that
   gram.allowance has room for. Threads take examples as they come; each of them is added up in one
   order, so that no bit depends on who came when. */
#include <math.h>
#include <stdint.h>

#define LANES 8
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define COLUMNS 64
#else
#define COLUMNS 24
#endif
#define PIECE 1024
#define LONGEST 64                     /* steps, as in native_steps.py */
#define DOWN 4                         /* a tile of inner products: DOWN x ACROSS */
#define ACROSS 2

typedef float Single __attribute__((vector_size(4 * LANES), aligned(4)));
typedef double Double __attribute__((vector_size(8 * LANES)));
typedef double Table[LONGEST][LONGEST];

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
    double all = 0;
    for (int l = 0; l < LANES; l++) all += v[l];
    return all;
}

/* table[t + i][s + k] += <x_(t+i), x_(s+k)> over some columns; steps behind the end repeat the last */
static inline void tile(Table table, const float *x, int64_t steps, int64_t stride, int64_t width,
                        int64_t t, int64_t s) {
    const float *row[DOWN], *other[ACROSS];
    Double wide[DOWN][ACROSS] = {0};
    int64_t j = 0;
    for (int i = 0; i < DOWN; i++) row[i] = x + (t + i < steps ? t + i : steps - 1) * stride;
    for (int k = 0; k < ACROSS; k++) other[k] = x + (s + k < steps ? s + k : steps - 1) * stride;
    while (j + LANES <= width) {
        Single part[DOWN][ACROSS] = {0};
        int64_t end = j + COLUMNS < width ? j + COLUMNS : width;
        for (; j + LANES <= end; j += LANES) {
            Single y[ACROSS];
            for (int k = 0; k < ACROSS; k++) y[k] = *(const Single *)(other[k] + j);
            for (int i = 0; i < DOWN; i++)
                for (int k = 0; k < ACROSS; k++) part[i][k] += *(const Single *)(row[i] + j) * y[k];
        }
        for (int i = 0; i < DOWN; i++)
            for (int k = 0; k < ACROSS; k++)
                wide[i][k] += __builtin_convertvector(part[i][k], Double);
    }
    for (int i = 0; i < DOWN && t + i < steps; i++)
        for (int k = 0; k < ACROSS && s + k < steps; k++) {
            double all = added(wide[i][k]);
            for (int64_t r = j; r < width; r++) all += (double)row[i][r] * (double)other[k][r];
            table[t + i][s + k] += all;
        }
}

/* out = sum_t x_t over some columns; returns its squared length */
static double summed(float *out, const float *x, int64_t steps, int64_t stride, int64_t width) {
    double length = 0;
    for (int64_t at = 0; at < width; at += COLUMNS) {
        double all[COLUMNS] = {0};
        int64_t many = width - at < COLUMNS ? width - at : COLUMNS;
        for (int64_t t = 0; t < steps; t++)
            for (int64_t j = 0; j < many; j++) all[j] += (double)x[t * stride + at + j];
        for (int64_t j = 0; j < many; j++) {
            out[at + j] = (float)all[j];
            length += (double)out[at + j] * (double)out[at + j];
        }
    }
    return length;
}

/* <x_t, x_s> for t <= s (the others mean nothing) of one example, and the sums, if they are wanted;
   returns the squared length of those */
static double inner(Table table, const Rows *of, int64_t example, int64_t steps, float *sums) {
    const float *x = of->from + example * of->example;
    double length = 0;
    for (int64_t t = 0; t < steps; t++)
        for (int64_t s = 0; s < steps; s++) table[t][s] = 0;
    for (int64_t at = 0; at < of->width; at += PIECE) {
        int64_t width = of->width - at < PIECE ? of->width - at : PIECE;
        for (int64_t t = 0; t < steps; t += DOWN)
            for (int64_t s = t; s < steps; s += ACROSS)
                tile(table, x + at, steps, of->step, width, t, s);
        if (sums) length += summed(sums + at, x + at, steps, of->step, width);
    }
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
