/* Attention over quantised K and V against float64 over the same codes, within what plain
 * attention over them is off: every dtype and granularity, in one piece and in pages. */
#ifndef SACCADE_TESTS_QUANTISED_CASE_H
#define SACCADE_TESTS_QUANTISED_CASE_H

#include "saccade.h"

typedef struct granularity {
    int32_t tokens, channels;
    int is_shared; /* over batches and heads */
    saccade_dtype dtype;
} granularity;

typedef struct quantised_case {
    saccade_sizes sizes;
    saccade_dtype dtype, kv_dtype;
    granularity g;
    int gap; /* elements between rows */
    const char *mask;
    int32_t page; /* 0: in one piece */
} quantised_case;

enum { GRANULARITIES = 6 };
/* Every kv_dtype with every granularity, step by step, in f32, bf16 and f16 by turns, or in
 * `dtype` alone. backend "cpu": at every level. */
void quantised_cases(const char *backend, const saccade_sizes *sizes, saccade_dtype dtype,
                     const char *mask, int32_t page, int step);
void quantised_check(const char *backend, const quantised_case *c, uint64_t seed);

#endif
