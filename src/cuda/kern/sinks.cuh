/* Sinks: a logit of each row that takes part in its sum and has no value. They are added where
 * a row ends, once for all parts of its keys, so that no loop knows of them. CFG_SINKS
 * is their dtype (f32, bf16 or f16), 0: there are none. */
#pragma once

#include "dtype_numbers.h"

#if CFG_SINKS
/* of row m; NaN for +INF */
DEVICE float sink_of(const cu_fwd &p, int b, int h, int m)
{
    long long at = b * p.sinks_s.b + h * p.sinks_s.h + m * p.sinks_s.n;
    float x;
#if CFG_SINKS == DTYPE_F32
    x = __ldg((const float *)p.sinks + at);
#elif CFG_SINKS == DTYPE_BF16
    x = __uint_as_float((u32)__ldg((const u16 *)p.sinks + at) << 16);
#else
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(__ldg((const u16 *)p.sinks + at)));
#endif
    return x == -NEG_INF ? __int_as_float(0x7fffffff) : x;
}

/* 1 / sum and lse of a row whose weights are relative to offset m, in log2 units, and sum to l:
 * with its sink. The larger of both takes the sum's place, so that nothing overflows. */
DEVICE void add_sink(float sink, float m, float l, float &inv, float &lse)
{
    if (sink == NEG_INF)
        return;
    if (l == 0.f) {
        lse = sink;
        return;
    }
    float high = sink * 1.4426950408889634f;
    float low = fabsf(high) < 1e30f ? fmaf(sink, 1.4426950408889634f, -high) : 0.f;
    float over = high - m + low;
    if (over > 0.f) {
        float by = exp2f(-over), sum = fmaf(l, by, 1.f);
        inv = by / sum;
        lse = sink + log2f(sum) * 0.6931471805599453f;
    } else {
        float sum = l + exp2f(over);
        inv = 1.f / sum;
        lse = (m + log2f(sum)) * 0.6931471805599453f;
    }
}

/* add_sink for m in natural units. */
DEVICE void add_sink_exact(float sink, float m, float l, float &inv, float &lse)
{
    if (sink == NEG_INF)
        return;
    if (l == 0.f) {
        lse = sink;
    } else if (sink > m) {
        float by = expf(m - sink), sum = fmaf(l, by, 1.f);
        inv = by / sum;
        lse = sink + logf(sum);
    } else {
        float sum = l + expf(sink - m);
        inv = 1.f / sum;
        lse = m + logf(sum);
    }
}
#endif
