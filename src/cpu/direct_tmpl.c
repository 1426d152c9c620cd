/* Products of a few rows (decode) straight from K and V, in f32, compiled once per level.
 *
 * Here memory is the limit, not arithmetic: rows are read once, in their order, and while K is
 * used V is asked for, and the next K while V is used (Flash-Decoding's loop with the loads of
 * the other operand in its shadow). Sums run over dims, then lanes, always alike. */
#include "cpu/cpu.h"
#include "cpu/asking.h"
#include "cpu/vec.h"

#include "base/convert.h"

#include <string.h>

#if !defined(LEVEL_AMX)

enum { ACCUMULATORS = VF == 16 ? 16 : 8 };

static ALWAYS_INLINE vf widen(saccade_dtype dtype, const char *row, int32_t d)
{
    if (dtype == SACCADE_F32)
        return vf_load((const float *)(const void *)row + d);
    if (dtype == SACCADE_BF16)
        return vf_from_bf16((const uint16_t *)(const void *)row + d);
    return vf_from_f16((const uint16_t *)(const void *)row + d);
}

/* Asks for the line of element d of row j, once per line; past the end it is in vain. */
static ALWAYS_INLINE void ask(saccade_dtype dtype, const cpu_rows *from, int64_t j, int32_t d)
{
    const int32_t each = dtype == SACCADE_F32 ? 4 : 2;
    if (d * each % 64 == 0)
        __builtin_prefetch(from->base + j * from->stride + d * each, 0, 2);
}

/* ---- scores ---- */

/* `rows` rows against VF / rows keys: one vector of scores, [rows][keys]. */
static ALWAYS_INLINE vf dot_square(int rows, saccade_dtype dtype, const float *q, int32_t q_ld,
                                   const char *const *keys, int32_t D, asking *next)
{
    vf acc[VF];
    const int n_keys = VF / rows;
    for (int t = 0; t < VF; t++)
        acc[t] = vf_set(0);
    for (int32_t d = 0; d < D; d += VF) {
        ask_some(next);
#pragma GCC unroll 16
        for (int j = 0; j < n_keys; j++) {
            const vf k = widen(dtype, keys[j], d);
#pragma GCC unroll 4
            for (int i = 0; i < rows; i++)
                acc[i * n_keys + j] =
                    vf_fma(k, vf_load(q + (int64_t)i * q_ld + d), acc[i * n_keys + j]);
        }
    }
    return vf_sum_each(acc);
}

static ALWAYS_INLINE void dot_rows(int rows, saccade_dtype dtype, const float *q, int32_t q_ld,
                                   const cpu_rows *k, int64_t j0, int32_t n, float scale,
                                   float *s, int32_t s_ld, asking *next)
{
    const int n_keys = VF / rows;
    for (int32_t j = 0; j < n; j += n_keys) {
        const char *keys[VF];
        float square[VF];
        for (int t = 0; t < n_keys; t++)
            keys[t] = k->base + (j0 + (j + t < n ? j + t : n - 1)) * k->stride;
        vf_store(square, vf_set(scale) * dot_square(rows, dtype, q, q_ld, keys, k->dim,
                                                     next));
        for (int i = 0; i < rows; i++)
            memcpy(s + (int64_t)i * s_ld + j, square + i * n_keys,
                   (size_t)n_keys * sizeof *s);
    }
}

/* Groups of keys small enough to stay in L1 while all rows take them. */
enum { KEY_GROUP = 16 };

static ALWAYS_INLINE void dots_of(saccade_dtype dtype, const float *q, int32_t q_ld,
                                  const cpu_rows *k, int64_t j0, int32_t n, int32_t rows,
                                  float scale, float *s, int32_t s_ld, const cpu_rows *ahead,
                                  int64_t ahead_j0)
{
    asking next = asking_begin(ahead, ahead_j0, rows, k->dim / VF, KEY_GROUP * VF / 16);
    for (int32_t j = 0; j < n; j += KEY_GROUP) {
        const int32_t m = n - j < KEY_GROUP ? n - j : KEY_GROUP;
        int32_t i = 0;
        next.rows += m;
        for (; i + 4 <= rows; i += 4)
            dot_rows(4, dtype, q + (int64_t)i * q_ld, q_ld, k, j0 + j, m, scale,
                     s + (int64_t)i * s_ld + j, s_ld, &next);
        for (; i + 2 <= rows; i += 2)
            dot_rows(2, dtype, q + (int64_t)i * q_ld, q_ld, k, j0 + j, m, scale,
                     s + (int64_t)i * s_ld + j, s_ld, &next);
        for (; i < rows; i++)
            dot_rows(1, dtype, q + (int64_t)i * q_ld, q_ld, k, j0 + j, m, scale,
                     s + (int64_t)i * s_ld + j, s_ld, &next);
    }
}

