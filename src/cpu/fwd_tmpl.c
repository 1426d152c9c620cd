/* Forward kernels in f32, compiled once per level.
 *
 * Both products are one outer-product micro-kernel: a strip of rows times a panel of packed
 * columns, all accumulators in registers, one broadcast per row and step. Every sum runs over
 * its index in order, whatever the strip or panel, so no blocking changes a bit of it.
 * Inputs of any dtype become f32 when packed. The caller bounds and masks; -INF is dead. */
#include "cpu/cpu.h"
#include "cpu/vec.h"

#include "base/convert.h"
#include "cpu/softmax_rows.h"

#if !defined(LEVEL_AMX)

enum { PANEL = VF * PANEL_VECTORS };

/* ---- products ---- */

/* acc[i][c] = start + sum over k < depth of a[i * lda + k] * b[k][panel]. */
static ALWAYS_INLINE void multiply(int rows, const float *a, int32_t lda, const float *b,
                                   int32_t depth, vf acc[][PANEL_VECTORS])
{
    for (int32_t k = 0; k < depth; k++) {
        vf column[PANEL_VECTORS];
        for (int c = 0; c < PANEL_VECTORS; c++)
            column[c] = vf_load(b + (int64_t)k * PANEL + c * VF);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            const vf x = vf_set(a[(int64_t)i * lda + k]);
#pragma GCC unroll 4
            for (int c = 0; c < PANEL_VECTORS; c++)
                acc[i][c] = vf_fma(x, column[c], acc[i][c]);
        }
    }
}

static ALWAYS_INLINE void score_panel(int rows, const float *q, int32_t q_ld, const float *k,
                                      int32_t D, float scale, float *s, int32_t s_ld)
{
    vf acc[STRIP_ROWS][PANEL_VECTORS];
    for (int i = 0; i < rows; i++)
        for (int c = 0; c < PANEL_VECTORS; c++)
            acc[i][c] = vf_set(0);
    multiply(rows, q, q_ld, k, D, acc);
    for (int i = 0; i < rows; i++)
        for (int c = 0; c < PANEL_VECTORS; c++)
            vf_store(s + (int64_t)i * s_ld + c * VF, vf_set(scale) * acc[i][c]);
}

static NEVER_INLINE void score_strip(const float *q, int32_t q_ld, const float *k, int32_t D,
                                     float scale, float *s, int32_t s_ld)
{
    score_panel(STRIP_ROWS, q, q_ld, k, D, scale, s, s_ld);
}

static NEVER_INLINE void score_rest(int32_t rows, const float *q, int32_t q_ld, const float *k,
                                    int32_t D, float scale, float *s, int32_t s_ld)
{
    int32_t i = 0;
    for (; i + 4 <= rows; i += 4)
        score_panel(4, q + (int64_t)i * q_ld, q_ld, k, D, scale, s + (int64_t)i * s_ld, s_ld);
    for (; i < rows; i++)
        score_panel(1, q + (int64_t)i * q_ld, q_ld, k, D, scale, s + (int64_t)i * s_ld, s_ld);
}

static CPU_SCORES(scores)
{
    const float *queries = q, *keys = k;
    for (int32_t p = 0; p < n_panels; p++) {
        const float *panel = keys + (int64_t)p * D * PANEL;
        float *to = s + p * PANEL;
        int32_t i = 0;
        for (; i + STRIP_ROWS <= rows; i += STRIP_ROWS)
            score_strip(queries + (int64_t)i * q_ld, q_ld, panel, D, scale,
                        to + (int64_t)i * s_ld, s_ld);
        score_rest(rows - i, queries + (int64_t)i * q_ld, q_ld, panel, D, scale,
                   to + (int64_t)i * s_ld, s_ld);
    }
}

static ALWAYS_INLINE void value_panel(int rows, const float *p, int32_t p_ld, const float *v,
                                      int32_t n, const float *alpha, float *o, int32_t o_ld)
{
    vf acc[STRIP_ROWS][PANEL_VECTORS];
    for (int i = 0; i < rows; i++)
        for (int c = 0; c < PANEL_VECTORS; c++)
            acc[i][c] = vf_set(alpha[i]) * vf_load(o + (int64_t)i * o_ld + c * VF);
    multiply(rows, p, p_ld, v, n, acc);
    for (int i = 0; i < rows; i++)
        for (int c = 0; c < PANEL_VECTORS; c++)
            vf_store(o + (int64_t)i * o_ld + c * VF, acc[i][c]);
}

static NEVER_INLINE void value_strip(const float *p, int32_t p_ld, const float *v, int32_t n,
                                     const float *alpha, float *o, int32_t o_ld)
{
    value_panel(STRIP_ROWS, p, p_ld, v, n, alpha, o, o_ld);
}

