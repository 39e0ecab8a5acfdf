/* Units of a batch: sorted, found, added, moved on; the twins are numpy's (release/unit_index.py,
   release/units.py). A unit from 0 on that is below `size` has its row + 1 in places[unit], and a bit
   in `marks`, which are small enough for a cache; any other is in an open table of 2^bits slots,
   (tag, row + 1), with the units themselves in `known`, by row. */

#include <stdint.h>
#include <string.h>

#define DIGIT 12
#define DIGITS 6
#define AHEAD 24

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

void units_find(const int32_t *places, const uint8_t *marks, int64_t size, const uint64_t *slots, int64_t bits,
                uint64_t mixer, const int64_t *known, const int64_t *units, int64_t count,
                int64_t *rows) {
    uint64_t mask = ((uint64_t)1 << bits) - 1;
    for (int64_t i = 0; i < count; i++) {
        if (i + AHEAD < count) {
            int64_t next = units[i + AHEAD];
            if (is_near(next, size)) {
                if (is_marked(marks, next)) __builtin_prefetch(places + next);
            } else __builtin_prefetch(slots + (mixed(next, mixer) >> (64 - bits)));
        }
        if (is_near(units[i], size)) {
            rows[i] = is_marked(marks, units[i]) ? (int64_t)places[units[i]] - 1 : -1;
            continue;
        }
        uint64_t h = mixed(units[i], mixer), at = h >> (64 - bits), found;
        while ((found = slots[at])) {
            if (found >> 32 == (uint32_t)h && known[(uint32_t)found - 1] == units[i]) break;
            at = (at + 1) & mask;
        }
        rows[i] = (int64_t)(uint32_t)found - 1;
    }
}

/* Distinct units without a row get those from `start` on. */
void units_add(int32_t *places, uint8_t *marks, int64_t size, uint64_t *slots, int64_t bits, uint64_t mixer,
               int64_t *known, const int64_t *units, int64_t count, int64_t start) {
    uint64_t mask = ((uint64_t)1 << bits) - 1;
    for (int64_t i = 0; i < count; i++) {
        if (i + AHEAD < count) {
            int64_t next = units[i + AHEAD];
            if (is_near(next, size)) __builtin_prefetch(places + next, 1);
            else __builtin_prefetch(slots + (mixed(next, mixer) >> (64 - bits)), 1);
        }
        if (is_near(units[i], size)) {
            places[units[i]] = (int32_t)(start + i + 1);
            marks[units[i] >> 3] |= (uint8_t)(1 << (units[i] & 7));
            continue;
        }
        uint64_t h = mixed(units[i], mixer), at = h >> (64 - bits);
        while (slots[at]) at = (at + 1) & mask;
        slots[at] = (uint64_t)(uint32_t)h << 32 | (uint64_t)(start + i + 1);
        known[start + i] = units[i];
    }
}

int64_t units_far(const int64_t *units, int64_t count, int64_t size) {
    int64_t far = 0;
    for (int64_t i = 0; i < count; i++) far += !is_near(units[i], size);
    return far;
}

/* Over the rows that are not −1: how many; least and largest first, last, count, party. */
void units_spread(const int32_t *data, const int64_t *rows, int64_t count, int64_t *told) {
    int32_t low[4] = {INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX};
    int32_t high[4] = {INT32_MIN, INT32_MIN, INT32_MIN, INT32_MIN};
    int64_t known = 0;
    for (int64_t i = 0; i < count; i++) {
        if (i + AHEAD < count && rows[i + AHEAD] >= 0) __builtin_prefetch(data + 4 * rows[i + AHEAD]);
        if (rows[i] < 0) continue;
        known++;
        for (int f = 0; f < 4; f++) {
            int32_t own = data[4 * rows[i] + f];
            if (own < low[f]) low[f] = own;
            if (own > high[f]) high[f] = own;
        }
    }
    told[0] = known;
    for (int f = 0; f < 4; f++) told[1 + f] = low[f], told[5 + f] = high[f];
}

/* These rows took part in a step, once however often it is said, and are of this party now. */
void units_move(int32_t *data, const int64_t *rows, int64_t count, int32_t step, int32_t party) {
    for (int64_t i = 0; i < count; i++) {
        if (i + AHEAD < count) __builtin_prefetch(data + 4 * rows[i + AHEAD], 1);
        int32_t *own = data + 4 * rows[i];
        own[2] += own[1] != step;
        own[1] = step;
        own[3] = party;
    }
}

void units_fill(int32_t *data, int64_t start, int64_t end, const int32_t *record) {
    for (int64_t i = start; i < end; i++) memcpy(data + 4 * i, record, 4 * sizeof *data);
}
