/* The second kernel of decode: what CTAs cut between them is joined through global memory. */
#pragma once

#include "decode_finish.cuh"

enum {
    JOIN_WARPS = 4,
    JOIN_EACH = CFG_E > 256 ? 4 : 8, /* pieces that a warp has under way at once */
    JOIN_PARTS = (CFG_E + 127) / 128 /* of four columns a lane */
};

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

/* Every gridDim.y-th row of a span that was cut: a warp has one, where its pieces are few, else
 * a CTA has one after the other. */
DEVICE void join_rows(const cu_fwd &p, const mod_args &mod, const span &s, int slot, int count)
{
    int rows = span_rows(p, s), warp = threadIdx.x / 32;
    if (SHARERS > 1 && count <= JOIN_EACH) {
        int r = blockIdx.y + gridDim.y * warp;
        if (r < rows && join_row<1>(p, s, slot, 0, count, r))
            redo_at(p, mod, s, r);
        return;
    }
#pragma unroll 1
    for (int r = blockIdx.y; r < rows; r += gridDim.y) {
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

/* What a CTA of decode left there of the cut where its share begins. */
DEVICE joint joint_of(const int4 *left)
{
    const int *x = (const int *)left;
    joint j = {load_new(x), load_new(x + 1), load_new(x + 2)};
    return j;
}

/* What the CTA joins: the pieces of span blockIdx.x, or those that CTA blockIdx.x + 1 of decode
 * is the second to have one of. */
DEVICE joint joint_here(const cu_fwd &p)
{
    int n = p.n_split;
    line l = line_of(p);
    joint j = {0, 0, 0};
    if (l.each) {
        shares x = share_out(n, l.each * l.spans);
        int cta =
            p.decode.joins_spans ? share_owner(x, line_at(l, blockIdx.x)) + 1 : blockIdx.x + 1;
        if (cta < n)
            j = joint_at(l, x, cta);
        if (p.decode.joins_spans && j.index != (int)blockIdx.x)
            j.count = 0; /* the span is whole */
    }
    grid_wait_before();
    if (l.each)
        return j;
    if (!p.decode.joins_spans) {
        const int4 *x = (const int4 *)p.done + blockIdx.x + 1;
        if ((int)blockIdx.x + 1 < n)
            j = joint_of(x);
        return j;
    }
    __shared__ joint found;
    if (threadIdx.x == 0)
        found = j;
    __syncthreads();
    for (int i = 1 + threadIdx.x; i < n; i += blockDim.x) {
        joint x = joint_of((const int4 *)p.done + i);
        if (x.count && x.index == (int)blockIdx.x)
            found = x;
    }
    __syncthreads();
    return found;
}

/* One CTA for each cut between shares, or span (x), and row of a span, or some of its rows (y):
 * joins what was cut, then does rows again that are not finite. */
extern "C" __global__ void __launch_bounds__(128, 4)
    decode_end(const __grid_constant__ cu_fwd p, const __grid_constant__ mod_args mod)
{
#if CFG_INVARIANT == 2
    grid_wait_before();
    int at = number_behind(blockIdx.x);
    span s = span_place(p, at);
    span_count(p, mod, s);
    int slot = at * (p.decode.span_blocks / PIECE), r = blockIdx.y;
    if (r < span_rows(p, s)
        && join_row<JOIN_WARPS>(p, s, slot, s.first / PIECE, (s.first + s.n - 1) / PIECE + 1,
                                r))
        redo_at(p, mod, s, r);
#else
    joint j = joint_here(p);
    j.index = number_behind(j.index);
    span s = span_place(p, j.index);
    if (j.count)
        join_rows(p, mod, s, piece_slot(j.first, 0), j.count);
    redo_flagged(p, mod);
#endif
}
