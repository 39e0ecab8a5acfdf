/* Rows of float32 matrices: squared lengths, weighted rows and their sums, many at once.

   The rows of a matrix are cut into slices, which threads take as they come; gather adds the slices
   up in order, so that no bit depends on who came when. */
#include <stdint.h>

#define SLICES 8                       /* that the rows of a matrix are cut into */

typedef struct {
    int64_t rows, width, span, other;  /* other: width of y */
    const float *x, *y;                /* y may be missing, and so may each of the results */
    double *squares, *slices;          /* 2 x rows; SLICES x width */
    float *scaled, *sums;              /* rows x width; width */
} Matrix;
typedef struct {
    int64_t next, count;
    const Matrix *matrices;
    const double *factors;
} RowsJob;

#define EACH_SLICE(DO) \
    for (int64_t at; (at = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) \
            < job->count * SLICES; ) { \
        const Matrix *m = job->matrices + at / SLICES; \
        int64_t slice = at % SLICES, width = m->width; \
        int64_t begin = m->rows * slice / SLICES, end = m->rows * (slice + 1) / SLICES; \
        DO \
    }

static double square(const float *restrict x, int64_t width) {
    double part[32] = {0};
    int64_t j = 0;
    for (; j + 32 <= width; j += 32)
        for (int i = 0; i < 32; i++) part[i] += (double)x[j + i] * (double)x[j + i];
    for (int i = 0; j < width; i++, j++) part[i] += (double)x[j] * (double)x[j];
    for (int half = 16; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}

void squares(RowsJob *job) {
    EACH_SLICE(
        for (int64_t r = begin; r < end; r++) {
            double own = m->squares[r] = square(m->x + r * width, width);
            if (m->y) m->squares[m->rows + r] = own * square(m->y + r * m->other, m->other);
        })
}

static void keep(float *restrict out, const float *restrict x, float f, int64_t width) {
    for (int64_t j = 0; j < width; j++) out[j] = x[j] * f;
}
static void sum(double *restrict into, const float *restrict x, float f, int64_t width) {
    for (int64_t j = 0; j < width; j++) into[j] += (double)x[j] * (double)f;
}
static void both(double *restrict into, float *restrict out, const float *restrict x, float f,
                 int64_t width) {
    for (int64_t j = 0; j < width; j++) {
        out[j] = x[j] * f;
        into[j] += (double)x[j] * (double)f;
    }
}

void weighted(RowsJob *job) {
    EACH_SLICE(
        double *into = m->sums ? m->slices + slice * width : 0;
        for (int64_t j = 0; into && j < width; j++) into[j] = 0;
        for (int64_t r = begin; r < end; r++) {
            const float *x = m->x + r * width;
            float f = (float)job->factors[r / m->span];
            if (into && m->scaled) both(into, m->scaled + r * width, x, f, width);
            else if (into) sum(into, x, f, width);
            else keep(m->scaled + r * width, x, f, width);
        })
}

/* the slices, in order; for one thread */
void gather(RowsJob *job) {
    for (int64_t k = 0; k < job->count; k++) {
        const Matrix *m = job->matrices + k;
        for (int64_t j = 0; m->sums && j < m->width; j++) {
            double all = 0;
            for (int s = 0; s < SLICES; s++) all += m->slices[s * m->width + j];
            m->sums[j] = (float)all;
        }
    }
}
