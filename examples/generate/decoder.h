/* decoder.h: a decoder of LLaMA's shape (RMSNorm, rotary positions, grouped heads, SwiGLU) over
 * weights of a GGUF file, all in f32: attention is Saccade's, the other products are a BLAS's.
 * One sequence, whose keys and values are kept. */
#ifndef GENERATE_DECODER_H
#define GENERATE_DECODER_H

#include "gguf.h"

typedef struct decoder_shape {
    int64_t layers, width, hidden, heads, kv_heads, head_dim, rope_dim, vocab, context;
    double rope_base, epsilon;
} decoder_shape;

typedef struct decoder decoder;

/* Told how many of the file's tensors are read. */
typedef void decoder_progress(int64_t done, int64_t all);

/* context: tokens that the sequence may have, 0: as many as the file says. The file may be
 * closed once a decoder is made. */
typedef struct decoder_options {
    int64_t context;
    int threads;
    const char *cache; /* what keys and values are kept in, see kv_store.h */
    int64_t group, page;
    decoder_progress *progress; /* NULL: nobody is told */
} decoder_options;

int decoder_make(const gguf *g, const decoder_options *options, decoder **out, trouble *t);
void decoder_free(decoder *d);
const decoder_shape *decoder_shape_of(const decoder *d);

enum { DECODER_CHUNK = 256 }; /* tokens of a call, at most */

/* Appends n tokens. logits: [vocab] after the last of them, or with `all` [n][vocab] after
 * each; NULL: not wanted. */
int decoder_run(decoder *d, const int32_t *tokens, int64_t n, int all, float *logits,
                trouble *t);
int64_t decoder_length(const decoder *d);
double decoder_attention_seconds(const decoder *d); /* of all calls so far */
const char *decoder_explain(decoder *d, trouble *t); /* Saccade's plan; free it */

#endif
