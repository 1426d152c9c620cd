/* Forward attention for Hopper where rows see few keys. A CTA is CFG_TEAMS teams, each a warp
 * that loads and a warpgroup that makes tiles of 64 rows of one head, one after another; teams
 * share nothing but the numbers of the CTA's tiles, so that one's copies, softmax and stores
 * lie under the others' products. Keys are taken in pieces of CFG_TN that begin at any key:
 * those that the host lists for the tile, or from the tile's first live key on.
 *
 * With CFG_LAZY offsets are raised late (softmax.cuh), else they are exact; rows that are not
 * finite are made again here, at the end: a run is one launch.
 *
 * Shared memory of a team, in swizzled rows of 128 bytes, panels of 64 columns: Q
 * [QS][panels][64][64], then a ring of CFG_STAGES pieces of K or V. Barriers come last. */
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

enum {
    THREADS = (CFG_TEAMS + 1) * 128,
    SLOTS = CFG_STAGES,
    SLOT_BYTES = K_BYTES > V_BYTES ? K_BYTES : V_BYTES,
    TEAM_BYTES = CFG_QS * Q_BYTES + SLOTS * SLOT_BYTES,
    TEAM_BARRIERS = 2 * CFG_QS + 2 * SLOTS
};

/* What a slot with K holds beside it. */
enum { PIECE_MASKED = 1, PIECE_FIRST = 2, PIECE_LAST = 4, PIECE_EMPTY = 8, PIECE_END = 16 };
struct piece {
    int tile, first, flags, unused;
};

/* addresses of a team's shared memory; barriers of 8 bytes, CFG_QS of each of the first two and
 * SLOTS of the others */
struct arena {
    u32 q, ring, q_full, q_empty, full, empty;
    u32 pieces;           /* piece [SLOTS] */
    u32 drawn;            /* tiles that the CTA's teams have taken */
    mask_column *columns; /* [CFG_TEAMS][CFG_TN] what a general mask needs of each key */
};

DEVICE arena carve(char *shared, int team)
{
    arena s;
    u32 base = smem_address(shared), barriers = base + CFG_TEAMS * TEAM_BYTES;
    u32 pieces = barriers + CFG_TEAMS * TEAM_BARRIERS * 8;
    s.q = base + team * TEAM_BYTES;
    s.ring = s.q + CFG_QS * Q_BYTES;
    s.q_full = barriers + team * TEAM_BARRIERS * 8;
    s.q_empty = s.q_full + CFG_QS * 8;
    s.full = s.q_empty + CFG_QS * 8;
    s.empty = s.full + SLOTS * 8;
    s.pieces = pieces + team * SLOTS * 16;
    s.drawn = pieces + CFG_TEAMS * SLOTS * 16;
    s.columns = (mask_column *)(shared + (s.drawn + 16 - base));
    return s;
}

DEVICE void init_barriers(const arena &s)
{
    for (int i = 0; i < CFG_QS; i++) {
        barrier_init(s.q_full + i * 8, 1);
        barrier_init(s.q_empty + i * 8, 4);
    }
    for (int i = 0; i < SLOTS; i++) {
        barrier_init(s.full + i * 8, 1);
        barrier_init(s.empty + i * 8, 4);
    }
}

DEVICE u32 slot_of(u32 n)
{
    return n % SLOTS;
}

DEVICE u32 parity_of(u32 n)
{
    return n / SLOTS & 1;
}

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

/* 2. A team's loads, begun by one thread: of a tile Q, then K one piece ahead of V. Load n of K
 * or V lies in slot n % SLOTS. */
struct producer {
    u32 n, q; /* how many loads have begun */
};

