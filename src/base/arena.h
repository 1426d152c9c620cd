/* Bump arena: everything that dies together (a mod, a plan) is allocated here. */
#ifndef SACCADE_BASE_ARENA_H
#define SACCADE_BASE_ARENA_H

#include <stdbool.h>
#include <stddef.h>

typedef struct arena_chunk arena_chunk;

typedef struct arena {
    arena_chunk *head;  /* the chunk now filled; older ones follow */
    size_t taken_bytes; /* obtained from malloc so far */
    bool has_failed;    /* some request got NULL; tells "no" from "no memory" afterwards */
} arena;

/* makes an empty arena; takes no memory yet, so it can't fail. */
void arena_init(arena *a);

/* size zeroed bytes aligned to 16, or NULL; size 0 gives a valid pointer. Lives till free. */
void *arena_alloc(arena *a, size_t size);

/* count zeroed elements, or NULL, also when count * size overflows. */
void *arena_array(arena *a, size_t count, size_t size);

/* copies of memory and text, or NULL. strndup stops at n bytes or at the first 0. */
void *arena_memdup(arena *a, const void *bytes, size_t size);
char *arena_strdup(arena *a, const char *text);
char *arena_strndup(arena *a, const char *text, size_t n);

/* gives everything back and leaves an empty arena. */
void arena_free(arena *a);

#endif
