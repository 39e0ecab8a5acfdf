/* Gradients of scale and shift of a layer norm, per example: sum_t u_t g_t and sum_t g_t with
   u_t = (x_t - mean) / sqrt(variance + eps), in one reading of x and of g.

   Everything is added up in double precision. Threads take examples as they come; each is added up in
   one order, so that no bit depends on who came when. */
#if defined(__AVX512F__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512") /* as in noise.c */
#endif
#include <math.h>
#include <stdint.h>

#define LANES 16
#define WIDEST 4096                    /* as in native_norms.py */

typedef struct {
    int64_t next, examples, steps, width;
    const float *x, *g;
    float *scales, *shifts;            /* examples x width each */
    double eps;
} NormsJob;

static double added(const double *part) {
    double half[LANES / 2];
    for (int l = 0; l < LANES / 2; l++) half[l] = part[l] + part[l + LANES / 2];
    for (int l = 0; l < LANES / 4; l++) half[l] += half[l + LANES / 4];
    return (half[0] + half[1]) + (half[2] + half[3]);
}

/* mean and 1 / sqrt(variance + eps) of a row */
static void moments(const float *x, int64_t width, double eps, double *mean, double *inverse) {
    double part[LANES] = {0}, square[LANES] = {0};
    int64_t whole = width / LANES * LANES;
    for (int64_t j = 0; j < whole; j += LANES)
        for (int l = 0; l < LANES; l++) part[l] += (double)x[j + l];
    for (int64_t j = whole; j < width; j++) part[j - whole] += (double)x[j];
    const double m = added(part) / (double)width;
    for (int64_t j = 0; j < whole; j += LANES)
        for (int l = 0; l < LANES; l++) {
            double off = (double)x[j + l] - m;
            square[l] += off * off;
        }
    for (int64_t j = whole; j < width; j++) {
        double off = (double)x[j] - m;
        square[j - whole] += off * off;
    }
    *mean = m;
    *inverse = 1 / sqrt(added(square) / (double)width + eps);
}

void layer_sums(NormsJob *job) {
    double scale[WIDEST], shift[WIDEST], mean, inverse;
    const int64_t width = job->width;
    int64_t at;
    while ((at = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->examples) {
        for (int64_t j = 0; j < width; j++) scale[j] = shift[j] = 0;
        for (int64_t t = 0; t < job->steps; t++) {
            const float *x = job->x + (at * job->steps + t) * width;
            const float *g = job->g + (at * job->steps + t) * width;
            moments(x, width, job->eps, &mean, &inverse);
            for (int64_t j = 0; j < width; j++) {
                scale[j] += ((double)x[j] - mean) * inverse * (double)g[j];
                shift[j] += (double)g[j];
            }
        }
        for (int64_t j = 0; j < width; j++) {
            job->scales[at * width + j] = (float)scale[j];
            job->shifts[at * width + j] = (float)shift[j];
        }
    }
}
