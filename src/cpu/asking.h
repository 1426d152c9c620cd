/* asking.h: prefetches of what is read next, spread evenly over the work on what is read now.
 * In bursts they queue, and then memory waits for arithmetic and arithmetic for memory. Four
 * parts of it are asked for side by side: the hardware's own prefetching runs ahead within a
 * page each, and has to find its stride anew in every page. */
#ifndef SACCADE_CPU_ASKING_H
#define SACCADE_CPU_ASKING_H

#include "cpu/cpu.h"

enum { LINE_BYTES = 64, STREAMS = 4, ONE_LINE = 1 << 16 };

/* Rows [j0, j0 + n); those past the end are asked for in vain. Rows without gaps are one. */
static inline cpu_asking asking_begin(const cpu_rows *rows, int64_t j0, int32_t n)
{
    const int64_t bytes = rows->dim * (int64_t)saccade_dtype_bytes(rows->dtype);
    const char *at = rows->base + j0 * rows->stride;
    const int32_t each = (int32_t)((bytes + LINE_BYTES - 1) / LINE_BYTES);
    const int32_t all = (int32_t)((n * bytes + LINE_BYTES - 1) / LINE_BYTES);
    const int32_t lines = (all + STREAMS - 1) / STREAMS, part = (n + STREAMS - 1) / STREAMS;
    const int32_t is_near = cpu_asks_near();
    if (rows->stride == bytes)
        return (cpu_asking){at, 0, (int64_t)lines * LINE_BYTES, 0, lines, 1, 0, is_near};
    return (cpu_asking){at, rows->stride, part * rows->stride, 0, each, part, 0, is_near};
}

/* What to ask for at each of so many steps, that the last line's turn comes at the last. */
static inline int32_t asking_share(const cpu_asking *next, int64_t steps)
{
    const int64_t left = (int64_t)next->rows * next->lines - next->line;
    return (int32_t)(left * ONE_LINE / steps);
}

/* Lines [line, line + n) of a row. A function that does nothing but prefetch counts as one
 * without effect, whose calls gcc may leave out: it must not know what is asked for. */
static inline void ask_row(const cpu_asking *next, int is_near, int32_t n)
{
    const char *at = next->at + (int64_t)next->line * LINE_BYTES;
    __asm__ volatile("" : "+r"(at));
    for (int32_t i = 0; i < n; i++, at += LINE_BYTES)
        for (int t = 0; t < STREAMS; t++)
            if (is_near)
                __builtin_prefetch(at + t * next->apart, 0, 3);
            else
                __builtin_prefetch(at + t * next->apart, 0, 2);
}

static inline void ask_next(cpu_asking *next, int32_t n)
{
    while (n > 0 && next->rows > 0) {
        const int32_t left = next->lines - next->line, now = n < left ? n : left;
        if (next->is_near)
            ask_row(next, 1, now);
        else
            ask_row(next, 0, now);
        n -= now;
        next->line += now;
        if (now == left) {
            next->line = 0;
            next->at += next->stride;
            next->rows--;
        }
    }
}

/* Whole lines whose turn has come. */
static inline int32_t asking_due(cpu_asking *next, int32_t share)
{
    const int32_t due = next->due + share;
    next->due = due % ONE_LINE;
    return due / ONE_LINE;
}

static inline void ask_lines(cpu_asking *next, int32_t share)
{
    ask_next(next, asking_due(next, share));
}

static inline void ask_rest(cpu_asking *next)
{
    ask_next(next, next->rows * next->lines);
}

#endif
