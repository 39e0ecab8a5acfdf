/* Units of a batch: sorted, found, added, moved on; the twins are in Python (release/unit_index.py,
   release/units.py). Rows come in blocks. A unit from 0 on that is below `size` is near: its block is
   that of its number in `blocks` (0: none), and it has a bit in `marks` once it was added. Any other
   is far: its number, in order of arrival, is in an open table of 2^bits slots, (tag, number + 1),
   the unit in `known` and its block in `far_blocks`, by number. `sizes`: blocks given away, near
   units, far units. */

#include <stdint.h>
#include <string.h>

#define DIGIT 12
#define DIGITS 6
#define AHEAD 24
#define BLOCK 4 /* a power of two, as in unit_index.py */

/* From the lowest digit to the highest; digits that all have in common are passed
   over. `out` and `aside` have room for as many. */
void units_sort(const int64_t *units, int64_t *out, int64_t *aside, int64_t count) {
    static const int64_t sign = INT64_MIN;
    static const uint64_t mask = (1 << DIGIT) - 1;
    int64_t often[1 << DIGIT];
    const int64_t *from = units;
    uint64_t differ = 0;
    int left = 0;
    for (int64_t i = 0; i < count; i++) differ |= (uint64_t)(units[i] ^ units[0]);
    for (int d = 0; d < DIGITS; d++) left += (differ >> (DIGIT * d) & mask) != 0;
    if (!left) memcpy(out, units, count * sizeof *units);
    for (int d = 0; d < DIGITS; d++) {
        if (!(differ >> (DIGIT * d) & mask)) continue;
        int64_t *to = left-- & 1 ? out : aside;
        memset(often, 0, sizeof often);
        for (int64_t i = 0; i < count; i++)
            often[(uint64_t)(from[i] ^ sign) >> (DIGIT * d) & mask]++;
        for (int64_t v = 0, sum = 0; v < 1 << DIGIT; v++) {
            int64_t own = often[v];
            often[v] = sum;
            sum += own;
        }
        for (int64_t i = 0; i < count; i++)
            to[often[(uint64_t)(from[i] ^ sign) >> (DIGIT * d) & mask]++] = from[i];
        from = to;
    }
}

int64_t units_increase(const int64_t *units, int64_t count) {
    for (int64_t i = 1; i < count; i++)
        if (units[i] <= units[i - 1]) return 0;
    return 1;
}

static inline uint64_t mixed(int64_t unit, uint64_t mixer) {
    uint64_t h = (uint64_t)unit * mixer;
    return (h ^ h >> 32) * mixer;
}

static inline int is_near(int64_t unit, int64_t size) { return (uint64_t)unit < (uint64_t)size; }

static inline int is_marked(const uint8_t *marks, int64_t unit) {
    return marks[unit >> 3] >> (unit & 7) & 1;
}

static inline int64_t row_of(const int32_t *blocks, int64_t at) {
    return (int64_t)blocks[at >> BLOCK] << BLOCK | (at & ((1 << BLOCK) - 1));
}

static inline void hash_in(uint64_t *slots, int64_t bits, uint64_t mixer, int64_t unit, int64_t number) {
    uint64_t h = mixed(unit, mixer), at = h >> (64 - bits);
    while (slots[at]) at = (at + 1) & (((uint64_t)1 << bits) - 1);
    slots[at] = (uint64_t)(uint32_t)h << 32 | (uint64_t)(number + 1);
}

#define INDEX int32_t *blocks, uint8_t *marks, int64_t size, uint64_t *slots, int64_t bits, uint64_t mixer, \
              int64_t *known, int32_t *far_blocks, int64_t *sizes, const int64_t *units, int64_t count

