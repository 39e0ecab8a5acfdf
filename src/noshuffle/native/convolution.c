/* Gradients of a convolution, one example and group at a time.

   cut writes the windows of some positions into the first-level cache, outer adds up

       into[o, k] += sum over rows of g[o, row] windows[row, k]

   in registers, eight outputs by 32 places of the kernel at a time. squares gives each example to
   whichever thread comes, total each slice of the examples; neither result depends on which. While
   x and g are at hand, squares also sums g up by channel, which is the gradient of the bias, and
   finds what `conv_windows.with_tolerance` adds to a norm. */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define SLICES 8                       /* that the examples of a total are cut into */
#define SCRATCH (1 << 14)              /* numbers of windows that are written at a time: 64 KiB */
#define MOST_ROWS (SCRATCH / 16)       /* windows that these can be */

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
typedef float Eight __attribute__((vector_size(32), aligned(4)));
typedef float Four __attribute__((vector_size(16), aligned(4)));
typedef float Two __attribute__((vector_size(8), aligned(4)));

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
    int64_t window, covered;           /* width without the zeros; windows a number may lie in */
    const double *rounding;            /* of one number, of inner products; what vanishes in those */
    double *tolerated;                 /* squares with a tolerance for rounding */
} ConvJob;

/* lengths of windows and of g there, added up over positions, and their products; the number of
   positions where g is not zero */
typedef struct { double of_x, of_g, both; int64_t count; } Sums;

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

/* One run of a window, times a factor. Left to itself gcc 12 gathers the numbers of several runs at
   once, which takes six times as long; it leaves a loop with an instruction of its own alone. */
static inline __attribute__((always_inline)) void copy(
        const int64_t run, const int64_t step, float *restrict into, const float *restrict from,
        float factor) {
    int64_t j = 0;
    if (step == 1) {
        for (; j + 8 <= run; j += 8) *(Eight *)(into + j) = *(const Eight *)(from + j) * factor;
        for (; j + 4 <= run; j += 4) *(Four *)(into + j) = *(const Four *)(from + j) * factor;
        for (; j + 2 <= run; j += 2) *(Two *)(into + j) = *(const Two *)(from + j) * factor;
    }
    for (; j < run; j++) {
        into[j] = from[j * step] * factor;
        __asm__ volatile("");
    }
}

/* the windows of some positions, times a factor, zeros behind each */
#define CUT(RUN, STEP) \
    for (int64_t i = 0; i < job->runs; i++) \
        copy(RUN, STEP, windows + i * run, at + job->offset[i], factor);

static void cut(const ConvJob *job, float *restrict windows, const float *restrict x,
                const int64_t *place, int64_t rows, float factor) {
    int64_t run = job->run, step = job->step, used = job->runs * run;
    for (int64_t r = 0; r < rows; r++, windows += job->width) {
        const float *restrict at = x + place[r];
        if (step != 1) CUT(run, step)
        else switch (run) {
            case 1: CUT(1, 1) break;
            case 2: CUT(2, 1) break;
            case 3: CUT(3, 1) break;
            case 4: CUT(4, 1) break;
            case 5: CUT(5, 1) break;
            case 6: CUT(6, 1) break;
            case 7: CUT(7, 1) break;
            case 8: CUT(8, 1) break;
            default: CUT(run, 1)
        }
        for (int64_t k = used; k < job->width; k++) windows[k] = 0;
    }
}

/* the squares of g at some positions, added up over the outputs of a group; zeros behind them */
static void columns(const ConvJob *job, double *restrict found, const float *restrict g,
                    int64_t rows) {
    for (int64_t r = 0; r < (rows + 15) / 16 * 16; r++) found[r] = 0;
    for (int64_t o = 0; o < job->outputs; o++, g += job->positions)
        for (int64_t r = 0; r < rows; r++) found[r] += (double)g[r] * (double)g[r];
}

/* the lengths of some windows and of g there; squares go through single precision, as inner
   products would and theirs, which lose what is too small for it and overflow */
static void reach(const ConvJob *job, Sums *sums, const float *windows, const float *g,
                  int64_t rows) {
    double own[MOST_ROWS], tiny = job->rounding[2];
    columns(job, own, g, rows);
    for (int64_t r = 0; r < rows; r++, windows += job->width) {
        float part[16] = {0};
        for (int64_t k = 0; k < job->width; k += 16)
            for (int i = 0; i < 16; i++) part[i] += windows[k + i] * windows[k + i];
        for (int most = 8; most; most /= 2)
            for (int i = 0; i < most; i++) part[i] += part[i + most];
        double of_x = sqrt((double)part[0] + (double)job->window * tiny);
        double of_g = sqrt((double)(float)own[r] + (double)job->outputs * tiny);
        sums->of_x += of_x;
        sums->of_g += of_g;
        double both = of_x * of_g;
        sums->both += both * both > FLT_MAX ? INFINITY : both;
        sums->count += own[r] > 0;
    }
}

