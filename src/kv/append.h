/* What saccade_append hands to those who write new keys, on the host and on a GPU, and where
 * each key goes. C and CUDA include this one file. */
#ifndef SACCADE_KV_APPEND_H
#define SACCADE_KV_APPEND_H

/* K or V. Strides count elements, `to`'s those of codes. */
typedef struct append_side {
    const void *from; /* [keys][heads][D] */
    void *to;         /* [pages][heads][page][D] */
    void *scale;      /* NULL: 1. [pages][heads][groups of rows][groups of channels] */
    long long from_n, from_h, to_b, to_h, to_n, scale_b, scale_h, scale_n, scale_d;
    int from_dtype, to_dtype, D; /* saccade_dtype */
    int tokens, channels;        /* that share a scale; 0: all */
    int is_made;                 /* scales are made of the key, not read */
    int scale_is_f16;
    int is_even; /* four elements are read and written at a time */
} append_side;

typedef struct kv_append {
    append_side side[2];
    int sides, heads;
    long long n, pages;
    int page;
    /* Either slots .. */
    const void *slots;
    long long slot_stride;
    int is_long; /* they have 64 bits */
    /* .. or places in sequences: entries of batch b row_stride apart, or from start[b] on;
     * NULL: entry 0 is b. length: keys of b once the new ones are there; with is_last_page
     * those of its last page. first: [B + 1] new keys of batches, NULL: as many each. */
    const int *table, *start, *length, *first;
    long long row_stride, length_stride;
    int columns, B, is_last_page;
} kv_append;

typedef struct append_place {
    long long page; /* -1: nowhere */
    int key;
} append_place;

/* The batch whose new keys key t is among, -1: none. Numbers that do not rise find some batch
 * or none. */
static inline int append_batch_of(const kv_append *a, long long t)
{
    int low = 0, high = a->B;
    if (!a->first)
        return (int)(t / (a->n / a->B));
    while (high - low > 1) {
        const int middle = low + (high - low) / 2;
        if (a->first[middle] <= t)
            low = middle;
        else
            high = middle;
    }
    return a->first[low] <= t && t < a->first[low + 1] ? low : -1;
}

/* Entries of a batch, none outside of the table. */
static inline int append_entries_of(const kv_append *a, int b, const int **entries)
{
    int begin, end;
    if (!a->start) {
        *entries = a->table + b * a->row_stride;
        return a->columns;
    }
    begin = a->start[b] < 0 ? 0 : a->start[b];
    end = a->start[b + 1] > a->columns ? a->columns : a->start[b + 1];
    *entries = a->table + begin;
    return end > begin ? end - begin : 0;
}

static inline append_place append_slot_of(const kv_append *a, long long t)
{
    append_place x = {-1, 0};
    const long long at = t * a->slot_stride;
    const long long slot =
        a->is_long ? ((const long long *)a->slots)[at] : ((const int *)a->slots)[at];
    if (slot >= 0 && slot / a->page < a->pages) {
        x.page = slot / a->page;
        x.key = (int)(slot % a->page);
    }
    return x;
}

/* Where new key t goes. */
static inline append_place append_place_of(const kv_append *a, long long t)
{
    append_place x = {-1, 0};
    const int *entries = 0;
    int b, count = 1;
    long long new_keys, at, entry;
    if (a->slots)
        return append_slot_of(a, t);
    b = append_batch_of(a, t);
    if (b < 0)
        return x;
    new_keys = a->first ? (long long)a->first[b + 1] - a->first[b] : a->n / a->B;
    at = t - (a->first ? a->first[b] : b * new_keys) - new_keys
         + a->length[b * a->length_stride];
    if (a->table)
        count = append_entries_of(a, b, &entries);
    if (a->is_last_page)
        at += (long long)(count - 1) * a->page;
    if (at < 0 || at / a->page >= count)
        return x;
    entry = a->table ? entries[at / a->page] : b;
    if (entry < 0 || entry >= a->pages)
        return x;
    x.page = entry;
    x.key = (int)(at % a->page);
    return x;
}

#endif
