/* One warp of decode: its ring of tensor copies, and products of the blocks in it. */
#pragma once

enum {
    PANELS_D = (CFG_D + 63) / 64,
    PANELS_E = (CFG_E + 63) / 64,
    PANEL = KEYS * 128,
    STAGE = (PANELS_D + PANELS_E) * PANEL
};

/* What one of the warps that load a stream copies of a block. */
DEVICE u32 bytes_of_load()
{
    return (loads_keys() ? PANELS_D * PANEL : 0) + (loads_values() ? PANELS_E * PANEL : 0);
}

/* Arrivals that fill a stage. */
DEVICE int stage_arrivals(const cu_fwd &p)
{
    return LOADS * (CFG_CHUNKS && p.chunks.is_small ? 32 : 1);
}

#if CFG_CHUNKS
#include "decode_ahead.cuh"
#include "gather.cuh"

struct stream {
    u32 buffer, full; /* CFG_STAGES stages; barriers */
#if CFG_SPAN_ROWS > 16
    u32 empty; /* as many: all warps have read the stage */
#endif
    u32 loads, uses;
    lookahead ahead;
};

DEVICE int has_next(const stream &w, int end)
{
    return w.ahead.first != NO_BLOCK;
}

DEVICE cursor &stream_place(stream &w)
{
    return w.ahead.at;
}

/* Keys of a copy. */
DEVICE int copied_keys(const cu_fwd &p)
{
    return p.chunks.is_small ? 1 : p.chunks.box;
}

DEVICE void stream_begin(stream &w, const cu_fwd &p, const mod_args &mod, const line &l,
                         int end)
{
    ahead_begin(w.ahead, p, mod, l, copied_keys(p), end);
}

/* The block's keys of one of K and V by tensor copies, which lane 0 begins. */
template <int PANELS>
DEVICE void load_boxes(u32 to, u32 full, const cu_fwd &p, lane_key mine, int has_b, int h,
                       const tensor_map *map)
{
    int box = p.chunks.box, row = max(0, mine.row);
    int b = mine.row < 0 || mine.b < 0 ? -1 : has_b ? mine.b : 0;
#pragma unroll 1
    for (int i = 0; i < KEYS; i += box) {
        int at_row = __shfl_sync(~0u, row, i / box), at_b = __shfl_sync(~0u, b, i / box);
#pragma unroll
        for (int d = 0; d < PANELS; d++)
            if ((threadIdx.x & 31) == 0)
                copy_box(to + d * PANEL + i * 128, map, d * 64, at_row, h, at_b, full,
                         EVICT_NORMAL);
    }
}

/* The warp's part of the block, K or V or both, by copies of 16 bytes, 32 keys after the
 * other. */
DEVICE void load_rows(u32 to, const lookahead &x, const cu_fwd &p)
{
    int g = x.at.s.g;
#pragma unroll
    for (int i = 0; i < ENTRIES; i++) {
        lane_key mine = find_key(x, i, 1);
        if (loads_keys())
            gather_rows<KEYS, PANELS_D, CFG_D_REAL, 4>(to, 32 * i, key_head(p, 0, g),
                                                       gather_place(mine.b, mine.row, p.ks));
        if (loads_values())
            gather_rows<KEYS, PANELS_E, CFG_E_REAL, 4>(to + PANELS_D * PANEL, 32 * i,
                                                       value_head(p, 0, g),
                                                       gather_place(mine.b, mine.row, p.vs));
    }
}

DEVICE void load_next(stream &w, const cu_fwd &p, const mod_args &mod, const line &l, int end,
                      const tensor_map *mk, const tensor_map *mv)
{
    if (w.ahead.first == NO_BLOCK)
        return;
    span s = w.ahead.at.s;
    int slot = w.loads % CFG_STAGES;
    u32 to = w.buffer + slot * STAGE, full = w.full + slot * 8;
    if (p.chunks.is_small) {
        load_rows(to, w.ahead, p);
        gather_arrive(full);
    } else {
        lane_key mine = find_key(w.ahead, 0, p.chunks.box);
        if ((threadIdx.x & 31) == 0)
            barrier_expect(full, bytes_of_load());
        __syncwarp();
        if (loads_keys())
            load_boxes<PANELS_D>(to, full, p, mine, p.ks.b != 0, key_box(p, s.b, s.g).h, mk);
        if (loads_values())
            load_boxes<PANELS_E>(to + PANELS_D * PANEL, full, p, mine, p.vs.b != 0,
                                 value_box(p, s.b, s.g).h, mv);
    }
    w.loads++;
    ahead_move(w.ahead, p, mod, l, copied_keys(p), end);
}
#else
struct stream {
    u32 buffer, full; /* CFG_STAGES stages; barriers */
#if CFG_SPAN_ROWS > 16
    u32 empty;        /* as many: all warps have read the stage */
#endif
    u32 loads, uses;
    cursor ahead;
};

