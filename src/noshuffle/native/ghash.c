/* GHASH of NIST SP 800-38D by the carry-less multiplication of x86 and 64-bit ARM processors.

       sum <- (sum ^ block) H        in GF(2^128) modulo x^128 + x^7 + x^2 + x + 1, block by block

   16 blocks are taken together, as (sum ^ b0) H^16 ^ b1 H^15 ^ ... ^ b15 H, and reduced once. Long
   data is cut into pieces, which threads take as they come; gather joins their sums in order. With
   the bits of every byte turned around, a block read in little-endian order has x^i at bit i. Where
   a processor has no such instruction, ghash_ready says so; release/tags.py compares what comes out
   with another library before any use. */
#include <stdint.h>
#include <string.h>

#define EACH 16                        /* blocks that are taken together */
#define PIECE 4096                     /* blocks that a thread takes at a time: 64 KiB */

typedef struct {
    uint8_t key[16], sum[16], rest[16];
    int64_t held;                      /* bytes in rest, which wait for the rest of their block */
} Hash;
typedef struct {
    int64_t next, blocks;
    const uint8_t *data, *key;
    uint8_t (*sums)[16];               /* of every piece */
} HashJob;

#if defined(__aarch64__) && defined(__AARCH64EL__) && \
    (defined(__ARM_FEATURE_AES) || defined(__ARM_FEATURE_CRYPTO))
#include <arm_neon.h>
#define READY 1
typedef uint64x2_t Block;

static inline Block turned(const uint8_t *at) {
    return vreinterpretq_u64_u8(vrbitq_u8(vld1q_u8(at)));
}
static inline void put(uint8_t *at, Block x) { vst1q_u8(at, vrbitq_u8(vreinterpretq_u8_u64(x))); }
static inline Block swapped(Block x) { return vextq_u64(x, x, 1); }
static inline Block lows(Block a, Block b) { return vtrn1q_u64(a, b); }
static inline Block highs(Block a, Block b) { return vtrn2q_u64(a, b); }
static inline Block make(uint64_t low, uint64_t high) {
    return vcombine_u64(vcreate_u64(low), vcreate_u64(high));
}
static inline Block low(Block a, Block b) {
    return vreinterpretq_u64_p128(vmull_p64((poly64_t)vgetq_lane_u64(a, 0),
                                            (poly64_t)vgetq_lane_u64(b, 0)));
}
static inline Block high(Block a, Block b) {
    return vreinterpretq_u64_p128(vmull_high_p64(vreinterpretq_p64_u64(a),
                                                 vreinterpretq_p64_u64(b)));
}
#elif defined(__PCLMUL__) && defined(__SSSE3__)
#include <immintrin.h>
#define READY 1
typedef __m128i Block;

/* the bits of every byte the other way round, by halves of bytes */
static inline Block rbit(Block x) {
    const Block half = _mm_set1_epi8(15);
    const Block up = _mm_setr_epi8(0, -128, 64, -64, 32, -96, 96, -32, 16, -112, 80, -48, 48, -80,
                                   112, -16);
    const Block down = _mm_setr_epi8(0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15);
    return _mm_xor_si128(_mm_shuffle_epi8(up, _mm_and_si128(x, half)),
                         _mm_shuffle_epi8(down, _mm_and_si128(_mm_srli_epi16(x, 4), half)));
}
static inline Block turned(const uint8_t *at) { return rbit(_mm_loadu_si128((const Block *)at)); }
static inline void put(uint8_t *at, Block x) { _mm_storeu_si128((Block *)at, rbit(x)); }
static inline Block swapped(Block x) { return _mm_shuffle_epi32(x, 0x4e); }
static inline Block lows(Block a, Block b) { return _mm_unpacklo_epi64(a, b); }
static inline Block highs(Block a, Block b) { return _mm_unpackhi_epi64(a, b); }
static inline Block make(uint64_t low, uint64_t high) {
    return _mm_set_epi64x((long long)high, (long long)low);
}
static inline Block low(Block a, Block b) { return _mm_clmulepi64_si128(a, b, 0x00); }
static inline Block high(Block a, Block b) { return _mm_clmulepi64_si128(a, b, 0x11); }
#else
#define READY 0
#endif

int ghash_ready(void) { return READY; }

#if READY
/* the upper half of a product comes down as (x^7 + x^2 + x + 1) times itself, twice */
static inline Block reduced(Block lower, Block middle, Block upper) {
    const Block poly = make(0x87, 0x87), first = make(~0ull, 0);
    middle ^= lower ^ upper;
    Block turn = swapped(middle);
    lower ^= turn & ~first;
    upper ^= turn & first;
    Block fold = swapped(high(upper, poly));
    lower ^= fold & ~first;
    upper ^= fold & first;
    return lower ^ low(upper, poly);
}

