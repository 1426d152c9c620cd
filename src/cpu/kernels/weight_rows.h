/* weight_rows.h: P and dS of a vector of scores, shared by the backward kernels. */
#ifndef SACCADE_CPU_KERNELS_WEIGHT_ROWS_H
#define SACCADE_CPU_KERNELS_WEIGHT_ROWS_H

#include "cpu/kernels/exp2_poly.h"
#include "cpu/kernels/kernels.h"

#include <math.h>

/* What a row's weights are made from. lse log2 e is kept in two parts: its rounding alone would
 * be 1e-4 of every weight of a row whose lse is in the thousands. */
typedef struct weight_row {
    float lse, high, low, delta;
    int is_fused;
} weight_row;

static ALWAYS_INLINE weight_row weight_row_of(float lse, float delta)
{
    weight_row row = {.lse = lse, .delta = delta};
    row.is_fused = HAS_FMA && fabsf(lse) < CPU_FUSED_MOST;
    row.high = lse * LOG2_E;
    row.low = HAS_FMA ? __builtin_fmaf(lse, LOG2_E, -row.high) : 0;
    return row;
}

/* exp(s - lse), 0 where s is -INF. */
static ALWAYS_INLINE vf weight_of(vf s, const weight_row *row, int is_fused)
{
    const vf t = is_fused ? vf_fma(s, vf_set(LOG2_E), vf_set(-row->high)) - vf_set(row->low)
                          : (s - vf_set(row->lse)) * vf_set(LOG2_E);
    return vf_where_live(s, exp2_poly(t));
}

/* p (dP - delta), 0 where s is -INF; stored where dx is wanted. Then times slope. */
static ALWAYS_INLINE vf score_gradient(vf s, vf p, vf dp, const weight_row *row,
                                       const float *slope, float *dx)
{
    vf ds = p * (dp - vf_set(row->delta));
    if (dx)
        vf_store(dx, vf_where_live(s, ds));
    if (slope)
        ds = ds * vf_load(slope);
    return vf_where_live(s, ds);
}

#endif
