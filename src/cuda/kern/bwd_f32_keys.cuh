/* dK and dV of 64 keys. The first warpgroup makes weights and dV, the second dP and dK. Weights
 * go from the first to the second as they lie in registers, times slopes, 16 bytes of each
 * thread together. */
#pragma once

#include "bwd_keys_arena.cuh"

enum { WEIGHT_BYTES = 128 * S_COUNT * 4, STAT_BYTES = PASS * 4 };

/* Where step n lies: counted, for a place and its parity would take two registers. */
DEVICE ring<CFG_STAGES> stage_of(u32 n)
{
    return {n % CFG_STAGES, n / CFG_STAGES & 1};
}

/* 1. Loads, by one thread. */

DEVICE void load_block(const keys_arena &s, const cu_bwd &p, const key_tile &t, int h,
                       int first, const ring<CFG_STAGES> &at, const tensor_map *mq,
                       const tensor_map *mo)
{
    u32 q_full = s.q_full + at.slot * 8, o_full = s.o_full + at.slot * 8;
    long long row = (long long)(t.b * p.f.H + h) * p.n_mblk * BWD_ROWS + first;
    barrier_expect(q_full, PASS_D + STAT_BYTES);
    load_tile<PASS, PANELS_D>(s.q + at.slot * PASS_D, mq, first, h, t.b, q_full, EVICT_LAST);
    copy_bytes(s.lse + at.slot * STAT_BYTES, p.lse2 + row, STAT_BYTES, q_full);
    barrier_wait(s.o_empty + at.slot * 8, at.parity ^ 1);
    barrier_expect(o_full, PASS_E + STAT_BYTES);
    load_tile<PASS, PANELS_E>(s.d_out + at.slot * PASS_E, mo, first, h, t.b, o_full,
                              EVICT_LAST);
    copy_bytes(s.delta + at.slot * STAT_BYTES, p.minus_delta + row, STAT_BYTES, o_full);
}

DEVICE void load_queries(const keys_arena &s, const cu_bwd &p, const mod_args &mod, int turn,
                         const tensor_map *mq, const tensor_map *mk, const tensor_map *mv,
                         const tensor_map *mo)
{
    key_tile t = key_tile_at(p.f, turn);
    query_walk walk = query_begin(p, t);
    u32 n = 0;
    barrier_expect(s.k_full, STAY_D);
    load_tile<STAY, PANELS_D>(s.k, mk, t.key0, keys_head(p, t), t.b, s.k_full, EVICT_FIRST);
    barrier_expect(s.v_full, STAY_E);
    load_tile<STAY, PANELS_E>(s.v, mv, t.key0, keys_head(p, t), t.b, s.v_full, EVICT_FIRST);
    while (query_next(walk, p, mod, t)) {
        int masked = masked_by(walk.masked, t.key0 + KEYS > t.kv_len);
        int first = walk.block * BWD_ROWS;
        do {
            ring<CFG_STAGES> at = stage_of(n++);
            barrier_wait(s.q_empty + at.slot * 8, at.parity ^ 1);
            store_four(s.steps + at.slot * 16, 0, first, walk.h,
                       step_flags(p.f.M - first, masked));
            load_block(s, p, t, walk.h, first, at, mq, mo);
            first += PASS;
        } while (first % BWD_ROWS && first < p.f.M);
    }
    ring<CFG_STAGES> at = stage_of(n);
    /* o_full too may move on only when nobody waits for the turn before */
    barrier_wait(s.q_empty + at.slot * 8, at.parity ^ 1);
    store_four(s.steps + at.slot * 16, 0, 0, 0, STEP_END);
    barrier_wait(s.o_empty + at.slot * 8, at.parity ^ 1);
    barrier_arrive(s.q_full + at.slot * 8);
    barrier_arrive(s.o_full + at.slot * 8);
}

