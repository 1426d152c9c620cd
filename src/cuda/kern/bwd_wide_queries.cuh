/* dQ of STAY queries, 64 of each warpgroup, over the blocks of 64 keys that they meet.
 * Scores lie with queries as rows; dS goes to the product of dQ from registers.
 *
 * This kernel may begin beside the last CTAs of bwd_wide_keys, of which it reads nothing: that
 * one lets it begin once bwd_prepare is over, and it waits for that one's end before its own.
 *
 * Shared memory: Q and dO, [CFG_STAGES] of K, [CFG_VALUE_STAGES] of V, what the steps of K's
 * stages are about, barriers. A warpgroup's tiles of Q and dO lie together. */
#pragma once

enum { OWN = STAY / 64 }; /* warpgroups, and tiles of Q and of dO */

struct queries_arena {
    u32 q, d_out, k, v, steps;
    u32 q_full, o_full, k_full, k_empty, v_full, v_empty;
};

DEVICE queries_arena queries_carve(u32 shared)
{
    queries_arena s;
    s.q = shared;
    s.d_out = s.q + OWN * D_BYTES;
    s.k = s.d_out + OWN * E_BYTES;
    s.v = s.k + CFG_STAGES * D_BYTES;
    s.steps = s.v + CFG_VALUE_STAGES * E_BYTES;
    s.q_full = s.steps + CFG_STAGES * 16;
    s.o_full = s.q_full + 8;
    s.k_full = s.o_full + 8;
    s.k_empty = s.k_full + CFG_STAGES * 8;
    s.v_full = s.k_empty + CFG_STAGES * 8;
    s.v_empty = s.v_full + CFG_VALUE_STAGES * 8;
    return s;
}

DEVICE void queries_init(const queries_arena &s)
{
    barrier_init(s.q_full, 1);
    barrier_init(s.o_full, 1);
    for (int i = 0; i < CFG_STAGES; i++) {
        barrier_init(s.k_full + i * 8, 1);
        barrier_init(s.k_empty + i * 8, 4 * OWN);
    }
    for (int i = 0; i < CFG_VALUE_STAGES; i++) {
        barrier_init(s.v_full + i * 8, 1);
        barrier_init(s.v_empty + i * 8, 4 * OWN);
    }
    fence_barrier_init();
}

/* 1. Loads, by one thread. */

struct key_loads {
    ring<CFG_STAGES> k;
    ring<CFG_VALUE_STAGES> v;
};

DEVICE void load_keys_begin(const queries_arena &s, const cu_bwd &p, const key_loads &l,
                            const query_tile &t, int block, int masked, const tensor_map *mk)
{
    u32 full = s.k_full + l.k.slot * 8;
    barrier_wait(s.k_empty + l.k.slot * 8, l.k.parity ^ 1);
    store_four(s.steps + l.k.slot * 16, block * PASS, 0, 0, masked_flags(masked));
    barrier_expect(full, D_BYTES);
    load_tile<PANELS_D>(s.k + l.k.slot * D_BYTES, mk, block * PASS, key_box(p.f, t.b, t.g),
                        full, EVICT_LAST);
}

DEVICE void load_values(const queries_arena &s, const cu_bwd &p, const key_loads &l,
                        const query_tile &t, int block, const tensor_map *mv)
{
    u32 full = s.v_full + l.v.slot * 8;
    barrier_wait(s.v_empty + l.v.slot * 8, l.v.parity ^ 1);
    barrier_expect(full, E_BYTES);
    load_tile<PANELS_E>(s.v + l.v.slot * E_BYTES, mv, block * PASS, value_box(p.f, t.b, t.g),
                        full, EVICT_LAST);
}

DEVICE void load_rows(const queries_arena &s, const cu_bwd &p, const query_tile &t,
                      const tensor_map *mq, const tensor_map *mo)
{
    head_box q = query_box(p.f, t.b, t.h), o = box_at(p.dos, t.b, t.h);
    barrier_expect(s.q_full, OWN * D_BYTES);
    barrier_expect(s.o_full, OWN * E_BYTES);
#pragma unroll
    for (int i = 0; i < OWN; i++)
        load_tile<PANELS_D>(s.q + i * D_BYTES, mq, t.row0 + i * 64, q, s.q_full, EVICT_FIRST);
#pragma unroll
    for (int i = 0; i < OWN; i++)
        load_tile<PANELS_E>(s.d_out + i * E_BYTES, mo, t.row0 + i * 64, o, s.o_full,
                            EVICT_FIRST);
}

