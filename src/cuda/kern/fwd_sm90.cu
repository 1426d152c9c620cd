/* Forward attention for Hopper: one CTA makes a tile of CFG_WGS * 64 rows of one head. A
 * producer warp feeds K and V blocks through shared memory (TMA, mbarriers); each consumer
 * warpgroup holds 64 rows, its scores S and its output O in registers. The product of the next
 * block's scores runs while this block's softmax is computed, and P goes to the second product
 * straight from registers (FA3, arXiv 2407.08608, section 3).
 *
 * cfg.cuh: constants of this instance. mod.cuh: the user's mask and score. wgmma.cuh: the
 * products at its widths. fwd_turns.cuh: shared memory, and whose turn it is. fwd_load.cuh:
 * the producer. */
#include "cfg.cuh"
#include "ptx.cuh"
#include "launch.h"
#include "arith.cuh"
#include "mod.cuh"
#include "mod_mask.cuh"
#include "mod_score.cuh"
#include "walk.cuh"
#include "epilogue.cuh"
#include "wgmma.cuh"
#include "kv.cuh"
#include "shared.cuh"
#include "gather.cuh"
#include "block90.cuh"
#include "parts.cuh"
#include "fwd_turns.cuh"
#include "fwd_load.cuh"

/* 1. The products of block n and its softmax: block90.cuh. */
template <int FIRST>
DEVICE int softmax_of(const arena &sm, u32 n, consumer &c, const cu_fwd &p, const mod_args &mod,
                      const block_walk &walk, int wg, float (&s)[S_COUNT], float (&rescale)[2])
{
#if CFG_DENSE
    u32 slot = ring_slot<CU_DENSE_STAGES>(n);
    barrier_wait(sm.dense_full + slot * 8, ring_parity<CU_DENSE_STAGES>(n));
    dense_begin(p, sm.dense + slot * dense_stage_bytes(), wg, c.at.dense);
#endif
    int raised =
        softmax_step<FIRST>(c, p, mod, walk.block * CFG_TN, walk_masked(walk, c.at.kv_len),
                            sm.columns + wg * CFG_TN, wg, s, rescale);
#if CFG_DENSE
    __syncwarp();
    barrier_arrive_if(sm.dense_empty + slot * 8, (threadIdx.x & 31) == 0);
#endif
    return raised;
}

/* The weights of a block packed, 0 where dropout drops them. */
DEVICE void pack_kept(u32 (&prob)[S_COUNT / 2], const float (&s)[S_COUNT], const consumer &c,
                      const cu_fwd &p, const block_walk &walk)
{
    pack_p(prob, s);
#if CFG_DROP && !DROP_MIXED
    int column = walk.block * CFG_TN + 2 * (threadIdx.x & 3);
    drop_packed(prob, c.at.drop, p.drop, c.at.q, column + c.at.kv_offset);
#endif
}

/* 2. Consumer warpgroup wg. */
struct progress {
    u32 n;     /* blocks whose scores have been made, over all tiles; of V one less is used */
    u32 tiles; /* tiles that had a block, and so a Q to wait for */
};

DEVICE void release(u32 empty, u32 n)
{
    barrier_arrive_if(empty + ring_slot<CFG_STAGES>(n) * 8, (threadIdx.x & 31) == 0);
}

DEVICE void await(u32 full, u32 n)
{
    barrier_wait(full + ring_slot<CFG_STAGES>(n) * 8, ring_parity<CFG_STAGES>(n));
#if CFG_GATHERS
    fence_async_proxy(); /* products read what gather.cuh wrote */
#endif
}

DEVICE void start_qk(const arena &sm, float (&s)[S_COUNT], int wg, u32 n)
{
    product_qk(s, sm.q + wg * 64 * 128, sm.k + ring_slot<CFG_STAGES>(n) * K_BYTES);
    wgmma_commit();
}

DEVICE void start_pv(const arena &sm, float (&o)[O_COUNT], const u32 (&prob)[S_COUNT / 2],
                     u32 n)
{
    await(sm.v_full, n);
    product_pv(o, prob, sm.v + ring_slot<CFG_STAGES>(n) * V_BYTES);
    wgmma_commit();
}

#if CFG_CHUNKS
/* Behind the last key its page may hold anything, and 0 * NaN must not be seen. Each group
 * clears all it reads, so that none waits for another. */