DEVICE int has_next(const stream &w, int end)
{
    return w.ahead.t < end;
}

DEVICE cursor &stream_place(stream &w)
{
    return w.ahead;
}

DEVICE void stream_begin(stream &w, const cu_fwd &p, const mod_args &mod, const line &l,
                         int end)
{
}

DEVICE void load_next(stream &w, const cu_fwd &p, const mod_args &mod, const line &l, int end,
                      const tensor_map *mk, const tensor_map *mv)
{
    if (cursor_seek(p, mod, l, w.ahead, end))
        prefetch_q(p, w.ahead.s);
    if (w.ahead.t >= end)
        return;
    int partial, slot = w.loads % CFG_STAGES;
    int first =
        span_key(w.ahead.s, block_at(p, w.ahead.s, w.ahead.t - w.ahead.from, partial) * KEYS);
    u32 to = w.buffer + slot * STAGE, full = w.full + slot * 8;
    if ((threadIdx.x & 31) == 0) {
        barrier_expect(full, bytes_of_load());
        head_box k = key_box(p, w.ahead.s.b, w.ahead.s.g);
        head_box v = value_box(p, w.ahead.s.b, w.ahead.s.g);
#pragma unroll
        for (int i = 0; i < PANELS_D && loads_keys(); i++)
            copy_box(to + i * PANEL, mk, i * 64, first, k.h, k.b, full, EVICT_NORMAL);
#pragma unroll
        for (int i = 0; i < PANELS_E && loads_values(); i++)
            copy_box(to + (PANELS_D + i) * PANEL, mv, i * 64, first, v.h, v.b, full,
                     EVICT_NORMAL);
    }
    w.loads++;
    w.ahead.t = next_place(w.ahead.t);
}
#endif

/* The oldest block, when it is there. */
DEVICE u32 await_block(stream &w)
{
    int slot = w.uses % CFG_STAGES;
    barrier_wait(w.full + slot * 8, w.uses / CFG_STAGES & 1);
    return w.buffer + slot * STAGE;
}

/* V beyond the end of the keys may hold anything; 0 * NaN must not be seen. Later tensor copies
 * into the stage come after these stores. */
DEVICE void clear_values(u32 stage, int from)
{
    u32 v = stage + PANELS_D * PANEL;
#pragma unroll 1
    for (int i = threadIdx.x & 31; i < (KEYS - from) * 8 * PANELS_E; i += 32) {
        int row = from + i / (8 * PANELS_E), chunk = i % (8 * PANELS_E);
        asm volatile(
            "st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(swizzled(v, PANEL, row, chunk)),
            "r"(0)
            : "memory");
    }
    fence_async_proxy();
    __syncwarp();
}

/* two neighbours of a row, column elements after `at`; lanes read up to column + 7 */
DEVICE u32 q_pair(const u16 *at, int lane_column, int column)
{
    u32 x = 0;
    if (column + 7 < CFG_D_REAL || lane_column + column < CFG_D_REAL)
        x = *(const u32 *)(at + column);
    return x;
}

/* Rows past the last one repeat it: nobody reads what comes of them. */
DEVICE void load_packed_q(q_fragments &q, const cu_fwd &p, const span &s)
{
    int last = packed_rows(p, s) - 1, lane = threadIdx.x & 31, d = 2 * (lane & 3);
    int row = s.row0 + warp_row() + lane / 4;
    const u16 *row0 = packed_row_address(p, s, min(row, last)) + d;
    const u16 *row1 = packed_row_address(p, s, min(row + 8, last)) + d;
#pragma unroll
    for (int kk = 0; kk < CFG_D / 16; kk++) {
        u32 a[4] = {q_pair(row0, d, kk * 16), q_pair(row1, d, kk * 16),
                    q_pair(row0, d, kk * 16 + 8), q_pair(row1, d, kk * 16 + 8)};
        q_keep(q, kk, a);
    }
}