DEVICE void load_keys(const queries_arena &s, const cu_bwd &p, const mod_args &mod, int turn,
                      const tensor_map *mq, const tensor_map *mk, const tensor_map *mv,
                      const tensor_map *mo)
{
    query_tile t = query_tile_at(p, turn);
    key_walk walk = key_begin(p, mod, t);
    key_loads l = {{0, 0}, {0, 0}};
    load_rows(s, p, t, mq, mo);
    while (key_next(walk, p, t)) {
        int masked = masked_by(walk.masked, walk.block * PASS + PASS > t.kv_len);
        load_keys_begin(s, p, l, t, walk.block, masked, mk);
        load_values(s, p, l, t, walk.block, mv);
        ring_next(l.k);
        ring_next(l.v);
    }
    barrier_wait(s.k_empty + l.k.slot * 8, l.k.parity ^ 1);
    store_four(s.steps + l.k.slot * 16, 0, 0, 0, STEP_END);
    barrier_arrive(s.k_full + l.k.slot * 8);
    grid_wait_before();
}

/* 2. dS of 64 queries by 64 keys. */

/* Scores of a key with an infinite or NaN element are so too. Where a mask keeps it from
 * queries, their dS of 0 must not meet that element; live pairs have weights that are not
 * numbers already. All groups have their scores by then, and walk the same blocks. */
DEVICE void clear_special_keys(const float (&s)[S_COUNT], u32 k)
{
    int any = 0;
#pragma unroll
    for (int i = 0; i < S_COUNT; i++)
        any |= !(fabsf(s[i]) < -NEG_INF);
    if (!named_any(1, CONSUMERS, any))
        return;
    for (u32 at = k + threadIdx.x * 16; at < k + D_BYTES; at += CONSUMERS * 16) {
        int4 x = load_four(at);
        store_four(at, without_special(x.x), without_special(x.y), without_special(x.z),
                   without_special(x.w));
    }
    fence_async_proxy();
    named_sync(1, CONSUMERS);
}

DEVICE void start_row_dp(float (&dp)[S_COUNT], const own_rows &r)
{
#pragma unroll
    for (int i = 0; i < S_COUNT / 4; i++) {
        dp[4 * i] = dp[4 * i + 1] = r.less0;
        dp[4 * i + 2] = dp[4 * i + 3] = r.less1;
    }
}

/* Of dropped weights dP is 0. */
DEVICE void drop_row_dp(float (&dp)[S_COUNT], const cu_fwd &p, u32 keep, const own_rows &r)
{
#if CFG_DROP
#pragma unroll
    for (int i = 0; i < S_COUNT; i++)
        dp[i] = fmaf(keep >> i & 1 ? dp[i] : 0.f, p.drop.factor, i & 2 ? r.less1 : r.less0);
#endif
}

/* dS; where a weight is 0 for its mask, V may hold anything. */
DEVICE void row_gradients(u32 (&ds)[S_COUNT / 2], const float (&w)[S_COUNT],
                          const float (&dp)[S_COUNT], int may_mask)
{
    if (may_mask) {
#pragma unroll
        for (int i = 0; i < S_COUNT / 2; i++)
            ds[i] = pack(w[2 * i] == 0.f ? 0.f : w[2 * i] * dp[2 * i],
                         w[2 * i + 1] == 0.f ? 0.f : w[2 * i + 1] * dp[2 * i + 1]);
        return;
    }
#pragma unroll
    for (int i = 0; i < S_COUNT / 2; i++)
        ds[i] = pack(w[2 * i] * dp[2 * i], w[2 * i + 1] * dp[2 * i + 1]);
}

/* 3. A consumer warpgroup. */