DEVICE void clear_tail(const arena &sm, const consumer &c, u32 n, int wg)
{
    enum { EACH = PANELS_E * 8 }; /* pieces of 16 bytes in a row */
    if (c.live >= CFG_TN)
        return;
    u32 v = sm.v + ring_slot<CFG_STAGES>(n) * V_BYTES;
    await(sm.v_full, n);
#pragma unroll 1
    for (int i = c.live * EACH + (threadIdx.x & 127); i < CFG_TN * EACH; i += 128) {
        int row = i / EACH, piece = i % EACH;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(
                         v + piece / 8 * PANEL_KV + row * 128 + piece % 8 * 16),
                     "r"(0)
                     : "memory");
    }
    fence_async_proxy();
    named_sync(8 + wg, 128);
}
#else
DEVICE void clear_tail(const arena &, const consumer &, u32, int)
{
}
#endif

/* What scores of block n share, made while their products run. */
DEVICE void share_scores(const arena &sm, u32 n, consumer &c, const cu_fwd &p,
                         const mod_args &mod, const block_walk &walk, int wg)
{
#if CFG_SHARES
    share_block(c.at, p, mod, walk.block * CFG_TN, n, sm.shares + wg * SHARE_BYTES);
#endif
}

/* The first block of a tile has no product with V to run beside. */
DEVICE void first_block(const arena &sm, u32 n, u32 tiles, consumer &c, const cu_fwd &p,
                        const mod_args &mod, const block_walk &walk, int wg,
                        float (&s)[S_COUNT], u32 (&prob)[S_COUNT / 2])
{
    float unused[2];
    if (!CFG_BY_PARTS)
        barrier_wait(sm.q_full, tiles & 1);
    await(sm.k_full, n);
    wgmma_fence();
    start_qk(sm, s, wg, n);
    share_scores(sm, n, c, p, mod, walk, wg);
    wgmma_wait<0>();
    release(sm.k_empty, n);
    softmax_of<1>(sm, n, c, p, mod, walk, wg, s, unused);
    pack_kept(prob, s, c, p, walk);
}

/* The product for the scores of block n runs together with O += P V of block n - 1, and the
 * latter goes on while the softmax of block n is computed. */
DEVICE void next_block(const arena &sm, u32 n, consumer &c, const cu_fwd &p,
                       const mod_args &mod, const block_walk &walk, int wg, float (&s)[S_COUNT],
                       float (&o)[O_COUNT], u32 (&prob)[S_COUNT / 2])
{
    float rescale[2];
    clear_tail(sm, c, n - 1, wg);
    await(sm.k_full, n);
#if CFG_PINGPONG
    named_sync(1 + wg, 256);
#endif
    wgmma_fence();
    start_qk(sm, s, wg, n);
    start_pv(sm, o, prob, n - 1);
#if CFG_PINGPONG
    named_arrive(1 + (wg + 1 == CFG_WGS ? 0 : wg + 1), 256);
#endif
    share_scores(sm, n, c, p, mod, walk, wg);
    wgmma_wait<1>();
    release(sm.k_empty, n);
    int raised = softmax_of<0>(sm, n, c, p, mod, walk, wg, s, rescale);
    /* No row sum is negative, so this arrival never happens. ptxas does not know that, and so
     * it keeps the wait that follows behind the exponentials which the sum depends on. Without
     * this line it moves the wait before all of them. */
    barrier_arrive_if(sm.anchor, c.rows.l[0] < 0.f);
    wgmma_wait<0>();
    release(sm.v_empty, n - 1);
    if (raised)
        rows_scale(o, rescale);
    pack_kept(prob, s, c, p, walk);
}

/* more: whether scores of the tile are still to be made. */
DEVICE void last_product(const arena &sm, const consumer &c, u32 n, int wg, float (&o)[O_COUNT],
                         const u32 (&prob)[S_COUNT / 2], int more)
{
    clear_tail(sm, c, n, wg);
    barrier_arrive_if(sm.q_empty, !more && (threadIdx.x & 31) == 0);
    wgmma_fence();
    start_pv(sm, o, prob, n);
    wgmma_wait<0>();
    release(sm.v_empty, n);
}

