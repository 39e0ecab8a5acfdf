/* Sorts unit ids; the twin is numpy's sort (release/unit_index.py). */

#include <stdint.h>
#include <string.h>

#define DIGIT 11
#define DIGITS 6

/* From the lowest digit to the highest; digits that all have in common are passed
   over. `aside` has room for as many. */
void units_sort(int64_t *units, int64_t *aside, int64_t count) {
    static const int64_t sign = INT64_MIN;
    int64_t often[DIGITS][1 << DIGIT];
    int64_t *from = units, *to = aside;
    memset(often, 0, sizeof often);
    for (int64_t i = 0; i < count; i++) {
        uint64_t key = (uint64_t)(units[i] ^ sign);
        for (int d = 0; d < DIGITS; d++) often[d][key >> (DIGIT * d) & ((1 << DIGIT) - 1)]++;
    }
    for (int d = 0; d < DIGITS && count; d++) {
        uint64_t first = (uint64_t)(from[0] ^ sign) >> (DIGIT * d) & ((1 << DIGIT) - 1);
        if (often[d][first] == count) continue;
        for (int64_t v = 0, sum = 0; v < 1 << DIGIT; v++) {
            int64_t own = often[d][v];
            often[d][v] = sum;
            sum += own;
        }
        for (int64_t i = 0; i < count; i++) {
            uint64_t key = (uint64_t)(from[i] ^ sign) >> (DIGIT * d) & ((1 << DIGIT) - 1);
            to[often[d][key]++] = from[i];
        }
        int64_t *swap = from;
        from = to;
        to = swap;
    }
    if (from != units) memcpy(units, from, count * sizeof *units);
}
