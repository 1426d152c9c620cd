/* Forward attention for Hopper where a head has few keys: all of them stay in shared memory
 * while rows of its queries pass. A CTA takes tiles of 64 rows that follow one another, and
 * with them KV heads in order: one warp loads a head's keys, and each of CFG_TEAMS warpgroups
 * makes tiles by turns, for which a warp of its own loads queries.
 *
 * With CFG_LAZY offsets are raised late (softmax.cuh), else they are exact; rows that are not
 * finite are made again here, at the end: a run is one launch. */
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
#include "small_rows.cuh"

enum {
    THREADS = (CFG_TEAMS + 1) * 128,
    PIECES = CFG_STAGES,
    PIECE_BYTES = K_BYTES + V_BYTES,
    KEYS_BYTES = PIECES * PIECE_BYTES
};

/* Shared memory: Q [CFG_TEAMS][CFG_QS][panels][64][64], keys [CFG_BUFFERS][PIECES], K then V,
 * in swizzled rows of 128 bytes; barriers. */
struct arena {
    u32 q, q_full, q_empty; /* the team's, CFG_QS of each */
    u32 keys, k_full, v_full, empty;
};

DEVICE arena carve(char *shared, int team)
{
    arena s;
    u32 base = smem_address(shared);
    s.keys = base + CFG_TEAMS * CFG_QS * Q_BYTES;
    s.k_full = s.keys + CFG_BUFFERS * KEYS_BYTES;
    s.v_full = s.k_full + CFG_BUFFERS * PIECES * 8;
    s.empty = s.v_full + CFG_BUFFERS * PIECES * 8;
    s.q = base + team * CFG_QS * Q_BYTES;
    s.q_full = s.empty + CFG_BUFFERS * 8 + team * CFG_QS * 16;
    s.q_empty = s.q_full + CFG_QS * 8;
    return s;
}

DEVICE void init_team(const arena &s)
{
    for (int i = 0; i < CFG_QS; i++) {
        barrier_init(s.q_full + i * 8, 1);
        barrier_init(s.q_empty + i * 8, 4);
    }
}

DEVICE void init_keys(const arena &s)
{
    for (int i = 0; i < CFG_BUFFERS; i++)
        barrier_init(s.empty + i * 8, 4 * CFG_TEAMS);
    for (int i = 0; i < CFG_BUFFERS * PIECES; i++) {
        barrier_init(s.k_full + i * 8, 1);
        barrier_init(s.v_full + i * 8, 1);
    }
}

/* 1. The CTA's tiles [from, past), and the KV heads that they read, counted over batches. */
struct share {
    int from, past, head, heads;
};

DEVICE int key_head_of(const cu_fwd &p, int id)
{
    int bh = id / p.n_qblk;
    return bh / p.H * p.G + kv_head(p, bh % p.H);
}

DEVICE share share_of(const cu_fwd &p)
{
    share x;
    x.from = (long long)p.n_tiles * blockIdx.x / gridDim.x;
    x.past = (long long)p.n_tiles * (blockIdx.x + 1) / gridDim.x;
    x.head = key_head_of(p, x.from);
    x.heads = key_head_of(p, x.past - 1) - x.head + 1;
    return x;
}

DEVICE int pieces_of(int keys)
{
    return (keys + CFG_TN - 1) / CFG_TN;
}

