/* places.h: pieces of one memory, one after the other. */
#ifndef SACCADE_BASE_PLACES_H
#define SACCADE_BASE_PLACES_H

#include <stddef.h>

/* Puts a piece, in whole lines of the cache of 64 bytes, at the end of those before it. */
static inline void place_lines(size_t bytes, size_t *off, size_t *end)
{
    *off = *end;
    *end += (bytes + 63) / 64 * 64;
}

#endif
