/* panel_products.h: scores and values of the kernels on packed operands, for
 * block_f32_tmpl.c and block_bf16_tmpl.c. Both products are one outer-product micro-kernel: a
 * strip of rows times a panel of packed columns, all accumulators in registers, one broadcast
 * per row and step. Every sum runs over its index in order, whatever the strip or panel, so no
 * blocking by these changes a bit. A block of keys is summed by itself and added to O whole:
 * over thousands of keys f32 loses to O what a block has, not what a key has. panel_step.h has
 * one step. */
#ifndef SACCADE_CPU_KERNELS_PANEL_PRODUCTS_H
#define SACCADE_CPU_KERNELS_PANEL_PRODUCTS_H

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/panel_step.h"

#include <assert.h>

/* Most rows of a strip on any level. */
enum { MOST_STRIP = 12 };
static_assert((int)STRIP_ROWS <= (int)MOST_STRIP, "code for each strip");

/* Code for each number of rows: a strip of fewer takes as much less time. */
#define EACH_COUNT(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12)

/* acc[i][c] += sum over steps t of a[i * lda + t] . b[t][panel], of a panel's first vectors. */
static ALWAYS_INLINE void multiply(int rows, int vectors, const packed *a, int32_t lda,
                                   const packed *b, int32_t steps, vf acc[][PANEL_VECTORS])
{
    for (int32_t t = 0; t < steps; t++) {
        step_vector column[PANEL_VECTORS];
        for (int c = 0; c < vectors; c++)
            column[c] = load_step(b + ((int64_t)t * PANEL + c * VF) * STEP);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            const step_vector x = broadcast_step(&a[(int64_t)i * lda + STEP * t]);
#pragma GCC unroll 4
            for (int c = 0; c < vectors; c++)
                acc[i][c] = add_step(acc[i][c], x, column[c]);
        }
    }
}

/* ---- scores ---- */

static ALWAYS_INLINE void score_panel(int rows, int vectors, const packed *q, int32_t q_ld,
                                      const packed *k, int32_t D, float scale, float *s,
                                      int32_t s_ld)
{
    vf acc[MOST_STRIP][PANEL_VECTORS];
    for (int i = 0; i < rows; i++)
        for (int c = 0; c < vectors; c++)
            acc[i][c] = vf_set(0);
    multiply(rows, vectors, q, q_ld, k, (D + STEP - 1) / STEP, acc);
    for (int i = 0; i < rows; i++)
        for (int c = 0; c < vectors; c++)
            vf_store(s + (int64_t)i * s_ld + c * VF, vf_set(scale) * acc[i][c]);
}

typedef void score_fn(const packed *q, int32_t q_ld, const packed *k, int32_t D, float scale,
                      float *s, int32_t s_ld);

#define SCORE_ROWS(N)                                                                       \
    static NEVER_INLINE void score_##N(const packed *q, int32_t q_ld, const packed *k,      \
                                       int32_t D, float scale, float *s, int32_t s_ld)      \
    {                                                                                       \
        score_panel(N, PANEL_VECTORS, q, q_ld, k, D, scale, s, s_ld);                       \
    }                                                                                       \
    static NEVER_INLINE void score_half_##N(const packed *q, int32_t q_ld, const packed *k, \
                                            int32_t D, float scale, float *s, int32_t s_ld) \
    {                                                                                       \
        score_panel(N, (PANEL_VECTORS + 1) / 2, q, q_ld, k, D, scale, s, s_ld);             \
    }
EACH_COUNT(SCORE_ROWS)

/* By rows, of whole panels and of their first halves. */
#define WHOLE(N) [N] = score_##N,
#define HALF(N) [N] = score_half_##N,
static score_fn *const score_rows[2][MOST_STRIP + 1] = {{EACH_COUNT(WHOLE)},
                                                        {EACH_COUNT(HALF)}};
#undef WHOLE
#undef HALF

static CPU_SCORES(scores)
{
    const packed *queries = q, *panel = k;
    for (int32_t j = 0; j < n; j += PANEL) {
        score_fn *const *by_rows = score_rows[n - j <= PANEL / 2];
        for (int32_t i = 0; i < rows; i += STRIP_ROWS)
            by_rows[rows - i < STRIP_ROWS ? rows - i : STRIP_ROWS](
                queries + (int64_t)i * q_ld, q_ld, panel, D, scale, s + (int64_t)i * s_ld + j,
                s_ld);
        panel += (int64_t)((D + STEP - 1) / STEP) * PANEL * STEP;
    }
}

/* ---- values ---- */

static ALWAYS_INLINE void value_panel(int rows, const packed *p, int32_t p_ld, const packed *v,
                                      const cpu_stretch *of, int32_t n, const float *alpha,
                                      float *o, int32_t o_ld)
{
    vf acc[MOST_STRIP][PANEL_VECTORS];
    for (int i = 0; i < rows; i++)
        for (int c = 0; c < PANEL_VECTORS; c++)
            acc[i][c] = vf_set(0);
    for (const cpu_stretch *past = of + n; of < past; of++)
        multiply(rows, PANEL_VECTORS, p + of->at, p_ld, v + (int64_t)of->from * PANEL,
                 (of->past - of->from) / STEP, acc);
    for (int i = 0; i < rows; i++)
        for (int c = 0; c < PANEL_VECTORS; c++)
            vf_store(
                o + (int64_t)i * o_ld + c * VF,
                vf_fma(vf_set(alpha[i]), vf_load(o + (int64_t)i * o_ld + c * VF), acc[i][c]));
}

#define VALUE_ROWS(N)                                                                        \
    static NEVER_INLINE void value_##N(const packed *p, int32_t p_ld, const packed *v,       \
                                       const cpu_stretch *of, int32_t n, const float *alpha, \
                                       float *o, int32_t o_ld)                               \
    {                                                                                        \
        value_panel(N, p, p_ld, v, of, n, alpha, o, o_ld);                                   \
    }
EACH_COUNT(VALUE_ROWS)

static void value_rows(int32_t rows, const packed *p, int32_t p_ld, const packed *v,
                       const cpu_stretch *of, int32_t n, const float *alpha, float *o,
                       int32_t o_ld)
{
#define CASE(N)                                       \
    case N:                                           \
        value_##N(p, p_ld, v, of, n, alpha, o, o_ld); \
        break;
    switch (rows) {
        EACH_COUNT(CASE)
    default:
        break;
    }
#undef CASE
}

static CPU_VALUES_OF(values_of)
{
    const packed *weights = (const packed *)(const void *)p, *all = v;
    const int32_t ld = p_ld * (int32_t)(sizeof(float) / sizeof(packed));
    for (int32_t c = 0; c < n_panels; c++) {
        const packed *panel = all + (int64_t)c * block * PANEL;
        float *to = o + c * PANEL;
        for (int32_t i = 0; i < rows; i += STRIP_ROWS)
            value_rows(rows - i < STRIP_ROWS ? rows - i : STRIP_ROWS, weights + (int64_t)i * ld,
                       ld, panel, stretches, n_stretches, alpha + i, to + (int64_t)i * o_ld,
                       o_ld);
    }
}

static CPU_VALUES(values)
{
    const cpu_stretch all = {0, n, 0};
    values_of(p, p_ld, v, &all, 1, block, rows, n_panels, alpha, o, o_ld);
}

#endif