/* 2. Loads. */
DEVICE void load_keys(const arena &s, const cu_fwd &p, const tensor_map *mk,
                      const tensor_map *mv)
{
    share x = share_of(p);
    x.head = number_behind(x.head);
#pragma unroll 1
    for (int n = 0; n < x.heads; n++) {
        int b = (x.head + n) / p.G, g = (x.head + n) % p.G, buffer = n % CFG_BUFFERS;
        int pieces = pieces_of(live_keys(p, b));
        head_box k = key_box(p, b, g), v = value_box(p, b, g);
        u32 full = buffer * PIECES * 8, at = s.keys + buffer * KEYS_BYTES;
        barrier_wait(s.empty + buffer * 8, n / CFG_BUFFERS & 1 ^ 1);
#pragma unroll 1
        for (int i = 0; i < PIECES; i++, full += 8, at += PIECE_BYTES) {
            if (i < pieces) {
                load_block<PANELS_D>(at, s.k_full + full, mk, i * CFG_TN, k);
                load_block<PANELS_E>(at + K_BYTES, s.v_full + full, mv, i * CFG_TN, v);
            } else { /* barriers count heads, those of fewer keys too */
                barrier_arrive(s.k_full + full);
                barrier_arrive(s.v_full + full);
            }
        }
    }
}

DEVICE void load_queries(const arena &s, const cu_fwd &p, const tensor_map *mq, int team)
{
    share x = share_of(p);
    u32 n = 0;
#pragma unroll 1
    for (int id = x.from + team; id < x.past; id += CFG_TEAMS, n++) {
        tile t = tile_at(p, id, ROWS);
        head_box q = query_box(p, t.b, t.h);
        u32 slot = n % CFG_QS, full = s.q_full + slot * 8;
        barrier_wait(s.q_empty + slot * 8, n / CFG_QS & 1 ^ 1);
        barrier_expect(full, Q_BYTES);
#pragma unroll
        for (int i = 0; i < PANELS_D; i++)
            copy_box(s.q + slot * Q_BYTES + i * PANEL_Q, mq, i * 64, t.row0, q.h, q.b, full,
                     EVICT_FIRST);
    }
}

/* 3. A team's warpgroup, tile by tile. */
struct progress {
    u32 q;    /* tiles made */
    int head; /* of the CTA's KV heads, the one whose keys are read */
    int lost; /* see small_rows.cuh */
};

DEVICE u32 piece_barrier(u32 barriers, int head, int piece)
{
    return barriers + (head % CFG_BUFFERS * PIECES + piece) * 8;
}

DEVICE u32 head_parity(int head)
{
    return head / CFG_BUFFERS & 1;
}

/* Lets go of heads before `head`. Keys of a head are there only once all have let go of those
 * that lay in their place, so nobody counts twice. */
DEVICE void pass_heads(const arena &s, progress &done, int head)
{
#pragma unroll 1
    for (; done.head < head; done.head++) {
        barrier_wait(piece_barrier(s.k_full, done.head, 0), head_parity(done.head));
        barrier_arrive_if(s.empty + done.head % CFG_BUFFERS * 8, (threadIdx.x & 31) == 0);
    }
    __syncwarp();
}

DEVICE u32 piece_at(const arena &s, int head, int piece)
{
    return s.keys + (head % CFG_BUFFERS * PIECES + piece) * PIECE_BYTES;
}

DEVICE void start_qk(const arena &sm, const progress &done, float (&s)[S_COUNT], int piece)
{
    barrier_wait(piece_barrier(sm.k_full, done.head, piece), head_parity(done.head));
    product_qk(s, sm.q + done.q % CFG_QS * Q_BYTES, piece_at(sm, done.head, piece));
    wgmma_commit();
}

DEVICE void start_pv(const arena &sm, const progress &done, float (&o)[O_COUNT],
                     const u32 (&prob)[S_COUNT / 2], int piece)
{
    barrier_wait(piece_barrier(sm.v_full, done.head, piece), head_parity(done.head));
    product_pv(o, prob, piece_at(sm, done.head, piece) + K_BYTES);
    wgmma_commit();
}

DEVICE void release_q(const arena &sm, const progress &done, int is_last)
{
    barrier_arrive_if(sm.q_empty + done.q % CFG_QS * 8, is_last != 0 & (threadIdx.x & 31) == 0);
}

/* What holds the wait that follows behind the exponentials in ptxas's order: no row sum is
 * negative, so nothing arrives (fwd_sm90.cu). */
