/* dQ from its sums: scaled, converted, and brought from the order of the summing threads'
 * registers (stage() in bwd_dq.cuh) to rows. One CTA a tile of 64 queries and part of 64
 * columns, or of those that are left.
 *
 * A slope of the head comes in here, so that Q . dQ without it is the gradient of what it is a
 * multiple of: a row's sum of dX times the incoming score. */
#include "cfg.cuh"
#include "ptx.cuh"
#include "bwd.h"
#include "bwd_copy.cuh"
#include "arith.cuh"
#include "mod.cuh"
#include "bwd_tile.cuh"
#include "bwd_row.cuh"
#include "bwd_store.cuh"
#if CFG_TERMS && HAS_SCALES
#include "exact_sum.cuh"
#endif

enum { PANELS_D = (CFG_D + 63) / 64 };

/* Factor of a row's sums; a row whose bound is not finite becomes NaN. */
DEVICE float row_factor(const cu_bwd &p, long long row)
{
#if CFG_FIXED
    float precision = load_float(p.precision + row);
    return precision == 0.f ? 0.f : p.f.scale * BWD_WEIGHT_UNIT / precision;
#else
    return p.f.scale;
#endif
}

/* lift: what so many steps have added to every sum. */
DEVICE float summed(float x, u32 lift)
{
#if CFG_FIXED
    return (float)(int)(__float_as_uint(x) - lift);
#else
    return x;
#endif
}

#if CFG_TERMS && HAS_SCALES
/* Of the CTA's rows: sum of x[row] . q[row]; rows past the end have no sums. */
DEVICE float dot_queries(const cu_bwd &p, const sequence &s, int b, int h, int first,
                         int column, const float (&x)[32])
{
    const u16 *q =
        (const u16 *)p.f.q + b * p.f.qs.b + h * p.f.qs.h + (long long)s.q_first * p.f.qs.n;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
        int row = first + 8 * (i / 2 & 1), at = column + i / 4 * 8 + 2 * (threadIdx.x & 3);
        int has = row < s.q_len && at < CFG_D_REAL;
        u32 two = has ? __ldg((const u32 *)(q + row * p.f.qs.n + at)) : 0;
        sum += x[i] == 0.f ? 0.f : x[i] * to_float((u16)two);
        sum += x[i + 1] == 0.f ? 0.f : x[i + 1] * to_float((u16)(two >> 16));
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2)
        sum += __shfl_xor_sync(~0u, sum, step);
    return sum;
}

DEVICE void add_scales(const cu_bwd &p, const mod_args &mod, const cu_reads &c, int b, int h,
                       float sum)
{
    __shared__ float warps[4];
    if ((threadIdx.x & 31) == 0)
        warps[threadIdx.x / 32] = sum;
    __syncthreads();
    int r = threadIdx.x;
    if (r >= MOD_READS || term_kind(r) != TERM_SCALE || !(c.in_tiles >> r & 1))
        return;
    float x = (warps[0] + warps[1]) + (warps[2] + warps[3]);
    x *= x == 0.f ? 0.f : term_factor(mod, p.f, b, h, r, 0, 0);
    if (x != 0.f)
        add_exactly(c.of[r], read_place(mod, p.f, b, h, r, 0, 0, c.of[r].stride), x);
}
#endif

extern "C" __global__ void __launch_bounds__(128)
    bwd_finish(const __grid_constant__ cu_bwd p, const __grid_constant__ mod_args mod,
               const __grid_constant__ cu_reads reads)
{
    int tile = blockIdx.x / PANELS_D, part = blockIdx.x % PANELS_D;
    int bh = tile / p.n_mblk, row = threadIdx.x / 32 * 16 + (threadIdx.x & 31) / 4;
    int b = bh / p.f.H, h = bh % p.f.H, block = tile % p.n_mblk;
    int first = block * BWD_ROWS + row;
    sequence s = sequence_at(p.f, b);
    grid_wait_before(); /* all CTAs: what comes next waits for this kernel alone */
#if CFG_RAGGED
    if (block >= row_blocks(p, s))
        return;
    tile = row_block(p, s, b, h, block);
#endif
    long long at = (long long)tile * BWD_ROWS + row;
    u32 lift = CFG_FIXED ? load_new((const int *)p.dq_steps + tile) * BWD_LIFT : 0;
    float f0 = row_factor(p, at), f1 = row_factor(p, at + 8), x[32];
    const float *sum = p.dq_sum + (long long)tile * (BWD_ROWS * CFG_D) + part * (BWD_ROWS * 64)
                       + threadIdx.x * 4;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float4 y = make_float4(0.f, 0.f, 0.f, 0.f);
        if (part * 64 + i * 8 < CFG_D)
            y = load_new4(sum + i * 512);
        x[4 * i] = summed(y.x, lift) * f0;
        x[4 * i + 1] = summed(y.y, lift) * f0;
        x[4 * i + 2] = summed(y.z, lift) * f1;
        x[4 * i + 3] = summed(y.w, lift) * f1;
    }
    float slope = 1.f;
#if CFG_TERMS && HAS_SCALES
    add_scales(p, mod, reads, b, h, dot_queries(p, s, b, h, first, part * 64, x));
#endif
#if CFG_LATE_SLOPE
    slope = row_slope(mod, p.f, b, h, 0);
#endif
    result to = result_from(result_of(p, p.dq, p.dqs, b, h, part * 64, BWD_OF_Q), s.q_first);
    store_rows(to, first, s.q_len, CFG_D_REAL - part * 64, slope, 1, x);
}
