/* dQ of 64 queries over the blocks of PASS keys that they meet, which two warpgroups take in
 * turns: one multiplies while the other makes weights. Their sums are added at the end.
 *
 * Shared memory: Q, dO, [CFG_VALUE_STAGES] of K and V, what their steps are about, barriers. */
#pragma once

enum {
    SLOTS = CFG_VALUE_STAGES,
    TURNS = 2 * SLOTS /* steps until a group comes to a slot again */
};

struct queries_arena {
    u32 q, d_out, k, v, steps;
    u32 rows_full, full, empty; /* [1], [TURNS], [SLOTS] */
};

DEVICE queries_arena queries_carve(u32 shared)
{
    queries_arena s;
    s.q = shared;
    s.d_out = s.q + STAY_D;
    s.k = s.d_out + STAY_E;
    s.v = s.k + SLOTS * PASS_D;
    s.steps = s.v + SLOTS * PASS_E;
    s.rows_full = s.steps + SLOTS * 16;
    s.full = s.rows_full + 8;
    s.empty = s.full + TURNS * 8;
    return s;
}

/* Step n has slot n % SLOTS, and barrier n % TURNS says that it is there: only its own group
 * waits for that one. Of a barrier that both wait for in turns, a group does not know whether
 * the other's round is over, and takes one for the other. */
struct step_place {
    ring<SLOTS> at;
    ring<TURNS> told;
};

DEVICE void step_next(step_place &x)
{
    ring_next(x.at);
    ring_next(x.told);
}

DEVICE void queries_init(const queries_arena &s)
{
    barrier_init(s.rows_full, 1);
    for (int i = 0; i < TURNS; i++)
        barrier_init(s.full + i * 8, 1);
    for (int i = 0; i < SLOTS; i++)
        barrier_init(s.empty + i * 8, 4); /* one group takes the block */
    fence_barrier_init();
}

/* 1. Loads, by one thread. */

DEVICE void load_keys(const queries_arena &s, const cu_bwd &p, const mod_args &mod, int turn,
                      const tensor_map *mq, const tensor_map *mk, const tensor_map *mv,
                      const tensor_map *mo)
{
    query_tile t = query_tile_at(p, turn);
    key_walk walk = key_begin(p, mod, t);
    step_place place = {{0, 0}, {0, 0}};
    barrier_expect(s.rows_full, STAY_D + STAY_E);
    load_tile<STAY, PANELS_D>(s.q, mq, t.row0, t.h, t.b, s.rows_full, EVICT_FIRST);
    load_tile<STAY, PANELS_E>(s.d_out, mo, t.row0, t.h, t.b, s.rows_full, EVICT_FIRST);
    while (key_next(walk, p, t)) {
        u32 slot = place.at.slot, full = s.full + place.told.slot * 8;
        int key0 = walk.block * PASS;
        int masked = masked_by(walk.masked, key0 + PASS > t.kv_len);
        barrier_wait(s.empty + slot * 8, place.at.parity ^ 1);
        store_four(s.steps + slot * 16, key0, 0, 0, masked_flags(masked));
        barrier_expect(full, PASS_D + PASS_E);
        load_tile<PASS, PANELS_D>(s.k + slot * PASS_D, mk, key0, t.g, t.b, full, EVICT_LAST);
        load_tile<PASS, PANELS_E>(s.v + slot * PASS_E, mv, key0, t.g, t.b, full, EVICT_LAST);
        step_next(place);
    }
    for (int group = 0; group < 2; group++) {
        barrier_wait(s.empty + place.at.slot * 8, place.at.parity ^ 1);
        store_four(s.steps + place.at.slot * 16, 0, 0, 0, STEP_END);
        barrier_arrive(s.full + place.told.slot * 8);
        step_next(place);
    }
}

/* 2. A consumer warpgroup. */

/* Scores of a key with an infinite or NaN element are so too. Where a mask keeps it from
 * queries, their dS of 0 must not meet that element; live pairs have weights that are not
 * numbers already. */
DEVICE void clear_special_keys(const float (&s)[S_COUNT], u32 k, int group)
{
    int any = 0;
#pragma unroll
    for (int i = 0; i < S_COUNT; i++)
        any |= !(fabsf(s[i]) < -NEG_INF);
    if (!named_any(1 + group, 128, any))
        return;
    for (u32 at = k + (threadIdx.x & 127) * 16; at < k + PASS_D; at += 128 * 16) {
        int4 x = load_four(at);
        store_four(at, without_special(x.x), without_special(x.y), without_special(x.z),
                   without_special(x.w));
    }
    fence_async_proxy();
    named_sync(1 + group, 128);
}