DEVICE void hold_wait(const arena &sm, const consumer &c)
{
    barrier_arrive_if(sm.q_empty, c.rows.l[0] < 0.f);
}

DEVICE void walk_keys(const arena &sm, const progress &done, consumer &c, const cu_fwd &p,
                      const mod_args &mod, int pieces, int team, float (&o)[O_COUNT])
{
    float s[S_COUNT], rescale[2];
    u32 prob[S_COUNT / 2];
    wgmma_fence();
    start_qk(sm, done, s, 0);
    wgmma_wait<0>();
    release_q(sm, done, pieces == 1);
    softmax_step<1>(c, p, mod, 0, masked_by(0, CFG_TN > c.at.kv_len), 0, team, s, rescale);
    pack_p(prob, s);
#pragma unroll 1
    for (int i = 1; i < pieces; i++) {
        wgmma_fence();
        start_qk(sm, done, s, i);
        start_pv(sm, done, o, prob, i - 1);
        wgmma_wait<1>();
        release_q(sm, done, i + 1 == pieces);
        int raised =
            softmax_step<0>(c, p, mod, i * CFG_TN, masked_by(0, (i + 1) * CFG_TN > c.at.kv_len),
                            0, team, s, rescale);
        hold_wait(sm, c);
        wgmma_wait<0>();
        if (raised)
            rows_scale(o, rescale);
        pack_p(prob, s);
    }
    wgmma_fence();
    start_pv(sm, done, o, prob, pieces - 1);
    wgmma_wait<0>();
}

DEVICE void consume_tile(const arena &sm, progress &done, const cu_fwd &p, const mod_args &mod,
                         int first_head, int id, int team)
{
    consumer c;
    float o[O_COUNT];
    barrier_wait(sm.q_full + done.q % CFG_QS * 8, done.q / CFG_QS & 1);
    id = number_behind(id);
    tile t = tile_at(p, id, ROWS);
    int pieces = pieces_of(t.kv_len);
    pass_heads(sm, done, t.b * p.G + kv_head(p, t.h) - first_head);
    begin_rows(c, p, mod, t, o);
    if (pieces > 0)
        walk_keys(sm, done, c, p, mod, pieces, team, o);
    else
        release_q(sm, done, 1);
    done.q++;
    end_rows(c, p, id, o, done.lost);
}

DEVICE void consume(const arena &sm, const cu_fwd &p, const mod_args &mod, int team)
{
    progress done = {};
    done.lost = -1;
    share x = share_of(p);
    for (int id = x.from + team; id < x.past; id += CFG_TEAMS)
        consume_tile(sm, done, p, mod, x.head, id, team);
    pass_heads(sm, done, x.heads);
    redo_rows(p, mod, done.lost);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    fwd_few(const __grid_constant__ cu_fwd p, const __grid_constant__ mod_args mod,
            const __grid_constant__ tensor_map mq, const __grid_constant__ tensor_map mk,
            const __grid_constant__ tensor_map mv)
{
    extern __shared__ __align__(1024) char shared[];
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = warp / 4;
    arena sm = carve(shared, group ? group - 1 : min(warp, CFG_TEAMS - 1));
    if (threadIdx.x % 32 == 0 && warp <= CFG_TEAMS) {
        if (warp == CFG_TEAMS) {
            init_keys(sm);
            map_prefetch(&mk);
            map_prefetch(&mv);
        } else {
            init_team(sm);
            map_prefetch(&mq);
        }
        fence_barrier_init();
    }
    __syncthreads();
    if (group == 0) {
        registers_shrink<CFG_REGS_PRODUCER>();
        if (threadIdx.x % 32 == 0 && warp <= CFG_TEAMS) {
            grid_wait_before();
            if (warp == CFG_TEAMS)
                load_keys(sm, p, &mk, &mv);
            else
                load_queries(sm, p, &mq, warp);
            grid_let_next();
        }
    } else {
        registers_grow<CFG_REGS_CONSUMER>();
        consume(sm, p, mod, group - 1);
    }
}
