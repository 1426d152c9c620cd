/* Forward attention for Hopper where rows see few keys. A CTA is CFG_TEAMS teams, each a warp
 * that loads and a warpgroup that makes tiles of 64 rows of one head, one after another; teams
 * share nothing but the numbers of the CTA's tiles, so that one's copies, softmax and stores
 * lie under the others' products. Keys are taken in pieces of CFG_TN that begin at any key:
 * those that the host lists for the tile, or from the tile's first live key on.
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
#include "small_team.cuh"
#include "small_walk.cuh"

/* 1. Which tile is next. CTAs take the work order by turns, there and back, so that the longest
 * tiles come first everywhere and no CTA has the longer one twice; a CTA's teams draw from its
 * share. Past the last turn there is none. */
DEVICE int draw(const arena &s)
{
    int turn, n = gridDim.x, own = blockIdx.x;
    asm volatile("atom.shared.add.u32 %0, [%1], 1;" : "=r"(turn) : "r"(s.drawn) : "memory");
    return turn * n + (turn & 1 ? n - 1 - own : own);
}

/* The tile `turn` and the pieces of keys that it walks. */
struct work {
    const int *listed; /* null: from keys.from on, piece by piece */
    int tile, first, count;
    tile_keys keys;
};

DEVICE int4 read_work(const cu_fwd &p, int turn)
{
    return p.work && turn < p.n_tiles ? __ldg((const int4 *)p.work + turn)
                                      : make_int4(turn, 0, 0, 0);
}

DEVICE tile begin_work(const cu_fwd &p, const mod_args &mod, int4 w, work &x)
{
    tile t = tile_at(p, w.x, ROWS);
    x.tile = w.x;
    x.listed = p.pieces + w.y;
    x.count = w.z;
    x.first = w.w;
    if (!p.work) {
        x.listed = 0;
        x.keys = keys_of(p, mod, t, ROWS);
        x.count = (max(x.keys.past - x.keys.from, 0) + CFG_TN - 1) / CFG_TN;
    }
    return t;
}

/* Piece i as cu_work has it. */
DEVICE int piece_at(const work &x, int i)
{
    if (x.listed)
        return i ? __ldg(x.listed + i) : x.first;
    int first = x.keys.from + i * CFG_TN;
    return first << PIECE_FLAGS | (first < x.keys.all_from || first + CFG_TN > x.keys.all_past);
}

/* 2. A team's loads, begun by one thread: of a tile Q, then K one piece ahead of V; where Q has
 * one place, which the tile before still needs, the first K comes before it. Load n of K or V
 * lies in slot n % SLOTS. */
struct producer {
    u32 n, q; /* how many loads have begun */
};

DEVICE void put_piece(const arena &s, u32 slot, int tile, int first, int flags)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %3};" ::"r"(s.pieces + slot * 16),
                 "r"(tile), "r"(first), "r"(flags)
                 : "memory");
}

/* A slot that has a piece's flags alone. */
DEVICE void say(const arena &s, producer &r, int tile, int flags)
{
    u32 slot = slot_of(r.n);
    barrier_wait(s.empty + slot * 8, parity_of(r.n++) ^ 1);
    put_piece(s, slot, tile, 0, flags);
    barrier_arrive(s.full + slot * 8);
}

DEVICE void load_k(const arena &s, producer &r, const tensor_map *map, int tile, int first,
                   int flags, head_box at)
{
    u32 slot = slot_of(r.n);
    barrier_wait(s.empty + slot * 8, parity_of(r.n++) ^ 1);
    put_piece(s, slot, tile, first, flags);
    load_block<PANELS_D>(s.ring + slot * SLOT_BYTES, s.full + slot * 8, map, first, at);
}

DEVICE void load_v(const arena &s, producer &r, const tensor_map *map, int first, head_box at)
{
    u32 slot = slot_of(r.n);
    barrier_wait(s.empty + slot * 8, parity_of(r.n++) ^ 1);
    load_block<PANELS_E>(s.ring + slot * SLOT_BYTES, s.full + slot * 8, map, first, at);
}

