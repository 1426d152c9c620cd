/* Weights and their rates of a strip, compiled once per level: online softmax with the mean of
 * the rates beside its maximum (tangent_kernels.h). */
#include "cpu/kernels/tangent_kernels.h"
#include "cpu/kernels/vec.h"

#include "cpu/kernels/softmax_rows.h"

#include <string.h>

typedef uint16_t bf16;

static ALWAYS_INLINE void store_bf16(bf16 *to, vf x)
{
#if defined(LEVEL_AMX)
    _mm256_storeu_si256((__m256i *)(void *)to, (__m256i)_mm512_cvtneps_pbh(x));
#else
    vf_to_bf16(to, x);
#endif
}

/* Scores of one row become weights and the row's rates whole, 0 where dead; sums of both. */
static ALWAYS_INLINE void weigh(const cpu_strip_rates *t, int64_t at, float base, int is_fused,
                                float *sum, float *rate)
{
    float *s = t->s + at, *x = t->x + at;
    vf all = vf_set(0), rates = vf_set(0);
    for (int32_t j = 0; j < t->n; j += VF) {
        const vf score = vf_load(s + j);
        const vf p = exp2_poly(exponent(score, base, is_fused));
        vf dot = vf_load(x + j);
        if (t->y)
            dot += vf_load(t->y + at + j);
        if (t->slope)
            dot = dot * vf_load(t->slope + at + j);
        if (t->added)
            dot += vf_load(t->added + at + j);
        dot = vf_where_live(score, dot);
        all += p;
        rates += p * dot;
        vf_store(s + j, p);
        vf_store(x + j, dot);
    }
    *sum = vf_sum_lanes(all);
    *rate = vf_sum_lanes(rates);
}

/* O' for the new mean. */
static ALWAYS_INLINE void move_mean(const cpu_strip_rates *t, int32_t i, float by)
{
    const float *o = t->o + (int64_t)i * t->o_ld;
    float *dot = t->o_dot + (int64_t)i * t->o_ld;
    for (int32_t d = 0; d < t->o_ld; d += VF)
        vf_store(dot + d, vf_fma(vf_set(by), vf_load(o + d), vf_load(dot + d)));
}

/* m, l, c and alpha of row i, its weights in f32. */
static ALWAYS_INLINE void take_row(const cpu_strip_rates *t, int32_t i)
{
    const int64_t at = (int64_t)i * t->ld;
    const float new_m = row_max(t->s + at, t->n, t->m[i]);
    const float base = new_m == -INFINITY ? 0 : new_m;
    const float alpha = row_scale(t->m[i], base);
    float sum, rate;
    if (is_fused_at(base))
        weigh(t, at, base, 1, &sum, &rate);
    else
        weigh(t, at, base, 0, &sum, &rate);
    const float before = t->l[i] * alpha, l = before + sum;
    /* the old mean and what the block moves it by */
    const float c = l == 0 ? 0 : t->c[i] + (rate - t->c[i] * sum) / l;
    if (before != 0)
        move_mean(t, i, t->c[i] - c);
    t->rest[i] = alpha * t->rest[i] + (t->c[i] - c) * before;
    t->m[i] = new_m;
    t->l[i] = l;
    t->c[i] = c;
    t->alpha[i] = alpha;
}

/* P and P' of rows as `store` writes them. */
#define RATES(name, element, store)                                            \
    static CPU_RATES(name)                                                     \
    {                                                                          \
        for (int32_t i = 0; i < strip->rows; i++) {                            \
            float *s = strip->s + (int64_t)i * strip->ld;                      \
            float *x = strip->x + (int64_t)i * strip->ld;                      \
            element *p = (element *)(void *)s, *dot = (element *)(void *)x;    \
            take_row(strip, i);                                                \
            const vf c = vf_set(strip->c[i]);                                  \
            vf rest = vf_set(0);                                               \
            for (int32_t j = 0; j < strip->n; j += VF) {                       \
                const vf w = vf_load(s + j);                                   \
                const vf rate = vf_where_nonzero(w, w * (vf_load(x + j) - c)); \
                rest += rate;                                                  \
                store(p + j, w);                                               \
                store(dot + j, rate);                                          \
            }                                                                  \
            strip->rest[i] += vf_sum_lanes(rest);                              \
        }                                                                      \
    }

RATES(weights_bf16, bf16, store_bf16)

/* Tiles take 32 keys: the odd 16 get weight 0. */
static CPU_RATES(weights_tiles)
{
    weights_bf16(strip);
    for (int32_t i = 0; i < strip->rows && strip->n % 32; i++) {
        memset((bf16 *)(void *)(strip->s + (int64_t)i * strip->ld) + strip->n, 0, 32);
        memset((bf16 *)(void *)(strip->x + (int64_t)i * strip->ld) + strip->n, 0, 32);
    }
}

const cpu_tangent_kernels LEVEL_NAME(cpu_tangent_bf16_tiles) = {
    .block = &LEVEL_NAME(cpu_bf16_tiles),
    .weights = weights_tiles,
};

#if defined(LEVEL_AMX)
const cpu_tangent_kernels cpu_tangent_bf16_dot = {
    .block = &cpu_bf16_dot,
    .weights = weights_bf16,
};
#else
RATES(weights_f32, float, vf_store)

const cpu_tangent_kernels LEVEL_NAME(cpu_tangent_f32) = {
    .block = &LEVEL_NAME(cpu_f32),
    .weights = weights_f32,
};
#endif
