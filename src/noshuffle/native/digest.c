/* The keyed digest of digest.py: of every block b of words m, in four lanes, modulo 2^64,

       d[b, l] = (sum of k[l, i] m[b, i]) >> 32        D[o] = sum of second[b, l, o] d[b, l]

   A key is cut into its halves, k = low + 2^32 high. Then

       sum of k m = (sum of low m) + 2^32 (sum of high m)          modulo 2^64

   where the first sum takes products of 32 by 32 bits and of the second 32 bits are enough: loops
   that every processor has vectors for. A few blocks are read together, so that each half of a key
   is loaded once for all of them. All arithmetic is exact; no bit depends on order or threads. */
#include <stdint.h>

#define BLOCK 2048                     /* words of a block */
#define LANES 4
#define TOGETHER 4                     /* blocks that are read together */

typedef struct {
    int64_t next, words, size;         /* size: bytes of a word */
    const void *data;
    const uint64_t *first, *second;
    uint64_t *out;
} DigestJob;

typedef struct {
    uint32_t low[LANES][BLOCK], high[LANES][BLOCK];
} Keys;

/* blocks b to b + TOGETHER - 1 of words of one type, of which all but the last few are whole */
#define BLOCKS(TYPE) \
static void blocks_##TYPE(const DigestJob *job, const Keys *keys, int64_t b, uint64_t *found) { \
    const TYPE *m = (const TYPE *)job->data + b * BLOCK; \
    const int64_t left = job->words - b * BLOCK; \
    for (int l = 0; l < LANES; l++) { \
        const uint32_t *restrict low = keys->low[l], *restrict high = keys->high[l]; \
        uint64_t s[TOGETHER] = {0}; \
        uint32_t t[TOGETHER] = {0}; \
        if (left >= TOGETHER * BLOCK) { \
            for (int i = 0; i < BLOCK; i++) \
                for (int j = 0; j < TOGETHER; j++) { \
                    s[j] += (uint64_t)low[i] * m[j * BLOCK + i]; \
                    t[j] += high[i] * (uint32_t)m[j * BLOCK + i]; \
                } \
        } else { \
            for (int64_t i = 0; i < left; i++) { \
                s[i / BLOCK] += (uint64_t)low[i % BLOCK] * m[i]; \
                t[i / BLOCK] += high[i % BLOCK] * (uint32_t)m[i]; \
            } \
        } \
        for (int j = 0; j < TOGETHER && j * BLOCK < left; j++) { \
            const uint64_t *second = job->second + ((b + j) * LANES + l) * LANES; \
            const uint64_t upper = (s[j] + ((uint64_t)t[j] << 32)) >> 32; \
            for (int o = 0; o < LANES; o++) found[o] += second[o] * upper; \
        } \
    } \
}
BLOCKS(uint32_t)
BLOCKS(uint16_t)
BLOCKS(uint8_t)

void digest(DigestJob *job) {
    uint64_t found[LANES] = {0};
    int64_t b;
    Keys keys;
    for (int l = 0; l < LANES; l++)
        for (int i = 0; i < BLOCK; i++) {
            keys.low[l][i] = (uint32_t)job->first[l * BLOCK + i];
            keys.high[l][i] = (uint32_t)(job->first[l * BLOCK + i] >> 32);
        }
    while ((b = TOGETHER * __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) * BLOCK
           < job->words)
        if (job->size == 4) blocks_uint32_t(job, &keys, b, found);
        else if (job->size == 2) blocks_uint16_t(job, &keys, b, found);
        else blocks_uint8_t(job, &keys, b, found);
    for (int o = 0; o < LANES; o++) __atomic_fetch_add(job->out + o, found[o], __ATOMIC_RELAXED);
}
