/* kv_store.h: keys and values of all layers of one sequence, and attention over them by
 * Saccade: one plan whose mask is causal() and whose offset is what the sequence had before. */
#ifndef GENERATE_KV_STORE_H
#define GENERATE_KV_STORE_H

#include "trouble.h"

#include <stdint.h>

typedef struct kv_store kv_store;

/* chunk: queries of a call, at most. */
int kv_store_make(int64_t layers, int64_t heads, int64_t kv_heads, int64_t dim, int64_t context,
                  int64_t chunk, int threads, kv_store **out, trouble *t);
void kv_store_free(kv_store *s);

/* Rows [n][heads + 2 kv_heads][dim]: queries, keys and values of n tokens from number `past`
 * on. Keeps keys and values, and writes out [n][heads][dim]. */
int kv_store_attend(kv_store *s, int64_t layer, const float *rows, int64_t past, int64_t n,
                    float *out, trouble *t);
double kv_store_seconds(const kv_store *s);
char *kv_store_explain(const kv_store *s, trouble *t);

#endif