/* into += factor times the gradient of one frame and group, or found += its squares; and what
   inner products of its few windows would lose, which may be all that is asked for */
static void add(const ConvJob *job, float *into, double *found, Sums *few, int64_t frame,
                int64_t group, float factor) {
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
        if (few) reach(job, few, windows, g + l, rows);
        if (into) outer(job, into, found, g + l, windows, rows);
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

/* whether inner products of so many windows may be cheaper than the gradient written out */
static int is_few(const ConvJob *job, int64_t count) {
    return job->window * job->outputs > (job->window + job->outputs) * count;
}

/* whether few positions of one example and group are not zero; else moved += the square of what a
   sum over them loses. It comes behind `add`, when x and g are in a cache. */
static int has_few(const ConvJob *job, double *moved, int64_t b, int64_t group) {
    double own[MOST_ROWS], of_g[16] = {0}, of_x[16] = {0};
    int64_t counts[16] = {0}, size = job->group, i;
    for (int64_t f = b * job->frames; f < (b + 1) * job->frames; f++) {
        const float *g = job->g + (f * job->groups + group) * job->outputs * job->positions;
        for (int64_t l = 0; l < job->positions; l += MOST_ROWS) {
            int64_t rows = job->positions - l < MOST_ROWS ? job->positions - l : MOST_ROWS;
            columns(job, own, g + l, rows);
            for (int64_t r = 0; r < rows; r += 16) for (int j = 0; j < 16; j++) {
                of_g[j] += own[r + j];
                counts[j] += own[r + j] > 0;
            }
        }
    }
    int64_t count = 0;
    for (int j = 0; j < 16; j++) count += counts[j];
    if (count == 0) return 0;
    if (is_few(job, count)) return 1;
    for (int64_t f = b * job->frames; f < (b + 1) * job->frames; f++) {
        const float *x = job->x + f * job->example + group * size;
        for (i = 0; i + 16 <= size; i += 16)
            for (int j = 0; j < 16; j++) of_x[j] += (double)x[i + j] * (double)x[i + j];
        for (; i < size; i++) of_x[0] += (double)x[i] * (double)x[i];
    }
    for (int j = 1; j < 16; j++) of_g[0] += of_g[j], of_x[0] += of_x[j];
    double terms = job->rounding[0] * (sqrt((double)count) / 4 + 2);
    *moved += terms * terms * of_x[0] * of_g[0] * (double)job->covered;
    return 0;
}

/* what inner products of few windows lose, added up over positions in `sums` */
static double lost(const ConvJob *job, const Sums *sums) {
    double tiny = job->rounding[2], inner = (double)job->window, outer = (double)job->outputs;
    double steps = (double)(job->frames * job->positions);
    double all = inner * sums->of_g * sums->of_g + outer * sums->of_x * sums->of_x + steps * steps;
    return tiny * all + job->rounding[1] * sums->both * sums->both;
}

void squares(ConvJob *job) {
    int64_t size = job->outputs * job->width, b;
    int64_t mine = job->keep ? 0 : __atomic_fetch_add(&job->taken, 1, __ATOMIC_RELAXED);
    int are_few = is_few(job, job->frames * job->positions);
    int is_once = !job->keep && job->frames == 1 && job->positions <= SCRATCH / job->width;
    while ((b = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->examples) {
        double found[16] = {0}, all = 0, moved = 0, few = 0;
        for (int64_t group = 0; group < job->groups; group++) {
            float *into = job->scratch + size * (job->keep ? b * job->groups + group : mine);
            Sums sums = {0}, *own = are_few ? &sums : 0;
            if (is_once)
                add(job, into, found, own, b, group, 1.0f);
            else {
                memset(into, 0, size * sizeof *into);
                for (int64_t f = 0; f < job->frames; f++)
                    add(job, into, 0, own, b * job->frames + f, group, 1.0f);
                for (int64_t i = 0; i < size; i += 16) for (int j = 0; j < 16; j++)
                    found[j] += (double)into[i + j] * (double)into[i + j];
            }
            if (!are_few && has_few(job, &moved, b, group))
                for (int64_t f = 0; f < job->frames; f++)
                    add(job, 0, 0, &sums, b * job->frames + f, group, 1.0f);
            if (sums.count) few += lost(job, &sums);
        }
        for (int i = 0; i < 16; i++) all += found[i];
        if (all > FLT_MAX) all = INFINITY; /* as in single precision, with one frame or several */
        job->squares[b] = all;
        double root = sqrt(all) + sqrt(moved);
        job->tolerated[b] = root * root + few;
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
                    add(job, job->total + (slice * job->groups + group) * size, 0, 0,
                        b * job->frames + f, group, job->factors[b]);
    }
}
