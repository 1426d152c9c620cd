/* dK and dV of 64 keys. The first warpgroup makes weights and dV, the second dP and dK: each
 * has the accumulators of one result. Weights go from the first to the second as they lie in
 * registers, 16 bytes of each thread together. */
#pragma once

#include "bwd_keys_arena.cuh"

enum { WEIGHT_BYTES = 128 * sizeof(kept), STAT_BYTES = BWD_ROWS * 4 };

/* 1. Loads, by one thread. */

DEVICE void load_block(const keys_arena &s, const cu_bwd &p, const key_tile &t,
                       const query_walk &walk, const ring<CFG_STAGES> &at,
                       const tensor_map *mq, const tensor_map *mo)
{
    u32 q_full = s.q_full + at.slot * 8, o_full = s.o_full + at.slot * 8;
    int first = walk.block * BWD_ROWS;
    long long row = ((long long)(t.b * p.f.H + walk.h) * p.n_mblk + walk.block) * BWD_ROWS;
    barrier_expect(q_full, D_BYTES + STAT_BYTES);
    load_tile<PANELS_D>(s.q + at.slot * D_BYTES, mq, first, query_box(p.f, t.b, walk.h), q_full,
                        EVICT_LAST);
    copy_bytes(s.lse + at.slot * STAT_BYTES, p.lse2 + row, STAT_BYTES, q_full);
    barrier_wait(s.o_empty + at.slot * 8, at.parity ^ 1);
    barrier_expect(o_full, E_BYTES + STAT_BYTES);
    load_tile<PANELS_E>(s.d_out + at.slot * E_BYTES, mo, first, box_at(p.dos, t.b, walk.h),
                        o_full, EVICT_LAST);
    copy_bytes(s.delta + at.slot * STAT_BYTES, p.minus_delta + row, STAT_BYTES, o_full);
}

DEVICE void load_queries(const keys_arena &s, const cu_bwd &p, const mod_args &mod, int turn,
                         const tensor_map *mq, const tensor_map *mk, const tensor_map *mv,
                         const tensor_map *mo)
{
    key_tile t = key_tile_at(p.f, turn);
    query_walk walk = query_begin(p, t);
    ring<CFG_STAGES> at = {0, 0};
    int more = 1;
    int g = keys_head(p, t);
    barrier_expect(s.k_full, D_BYTES);
    load_tile<PANELS_D>(s.k, mk, t.key0, key_box(p.f, t.b, g), s.k_full, EVICT_FIRST);
    barrier_expect(s.v_full, E_BYTES);
    load_tile<PANELS_E>(s.v, mv, t.key0, value_box(p.f, t.b, g), s.v_full, EVICT_FIRST);
    grid_wait_before();
    grid_let_next();
    while (more) {
        more = query_next(walk, p, mod, t);
        int masked = masked_by(walk.masked, t.key0 + KEYS > t.kv_len);
        int first = walk.block * BWD_ROWS;
        int flags = step_flags(tile_rows_of(p.f, t).q_len - first, masked);
        barrier_wait(s.q_empty + at.slot * 8, at.parity ^ 1);
        store_four(s.steps + at.slot * 16, 0, first + (more ? row_shift(p.f, first) : 0),
                   walk.h, more ? flags : STEP_END);
        if (more) {
            load_block(s, p, t, walk, at, mq, mo);
        } else { /* o_full too may move on only when nobody waits for the turn before */
            barrier_wait(s.o_empty + at.slot * 8, at.parity ^ 1);
            barrier_arrive(s.q_full + at.slot * 8);
            barrier_arrive(s.o_full + at.slot * 8);
        }
        ring_next(at);
    }
}

/* 2. Weights and dV. */

/* After the last block the product runs on stale data and nobody uses its result. */
DEVICE void start_scores(const keys_arena &s, const ring<CFG_STAGES> &at, float (&acc)[S_COUNT],
                         int4 &step)
{
    barrier_wait(s.q_full + at.slot * 8, at.parity);
    step = load_four(s.steps + at.slot * 16);
    wgmma_fence();
    product_scores<CFG_D>(acc, s.k, s.q + at.slot * D_BYTES, 0);
    wgmma_commit();
}

DEVICE void store_words(u32 at, const u32 *x)
{
    store_four(at, x[0], x[1], x[2], x[3]);
}

DEVICE void load_words(u32 *x, u32 at)
{
    int4 y = load_four(at);
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
}

