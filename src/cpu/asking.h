/* asking.h: prefetches of what is read next, spread evenly over the work on what is read now.
 * In bursts they queue, and then memory waits for arithmetic and arithmetic for memory. */
#ifndef SACCADE_CPU_ASKING_H
#define SACCADE_CPU_ASKING_H

#include "cpu/cpu.h"
#include "cpu/vec.h"

/* Lines still to be asked for: of `rows` rows, `share` at each step. */
typedef struct asking {
    const char *at;
    int64_t stride;
    int32_t line, lines, rows, share;
} asking;

/* For dots: `keys` keys take, for each four of `rows`, as many squares as rows go into one,
 * each of `depth` steps. */
static inline asking asking_begin(const cpu_rows *ahead, int64_t j0, int32_t rows,
                                  int32_t depth, int32_t keys)
{
    const int32_t lines = ahead->dim * (int32_t)saccade_dtype_bytes(ahead->dtype) / 64;
    const int32_t steps = depth * (rows > 4 ? rows / 4 : 1) * (rows >= 4 ? 4 : rows);
    return (asking){ahead->base + j0 * ahead->stride, ahead->stride, 0, lines, 0,
                    (keys * lines + steps - 1) / steps};
}

static ALWAYS_INLINE void ask_some(asking *next)
{
    for (int32_t n = 0; n < next->share && next->rows > 0; n++) {
        __builtin_prefetch(next->at + next->line * 64, 0, 2);
        if (++next->line == next->lines) {
            next->line = 0;
            next->at += next->stride;
            next->rows--;
        }
    }
}

/* For sums: which pass over V asks on account of key j. Of two passes of four rows each takes
 * every other key; else the first takes all. */
static ALWAYS_INLINE int is_asking(int pass_rows, int32_t rows, int32_t i, int32_t j)
{
    if (pass_rows == 4 && rows == 8)
        return (i == 4) == (j & 1);
    return i == 0;
}

#endif
