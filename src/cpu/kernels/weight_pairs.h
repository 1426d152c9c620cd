/* weight_pairs.h: weights of backward in bf16, two rows at a time: P and dS as pairs of rows,
 * as products of turned weights take them, and dS by rows over dP. They are rounded to bf16,
 * as forward rounds P. */
#ifndef SACCADE_CPU_KERNELS_WEIGHT_PAIRS_H
#define SACCADE_CPU_KERNELS_WEIGHT_PAIRS_H

#include "cpu/kernels/backward_kernels.h"
#include "cpu/kernels/weight_rows.h"

#if defined(LEVEL_AMX)

typedef __m512i two_rows; /* of 16 bf16, the first in the lower half */

static ALWAYS_INLINE two_rows narrow_two(vf first, vf second)
{
    return (__m512i)_mm512_cvtne2ps_pbh(second, first);
}

/* The elements of one row and of the next become pairs. */
static ALWAYS_INLINE void store_pairs(int32_t *to, two_rows x)
{
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                         22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, x));
}

static ALWAYS_INLINE void store_first(uint16_t *to, two_rows x)
{
    _mm256_storeu_si256((__m256i *)(void *)to, _mm512_castsi512_si256(x));
}

static ALWAYS_INLINE void store_second(uint16_t *to, two_rows x)
{
    _mm256_storeu_si256((__m256i *)(void *)to, _mm512_extracti64x4_epi64(x, 1));
}

static ALWAYS_INLINE void widen_two(two_rows x, vf row[2])
{
    const __m512i first = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(x));
    const __m512i second = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(x, 1));
    row[0] = _mm512_castsi512_ps(_mm512_slli_epi32(first, 16));
    row[1] = _mm512_castsi512_ps(_mm512_slli_epi32(second, 16));
}

#else

typedef struct two_rows {
    uint16_t row[2][VF];
} two_rows;

static ALWAYS_INLINE two_rows narrow_two(vf first, vf second)
{
    two_rows x;
    vf_to_bf16(x.row[0], first);
    vf_to_bf16(x.row[1], second);
    return x;
}

static ALWAYS_INLINE void store_pairs(int32_t *to, two_rows x)
{
    uint16_t *pairs = (uint16_t *)(void *)to;
    for (int i = 0; i < VF; i++) {
        pairs[2 * i] = x.row[0][i];
        pairs[2 * i + 1] = x.row[1][i];
    }
}

static ALWAYS_INLINE void store_first(uint16_t *to, two_rows x)
{
    memcpy(to, x.row[0], sizeof x.row[0]);
}

static ALWAYS_INLINE void store_second(uint16_t *to, two_rows x)
{
    memcpy(to, x.row[1], sizeof x.row[1]);
}

static ALWAYS_INLINE void widen_two(two_rows x, vf row[2])
{
    row[0] = vf_from_bf16(x.row[0]);
    row[1] = vf_from_bf16(x.row[1]);
}

#endif

typedef struct row_pair {
    float *s[2], *dp[2];
    const float *slope[2];
    float *dx[2];
    weight_row row[2];
    float scale;
    int32_t *p, *ds; /* pairs */
} row_pair;

static ALWAYS_INLINE row_pair pair_of(const cpu_strip_weights *w, int32_t i, int rows)
{
    row_pair r = {.scale = w->scale,
                  .p = (int32_t *)w->p + (int64_t)(i / 2) * w->ld,
                  .ds = (int32_t *)w->ds + (int64_t)(i / 2) * w->ld};
    for (int t = 0; t < rows; t++) {
        const int64_t at = (int64_t)(i + t) * w->ld;
        r.s[t] = w->s + at;
        r.dp[t] = w->dp + at;
        r.slope[t] = w->slope ? w->slope + at : NULL;
        r.dx[t] = w->dx ? w->dx + at : NULL;
        r.row[t] = weight_row_of(w->lse[i + t], w->delta[i + t]);
    }
    return r;
}

/* A row that is not there has weights 0. Every dP is read before dS in bf16 comes to lie over
 * it: element j of that is at half the bytes. */
static ALWAYS_INLINE void weigh_pair(const row_pair *r, int rows, int32_t from, int32_t past,
                                     int is_fused, int has_slope, int has_dx)
{
    for (int32_t j = from; j < past; j += VF) {
        vf p[2] = {vf_set(0), vf_set(0)}, ds[2] = {vf_set(0), vf_set(0)};
        for (int i = 0; i < rows; i++) {
            const vf x = vf_set(r->scale) * vf_load(r->s[i] + j);
            p[i] = weight_of(x, &r->row[i], is_fused);
            ds[i] = score_gradient(x, p[i], vf_load(r->dp[i] + j), &r->row[i],
                                   has_slope ? r->slope[i] + j : NULL,
                                   has_dx ? r->dx[i] + j : NULL);
        }
        const two_rows halves = narrow_two(ds[0], ds[1]);
        store_pairs(r->p + j, narrow_two(p[0], p[1]));
        store_pairs(r->ds + j, halves);
        store_first((uint16_t *)(void *)r->dp[0] + j, halves);
        if (rows == 2)
            store_second((uint16_t *)(void *)r->dp[1] + j, halves);
    }
}