static NEVER_INLINE void value_rest(int32_t rows, const float *p, int32_t p_ld, const float *v,
                                    int32_t n, const float *alpha, float *o, int32_t o_ld)
{
    int32_t i = 0;
    for (; i + 4 <= rows; i += 4)
        value_panel(4, p + (int64_t)i * p_ld, p_ld, v, n, alpha + i, o + (int64_t)i * o_ld,
                    o_ld);
    for (; i < rows; i++)
        value_panel(1, p + (int64_t)i * p_ld, p_ld, v, n, alpha + i, o + (int64_t)i * o_ld,
                    o_ld);
}

static CPU_VALUES(values)
{
    const float *weights = p, *all = v;
    const int32_t ld = p_ld;
    for (int32_t c = 0; c < n_panels; c++) {
        const float *panel = all + (int64_t)c * block * PANEL;
        float *to = o + c * PANEL;
        int32_t i = 0;
        for (; i + STRIP_ROWS <= rows; i += STRIP_ROWS)
            value_strip(weights + (int64_t)i * ld, ld, panel, n, alpha + i,
                        to + (int64_t)i * o_ld, o_ld);
        value_rest(rows - i, weights + (int64_t)i * ld, ld, panel, n, alpha + i,
                   to + (int64_t)i * o_ld, o_ld);
    }
}

/* ---- online softmax ---- */

ROW_EXP(row_exp, float, vf_store)
SOFTMAX(softmax, row_exp)

/* ---- packing ---- */

static ALWAYS_INLINE vf widen(const cpu_rows *from, const char *row, int32_t d)
{
    if (from->dtype == SACCADE_F32)
        return vf_load((const float *)(const void *)row + d);
    if (from->dtype == SACCADE_BF16)
        return vf_from_bf16((const uint16_t *)(const void *)row + d);
    return vf_from_f16((const uint16_t *)(const void *)row + d);
}

/* Elements [d, d + VF) of row j, 0 past the row's end; never reads past it. */
static ALWAYS_INLINE vf load_part(const cpu_rows *from, int64_t j, int32_t d)
{
    const char *row = from->base + j * from->stride;
    float part[VF] = {0};
    if (d + VF <= from->dim)
        return widen(from, row, d);
    if (d < from->dim)
        convert_to_f32(from->dtype, row + d * (int64_t)saccade_dtype_bytes(from->dtype), part,
                       from->dim - d);
    return vf_load(part);
}

/* Asks for an element that is packed soon; rows past the end are asked for in vain. */
static ALWAYS_INLINE void ask_row(const cpu_rows *from, int64_t j, int32_t d)
{
    const int32_t each = from->dtype == SACCADE_F32 ? 4 : 2;
    __builtin_prefetch(from->base + j * from->stride + (int64_t)d * each, 0, 3);
}

static CPU_PACK_ROWS(pack_rows)
{
    float *out = to;
    for (int32_t i = 0; i < padded; i++)
        for (int32_t d = 0; d < ld; d += VF)
            vf_store(out + (int64_t)i * ld + d, i < n ? load_part(from, j0 + i, d) : vf_set(0));
}

/* Squares of VF keys x VF dims are transposed in registers. */
static CPU_PACK_KEYS(pack_keys)
{
    const int32_t D = from->dim;
    float *out = to;
    for (int32_t j = 0; j < padded; j += VF) {
        float *panel = out + (int64_t)(j / PANEL) * PANEL * D + j % PANEL;
        for (int32_t d = 0; d < D; d += VF) {
            vf square[VF];
            for (int t = 0; t < VF; t++) {
                square[t] = j + t < n ? load_part(from, j0 + j + t, d) : vf_set(0);
                ask_row(from, j0 + j + t + VF, d);
            }
            vf_transpose(square);
            for (int t = 0; t < VF && d + t < D; t++)
                vf_store(panel + (int64_t)(d + t) * PANEL, square[t]);
        }
    }
}

static CPU_PACK_VALUES(pack_values)
{
    float *out = to;
    int wild = 0;
    for (int32_t d = 0; d < from->dim; d += PANEL, out += (int64_t)padded * PANEL)
        for (int32_t j = 0; j < padded; j++)
            for (int c = 0; c < PANEL_VECTORS; c++) {
                const vf x = j < n ? load_part(from, j0 + j, d + c * VF) : vf_set(0);
                ask_row(from, j0 + j + VF, d + c * VF);
                wild |= vf_any_wild(x);
                vf_store(out + (int64_t)j * PANEL + c * VF, x);
            }
    return wild;
}

const cpu_kernels LEVEL_NAME(cpu_f32) = {
    .name = "f32",
    .strip = STRIP_ROWS,
    .panel = PANEL,
    .element = 4,
    .depth = 1,
    .is_fused = HAS_FMA,
    .scores = scores,
    .softmax = softmax,
    .values = values,
    .pack_rows = pack_rows,
    .pack_keys = pack_keys,
    .pack_values = pack_values,
    .direct_rows = 32,
    .dots = LEVEL_NAME(cpu_dots),
    .sums = LEVEL_NAME(cpu_sums),
    .store_rows = LEVEL_NAME(cpu_store_rows),
};

#endif
