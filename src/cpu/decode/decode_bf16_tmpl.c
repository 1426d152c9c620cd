/* Products of a few rows (decode) straight from K and V by AVX512-BF16 dot products, which add
 * two products of bf16 to an f32 sum in each lane. decode_f32_tmpl.c explains the order of
 * loads; here nothing is converted or copied. Subnormal numbers count as 0, because the
 * instruction takes them so. Compiled with the flags of the AMX level, the only level that has
 * this extension. */
#include "cpu/kernels/kernels.h"
#include "cpu/kv/prefetch.h"
#include "cpu/kernels/vec.h"

#include <string.h>

#if defined(LEVEL_AMX)

enum {
    WIDE = 32,            /* elements of a vector */
    KEY_GROUP = KV_GROUP, /* keys whose scores are made together */
    BLOCK = 16384,        /* elements of V taken by all rows in turn: they stay in L1 */
    MOST_KEYS = 64,
    MOST_ROWS = 16,
};

typedef uint16_t bf16;

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

/* Elements [d, d + 32) of a row of `dim`, 0 past its end, which is never read. */
static ALWAYS_INLINE __m512i load_wide(const bf16 *row, int32_t d, int32_t dim)
{
    const int32_t left = dim - d;
    return _mm512_maskz_loadu_epi16(left >= WIDE ? UINT32_MAX : ((__mmask32)1 << left) - 1,
                                    row + d);
}

/* ---- scores ---- */

typedef struct qk_job {
    const bf16 *q;
    float *s;
    int32_t q_ld, s_ld, rows, share;
    float scale;
    cpu_prefetch *next;
} qk_job;

/* Dims [d, d + 32) of `rows` rows against 16 / rows keys. */
static ALWAYS_INLINE void dot_step(int rows, int is_edge, const qk_job *job, const bf16 *q,
                                   const bf16 *const *keys, int32_t d, int32_t D, vf acc[VF])
{
    const int n_keys = VF / rows;
#pragma GCC unroll 16
    for (int j = 0; j < n_keys; j++) {
        const __m512i k = is_edge ? load_wide(keys[j], d, D) : _mm512_loadu_si512(keys[j] + d);
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++)
            acc[i * n_keys + j] =
                dot(acc[i * n_keys + j], k, _mm512_loadu_si512(q + (int64_t)i * job->q_ld + d));
    }
}

/* `rows` rows against 16 / rows keys: one vector of scores, [rows][keys]. */
static ALWAYS_INLINE vf dot_square(int rows, int parts, const qk_job *job, const bf16 *q,
                                   const bf16 *const *keys, int32_t D)
{
    vf acc[VF];
    int32_t d = 0;
    for (int t = 0; t < VF; t++)
        acc[t] = vf_set(0);
    for (; d + WIDE <= D; d += WIDE) {
        prefetch_lines(job->next, parts, job->share);
        dot_step(rows, 0, job, q, keys, d, D, acc);
    }
    if (d < D) {
        prefetch_lines(job->next, parts, job->share);
        dot_step(rows, 1, job, q, keys, d, D, acc);
    }
    return vf_sum_each(acc);
}

/* Rows from i on against n keys; scores from column j on. */
static ALWAYS_INLINE void dot_rows(int rows, int parts, const qk_job *job, int32_t i,
                                   const cpu_rows *k, int32_t n, int32_t column)
{
    const int n_keys = VF / rows;
    float *s = job->s + (int64_t)i * job->s_ld + column;
    for (int32_t j = 0; j < n; j += n_keys) {
        const bf16 *keys[VF];
        float square[VF];
        for (int t = 0; t < n_keys; t++)
            keys[t] =
                (const bf16 *)(const void *)(k->base + (j + t < n ? j + t : n - 1) * k->stride);
        vf_store(square,
                 vf_set(job->scale)
                     * dot_square(rows, parts, job, job->q + (int64_t)i * job->q_ld, keys,
                                  k->dim));
        for (int r = 0; r < rows; r++)
            memcpy(s + (int64_t)r * job->s_ld + j, square + r * n_keys,
                   (size_t)n_keys * sizeof *s);
    }
}