void units_find(INDEX, int64_t *rows) {
    uint64_t mask = ((uint64_t)1 << bits) - 1;
    int64_t far = sizes[2];
    for (int64_t i = 0; i < count; i++) {
        if (far && i + AHEAD < count) { /* the slot, and halfway the unit that it names */
            __builtin_prefetch(slots + (mixed(units[i + AHEAD], mixer) >> (64 - bits)));
            uint32_t next = (uint32_t)slots[mixed(units[i + AHEAD / 2], mixer) >> (64 - bits)];
            if (next) __builtin_prefetch(known + next - 1);
        }
        if (is_near(units[i], size) && is_marked(marks, units[i])) {
            rows[i] = row_of(blocks, units[i]);
            continue;
        }
        rows[i] = -1;
        if (!far) continue;
        uint64_t h = mixed(units[i], mixer), at = h >> (64 - bits), found;
        while ((found = slots[at])) {
            int64_t number = (int64_t)(uint32_t)found - 1;
            if (found >> 32 == (uint32_t)h && known[number] == units[i]) {
                rows[i] = row_of(far_blocks, number);
                break;
            }
            at = (at + 1) & mask;
        }
    }
}

/* The rows that distinct units without one will have. */
void units_place(INDEX, int64_t *rows) {
    (void)marks, (void)slots, (void)bits, (void)mixer, (void)known;
    int64_t used = sizes[0], far = sizes[2];
    for (int64_t i = 0; i < count; i++) {
        int near = is_near(units[i], size);
        int64_t at = near ? units[i] : far++;
        int32_t *own = (near ? blocks : far_blocks) + (at >> BLOCK);
        if (near ? !*own : !(at & ((1 << BLOCK) - 1))) *own = (int32_t)used++;
        rows[i] = row_of(near ? blocks : far_blocks, at);
    }
    sizes[0] = used;
}

void units_add(INDEX) {
    (void)blocks, (void)far_blocks;
    for (int64_t i = 0; i < count; i++) {
        if (is_near(units[i], size)) {
            marks[units[i] >> 3] |= (uint8_t)(1 << (units[i] & 7));
            sizes[1]++;
            continue;
        }
        if (i + AHEAD < count)
            __builtin_prefetch(slots + (mixed(units[i + AHEAD], mixer) >> (64 - bits)), 1);
        known[sizes[2]] = units[i];
        hash_in(slots, bits, mixer, units[i], sizes[2]++);
    }
}

/* The first far units into an empty table. */
void units_hash(uint64_t *slots, int64_t bits, uint64_t mixer, const int64_t *known, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if (i + AHEAD < count)
            __builtin_prefetch(slots + (mixed(known[i + AHEAD], mixer) >> (64 - bits)), 1);
        hash_in(slots, bits, mixer, known[i], i);
    }
}

typedef int32_t record __attribute__((vector_size(16)));

/* Over the rows that are not −1: how many; least and largest first, last, count, group. */
void units_spread(const int32_t *data, const int64_t *rows, int64_t count, int64_t *told) {
    record low = {INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX}, high = ~low, own;
    int64_t known = 0;
    for (int64_t i = 0; i < count; i++) {
        if (i + AHEAD < count && rows[i + AHEAD] >= 0) __builtin_prefetch(data + 4 * rows[i + AHEAD]);
        if (rows[i] < 0) continue;
        known++;
        memcpy(&own, data + 4 * rows[i], sizeof own);
        record less = own < low, more = own > high;
        low = (own & less) | (low & ~less);
        high = (own & more) | (high & ~more);
    }
    told[0] = known;
    for (int f = 0; f < 4; f++) told[1 + f] = low[f], told[5 + f] = high[f];
}

/* These rows took part in a step, once however often it is said, and are of this group now. */
void units_move(int32_t *data, const int64_t *rows, int64_t count, int32_t step, int32_t group) {
    for (int64_t i = 0; i < count; i++) {
        if (i + AHEAD < count) __builtin_prefetch(data + 4 * rows[i + AHEAD], 1);
        int32_t *own = data + 4 * rows[i];
        own[2] += own[1] != step;
        own[1] = step;
        own[3] = group;
    }
}

void units_fill(int32_t *data, const int64_t *rows, int64_t count, const int32_t *record) {
    for (int64_t i = 0; i < count; i++) {
        if (i + AHEAD < count) __builtin_prefetch(data + 4 * rows[i + AHEAD], 1);
        memcpy(data + 4 * rows[i], record, 4 * sizeof *data);
    }
}
