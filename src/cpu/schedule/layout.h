/* layout.h: integers that sizes are made of, and where pieces of memory lie. */
#ifndef SACCADE_CPU_SCHEDULE_LAYOUT_H
#define SACCADE_CPU_SCHEDULE_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

static inline int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

static inline int64_t round_up(int64_t a, int64_t b)
{
    return ceil_div(a, b) * b;
}

static inline int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Bytes of `count` elements, up to whole lines of the cache. */
static inline size_t bytes64(int64_t count, size_t each)
{
    return (size_t)round_up(count * (int64_t)each, 64);
}

/* Puts a piece of memory at the end of those before it. */
static inline void place(size_t bytes, size_t *off, size_t *end)
{
    *off = *end;
    *end += bytes;
}

#endif