/* Prefetches as many parts as `parts` says. */
static ALWAYS_INLINE void qk_by_dots(int parts, const bf16 *q, int32_t q_ld, const cpu_keys *k,
                                     int32_t n, int32_t rows, float scale, float *s,
                                     int32_t s_ld, cpu_prefetch *next)
{
    const int64_t steps =
        ((int64_t)n + KEY_GROUP - 1) / KEY_GROUP * rows * ((k->rows.dim + WIDE - 1) / WIDE);
    cpu_prefetch own = *next; /* which stores of scores cannot change */
    const qk_job job = {q, s, q_ld, s_ld, rows, prefetch_share(next, steps), scale, &own};
    for (int32_t j = 0; j < n; j += KEY_GROUP) {
        const int32_t m = n - j < KEY_GROUP ? n - j : KEY_GROUP;
        const cpu_rows keys = cpu_keys_from(k, j);
        int32_t i = 0;
        for (; i + 4 <= rows; i += 4)
            dot_rows(4, parts, &job, i, &keys, m, j);
        for (; i + 2 <= rows; i += 2)
            dot_rows(2, parts, &job, i, &keys, m, j);
        for (; i < rows; i++)
            dot_rows(1, parts, &job, i, &keys, m, j);
    }
    prefetch_rest(&own, parts);
    *next = own;
}

CPU_DECODE_QK(cpu_decode_qk_bf16)
{
    qk_by_dots(1, q, q_ld, k, n, rows, scale, s, s_ld, next);
}

CPU_DECODE_QK(cpu_decode_qk_bf16_parts)
{
    qk_by_dots(MOST_PARTS, q, q_ld, k, n, rows, scale, s, s_ld, next);
}

/* ---- values ---- */

typedef struct pv_job {
    const cpu_keys *v;
    const bf16 *p;
    float *sums; /* [rows][ld], of a group of keys */
    int32_t p_ld, ld, rows, share;
    cpu_prefetch *next;
} pv_job;

/* Columns 0..15 and 16..31 from what `unpack` leaves of those of two keys: quarters of low
 * halves in one vector, of high halves in the other. */
static ALWAYS_INLINE void join_quarters(const vf in[2], vf out[2])
{
    const __m512i first =
        _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    out[0] = _mm512_permutex2var_ps(in[0], first, in[1]);
    out[1] = _mm512_permutex2var_ps(in[0], second, in[1]);
}

/* Adds keys [j, j + n) of a group, n <= 16, two at a time, for rows [i, i + rows) and columns
 * [d, d + 32 * parts); P is 0 past the last key. */
static ALWAYS_INLINE void add_keys(int rows, int parts, const pv_job *job, int32_t i, int32_t d,
                                   int32_t j, int32_t n, vf acc[8][2])
{
    const bf16 *p = job->p + (int64_t)i * job->p_ld + j;
    const cpu_rows v = cpu_keys_from(job->v, j);
    const char *row = v.base;
    for (int32_t t = 0; t < n; t += 2, row += 2 * v.stride) {
        const bf16 *even = (const bf16 *)(const void *)row;
        const bf16 *odd = (const bf16 *)(const void *)(row + (t + 1 < n ? v.stride : 0));
        prefetch_lines(job->next, 1, job->share);
#pragma GCC unroll 4
        for (int c = 0; c < parts; c++) {
            const __m512i x = load_wide(even, d + WIDE * c, v.dim);
            const __m512i y = load_wide(odd, d + WIDE * c, v.dim);
            const __m512i low = _mm512_unpacklo_epi16(x, y), high = _mm512_unpackhi_epi16(x, y);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                const __m512i weight = pair(p + (int64_t)r * job->p_ld + t);
                acc[r * parts + c][0] = dot(acc[r * parts + c][0], weight, low);
                acc[r * parts + c][1] = dot(acc[r * parts + c][1], weight, high);
            }
        }
    }
}

