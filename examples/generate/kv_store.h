/* kv_store.h: keys and values of all layers of one sequence, and attention over them by
 * Saccade: one plan whose mask is causal() and whose offset is what the sequence had before. */
#ifndef GENERATE_KV_STORE_H
#define GENERATE_KV_STORE_H

#include "trouble.h"

#include <stdint.h>

typedef struct kv_store kv_store;

/* What to keep: `type` is "f32", "e4m3", "e5m2", "i8" or "i4"; the last four with one scale for
 * each token, head and `group` of channels (0: all of them). page: 0 for one piece, else tokens
 * of a page of saccade_kv. */
typedef struct kv_store_form {
    int64_t layers, heads, kv_heads, dim, context;
    const char *type;
    int64_t group, page;
} kv_store_form;

/* chunk: queries of a call, at most. */
int kv_store_make(const kv_store_form *form, int64_t chunk, int threads, kv_store **out,
                  trouble *t);
void kv_store_free(kv_store *s);

/* Rows [n][heads + 2 kv_heads][dim]: queries, keys and values of n tokens from number `past`
 * on. Keeps keys and values, and writes out [n][heads][dim]. Layer 0 comes first. */
int kv_store_attend(kv_store *s, int64_t layer, const float *rows, int64_t past, int64_t n,
                    float *out, trouble *t);
double kv_store_seconds(const kv_store *s);
char *kv_store_explain(const kv_store *s, trouble *t);

#endif
