/* sampling.h: the next token from logits: by temperature, then the top k, then the fewest that
 * hold top p of the weight (arXiv 1904.09751), in this order. */
#ifndef GENERATE_SAMPLING_H
#define GENERATE_SAMPLING_H

#include <stdint.h>

typedef struct candidate {
    float logit;
    int32_t token;
} candidate;

typedef struct sampler {
    double temperature; /* 0: the largest logit, the first of equals */
    int64_t top_k;      /* 0: all */
    double top_p;       /* 1: all */
    uint64_t state;     /* begins as the seed */
} sampler;

/* room: n candidates. The same seed and logits give the same tokens. */
int32_t sample(sampler *s, const float *logits, int64_t n, candidate *room);

#endif