/* As start_scores. */
DEVICE void start_row_scores(const queries_arena &s, const key_loads &l, u32 q,
                             float (&acc)[S_COUNT], int4 &step)
{
    barrier_wait(s.k_full + l.k.slot * 8, l.k.parity);
    step = load_four(s.steps + l.k.slot * 16);
    wgmma_fence();
    product_scores<CFG_D>(acc, q, s.k + l.k.slot * D_BYTES, 0);
    wgmma_commit();
}

DEVICE void make_queries(const queries_arena &s, const cu_bwd &p, const mod_args &mod, int turn,
                         int wg)
{
    float acc[S_COUNT], dp[S_COUNT], dq[CFG_D / 2];
    u32 ds[S_COUNT / 2], n = 0, q = s.q + wg * D_BYTES, d_out = s.d_out + wg * E_BYTES;
    query_tile t = query_tile_at(p, turn);
    own_rows r = rows_of(p, t, wg);
    key_loads l = {{0, 0}, {0, 0}};
    dropper drop = no_dropper();
    dropper_enter(drop, p.f, t.b, t.h);
    int4 step;
    barrier_wait(s.q_full, 0);
    start_row_scores(s, l, q, acc, step);
    barrier_wait(s.o_full, 0);
    wgmma_wait<0>();
    while (!(step.w & STEP_END)) {
        u32 k = s.k + l.k.slot * D_BYTES, k_empty = s.k_empty + l.k.slot * 8;
        int key = step.x + 2 * (threadIdx.x & 3), masked = step.w & STEP_MASKED;
        barrier_wait(s.v_full + l.v.slot * 8, l.v.parity);
        if (!CFG_DROP)
            start_row_dp(dp, r);
        wgmma_fence();
        product_scores<CFG_E>(dp, d_out, s.v + l.v.slot * E_BYTES, !CFG_DROP);
        wgmma_commit();
        if (masked)
            clear_special_keys(acc, k);
        row_weights(acc, p, mod, t, r, key + t.kv_offset);
        if (masked)
            cut_row_weights(acc, p, mod, t, r, key, !(step.w & STEP_BY_END));
        u32 keep = 0;
#if CFG_DROP
        keep = drop_mask<S_COUNT>(drop.head, p.f.drop, r.q0, key + t.kv_offset);
#endif
        wgmma_wait<0>();
        drop_row_dp(dp, p.f, keep, r);
        warp_arrives(s.v_empty + l.v.slot * 8);
        row_gradients(ds, acc, dp, (MOD_SCORE && SCORE_MAY_MASK) || masked);
        wgmma_fence();
        product_dk(dq, ds, k, n > 0);
        wgmma_commit();
        ring_next(l.k);
        ring_next(l.v);
        start_row_scores(s, l, q, acc, step);
        wgmma_wait<1>();
        warp_arrives(k_empty);
        wgmma_wait<0>();
        n++;
    }
    store_rows(result_of(p, p.dq, p.dqs, t.b, t.h, 0, BWD_OF_Q), r.row, p.f.M, CFG_D_REAL,
               p.f.scale * BWD_WEIGHT_UNIT, n > 0, dq);
}

/* 4. Who does what. */
extern "C" __global__ void __launch_bounds__(CONSUMERS + LOADERS, CFG_CTAS_QUERIES)
    bwd_wide_queries(const __grid_constant__ cu_bwd p, const __grid_constant__ mod_args mod,
                     const __grid_constant__ tensor_map mq,
                     const __grid_constant__ tensor_map mk,
                     const __grid_constant__ tensor_map mv,
                     const __grid_constant__ tensor_map mo)
{
    extern __shared__ __align__(1024) char shared[];
    queries_arena s = queries_carve(smem_address(shared));
    if (threadIdx.x == 0)
        queries_init(s);
    __syncthreads();
    int group = threadIdx.x / 128;
    if (group < OWN) {
        be_consumer();
        make_queries(s, p, mod, blockIdx.x, group);
    } else {
        be_loader();
        if (threadIdx.x == CONSUMERS)
            load_keys(s, p, mod, blockIdx.x, &mq, &mk, &mv, &mo);
    }
}
