/* Parts of a span brought together: warps of a CTA and CTAs of a cluster through shared memory,
 * CTAs that cut a span through global memory. */
#pragma once

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

/* where the flag of row r of span s is: there are fewer than 2^31 */
DEVICE int flag_of(const cu_fwd &p, const span &s, int r)
{
    packed_row x = unpack_row(p, s, s.row0 + r);
    return (s.b * p.H + x.h) * p.decode.flags + x.m;
}

/* Row r of span s, its offset, sum and maximum known: one over the sum, sink included. */
DEVICE float row_inverse(const cu_fwd &p, const span &s, int r, float3 x)
{
    float inv = x.y == 0.f ? 0.f : rcp_fast(x.y);
#if CFG_SINKS
    packed_row at = unpack_row(p, s, s.row0 + r);
    float lse;
    add_sink(sink_of(p, s.b, at.h, at.m), x.x, x.y, inv, lse);
#endif
    return inv;
}

/* Writes lse and the row maximum of row r of span s. */
DEVICE void finish_row(const cu_fwd &p, const span &s, int r, float3 x)
{
    packed_row at = unpack_row(p, s, s.row0 + r);
    float lse = x.y == 0.f ? NEG_INF : (x.x + log2f(x.y)) * 0.6931471805599453f;
#if CFG_SINKS
    float inv;
    add_sink(sink_of(p, s.b, at.h, at.m), x.x, x.y, inv, lse);
#endif
    put_lse(p, s.b, at.h, span_row(s, at.m), lse);
    put_row_max(p, s.b, at.h, span_row(s, at.m), x.z * 0.6931471805599453f);
}

DEVICE out_elem *output_row(const cu_fwd &p, const span &s, int r)
{
    packed_row x = unpack_row(p, s, s.row0 + r);
    return (out_elem *)p.o + s.b * p.os.b + x.h * p.os.h + span_row(s, x.m) * p.os.n;
}

/* ---- rows to be made again by the careful path, being non-finite or without their sum ---- */

DEVICE void redo_packed(const cu_fwd &p, const mod_args &mod, int b, packed_row at)
{
    __syncwarp(); /* the row is there, written by other lanes */
    tile t = batch_of(p, b);
    t.h = at.h;
    redo_row(p, mod, t, at.m);
}

/* Row r of a span. Rare: one out-of-line copy for all callers. */
__device__ __noinline__ void redo_at(const cu_fwd &p, const mod_args &mod, span s, int r)
{
    redo_packed(p, mod, s.b, unpack_row(p, s, s.row0 + r));
}

/* Where no other kernel follows, rows of a warp hang in a chain through p.flags. lost: the one
 * that it begins with; -1: none. */
DEVICE void chain_row(const cu_fwd &p, const span &s, int r, int &lost)
{
    int at = flag_of(p, s, r);
    if ((threadIdx.x & 31) == 0)
        p.flags[at] = lost;
    lost = at;
}

/* The rows of a warp's chain. There is no call here: where warps take registers from each other
 * ptxas allows none. */
DEVICE void redo_chain(const cu_fwd &p, const mod_args &mod, int lost)
{
#pragma unroll 1
    while (lost >= 0) {
        int head = lost / p.decode.flags, b = head / p.H;
        packed_row at = {head - b * p.H, lost - head * p.decode.flags};
        redo_packed(p, mod, b, at);
        lost = *(volatile int *)&p.flags[lost];
    }
}

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

/* ---- CTAs that cut a span between them ---- */

enum {
    JOIN_WARPS = 4,
    JOIN_EACH = 8,                   /* pieces that a warp has under way at once */
    JOIN_PARTS = (CFG_E + 127) / 128 /* of four columns a lane */
};

/* Where a piece of a cut span lies: each CTA has a place for the piece that a span begins with,
 * and before it one for the rest of a span that another CTA began. */
DEVICE int piece_slot(int cta, int begins_span)
{
    return 2 * cta + begins_span;
}

/* Piece j of a span, counted from the place that join_row is given: that of its first piece
 * where pieces are fixed, else of its first CTA's rest of another span. */
DEVICE long long piece_of(int j)
{
    return IS_FIXED ? j : j ? 2 * j : 1;
}

struct join_pieces {
    float4 o[JOIN_EACH][JOIN_PARTS];
    float m[JOIN_EACH];
};

/* of pieces from, from + N, ... those of [least, count), this lane's columns */
template <int N>
DEVICE void join_load(join_pieces &x, const cu_fwd &p, long long row, int from, int least,
                      int count)
{
    int column = 4 * (threadIdx.x & 31);
#pragma unroll
    for (int i = 0; i < JOIN_EACH; i++) {
        int j = from + i * N;
        int is_there = j >= least && j < count;
        x.m[i] = M_START;
        if (is_there)
            x.m[i] = load_new4(p.part_ml + (row + piece_of(j) * ROWS) * 4).x;
#pragma unroll
        for (int e = 0; e < JOIN_PARTS; e++) {
            x.o[i][e] = make_float4(0.f, 0.f, 0.f, 0.f);
            if (is_there && column + 128 * e < CFG_E)
                x.o[i][e] =
                    load_new4(p.part_o + (row + piece_of(j) * ROWS) * CFG_E + column + 128 * e);
        }
    }
}

