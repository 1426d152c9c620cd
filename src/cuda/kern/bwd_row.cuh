/* What a row's lse is good for. */
#pragma once

/* Hopper's kernels make weights in bf16 2^BWD_WEIGHT_BITS times as large, so that those of 1
 * and of 2^-28 lie in the range of f16, which keeps them for dS with three bits more. Their
 * sums are multiplied by BWD_WEIGHT_UNIT. No weight is above 1.03 (row_lse). */
#define BWD_WEIGHT_BITS (CFG_SM >= 90 && !CFG_F16 && !CFG_F32 ? 14 : 0)
#define BWD_WEIGHT_UNIT (1.f / (1 << BWD_WEIGHT_BITS))

/* The lse that weights are made with, natural units: +INF for a row whose weights are all 0,
 * NaN for one that is not a number or infinite. A row without a live key weighs nothing, and so
 * does one whose |lse| is so large that scores and lse, rounded to f32, leave a weight's
 * exponent uncertain by 1/32 and more (a row of biases at -3e38): its gradients are exact
 * zeros, and the bound of sums in fixed point holds for all others. */
DEVICE float row_lse(float lse)
{
    if (fabsf(lse) <= (float)BWD_LSE_MOST)
        return lse;
    return lse == NEG_INF || fabsf(lse) < -NEG_INF ? -NEG_INF : __int_as_float(0x7fffffff);
}

/* Scores and lse meet in log2 units, in f32 in natural ones, in which the caller gave lse:
 * where both are large (ALiBi far from the diagonal) its rounding would be most of the
 * error. */
#define OF_NATURAL (CFG_F32 ? 1.f : 1.4426950408889634f)

DEVICE float score_unit(const cu_bwd &p)
{
    return CFG_F32 ? p.f.scale : p.unit; /* an operand that takes no register */
}

/* x: a score less lse */
DEVICE float weight_of(float x)
{
    return exp2_fast(CFG_F32 ? x * 1.4426950408889634f : x);
}
