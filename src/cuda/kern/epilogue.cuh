/* The end of a tile: statistics of its rows, rows to be done again, and O to global memory. */
#pragma once

#include "sinks.cuh"
#include "softmax.cuh"
#include "tile.cuh"

/* Statistics of row m; a null tensor is not wanted. */
DEVICE void put_lse(const cu_fwd &p, int b, int h, int m, float x)
{
    if (p.lse)
        p.lse[b * p.lse_s.b + h * p.lse_s.h + m * p.lse_s.n] = x;
}

DEVICE void put_row_max(const cu_fwd &p, int b, int h, int m, float x)
{
    if (p.row_max)
        p.row_max[b * p.max_s.b + h * p.max_s.h + m * p.max_s.n] = x;
}

#if CFG_INVARIANT
/* Rows of the warp's 16 that a lane says something of, a bit each: of a thread's first row, and
 * of its second. */
DEVICE u32 rows_with(int first, int second)
{
    u32 rows = 0, a = __ballot_sync(~0u, first), b = __ballot_sync(~0u, second);
#pragma unroll
    for (int i = 0; i < 8; i++)
        rows |= ((a >> 4 * i & 15) != 0) << i | ((b >> 4 * i & 15) != 0) << (8 + i);
    return rows;
}
#endif

/* Ends the rows of a thread: writes lse and maximum, and sets inv to 1 / sum, or to 0 for a row
 * without a live key. Returns whether a result of the warp's 16 rows is not finite or a sum is
 * lost: they are to be made again, since a NaN may have lain in V at a masked key. It has a bit
 * for each row; where a row's bits follow from it alone only such rows have theirs set. */
template <int COUNT>
DEVICE int rows_end(row_state &w, const cu_fwd &p, const tile &t, const float (&o)[COUNT],
                    float (&inv)[2])
{
    enum { APART = CFG_INVARIANT ? 2 : 1 };
    float zero[2] = {0.f, 0.f}; /* turn NaN with the first element that is not finite */
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        zero[i / 2 % APART] = fmaf(o[i], 0.f, zero[i / 2 % APART]);
    int bad = zero[0] != 0.f;
#if CFG_INVARIANT
    int bad_row[2] = {zero[0] != 0.f, zero[1] != 0.f};
#endif
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float l = quad_sum(w.l[i]);
        inv[i] = l == 0.f ? 0.f : 1.f / l;
#if CFG_INVARIANT
        bad_row[i] |= row_is_lost(w.m[i], l);
#else
        bad |= row_is_lost(w.m[i], l);
#endif
#if CFG_ROWMAX
        float peak = quad_max(w.peak[i]);
#endif
        int m = t.row0 + row_of_thread() + 8 * i;
#if CFG_SINKS
        float lse = l == 0.f ? NEG_INF : (w.m[i] + log2f(l)) * 0.6931471805599453f;
        add_sink(sink_of(p, t.b, t.h, min(m, rows_of(p, t) - 1)), w.m[i], l, inv[i], lse);
#endif
        if ((threadIdx.x & 3) == 0 && part_of_thread() == 0 && m < rows_of(p, t)) {
#if CFG_SINKS
            put_lse(p, t.b, t.h, row_place(t, m), lse);
#else
            put_lse(p, t.b, t.h, row_place(t, m),
                    l == 0.f ? NEG_INF : (w.m[i] + log2f(l)) * 0.6931471805599453f);
#endif
#if CFG_ROWMAX
            put_row_max(p, t.b, t.h, row_place(t, m), peak * 0.6931471805599453f);
#endif
        }
#if CFG_DROP
        inv[i] *= p.drop.factor;
#endif
    }
#if CFG_INVARIANT
    bad = rows_with(bad_row[0], bad_row[1]);
#endif
#if CFG_ROW_WARPS > 1
    bad = __syncthreads_or(bad); /* one flag for all warps; good rows are made again in vain */
#endif
#if !CFG_INVARIANT || CFG_ROW_WARPS > 1
    bad = __any_sync(~0u, bad) ? (1 << 16) - 1 : 0;
#endif
    return bad;
}

/* rows_end; then each warp flags its bad rows for the careful kernel. Returns whether it has
 * some. */
