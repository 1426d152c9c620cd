/* Backward attention for Hopper: one CTA makes dK and dV of CFG_WGS * 64 keys of one key head
 * and adds its part to dQ, looping over the blocks of 64 queries that meet them, for every
 * query head of the group. Scores are made transposed (keys are rows), so that P and dS go to
 * the products of dV and dK straight from registers (FA3, arXiv 2407.08608).
 *
 * Consumer warpgroups hold 64 keys each and never wait for one another. dQ = dS K has a
 * warpgroup of its own (bwd_dq.cuh): it takes dS of all consumers from shared memory
 * (bwd_shared.cuh) and adds its product to dq_sum in global memory, by default as integers,
 * whose sums do not depend on their order. That warpgroup also loads (bwd_load.cuh), or with
 * CFG_HELPERS a fourth one does. Of CFG_DQ, CFG_DK and CFG_DV, what is 0 is not computed. */
#include "cfg.cuh"
#include "ptx.cuh"
#include "bwd.h"
#include "arith.cuh"
#include "mod.cuh"
#include "kv.cuh"
#include "bwd_copy.cuh"
#include "bwd_tile.cuh"
#include "bwd_mod.cuh"
#include "dense.cuh"
#include "bwd_row.cuh"
#include "bwd_store.cuh"
#include "wgmma.cuh"
#include "bwd_ring.cuh"
#include "bwd_shared.cuh"
#include "bwd_products.cuh"
#include "bwd_weights.cuh"
#include "bwd_load.cuh"
#include "bwd_terms.cuh"
#include "bwd_lines.cuh"
#include "bwd_key_sums.cuh"
#include "bwd_dq.cuh"

/* 1. What consumers leave for the others. */

/* Where a lane's 16 bytes of dS lie in a tile of dS: a swizzled row of 128 bytes to a key. The
 * other addresses that a step needs (group_row, pair_place) follow from the bits of this one,
 * to save registers. */
DEVICE u32 own_place(int wg)
{
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32 & 3;
    int row = wg * 64 + warp * 16 + (lane & 15);
    u32 own = row * 128 + (lane >> 4 ^ row & 7) * 16;
    asm volatile("" : "+r"(own));
    return own;
}

/* of its warpgroup's first key, among rows of 128 bytes */
DEVICE u32 group_row(u32 own)
{
    return own & ~(64 * 128 - 1);
}

/* of the two queries that a thread has of each eight, among those of a step, in bytes */
DEVICE u32 pair_place(u32 own)
{
    return own >> 4 & 24;
}

/* dS of this warp's 16 keys to rows of 64 queries */
DEVICE void share_ds(u32 tile, const u32 (&ds)[S_COUNT / 2], u32 own)
{
    u32 at = tile + own;
#pragma unroll
    for (int kk = 0; kk < BWD_ROWS / 16; kk++)
        store_matrices(at ^ kk * 32, ds[4 * kk], ds[4 * kk + 1], ds[4 * kk + 2],
                       ds[4 * kk + 3]);
    fence_async_proxy();
}

/* 2. Consumer warpgroup wg. */
struct consumer {
    u32 own; /* own_place */
    u32 slot; /* of the ring of Q and dO */
    u32 n;    /* steps that this CTA has done; bit 31 is the parity of the ring's round, packed
               * to save a register */
    dropper drop;
    u32 drawn; /* of the step to come */
#if HAS_SHARES
    lane_shares shares; /* of the step to come */
#endif
    key_sums sums;
};

DEVICE u32 parity_of(u32 n)
{
    return n >> 31;
}

DEVICE void step_next(u32 &slot, u32 &n)
{
    n++;
    slot++;
    if (slot == CFG_STAGES) {
        slot = 0;
        n ^= 1u << 31;
    }
}

