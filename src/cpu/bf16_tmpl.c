/* Forward kernels on packed bf16 with AVX512-BF16 dot products: two products and an f32 sum per
 * lane and step. Worth it where vdpbf16ps runs as often as an FMA (Zen 5: 516 against 256
 * GFLOP/s a core); where it runs at half that rate fwd_tmpl.c is as good. Same shapes and order
 * as there, with pairs of neighbours (dims of Q and K, keys of P and V) in place of elements.
 * Compiled with the flags of the AMX level, the only one that has this extension. */
#include "cpu/cpu.h"
#include "cpu/softmax_rows.h"
#include "cpu/vec.h"

#include <string.h>

#if defined(LEVEL_AMX)

enum { PANEL = VF * PANEL_VECTORS };

typedef uint16_t bf16;

/* ---- products ---- */

static ALWAYS_INLINE vf dot(vf acc, __m512i a, __m512i b)
{
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
}

static ALWAYS_INLINE __m512i pair(const bf16 *p)
{
    int32_t bits;
    memcpy(&bits, p, sizeof bits);
    return _mm512_set1_epi32(bits);
}

/* acc[i][c] += sum over pairs t of a[i * lda + 2t] . b[t][panel]. */
static ALWAYS_INLINE void multiply(int rows, const bf16 *a, int32_t lda, const bf16 *b,
                                   int32_t pairs, vf acc[][PANEL_VECTORS])
{
    for (int32_t t = 0; t < pairs; t++) {
        __m512i column[PANEL_VECTORS];
        for (int c = 0; c < PANEL_VECTORS; c++)
            column[c] = _mm512_loadu_si512(b + ((int64_t)t * PANEL + c * VF) * 2);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            const __m512i x = pair(a + (int64_t)i * lda + 2 * t);
#pragma GCC unroll 4
            for (int c = 0; c < PANEL_VECTORS; c++)
                acc[i][c] = dot(acc[i][c], x, column[c]);
        }
    }
}

static ALWAYS_INLINE void score_panel(int rows, const bf16 *q, int32_t q_ld, const bf16 *k,
                                      int32_t D, float scale, float *s, int32_t s_ld)
{
    vf acc[STRIP_ROWS][PANEL_VECTORS];
    for (int i = 0; i < rows; i++)
        for (int c = 0; c < PANEL_VECTORS; c++)
            acc[i][c] = vf_set(0);
    multiply(rows, q, q_ld, k, (D + 1) / 2, acc);
    for (int i = 0; i < rows; i++)
        for (int c = 0; c < PANEL_VECTORS; c++)
            vf_store(s + (int64_t)i * s_ld + c * VF, vf_set(scale) * acc[i][c]);
}

static NEVER_INLINE void score_strip(const bf16 *q, int32_t q_ld, const bf16 *k, int32_t D,
                                     float scale, float *s, int32_t s_ld)
{
    score_panel(STRIP_ROWS, q, q_ld, k, D, scale, s, s_ld);
}

static NEVER_INLINE void score_rest(int32_t rows, const bf16 *q, int32_t q_ld, const bf16 *k,
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
    const bf16 *queries = q, *keys = k;
    for (int32_t p = 0; p < n_panels; p++) {
        const bf16 *panel = keys + (int64_t)p * ((D + 1) / 2) * PANEL * 2;
        float *to = s + p * PANEL;
        int32_t i = 0;
        for (; i + STRIP_ROWS <= rows; i += STRIP_ROWS)
            score_strip(queries + (int64_t)i * q_ld, q_ld, panel, D, scale,
                        to + (int64_t)i * s_ld, s_ld);
        score_rest(rows - i, queries + (int64_t)i * q_ld, q_ld, panel, D, scale,
                   to + (int64_t)i * s_ld, s_ld);
    }
}

static ALWAYS_INLINE void value_panel(int rows, const bf16 *p, int32_t p_ld, const bf16 *v,
                                      int32_t n, const float *alpha, float *o, int32_t o_ld)
{
    vf acc[STRIP_ROWS][PANEL_VECTORS];
    for (int i = 0; i < rows; i++)
        for (int c = 0; c < PANEL_VECTORS; c++)
            acc[i][c] = vf_set(alpha[i]) * vf_load(o + (int64_t)i * o_ld + c * VF);
    multiply(rows, p, p_ld, v, n / 2, acc);
    for (int i = 0; i < rows; i++)
        for (int c = 0; c < PANEL_VECTORS; c++)
            vf_store(o + (int64_t)i * o_ld + c * VF, acc[i][c]);
}

static NEVER_INLINE void value_strip(const bf16 *p, int32_t p_ld, const bf16 *v, int32_t n,
                                     const float *alpha, float *o, int32_t o_ld)
{
    value_panel(STRIP_ROWS, p, p_ld, v, n, alpha, o, o_ld);
}

