/* asking.h: prefetches of what is read next, spread evenly over the work on what is read now.
 * In bursts they queue, and then memory waits for arithmetic and arithmetic for memory. */
#ifndef SACCADE_CPU_ASKING_H
#define SACCADE_CPU_ASKING_H

#include "cpu/cpu.h"

enum { LINE_BYTES = 64 };

/* Rows [j0, j0 + n); those past the end are asked for in vain. */
static inline cpu_asking asking_begin(const cpu_rows *rows, int64_t j0, int32_t n)
{
    const int64_t bytes = rows->dim * (int64_t)saccade_dtype_bytes(rows->dtype);
    return (cpu_asking){rows->base + j0 * rows->stride, rows->stride, 0,
                        (int32_t)((bytes + LINE_BYTES - 1) / LINE_BYTES), n};
}

/* Lines for each of so many steps, that all are asked for in the end. */
static inline int32_t asking_share(const cpu_asking *next, int64_t steps)
{
    const int64_t left = (int64_t)next->rows * next->lines - next->line;
    return (int32_t)((left + steps - 1) / steps);
}

static inline void ask_lines(cpu_asking *next, int32_t n)
{
    for (; n > 0 && next->rows > 0; n--) {
        __builtin_prefetch(next->at + (int64_t)next->line * LINE_BYTES, 0, 2);
        if (++next->line == next->lines) {
            next->line = 0;
            next->at += next->stride;
            next->rows--;
        }
    }
}

static inline void ask_rest(cpu_asking *next)
{
    ask_lines(next, next->rows * next->lines);
}

#endif
