/* Codes brought to a stream's stages by warps that only load. Each copies its keys of a block
 * by 16 bytes, eight lanes to a key, wherever they lie: in one piece, in pages of any size, in
 * sequences. The first two bring the scales of all keys, one K's, one V's. */
#pragma once

#include "gather.cuh"

enum { LOADED = KEYS / LOADS /* keys of a warp */ };
static_assert(LOADS >= 2 && LOADED % 4 == 0, "a warp copies four keys at a time");

/* Arrivals that fill a stage: all lanes' copies, and once for each warp what it stores. */
DEVICE int stage_arrivals(const cu_fwd &p)
{
    return LOADS * (32 + 1);
}

DEVICE int has_next(const stream &w, int end)
{
    return w.ahead.first != NO_BLOCK;
}

DEVICE void stream_begin(stream &w, const cu_fwd &p, const mod_args &mod, const line &l,
                         int end)
{
    ahead_begin(w.ahead, p, mod, l, 1, end);
}

/* The lane's pieces of one key: of ROW bytes REAL are there. from: its codes, or null where
 * there are none; `any`: an address that may be read. What is not there becomes zeros. */
template <int ROW, int REAL>
DEVICE void copy_key(u32 to, const code_byte *from, const code_byte *any)
{
    int at = (threadIdx.x & 7) * 16;
#pragma unroll
    for (int i = 0; i < ROW; i += 128) {
        int is_there = from && at + i < REAL;
        if (at + i < ROW)
            copy16(to + at + i, is_there ? from + at + i : any, is_there);
    }
}

/* The warp's keys of K or V. at: where the lane's key of the block lies. */
template <int ROW, int STEP, int REAL>
DEVICE void copy_keys(u32 to, const code_byte *head, const cu_stride &stride, lane_key at)
{
    long long mine = at.row < 0 ? -1 : at.b * stride.b + at.row * stride.n;
    int first = threadIdx.x / 32 % LOADS * LOADED + (threadIdx.x & 31) / 8;
#pragma unroll
    for (int i = 0; i < LOADED; i += 4) {
        long long from = __shfl_sync(~0u, mine, first + i);
        copy_key<ROW, REAL>(to + (first + i) * STEP, from < 0 ? 0 : head + from, head);
    }
}

DEVICE void load_next(stream &w, const cu_fwd &p, const mod_args &mod, const line &l, int end,
                      const tensor_map *mk, const tensor_map *mv)
{
    int g = w.ahead.at.s.g, lane = threadIdx.x & 31, warp = threadIdx.x / 32 % LOADS;
    u32 to = stage_of(w, w.loads), full = w.full + w.loads % CFG_STAGES * 8;
    lane_key at = find_key(w.ahead, 0, 1);
    k_scale_word k_scale = 0;
    v_scale_word v_scale = 0;
    if (warp == 0)
        find_scale<CFG_K_TOKENS>(k_scale, p.k_scale, g, at);
    if (warp == 1)
        find_scale<CFG_V_TOKENS>(v_scale, p.v_scale, g, at);
    copy_keys<K_ROW, K_STEP, CFG_D_REAL * CODE_BITS / 8>(
        to, (const code_byte *)p.k + g * p.ks.h, p.ks, at);
    copy_keys<V_ROW, V_STEP, CFG_E_REAL * CODE_BITS / 8>(
        to + V_AT, (const code_byte *)p.v + g * p.vs.h, p.vs, at);
    gather_arrive(full);
    char *scales = (char *)__cvta_shared_to_generic(to + SCALES_AT);
    if (warp == 0)
        ((k_scale_word *)scales)[lane] = k_scale;
    if (warp == 1)
        ((v_scale_word *)(scales + 8 * KEYS))[lane] = v_scale;
    __syncwarp();
    barrier_arrive_if(full, lane == 0);
    w.loads++;
    ahead_move(w.ahead, p, mod, l, 1, end);
}

/* The oldest block, when it is there. */
DEVICE u32 await_block(stream &w)
{
    barrier_wait(w.full + w.uses % CFG_STAGES * 8, w.uses / CFG_STAGES & 1);
    return stage_of(w, w.uses);
}
