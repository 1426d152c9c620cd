/* asking.h: prefetches of what is read next, spread evenly over the work on what is read now.
 * In bursts they queue, and then memory waits for arithmetic and arithmetic for memory. */
#ifndef SACCADE_CPU_ASKING_H
#define SACCADE_CPU_ASKING_H

#include "cpu/cpu.h"

enum { LINE_BYTES = 64 };

/* Rows [j0, j0 + n); those past the end are asked for in vain. Rows without gaps are one. */
static inline cpu_asking asking_begin(const cpu_rows *rows, int64_t j0, int32_t n)
{
    const int64_t bytes = rows->dim * (int64_t)saccade_dtype_bytes(rows->dtype);
    const char *at = rows->base + j0 * rows->stride;
    if (rows->stride == bytes)
        return (cpu_asking){at, 0, 0, (int32_t)((n * bytes + LINE_BYTES - 1) / LINE_BYTES), 1};
    return (cpu_asking){at, rows->stride, 0,
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
    while (n > 0 && next->rows > 0) {
        const int32_t left = next->lines - next->line, now = n < left ? n : left;
        const char *at = next->at + (int64_t)next->line * LINE_BYTES;
        for (int32_t i = 0; i < now; i++)
            __builtin_prefetch(at + (int64_t)i * LINE_BYTES, 0, 2);
        n -= now;
        next->line += now;
        if (now == left) {
            next->line = 0;
            next->at += next->stride;
            next->rows--;
        }
    }
}

/* The same for few lines within a row: no stores, where `next` lies in registers. */
static inline void ask_few(cpu_asking *next, int32_t n)
{
    if (next->line + n >= next->lines) {
        ask_lines(next, n);
        return;
    }
    for (int32_t i = 0; i < n; i++, next->line++)
        __builtin_prefetch(next->at + (int64_t)next->line * LINE_BYTES, 0, 2);
}

static inline void ask_rest(cpu_asking *next)
{
    ask_lines(next, next->rows * next->lines);
}

#endif
