/* Before the backward kernel: what each row of queries brings. delta = rowsum(dO * O) - dlse,
 * negated, for it starts the accumulator of dP; lse in log2 units, of f32 in natural ones; sums
 * of dQ at 0. Where dQ is summed in fixed point, bwd_bounds finds before how large K and V are
 * (bwd_unit.cuh).
 *
 * Rows here are padded to whole query blocks. A few lanes share a row, 16 bytes each. */
#include "cfg.cuh"
#include "ptx.cuh"
#include "bwd.h"
#include "arith.cuh"
#include "mod.cuh"
#include "kv.cuh"
#include "bwd_tile.cuh"
#include "bwd_unit.cuh"
#include "bwd_row.cuh"

enum { DIM = CFG_D > CFG_E ? CFG_D : CFG_E, LANES = BWD_ROW_LANES(DIM) };

/* The kernels of a run are placed while the one before still runs (programmatic launch). */
DEVICE void let_next(void)
{
#if CFG_SM >= 90
    grid_let_next();
#endif
}

DEVICE void wait_before(void)
{
#if CFG_SM >= 90
    grid_wait_before();
#endif
}

DEVICE int key_count(const cu_fwd &p, int b)
{
    int n = p.kv_len.by_batch ? __ldg(p.kv_len.by_batch + (long long)b * p.kv_len.step)
                              : p.kv_len.value;
    return max(0, min(n, p.N));
}

/* eight neighbours of a row that lies on 16 bytes, 0 past its end */
DEVICE void load_whole(float (&x)[8], const float *row, int column, int real)
{
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
        float4 w = column + i < real ? __ldg((const float4 *)(row + column + i))
                                     : make_float4(0.f, 0.f, 0.f, 0.f);
        x[i] = w.x, x[i + 1] = w.y, x[i + 2] = w.z, x[i + 3] = w.w;
    }
}

#if !CFG_F32
DEVICE void load_whole(float (&x)[8], const elem *row, int column, int real)
{
    uint4 w = column < real ? __ldg((const uint4 *)(row + column)) : make_uint4(0, 0, 0, 0);
    u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 8; i++)
        x[i] = to_float((elem)(words[i / 2] >> (i & 1) * 16));
}
#endif

/* eight neighbours of any row, 0 past its end */
template <class ELEMENT>
DEVICE void load_eight(float (&x)[8], const ELEMENT *row, int column, int real, int is_plain)
{
    if (!is_plain) {
        load_whole(x, row, column, real);
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        x[i] = column + i < real ? to_float(__ldg(row + column + i)) : 0.f;
}

DEVICE float sum_of_lanes(float x)
{
#pragma unroll
    for (int i = LANES / 2; i; i /= 2)
        x += __shfl_xor_sync(~0u, x, i);
    return x;
}

enum { NOT_FINITE = 0x7f800000 }; /* magnitudes from here on */

DEVICE u32 magnitude(float x)
{
    return __float_as_uint(x) & 0x7fffffffu;
}

DEVICE float finite_or_0(float x)
{
    return magnitude(x) < NOT_FINITE ? x : 0.f;
}

/* A CTA to a part of the keys of a head. */
extern "C" __global__ void __launch_bounds__(PREPARE_THREADS)
    bwd_bounds(const __grid_constant__ cu_bwd p)
{
    enum { STEP = PREPARE_THREADS / LANES };
    __shared__ u32 most[2][8];
    wait_before(); /* and bwd_prepare may read what the caller's kernels leave at once */
    int part = number_behind(blockIdx.x);
    int bg = part / p.n_bounds, b = bg / p.f.G, g = bg % p.f.G, warp = threadIdx.x / 32;
    int column = threadIdx.x % LANES * 8, n = key_count(p.f, b);
    sequence s = sequence_at(p.f, b);
    n = min(min(n, s.keys), p.key_past);
    let_next();
    int each = ((n - p.key_first + p.n_bounds - 1) / p.n_bounds + STEP - 1) / STEP * STEP;
    int from = p.key_first + part % p.n_bounds * each, to = min(from + each, n);
    row_source k = rows_from(key_rows(p.f, b, g), s.kv_first);
    row_source v = rows_from(value_rows(p.f, b, g), s.kv_first);
    u32 most_k = 0, most_v = 0;
#pragma unroll 4
    for (int first = from; first < to; first += STEP) {
        int at = min(first + (int)threadIdx.x / LANES, to - 1);
        float x[8], y[8], norm = 0.f;
        load_eight(x, row_address(k, at), column, CFG_D_REAL, p.f.is_plain);
        load_eight(y, row_address(v, at), column, CFG_E_REAL, p.f.is_plain);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            most_k = max(most_k, magnitude(finite_or_0(x[i])));
            y[i] = finite_or_0(y[i]);
            norm = fmaf(y[i], y[i], norm);
        }
        most_v = max(most_v, magnitude(sqrtf(sum_of_lanes(norm))));
    }
    most[0][warp] = __reduce_max_sync(~0u, most_k);
    most[1][warp] = __reduce_max_sync(~0u, most_v);
    __syncthreads();
    if (threadIdx.x < 2) {
        u32 x = 0;
        for (int i = 0; i < 8; i++)
            x = max(x, most[threadIdx.x][i]);
        p.bounds[part * 2 + threadIdx.x] = x;
    }
}

