/* The unit of a row's sums where dQ is summed in fixed point, from what no partial sum passes:
 *
 *     |sum_j P_ij (dO_i . V_j - delta_i) K_jd| <= (|dO_i| max_j |V_j| + |delta_i|) max |K|
 *
 * The two maxima of a key head lie in n_bounds parts, as bits: without a sign, larger
 * magnitudes are larger numbers. Elements that are not finite are left out: a row that such a
 * key is live for has an out or an lse that is not a number, and so no unit. */
#pragma once

struct key_bounds {
    float k, v; /* largest |element| of K and |row| of V */
};

/* by all lanes of a warp */
DEVICE key_bounds bounds_of(const cu_bwd &p, int bg)
{
    int part = min((int)threadIdx.x & 31, p.n_bounds - 1);
    const u32 *at = p.bounds + ((long long)bg * p.n_bounds + part) * 2;
    u32 k, v;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(k), "=r"(v) : "l"(at));
    return {__uint_as_float(__reduce_max_sync(~0u, k)),
            __uint_as_float(__reduce_max_sync(~0u, v))};
}

/* One over the unit: 31 bits for the bound, a tenth of them for rounding. 0 where all is 0, NaN
 * where something is not finite. */
DEVICE float precision_of(const key_bounds &most, float norm, float delta)
{
    float bound = fmaf(norm, most.v, fabsf(delta)) * most.k;
    if (bound == 0.f)
        return 0.f;
    return bound < 3e38f ? fminf(1.93e9f / bound, 1e37f) : __int_as_float(0x7fffffff);
}
