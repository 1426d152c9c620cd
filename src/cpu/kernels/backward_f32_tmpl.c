/* Backward kernels in f32, compiled once per level: forward's scores and values, products of
 * turned weights (turned_products.h), and the weights themselves, P over S and dS over dP. */
#include "cpu/kernels/backward_kernels.h"
#include "cpu/kernels/vec.h"

#if !defined(LEVEL_AMX)

#include "cpu/kernels/turned_products.h"
#include "cpu/kernels/weight_rows.h"

static ALWAYS_INLINE void weigh_row(float *s, float *dp, const cpu_stretch *of, int32_t n_of,
                                    const weight_row *row, const float *slope, float *dx,
                                    int is_fused)
{
    for (const cpu_stretch *past = of + n_of; of < past; of++)
        for (int32_t j = of->from; j < of->past; j += VF) {
            const vf x = vf_load(s + j), p = weight_of(x, row, is_fused);
            vf_store(s + j, p);
            vf_store(dp + j, score_gradient(x, p, vf_load(dp + j), row,
                                            slope ? slope + j : NULL, dx ? dx + j : NULL));
        }
}

static CPU_WEIGHTS(weights)
{
    const cpu_stretch all = {0, strip->n, 0}, *of = strip->of ? strip->of : &all;
    const int32_t n_of = strip->of ? strip->n_of : 1;
    for (int32_t i = 0; i < strip->rows; i++) {
        const weight_row row = weight_row_of(strip->lse[i], strip->delta[i]);
        const int64_t at = (int64_t)i * strip->ld;
        const float *slope = strip->slope ? strip->slope + at : NULL;
        float *s = strip->s + at, *dp = strip->dp + at, *dx = strip->dx ? strip->dx + at : NULL;
        if (slope || dx)
            weigh_row(s, dp, of, n_of, &row, slope, dx, row.is_fused);
        else if (row.is_fused)
            weigh_row(s, dp, of, n_of, &row, NULL, NULL, 1);
        else
            weigh_row(s, dp, of, n_of, &row, NULL, NULL, 0);
    }
}

const cpu_backward_kernels LEVEL_NAME(cpu_backward_f32) = {
    .block = &LEVEL_NAME(cpu_f32),
    .rows = 96,
    .step = 1,
    .depth = 1,
    .weights = weights,
    .turned = turned,
    .turned_of = turned_of,
    .row_dots = LEVEL_NAME(cpu_row_dots),
    .seen = LEVEL_NAME(cpu_seen),
    .sum_rows = LEVEL_NAME(cpu_sum_rows),
    .sum_columns = LEVEL_NAME(cpu_sum_columns),
    .sum_diagonals = LEVEL_NAME(cpu_sum_diagonals),
    .store = LEVEL_NAME(cpu_store_gradient),
};

#endif