/* The sums of keys [j, j + n) for rows [i, i + rows), columns [d, d + 32 * parts). */
static ALWAYS_INLINE void sum_chunk(int rows, int parts, const pv_job *job, int32_t i,
                                    int32_t d, int32_t j, int32_t n)
{
    vf acc[8][2];
    float *sums = job->sums + (int64_t)i * job->ld + d;
    for (int t = 0; t < rows * parts; t++)
        acc[t][0] = acc[t][1] = vf_set(0);
    for (int32_t past = j + n; j < past; j += KEY_GROUP)
        add_keys(rows, parts, job, i, d, j, past - j < KEY_GROUP ? past - j : KEY_GROUP, acc);
    for (int t = 0; t < rows * parts; t++) {
        float *at = sums + (int64_t)(t / parts) * job->ld + t % parts * WIDE;
        vf part[2];
        join_quarters(acc[t], part);
        vf_store(at, part[0]);
        vf_store(at + VF, part[1]);
    }
}

/* Rows of one height from i on: columns in the widest chunks whose accumulators fit. */
static ALWAYS_INLINE void sum_rows(int rows, const pv_job *job, int32_t i, int32_t j, int32_t n)
{
    const int32_t E = job->v->rows.dim;
    int32_t d = 0;
    for (; rows < 4 && d + 4 * WIDE <= E; d += 4 * WIDE)
        sum_chunk(rows, rows < 4 ? 4 : 1, job, i, d, j, n);
    for (; d + 2 * WIDE <= E; d += 2 * WIDE)
        sum_chunk(rows, 2, job, i, d, j, n);
    for (; d < E; d += WIDE)
        sum_chunk(rows, 1, job, i, d, j, n);
}

/* An infinity or NaN in V makes the sums of every row infinite or NaN, since even 0 times it is
 * NaN. So the sums of one row tell. */
static int is_nonfinite(const float *sums, int32_t n)
{
    vf noted = vf_set(0);
    for (int32_t d = 0; d < n; d += VF)
        noted = vf_note_nonfinite(noted, vf_load(sums + d));
    return vf_any_nonfinite(noted);
}

static void add_sums(const float *sums, int32_t ld, int32_t rows, int32_t E, float *o,
                     int32_t o_ld)
{
    for (int32_t i = 0; i < rows; i++)
        for (int32_t d = 0; d < E; d += VF) {
            float *at = o + (int64_t)i * o_ld + d;
            vf_store(at, vf_load(at) + vf_load(sums + (int64_t)i * ld + d));
        }
}

static int64_t sum_steps(int32_t rows, int32_t E, int32_t n)
{
    const int32_t columns = rows < 4 ? 4 * WIDE : 2 * WIDE;
    return ((int64_t)rows / 4 + rows % 4 / 2 + rows % 2) * ((E + columns - 1) / columns)
           * ((n + 1) / 2);
}

CPU_DECODE_PV(cpu_decode_pv_bf16)
{
    _Alignas(64) float sums[MOST_ROWS * CPU_DECODE_DIM];
    const int32_t E = v->rows.dim, ld = (E + WIDE - 1) / WIDE * WIDE;
    const int32_t fit = BLOCK / ld / KEY_GROUP * KEY_GROUP;
    const int32_t group = fit < MOST_KEYS ? fit : MOST_KEYS;
    cpu_prefetch own = *next;
    const pv_job job = {v,
                        (const bf16 *)(const void *)p,
                        sums,
                        2 * p_ld,
                        ld,
                        rows,
                        prefetch_share(next, sum_steps(rows, E, n)),
                        &own};
    for (int32_t i = 0; i < rows; i++)
        for (int32_t d = 0; d < E && alpha[i] != 1; d += VF) {
            float *at = o + (int64_t)i * o_ld + d;
            vf_store(at, vf_set(alpha[i]) * vf_load(at));
        }
    for (int32_t j = 0; j < n; j += group) {
        const int32_t m = n - j < group ? n - j : group;
        int32_t i = 0;
        for (; i + 4 <= rows; i += 4)
            sum_rows(4, &job, i, j, m);
        for (; i + 2 <= rows; i += 2)
            sum_rows(2, &job, i, j, m);
        for (; i < rows; i++)
            sum_rows(1, &job, i, j, m);
        if (is_nonfinite(sums, E))
            return j;
        add_sums(sums, ld, rows, E, o, o_ld);
    }
    prefetch_rest(&own, 1);
    *next = own;
    return n;
}

#endif