/* dS of the weights and of dP, in their place. */
DEVICE void row_gradients(float (&w)[S_COUNT], const float (&dp)[S_COUNT], const own_rows &r)
{
#pragma unroll
    for (int i = 0; i < S_COUNT; i++)
        w[i] = w[i] == 0.f ? 0.f : w[i] * (dp[i] + (i & 2 ? r.less1 : r.less0));
}

DEVICE void make_queries(const queries_arena &s, const cu_bwd &p, const mod_args &mod,
                         const query_tile &t, const own_rows &r, int group,
                         float (&dq)[PANELS_D * SUM_COUNT])
{
    scores x, dp;
    split_weights w;
    column_sums sum;
    step_place place = {{0, 0}, {0, 0}};
    if (group)
        step_next(place);
    clear(dq);
    barrier_wait(s.rows_full, 0);
    for (;;) {
        u32 slot = place.at.slot, k = s.k + slot * PASS_D;
        barrier_wait(s.full + place.told.slot * 8, place.told.parity);
        int4 step = load_four(s.steps + slot * 16);
        if (step.w & STEP_END)
            return;
        int key = step.x + 2 * (threadIdx.x & 3), masked = step.w & STEP_MASKED;
        start_product<CFG_D>(x, s.q, k);
        start_product<CFG_E>(dp, s.d_out, s.v + slot * PASS_E);
        wgmma_wait<1>();
        end_product(x);
        if (masked)
            clear_special_keys(x.large, k, group);
        row_weights(x.large, p, mod, t, r, key + t.kv_offset);
        if (masked)
            cut_row_weights(x.large, p, mod, t, r, key, !(step.w & STEP_BY_END));
        wgmma_wait<0>();
        end_product(dp);
        row_gradients(x.large, dp.large, r);
        split_all(w, x.large);
        sum_panels<PANELS_D>(dq, sum, w, k);
        wgmma_wait<0>();
        end_sum(dq, sum, PANELS_D - 1);
        warp_arrives(s.empty + slot * 8);
        step_next(place);
        step_next(place);
    }
}

/* The second group's sums on top of the first's, by way of where Q lay. */
DEVICE void join_groups(const queries_arena &s, int group, float (&dq)[PANELS_D * SUM_COUNT])
{
    u32 at = s.q + (threadIdx.x & 127) * 16;
    named_sync(3, CONSUMERS); /* both are done with Q */
#pragma unroll
    for (int i = 0; group && i < PANELS_D * SUM_COUNT; i += 4)
        store_four(at + i * 512, __float_as_uint(dq[i]), __float_as_uint(dq[i + 1]),
                   __float_as_uint(dq[i + 2]), __float_as_uint(dq[i + 3]));
    named_sync(3, CONSUMERS);
#pragma unroll
    for (int i = 0; !group && i < PANELS_D * SUM_COUNT; i += 4) {
        int4 y = load_four(at + i * 512);
        dq[i] += __int_as_float(y.x), dq[i + 1] += __int_as_float(y.y);
        dq[i + 2] += __int_as_float(y.z), dq[i + 3] += __int_as_float(y.w);
    }
}

DEVICE void be_group(const queries_arena &s, const cu_bwd &p, const mod_args &mod, int turn,
                     int group)
{
    float dq[PANELS_D * SUM_COUNT];
    query_tile t = query_tile_at(p, turn);
    own_rows r = rows_of(p, t, 0);
    make_queries(s, p, mod, t, r, group, dq);
    join_groups(s, group, dq);
    if (!group)
        store_rows(result_of(p, p.dq, p.dqs, t.b, t.h, 0, BWD_OF_Q), r.row, p.f.M, CFG_D_REAL,
                   p.f.scale, 1, dq);
}

/* 3. Who does what. */
extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1)
    bwd_f32_queries(const __grid_constant__ cu_bwd p, const __grid_constant__ mod_args mod,
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
    if (group < 2) {
        registers_grow<CFG_REGS_CONSUMER>();
        be_group(s, p, mod, blockIdx.x, group);
    } else {
        registers_shrink<CFG_REGS_DQ>();
        if (threadIdx.x == CONSUMERS)
            load_keys(s, p, mod, blockIdx.x, &mq, &mk, &mv, &mo);
    }
}
