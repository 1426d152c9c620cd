/* What a row's lse is good for. */
#pragma once

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
