/* quantize.h: K and V in few bits. An element is its code times a scale that a group of
 * elements shares; codes are e4m3, e5m2, i8 and i4, scales f32 or f16. */
#ifndef SACCADE_BASE_QUANTIZE_H
#define SACCADE_BASE_QUANTIZE_H

#include "base/status.h"

#include <stdbool.h>
#include <stdint.h>

static inline bool quant_is_dtype(saccade_dtype dtype)
{
    return dtype == SACCADE_E4M3 || dtype == SACCADE_E5M2 || dtype == SACCADE_I8
           || dtype == SACCADE_I4;
}

/* Bytes of n neighbouring elements of any dtype, from the first of a row on. */
static inline int64_t quant_bytes(saccade_dtype dtype, int64_t n)
{
    if (dtype == SACCADE_I4)
        return (n + 1) / 2;
    return n * (int64_t)saccade_dtype_bytes(dtype);
}

/* The largest code, to which a group's largest magnitude is scaled: 448, 57344, 127, 7. */
float quant_largest(saccade_dtype dtype);
/* The scale of a group whose largest magnitude is `most`: 1 for 0, NaN for inf and NaN; rounded
 * to scale_dtype, f32 or f16. */
float quant_scale(saccade_dtype dtype, saccade_dtype scale_dtype, float most);
/* The largest magnitude among n elements that share a scale: fp8 leaves infinities and NaN out,
 * for integers they are the largest. */
float quant_most(saccade_dtype dtype, const float *from, int64_t n);
/* Codes of elements [first, first + n) of a row whose codes begin at `row`; nearest, and
 * saturating where a scale is too small. Infinities and NaN become NaN in fp8. */
void quant_encode(saccade_dtype dtype, const float *from, int64_t n, float scale, void *row,
                  int64_t first);
/* The values of codes, not yet scaled; exact. */
void quant_decode(saccade_dtype dtype, const void *row, int64_t first, int64_t n, float *to);

#endif