static NEVER_INLINE void value_rest(int32_t rows, const bf16 *p, int32_t p_ld, const bf16 *v,
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
    const bf16 *weights = (const bf16 *)(const void *)p, *all = v;
    const int32_t ld = 2 * p_ld;
    for (int32_t c = 0; c < n_panels; c++) {
        const bf16 *panel = all + (int64_t)c * block * PANEL;
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

static ALWAYS_INLINE void store_p(bf16 *p, vf x)
{
    _mm256_storeu_si256((__m256i *)(void *)p, (__m256i)_mm512_cvtneps_pbh(x));
}

ROW_EXP(row_exp, bf16, store_p)
SOFTMAX(softmax, row_exp)

/* ---- packing ---- */

/* Elements [d, d + 32) of row j, 0 past the row's end; never reads past it. */
static ALWAYS_INLINE __m512i load_part(const cpu_rows *from, int64_t j, int32_t d)
{
    const bf16 *row = (const bf16 *)(const void *)(from->base + j * from->stride);
    const int32_t left = from->dim - d;
    if (left >= 32)
        return _mm512_loadu_si512(row + d);
    if (left <= 0)
        return _mm512_setzero_si512();
    return _mm512_maskz_loadu_epi16(((__mmask32)1 << left) - 1, row + d);
}

static CPU_PACK_ROWS(pack_rows)
{
    bf16 *out = to;
    for (int32_t i = 0; i < padded; i++)
        for (int32_t d = 0; d < ld; d += 32)
            _mm512_storeu_si512(out + (int64_t)i * ld + d, i < n ? load_part(from, j0 + i, d)
                                                                 : _mm512_setzero_si512());
}

/* Squares of 16 keys x 16 pairs are transposed in registers. */
static CPU_PACK_KEYS(pack_keys)
{
    const int32_t pairs = (from->dim + 1) / 2;
    float *out = to;
    for (int32_t j = 0; j < padded; j += VF) {
        float *panel = out + (int64_t)(j / PANEL) * PANEL * pairs + j % PANEL;
        for (int32_t t = 0; t < pairs; t += VF) {
            vf square[VF];
            for (int i = 0; i < VF; i++) {
                square[i] = j + i < n ? (vf)load_part(from, j0 + j + i, 2 * t) : vf_set(0);
                __builtin_prefetch(from->base + (j0 + j + i + VF) * from->stride + 4 * t, 0, 3);
            }
            vf_transpose(square);
            for (int i = 0; i < VF && t + i < pairs; i++)
                vf_store(panel + (int64_t)(t + i) * PANEL, square[i]);
        }
    }
}

static ALWAYS_INLINE int any_wild(__m512i x)
{
    const __m512i exponents = _mm512_set1_epi16(0x7f80);
    return _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponents), exponents) != 0;
}

/* Lanes of two keys' 32 columns taken by turns, low half then high. */
static ALWAYS_INLINE void store_turns(bf16 *to, __m512i x, __m512i y)
{
    const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    const __m512i a = _mm512_permutexvar_epi64(order, x);
    const __m512i b = _mm512_permutexvar_epi64(order, y);
    _mm512_storeu_si512(to, _mm512_unpacklo_epi16(a, b));
    _mm512_storeu_si512(to + 32, _mm512_unpackhi_epi16(a, b));
}

static CPU_PACK_VALUES(pack_values)
{
    const __m512i zero = _mm512_setzero_si512();
    bf16 *out = to;
    int wild = 0;
    for (int32_t d = 0; d < from->dim; d += PANEL, out += (int64_t)padded * PANEL)
        for (int32_t j = 0; j < padded; j += 2) {
            const __m512i x = j < n ? load_part(from, j0 + j, d) : zero;
            const __m512i y = j + 1 < n ? load_part(from, j0 + j + 1, d) : zero;
            wild |= any_wild(x) | any_wild(y);
            __builtin_prefetch(from->base + (j0 + j + VF) * from->stride + 2 * d, 0, 3);
            __builtin_prefetch(from->base + (j0 + j + 1 + VF) * from->stride + 2 * d, 0, 3);
            store_turns(out + (int64_t)j * PANEL, x, y);
        }
    return wild;
}

const cpu_kernels cpu_bf16_dot = {
    .name = "AVX512-BF16 dot products",
    .strip = STRIP_ROWS,
    .panel = PANEL,
    .element = 2,
    .depth = 2,
    .is_fused = HAS_FMA,
    .scores = scores,
    .softmax = softmax,
    .values = values,
    .pack_rows = pack_rows,
    .pack_keys = pack_keys,
    .pack_values = pack_values,
    .direct_rows = 16,
    .dots = cpu_dots_bf16,
    .sums = cpu_sums_bf16,
    .store_rows = cpu_store_rows_avx512,
};

#endif
