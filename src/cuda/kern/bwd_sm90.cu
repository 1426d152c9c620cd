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
#include "bwd_ring.cuh"
#include "bwd_shared.cuh"
#include "bwd_products.cuh"
#include "bwd_weights.cuh"
#include "bwd_load.cuh"
#include "bwd_terms.cuh"
#include "bwd_lines.cuh"
#include "bwd_dq.cuh"

/* 1. What consumers leave for the others. */

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

/* 2. Consumer warpgroup wg. */
struct consumer {
    ring<CFG_STAGES> at;
    u32 n; /* steps done */
    dropper drop;
};

DEVICE void put_ds(const arena &s, u32 n, const u32 (&ds)[S_COUNT / 2], int wg)
{
    barrier_wait(s.ds_empty + (n & 1) * 8, (n >> 1 & 1) ^ 1);
    if (CFG_DQ)
        share_ds(s.ds + (n & 1) * DS_BYTES, ds, wg);
    __syncwarp();
    barrier_arrive_if(s.ds_full + (n & 1) * 8, (threadIdx.x & 31) == 0);
}

#if CFG_RAGGED
/* Rows past a sequence's last are its neighbour's, and 0 * NaN must not be seen. Each group
 * clears all it reads, so that none waits for another. */
template <int PANELS> DEVICE void clear_past(u32 tile, const int4 &step, int wg)
{
    int n = BWD_ROWS - (step.w >> STEP_ROWS);
    if (n == BWD_ROWS) /* all are there */
        return;
#pragma unroll 1
    for (int i = threadIdx.x & 127; i < n * PANELS * 8; i += 128) {
        int row = BWD_ROWS - 1 - i / (PANELS * 8), piece = i % (PANELS * 8);
        store_four(tile + piece / 8 * QUERY_PANEL + row * 128 + piece % 8 * 16, 0, 0, 0, 0);
    }
    fence_async_proxy();
    named_sync(2 + wg, 128);
}
#endif

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

/* Scores of this step, and whether there is one: past the last, what an earlier step left is
 * multiplied once more, for nothing. */
DEVICE int take_scores(const arena &s, consumer &c, const cu_bwd &p, const key_tile &t,
                       float (&acc)[S_COUNT], int4 &step, int wg)
{
    barrier_wait(s.q_full + c.at.slot * 8, c.at.parity);
#if CFG_RAGGED
    step = load_four(s.steps + (c.n & (STEPS - 1)) * 16);
    clear_past<PANELS_D>(s.q + c.at.slot * Q_BYTES, step, wg);
#endif
    wgmma_fence();
    product_scores<CFG_D>(acc, s.k + wg * 64 * 128, s.q + c.at.slot * Q_BYTES, 0);
    wgmma_commit();
    step = load_four(s.steps + (c.n & (STEPS - 1)) * 16);
    wgmma_wait<0>();
    return !(step.w & STEP_END);
}

#if HAS_OWN
#define WEIGHTS_OF_DS g
#else
#define WEIGHTS_OF_DS w
#endif