/* (m, l, peak) of pieces [least, count); which lane adds a piece follows from its number */
DEVICE float3 join_sums(const cu_fwd &p, long long row, int least, int count)
{
    int lane = threadIdx.x & 31;
    float3 sum = make_float3(M_START, 0.f, NEG_INF);
    for (int j = least / 32 * 32 + lane; j < count; j += 32) {
        if (j < least)
            continue;
        float4 ml = load_new4(p.part_ml + (row + piece_of(j) * ROWS) * 4);
        float m = fmaxf(sum.x, ml.x);
        sum.y = sum.y * exp2_fast(sum.x - m) + ml.y * exp2_fast(ml.x - m);
        sum.x = m;
        sum.z = fmaxf(sum.z, ml.z);
    }
    float m = sum.x;
    for (int i = 16; i; i /= 2) {
        m = fmaxf(m, __shfl_xor_sync(~0u, m, i));
        sum.z = fmaxf(sum.z, __shfl_xor_sync(~0u, sum.z, i));
    }
    sum.y *= exp2_fast(sum.x - m);
    for (int i = 16; i; i /= 2)
        sum.y += __shfl_xor_sync(~0u, sum.y, i);
    sum.x = m;
    return sum;
}

/* Row r of a cut span by N warps, JOIN_WARPS of a CTA or one, of pieces [least, count) from
 * slot on: warps take every Nth piece, lanes own columns. Returns whether it is not finite, to
 * the first warp. */
template <int N>
DEVICE int join_row(const cu_fwd &p, const span &s, int slot, int least, int count, int r)
{
    enum { CHUNK = N * JOIN_EACH };
    __shared__ float4 shared[JOIN_WARPS][JOIN_PARTS][32];
    int lane = threadIdx.x & 31, warp = N > 1 ? threadIdx.x / 32 : 0;
    long long row = (long long)slot * ROWS + r;
    join_pieces x;
    float4 o[JOIN_PARTS] = {};
    int begin = least / CHUNK * CHUNK;
    join_load<N>(x, p, row, begin + warp, least, count);
    float3 sum = join_sums(p, row, least, count);
    for (int j0 = begin; j0 < count; j0 += CHUNK) {
        if (j0 != begin)
            join_load<N>(x, p, row, j0 + warp, least, count);
#pragma unroll
        for (int i = 0; i < JOIN_EACH; i++) {
            float by = exp2_fast(x.m[i] - sum.x);
#pragma unroll
            for (int e = 0; e < JOIN_PARTS; e++) {
                o[e].x = fmaf(x.o[i][e].x, by, o[e].x);
                o[e].y = fmaf(x.o[i][e].y, by, o[e].y);
                o[e].z = fmaf(x.o[i][e].z, by, o[e].z);
                o[e].w = fmaf(x.o[i][e].w, by, o[e].w);
            }
        }
    }
    if (N > 1) {
        for (int e = 0; e < JOIN_PARTS; e++)
            shared[warp][e][lane] = o[e];
        __syncthreads();
        if (warp)
            return 0;
    }
    float inv = row_inverse(p, s, r, sum), zero = 0.f;
    for (int e = 0; e < JOIN_PARTS; e++) {
        float4 y = o[e];
        for (int i = 1; i < N; i++) {
            float4 other = shared[i][e][lane];
            y.x += other.x;
            y.y += other.y;
            y.z += other.z;
            y.w += other.w;
        }
        zero = fmaf(y.x + y.y, 0.f, fmaf(y.z + y.w, 0.f, zero));
        int column = 4 * lane + 128 * e;
        if (column < CFG_E_REAL)
            store_out4(output_row(p, s, r) + column, y.x * inv, y.y * inv, y.z * inv,
                       y.w * inv);
    }
    if (lane == 0)
        finish_row(p, s, r, sum);
    return __any_sync(~0u, zero != 0.f) || row_is_lost(sum.x, sum.y);
}

/* Rows blockIdx.y, blockIdx.y + 16, ... of a span that was cut: a warp has one, where its
 * pieces are few, else a CTA has one after the other. */
DEVICE void join_rows(const cu_fwd &p, const mod_args &mod, const span &s, int slot, int count)
{
    int rows = span_rows(p, s), warp = threadIdx.x / 32;
    if (SHARERS > 1 && count <= JOIN_EACH) {
        int r = blockIdx.y + 16 * warp;
        if (r < rows && join_row<1>(p, s, slot, 0, count, r))
            redo_at(p, mod, s, r);
        return;
    }
#pragma unroll 1
    for (int r = blockIdx.y; r < rows; r += 16) {
        if (join_row<JOIN_WARPS>(p, s, slot, 0, count, r))
            redo_at(p, mod, s, r);
        __syncthreads();
    }
}

/* Rows flagged by `decode`, shared out over all CTAs. */
DEVICE void redo_flagged(const cu_fwd &p, const mod_args &mod)
{
    int each = p.decode.flags, rows = p.B * p.H * each, step = gridDim.x * gridDim.y * 128;
#pragma unroll 1
    for (int first = (blockIdx.y * gridDim.x + blockIdx.x) * 128; first < rows; first += step) {
        int mine = first + threadIdx.x;
        if (!__syncthreads_or(mine < rows && load_new(p.flags + mine)))
            continue;
#pragma unroll 1
        for (int i = first + threadIdx.x / 32; i < min(first + 128, rows); i += 4) {
            if (!load_new(p.flags + i))
                continue;
            int head = i / each, b = head / p.H, h = head % p.H, g = h / p.decode.group;
            int m = i % each, at = b * p.G + g; /* of spans, but for their tiles */
            span s = span_place(p, at * p.decode.tiles);
            s.row0 = 0;
#if CFG_RAGGED
            if (m >= s.q_len) /* nobody has written its flag */
                continue;
            redo_at(p, mod, s, (h - g * p.decode.group) * s.q_len + m);
#else
            redo_at(p, mod, s, (h - g * p.decode.group) * p.M + m);
#endif
        }
    }
}
