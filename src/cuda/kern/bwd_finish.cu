/* dQ from its sums: scaled, converted, and brought from the order of the summing threads'
 * registers (bwd_sm90.cu, step 5) to rows. One CTA a tile of 64 queries and panel of 64
 * columns. */
#include "cfg.cuh"
#include "ptx.cuh"
#include "bwd.h"
#include "bwd_copy.cuh"
#include "bwd_store.cuh"

enum { PANELS_D = (CFG_D + 63) / 64 };

/* Factor of a row's sums; a row whose bound is not finite becomes NaN. */
DEVICE float row_factor(const cu_bwd &p, long long row)
{
#if CFG_FIXED
    float precision = load_float(p.precision + row);
    return precision == 0.f ? 0.f : p.f.scale / precision;
#else
    return p.f.scale;
#endif
}

DEVICE float summed(float x)
{
#if CFG_FIXED
    return (float)__float_as_int(x);
#else
    return x;
#endif
}

extern "C" __global__ void __launch_bounds__(128) bwd_finish(const __grid_constant__ cu_bwd p)
{
    int tile = blockIdx.x / PANELS_D, part = blockIdx.x % PANELS_D;
    int bh = tile / p.n_mblk, row = threadIdx.x / 32 * 16 + (threadIdx.x & 31) / 4;
    int first = tile % p.n_mblk * BWD_ROWS + row;
    long long at = (long long)tile * BWD_ROWS + row;
    grid_wait_before();
    float f0 = row_factor(p, at), f1 = row_factor(p, at + 8), x[32];
    const float4 *sum = (const float4 *)p.dq_sum + (long long)blockIdx.x * 1024 + threadIdx.x;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float4 s = load_new4((const float *)(sum + i * 128));
        x[4 * i] = summed(s.x) * f0;
        x[4 * i + 1] = summed(s.y) * f0;
        x[4 * i + 2] = summed(s.z) * f1;
        x[4 * i + 3] = summed(s.w) * f1;
    }
    result to = result_of(p, p.dq, p.dqs, bh / p.f.H, bh % p.f.H, part * 64, BWD_OF_Q);
    store_rows(to, first, p.f.M, CFG_D_REAL - part * 64, 1.f, 1, x);
}
