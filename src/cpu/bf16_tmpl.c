/* Forward kernels on packed bf16 with AVX512-BF16 dot products: two products and an f32 sum per
 * lane and step. Worth it where vdpbf16ps runs as often as an FMA (Zen 5: 516 against 256
 * GFLOP/s a core); where it runs at half that rate fwd_tmpl.c is as good. Same shapes and order
 * as there, with pairs of neighbours (dims of Q and K, keys of P and V) in place of elements.
 * Compiled with the flags of the AMX level, the only one that has this extension. */
#include "cpu/cpu.h"
#include "cpu/asking.h"
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

/* any_wild of it once x was wild: the largest exponent stays. */
static ALWAYS_INLINE __m512i note_wild(__m512i noted, __m512i x)
{
    return _mm512_max_epu16(noted, _mm512_and_si512(x, _mm512_set1_epi16(0x7fff)));
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

/* ---- a few rows, straight from K and V: direct_tmpl.c has the idea ---- */

static ALWAYS_INLINE void ask(const cpu_rows *from, int64_t j, int32_t d)
{
    __builtin_prefetch(from->base + j * from->stride + d * 2, 0, 2);
}

/* `rows` rows against 16 / rows keys: one vector of scores, [rows][keys]. */
static ALWAYS_INLINE vf dot_square(int rows, const bf16 *q, int32_t q_ld,
                                   const bf16 *const *keys, int32_t D, asking *next)
{
    vf acc[VF];
    const int n_keys = VF / rows;
    for (int t = 0; t < VF; t++)
        acc[t] = vf_set(0);
    for (int32_t d = 0; d < D; d += 32) {
        ask_some(next);
#pragma GCC unroll 16
        for (int j = 0; j < n_keys; j++) {
            const __m512i k = _mm512_loadu_si512(keys[j] + d);
#pragma GCC unroll 4
            for (int i = 0; i < rows; i++)
                acc[i * n_keys + j] = dot(acc[i * n_keys + j], k,
                                          _mm512_loadu_si512(q + (int64_t)i * q_ld + d));
        }
    }
    return vf_sum_each(acc);
}

static ALWAYS_INLINE void dot_rows(int rows, const bf16 *q, int32_t q_ld, const cpu_rows *k,
                                   int64_t j0, int32_t n, float scale, float *s, int32_t s_ld,
                                   asking *next)
{
    const int n_keys = VF / rows;
    for (int32_t j = 0; j < n; j += n_keys) {
        const bf16 *keys[VF];
        float square[VF];
        for (int t = 0; t < n_keys; t++)
            keys[t] = (const bf16 *)(const void *)(k->base + (j0 + (j + t < n ? j + t : n - 1))
                                                                 * k->stride);
        vf_store(square, vf_set(scale) * dot_square(rows, q, q_ld, keys, k->dim, next));
        for (int i = 0; i < rows; i++)
            memcpy(s + (int64_t)i * s_ld + j, square + i * n_keys,
                   (size_t)n_keys * sizeof *s);
    }
}

static CPU_DOTS(dots)
{
    const bf16 *queries = q;
    asking next = asking_begin(ahead, ahead_j0, rows, k->dim / 32, VF);
    for (int32_t j = 0; j < n; j += VF) {
        const int32_t m = n - j < VF ? n - j : VF;
        int32_t i = 0;
        next.rows += m;
        for (; i + 4 <= rows; i += 4)
            dot_rows(4, queries + (int64_t)i * q_ld, q_ld, k, j0 + j, m, scale,
                     s + (int64_t)i * s_ld + j, s_ld, &next);
        for (; i + 2 <= rows; i += 2)
            dot_rows(2, queries + (int64_t)i * q_ld, q_ld, k, j0 + j, m, scale,
                     s + (int64_t)i * s_ld + j, s_ld, &next);
        for (; i < rows; i++)
            dot_rows(1, queries + (int64_t)i * q_ld, q_ld, k, j0 + j, m, scale,
                     s + (int64_t)i * s_ld + j, s_ld, &next);
    }
}

typedef struct sums_job {
    const bf16 *p;
    const float *alpha;
    float *o;
    int32_t p_ld, o_ld, n, rows;
    const cpu_rows *v, *ahead;
    int64_t j0, ahead_j0;
} sums_job;

/* Columns 0..15 and 16..31 of O, and as `unpack` leaves those of two keys: quarters of low
 * halves in one vector, of high halves in the other. */
static ALWAYS_INLINE void swap_quarters(const vf in[2], vf out[2])
{
    const __m512i low = _mm512_set_epi32(27, 26, 25, 24, 19, 18, 17, 16, 11, 10, 9, 8, 3, 2, 1,
                                         0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(4));
    out[0] = _mm512_permutex2var_ps(in[0], low, in[1]);
    out[1] = _mm512_permutex2var_ps(in[0], high, in[1]);
}

static ALWAYS_INLINE void join_quarters(const vf in[2], vf out[2])
{
    const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1,
                                           0);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    out[0] = _mm512_permutex2var_ps(in[0], first, in[1]);
    out[1] = _mm512_permutex2var_ps(in[0], second, in[1]);
}

