/* Parts of a span brought together through shared memory: of the warps of a CTA, and of the
 * CTAs of a cluster. */
#pragma once

#include "decode_finish.cuh"

/* ---- warps of a CTA ---- */

/* shared: O of half the streams, [HALF][ROWS][O_STEP], and (m, l, peak), [STREAMS][ROWS][4] */
struct reduce_memory {
    float *o, *ml, *sum; /* sum: (m, l, peak) of the CTA's rows, where a cluster reads them */
};

#if CFG_COLUMN_PARTS == 1
#if CFG_CODES
/* where element i of this thread's accumulators lies in the O of place w */
DEVICE float *reduce_warps_place(const reduce_memory &sh, int w, int i)
{
    int row = w * ROWS + (threadIdx.x & 31) / 4 + (i & 2) * 4, tile = i / 4;
    return sh.o + row * O_STEP + tile / PAIRS * (128 / CODE_BITS)
           + code_column(tile % PAIRS, i & 1);
}

DEVICE void reduce_warps_put(const reduce_memory &sh, const fragment &f, int w)
{
#pragma unroll
    for (int i = 0; i < O_COUNT; i++)
        *reduce_warps_place(sh, w, i) = f.o[i];
}

DEVICE void reduce_warps_add(const reduce_memory &sh, fragment &f, int w)
{
#pragma unroll
    for (int i = 0; i < O_COUNT; i++)
        f.o[i] += *reduce_warps_place(sh, w, i);
}
#else
/* where this thread's accumulators lie in the O of place w */
DEVICE float *reduce_warps_place(const reduce_memory &sh, int w)
{
    int lane = threadIdx.x & 31;
    return sh.o + (w * ROWS + warp_row() + lane / 4) * O_STEP + 2 * (lane & 3);
}

DEVICE void reduce_warps_put(const reduce_memory &sh, const fragment &f, int w)
{
    float *o = reduce_warps_place(sh, w);
#pragma unroll
    for (int g = 0; g < CFG_E / 8; g++) {
        *(float2 *)(o + 8 * g) = make_float2(f.o[4 * g], f.o[4 * g + 1]);
        *(float2 *)(o + 8 * O_STEP + 8 * g) = make_float2(f.o[4 * g + 2], f.o[4 * g + 3]);
    }
}

DEVICE void reduce_warps_add(const reduce_memory &sh, fragment &f, int w)
{
    const float *o = reduce_warps_place(sh, w);
#pragma unroll
    for (int g = 0; g < CFG_E / 8; g++) {
        float2 a = *(const float2 *)(o + 8 * g), b = *(const float2 *)(o + 8 * O_STEP + 8 * g);
        f.o[4 * g] += a.x;
        f.o[4 * g + 1] += a.y;
        f.o[4 * g + 2] += b.x;
        f.o[4 * g + 3] += b.y;
    }
}
#endif

/* The warps' rows to shared memory, brought to one offset: the upper half of the streams adds
 * its own to the lower half's, whose sums are there for all on return. */
DEVICE void reduce_warps(const reduce_memory &sh, fragment &f)
{
    int row = warp_row() + (threadIdx.x & 31) / 4, mine = stream_of_warp();
    float l[2] = {quad_sum(f.rows.l[0]), quad_sum(f.rows.l[1])};
    float peak[2] = {quad_max(f.rows.peak[0]), quad_max(f.rows.peak[1])}, by[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float *ml = sh.ml + (mine * ROWS + row + 8 * i) * 4;
        if ((threadIdx.x & 3) == 0) {
            ml[0] = f.rows.m[i];
            ml[1] = l[i];
            ml[2] = peak[i];
        }
    }
    sync_rows();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float m = M_START;
        for (int w = 0; w < STREAMS; w++)
            m = fmaxf(m, sh.ml[(w * ROWS + row + 8 * i) * 4]);
        by[i] = exp2_fast(f.rows.m[i] - m);
#if CFG_CODES && HALF_VALUES
        by[i] *= power_of(f.unit);
#endif
    }
    rows_scale(f.o, by);
    if (mine >= HALF)
        reduce_warps_put(sh, f, mine - HALF);
    sync_rows();
    if (mine < HALF)
        reduce_warps_add(sh, f, mine);
    sync_rows();
    if (mine < HALF)
        reduce_warps_put(sh, f, mine);
    sync_rows();
}

/* (m, l, peak) of a row over all streams */
DEVICE float3 reduce_warps_row(const reduce_memory &sh, int row)
{
    float3 x = make_float3(M_START, 0.f, NEG_INF);
    for (int w = 0; w < STREAMS; w++) {
        const float *ml = sh.ml + (w * ROWS + row) * 4;
        x.x = fmaxf(x.x, ml[0]);
        x.z = fmaxf(x.z, ml[2]);
    }
    for (int w = 0; w < STREAMS; w++) {
        const float *ml = sh.ml + (w * ROWS + row) * 4;
        x.y += ml[1] * exp2_fast(ml[0] - x.x);
    }
    return x;
}
#endif

#if CFG_COLUMN_PARTS == 1
/* What row r of a span has for all of its columns: lse and the row maximum of a whole one, or
 * what decode_end joins. Then in sh.sum one over the sum, and whether that is lost. */
