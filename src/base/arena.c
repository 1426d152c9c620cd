/* Bump arena over a list of malloc'ed chunks.
   Small requests share chunks that double up to 256 KiB, so a mod costs one malloc and a big
   one few; a request larger than that gets a chunk of its own. No single object is freed. */
#include "base/arena.h"

#include <stdalign.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum {
    ALIGN = 16,
    CHUNK_MIN = 4 * 1024,
    CHUNK_MAX = 256 * 1024,
};

struct arena_chunk {
    alignas(ALIGN) arena_chunk *older;
    size_t used;
    size_t size; /* bytes that follow this header */
};

static unsigned char *payload(arena_chunk *chunk)
{
    return (unsigned char *)chunk + sizeof *chunk;
}

static size_t next_size(const arena *a, size_t need)
{
    size_t size = a->head == NULL ? CHUNK_MIN : 2 * a->head->size;
    if (size > CHUNK_MAX)
        size = CHUNK_MAX;
    return size < need ? need : size;
}

static arena_chunk *grow(arena *a, size_t need)
{
    const size_t size = next_size(a, need);
    if (size > SIZE_MAX - sizeof(arena_chunk))
        return NULL;
    arena_chunk *chunk = calloc(1, sizeof *chunk + size);
    if (chunk == NULL)
        return NULL;
    chunk->size = size;
    chunk->older = a->head;
    a->head = chunk;
    a->taken_bytes += sizeof *chunk + size;
    return chunk;
}

void arena_init(arena *a)
{
    a->head = NULL;
    a->taken_bytes = 0;
    a->has_failed = false;
}

static void *fail(arena *a)
{
    a->has_failed = true;
    return NULL;
}

void *arena_alloc(arena *a, size_t size)
{
    if (size > SIZE_MAX - ALIGN)
        return fail(a);
    const size_t need = size == 0 ? ALIGN : (size + ALIGN - 1) / ALIGN * ALIGN;
    arena_chunk *chunk = a->head;
    if (chunk == NULL || chunk->size - chunk->used < need)
        chunk = grow(a, need);
    if (chunk == NULL)
        return fail(a);
    void *result = payload(chunk) + chunk->used;
    chunk->used += need;
    return result;
}

void *arena_array(arena *a, size_t count, size_t size)
{
    if (size != 0 && count > SIZE_MAX / size)
        return fail(a);
    return arena_alloc(a, count * size);
}

void *arena_memdup(arena *a, const void *bytes, size_t size)
{
    void *copy = arena_alloc(a, size);
    if (copy != NULL && size != 0)
        memcpy(copy, bytes, size);
    return copy;
}

char *arena_strdup(arena *a, const char *text)
{
    return arena_memdup(a, text, strlen(text) + 1);
}

char *arena_strndup(arena *a, const char *text, size_t n)
{
    const size_t length = strnlen(text, n);
    char *copy = length == SIZE_MAX ? NULL : arena_alloc(a, length + 1);
    if (copy != NULL)
        memcpy(copy, text, length);
    return copy;
}

void arena_free(arena *a)
{
    arena_chunk *chunk = a->head;
    while (chunk != NULL) {
        arena_chunk *older = chunk->older;
        free(chunk);
        chunk = older;
    }
    arena_init(a);
}
