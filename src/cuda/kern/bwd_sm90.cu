/* Backward attention for Hopper: one CTA makes dK and dV of CFG_WGS * 64 keys of one key head
 * and adds its part to dQ, looping over the blocks of 64 queries that meet them, for every
 * query head of the group. Scores are made transposed (keys are rows), so that P and dS go to
 * the products of dV and dK straight from registers (FA3, arXiv 2407.08608).
 *
 * Consumer warpgroups hold 64 keys each and never wait for one another. dQ = dS K has a
 * warpgroup of its own (bwd_dq.cuh): it takes dS of all consumers from shared memory
 * (bwd_shared.cuh) and adds its product to dq_sum in global memory, by default as integers,
 * whose sums do not depend on their order. That warpgroup also loads (bwd_load.cuh), or with
 * CFG_SPLIT a fourth one does. Of CFG_DQ, CFG_DK and CFG_DV, what is 0 is not computed. */
#include "cfg.cuh"
#include "ptx.cuh"
#include "bwd.h"
#include "arith.cuh"
#include "mod.cuh"
#include "kv.cuh"
#include "bwd_copy.cuh"
#include "bwd_tile.cuh"
#include "bwd_mod.cuh"
#include "bwd_store.cuh"
#include "wgmma.cuh"
#include "bwd_shared.cuh"
#include "bwd_load.cuh"
#include "bwd_dq.cuh"

/* 1. The products of consumers. Fragments are of transposed scores, 64 keys by 64 queries. */
#define HAS_SLOPES (MOD_SCORE && !SLOPE_ONE)
enum { G_COUNT = HAS_SLOPES ? S_COUNT / 2 : 1 };

/* S = K Q^T, or on top of what dp holds V dO^T */
template <int DIM>
DEVICE void product_scores(float (&s)[S_COUNT], u32 keys, u32 queries, int add)
{
    u64 a = operand(keys, 16), b = operand(queries, 16);
#pragma unroll
    for (int kk = 0; kk < DIM / 16; kk++)
        wgmma_scores(s, a + ((kk / 4) * KEY_PANEL + (kk % 4) * 32) / 16,
                     b + ((kk / 4) * QUERY_PANEL + (kk % 4) * 32) / 16, add || kk > 0);
}

DEVICE void product_dv(float (&dv)[CFG_E / 2], const u32 (&w)[S_COUNT / 2], u32 d_out, int add)
{
    u64 b = operand(d_out, QUERY_PANEL);
#pragma unroll
    for (int kk = 0; kk < BWD_ROWS / 16; kk++)
        wgmma_dv(dv, w[4 * kk], w[4 * kk + 1], w[4 * kk + 2], w[4 * kk + 3],
                 b + kk * 2048 / 16, add || kk > 0);
}

DEVICE void product_dk(float (&dk)[CFG_D / 2], const u32 (&ds)[S_COUNT / 2], u32 q, int add)
{
    u64 b = operand(q, QUERY_PANEL);
#pragma unroll
    for (int kk = 0; kk < BWD_ROWS / 16; kk++)
        wgmma_dk(dk, ds[4 * kk], ds[4 * kk + 1], ds[4 * kk + 2], ds[4 * kk + 3],
                 b + kk * 2048 / 16, add || kk > 0);
}

/* 2. Elementwise, between the products. */

/* What a thread holds: two keys, 8 apart, and of each the queries 8i + 2 (lane % 4) + {0,1}
 * of a block. Positions of the first key and query. */
struct places {
    int b, h, q, kv;
    int key, kv_len; /* index of the first key, and how many there are */
};

#if SCORE_LINE
/* The offset of a thread's first score in log2 units, what it gains with a query, and with
 * eight keys. */
struct score_line {
    float offset, by_q, by_eight;
};

DEVICE score_line line_at(const cu_fwd &p, const mod_args &mod, const places &at)
{
    float by_q, by_kv, offset = line_offset(mod, p, at.b, at.h, at.q, at.kv, by_q, by_kv);
    return {offset * 1.4426950408889634f, by_q * 1.4426950408889634f,
            by_kv * (8 * 1.4426950408889634f)};
}
#endif

