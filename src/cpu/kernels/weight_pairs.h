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

#endif

typedef struct row_pair {
    float *s[2], *dp[2];
    const float *slope[2];
    float *dx[2];
    weight_row row[2];
    int32_t *p, *ds; /* pairs */
} row_pair;

/* A row that is not there has weights 0. Every dP is read before dS in bf16 comes to lie over
 * it: element j of that is at half the bytes. */
static ALWAYS_INLINE int weigh_pair(const row_pair *r, int rows, int32_t n, int is_fused,
                                    int has_slope, int has_dx)
{
    int any_dead = 0;
    for (int32_t j = 0; j < n; j += VF) {
        vf p[2] = {vf_set(0), vf_set(0)}, ds[2] = {vf_set(0), vf_set(0)};
        for (int i = 0; i < rows; i++) {
            const vf x = vf_load(r->s[i] + j);
            any_dead |= vf_any_dead(x);
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
    return any_dead;
}

static inline CPU_WEIGHTS(weigh_pairs)
{
    int any_dead = 0;
    for (int32_t i = 0; i < rows; i += 2) {
        const int n_rows = i + 1 < rows ? 2 : 1;
        row_pair r = {.p = (int32_t *)p + (int64_t)(i / 2) * ld,
                      .ds = (int32_t *)ds + (int64_t)(i / 2) * ld};
        for (int t = 0; t < n_rows; t++) {
            r.s[t] = s + (int64_t)(i + t) * ld;
            r.dp[t] = dp + (int64_t)(i + t) * ld;
            r.slope[t] = slope ? slope + (int64_t)(i + t) * ld : NULL;
            r.dx[t] = dx ? dx + (int64_t)(i + t) * ld : NULL;
            r.row[t] = weight_row_of(lse[i + t], delta[i + t]);
        }
        const int is_fused = r.row[0].is_fused && (n_rows == 1 || r.row[1].is_fused);
        if (n_rows == 2 && is_fused && !slope && !dx)
            any_dead |= weigh_pair(&r, 2, n, 1, 0, 0);
        else if (n_rows == 2 && is_fused && !dx)
            any_dead |= weigh_pair(&r, 2, n, 1, 1, 0);
        else
            any_dead |= weigh_pair(&r, n_rows, n, is_fused, slope != NULL, dx != NULL);
    }
    return any_dead;
}

#endif