/* three multiplications for four: (a0 + a1)(b0 + b1) holds the two in the middle; the sums of
   halves of two blocks, or of two powers of the key, lie in one */
static inline Block folds(Block a, Block b) { return lows(a, b) ^ highs(a, b); }
#define TAKE(BLOCK, NEXT, I) do { \
    Block b = (BLOCK), d = (NEXT), c = folds(b, d); \
    lower ^= low(b, power[I]); \
    upper ^= high(b, power[I]); \
    lower ^= low(d, power[(I) + 1]); \
    upper ^= high(d, power[(I) + 1]); \
    middle ^= low(c, folded[(I) / 2]); \
    other ^= high(c, folded[(I) / 2]); \
} while (0)

static inline Block times(Block a, Block b) {
    Block c = a ^ swapped(a), d = b ^ swapped(b);
    return reduced(low(a, b), low(c, d), high(a, b));
}

static Block absorbed(Block sum, const uint8_t *key, const uint8_t *data, int64_t blocks) {
    Block power[EACH], folded[EACH / 2]; /* power[i] = H^(EACH - i) */
    for (int i = EACH - 1; i >= 0; i--)
        power[i] = i == EACH - 1 ? turned(key) : times(power[i + 1], power[EACH - 1]);
    for (int i = 0; i < EACH; i += 2) folded[i / 2] = folds(power[i], power[i + 1]);
    for (; blocks >= EACH; blocks -= EACH, data += 16 * EACH) {
        Block lower = make(0, 0), middle = lower, other = lower, upper = lower;
#pragma GCC unroll 8
        for (int i = 2; i < EACH; i += 2)
            TAKE(turned(data + 16 * i), turned(data + 16 * (i + 1)), i);
        /* the last: what comes before need not wait for the sum */
        TAKE(sum ^ turned(data), turned(data + 16), 0);
        sum = reduced(lower, middle ^ other, upper);
    }
    for (; blocks > 0; blocks--, data += 16) sum = times(sum ^ turned(data), power[EACH - 1]);
    return sum;
}

static void absorb(Hash *hash, const uint8_t *data, int64_t blocks) {
    put(hash->sum, absorbed(turned(hash->sum), hash->key, data, blocks));
}

static inline int64_t length(const HashJob *job, int64_t piece) {
    int64_t left = job->blocks - piece * PIECE;
    return left < PIECE ? left : PIECE;
}

void ghash_pieces(HashJob *job) {
    int64_t p;
    while ((p = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) * PIECE < job->blocks) {
        const uint8_t *data = job->data + 16 * PIECE * p;
        put(job->sums[p], absorbed(make(0, 0), job->key, data, length(job, p)));
    }
}

/* sum <- sum H^n ^ (sum of a piece of n blocks), in order */
void ghash_gather(Hash *hash, const HashJob *job) {
    Block sum = turned(hash->sum), jump = sum;
    for (int64_t p = 0, known = 0; p * PIECE < job->blocks; p++) {
        int64_t n = length(job, p);
        if (n != known) {
            Block square = turned(job->key);
            int is_first = 1;
            for (int64_t bits = known = n; bits; bits >>= 1, square = times(square, square))
                if (bits & 1) jump = is_first ? (is_first = 0, square) : times(jump, square);
        }
        sum = times(sum, jump) ^ turned(job->sums[p]);
    }
    put(hash->sum, sum);
}
#else
static void absorb(Hash *hash, const uint8_t *data, int64_t blocks) {
    (void)hash, (void)data, (void)blocks;
}
void ghash_pieces(HashJob *job) { (void)job; }
void ghash_gather(Hash *hash, const HashJob *job) { (void)hash, (void)job; }
#endif

/* blocks follow one another through all calls, wherever one ends inside a block */
void ghash(Hash *hash, const uint8_t *data, int64_t size) {
    if (hash->held) {
        int64_t more = 16 - hash->held < size ? 16 - hash->held : size;
        memcpy(hash->rest + hash->held, data, (size_t)more);
        hash->held += more, data += more, size -= more;
        if (hash->held < 16) return;
        absorb(hash, hash->rest, 1);
        hash->held = 0;
    }
    absorb(hash, data, size / 16);
    hash->held = size % 16;
    memcpy(hash->rest, data + size - hash->held, (size_t)hash->held);
}