template <int PANELS>
DEVICE void load_rows(u32 to, u32 full, const tensor_map *map, int first, head_box at)
{
    barrier_expect(full, PANELS * PANEL_KV);
#pragma unroll
    for (int i = 0; i < PANELS; i++)
        copy_box(to + i * PANEL_KV, map, i * 64, first, at.h, at.b, full, EVICT_LAST);
}

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
    load_rows<PANELS_D>(s.ring + slot * SLOT_BYTES, s.full + slot * 8, map, first, at);
}

DEVICE void load_v(const arena &s, producer &r, const tensor_map *map, int first, head_box at)
{
    u32 slot = slot_of(r.n);
    barrier_wait(s.empty + slot * 8, parity_of(r.n++) ^ 1);
    load_rows<PANELS_E>(s.ring + slot * SLOT_BYTES, s.full + slot * 8, map, first, at);
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
    load_q(s, r, mq, t.row0, query_box(p, t.b, t.h));
    int before = 0, piece = piece_at(x, 0);
#pragma unroll 1
    for (int i = 0; i < x.count; i++) {
        int first = piece >> PIECE_FLAGS, is_last = i + 1 == x.count;
        int flags = piece & 1 | (i ? 0 : PIECE_FIRST) | (is_last ? PIECE_LAST : 0);
        piece = is_last ? 0 : piece_at(x, i + 1);
        load_k(s, r, mk, t.id, first, flags, k);
        if (i)
            load_v(s, r, mv, before, v);
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

/* 3. A team's warpgroup: of a tile scores, softmax, O += P V, the product of a piece's scores
 * beside that of the piece before with V. */
struct progress {
    u32 n, q; /* loads of K or V, and of Q, that are used up */
    int lost; /* the last tile with rows to make again, in a chain through p.flags; or -1 */
};

DEVICE piece take_piece(const arena &s, u32 n)
{
    piece x;
    barrier_wait(s.full + slot_of(n) * 8, parity_of(n));
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.tile), "=r"(x.first), "=r"(x.flags), "=r"(x.unused)
                 : "r"(s.pieces + slot_of(n) * 16)
                 : "memory");
    x.tile = __shfl_sync(~0u, x.tile, 0);
    x.first = __shfl_sync(~0u, x.first, 0);
    x.flags = __shfl_sync(~0u, x.flags, 0); /* tells ptxas that a warp's lanes go one way */
    return x;
}

DEVICE void release(const arena &s, u32 n)
{
    barrier_arrive_if(s.empty + slot_of(n) * 8, (threadIdx.x & 31) == 0);
}

DEVICE void start_qk(const arena &sm, float (&s)[S_COUNT], u32 q, u32 n)
{
    product_qk(s, sm.q + q % CFG_QS * Q_BYTES, sm.ring + slot_of(n) * SLOT_BYTES);
    wgmma_commit();
}

DEVICE void start_pv(const arena &sm, float (&o)[O_COUNT], const u32 (&prob)[S_COUNT / 2],
                     u32 n)
{
    barrier_wait(sm.full + slot_of(n) * 8, parity_of(n));
    product_pv(o, prob, sm.ring + slot_of(n) * SLOT_BYTES);
    wgmma_commit();
}

DEVICE int is_masked(const piece &x, int kv_len)
{
    return x.flags & PIECE_MASKED | (x.first + CFG_TN > kv_len);
}

/* The first piece of a tile has no product with V to run beside. */
DEVICE void first_piece(const arena &sm, progress &done, consumer &c, const cu_fwd &p,
                        const mod_args &mod, const piece &x, int team, float (&s)[S_COUNT],
                        u32 (&prob)[S_COUNT / 2])
{
    float unused[2];
    barrier_wait(sm.q_full + done.q % CFG_QS * 8, done.q / CFG_QS & 1);
    wgmma_fence();
    start_qk(sm, s, done.q, done.n);
    wgmma_wait<0>();
    release(sm, done.n++);
    softmax_step<1>(c, p, mod, x.first, is_masked(x, c.at.kv_len), sm.columns + team * CFG_TN,
                    team, s, unused);
    pack_p(prob, s);
}