/* What most rows are: two of them, and an lse whose product with log2 e is near enough when
 * rounded: 2^t of -INF is 0 without being asked. */
static ALWAYS_INLINE void weigh_near(const row_pair *r, int32_t from, int32_t past,
                                     int has_slope, int has_dx)
{
    const vf factor = vf_set(r->scale * LOG2_E);
    const vf base[2] = {vf_set(-r->row[0].high), vf_set(-r->row[1].high)};
    const vf delta[2] = {vf_set(r->row[0].delta), vf_set(r->row[1].delta)};
    const float *s[2] = {r->s[0], r->s[1]}, *slope[2] = {r->slope[0], r->slope[1]};
    float *dp[2] = {r->dp[0], r->dp[1]}, *dx[2] = {r->dx[0], r->dx[1]};
    int32_t *p_pairs = r->p, *ds_pairs = r->ds;
    for (int32_t j = from; j < past; j += VF) {
        vf p[2], ds[2];
        for (int i = 0; i < 2; i++) {
            const vf x = vf_load(s[i] + j);
            p[i] = exp2_rough(vf_fma(x, factor, base[i]));
            ds[i] = p[i] * (vf_load(dp[i] + j) - delta[i]);
            if (has_dx)
                vf_store(dx[i] + j, vf_where_live(x, ds[i]));
            if (has_slope)
                ds[i] = ds[i] * vf_load(slope[i] + j);
            ds[i] = vf_where_live(x, ds[i]);
        }
        const two_rows halves = narrow_two(ds[0], ds[1]);
        store_pairs(p_pairs + j, narrow_two(p[0], p[1]));
        store_pairs(ds_pairs + j, halves);
        store_first((uint16_t *)(void *)dp[0] + j, halves);
        store_second((uint16_t *)(void *)dp[1] + j, halves);
    }
}

/* Of a pair of near rows. */
typedef void weigh_part(const row_pair *r, int32_t from, int32_t past);

static NEVER_INLINE void weigh_plain(const row_pair *r, int32_t from, int32_t past)
{
    weigh_near(r, from, past, 0, 0);
}

static NEVER_INLINE void weigh_sloped(const row_pair *r, int32_t from, int32_t past)
{
    weigh_near(r, from, past, 1, 0);
}

static NEVER_INLINE void weigh_kept(const row_pair *r, int32_t from, int32_t past)
{
    weigh_near(r, from, past, 0, 1);
}

static NEVER_INLINE void weigh_both(const row_pair *r, int32_t from, int32_t past)
{
    weigh_near(r, from, past, 1, 1);
}

static ALWAYS_INLINE weigh_part *near_part(const cpu_strip_weights *w)
{
    if (w->dx)
        return w->slope ? weigh_both : weigh_kept;
    return w->slope ? weigh_sloped : weigh_plain;
}

static ALWAYS_INLINE int is_near(const weight_row *row)
{
    return row->is_fused && fabsf(row->lse) < 256;
}

/* Of keys [from, past). */
static ALWAYS_INLINE void weigh_keys(const cpu_strip_weights *strip, const row_pair *r,
                                     int rows, int32_t from, int32_t past)
{
    const int is_fused = r->row[0].is_fused && (rows == 1 || r->row[1].is_fused);
    const int has_slope = strip->slope != NULL;
    if (rows == 2 && is_near(&r->row[0]) && is_near(&r->row[1]))
        near_part(strip)(r, from, past);
    else if (rows == 2 && is_fused && !strip->dx)
        weigh_pair(r, 2, from, past, 1, has_slope, 0);
    else
        weigh_pair(r, rows, from, past, is_fused, has_slope, strip->dx != NULL);
}

static inline CPU_WEIGHTS(weigh_pairs)
{
    const cpu_stretch all = {0, strip->n, 0}, *of = strip->of ? strip->of : &all;
    const int32_t n_of = strip->of ? strip->n_of : 1;
    for (int32_t i = 0; i < strip->rows; i += 2) {
        const int rows = i + 1 < strip->rows ? 2 : 1;
        const row_pair r = pair_of(strip, i, rows);
        for (int32_t n = 0; n < n_of; n++)
            weigh_keys(strip, &r, rows, of[n].from, of[n].past);
    }
}

#endif
