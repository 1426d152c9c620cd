/* What bwd_elements.cu does, by Hopper's products: a CTA has 128 queries by 128 keys, whose
 * elements no other CTA has, and passes by the batches and heads that read them, in order. Two
 * warpgroups have 64 of the queries each; S, dP and the sums of terms lie in their registers. A
 * warp of a third one loads.
 *
 * Shared memory: [CFG_STAGES] pairs of tiles, of every visit Q and K, then dO and V, at the end
 * terms on their way to elements; what is kept of scores; of [VISITS] lse and -delta of the
 * queries, and what they are about; barriers. Tiles lie in panels of 64 columns, swizzled rows
 * of 128 bytes. */
#include "cfg.cuh"
#include "ptx.cuh"
#include "bwd.h"
#include "arith.cuh"
#include "mod.cuh"
#include "kv.cuh"
#include "bwd_copy.cuh"
#include "bwd_tile.cuh"
#include "bwd_mod.cuh"
#include "bwd_row.cuh"
#include "wgmma.cuh"
#include "bwd_ring.cuh"

enum {
    STAY = CFG_STAY,
    PASS = CFG_KEYS,
    THREADS = 2 * STAY, /* of the warpgroups that multiply */
    PANELS_D = (CFG_D + 63) / 64,
    PANELS_E = (CFG_E + 63) / 64,
    HALF_PANEL = 64 * 128,
    QUERY_PANEL = STAY * 128,
    KEY_PANEL = PASS * 128,
    PANELS = PANELS_D > PANELS_E ? PANELS_D : PANELS_E,
    KEYS_AT = PANELS * QUERY_PANEL, /* in a pair: K, or V */
    PAIR_BYTES = PANELS * (QUERY_PANEL + KEY_PANEL),
    STAT_BYTES = STAY * 4,
    VISITS = (CFG_STAGES + 2) / 2, /* a visit's place is read when its second pair is */
    BLOCKS = PASS / CFG_TM,        /* of keys in the runs of a block mask */
    S_COUNT = PASS / 2,
#if !CFG_KEPT
    KEPT_BLOCK = 0
#endif
};

static_assert(CFG_STAY == 128 && BWD_ROWS == 64, "a warpgroup has a block of the rows");

/* the 16 rows of this warp */
DEVICE int warp_row(void)
{
    return (int)threadIdx.x / 32 * 16;
}

#include "bwd_keys.cuh"
#include "bwd_products.cuh"
#include "bwd_row_weights.cuh"
#include "bwd_element.cuh"
#include "bwd_kept.cuh"
#include "bwd_element_terms.cuh"

static_assert(TERM_ROOM * 4 <= CFG_STAGES * PAIR_BYTES + KEPT_BLOCK,
              "terms on their way to elements");

struct elements_arena {
    u32 pairs, kept, stats, steps, full, empty;
};

DEVICE elements_arena elements_carve(u32 shared)
{
    elements_arena s;
    s.pairs = shared;
    s.kept = s.pairs + CFG_STAGES * PAIR_BYTES;
    s.stats = s.kept + KEPT_BLOCK;
    s.steps = s.stats + VISITS * 2 * STAT_BYTES;
    s.full = s.steps + VISITS * 16;
    s.empty = s.full + CFG_STAGES * 8;
    return s;
}

DEVICE void elements_init(const elements_arena &s)
{
    for (int i = 0; i < CFG_STAGES; i++) {
        barrier_init(s.full + i * 8, 1);
        barrier_init(s.empty + i * 8, THREADS / 32);
    }
    fence_barrier_init();
}

/* Where the loader or a warpgroup stands. */
struct place {
    ring<CFG_STAGES> pair;
    ring<VISITS> visit;
};

/* 1. Loads, by a warp. */

/* Which blocks of keys the tile's blocks of 64 queries meet, BLOCKS bits for each of the two,
 * and whether a position there may be dead. Lanes look at a run each. */
struct sight {
    u32 live;
    int masked;
};

DEVICE sight look(const cu_bwd &p, const query_tile &t, int key0)
{
    int left = t.kv_len - key0, n = left <= 0 ? 0 : min((left + CFG_TM - 1) / CFG_TM, BLOCKS);
    u32 all = (1u << n) - 1, open = all | all << BLOCKS;
    sight x = {open, MOD_MASK != MASK_NONE || left < PASS};
    if (!p.q_runs)
        return x;
    int first = key0 / CFG_TM;
    x.live = 0;
#pragma unroll
    for (int half = 0; half < STAY / BWD_ROWS; half++) {
        int block = t.block * (STAY / BWD_ROWS) + half;
        u32 live = 0, masked = 0;
        if (block >= p.n_mblk)
            continue;
        int row = t.b * p.q_mask_b + t.h * p.q_mask_h + block;
        int end = __ldg(p.q_run_start + row + 1);
        for (int i = __ldg(p.q_run_start + row) + (threadIdx.x & 31); i < end; i += 32) {
            int4 run = __ldg((const int4 *)p.q_runs + i);
            int lo = max(run.x - first, 0), hi = min(run.x + run.y - first, n);
            u32 bits = lo < hi ? (1u << hi) - (1u << lo) : 0;
            live |= bits;
            masked |= run.z ? bits : 0;
        }
        x.live |= __reduce_or_sync(~0u, live) << half * BLOCKS;
        open &= ~(__reduce_or_sync(~0u, masked) << half * BLOCKS);
    }
    int rows = p.f.M - t.row0;
    u32 there = rows > BWD_ROWS ? all | all << BLOCKS : all;
    x.masked = left < PASS || (x.live & open & there) != there;
    return x;
}