DEVICE piece next_piece(const arena &sm, progress &done, consumer &c, const cu_fwd &p,
                        const mod_args &mod, int team, float (&s)[S_COUNT], float (&o)[O_COUNT],
                        u32 (&prob)[S_COUNT / 2])
{
    float rescale[2];
    piece x = take_piece(sm, done.n);
    wgmma_fence();
    start_qk(sm, s, done.q, done.n);
    start_pv(sm, o, prob, done.n + 1);
    wgmma_wait<1>();
    release(sm, done.n);
    int raised = softmax_step<0>(c, p, mod, x.first, is_masked(x, c.at.kv_len),
                                 sm.columns + team * CFG_TN, team, s, rescale);
    /* No row sum is negative, so nothing arrives here: ptxas keeps the wait that follows
     * behind the exponentials (fwd_sm90.cu). */
    barrier_arrive_if(sm.q_empty, c.rows.l[0] < 0.f);
    wgmma_wait<0>();
    release(sm, done.n + 1);
    done.n += 2;
    if (raised)
        rows_scale(o, rescale);
    pack_p(prob, s);
    return x;
}

DEVICE void last_product(const arena &sm, progress &done, float (&o)[O_COUNT],
                         const u32 (&prob)[S_COUNT / 2])
{
    barrier_arrive_if(sm.q_empty + done.q % CFG_QS * 8, (threadIdx.x & 31) == 0);
    done.q++;
    wgmma_fence();
    start_pv(sm, o, prob, done.n);
    wgmma_wait<0>();
    release(sm, done.n++);
}

DEVICE void consume_tile(const arena &sm, progress &done, const cu_fwd &p, const mod_args &mod,
                         piece x, int team)
{
    consumer c;
    float s[S_COUNT], o[O_COUNT], inv[2];
    u32 prob[S_COUNT / 2];
    int id = x.tile;
    tile begin = tile_at(p, id, ROWS);
    rows_begin(c.rows);
    rows_place(c.at, p, mod, begin);
    c.unit = score_unit(p);
#if SCORE_TANH
    c.large = 0;
#endif
#pragma unroll
    for (int i = 0; i < O_COUNT; i++)
        o[i] = 0.f;
    if (x.flags & PIECE_EMPTY) {
        release(sm, done.n++);
    } else {
        first_piece(sm, done, c, p, mod, x, team, s, prob);
        while (!(x.flags & PIECE_LAST))
            x = next_piece(sm, done, c, p, mod, team, s, o, prob);
        last_product(sm, done, o, prob);
    }
    /* The tile's place is computed again, for keeping it would cost the loop registers. */
    asm volatile("" : "+r"(id));
    tile end = tile_at(p, id, ROWS);
    int is_lost = rows_end(c.rows, p, end, o, inv);
    rows_store(p, end, o, inv);
    if (is_lost) {
        if ((threadIdx.x & 31) == 0)
            p.flags[id * 4 + group_of_thread()] = done.lost;
        done.lost = id;
    }
    __syncwarp(); /* else ptxas takes the warp for divergent, and waits for each product */
}

/* 4. Rows that came out not finite, in plain f32 by the warp that made them. */
DEVICE void redo_rows(const cu_fwd &p, const mod_args &mod, int id)
{
    __syncwarp();
#pragma unroll 1
    while (id >= 0) {
        tile t = tile_at(p, id, ROWS);
        int first = t.row0 + group_of_thread() * 16;
#pragma unroll 1
        for (int m = first; m < min(first + 16, p.M); m++)
            redo_row(p, mod, t, m);
        id = *(volatile int *)&p.flags[id * 4 + group_of_thread()];
    }
}

DEVICE void consume(const arena &sm, const cu_fwd &p, const mod_args &mod, int team)
{
    progress done = {0, 0, -1};
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
            asm volatile("st.shared.b32 [%0], 0;" ::"r"(sm.drawn) : "memory");
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