static ALWAYS_INLINE const bf16 *value_row(const sums_job *job, int32_t j)
{
    const int64_t row = job->j0 + (j < job->n ? j : job->n - 1);
    return (const bf16 *)(const void *)(job->v->base + row * job->v->stride);
}

/* Rows [i, i + rows), columns [d, d + 32 * parts), two keys at a time; P is 0 past n. The first
 * rows look for wild values before anything is stored, and ask for what is read next. */
static ALWAYS_INLINE int sum_chunk(int rows, int parts, int is_first, const sums_job *job,
                                   int32_t i, int32_t d)
{
    vf acc[8][2];
    const bf16 *p = job->p + (int64_t)i * job->p_ld;
    float *o = job->o + (int64_t)i * job->o_ld + d;
    __m512i noted = _mm512_setzero_si512();
    for (int t = 0; t < rows * parts; t++) {
        float *at = o + (int64_t)(t / parts) * job->o_ld + t % parts * 32;
        const vf alpha = vf_set(job->alpha[i + t / parts]);
        const vf part[2] = {alpha * vf_load(at), alpha * vf_load(at + VF)};
        swap_quarters(part, acc[t]);
    }
    for (int32_t j = 0; j < job->n; j += 2) {
        const bf16 *even = value_row(job, j) + d, *odd = value_row(job, j + 1) + d;
#pragma GCC unroll 4
        for (int c = 0; c < parts; c++) {
            const __m512i x = _mm512_loadu_si512(even + 32 * c);
            const __m512i y = _mm512_loadu_si512(odd + 32 * c);
            const __m512i low = _mm512_unpacklo_epi16(x, y), high = _mm512_unpackhi_epi16(x, y);
            if (is_first)
                noted = note_wild(note_wild(noted, x), y);
            if (is_asking(rows, job->rows, i, j / 2)) {
                ask(job->ahead, job->ahead_j0 + j, d + 32 * c);
                ask(job->ahead, job->ahead_j0 + j + 1, d + 32 * c);
            }
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                const __m512i weight = pair(p + (int64_t)r * job->p_ld + j);
                acc[r * parts + c][0] = dot(acc[r * parts + c][0], weight, low);
                acc[r * parts + c][1] = dot(acc[r * parts + c][1], weight, high);
            }
        }
    }
    if (is_first && any_wild(noted))
        return 1;
    for (int t = 0; t < rows * parts; t++) {
        float *at = o + (int64_t)(t / parts) * job->o_ld + t % parts * 32;
        vf part[2];
        join_quarters(acc[t], part);
        vf_store(at, part[0]);
        vf_store(at + VF, part[1]);
    }
    return 0;
}

static ALWAYS_INLINE int sum_rows(int parts, const sums_job *job, int32_t rows, int32_t d)
{
    int32_t i = parts <= 2 && rows >= 4 ? 4 : rows >= 2 ? 2 : 1;
    if (i == 4 ? sum_chunk(4, parts, 1, job, 0, d)
        : i == 2 ? sum_chunk(2, parts, 1, job, 0, d)
                 : sum_chunk(1, parts, 1, job, 0, d))
        return 1;
    for (; parts <= 2 && i + 4 <= rows; i += 4)
        sum_chunk(4, parts, 0, job, i, d);
    for (; i + 2 <= rows; i += 2)
        sum_chunk(2, parts, 0, job, i, d);
    for (; i < rows; i++)
        sum_chunk(1, parts, 0, job, i, d);
    return 0;
}

static CPU_SUMS(sums)
{
    const sums_job job = {(const bf16 *)(const void *)p, alpha, o, 2 * p_ld, o_ld, n, rows, v,
                          ahead, j0, ahead_j0};
    int32_t d = 0, wild = 0;
    for (; d + 128 <= v->dim && rows < 4 && !wild; d += wild ? 0 : 128)
        wild = sum_rows(4, &job, rows, d);
    for (; d + 64 <= v->dim && !wild; d += wild ? 0 : 64)
        wild = sum_rows(2, &job, rows, d);
    for (; d < v->dim && !wild; d += wild ? 0 : 32)
        wild = sum_rows(1, &job, rows, d);
    return d;
}

const cpu_kernels cpu_bf16_dot = {
    .name = "AVX512-BF16 dot products",
    .strip = STRIP_ROWS,
    .panel = PANEL,
    .element = 2,
    .depth = 2,
    .scores = scores,
    .softmax = softmax,
    .values = values,
    .pack_rows = pack_rows,
    .pack_keys = pack_keys,
    .pack_values = pack_values,
    .dots = dots,
    .sums = sums,
    .store_row = cpu_store_row_avx512,
};

#endif
