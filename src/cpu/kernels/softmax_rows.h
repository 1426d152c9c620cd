/* softmax_rows.h: online softmax of one row in vectors, shared by the templates of kernels.
 * Needs vec.h. FA2 (arXiv 2307.08691) alg. 1: m, l, and alpha that rescales what was before. */
#ifndef SACCADE_CPU_KERNELS_SOFTMAX_ROWS_H
#define SACCADE_CPU_KERNELS_SOFTMAX_ROWS_H

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/exp2_poly.h"

#include <math.h>

/* Maximum of m and s[0..n), n a multiple of 16; NaN counts or not. */
static ALWAYS_INLINE float row_max(const float *s, int32_t n, float m)
{
    vf a = vf_set(m), b = a;
    for (int32_t j = 0; j < n; j += 2 * VF) {
        a = vf_max(a, vf_load(s + j));
        b = vf_max(b, vf_load(s + j + (j + VF < n ? VF : 0)));
    }
    return vf_max_lanes(vf_max(a, b));
}

/* Whether m enters exponents as the rounded product m log2 e, an FMA for each score. Where that
 * would be off by powers of two, or overflow, differences come first: a row whose every score
 * is the lowest float is a mean of V. */
static ALWAYS_INLINE int is_fused_at(float m)
{
    return HAS_FMA && fabsf(m) < CPU_FUSED_MOST;
}

/* (s - m) log2 e. Fused, m enters as row_scale has it too, so that blocks before and after a
 * new maximum agree; unfused, s log2 e would lose bits of s - m. */
static ALWAYS_INLINE vf exponent(vf s, float m, int is_fused)
{
    if (is_fused)
        return vf_fma(s, vf_set(LOG2_E), vf_set(-(m * LOG2_E)));
    return (s - vf_set(m)) * vf_set(LOG2_E);
}

/* m log2 e as exponents relative to m have it. */
static ALWAYS_INLINE double exponent_of(float m)
{
    return is_fused_at(m) ? (double)(m * LOG2_E) : (double)m * (double)LOG2_E;
}

/* What turns sums relative to maximum `from` into sums relative to `to`. */
static ALWAYS_INLINE float row_scale(float from, float to)
{
    float lanes[VF], t = (from - to) * LOG2_E;
    if (is_fused_at(from) && is_fused_at(to))
        t = from * LOG2_E - to * LOG2_E;
    else if (HAS_FMA)
        t = (float)(exponent_of(from) - exponent_of(to));
    vf_store(lanes, exp2_poly(vf_set(t)));
    return lanes[0];
}

/* exp(s - base) of every score over it, as `store` writes it, and their sum. */
#define ROW_EXP(name, element, store)                                              \
    static ALWAYS_INLINE float name(float *s, int32_t n, float base, int is_fused) \
    {                                                                              \
        element *p = (element *)(void *)s;                                         \
        vf sum = vf_set(0);                                                        \
        for (int32_t j = 0; j < n; j += VF) {                                      \
            const vf x = exp2_poly(exponent(vf_load(s + j), base, is_fused));      \
            store(p + j, x);                                                       \
            sum += x;                                                              \
        }                                                                          \
        return vf_sum_lanes(sum);                                                  \
    }

/* A row still without a live key keeps m = -INF; 0 stands in for it, so that every exp is 0. */
#define SOFTMAX(name, row_exp)                                                       \
    static CPU_SOFTMAX(name)                                                         \
    {                                                                                \
        for (int32_t i = 0; i < rows; i++) {                                         \
            float *row = s + (int64_t)i * s_ld;                                      \
            const float new_m = !known            ? row_max(row, n, m[i])            \
                                : known[i] > m[i] ? known[i]                         \
                                                  : m[i];                            \
            const float base = new_m == -INFINITY ? 0 : new_m;                       \
            alpha[i] = row_scale(m[i], base);                                        \
            const float sum = is_fused_at(base) ? row_exp(row, n, base, 1)           \
                                                : row_exp(row, n, base, 0);          \
            l[i] = l[i] * alpha[i] + sum;                                            \
            m[i] = new_m;                                                            \
        }                                                                            \
    }

#endif