CPU_DOTS(LEVEL_NAME(cpu_dots))
{
    if (k->dtype == SACCADE_F32)
        dots_of(SACCADE_F32, q, q_ld, k, j0, n, rows, scale, s, s_ld, ahead, ahead_j0);
    else if (k->dtype == SACCADE_BF16)
        dots_of(SACCADE_BF16, q, q_ld, k, j0, n, rows, scale, s, s_ld, ahead, ahead_j0);
    else
        dots_of(SACCADE_F16, q, q_ld, k, j0, n, rows, scale, s, s_ld, ahead, ahead_j0);
}

/* ---- values ---- */

typedef struct sums_job {
    const float *p, *alpha;
    float *o;
    int32_t p_ld, o_ld, n, rows;
    const cpu_rows *v, *ahead;
    int64_t j0, ahead_j0;
} sums_job;

/* Rows [i, i + rows), columns [d, d + columns * VF). The first rows of a chunk look for wild
 * values, before anything of the chunk is stored, and ask for what is read next. */
static ALWAYS_INLINE int sum_chunk(int rows, int columns, int is_first, saccade_dtype dtype,
                                   const sums_job *job, int32_t i, int32_t d)
{
    vf acc[ACCUMULATORS];
    const float *p = job->p + (int64_t)i * job->p_ld;
    float *o = job->o + (int64_t)i * job->o_ld + d;
    vf noted = vf_set(0);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++)
            acc[r * columns + c] =
                vf_set(job->alpha[i + r]) * vf_load(o + (int64_t)r * job->o_ld + c * VF);
    for (int32_t j = 0; j < job->n; j++) {
        const char *row = job->v->base + (job->j0 + j) * job->v->stride;
#pragma GCC unroll 16
        for (int c = 0; c < columns; c++) {
            const vf x = widen(dtype, row, d + c * VF);
            if (is_first)
                noted = vf_note_wild(noted, x);
            if (is_asking(rows, job->rows, i, j))
                ask(dtype, job->ahead, job->ahead_j0 + j, d + c * VF);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
                acc[r * columns + c] =
                    vf_fma(vf_set(p[(int64_t)r * job->p_ld + j]), x, acc[r * columns + c]);
        }
    }
    if (is_first && vf_any_wild(noted))
        return 1;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++)
            vf_store(o + (int64_t)r * job->o_ld + c * VF, acc[r * columns + c]);
    return 0;
}

static ALWAYS_INLINE int sum_rows(int columns, saccade_dtype dtype, const sums_job *job,
                                  int32_t rows, int32_t d)
{
    const int most = ACCUMULATORS / columns;
    int32_t i = most >= 4 && rows >= 4 ? 4 : most >= 2 && rows >= 2 ? 2 : 1;
    if (i == 4 ? sum_chunk(4, columns, 1, dtype, job, 0, d)
        : i == 2 ? sum_chunk(2, columns, 1, dtype, job, 0, d)
                 : sum_chunk(1, columns, 1, dtype, job, 0, d))
        return 1;
    for (; most >= 4 && i + 4 <= rows; i += 4)
        sum_chunk(4, columns, 0, dtype, job, i, d);
    for (; most >= 2 && i + 2 <= rows; i += 2)
        sum_chunk(2, columns, 0, dtype, job, i, d);
    for (; i < rows; i++)
        sum_chunk(1, columns, 0, dtype, job, i, d);
    return 0;
}

/* Columns in the widest chunks whose accumulators fit; all of a chunk is done or none. */
static ALWAYS_INLINE int32_t sums_of(saccade_dtype dtype, const sums_job *job, int32_t rows)
{
    const int32_t E = job->v->dim, most = ACCUMULATORS / (rows >= 4 ? 4 : rows >= 2 ? 2 : 1);
    int32_t d = 0, wild = 0;
    for (; d + 8 * VF <= E && most >= 8 && !wild; d += wild ? 0 : 8 * VF)
        wild = sum_rows(8, dtype, job, rows, d);
    for (; d + 4 * VF <= E && most >= 4 && !wild; d += wild ? 0 : 4 * VF)
        wild = sum_rows(4, dtype, job, rows, d);
    for (; d < E && !wild; d += wild ? 0 : 2 * VF)
        wild = sum_rows(2, dtype, job, rows, d);
    return d;
}

CPU_SUMS(LEVEL_NAME(cpu_sums))
{
    const sums_job job = {p, alpha, o, p_ld, o_ld, n, rows, v, ahead, j0, ahead_j0};
    if (v->dtype == SACCADE_F32)
        return sums_of(SACCADE_F32, &job, rows);
    if (v->dtype == SACCADE_BF16)
        return sums_of(SACCADE_BF16, &job, rows);
    return sums_of(SACCADE_F16, &job, rows);
}

#endif
