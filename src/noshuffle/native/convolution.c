/* Gradients of a convolution, one example and group at a time.

   cut writes the windows of some positions into the first-level cache, outer adds up

       into[o, k] += sum over rows of g[o, row] windows[row, k]

   in registers, eight outputs by 32 places of the kernel at a time. squares gives each example to
   whichever thread comes, total each slice of the examples; neither result depends on which. While
   g is at hand, squares also sums it up by channel: the gradient of the bias. */
#include <stdint.h>
#include <string.h>

#define SLICES 8                       /* that the examples of a total are cut into */
#define SCRATCH (1 << 14)              /* numbers of windows that are written at a time: 64 KiB */

/* A vector of this processor, and the block of sums that its registers hold: outputs by vectors. */
#if defined(__AVX512F__)
#define LANE 16
#define MOST 8
#define VECTORS 2
#elif defined(__AVX__)
#define LANE 8
#define MOST 6
#define VECTORS 2
#else
#define LANE 4
#define MOST 4
#define VECTORS 4
#endif
#define WIDE (VECTORS * LANE)
typedef float Lane __attribute__((vector_size(4 * LANE), aligned(4)));

typedef struct {
    int64_t next, examples, frames, groups, positions, outputs, width, runs, run, step;
    int64_t example, group;            /* distances in x */
    const int64_t *place, *offset;     /* of every position; of every run of the kernel */
    const float *x, *g, *factors;
    double *squares;
    float *total, *scratch;            /* slices, or threads x outputs x width */
    int64_t taken, keep;               /* scratches handed out; or one for every example, kept */
    int64_t padded, lines, line;       /* numbers of x with a border (0: it has none), rows of x */
    const int64_t *into;               /* where each row goes inside the border */
    float *channels;                   /* examples x channels: sums of g; may be missing */
} ConvJob;

/* into[o, k] += sum over rows of g[o, row] windows[row, k], for `os` outputs and `ks` vectors; with
   `found` instead, the squares of those sums are added to it and nothing is written */
static inline __attribute__((always_inline)) void block(
        const int os, const int ks, float *restrict into, double *restrict found,
        const float *restrict g, const float *restrict windows, int64_t rows,
        int64_t positions, int64_t width) {
    Lane sum[MOST][VECTORS], own[VECTORS];
    for (int o = 0; o < os; o++) for (int k = 0; k < ks; k++)
        sum[o][k] = found ? (Lane){0} : *(const Lane *)(into + o * width + LANE * k);
    for (int64_t r = 0; r < rows; r++, windows += width) {
        for (int k = 0; k < ks; k++) own[k] = *(const Lane *)(windows + LANE * k);
        for (int o = 0; o < os; o++) for (int k = 0; k < ks; k++)
            sum[o][k] += own[k] * g[o * positions + r];
    }
    if (found) {
        Lane part[2] = {{0}, {0}};
        for (int o = 0; o < os; o++) for (int k = 0; k < ks; k++)
            part[o & 1] += sum[o][k] * sum[o][k];
        for (int i = 0; i < LANE; i++) found[i] += (double)part[0][i] + (double)part[1][i];
    } else for (int o = 0; o < os; o++) for (int k = 0; k < ks; k++)
        *(Lane *)(into + o * width + LANE * k) = sum[o][k];
}

/* rows of windows are multiples of 16 numbers long, which is a block or half of one */
#define RUN(OS) \
    if (k + WIDE <= width) block(OS, VECTORS, at, found, own, windows + k, rows, length, width); \
    else block(OS, VECTORS / 2, at, found, own, windows + k, rows, length, width); \
    o += OS

static void outer(const ConvJob *job, float *into, double *found, const float *g,
                  const float *windows, int64_t rows) {
    int64_t width = job->width, length = job->positions;
    for (int64_t k = 0; k < width; k += WIDE)
        for (int64_t o = 0; o < job->outputs; ) {
            int64_t left = job->outputs - o;
            float *at = into + o * width + k;
            const float *own = g + o * length;
            if (left >= MOST) { RUN(MOST); }
            else if (left >= 4) { RUN(4); }
            else { RUN(1); }
        }
}