/* What the tile's rows need in the loop; rows of several heads come without tensor copies. */
DEVICE void place_consumed(const arena &sm, consumer &c, const cu_fwd &p, const mod_args &mod,
                           const tile &t, int wg)
{
#if CFG_BY_PARTS
    item_rows_place(c.at, p, mod, t);
    named_sync(8 + wg, 128); /* all warps are done with the Q before */
    item_load_q(sm.q, p, t);
    fence_async_proxy();
    named_sync(8 + wg, 128);
#else
    rows_place(c.at, p, mod, t);
#endif
}

DEVICE void consume_tile(const arena &sm, progress &done, const cu_fwd &p, const mod_args &mod,
                         int id, int wg)
{
    consumer c;
    float s[S_COUNT], o[O_COUNT];
    u32 prob[S_COUNT / 2];
    tile begin = consumed_tile(p, id);

    rows_begin(c.rows);
    place_consumed(sm, c, p, mod, begin, wg);
    c.unit = score_unit(p);
#if SCORE_TANH
    c.large = 0;
#endif
#pragma unroll
    for (int i = 0; i < O_COUNT; i++)
        o[i] = 0.f;
    block_walk walk = walk_begin(p, mod, begin);
#if CFG_PART_KEYS && !CFG_BY_PARTS
    int more = walk_next(walk, p, c.at.kv_len), parts = 0;
    while (more) {
        int past = (walk.block / PART_BLOCKS + 1) * PART_BLOCKS;
        first_block(sm, done.n++, done.tiles, c, p, mod, walk, wg, s, prob);
        while ((more = walk_next(walk, p, c.at.kv_len)) && walk.block < past)
            next_block(sm, done.n++, c, p, mod, walk, wg, s, o, prob);
        last_product(sm, c, done.n - 1, wg, o, prob, more);
        part_end(c.rows);
        if (parts++)
            part_join(p, c.rows, o);
        if (more)
            part_put_by(p, c.rows, o);
    }
    done.tiles += parts > 0;
    part_share_sums(c.rows);
#else
    if (walk_next(walk, p, c.at.kv_len)) {
        first_block(sm, done.n++, done.tiles++, c, p, mod, walk, wg, s, prob);
        while (walk_next(walk, p, c.at.kv_len))
            next_block(sm, done.n++, c, p, mod, walk, wg, s, o, prob);
        last_product(sm, c, done.n - 1, wg, o, prob, 0);
    }
#endif
    /* The tile's place is computed again, for keeping it in registers would cost the loop above
     * some of its own. The statement hides from the compiler that id has not changed. */
    asm volatile("" : "+r"(id));
    tile end = consumed_tile(p, id);
#if CFG_BY_PARTS
    part_end(c.rows);
    part_store(p, end, c.rows, o);
#else
    float inv[2];
    int is_bad = rows_finish(c.rows, p, end, o, inv);
    list_tile(sm, p, end.id, is_bad);
    rows_store(p, end, o, inv);
#endif
}

DEVICE void consume(const arena &sm, const cu_fwd &p, const mod_args &mod, int wg)
{
    progress done = {0, 0};
#if CFG_PINGPONG
    if (wg == 0)
        named_arrive(1, 256); /* nobody comes before the first group's first block */
#endif
    for (u32 i = 0;; i++) {
        int id = turn_take(sm, i);
        if (id == NO_MORE)
            return;
        consume_tile(sm, done, p, mod, id, wg);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    fwd_sm90(const __grid_constant__ cu_fwd p, const __grid_constant__ mod_args mod,
             const __grid_constant__ tensor_map mq, const __grid_constant__ tensor_map mk,
             const __grid_constant__ tensor_map mv DENSE_PARAMETER)
{
    extern __shared__ __align__(1024) char shared[];
    arena s = carve(shared);
    if (threadIdx.x == 0)
        init_barriers(s);
    __syncthreads();
    int group = threadIdx.x / 128;
    if (group == 0) {
        registers_shrink<CFG_REGS_PRODUCER>();
        if (threadIdx.x == 0)
            produce(s, p, mod, &mq, &mk, &mv, DENSE_MAPS);
#if CFG_CHUNKS
        else if (CFG_GATHERS ? threadIdx.x >= 32 && threadIdx.x < 96
                             : threadIdx.x == 32 || threadIdx.x == 64)
            load_along(s, p, mod, &mk, &mv);
#endif
    } else {
        registers_grow<CFG_REGS_CONSUMER>();
        consume(s, p, mod, group - 1);
    }
}

#if CFG_BY_PARTS
#include "join_parts.cuh"
#endif