/* Weights of the scores, packed. g: weights times slopes of the score function, which dS is
 * made from; where slopes are 1 the weights themselves. lse: address of this thread's
 * first query's, log2 units. */
DEVICE void weights(u32 (&w)[S_COUNT / 2], u32 (&g)[G_COUNT], const float (&s)[S_COUNT],
                    u32 lse, const cu_bwd &p, const mod_args &mod, const places &at)
{
#if SCORE_LINE
    score_line line = line_at(p.f, mod, at);
#endif
#pragma unroll
    for (int i = 0; i < S_COUNT / 4; i++) {
        float2 l = load_two(lse + i * 32);
#if MOD_SCORE == SCORE_NONE
        w[2 * i] = pack(exp2_fast(fmaf(s[4 * i], p.unit, -l.x)),
                        exp2_fast(fmaf(s[4 * i + 1], p.unit, -l.y)));
        w[2 * i + 1] = pack(exp2_fast(fmaf(s[4 * i + 2], p.unit, -l.x)),
                            exp2_fast(fmaf(s[4 * i + 3], p.unit, -l.y)));
#elif SCORE_LINE
        float offset = fmaf(line.by_q, 8 * i, line.offset);
        float x = offset - l.x, y = offset + line.by_q - l.y;
        w[2 * i] = pack(exp2_fast(fmaf(s[4 * i], p.unit, x)),
                        exp2_fast(fmaf(s[4 * i + 1], p.unit, y)));
        x += line.by_eight;
        y += line.by_eight;
        w[2 * i + 1] = pack(exp2_fast(fmaf(s[4 * i + 2], p.unit, x)),
                            exp2_fast(fmaf(s[4 * i + 3], p.unit, y)));
#else
        float x[4] = {s[4 * i], s[4 * i + 2], s[4 * i + 1], s[4 * i + 3]}, slope[4];
        scores4(p.f, mod, at.b, at.h, at.q + 8 * i, at.q + 8 * i + 1, at.kv, at.kv + 8, x,
                slope);
#pragma unroll
        for (int j = 0; j < 4; j++)
            x[j] = exp2_fast(fmaf(x[j], 1.4426950408889634f, -(j < 2 ? l.x : l.y)));
        w[2 * i] = pack(x[0], x[2]);
        w[2 * i + 1] = pack(x[1], x[3]);
#if !SLOPE_ONE
#pragma unroll
        for (int j = 0; j < 4; j++)
            x[j] = x[j] == 0.f ? 0.f : x[j] * slope[j]; /* -INF masks, whatever its slope */
        g[2 * i] = pack(x[0], x[2]);
        g[2 * i + 1] = pack(x[1], x[3]);
#endif
#endif
    }
}

/* Weights of positions that are not live become 0. */
DEVICE void cut_weights(u32 (&w)[S_COUNT / 2], u32 (&g)[G_COUNT], const cu_fwd &p,
                        const mod_args &mod, const places &at)
{
    key_side k0 = {at.kv, at.key < at.kv_len}, k1 = {at.kv + 8, at.key + 8 < at.kv_len};
#pragma unroll
    for (int i = 0; i < S_COUNT / 4; i++) {
        bool live[4];
        query_side q0 = query_side_of(p, mod, at.b, at.h, at.q + 8 * i);
        query_side q1 = query_side_of(p, mod, at.b, at.h, at.q + 8 * i + 1);
        live4(p, mod, at.b, at.h, q0, q1, k0, k1, live);
        u32 keep0 = (live[0] ? 0xffffu : 0) | (live[2] ? 0xffff0000u : 0);
        u32 keep1 = (live[1] ? 0xffffu : 0) | (live[3] ? 0xffff0000u : 0);
        w[2 * i] &= keep0;
        w[2 * i + 1] &= keep1;
#if HAS_SLOPES
        g[2 * i] &= keep0;
        g[2 * i + 1] &= keep1;
#endif
    }
}

/* The accumulator of dP starts at -delta: no subtraction later. */
DEVICE void start_dp(float (&dp)[S_COUNT], u32 minus_delta)
{
#pragma unroll
    for (int i = 0; i < S_COUNT / 4; i++) {
        float2 d = load_two(minus_delta + i * 32);
        dp[4 * i] = dp[4 * i + 2] = d.x;
        dp[4 * i + 1] = dp[4 * i + 3] = d.y;
    }
}

