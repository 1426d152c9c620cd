/* Forward attention for Hopper where rows see few keys: one CTA makes one tile of 64 rows of
 * one head with one warpgroup, and a multiprocessor has CFG_CTAS of them. What a large tile
 * hides by warps of its own (copies, the products behind the softmax) lies here under the work
 * of other CTAs. Keys are taken in pieces of CFG_TN that begin at any key: those that the host
 * lists for the tile, or from the tile's first live key on.
 *
 * Offsets are exact, and rows that are not finite are made again here: a run is one launch.
 * Shared memory, in swizzled rows of 128 bytes, panels of 64 columns: Q [panels][64][64], then
 * a ring of CFG_STAGES pieces of K or V by turns, then barriers. */
#include "cfg.cuh"
#include "ptx.cuh"
#include "launch.h"
#include "arith.cuh"
#include "mod.cuh"
#include "mod_mask.cuh"
#include "mod_score.cuh"
#include "epilogue.cuh"
#include "wgmma.cuh"
#include "kv.cuh"
#include "block90.cuh"
#include "careful.cuh"

enum { SLOTS = CFG_STAGES, SLOT_BYTES = K_BYTES > V_BYTES ? K_BYTES : V_BYTES };

/* addresses of this CTA's shared memory; barriers of 8 bytes, SLOTS of each of the last two */
struct arena {
    u32 q, ring, q_full, full, empty;
    mask_column *columns; /* [CFG_TN] what a general mask needs of each key */
};

DEVICE arena carve(char *shared)
{
    arena s;
    u32 base = smem_address(shared);
    s.q = base;
    s.ring = s.q + Q_BYTES;
    s.q_full = s.ring + SLOTS * SLOT_BYTES;
    s.full = s.q_full + 8;
    s.empty = s.full + SLOTS * 8;
    s.columns = (mask_column *)(shared + (s.empty + SLOTS * 8 - base));
    return s;
}

DEVICE void init_barriers(const arena &s)
{
    barrier_init(s.q_full, 1);
    for (int i = 0; i < SLOTS; i++) {
        barrier_init(s.full + i * 8, 1);
        barrier_init(s.empty + i * 8, 4);
    }
    fence_barrier_init();
}

/* 1. What this CTA makes: a tile, and the pieces of keys that it walks. */
struct pieces {
    const int *listed; /* null: from `from` on, piece by piece */
    int first, count;
    tile_keys keys;
};

DEVICE tile begin_work(const cu_fwd &p, const mod_args &mod, pieces &x)
{
    x.listed = 0;
    if (p.work) {
        int4 w = __ldg((const int4 *)p.work + blockIdx.x);
        x.listed = p.pieces + w.y;
        x.count = w.z;
        x.first = w.w;
        return tile_at(p, w.x, ROWS);
    }
    tile t = tile_at(p, blockIdx.x, ROWS);
    x.keys = keys_of(p, mod, t, ROWS);
    x.count = max(x.keys.past - x.keys.from + CFG_TN - 1, 0) / CFG_TN;
    return t;
}

/* Piece i as cu_work has it. */
DEVICE int piece_at(const pieces &x, int i)
{
    if (x.listed)
        return i ? __ldg(x.listed + i) : x.first;
    int first = x.keys.from + i * CFG_TN;
    return first << PIECE_FLAGS | (first < x.keys.all_from || first + CFG_TN > x.keys.all_past);
}

/* 2. Loads: K and V of each piece by turns, as slots of the ring come free; thread 0 begins
 * those of K, thread 32 those of V. Load n lies in slot n % SLOTS. */
struct loads {
    const tensor_map *k, *v;
    head_box at_k, at_v;
    int count; /* of all */
};

DEVICE void load(const arena &s, const loads &l, const pieces &x, int n)
{
    if (n >= l.count || threadIdx.x != (n & 1) * 32)
        return;
    u32 slot = n % SLOTS, full = s.full + slot * 8, to = s.ring + slot * SLOT_BYTES;
    int first = piece_at(x, n / 2) >> PIECE_FLAGS, is_value = n & 1;
    if (n >= SLOTS)
        barrier_wait(s.empty + slot * 8, n / SLOTS & 1 ^ 1);
    barrier_expect(full, is_value ? V_BYTES : K_BYTES);
    if (is_value) {
#pragma unroll
        for (int i = 0; i < PANELS_E; i++)
            copy_box(to + i * PANEL_KV, l.v, i * 64, first, l.at_v.h, l.at_v.b, full,
                     EVICT_LAST);
    } else {
#pragma unroll
        for (int i = 0; i < PANELS_D; i++)
            copy_box(to + i * PANEL_KV, l.k, i * 64, first, l.at_k.h, l.at_k.b, full,
                     EVICT_LAST);
    }
}

