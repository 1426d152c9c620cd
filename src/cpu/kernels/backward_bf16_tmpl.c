/* Backward kernels on packed bf16 with AVX512-BF16 dot products: backward_f32_tmpl.c with pairs
 * of rows in place of rows where weights are turned. P and dS are rounded to bf16, as forward
 * rounds P. Compiled with the flags of the AMX level, the only one that has this extension. */
#include "cpu/kernels/backward_kernels.h"
#include "cpu/kernels/vec.h"

#if defined(LEVEL_AMX)

#include "cpu/kernels/turned_products.h"
#include "cpu/kernels/weight_rows.h"

/* Two rows of 16 as bf16, the first in the lower half. */
static ALWAYS_INLINE __m512i narrow_two(vf first, vf second)
{
    return (__m512i)_mm512_cvtne2ps_pbh(second, first);
}

/* Interleaves two halves: the elements of one row and of the next become pairs. */
static ALWAYS_INLINE __m512i pair(__m512i halves)
{
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25,
                                           9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2,
                                           17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, halves);
}

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
        const __m512i halves = narrow_two(ds[0], ds[1]);
        _mm512_storeu_si512(r->p + j, pair(narrow_two(p[0], p[1])));
        _mm512_storeu_si512(r->ds + j, pair(halves));
        _mm256_storeu_si256((__m256i *)(void *)((uint16_t *)(void *)r->dp[0] + j),
                            _mm512_castsi512_si256(halves));
        if (rows == 2)
            _mm256_storeu_si256((__m256i *)(void *)((uint16_t *)(void *)r->dp[1] + j),
                                _mm512_extracti64x4_epi64(halves, 1));
    }
    return any_dead;
}

static CPU_WEIGHTS(weights)
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

const cpu_backward_kernels cpu_backward_bf16_dot = {
    .block = &cpu_bf16_dot,
    .step = 2,
    .weights = weights,
    .turned = turned,
    .row_dots = cpu_row_dots_avx512,
    .sum_rows = cpu_sum_rows_avx512,
    .sum_columns = cpu_sum_columns_avx512,
    .sum_diagonals = cpu_sum_diagonals_avx512,
    .store = cpu_store_gradient_avx512,
};

#endif