/* Where a weight is 0 for its mask, V may hold anything. */
DEVICE void cut_dp(float (&dp)[S_COUNT], const u32 (&w)[S_COUNT / 2])
{
#pragma unroll
    for (int i = 0; i < S_COUNT / 2; i++) {
        dp[2 * i] = w[i] & 0xffffu ? dp[2 * i] : 0.f;
        dp[2 * i + 1] = w[i] >> 16 ? dp[2 * i + 1] : 0.f;
    }
}

/* dS = P (dP - delta) from the rounded weights, which saves the registers of exact ones */
DEVICE void gradients(u32 (&ds)[S_COUNT / 2], const u32 (&w)[S_COUNT / 2],
                      const float (&dp)[S_COUNT])
{
#pragma unroll
    for (int i = 0; i < S_COUNT / 2; i++) {
        float lo, hi;
        unpack(w[i], lo, hi);
        ds[i] = pack(lo * dp[2 * i], hi * dp[2 * i + 1]);
    }
}

/* dS of this warp's 16 keys to rows of 64 queries */
DEVICE void share_ds(u32 tile, const u32 (&ds)[S_COUNT / 2], int wg)
{
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32 & 3;
    int row = wg * 64 + warp * 16 + (lane & 15);
    u32 at = tile + row * 128, chunk = lane >> 4;
#pragma unroll
    for (int kk = 0; kk < BWD_ROWS / 16; kk++)
        store_matrices(at + ((kk * 2 + chunk ^ (row & 7)) * 16), ds[4 * kk], ds[4 * kk + 1],
                       ds[4 * kk + 2], ds[4 * kk + 3]);
    fence_async_proxy();
}

/* 3. Consumer warpgroup wg. */
struct consumer {
    ring<CFG_STAGES> at;
    u32 n; /* steps done */
};

DEVICE void put_ds(const arena &s, u32 n, const u32 (&ds)[S_COUNT / 2], int wg)
{
    barrier_wait(s.ds_empty + (n & 1) * 8, (n >> 1 & 1) ^ 1);
    if (CFG_DQ)
        share_ds(s.ds + (n & 1) * DS_BYTES, ds, wg);
    __syncwarp();
    barrier_arrive_if(s.ds_full + (n & 1) * 8, (threadIdx.x & 31) == 0);
}

/* Scores of this step, and whether there is one: past the last, what an earlier step left is
 * multiplied once more, for nothing. */
DEVICE int take_scores(const arena &s, const consumer &c, float (&acc)[S_COUNT], int4 &step,
                       int wg)
{
    barrier_wait(s.q_full + c.at.slot * 8, c.at.parity);
    wgmma_fence();
    product_scores<CFG_D>(acc, s.k + wg * 64 * 128, s.q + c.at.slot * Q_BYTES, 0);
    wgmma_commit();
    step = load_four(s.steps + (c.n & (STEPS - 1)) * 16);
    wgmma_wait<0>();
    return !(step.w & STEP_END);
}

DEVICE places places_of(const key_tile &t, const int4 &step, int wg)
{
    places at;
    at.b = t.b;
    at.h = step.z;
    at.q = step.y + 2 * (threadIdx.x & 3) + t.q_offset;
    at.key = t.key0 + wg * 64 + (threadIdx.x / 32 & 3) * 16 + (threadIdx.x & 31) / 4;
    at.kv = at.key + t.kv_offset;
    at.kv_len = t.kv_len;
    return at;
}