template <int COUNT>
DEVICE void load_tile(u32 to, const tensor_map *map, int row, head_box at, u32 full)
{
#pragma unroll
    for (int i = 0; i < COUNT; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            copy_box(to + i * QUERY_PANEL + half * HALF_PANEL, map, i * 64, row + half * 64,
                     at.h, at.b, full, EVICT_LAST);
}

DEVICE void load_visit(const elements_arena &s, place &at, const cu_bwd &p, const query_tile &t,
                       int key0, const sight &x, const tensor_map *mq, const tensor_map *mk,
                       const tensor_map *mv, const tensor_map *mo)
{
    u32 full = s.full + at.pair.slot * 8, to = s.pairs + at.pair.slot * PAIR_BYTES;
    u32 stats = s.stats + at.visit.slot * 2 * STAT_BYTES;
    int block = t.block * (STAY / BWD_ROWS);
    u32 rows = min(p.n_mblk - block, STAY / BWD_ROWS) * BWD_ROWS * 4;
    long long first = ((long long)(t.b * p.f.H + t.h) * p.n_mblk + block) * BWD_ROWS;
    barrier_wait(s.empty + at.pair.slot * 8, at.pair.parity ^ 1);
    store_four(s.steps + at.visit.slot * 16, t.b, t.h, x.live, x.masked ? STEP_MASKED : 0);
    barrier_expect(full, PANELS_D * (QUERY_PANEL + KEY_PANEL) + 2 * rows);
    load_tile<PANELS_D>(to, mq, t.row0, query_box(p.f, t.b, t.h), full);
    load_tile<PANELS_D>(to + KEYS_AT, mk, key0, key_box(p.f, t.b, t.g), full);
    copy_bytes(stats, p.lse2 + first, rows, full);
    copy_bytes(stats + STAT_BYTES, p.minus_delta + first, rows, full);
    ring_next(at.pair);
    ring_next(at.visit);
    full = s.full + at.pair.slot * 8;
    to = s.pairs + at.pair.slot * PAIR_BYTES;
    barrier_wait(s.empty + at.pair.slot * 8, at.pair.parity ^ 1);
    barrier_expect(full, PANELS_E * (QUERY_PANEL + KEY_PANEL));
    load_tile<PANELS_E>(to, mo, t.row0, box_at(p.dos, t.b, t.h), full);
    load_tile<PANELS_E>(to + KEYS_AT, mv, key0, value_box(p.f, t.b, t.g), full);
    ring_next(at.pair);
}

DEVICE void load_share(const elements_arena &s, const cu_bwd &p, const cu_elements &c,
                       const tensor_map *mq, const tensor_map *mk, const tensor_map *mv,
                       const tensor_map *mo)
{
    share own = share_of(p, c, blockIdx.x);
    int tiles = (p.f.M + STAY - 1) / STAY, key0 = own.key_block * PASS;
    place at = {{0, 0}, {0, 0}};
    for (int i = own.first; i < own.past; i++) {
        int b = own.b + i / own.n_h, h = own.h + i % own.n_h;
        query_tile t = query_tile_of(p, (b * p.f.H + h) * tiles + own.row_block);
        sight x = look(p, t, key0);
        if (!x.live)
            continue;
        if ((threadIdx.x & 31) == 0)
            load_visit(s, at, p, t, key0, x, mq, mk, mv, mo);
        else {
            ring_next(at.pair);
            ring_next(at.pair);
            ring_next(at.visit);
        }
        __syncwarp();
    }
    if ((threadIdx.x & 31) == 0) {
        barrier_wait(s.empty + at.pair.slot * 8, at.pair.parity ^ 1);
        store_four(s.steps + at.visit.slot * 16, 0, 0, 0, STEP_END);
        barrier_arrive(s.full + at.pair.slot * 8);
    }
}

/* 2. Terms of a visit. */

/* Dot products become weights times the derivative by the read. */
template <int READ>
DEVICE void read_weights(float (&s)[S_COUNT], const cu_bwd &p, const mod_args &mod,
                         const query_tile &t, const own_rows &r, int key, u32 kept)
{
    slope_row r0, r1;
    slope_row_begin(mod, p.f, t.b, t.h, r.q0, r0);
    slope_row_begin(mod, p.f, t.b, t.h, r.q1, r1);
#pragma unroll
    for (int i = 0; i < S_COUNT / 4; i++) {
        int kv = key + 8 * i + t.kv_offset;
        float x[4], by[READS_ALL][4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            x[j] = s[4 * i + j];
        reads_of_piece(p, mod, t, r0, r1, kv, x, by, kept, i);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float w = weight_of(fmaf(x[j], OF_NATURAL, j < 2 ? -r.lse0 : -r.lse1));
            s[4 * i + j] = w == 0.f ? 0.f : w * by[READ][j];
        }
    }
}

/* Of blocks of keys that are not live they become 0. live: a bit for each. */
DEVICE void cut_blocks(float (&s)[S_COUNT], u32 live)
{
#pragma unroll
    for (int i = 0; i < S_COUNT; i++)
        s[i] = live >> 2 * i / CFG_TM & 1 ? s[i] : 0.f;
}

/* may_mask: whether V may hold anything where a weight is 0. */
DEVICE void add_terms(float (&sum)[S_COUNT], const float (&w)[S_COUNT],
                      const float (&dp)[S_COUNT], const own_rows &r, int may_mask)
{
    if (may_mask) {
#pragma unroll
        for (int i = 0; i < S_COUNT; i++)
            sum[i] = w[i] == 0.f ? sum[i]
                                 : fmaf(w[i], dp[i] + (i & 2 ? r.less1 : r.less0), sum[i]);
        return;
    }
#pragma unroll
    for (int i = 0; i < S_COUNT; i++)
        sum[i] = fmaf(w[i], dp[i] + (i & 2 ? r.less1 : r.less0), sum[i]);
}

/* The thread's rows, by what came with the visit's first pair; row: in the tile. */
DEVICE own_rows rows_at(const elements_arena &s, const place &at, const cu_bwd &p,
                        const query_tile &t, int row)
{
    u32 stats = s.stats + at.visit.slot * 2 * STAT_BYTES + row * 4, less = stats + STAT_BYTES;
    int q = t.row0 + row + t.q_offset;
    if (t.row0 + row >= p.n_mblk * BWD_ROWS)
        return {t.row0 + row, q, q + 8, -NEG_INF, -NEG_INF, 0.f, 0.f};
    return {t.row0 + row,
            q,
            q + 8,
            __uint_as_float(load_word(stats)),
            __uint_as_float(load_word(stats + 32)),
            __uint_as_float(load_word(less)),
            __uint_as_float(load_word(less + 32))};
}

/* Whether there is a visit; what its scores add to the sums. */
template <int READ>
DEVICE int add_visit(float (&sum)[S_COUNT], const elements_arena &s, place &at, const cu_bwd &p,
                     const mod_args &mod, const share &own)
{
    int wg = threadIdx.x / 128, lane = threadIdx.x & 31, row = warp_row() + lane / 4;
    u32 pair = s.pairs + at.pair.slot * PAIR_BYTES, scores = s.empty + at.pair.slot * 8;
    float acc[S_COUNT], dp[S_COUNT];
    barrier_wait(s.full + at.pair.slot * 8, at.pair.parity);
    int4 step = load_four(s.steps + at.visit.slot * 16);
    if (step.w & STEP_END)
        return 0;
    wgmma_fence();
    product_scores<CFG_D>(acc, pair + wg * HALF_PANEL, pair + KEYS_AT, 0);
    wgmma_commit();
    int tiles = (p.f.M + STAY - 1) / STAY, key = own.key_block * PASS + 2 * (lane & 3);
    query_tile t = query_tile_of(p, (step.x * p.f.H + step.y) * tiles + own.row_block);
    own_rows r = rows_at(s, at, p, t, row);
    ring_next(at.pair);
    ring_next(at.visit);
    pair = s.pairs + at.pair.slot * PAIR_BYTES;
    barrier_wait(s.full + at.pair.slot * 8, at.pair.parity);
    wgmma_fence();
    product_scores<CFG_E>(dp, pair + wg * HALF_PANEL, pair + KEYS_AT, 0);
    wgmma_commit();
    wgmma_wait<1>();
    warp_arrives(scores);
    read_weights<READ>(acc, p, mod, t, r, key, s.kept);
    if (step.w & STEP_MASKED) {
        cut_row_weights(acc, p, mod, t, r, key, !(step.w & STEP_BY_END));
        cut_blocks(acc, step.z >> wg * BLOCKS);
    }
    wgmma_wait<0>();
    warp_arrives(s.empty + at.pair.slot * 8);
    ring_next(at.pair);
    add_terms(sum, acc, dp, r, (MOD_SCORE && SCORE_MAY_MASK) || (step.w & STEP_MASKED));
    return 1;
}

/* 3. A share. */

/* Whether keys have neighbouring elements, which begin and end on whole pieces: of 8 bytes of
 * f32, of 16 bytes of 16 bits. */
DEVICE int has_pieces(const cu_read &to, const element_line &e, int keys)
{
    int n = to.dtype == DTYPE_F32 ? 2 : 8, bytes = to.dtype == DTYPE_F32 ? 4 : 2;
    return e.by_key == 1 && (e.first | e.by_row) % n == 0 && (keys >= PASS || keys % n == 0)
           && (unsigned long long)to.data % (n * bytes) == 0;
}

/* put_terms straight from registers. */
DEVICE void put_pieces(const cu_read &to, const element_line &e, int rows, int keys,
                       const float (&term)[S_COUNT])
{
    int lane = threadIdx.x & 31, j = lane & 3;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = warp_row() + lane / 4 + 8 * i;
        long long line = e.first + row * e.by_row;
#pragma unroll
        for (int g = 0; g < S_COUNT / 4; g += 4) {
            if (to.dtype == DTYPE_F32) {
#pragma unroll
                for (int k = g; k < g + 4; k++)
                    if (row < rows && 8 * k + 2 * j < keys)
                        *(float2 *)((float *)to.data + line + 8 * k + 2 * j) =
                            make_float2(term[4 * k + 2 * i], term[4 * k + 2 * i + 1]);
                continue;
            }
            u32 w[4];
#pragma unroll
            for (int k = 0; k < 4; k++)
                w[k] =
                    pack_as(term[4 * (g + k) + 2 * i], term[4 * (g + k) + 2 * i + 1], to.dtype);
            quad_transpose(w);
            if (row < rows && (g + j) * 8 < keys)
                *(uint4 *)((u16 *)to.data + line + (g + j) * 8) =
                    make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
}

template <int READ>
DEVICE void sum_share(const elements_arena &s, const cu_bwd &p, const mod_args &mod,
                      const cu_elements &c, char *memory)
{
    share own = share_of(p, c, blockIdx.x);
    int tiles = (p.f.M + STAY - 1) / STAY, key0 = own.key_block * PASS;
    query_tile t = query_tile_of(p, (own.b * p.f.H + own.h) * tiles + own.row_block);
    place at = {{0, 0}, {0, 0}};
    float sum[S_COUNT];
#pragma unroll
    for (int i = 0; i < S_COUNT; i++)
        sum[i] = 0.f;
#if CFG_KEPT
    keep_block(p, mod, t, key0, s.kept);
#endif
    while (add_visit<READ>(sum, s, at, p, mod, own))
        ;
#pragma unroll
    for (int i = 0; i < S_COUNT; i++)
        sum[i] *= BWD_WEIGHT_UNIT;
    element_line e = elements_of(p, mod, c.to, READ, t, key0);
    e.first += own.part * (c.parts > 1 ? c.to.n : 0);
    int rows = rows_left(p, t), keys = p.f.N - key0;
    if (!c.is_adding && has_pieces(c.to, e, keys)) {
        put_pieces(c.to, e, rows, keys, sum);
        return;
    }
    named_sync(1, THREADS); /* nothing of a pair is read any more */
    put_terms(c.to, e, rows, keys, sum, c.is_adding, (float *)memory);
}

/* The launch's read. */
template <int READ>
DEVICE void choose_read(const elements_arena &s, const cu_bwd &p, const mod_args &mod,
                        const cu_elements &c, char *memory)
{
    if constexpr (READ < MOD_READS) {
        if constexpr (read_kind(READ) == READ_ELEMENT) {
            if (c.read == READ)
                return sum_share<READ>(s, p, mod, c, memory);
        }
        choose_read<READ + 1>(s, p, mod, c, memory);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + 128, 1)
    bwd_elements90(const __grid_constant__ cu_bwd p, const __grid_constant__ mod_args mod,
                   const __grid_constant__ cu_elements c, const __grid_constant__ tensor_map mq,
                   const __grid_constant__ tensor_map mk,
                   const __grid_constant__ tensor_map mv,
                   const __grid_constant__ tensor_map mo)
{
    extern __shared__ __align__(1024) char memory[];
    elements_arena s = elements_carve(smem_address(memory));
    if (threadIdx.x == 0)
        elements_init(s);
    __syncthreads();
    if (threadIdx.x < THREADS) {
        registers_grow<CFG_REGS_CONSUMER>();
        choose_read<0>(s, p, mod, c, memory);
    } else {
        registers_shrink<CFG_REGS_DQ>();
        if (threadIdx.x < THREADS + 32)
            load_share(s, p, c, &mq, &mk, &mv, &mo);
    }
}
