/* prefetch.h: prefetches of what is read next, spread evenly over the work on what is read now.
 * Bursts of prefetches queue up: memory then waits for arithmetic and arithmetic for memory.
 * The hardware's own prefetcher runs ahead within each page of memory, where it has to find its
 * stride anew. Kernels on AMX gain by four parts of the next block that are prefetched side by
 * side, others by lines in the order in which they lie (lab 114). */
#ifndef SACCADE_CPU_KV_PREFETCH_H
#define SACCADE_CPU_KV_PREFETCH_H

#include "base/quantize.h"
#include "cpu/kv/kv_rows.h"

enum { LINE_BYTES = 64, MOST_PARTS = 4, ONE_LINE = 1 << 16 };

/* Lines of K or V that are read next, brought in while others are used: parts side by side,
 * 1 or MOST_PARTS of them, as every call says. */
typedef struct cpu_prefetch {
    const char *at[MOST_PARTS]; /* the next row of each part */
    int64_t stride;             /* bytes to the row after it */
    int32_t line, lines, rows;  /* the next of a row's lines; rows left, this one included */
    int32_t due;                /* parts of a line */
    int32_t is_near;            /* into the first-level cache, else the second */
    int32_t each, n_more;       /* rows of a part; how often as many parts follow these */
    const char *const *more;    /* where they begin */
} cpu_prefetch;

/* Which cache to prefetch into on this machine. */
int cpu_prefetches_near(void);

/* Rows that lie a multiple of SHARING bytes apart share a few sets of the first-level cache,
 * which has no room for them until they are used. What is converted as it is multiplied takes
 * longer from the second (lab 143). */
static inline int prefetches_near(const cpu_rows *rows, int is_dense)
{
    enum { SHARING = 2048 };
    const int is_converted = rows->dtype != SACCADE_F32 && rows->dtype != SACCADE_BF16;
    return cpu_prefetches_near() && (is_dense || is_converted || rows->stride % SHARING != 0);
}

/* Parts of n rows each, which begin where `at` says. Rows without gaps count as one. */
static inline cpu_prefetch prefetch_parts(const cpu_rows *rows, const char *const *at,
                                          int parts, int32_t n)
{
    const int64_t row = quant_bytes(rows->dtype, rows->dim);
    const int is_dense = rows->stride == row;
    const int64_t bytes = is_dense ? n * row : row;
    cpu_prefetch next = {.stride = rows->stride,
                         .lines = (int32_t)((bytes + LINE_BYTES - 1) / LINE_BYTES),
                         .rows = is_dense ? 1 : n,
                         .is_near = prefetches_near(rows, is_dense)};
    next.each = next.rows;
    for (int t = 0; t < parts; t++)
        next.at[t] = at[t];
    return next;
}

/* The first n rows; prefetching past the end of a tensor does no harm. */
static inline cpu_prefetch prefetch_begin(const cpu_rows *rows, int parts, int32_t n)
{
    const int32_t each = (n + parts - 1) / parts;
    const char *at[MOST_PARTS];
    for (int t = 0; t < parts; t++)
        at[t] = rows->base + t * each * rows->stride;
    return prefetch_parts(rows, at, parts, each);
}

/* n groups of KV_GROUP rows; they begin where `groups` says, which is kept and filled up. */
static inline cpu_prefetch prefetch_groups(const cpu_rows *rows, const char *groups[KV_GROUPS],
                                           int parts, int32_t n)
{
    while (n % parts)
        groups[n++] = groups[0];
    cpu_prefetch next = prefetch_parts(rows, groups, parts, KV_GROUP);
    next.more = groups + parts;
    next.n_more = n / parts - 1;
    return next;
}

/* Keys [j, j + n) of a view; nothing where they lie neither in one piece nor in groups, whose
 * places `groups` keeps. */
cpu_prefetch kv_prefetch(const kv_view *view, int64_t j, int32_t n, int parts,
                         const char *groups[KV_GROUPS]);

/* Lines of each part. */
static inline int64_t prefetch_left(const cpu_prefetch *next)
{
    return (next->rows + (int64_t)next->n_more * next->each) * next->lines - next->line;
}

/* What to prefetch at each of so many steps so that the last line comes at the last step. */
static inline int32_t prefetch_share(const cpu_prefetch *next, int64_t steps)
{
    return (int32_t)(prefetch_left(next) * ONE_LINE / steps);
}

/* Lines [line, line + n) of a row of each part. A function that does nothing but prefetch
 * counts as one without effect, whose calls gcc may leave out: it must not know the address. */
static inline void prefetch_row(const cpu_prefetch *next, int parts, int is_near, int32_t n)
{
    int64_t line = (int64_t)next->line * LINE_BYTES;
    __asm__ volatile("" : "+r"(line));
    for (int32_t i = 0; i < n; i++, line += LINE_BYTES)
        for (int t = 0; t < parts; t++)
            if (is_near)
                __builtin_prefetch(next->at[t] + line, 0, 3);
            else
                __builtin_prefetch(next->at[t] + line, 0, 2);
}

static inline void prefetch_next_row(cpu_prefetch *next, int parts)
{
    next->line = 0;
    next->rows--;
    for (int t = 0; t < parts; t++)
        next->at[t] += next->stride;
    if (next->rows > 0 || next->n_more == 0)
        return;
    for (int t = 0; t < parts; t++)
        next->at[t] = *next->more++;
    next->rows = next->each;
    next->n_more--;
}

static inline void prefetch_next(cpu_prefetch *next, int parts, int64_t n)
{
    while (n > 0 && next->rows > 0) {
        const int32_t left = next->lines - next->line, now = n < left ? (int32_t)n : left;
        if (next->is_near)
            prefetch_row(next, parts, 1, now);
        else
            prefetch_row(next, parts, 0, now);
        n -= now;
        next->line += now;
        if (now == left)
            prefetch_next_row(next, parts);
    }
}

/* Whole lines whose turn has come. */
static inline int32_t prefetch_due(cpu_prefetch *next, int32_t share)
{
    const int32_t due = next->due + share;
    next->due = due % ONE_LINE;
    return due / ONE_LINE;
}

static inline void prefetch_lines(cpu_prefetch *next, int parts, int32_t share)
{
    prefetch_next(next, parts, prefetch_due(next, share));
}

static inline void prefetch_rest(cpu_prefetch *next, int parts)
{
    prefetch_next(next, parts, prefetch_left(next));
}

#endif