/* One block of queries: weights, then dV beside what dS takes, then dK. */
DEVICE void use_block(const arena &s, consumer &c, const cu_bwd &p, const mod_args &mod,
                      const key_tile &t, const int4 &step, float (&acc)[S_COUNT],
                      float (&dk)[CFG_D / 2], float (&dv)[CFG_E / 2], int wg)
{
    u32 w[S_COUNT / 2], g[G_COUNT], ds[S_COUNT / 2];
    u32 stat = c.at.slot * STAT_BYTES + (threadIdx.x & 3) * 8;
    places at = places_of(t, step, wg);
    weights(w, g, acc, s.lse + stat, p, mod, at);
    cut_step(w, g, p.f, mod, at, step.w);
#if CFG_DROP
    dropper_enter(c.drop, p.f, t.b, at.h);
    drop_kept(w, g, c.drop, p.f, at);
#endif
    barrier_wait(s.o_full + c.at.slot * 8, c.at.parity);
#if CFG_RAGGED
    clear_past<PANELS_E>(s.d_out + c.at.slot * O_BYTES, step, wg);
#endif
#if CFG_DQ || CFG_DK
    if (!CFG_DROP)
        start_dp(acc, s.delta + stat);
    wgmma_fence();
    product_scores<CFG_E>(acc, s.v + wg * 64 * 128, s.d_out + c.at.slot * O_BYTES, !CFG_DROP);
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
#if CFG_DROP
    drop_dp(acc, w, p.f, s.delta + stat);
#endif
    if ((MOD_SCORE && SCORE_MAY_MASK) || step.w)
        cut_dp(acc, WEIGHTS_OF_DS);
    gradients(ds, WEIGHTS_OF_DS, acc);
#endif
    put_ds(s, c.n, ds, wg);
#if CFG_LATE_SLOPE && CFG_GROUP > 1 && CFG_DK
    sloped_gradients(ds, WEIGHTS_OF_DS, acc, row_slope(mod, p.f, at.b, at.h, at.q));
#endif
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
    consumer c = {{0, 0}, 0, no_dropper()};
    int4 step;
    key_tile t = key_tile_at(p.f, turn);
    barrier_wait(s.kv_full, 0);
    while (take_scores(s, c, p, t, acc, step, wg)) {
        use_block(s, c, p, mod, t, step, acc, dk, dv, wg);
        ring_next(c.at);
        c.n++;
    }
    barrier_wait(s.ds_empty + (c.n & 1) * 8, (c.n >> 1 & 1) ^ 1);
    barrier_arrive_if(s.ds_full + (c.n & 1) * 8, (threadIdx.x & 31) == 0);
#if CFG_RAGGED /* asked for again: kept through the loop it would cost registers */
    asm volatile("" : "+r"(turn));
    t = key_tile_at(p.f, turn);
#endif
    int row = t.key0 + wg * 64 + (threadIdx.x / 32 & 3) * 16 + (threadIdx.x & 31) / 4;
    float scale = p.f.scale;
#if CFG_LATE_SLOPE && CFG_GROUP == 1
    scale *= row_slope(mod, p.f, t.b, t.g, 0);
#endif
    if (CFG_DK)
        store_keys(p, 0, t.b, t.g, tile_rows_of(p.f, t).kv_first, row,
                   tile_rows_of(p.f, t).keys, CFG_D_REAL, scale, c.n > 0, dk);
    if (CFG_DV)
        store_keys(p, 1, t.b, t.g, tile_rows_of(p.f, t).kv_first, row,
                   tile_rows_of(p.f, t).keys, CFG_E_REAL, value_factor(p.f), c.n > 0, dv);
}

/* 3. Who does what. */
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    bwd_sm90(const __grid_constant__ cu_bwd p, const __grid_constant__ mod_args mod,
             const __grid_constant__ tensor_map mq, const __grid_constant__ tensor_map mk,
             const __grid_constant__ tensor_map mv, const __grid_constant__ tensor_map mo,
             const __grid_constant__ cu_reads reads)
{
    extern __shared__ __align__(1024) char shared[];
    arena s = carve(shared);
    if (threadIdx.x == 0)
        init_barriers(s);
    __syncthreads();
    grid_let_next();
#if CFG_RAGGED
    key_tile t = key_tile_at(p.f, blockIdx.x);
    if (t.key0 >= tile_rows_of(p.f, t).keys) {
        grid_wait_before(); /* what comes next waits for this kernel alone */
        return;
    }
#endif
    int group = threadIdx.x / 128;
    if (group < DQ_GROUP) {
        registers_grow<CFG_REGS_CONSUMER>();
        consume(s, p, mod, blockIdx.x, group);
    } else if (group == DQ_GROUP) {
        registers_shrink<CFG_REGS_DQ>();
        sum_dq(s, p, mod, reads, blockIdx.x, &mq, &mk, &mv, &mo);
    }
#if CFG_SPLIT
    else {
        registers_shrink<CFG_REGS_HELPERS>();
        if (threadIdx.x == (DQ_GROUP + 1) * 128)
            load_all(s, p, mod, blockIdx.x, &mq, &mk, &mv, &mo);
        else if (threadIdx.x == (DQ_GROUP + 1) * 128 + 32 && CFG_DQ)
            write_dq(s, p);
    }
#endif
}
