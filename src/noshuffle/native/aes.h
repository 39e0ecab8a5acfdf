/* AES-256 in counter mode by the AES instructions of x86 and 64-bit ARM processors.

       words[4i .. 4i + 3] = AES(key, row . (block + i))             (FIPS 197, SP 800-38A)

   aes_schedule expands a key; keystream fills a tile of 1024 words for add_noise, in blocks of four,
   two or one, whatever the processor takes, and asks for memory on its way. is_for_here says whether
   this processor has all that the library was built for. */
#ifndef NOSHUFFLE_AES_H
#define NOSHUFFLE_AES_H

#include <stdint.h>
#include <string.h>

#include "noise_constants.h"

#define SCHEDULE 240                   /* bytes of the round keys of AES-256 */

/* a part of the lines of memory that a tile will meet at the end of its long computation */
static inline void ask(float *const *soon, int many, int part, int parts) {
    int lines = TILE / 16 / parts;
    for (int m = 0; m < many; m++)
        for (int l = part * lines; l < (part + 1) * lines; l++)
            __builtin_prefetch(soon[m] + 16 * l, 1, 2);
}

#if defined(__AES__) && defined(__SSSE3__)
#include <immintrin.h>

int is_for_here(void) {
    __builtin_cpu_init();
    int has = __builtin_cpu_supports("aes") && __builtin_cpu_supports("ssse3");
#ifdef __AVX2__
    has = has && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
#endif
#ifdef __FMA__
    has = has && __builtin_cpu_supports("fma");
#endif
#ifdef __AVX512F__
    has = has && __builtin_cpu_supports("avx512f");
#endif
#ifdef __AVX512BW__
    has = has && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
          __builtin_cpu_supports("avx512dq");
#endif
#ifdef __VAES__
    has = has && __builtin_cpu_supports("vaes");
#endif
    return has;
}

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

/* as many blocks at a time as the processor takes */
#if defined(__VAES__) && defined(__AVX512BW__)
typedef __m512i Blocks;
#define ALIKE _mm512_broadcast_i32x4
#define SHUFFLED _mm512_shuffle_epi8
#define ROUND _mm512_aesenc_epi128
#define LAST _mm512_aesenclast_epi128
#elif defined(__VAES__) && defined(__AVX2__)
typedef __m256i Blocks;
#define ALIKE _mm256_broadcastsi128_si256
#define SHUFFLED _mm256_shuffle_epi8
#define ROUND _mm256_aesenc_epi128
#define LAST _mm256_aesenclast_epi128
#else
typedef __m128i Blocks;
#define ALIKE
#define SHUFFLED _mm_shuffle_epi8
#define ROUND _mm_aesenc_si128
#define LAST _mm_aesenclast_si128
#endif
#define EACH ((int)sizeof(Blocks) / 16)
#define LANES 8

/* the keystream of one tile: counters row · block, row · block + 1, …; meanwhile memory is asked
   for a little at a time, which a processor does beside the rounds */
static inline void keystream(int32_t *words, const void *schedule, uint64_t row, uint64_t block,
                             float *const *soon, int many) {
    const Blocks swap = ALIKE(_mm_set_epi64x(0x08090a0b0c0d0e0f, 0x0001020304050607));
    const Blocks further = ALIKE(_mm_set_epi64x(EACH, 0));
    uint64_t first[2 * EACH];
    Blocks key[15], counter;
    for (int b = 0; b < EACH; b++) first[2 * b] = row, first[2 * b + 1] = block + b;
    memcpy(&counter, first, sizeof counter);
    for (int r = 0; r < 15; r++) key[r] = ALIKE(_mm_loadu_si128((const __m128i *)schedule + r));
    for (int i = 0; i < TILE / (4 * EACH); i += LANES) {
        Blocks x[LANES];
        ask(soon, many, i / LANES, TILE / (4 * EACH * LANES));
        for (int l = 0; l < LANES; l++) {
            x[l] = SHUFFLED(counter, swap) ^ key[0];
            counter += further; /* as 64-bit numbers */
        }
#if !defined(__VAES__)
        /* such rounds know the first sixteen registers only: written out, GCC (12) puts the keys into
           the others and moves blocks to and fro */
#pragma GCC unroll 1
#endif
        for (int r = 1; r < 14; r++)
            for (int l = 0; l < LANES; l++) x[l] = ROUND(x[l], key[r]);
        for (int l = 0; l < LANES; l++) {
            x[l] = LAST(x[l], key[14]);
            memcpy(words + 4 * EACH * (i + l), x + l, sizeof *x);
        }
    }
}
#elif defined(__aarch64__) && defined(__AARCH64EL__) && \
    (defined(__ARM_FEATURE_AES) || defined(__ARM_FEATURE_CRYPTO))
#include <arm_neon.h>
#ifdef __linux__
#include <sys/auxv.h>
int is_for_here(void) { return getauxval(AT_HWCAP) >> 3 & 1; } /* HWCAP_AES */
#else
int is_for_here(void) { return 1; }
#endif

/* each byte of a word through the S-box: columns that are alike stay as they are in ShiftRows */
static inline uint32_t substituted(uint32_t w) {
    uint8x16_t four = vreinterpretq_u8_u32(vdupq_n_u32(w));
    return vgetq_lane_u32(vreinterpretq_u32_u8(vaeseq_u8(four, vdupq_n_u8(0))), 0);
}

/* 32 bytes of key into 15 round keys (FIPS 197, 5.2) */
void aes_schedule(const void *key, void *schedule) {
    uint32_t w[60];
    memcpy(w, key, 32);
    for (int i = 8; i < 60; i++) {
        uint32_t t = w[i - 1];
        if (i % 8 == 0) t = substituted(t >> 8 | t << 24) ^ 1u << (i / 8 - 1);
        else if (i % 8 == 4) t = substituted(t);
        w[i] = w[i - 8] ^ t;
    }
    memcpy(schedule, w, sizeof w);
}

#define LANES 8
static inline void keystream(int32_t *words, const void *schedule, uint64_t row, uint64_t block,
                             float *const *soon, int many) {
    uint8x16_t key[15];
    for (int r = 0; r < 15; r++) key[r] = vld1q_u8((const uint8_t *)schedule + 16 * r);
    for (int i = 0; i < TILE / 4; i += LANES) {
        uint8x16_t x[LANES];
        ask(soon, many, i / LANES, TILE / (4 * LANES));
        for (int l = 0; l < LANES; l++) {
            uint64x2_t counter = vcombine_u64(vcreate_u64(row), vcreate_u64(block + i + l));
            x[l] = vrev64q_u8(vreinterpretq_u8_u64(counter));
        }
        for (int r = 0; r < 13; r++)
            for (int l = 0; l < LANES; l++) x[l] = vaesmcq_u8(vaeseq_u8(x[l], key[r]));
        for (int l = 0; l < LANES; l++)
            vst1q_u8((uint8_t *)(words + 4 * (i + l)), veorq_u8(vaeseq_u8(x[l], key[13]), key[14]));
    }
}
#else
int is_for_here(void) { return 0; }
void aes_schedule(const void *key, void *schedule) { (void)key, (void)schedule; }
static inline void keystream(int32_t *words, const void *schedule, uint64_t row, uint64_t block,
                             float *const *soon, int many) {
    (void)words, (void)schedule, (void)row, (void)block;
    ask(soon, many, 0, 1);
}
#endif

#endif
