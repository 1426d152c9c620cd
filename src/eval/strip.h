/* strip.h: between strip.c, which says what to do, and strip_tmpl.c, which does it, compiled
 * once per instruction-set level. */
#ifndef SACCADE_EVAL_STRIP_H
#define SACCADE_EVAL_STRIP_H

#include "eval/eval.h"
#include "eval/eval_ops.h"

/* One value per key of a strip; bools are ints 0 and 1, so that all lanes are equally wide.
 * Written as ints and as floats in turn. */
typedef int32_t __attribute__((may_alias)) strip_int;
typedef float __attribute__((may_alias)) strip_float;

/* Loops run over whole groups of lanes, past the end of a shorter strip: no remainders. What
 * they make of the lanes past the end is never looked at. */
enum { STRIP_GROUP = 16, STRIP_LANES = EVAL_STRIP };

/* Which operands are one value for all lanes (then they point to one). */
enum { STRIP_X_SAME = 1, STRIP_Y_SAME = 2, STRIP_Z_SAME = 4 };

/* out[i] = op(x[i], y[i], z[i]) for `groups` groups; out is no operand. */
typedef void strip_op(void *restrict out, const void *restrict x, const void *restrict y,
                      const void *restrict z, int groups, int same);
/* out[i] = element at data + i * stride, i < n. */
typedef void strip_read(void *out, const void *data, int64_t stride, int n);
/* out[i] = element at data + offsets[i], i < n. */
typedef void strip_gather(void *out, const void *data, const int64_t *offsets, int n);

typedef struct strip_table {
    strip_op *op[MOD_OP_COUNT];
    strip_read *read[SACCADE_F64 + 1];
    strip_gather *gather[SACCADE_F64 + 1];
    /* offsets[i] += clamp(index[i]) * stride; the first dimension has zeros there. */
    void (*add_offsets)(int64_t *offsets, const void *index, int64_t size, int64_t stride,
                        int n);
    void (*count)(void *out, int32_t first, int groups); /* first, first + 1, ... */
    void (*to_bytes)(uint8_t *out, const void *x, int n);
} strip_table;

extern const strip_table strip_table_portable, strip_table_avx2, strip_table_avx512;

#endif
