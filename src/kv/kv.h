/* kv.h: what a cache of pages holds. Pages are counted by the entries that name them; those of
 * none lie on a stack. */
#ifndef SACCADE_KV_KV_H
#define SACCADE_KV_KV_H

#include "saccade_kv.h"

#include "kv/append.h"

typedef struct kv_sequence {
    int64_t length;  /* keys; -1: none such */
    int64_t dropped; /* leading pages that are absent */
} kv_sequence;

/* What the last grow gave a sequence: keys [first, first + count). */
typedef struct kv_growth {
    int32_t sequence;
    int64_t first, count;
} kv_growth;

typedef struct kv_copy {
    int32_t from, to;
} kv_copy;

struct saccade_kv {
    int64_t pages, page, sequences, columns;
    int64_t most_keys; /* of a sequence */
    int64_t n_free, n_growths, n_copies;
    kv_sequence *sequence; /* [sequences] */
    kv_growth *growth;     /* [sequences] */
    kv_copy *copy;         /* [sequences] */
    int32_t *users;        /* [pages] entries that name it */
    int32_t *free_page;    /* [pages] a stack */
    int32_t *table;        /* [sequences][columns] */
    int32_t *left;         /* [sequences] pages that the grow under way leaves */
    unsigned char *marked; /* [sequences] named by it */
};

/* Pages that hold so many keys. */
static inline int64_t kv_pages_of(const saccade_kv *cache, int64_t keys)
{
    return (keys + cache->page - 1) / cache->page;
}

static inline int32_t *kv_row(const saccade_kv *cache, int32_t sequence)
{
    return cache->table + sequence * cache->columns;
}

/* ---- kv_append.c ---- */

/* Writes new keys on the host; everything is checked, but for where keys go. */
void kv_append_keys(const kv_append *a, int threads);

#endif