/* Which keys they are is found again: it would take registers beside the sums. */
template <int COUNT>
DEVICE void store_sums(const cu_bwd &p, int is_value, int real, float factor,
                       const float (&x)[COUNT])
{
    int turn = blockIdx.x;
    asm volatile("" : "+r"(turn));
    key_tile t = key_tile_at(p.f, turn);
    int row = t.key0 + (threadIdx.x / 32 & 3) * 16 + (threadIdx.x & 31) / 4;
    store_keys(p, is_value, t.b, t.g, 0, row, p.f.N, real, factor, 1, x);
}

/* 2. Weights and dV. */

/* After the last block the product runs on stale data and nobody uses its result. */
DEVICE void begin_scores(const keys_arena &s, u32 n, scores &acc)
{
    ring<CFG_STAGES> at = stage_of(n);
    barrier_wait(s.q_full + at.slot * 8, at.parity);
    start_product<CFG_D>(acc, s.k, s.q + at.slot * PASS_D);
}

/* x: dot products, which become weights; to the other group go these times slopes. */
DEVICE void make_weights(const keys_arena &s, u32 n, float (&x)[S_COUNT], weigher &y,
                         int flags)
{
#if HAS_SLOPES
    float by_slope[S_COUNT];
#endif
#pragma unroll
    for (int i = 0; i < S_COUNT / 4; i++) {
        float g[4];
        four_weights(x + 4 * i, g, y, i);
#if HAS_SLOPES
#pragma unroll
        for (int j = 0; j < 4; j++)
            by_slope[4 * i + j] = g[j];
#endif
    }
    if (flags)
        cut_weights(x, y.p.f, y.mod, y.at, flags);
    u32 to = s.weights + (n & 1) * WEIGHT_BYTES + (threadIdx.x & 127) * 16;
    barrier_wait(s.weights_empty + (n & 1) * 8, (n >> 1 & 1) ^ 1);
#pragma unroll
    for (int i = 0; i < S_COUNT; i += 4) {
        float g[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
#if HAS_SLOPES
            g[j] = x[i + j] == 0.f ? 0.f : by_slope[i + j];
#else
            g[j] = x[i + j];
#endif
        store_four(to + i * 512, __float_as_uint(g[0]), __float_as_uint(g[1]),
                   __float_as_uint(g[2]), __float_as_uint(g[3]));
    }
    warp_arrives(s.weights_full + (n & 1) * 8);
}

DEVICE void make_values(const keys_arena &s, const cu_bwd &p, const mod_args &mod, int turn)
{
    float dv[PANELS_E * SUM_COUNT];
    scores acc;
    split_weights w;
    column_sums sum;
    key_tile t = key_tile_at(p.f, turn);
    u32 n = 0;
    clear(dv);
    barrier_wait(s.k_full, 0);
    begin_scores(s, n, acc);
    wgmma_wait<0>();
    for (;;) {
        u32 slot = n % CFG_STAGES;
        int4 step = load_four(s.steps + slot * 16);
        if (step.w & STEP_END)
            break;
        places where = places_of(t, step);
        weigher y =
            weigher_of(p, mod, where, s.lse + slot * STAT_BYTES + (threadIdx.x & 3) * 8);
        end_product(acc);
        make_weights(s, n, acc.large, y, step.w);
        warp_arrives(s.q_empty + slot * 8);
        split_all(w, acc.large);
        barrier_wait(s.o_full + slot * 8, stage_of(n).parity);
        if (CFG_DV)
            sum_panels<PANELS_E>(dv, sum, w, s.d_out + slot * PASS_E);
        begin_scores(s, ++n, acc);
        wgmma_wait<1>();
        if (CFG_DV)
            end_sum(dv, sum, PANELS_E - 1);
        warp_arrives(s.o_empty + stage_of(n - 1).slot * 8);
        wgmma_wait<0>();
    }
    if (CFG_DV)
        store_sums(p, 1, CFG_E_REAL, value_factor(p.f), dv);
}

/* 3. dP and dK. */

DEVICE void begin_dp(const keys_arena &s, u32 n, scores &acc)
{
    ring<CFG_STAGES> at = stage_of(n);
    barrier_wait(s.o_full + at.slot * 8, at.parity);
    start_product<CFG_E>(acc, s.v, s.d_out + at.slot * PASS_E);
}

/* dP becomes dS; where a weight is 0 for its mask, V may hold anything. delta: address of this
 * thread's first query's. */
DEVICE void grade_block(const keys_arena &s, u32 n, float (&dp)[S_COUNT], u32 delta)
{
    u32 from = s.weights + (n & 1) * WEIGHT_BYTES + (threadIdx.x & 127) * 16;
    barrier_wait(s.weights_full + (n & 1) * 8, n >> 1 & 1);
#pragma unroll
    for (int i = 0; i < S_COUNT / 4; i++) {
        int4 y = load_four(from + i * 2048);
        float2 less = load_two(delta + i * 32);
        float g[4] = {__int_as_float(y.x), __int_as_float(y.y), __int_as_float(y.z),
                      __int_as_float(y.w)};
#pragma unroll
        for (int j = 0; j < 4; j++)
            dp[4 * i + j] =
                g[j] == 0.f ? 0.f : g[j] * (dp[4 * i + j] + (j & 1 ? less.y : less.x));
    }
    warp_arrives(s.weights_empty + (n & 1) * 8);
}

DEVICE void make_keys(const keys_arena &s, const cu_bwd &p)
{
    float dk[PANELS_D * SUM_COUNT];
    scores acc;
    split_weights w;
    column_sums sum;
    u32 n = 0;
    clear(dk);
    barrier_wait(s.v_full, 0);
    begin_dp(s, n, acc);
    wgmma_wait<0>();
    while (!(load_word(s.steps + stage_of(n).slot * 16 + 12) & STEP_END)) {
        u32 slot = n % CFG_STAGES;
        end_product(acc);
        grade_block(s, n, acc.large, s.delta + slot * STAT_BYTES + (threadIdx.x & 3) * 8);
        warp_arrives(s.o_empty + slot * 8);
        split_all(w, acc.large);
        barrier_wait(s.q_full + slot * 8, stage_of(n).parity);
        if (CFG_DK)
            sum_panels<PANELS_D>(dk, sum, w, s.q + slot * PASS_D);
        begin_dp(s, ++n, acc);
        wgmma_wait<1>();
        if (CFG_DK)
            end_sum(dk, sum, PANELS_D - 1);
        warp_arrives(s.q_empty + stage_of(n - 1).slot * 8);
        wgmma_wait<0>();
    }
    if (CFG_DK)
        store_sums(p, 0, CFG_D_REAL, p.f.scale, dk);
}

/* 4. Who does what. */
extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1)
    bwd_f32_keys(const __grid_constant__ cu_bwd p, const __grid_constant__ mod_args mod,
                 const __grid_constant__ tensor_map mq, const __grid_constant__ tensor_map mk,
                 const __grid_constant__ tensor_map mv, const __grid_constant__ tensor_map mo)
{
    extern __shared__ __align__(1024) char shared[];
    const keys_bytes of = {STAY_D, STAY_E, PASS_D, PASS_E, STAT_BYTES, WEIGHT_BYTES};
    keys_arena s = keys_carve(smem_address(shared), of);
    if (threadIdx.x == 0)
        keys_init(s);
    __syncthreads();
    int group = threadIdx.x / 128;
    if (group == 0) {
        registers_grow<CFG_REGS_CONSUMER>();
        make_values(s, p, mod, blockIdx.x);
    } else if (group == 1) {
        registers_grow<CFG_REGS_CONSUMER>();
        make_keys(s, p);
    } else {
        registers_shrink<CFG_REGS_DQ>();
        if (threadIdx.x == CONSUMERS)
            load_queries(s, p, mod, blockIdx.x, &mq, &mk, &mv, &mo);
    }
}