/* is_new: 0 where it lies there already */
DEVICE void put_ds(const arena &s, u32 n, const u32 (&ds)[S_COUNT / 2], u32 own, int is_new)
{
    barrier_wait(s.ds_empty + (n & 1) * 8, (n >> 1 & 1) ^ 1);
    if (CFG_DQ && is_new)
        share_ds(s.ds + (n & 1) * DS_BYTES, ds, own);
    warp_arrives(s.ds_full + (n & 1) * 8);
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

/* Begins S = K Q^T of a step. After the last step the product runs on stale data and nobody
 * uses its result, which saves a branch. */
DEVICE void start_scores(const arena &s, const consumer &c, float (&acc)[S_COUNT], int4 &step,
                         int wg)
{
    barrier_wait(s.q_full + c.slot * 8, parity_of(c.n));
    step = load_four(s.steps + (c.n & (STEPS - 1)) * 16);
#if CFG_RAGGED
    clear_past<PANELS_D>(s.q + c.slot * Q_BYTES, step, wg);
#endif
    u32 keys = s.k + group_row(c.own);
    asm volatile("" : "+r"(keys)); /* its descriptor is made again: kept, it takes registers */
    wgmma_fence();
    product_scores<CFG_D>(acc, keys, s.q + c.slot * Q_BYTES, 0);
    wgmma_commit();
}

/* What is known of a step before its scores are there, made meanwhile: which weights are kept,
 * and what its scores share. */
DEVICE void make_ahead(consumer &c, const cu_bwd &p, const mod_args &mod, const key_tile &t,
                       const int4 &step, int wg)
{
    if (CFG_DROP && !(step.w & STEP_END))
        c.drawn = draw_kept(c.drop, p.f, places_of(t, step, wg));
#if HAS_SHARES
    if (!(step.w & STEP_END))
        share_step(c.shares, p.f, mod, places_of(t, step, wg));
#endif
}

/* Begins dP, where a gradient takes it. */
DEVICE void start_block_dp(const arena &s, const consumer &c, const int4 &step,
                           float (&dp)[S_COUNT], u32 minus_delta, int wg)
{
    barrier_wait(s.o_full + c.slot * 8, parity_of(c.n));
#if CFG_RAGGED
    clear_past<PANELS_E>(s.d_out + c.slot * O_BYTES, step, wg);
#endif
#if CFG_DQ || CFG_DK
    start_dp(dp, minus_delta);
    u32 values = s.v + group_row(c.own);
    asm volatile("" : "+r"(values)); /* as in start_scores */
    wgmma_fence();
    product_scores<CFG_E>(dp, values, s.d_out + c.slot * O_BYTES, !CFG_DROP);
    wgmma_commit();
#endif
}

/* With a slope for each head and several heads to a group, dS is multiplied by the slope before
 * dK; for dQ bwd_finish applies it. */
#define HAS_SLOPED (CFG_LATE_SLOPE && CFG_GROUP > 1 && CFG_DK)

/* What a block's products take: weights of dV, dS of dQ and of dK. */
struct block_words {
    u32 w[S_COUNT / 2], ds[S_COUNT / 2];
#if HAS_SLOPED
    u32 sloped[S_COUNT / 2];
#endif
};

/* What a consumer is at: weights of a block whose dP is made, in acc. */
struct block {
    int4 step;
    kept weights;
    float acc[S_COUNT];
};

/* Where this thread reads the tiles of the present step. */
DEVICE dense_lanes dense_lanes_of(const arena &s, const consumer &c, const cu_bwd &p, int wg)
{
    dense_lanes lanes;
#if CFG_DENSE
    dense_begin(p.f, s.dense + dense_slot(c.n) * DENSE_BYTES, wg, lanes.of);
#endif
    return lanes;
}

/* Weights of a block's scores, and of dV. */
template <int TURNED>
DEVICE void weigh_scores(block &x, u32 (&w)[S_COUNT / 2], weigher &y, const dense_lanes &lanes,
                         u32 drawn)
{
#pragma unroll
    for (int i = 0; i < S_COUNT / 4; i++) {
        float g[4], *of = x.acc + 4 * i;
#if HAS_DENSE_SCORE
        dense_next<0, SCORE_DENSE, TURNED>(y.dense, y.pairs, lanes, i);
#endif
        four_weights(of, g, y, i);
        if (HAS_SLOPES)
            pack_four(w, of, drawn, i);
        keep_four(x.weights, i, HAS_SLOPES ? g : of);
    }
}

/* Weights of a block's scores, which give their registers to dP. When it returns, all products
 * are done. */
DEVICE void weigh_block(block &x, u32 (&w)[S_COUNT / 2], const arena &s, const consumer &c,
                        const cu_bwd &p, const mod_args &mod, const key_tile &t, int wg)
{
    u32 stat = c.slot * STAT_BYTES + pair_place(c.own);
    places at = places_of(t, x.step, wg);
    weigher y = weigher_of(p, mod, at, s.lse + stat SHARES_OF(c.shares));
    dense_lanes lanes = dense_lanes_of(s, c, p, wg);
    with_ways<0, SCORE_DENSE>(p.f, [&](auto ways) {
        weigh_scores<decltype(ways)::TURNED>(x, w, y, lanes, c.drawn);
    });
    start_block_dp(s, c, x.step, x.acc, s.delta + stat, wg);
    wgmma_wait<0>();
}

/* dS of a block, and what dV takes. */
DEVICE void grade_block(block_words &to, block &x, const arena &s, const consumer &c,
                        const cu_bwd &p, const mod_args &mod, const places &at)
{
    u32 minus_delta = s.delta + c.slot * STAT_BYTES + pair_place(c.own);
#pragma unroll
    for (int i = 0; i < S_COUNT / 4; i++) {
        float g[4], *of = x.acc + 4 * i;
        take_four(g, x.weights, i);
        if (!HAS_SLOPES)
            pack_four(to.w, g, c.drawn, i);
        if (CFG_DQ || CFG_DK)
            four_gradients(to.ds, g, of, p.f, c.drawn, minus_delta, i);
#if HAS_SLOPED
        float slope = row_slope(mod, p.f, at.b, at.h, at.q);
        to.sloped[2 * i] = pack(of[0] * slope, of[1] * slope);
        to.sloped[2 * i + 1] = pack(of[2] * slope, of[3] * slope);
#endif
    }
}

/* The tile as the loads left it: what only masks ask for takes no register beside them. */
DEVICE key_tile tile_again(const arena &s, const key_tile &t)
{
    key_tile again = t;
    int4 from = load_four(s.tile + 16);
    again.b = load_four(s.tile).x;
    again.key0 = from.x;
    again.q_offset = from.y;
    again.kv_offset = from.z;
    again.kv_len = from.w;
    return again;
}

DEVICE void cut_block(block_words &x, const arena &s, const consumer &c, const cu_bwd &p,
                      const mod_args &mod, const key_tile &t, const int4 &step, int wg)
{
    int flags = step.w & ~STEP_FIRST;
    if (!flags)
        return;
    cut_step(x.w, x.ds, p.f, mod, places_of(tile_again(s, t), step, wg),
             dense_lanes_of(s, c, p, wg), flags);
#if HAS_SLOPED
    cut_as(x.sloped, x.ds);
#endif
}

/* The next block's scores come before dK, so that its weights are made beside dK, where there
 * are registers for dS that long, and its stage is not waited for; else behind it. */
#define HAS_LATE_DK                                                                           \
    (CFG_DK && (MOD_SCORE == SCORE_NONE || IS_LINE) && !CFG_DROP && !CFG_F16 && !HAS_KEY_SUMS \
     && !FREES_EARLY)

DEVICE void start_dk(const arena &s, const block_words &words, float (&dk)[CFG_D / 2],
                     key_sums &sums, u32 slot, int add)
{
#if CFG_DK || HAS_KEY_SUMS
    wgmma_fence();
#if CFG_DK && HAS_SLOPED
    product_dk(dk, words.sloped, s.q + slot * Q_BYTES, add);
#elif CFG_DK
    product_dk(dk, words.ds, s.q + slot * Q_BYTES, add);
#endif
#if HAS_KEY_SUMS
    product_key_sums(sums, s, words.ds);
    sums.any = 1;
#endif
    wgmma_commit();
#endif
}

/* Sums of keys end with their head. */
DEVICE void end_head(consumer &c, const cu_bwd &p, const mod_args &mod, const cu_reads &reads,
                     const key_tile &t, int h, const int4 &next, int wg)
{
#if HAS_KEY_SUMS
    if (next.w & STEP_END || (CFG_GROUP > 1 && next.z != h))
        end_key_sums(c.sums, p, mod, reads, t, h, wg);
#endif
}

/* One block of queries whose dP is made: dS, dV and dK, and the scores of the next one. */
DEVICE void use_block(block &x, block_words &words, const arena &s, consumer &c,
                      const cu_bwd &p, const mod_args &mod, const cu_reads &reads,
                      const key_tile &t, float (&dk)[CFG_D / 2], float (&dv)[CFG_E / 2], int wg)
{
    u32 slot = c.slot;
    int add = !(x.step.w & STEP_FIRST);
    places at = places_of(t, x.step, wg);
    grade_block(words, x, s, c, p, mod, at);
    cut_block(words, s, c, p, mod, t, x.step, wg);
#if CFG_DV
    wgmma_fence();
    product_dv(dv, words.w, s.d_out + slot * O_BYTES, add);
    wgmma_commit();
#endif
    put_ds(s, c.n, words.ds, c.own, 1);
    step_next(c.slot, c.n);
    if (!HAS_LATE_DK)
        start_dk(s, words, dk, c.sums, slot, add);
    /* dV's operand gives its registers to the scores; others take dK's as well */
    wgmma_wait<!HAS_LATE_DK && CFG_DK && !HAS_SLOPES && !CFG_DROP>();
    start_scores(s, c, x.acc, x.step, wg);
    if (HAS_LATE_DK)
        start_dk(s, words, dk, c.sums, slot, add);
    make_ahead(c, p, mod, t, x.step, wg);
    wgmma_wait<HAS_LATE_DK>();
    if (FREES_EARLY)
        warp_arrives(s.used + slot * 8);
    end_head(c, p, mod, reads, t, at.h, x.step, wg);
}

/* Passes the steps of a tile in which this group has no live key: its dS is 0, from the first
 * two steps on, which have a place each. */
DEVICE void pass_steps(consumer &c, const arena &s)
{
    static_assert(!(CFG_PASSES && FREES_EARLY), "nobody says that a step has been passed");
    u32 zeros[S_COUNT / 2];
#pragma unroll
    for (int i = 0; i < S_COUNT / 2; i++)
        zeros[i] = 0;
#pragma unroll 1
    for (int n = 0;; n++) {
        barrier_wait(s.q_full + c.slot * 8, parity_of(c.n));
        int4 step = load_four(s.steps + (c.n & (STEPS - 1)) * 16);
        if (step.w & STEP_END)
            return;
        put_ds(s, c.n, zeros, c.own, n < 2);
        step_next(c.slot, c.n);
    }
}

/* Returns how the tile ends. */
DEVICE int4 consume_tile(consumer &c, const arena &s, const cu_bwd &p, const mod_args &mod,
                         const cu_reads &reads, int turn, u32 parity, int wg)
{
    float dk[CFG_D / 2], dv[CFG_E / 2];
    block x;
    block_words words;
    key_tile t = key_tile_at(p.f, turn);
    barrier_wait(s.kv_full, parity);
    int is_dead = t.key0 + wg * 64 >= t.kv_len;
    if (CFG_PASSES && __builtin_expect(__all_sync(~0u, is_dead), 0)) { /* uniform for ptxas */
        pass_steps(c, s);
        clear(dk);
        clear(dv);
    }
    start_scores(s, c, x.acc, x.step, wg);
    make_ahead(c, p, mod, t, x.step, wg);
    wgmma_wait<0>();
#if HAS_LATE_DK
    if (!(x.step.w & STEP_END)) {
        weigh_block(x, words.w, s, c, p, mod, t, wg);
        for (;;) { /* no product is under way where it begins again */
            use_block(x, words, s, c, p, mod, reads, t, dk, dv, wg);
            if (x.step.w & STEP_END)
                break;
            weigh_block(x, words.w, s, c, p, mod, t, wg);
        }
        wgmma_wait<0>();
    }
#else
    while (!(x.step.w & STEP_END)) {
        weigh_block(x, words.w, s, c, p, mod, t, wg);
        use_block(x, words, s, c, p, mod, reads, t, dk, dv, wg);
    }
#endif
    barrier_wait(s.ds_empty + (c.n & 1) * 8, (c.n >> 1 & 1) ^ 1);
    warp_arrives(s.ds_full + (c.n & 1) * 8); /* no lane waits for the round before */
    if (FREES_EARLY)
        warp_arrives(s.used + c.slot * 8);
    int4 end = load_four(s.steps + (c.n & (STEPS - 1)) * 16);
    int has = !(end.w & STEP_FIRST);
    t = key_tile_of(p.f, end.z); /* kept through the loop it would cost registers, as the row */
    asm volatile("" : "+r"(wg));
    int row = t.key0 + wg * 64 + (threadIdx.x / 32 & 3) * 16 + (threadIdx.x & 31) / 4;
    float scale = p.f.scale * BWD_WEIGHT_UNIT;
#if CFG_LATE_SLOPE && CFG_GROUP == 1
    scale *= row_slope(mod, p.f, t.b, keys_head(p, t), 0);
#endif
    if (CFG_DK)
        store_keys(p, 0, t.b, t.g, tile_rows_of(p.f, t).kv_first, row,
                   tile_rows_of(p.f, t).keys, CFG_D_REAL, scale, has, dk);
    if (CFG_DV)
        store_keys(p, 1, t.b, t.g, tile_rows_of(p.f, t).kv_first, row,
                   tile_rows_of(p.f, t).keys, CFG_E_REAL, value_factor(p.f) * BWD_WEIGHT_UNIT,
                   has, dv);
    tell_stored(p, turn);
    return end;
}

DEVICE void consume(const arena &s, const cu_bwd &p, const mod_args &mod, const cu_reads &reads,
                    int wg)
{
    u32 own = own_place(wg), slot = 0, n = 0, parity = 0;
    int turn = blockIdx.x;
    do {
        consumer c = {own, slot, n, no_dropper()}; /* the rest of it is 0 */
        int4 end = consume_tile(c, s, p, mod, reads, turn, parity, wg);
        slot = c.slot;
        n = c.n;
        step_next(slot, n);
        turn = end.x;
        parity = end.y;
    } while (CFG_TAKES_MANY && turn < p.f.n_tiles);
}

/* 3. Who does what. */
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    bwd_sm90(const __grid_constant__ cu_bwd p, const __grid_constant__ mod_args mod,
             const __grid_constant__ tensor_map mq, const __grid_constant__ tensor_map mk,
             const __grid_constant__ tensor_map mv, const __grid_constant__ tensor_map mo,
             const __grid_constant__ cu_reads reads DENSE_PARAMETER)
{
    extern __shared__ __align__(1024) char shared[];
    arena s = carve(shared);
    if (threadIdx.x == 0)
        init_barriers(s);
#if HAS_KEY_SUMS
    if (threadIdx.x / 32 == 1)
        put_ones(s);
#endif
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
    load_maps maps = {&mq, &mk, &mv, &mo, DENSE_MAPS};
    if (group < DQ_GROUP) {
        registers_grow<CFG_REGS_CONSUMER>();
        consume(s, p, mod, reads, group);
    } else if (group == DQ_GROUP) {
        registers_shrink<CFG_REGS_DQ>();
        sum_dq(s, p, mod, reads, maps);
    }
#if CFG_HELPERS
    else {
        registers_shrink<CFG_REGS_HELPERS>();
        if (threadIdx.x == (DQ_GROUP + 1) * 128)
            load_all(s, p, mod, maps);
        else if (threadIdx.x == (DQ_GROUP + 1) * 128 + 32 && CFG_DQ)
            write_dq(s, p);
    }
#endif
}