DEVICE void write_row_sums(const reduce_memory &sh, const cu_fwd &p, const span &s, int r,
                           int slot, int is_whole)
{
    float3 x = reduce_warps_row(sh, r);
    *(float2 *)(sh.sum + r * 4) = make_float2(row_inverse(p, s, r, x), row_is_lost(x.x, x.y));
    if (is_whole)
        return finish_row(p, s, r, x);
    float *ml = p.part_ml + ((long long)slot * ROWS + r) * 4;
    ml[0] = x.x;
    ml[1] = x.y;
    ml[2] = x.z;
}

/* The columns of row r by a warp; returns whether one of them is not finite. */
DEVICE int write_row(const reduce_memory &sh, const cu_fwd &p, const span &s, int r, int slot,
                     int is_whole, float inv)
{
    float zero = 0.f;
#pragma unroll
    for (int e = 4 * (threadIdx.x & 31); e < CFG_E; e += 128) {
        float4 y = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int w = 0; w < HALF; w++) {
            float4 part = *(const float4 *)(sh.o + (w * ROWS + r) * O_STEP + e);
            y = make_float4(y.x + part.x, y.y + part.y, y.z + part.z, y.w + part.w);
        }
        zero = fmaf(y.x + y.y, 0.f, fmaf(y.z + y.w, 0.f, zero));
        if (!is_whole)
            *(float4 *)(p.part_o + ((long long)slot * ROWS + r) * CFG_E + e) = y;
        else if (e < CFG_E_REAL)
            store_out4(output_row(p, s, r) + e, y.x * inv, y.y * inv, y.z * inv, y.w * inv);
    }
    return __any_sync(~0u, zero != 0.f);
}

/* A span's result, or its part for decode_end. */
DEVICE void write_piece(const reduce_memory &sh, const cu_fwd &p, const span &s, int slot,
                        int is_whole, int &lost)
{
    int rows = span_rows(p, s);
    for (int r = threadIdx.x; r < rows; r += WARPS * 32)
        write_row_sums(sh, p, s, r, slot, is_whole);
    sync_rows();
#pragma unroll 2
    for (int r = threadIdx.x / 32; r < rows; r += WARPS) {
        float2 x = *(const float2 *)(sh.sum + r * 4);
        int bad = write_row(sh, p, s, r, slot, is_whole, x.x) || x.y != 0.f;
        if (p.decode.cluster) {
            if (bad)
                chain_row(p, s, r, lost);
        } else if ((threadIdx.x & 31) == 0) {
            p.flags[flag_of(p, s, r)] = bad && is_whole;
        }
    }
}

/* ---- CTAs of a cluster, which has a span to itself ---- */

/* Row r out of the shared memory of all CTAs of the cluster; one warp. */
DEVICE void cluster_join(const reduce_memory &sh, const cu_fwd &p, const span &s, int r,
                         int &lost)
{
    int lane = threadIdx.x & 31, n = p.decode.cluster;
    u32 stats = smem_address(sh.sum + r * 4), o = smem_address(sh.o + r * O_STEP);
    float3 sum = make_float3(M_START, 0.f, NEG_INF);
    for (int i = 0; i < n; i++) {
        float4 x = cluster_load(stats, i);
        sum.x = fmaxf(sum.x, x.x);
        sum.z = fmaxf(sum.z, x.z);
    }
    float zero = 0.f;
    float4 y[(CFG_E + 127) / 128] = {};
#pragma unroll 1
    for (int i = 0; i < n; i++) {
        float4 x = cluster_load(stats, i);
        float by = exp2_fast(x.x - sum.x);
        sum.y += x.y * by;
#pragma unroll
        for (int e = 0; e < CFG_E; e += 128)
#pragma unroll
            for (int w = 0; w < HALF; w++)
                if (e + 4 * lane < CFG_E) {
                    float4 part = cluster_load(o + (w * ROWS * O_STEP + e + 4 * lane) * 4, i);
                    y[e / 128].x = fmaf(part.x, by, y[e / 128].x);
                    y[e / 128].y = fmaf(part.y, by, y[e / 128].y);
                    y[e / 128].z = fmaf(part.z, by, y[e / 128].z);
                    y[e / 128].w = fmaf(part.w, by, y[e / 128].w);
                }
    }
    float inv = row_inverse(p, s, r, sum);
    for (int e = 0; e < CFG_E; e += 128) {
        float4 x = y[e / 128];
        zero = fmaf(x.x + x.y, 0.f, fmaf(x.z + x.w, 0.f, zero));
        if (e + 4 * lane < CFG_E_REAL)
            store_out4(output_row(p, s, r) + e + 4 * lane, x.x * inv, x.y * inv, x.z * inv,
                       x.w * inv);
    }
    if (lane == 0)
        finish_row(p, s, r, sum);
    if (__any_sync(~0u, zero != 0.f) || row_is_lost(sum.x, sum.y))
        chain_row(p, s, r, lost);
}

/* After reduce_warps: rows of the span shared out over the warps of the cluster. */
DEVICE void end_span(const reduce_memory &sh, const cu_fwd &p, const span &s, int &lost)
{
    int rank = blockIdx.x % p.decode.cluster, warp = threadIdx.x / 32;
    for (int r = threadIdx.x; r < ROWS; r += WARPS * 32) {
        float3 x = reduce_warps_row(sh, r);
        *(float4 *)(sh.sum + r * 4) = make_float4(x.x, x.y, x.z, 0.f);
    }
    cluster_sync();
#pragma unroll 1
    for (int r = rank + p.decode.cluster * warp; r < span_rows(p, s);
         r += p.decode.cluster * WARPS)
        cluster_join(sh, p, s, r, lost);
    cluster_sync(); /* others may still be reading here */
}
#else
#include "decode_columns_end.cuh"
#endif
