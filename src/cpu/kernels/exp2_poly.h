/* exp2_poly.h: 2^t for t <= 0 or a little above, the exponential of every softmax here.
 * Needs vec.h. -INF gives 0, NaN stays NaN; relative error below 2.5e-7 (t_kernels.c). */
#ifndef SACCADE_CPU_KERNELS_EXP2_POLY_H
#define SACCADE_CPU_KERNELS_EXP2_POLY_H

#include "cpu/kernels/vec.h"

#define LOG2_E 0x1.715476p+0f

#if defined(VF_HAS_FRACTION)

/* t = n + f, 0 <= f <= 1; 2^f by a minimax polynomial that is exactly 1 at 0 and 2 at 1
 * (9.7e-8): an unchanged maximum rescales by exactly 1, and a row's largest weight is 1 whether
 * m log2 e was rounded up or down. */
static ALWAYS_INLINE vf exp2_poly(vf t)
{
    const vf f = vf_fraction(t);
    vf p = vf_fma(f, vf_set(0x1.eca6fp-10f), vf_set(0x1.269deep-7f));
    p = vf_fma(p, f, vf_set(0x1.c94444p-5f));
    p = vf_fma(p, f, vf_set(0x1.ebd8a2p-3f));
    p = vf_fma(p, f, vf_set(0x1.62e4c8p-1f));
    p = vf_fma(p, f, vf_set(1.0f));
    return vf_scale(p, t);
}

/* 2^(t - floor t) to 8.6e-5. */
static ALWAYS_INLINE vf exp2_rough_fraction(vf t)
{
    const vf f = vf_fraction(t);
    vf p = vf_fma(f, vf_set(0x1.3baaa6p-4f), vf_set(0x1.d2378ap-3f));
    p = vf_fma(p, f, vf_set(0x1.63e658p-1f));
    return vf_fma(p, f, vf_set(1.0f));
}

/* 2^t to 8.6e-5, for weights that are rounded to bf16, which is 3.9e-3. */
static ALWAYS_INLINE vf exp2_rough(vf t)
{
    return vf_scale(exp2_rough_fraction(t), t);
}

#else

/* t = n + f, |f| <= 1/2; 2^f by a minimax polynomial that is exactly 1 at 0 (9.2e-8). The bound
 * on t keeps -INF out of n + f. */
static ALWAYS_INLINE vf exp2_poly(vf t)
{
    const vf bounded = vf_max(vf_set(-200.0f), t);
    const vf n = vf_round(bounded), f = bounded - n;
    vf p = vf_fma(f, vf_set(0x1.5bba14p-10f), vf_set(0x1.3cea88p-7f));
    p = vf_fma(p, f, vf_set(0x1.c6b752p-5f));
    p = vf_fma(p, f, vf_set(0x1.ebf9bcp-3f));
    p = vf_fma(p, f, vf_set(0x1.62e42ap-1f));
    p = vf_fma(p, f, vf_set(1.0f));
    return vf_scale(p, n);
}

static ALWAYS_INLINE vf exp2_rough(vf t)
{
    return exp2_poly(t);
}

#endif

#endif