/* One block of queries: weights, then dV beside what dS takes, then dK. */
DEVICE void use_block(const arena &s, const consumer &c, const cu_bwd &p, const mod_args &mod,
                      const key_tile &t, const int4 &step, float (&acc)[S_COUNT],
                      float (&dk)[CFG_D / 2], float (&dv)[CFG_E / 2], int wg)
{
    u32 w[S_COUNT / 2], g[G_COUNT], ds[S_COUNT / 2];
    u32 stat = c.at.slot * STAT_BYTES + (threadIdx.x & 3) * 8;
    places at = places_of(t, step, wg);
    weights(w, g, acc, s.lse + stat, p, mod, at);
    if (step.w & STEP_MASKED)
        cut_weights(w, g, p.f, mod, at);
    barrier_wait(s.o_full + c.at.slot * 8, c.at.parity);
#if CFG_DQ || CFG_DK
    start_dp(acc, s.delta + stat);
    wgmma_fence();
    product_scores<CFG_E>(acc, s.v + wg * 64 * 128, s.d_out + c.at.slot * O_BYTES, 1);
    wgmma_commit();
#else
    wgmma_fence();
#endif
#if CFG_DV
    product_dv(dv, w, s.d_out + c.at.slot * O_BYTES, c.n > 0);
    wgmma_commit();
#endif
#if CFG_DQ || CFG_DK
    wgmma_wait<CFG_DV>();
    if ((MOD_SCORE && SCORE_MAY_MASK) || (step.w & STEP_MASKED))
        cut_dp(acc, w);
#if HAS_SLOPES
    gradients(ds, g, acc);
#else
    gradients(ds, w, acc);
#endif
#endif
    put_ds(s, c.n, ds, wg);
#if CFG_DK
    wgmma_fence();
    product_dk(dk, ds, s.q + c.at.slot * Q_BYTES, c.n > 0);
    wgmma_commit();
#endif
    wgmma_wait<0>();
}

DEVICE void consume(const arena &s, const cu_bwd &p, const mod_args &mod, int turn, int wg)
{
    float acc[S_COUNT], dk[CFG_D / 2], dv[CFG_E / 2];
    consumer c = {{0, 0}, 0};
    int4 step;
    key_tile t = key_tile_at(p.f, turn);
    barrier_wait(s.kv_full, 0);
    while (take_scores(s, c, acc, step, wg)) {
        use_block(s, c, p, mod, t, step, acc, dk, dv, wg);
        ring_next(c.at);
        c.n++;
    }
    barrier_wait(s.ds_empty + (c.n & 1) * 8, (c.n >> 1 & 1) ^ 1);
    barrier_arrive_if(s.ds_full + (c.n & 1) * 8, (threadIdx.x & 31) == 0);
    int row = t.key0 + wg * 64 + (threadIdx.x / 32 & 3) * 16 + (threadIdx.x & 31) / 4;
    if (CFG_DK)
        store_rows(result_of(p, p.dk, p.dks, t.b, t.g, 0, BWD_OF_K), row, p.f.N, CFG_D_REAL,
                   p.f.scale, c.n > 0, dk);
    if (CFG_DV)
        store_rows(result_of(p, p.dv, p.dvs, t.b, t.g, 0, BWD_OF_V), row, p.f.N, CFG_E_REAL,
                   1.f, c.n > 0, dv);
}

/* 4. Who does what. */
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    bwd_sm90(const __grid_constant__ cu_bwd p, const __grid_constant__ mod_args mod,
             const __grid_constant__ tensor_map mq, const __grid_constant__ tensor_map mk,
             const __grid_constant__ tensor_map mv, const __grid_constant__ tensor_map mo)
{
    extern __shared__ __align__(1024) char shared[];
    arena s = carve(shared);
    if (threadIdx.x == 0)
        init_barriers(s);
    __syncthreads();
    int group = threadIdx.x / 128;
    if (group < DQ_GROUP) {
        registers_grow<CFG_REGS_CONSUMER>();
        consume(s, p, mod, blockIdx.x, group);
    } else if (group == DQ_GROUP) {
        registers_shrink<CFG_REGS_DQ>();
        sum_dq(s, p, blockIdx.x, &mq, &mk, &mv, &mo);
    }
#if CFG_SPLIT
    else {
        registers_shrink<CFG_REGS_HELPERS>();
        if (threadIdx.x == (DQ_GROUP + 1) * 128)
            load_all(s, p, blockIdx.x, &mq, &mk, &mv, &mo);
        else if (threadIdx.x == (DQ_GROUP + 1) * 128 + 32 && CFG_DQ)
            write_dq(s, p);
    }
#endif
}
