/* layout.h: where pieces of memory lie. */
#ifndef SACCADE_CPU_SCHEDULE_LAYOUT_H
#define SACCADE_CPU_SCHEDULE_LAYOUT_H

#include "base/integers.h"

#include <stddef.h>

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