template <int COUNT>
DEVICE int rows_finish(row_state &w, const cu_fwd &p, const tile &t, const float (&o)[COUNT],
                        float (&inv)[2])
{
    int lane = threadIdx.x & 31, bad = rows_end(w, p, t, o, inv);
    if (lane == 0)
        p.flags[t.id * p.tile_groups + group_of_thread()] = bad;
    return bad != 0;
}

#if CFG_RAGGED
/* Whether the tile lies past its sequence, or is decode's; then nothing of it is to be done
 * again. */
DEVICE int tile_is_empty(const cu_fwd &p, const tile &t)
{
    if (t.row0 < t.q_len && t.q_len >= p.ragged.least)
        return 0;
    if (threadIdx.x < p.tile_groups)
        p.flags[t.id * p.tile_groups + threadIdx.x] = 0;
    return 1;
}
#endif

#if CFG_F32
/* Writes O / l: a thread has 8 neighbouring columns of each panel (mma32.cuh). */
template <int COUNT>
DEVICE void rows_store(const cu_fwd &p, const tile &t, const float (&o)[COUNT],
                       const float (&inv)[2])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int m = t.row0 + row_of_thread() + 8 * i;
        float *row = (float *)p.o + t.b * p.os.b + t.h * p.os.h + row_place(t, m) * p.os.n;
#pragma unroll
        for (int g = 0; g < COUNT / 8; g++) {
            int column =
                part_of_thread() * COUNT * 2 + g / 2 * 32 + 8 * (threadIdx.x & 3) + g % 2 * 4;
            const float *x = &o[g / 2 * 16 + g % 2 + 2 * i];
            if (m >= rows_of(p, t) || column >= CFG_E_REAL)
                continue;
            if (!p.is_plain) {
                *(float4 *)(row + column) =
                    make_float4(x[0] * inv[i], x[4] * inv[i], x[8] * inv[i], x[12] * inv[i]);
                continue;
            }
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (column + j < CFG_E_REAL)
                    row[column + j] = x[4 * j] * inv[i];
        }
    }
}
#elif CFG_OUT_F32
/* Writes O / l in f32: a thread has two neighbours of every eight columns. */
template <int COUNT>
DEVICE void rows_store(const cu_fwd &p, const tile &t, const float (&o)[COUNT],
                       const float (&inv)[2])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int m = t.row0 + row_of_thread() + 8 * i;
        float *row = (float *)p.o + t.b * p.os.b + t.h * p.os.h + row_place(t, m) * p.os.n;
#pragma unroll
        for (int g = 0; g < COUNT / 4; g++) {
            int column = 8 * g + 2 * (threadIdx.x & 3);
            float x = o[4 * g + 2 * i] * inv[i], y = o[4 * g + 2 * i + 1] * inv[i];
            if (m >= rows_of(p, t) || column >= CFG_E_REAL)
                continue;
            if (!p.is_plain) {
                *(float2 *)(row + column) = make_float2(x, y);
                continue;
            }
            row[column] = x;
            if (column + 1 < CFG_E_REAL)
                row[column + 1] = y;
        }
    }
}
#else
DEVICE void store_plain(u16 *to, const u32 (&w)[4], int count)
{
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < count)
            to[i] = (u16)(w[i / 2] >> (i & 1) * 16);
}

/* Writes O / l straight from registers, 16 bytes a lane. */
template <int COUNT>
DEVICE void rows_store(const cu_fwd &p, const tile &t, const float (&o)[COUNT],
                       const float (&inv)[2])
{
    enum { CHUNKS = COUNT / 4 }; /* of 8 columns */
    int j = threadIdx.x & 3;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int m = t.row0 + row_of_thread() + 8 * i;
        u16 *row = (u16 *)p.o + t.b * p.os.b + t.h * p.os.h + row_place(t, m) * p.os.n;
#pragma unroll
        for (int g = 0; g < CHUNKS; g += 4) {
            u32 w[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                int at = g + k < CHUNKS ? 4 * (g + k) + 2 * i : 0;
                w[k] = pack(o[at] * inv[i], o[at + 1] * inv[i]);
            }
            quad_transpose(w);
            if (m >= rows_of(p, t) || (g + j) * 8 >= CFG_E_REAL)
                continue;
            u16 *to = row + (g + j) * 8;
#if CFG_SM < 90
            if (p.is_plain) {
                store_plain(to, w, CFG_E_REAL - (g + j) * 8);
                continue;
            }
#endif
            *(uint4 *)to = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
}
#endif