DEVICE void put_weights(const keys_arena &s, u32 n, const kept &weights)
{
    u32 to = s.weights + (n & 1) * WEIGHT_BYTES + (threadIdx.x & 127) * 16;
    barrier_wait(s.weights_empty + (n & 1) * 8, (n >> 1 & 1) ^ 1);
#pragma unroll
    for (int i = 0; i < S_COUNT / 8; i++)
        store_words(to + i * 2048, weights.pairs + 4 * i);
#if KEEPS_BYTES
#pragma unroll
    for (int i = 0; i < S_COUNT / 16; i++)
        store_words(to + (S_COUNT / 8 + i) * 2048, weights.bytes + 4 * i);
#endif
    warp_arrives(s.weights_full + (n & 1) * 8);
}

#if HAS_SLOPES
DEVICE void make_weights(u32 (&w)[S_COUNT / 2], kept &weights, float (&acc)[S_COUNT],
                         weigher &y, u32 drawn, int flags)
{
#pragma unroll
    for (int i = 0; i < S_COUNT / 4; i++) {
        float g[4];
        four_weights(acc + 4 * i, g, y, i);
        pack_four(w, acc + 4 * i, drawn, i);
        keep_four(weights, i, g);
    }
    cut_step(w, weights.pairs, y.p.f, y.mod, y.at, dense_lanes(), flags);
}
#else
/* Weights that are both dV's and dS's are cut before they are packed. */
DEVICE void make_weights(u32 (&w)[S_COUNT / 2], kept &weights, float (&acc)[S_COUNT],
                         weigher &y, u32 drawn, int flags)
{
#pragma unroll
    for (int i = 0; i < S_COUNT / 4; i++) {
        float none[4];
        four_weights(acc + 4 * i, none, y, i);
    }
    if (flags)
        cut_weights(acc, y.p.f, y.mod, y.at, flags);
#pragma unroll
    for (int i = 0; i < S_COUNT / 4; i++) {
        pack_four(w, acc + 4 * i, drawn, i);
        keep_four(weights, i, acc + 4 * i);
    }
}
#endif

DEVICE void make_values(const keys_arena &s, const cu_bwd &p, const mod_args &mod, int turn)
{
    float acc[S_COUNT], dv[CFG_E / 2];
    kept weights;
    u32 w[S_COUNT / 2], n = 0;
    key_tile t = key_tile_at(p.f, turn);
    ring<CFG_STAGES> at = {0, 0};
    dropper drop = no_dropper();
    int4 step;
    barrier_wait(s.k_full, 0);
    start_scores(s, at, acc, step);
    wgmma_wait<0>();
    while (!(step.w & STEP_END)) {
        places where = places_of(t, step);
        u32 o_full = s.o_full + at.slot * 8, o_empty = s.o_empty + at.slot * 8;
        u32 d_out = s.d_out + at.slot * E_BYTES, parity = at.parity;
        u32 drawn = draw_kept(drop, p.f, where);
        weigher y = weigher_of(p, mod, where,
                               s.lse + at.slot * STAT_BYTES + (threadIdx.x & 3) * 8);
        make_weights(w, weights, acc, y, drawn, step.w);
        put_weights(s, n, weights);
        warp_arrives(s.q_empty + at.slot * 8);
        barrier_wait(o_full, parity);
        wgmma_fence();
        if (CFG_DV)
            product_dv(dv, w, d_out, n > 0);
        wgmma_commit();
        if (CFG_CTAS_KEYS > 1)
            wgmma_wait<0>();
        ring_next(at);
        start_scores(s, at, acc, step);
        wgmma_wait<1>();
        warp_arrives(o_empty);
        wgmma_wait<0>();
        n++;
    }
    if (CFG_DV)
        store_keys(p, 1, t.b, t.g, 0, places_of(t, step).key, p.f.N, CFG_E_REAL,
                   value_factor(p.f) * BWD_WEIGHT_UNIT, n > 0, dv);
    tell_stored(p, turn);
}

/* 3. dP and dK. */

DEVICE void start_dp_block(const keys_arena &s, const ring<CFG_STAGES> &at,
                           float (&acc)[S_COUNT], int4 &step)
{
    barrier_wait(s.o_full + at.slot * 8, at.parity);
    step = load_four(s.steps + at.slot * 16);
    start_dp(acc, s.delta + at.slot * STAT_BYTES + (threadIdx.x & 3) * 8);
    wgmma_fence();
    product_scores<CFG_E>(acc, s.v, s.d_out + at.slot * E_BYTES, !CFG_DROP);
    wgmma_commit();
}

