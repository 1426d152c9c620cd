/* prefetch.h: prefetches of what is read next, spread evenly over the work on what is read now.
 * Bursts of prefetches queue up: memory then waits for arithmetic and arithmetic for memory.
 * Four parts of the next block are prefetched side by side: the hardware's own prefetcher runs
 * ahead within one page for each, and has to find its stride anew in every page. */
#ifndef SACCADE_CPU_KV_PREFETCH_H
#define SACCADE_CPU_KV_PREFETCH_H

#include "base/quantize.h"
#include "cpu/kv/kv_rows.h"

/* Lines of K or V that are read next, brought in while others are used. */
typedef struct cpu_prefetch {
    const char *at;
    int64_t stride, apart;     /* bytes to the next row, and to the next of the four parts */
    int32_t line, lines, rows; /* the next of a row's lines; rows left, this one included */
    int32_t due;               /* parts of a line */
    int32_t is_near;           /* into the first-level cache, else the second */
} cpu_prefetch;

/* Which cache to prefetch into on this machine. */
int cpu_prefetches_near(void);

enum { LINE_BYTES = 64, STREAMS = 4, ONE_LINE = 1 << 16 };

/* The first n rows; prefetching past the end of a tensor does no harm. Rows without gaps count
 * as one. */
static inline cpu_prefetch prefetch_begin(const cpu_rows *rows, int32_t n)
{
    const int64_t bytes = quant_bytes(rows->dtype, rows->dim);
    const char *at = rows->base;
    const int32_t each = (int32_t)((bytes + LINE_BYTES - 1) / LINE_BYTES);
    const int32_t all = (int32_t)((n * bytes + LINE_BYTES - 1) / LINE_BYTES);
    const int32_t lines = (all + STREAMS - 1) / STREAMS, part = (n + STREAMS - 1) / STREAMS;
    const int32_t is_near = cpu_prefetches_near();
    if (rows->stride == bytes)
        return (cpu_prefetch){at, 0, (int64_t)lines * LINE_BYTES, 0, lines, 1, 0, is_near};
    return (cpu_prefetch){at, rows->stride, part * rows->stride, 0, each, part, 0, is_near};
}

/* Keys [j, j + n) of a view; nothing where they do not lie in one piece. */
cpu_prefetch kv_prefetch(const kv_view *view, int64_t j, int32_t n);

/* What to prefetch at each of so many steps so that the last line comes at the last step. */
static inline int32_t prefetch_share(const cpu_prefetch *next, int64_t steps)
{
    const int64_t left = (int64_t)next->rows * next->lines - next->line;
    return (int32_t)(left * ONE_LINE / steps);
}

/* Lines [line, line + n) of a row. A function that does nothing but prefetch counts as one
 * without effect, whose calls gcc may leave out: it must not know the address. */
static inline void prefetch_row(const cpu_prefetch *next, int is_near, int32_t n)
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

static inline void prefetch_next(cpu_prefetch *next, int32_t n)
{
    while (n > 0 && next->rows > 0) {
        const int32_t left = next->lines - next->line, now = n < left ? n : left;
        if (next->is_near)
            prefetch_row(next, 1, now);
        else
            prefetch_row(next, 0, now);
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
static inline int32_t prefetch_due(cpu_prefetch *next, int32_t share)
{
    const int32_t due = next->due + share;
    next->due = due % ONE_LINE;
    return due / ONE_LINE;
}

static inline void prefetch_lines(cpu_prefetch *next, int32_t share)
{
    prefetch_next(next, prefetch_due(next, share));
}

static inline void prefetch_rest(cpu_prefetch *next)
{
    prefetch_next(next, next->rows * next->lines);
}

#endif