/* No larger derivative of the row's scores: of the text, or of the row itself. */
DEVICE float slope_bound(const cu_bwd &p, const mod_args &mod, const sequence &s, int b, int h,
                         int m)
{
#if CFG_LATE_SLOPE
    return 1.f; /* it comes in after the sums */
#elif ROW_SLOPE
    int q_offset, kv_offset, kv_len;
    place_rows(p.f, b, s, q_offset, kv_offset, kv_len);
    int q = m + row_shift(p.f, m) + q_offset;
    return fabsf(row_slope(mod, p.f, b, h, q));
#else
    return p.slope_most;
#endif
}

/* No larger factor of dP. */
DEVICE float most_factor(const cu_fwd &p)
{
    return fmaxf(value_factor(p), 1.f);
}

extern "C" __global__ void __launch_bounds__(PREPARE_THREADS)
    bwd_prepare(const __grid_constant__ cu_bwd p, const __grid_constant__ mod_args mod)
{
    int rows = p.n_mblk * BWD_ROWS, lane = threadIdx.x % LANES, column = lane * 8;
    int id = blockIdx.x * (PREPARE_THREADS / LANES) + threadIdx.x / LANES;
    int bh = id / rows, m = id % rows, b = bh / p.f.H, h = bh % p.f.H;
    sequence s = sequence_at(p.f, min(b, p.f.B - 1));
    int is_row = b < p.f.B && m < s.q_len, at = s.q_first + m;
    float x[8], y[8], dot = 0.f, norm = 0.f, lse = -NEG_INF;
    let_next();
    const out_elem *o = (const out_elem *)p.f.o;
    const elem *d_out = (const elem *)p.d_out;
    if (is_row) {
        o += b * p.f.os.b + h * p.f.os.h + at * p.f.os.n;
        d_out += b * p.dos.b + h * p.dos.h + at * p.dos.n;
        lse = row_lse(p.f.lse[b * p.f.lse_s.b + h * p.f.lse_s.h + at * p.f.lse_s.n]);
    }
    load_eight(x, o, is_row ? column : CFG_E_REAL, CFG_E_REAL, p.f.is_plain);
    load_eight(y, d_out, is_row ? column : CFG_E_REAL, CFG_E_REAL, p.f.is_plain);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        dot = fmaf(x[i], y[i], dot);
        norm = fmaf(y[i], y[i], norm);
    }
    float delta = sum_of_lanes(dot);
    norm = sqrtf(sum_of_lanes(norm));
#if CFG_FIXED
    /* rows of a warp are of one head: padded rows come in whole blocks */
    wait_before();
    key_bounds most = {0.f, 0.f};
    if (p.bounds)
        most = bounds_of(p, min(b, p.f.B - 1) * p.f.G + kv_head(p.f, h));
#endif
    if (blockIdx.x == 0 && threadIdx.x == 0)
        *p.tiles_taken = 0;
    if (b >= p.f.B || m / BWD_ROWS >= row_blocks(p, s))
        return;
    id = row_block(p, s, b, h, m / BWD_ROWS) * BWD_ROWS + m % BWD_ROWS;
    if (is_row && p.dlse)
        delta -= p.dlse[b * p.dlse_s.b + h * p.dlse_s.h + at * p.dlse_s.n];
    if (lse == -NEG_INF) /* weighs nothing: 2^(s - INF) = 0 */
        delta = norm = 0.f;
    if (lane == 0) {
        p.lse2[id] = CFG_F32 ? lse : fmaf(lse, 1.4426950408889634f, -BWD_WEIGHT_BITS);
        p.minus_delta[id] = -delta;
#if CFG_FIXED
        float slope = lse == -NEG_INF ? 0.f : slope_bound(p, mod, s, b, h, m);
        if (p.bounds)
            p.precision[id] = lse == lse ? BWD_WEIGHT_UNIT
                                               * precision_of(most,
                                                              norm * slope * most_factor(p.f),
                                                              delta * slope)
                                         : lse;
#endif
    }
    if (p.dq_sum) {
        for (int i = lane; i < CFG_D / 4; i += LANES)
            ((float4 *)p.dq_sum)[(long long)id * (CFG_D / 4) + i] = make_float4(0, 0, 0, 0);
        if (lane == 0 && id % BWD_ROWS == 0)
            p.dq_steps[id / BWD_ROWS] = 0;
    }
}