DEVICE void take_weights(const keys_arena &s, u32 n, kept &weights)
{
    u32 from = s.weights + (n & 1) * WEIGHT_BYTES + (threadIdx.x & 127) * 16;
    barrier_wait(s.weights_full + (n & 1) * 8, n >> 1 & 1);
#pragma unroll
    for (int i = 0; i < S_COUNT / 8; i++)
        load_words(weights.pairs + 4 * i, from + i * 2048);
#if KEEPS_BYTES
#pragma unroll
    for (int i = 0; i < S_COUNT / 16; i++)
        load_words(weights.bytes + 4 * i, from + (S_COUNT / 8 + i) * 2048);
#endif
    warp_arrives(s.weights_empty + (n & 1) * 8);
}

/* dS; where a weight is 0 for its mask, V may hold anything. */
DEVICE void grade_block(u32 (&ds)[S_COUNT / 2], const kept &weights, float (&dp)[S_COUNT],
                        const cu_fwd &p, u32 drawn, u32 minus_delta, int is_cut)
{
#pragma unroll
    for (int i = 0; i < S_COUNT / 4; i++) {
        float g[4];
        take_four(g, weights, i);
        four_gradients(ds, g, dp + 4 * i, p, drawn, minus_delta, i);
    }
    if (is_cut)
        cut_as(ds, weights.pairs);
}

DEVICE void make_keys(const keys_arena &s, const cu_bwd &p, int turn)
{
    float acc[S_COUNT], dk[CFG_D / 2];
    kept weights;
    u32 ds[S_COUNT / 2], n = 0;
    key_tile t = key_tile_at(p.f, turn);
    ring<CFG_STAGES> at = {0, 0};
    dropper drop = no_dropper();
    int4 step;
    barrier_wait(s.v_full, 0);
    start_dp_block(s, at, acc, step);
    wgmma_wait<0>();
    while (!(step.w & STEP_END)) {
        u32 q_full = s.q_full + at.slot * 8, q_empty = s.q_empty + at.slot * 8;
        u32 q = s.q + at.slot * D_BYTES, parity = at.parity;
        u32 drawn = draw_kept(drop, p.f, places_of(t, step)); /* as for dV */
        if (!CFG_DROP) /* which reads delta later */
            warp_arrives(s.o_empty + at.slot * 8);
        take_weights(s, n, weights);
        grade_block(ds, weights, acc, p.f, drawn,
                    s.delta + at.slot * STAT_BYTES + (threadIdx.x & 3) * 8, step.w);
        if (CFG_DROP)
            warp_arrives(s.o_empty + at.slot * 8);
        barrier_wait(q_full, parity);
        wgmma_fence();
        if (CFG_DK)
            product_dk(dk, ds, q, n > 0);
        wgmma_commit();
        if (CFG_CTAS_KEYS > 1)
            wgmma_wait<0>();
        ring_next(at);
        start_dp_block(s, at, acc, step);
        wgmma_wait<1>();
        warp_arrives(q_empty);
        wgmma_wait<0>();
        n++;
    }
    if (CFG_DK)
        store_keys(p, 0, t.b, t.g, 0, places_of(t, step).key, p.f.N, CFG_D_REAL,
                   p.f.scale * BWD_WEIGHT_UNIT, n > 0, dk);
    tell_stored(p, turn);
}

/* 4. Who does what. */
extern "C" __global__ void __launch_bounds__(256 + LOADERS, CFG_CTAS_KEYS)
    bwd_wide_keys(const __grid_constant__ cu_bwd p, const __grid_constant__ mod_args mod,
                  const __grid_constant__ tensor_map mq, const __grid_constant__ tensor_map mk,
                  const __grid_constant__ tensor_map mv, const __grid_constant__ tensor_map mo)
{
    extern __shared__ __align__(1024) char shared[];
    const keys_bytes of = {D_BYTES, E_BYTES, D_BYTES, E_BYTES, STAT_BYTES, WEIGHT_BYTES};
    keys_arena s = keys_carve(smem_address(shared), of);
    if (threadIdx.x == 0)
        keys_init(s);
    __syncthreads();
    int group = threadIdx.x / 128;
    if (group == 0) {
        be_consumer();
        make_values(s, p, mod, blockIdx.x);
    } else if (group == 1) {
        be_consumer();
        make_keys(s, p, blockIdx.x);
    } else {
        be_loader();
        if (threadIdx.x == 256)
            load_queries(s, p, mod, blockIdx.x, &mq, &mk, &mv, &mo);
    }
}