/* the windows of some positions, times a factor, zeros behind each */
#define CUT(RUN, STEP) \
    for (int64_t i = 0; i < job->runs; i++) \
        for (int64_t j = 0; j < RUN; j++) \
            windows[i * RUN + j] = at[job->offset[i] + j * STEP] * factor;

static void cut(const ConvJob *job, float *restrict windows, const float *restrict x,
                const int64_t *place, int64_t rows, float factor) {
    int64_t run = job->run, step = job->step, used = job->runs * run;
    for (int64_t r = 0; r < rows; r++, windows += job->width) {
        const float *restrict at = x + place[r];
        if (step == 1 && run == 8) CUT(8, 1)
        else if (step == 1 && run == 5) CUT(5, 1)
        else if (step == 1 && run == 4) CUT(4, 1)
        else if (step == 1 && run == 3) CUT(3, 1)
        else CUT(run, step)
        for (int64_t k = used; k < job->width; k++) windows[k] = 0;
    }
}

/* into += factor times the gradient of one frame and group, or found += its squares */
static void add(const ConvJob *job, float *into, double *found, int64_t frame, int64_t group,
                float factor) {
    float windows[SCRATCH] __attribute__((aligned(64)));
    const float *x = job->x + frame * job->example + group * job->group;
    const float *g = job->g + (frame * job->groups + group) * job->outputs * job->positions;
    float bordered[SCRATCH] __attribute__((aligned(64)));
    if (job->padded) {
        memset(bordered, 0, (size_t)job->padded * sizeof *bordered);
        for (int64_t r = 0; r < job->lines; r++)
            memcpy(bordered + job->into[r], x + r * job->line, job->line * sizeof *x);
        x = bordered;
    }
    int64_t most = SCRATCH / job->width;
    for (int64_t l = 0; l < job->positions; l += most) {
        int64_t rows = job->positions - l < most ? job->positions - l : most;
        cut(job, windows, x, job->place + l, rows, factor);
        outer(job, into, found, g + l, windows, rows);
    }
}

/* the sum of g over frames and positions, for every channel of one example */
static void channels(const ConvJob *job, int64_t b) {
    int64_t many = job->groups * job->outputs, length = job->positions;
    for (int64_t o = 0; o < many; o++) {
        double part[16] = {0}, all = 0;
        for (int64_t f = 0; f < job->frames; f++) {
            const float *g = job->g + ((b * job->frames + f) * many + o) * length;
            int64_t l = 0;
            for (; l + 16 <= length; l += 16) for (int i = 0; i < 16; i++) part[i] += (double)g[l + i];
            for (; l < length; l++) all += (double)g[l];
        }
        for (int i = 0; i < 16; i++) all += part[i];
        job->channels[b * many + o] = (float)all;
    }
}

void squares(ConvJob *job) {
    int64_t size = job->outputs * job->width, b;
    int64_t mine = job->keep ? 0 : __atomic_fetch_add(&job->taken, 1, __ATOMIC_RELAXED);
    int is_once = !job->keep && job->frames == 1 && job->positions <= SCRATCH / job->width;
    while ((b = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->examples) {
        double found[16] = {0}, all = 0;
        for (int64_t group = 0; group < job->groups; group++) {
            float *into = job->scratch + size * (job->keep ? b * job->groups + group : mine);
            if (is_once) {
                add(job, into, found, b, group, 1.0f);
                continue;
            }
            memset(into, 0, size * sizeof *into);
            for (int64_t f = 0; f < job->frames; f++)
                add(job, into, 0, b * job->frames + f, group, 1.0f);
            for (int64_t i = 0; i < size; i += 16)
                for (int j = 0; j < 16; j++) found[j] += (double)into[i + j] * (double)into[i + j];
        }
        for (int i = 0; i < 16; i++) all += found[i];
        job->squares[b] = all;
        if (job->channels) channels(job, b);
    }
}

void total(ConvJob *job) {
    int64_t size = job->outputs * job->width, slice;
    while ((slice = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < SLICES) {
        int64_t end = job->examples * (slice + 1) / SLICES;
        for (int64_t b = job->examples * slice / SLICES; b < end; b++)
            for (int64_t f = 0; f < job->frames; f++)
                for (int64_t group = 0; group < job->groups; group++)
                    add(job, job->total + (slice * job->groups + group) * size, 0,
                        b * job->frames + f, group, job->factors[b]);
    }
}