DEVICE void load_q(const arena &s, producer &r, const tensor_map *map, int first, head_box at)
{
    u32 slot = r.q % CFG_QS, full = s.q_full + slot * 8;
    barrier_wait(s.q_empty + slot * 8, r.q++ / CFG_QS & 1 ^ 1);
    barrier_expect(full, Q_BYTES);
#pragma unroll
    for (int i = 0; i < PANELS_D; i++)
        copy_box(s.q + slot * Q_BYTES + i * PANEL_Q, map, i * 64, first, at.h, at.b, full,
                 EVICT_FIRST);
}

DEVICE void load_tile(const arena &s, producer &r, const cu_fwd &p, const mod_args &mod,
                      int4 found, const tensor_map *mq, const tensor_map *mk,
                      const tensor_map *mv)
{
    work x;
    tile t = begin_work(p, mod, found, x);
    int g = kv_head(p, t.h);
    head_box k = key_box(p, t.b, g), v = value_box(p, t.b, g);
    if (x.count == 0) {
        say(s, r, t.id, PIECE_EMPTY);
        return;
    }
    int piece = piece_at(x, 0), before = 0;
    head_box q = query_box(p, t.b, t.h);
    if (CFG_QS > 1)
        load_q(s, r, mq, t.row0, q);
#pragma unroll 1
    for (int i = 0; i < x.count; i++) {
        int first = piece >> PIECE_FLAGS, is_last = i + 1 == x.count;
        int flags = piece & 1 | (i ? 0 : PIECE_FIRST) | (is_last ? PIECE_LAST : 0);
        piece = is_last ? 0 : piece_at(x, i + 1);
        load_k(s, r, mk, t.id, first, flags, k);
        if (i)
            load_v(s, r, mv, before, v);
        else if (CFG_QS == 1)
            load_q(s, r, mq, t.row0, q);
        before = first;
    }
    load_v(s, r, mv, before, v);
}

DEVICE void produce(const arena &s, const cu_fwd &p, const mod_args &mod, const tensor_map *mq,
                    const tensor_map *mk, const tensor_map *mv)
{
    producer r = {0, 0};
    grid_wait_before();
    int turn = draw(s);
    int4 found = read_work(p, turn);
    while (turn < p.n_tiles) {
        int after = draw(s);
        int4 next = read_work(p, after);
        load_tile(s, r, p, mod, found, mq, mk, mv);
        turn = after;
        found = next;
    }
    grid_let_next();
    say(s, r, 0, PIECE_END);
}

/* 3. A team's warpgroup, tile by tile. */
DEVICE void consume_tile(const arena &sm, progress &done, const cu_fwd &p, const mod_args &mod,
                         piece x, int team)
{
    consumer c;
    float o[O_COUNT];
    begin_rows(c, p, mod, tile_at(p, x.tile, ROWS), o);
    if (x.flags & PIECE_EMPTY) {
        release(sm, done.n++);
    } else {
        walk_keys(sm, done, c, p, mod, x, team, o);
    }
    end_rows(c, p, x.tile, o, done.lost);
}

DEVICE void consume(const arena &sm, const cu_fwd &p, const mod_args &mod, int team)
{
    progress done = {};
    done.lost = -1;
    for (;;) {
        piece x = take_piece(sm, done.n);
        if (x.flags & PIECE_END)
            break;
        consume_tile(sm, done, p, mod, x, team);
    }
    redo_rows(p, mod, done.lost);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    fwd_small(const __grid_constant__ cu_fwd p, const __grid_constant__ mod_args mod,
              const __grid_constant__ tensor_map mq, const __grid_constant__ tensor_map mk,
              const __grid_constant__ tensor_map mv)
{
    extern __shared__ __align__(1024) char shared[];
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = warp / 4;
    arena sm = carve(shared, group ? group - 1 : min(warp, CFG_TEAMS - 1));
    if (threadIdx.x % 32 == 0 && warp < CFG_TEAMS) {
        init_barriers(sm);
        if (warp == 0) {
            map_prefetch(&mq);
            map_prefetch(&mk);
            map_prefetch(&mv);
            store_word(sm.drawn, 0);
        }
        fence_barrier_init();
    }
    __syncthreads();
    if (group == 0) {
        registers_shrink<CFG_REGS_PRODUCER>();
        if (threadIdx.x % 32 == 0 && warp < CFG_TEAMS)
            produce(sm, p, mod, &mq, &mk, &mv);
    } else {
        registers_grow<CFG_REGS_CONSUMER>();
        consume(sm, p, mod, group - 1);
    }
}