DEVICE void load_first(const arena &s, const loads &l, const pieces &x, const tensor_map *mq,
                       int row, head_box q)
{
    if (threadIdx.x == 0) {
        barrier_expect(s.q_full, Q_BYTES);
#pragma unroll
        for (int i = 0; i < PANELS_D; i++)
            copy_box(s.q + i * PANEL_Q, mq, i * 64, row, q.h, q.b, s.q_full, EVICT_FIRST);
    }
#pragma unroll 1
    for (int n = 0; n < SLOTS; n++)
        load(s, l, x, n);
}

DEVICE u32 await(const arena &s, int n)
{
    barrier_wait(s.full + n % SLOTS * 8, n / SLOTS & 1);
    return s.ring + n % SLOTS * SLOT_BYTES;
}

DEVICE void release(const arena &s, int n)
{
    barrier_arrive_if(s.empty + n % SLOTS * 8, (threadIdx.x & 31) == 0);
}

/* 3. A piece: scores, softmax, O += P V. */
DEVICE void use_piece(const arena &sm, consumer &c, const cu_fwd &p, const mod_args &mod,
                      const loads &l, const pieces &x, int i, float (&o)[O_COUNT])
{
    float s[S_COUNT], rescale[2];
    u32 prob[S_COUNT / 2];
    int piece = piece_at(x, i), first = piece >> PIECE_FLAGS;
    u32 k = await(sm, 2 * i);
    wgmma_fence();
    product_qk(s, sm.q, k);
    wgmma_commit();
    wgmma_wait<0>();
    release(sm, 2 * i);
    int is_masked = piece & 1 | (first + CFG_TN > c.at.kv_len);
    if (softmax_step<0>(c, p, mod, first, is_masked, sm.columns, 0, s, rescale))
        rows_scale(o, rescale);
    pack_p(prob, s);
    load(sm, l, x, 2 * i + SLOTS);
    u32 v = await(sm, 2 * i + 1);
    wgmma_fence();
    product_pv(o, prob, v);
    wgmma_commit();
    wgmma_wait<0>();
    release(sm, 2 * i + 1);
    load(sm, l, x, 2 * i + 1 + SLOTS);
}

/* 4. Rows that came out not finite, in plain f32 by the warp that made them. A function of its
 * own keeps its registers out of the loop above. */
__device__ __noinline__ void redo_rows(const cu_fwd &p, const mod_args &mod, int id)
{
    tile t = tile_at(p, id, ROWS);
    int first = t.row0 + threadIdx.x / 32 * 16;
    __syncwarp();
    for (int m = first; m < min(first + 16, p.M); m++)
        redo_row(p, mod, t, m);
}

extern "C" __global__ void __launch_bounds__(128, CFG_CTAS)
    fwd_small(const __grid_constant__ cu_fwd p, const __grid_constant__ mod_args mod,
              const __grid_constant__ tensor_map mq, const __grid_constant__ tensor_map mk,
              const __grid_constant__ tensor_map mv)
{
    extern __shared__ __align__(1024) char shared[];
    arena sm = carve(shared);
    consumer c;
    pieces x;
    float o[O_COUNT], inv[2];
    if (threadIdx.x == 0) {
        map_prefetch(&mq);
        map_prefetch(&mk);
        map_prefetch(&mv);
        init_barriers(sm);
    }
    grid_wait_before();
    tile t = begin_work(p, mod, x);
    int g = kv_head(p, t.h);
    loads l = {&mk, &mv, key_box(p, t.b, g), value_box(p, t.b, g), 2 * x.count};
    __syncthreads();
    if (x.count)
        load_first(sm, l, x, &mq, t.row0, query_box(p, t.b, t.h));
    grid_let_next();
    rows_begin(c.rows);
    rows_place(c.at, p, mod, t);
    c.unit = score_unit(p);
#if SCORE_TANH
    c.large = 0;
#endif
#pragma unroll
    for (int i = 0; i < O_COUNT; i++)
        o[i] = 0.f;
    if (x.count)
        barrier_wait(sm.q_full, 0);
#pragma unroll 1
    for (int i = 0; i < x.count; i++)
        use_piece(sm, c, p, mod, l, x, i, o);
    int is_lost = rows_end(c.rows, p, t, o, inv);
    rows_store(p, t, o, inv);
    if (is_lost)
        redo_rows(p, mod, t.id);
}
