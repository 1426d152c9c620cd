/* The gradient of a capture of which each score of a head reads an element of its own, where
 * batches or heads share these: a bias [q, kv], or [h, q, kv] for all batches. A CTA has 64
 * queries by CFG_KEYS keys, whose elements no other CTA has. It passes by the batches and heads
 * that read them, in order, and keeps the sums of their terms in registers: one order whatever
 * runs beside it, one store, and one rounding where elements have 16 bits. Where that is too
 * few CTAs, several have a part of the batches and heads each, whose sums are added up later.
 *
 * Shared memory, [CFG_STAGES] times: Q and dO of the queries, then K and V of the keys in
 * blocks of PASS, at the end terms on their way to elements; then what is kept of scores. */
#include "cfg.cuh"
#include "ptx.cuh"
#include "bwd.h"
#include "arith.cuh"
#include "mod.cuh"
#include "kv.cuh"
#include "mma.cuh"
#include "copy.cuh"
#include "bwd_copy.cuh"
#include "bwd_tile.cuh"
#include "bwd_mod.cuh"
#include "bwd_store.cuh"
#include "bwd_row.cuh"
#if CFG_F32
#include "bwd_mma32.cuh"
#else
#include "bwd_mma.cuh"
#endif
#include "bwd_pass.cuh"
#include "bwd_keys.cuh"
#include "bwd_element.cuh"
#include "bwd_kept.cuh"
#include "bwd_read_terms.cuh"

enum {
    BLOCKS = CFG_KEYS / PASS, /* of keys, of a CTA */
    STAGE_BYTES = STAY_BYTES + BLOCKS * PASS_BYTES,
#if !CFG_KEPT
    KEPT_BLOCK = 0
#endif
};

/* One batch and head of a share, and which blocks of keys it sees, a bit each. */
struct visit {
    int at; /* of n_b * n_h; there is none from the share's last one on */
    query_tile t;
    u32 live, masked;
    float2 stat[2];
};

/* Which of the blocks meet the tile, and which of these the mask must be asked for. Lanes look
 * at a run each. */
DEVICE void find_blocks(visit &v, const cu_bwd &p, const cu_elements &c, int first)
{
    int past = min(first + c.blocks, (v.t.kv_len + PASS - 1) / PASS);
    v.live = past > first ? (1u << (past - first)) - 1 : 0;
    v.masked = MOD_MASK != MASK_NONE ? v.live : 0;
    if (!p.q_runs)
        return;
    int row = v.t.b * p.q_mask_b + v.t.h * p.q_mask_h + v.t.block;
    int end = __ldg(p.q_run_start + row + 1);
    v.live = v.masked = 0;
    for (int i = __ldg(p.q_run_start + row) + (threadIdx.x & 31); i < end; i += 32) {
        int4 run = __ldg((const int4 *)p.q_runs + i);
        int lo = max(run.x, first) - first, hi = min(run.x + run.y, past) - first;
        u32 bits = lo < hi ? (1u << hi) - (1u << lo) : 0;
        v.live |= bits;
        v.masked |= run.z ? bits : 0;
    }
    v.live = __reduce_or_sync(~0u, v.live);
    v.masked = __reduce_or_sync(~0u, v.masked);
}

/* The next batch and head from `at` on that see any of the keys. */
DEVICE void visit_from(visit &v, const cu_bwd &p, const cu_elements &c, const share &s, int at)
{
    int tiles = (p.f.M + STAY - 1) / STAY;
    v.live = 0;
    for (v.at = at; v.at < s.past; v.at++) {
        int b = s.b + v.at / s.n_h, h = s.h + v.at % s.n_h;
        v.t = query_tile_of(p, (b * p.f.H + h) * tiles + s.row_block);
        find_blocks(v, p, c, s.key_block);
        if (v.live)
            break;
    }
    int row = v.t.row0 + warp_row() + (threadIdx.x & 31) / 4;
#pragma unroll
    for (int i = 0; i < 2 && v.live; i++)
        v.stat[i] = stats_of(p, tile_rows_of(p.f, v.t), v.t.b, v.t.h, row + 8 * i);
}

DEVICE void copy_visit(const cu_bwd &p, const visit &v, const share &s, u32 to)
{
    rows keys = rows_of_keys(p, tile_rows_of(p.f, v.t), v.t.b, v.t.g, v.t.kv_len);
    copy_both<STAY>(to, rows_of_queries(p, tile_rows_of(p.f, v.t), v.t.b, v.t.h), v.t.row0,
                    p.f.is_plain);
#pragma unroll 1
    for (int i = 0; i < BLOCKS; i++)
        if (v.live >> i & 1)
            copy_both<PASS>(to + STAY_BYTES + i * PASS_BYTES, keys, (s.key_block + i) * PASS,
                            p.f.is_plain);
}

/* What this visit's scores add to the sums. */
template <int READ>
DEVICE void add_visit(float (&sum)[BLOCKS][S_COUNT], const cu_bwd &p, const mod_args &mod,
                      const visit &v, const share &s, u32 stage, u32 kept)
{
    dropper drop = no_dropper();
    dropper_enter(drop, p.f, v.t.b, v.t.h);
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
        float term[1][S_COUNT];
        int key0 = (s.key_block + i) * PASS;
        int masked = masked_by(v.masked >> i & 1, key0 + PASS > v.t.kv_len);
        if (!(v.live >> i & 1))
            continue;
        terms_of_queries<READ>(term, p, mod, v.t, key0, masked, drop, stage,
                               stage + STAY_BYTES + i * PASS_BYTES, v.stat,
                               kept + i * KEPT_BLOCK);
#pragma unroll
        for (int j = 0; j < S_COUNT; j++)
            sum[i][j] += term[0][j];
    }
}

DEVICE void clear_sums(float (&sum)[BLOCKS][S_COUNT])
{
#pragma unroll
    for (int i = 0; i < BLOCKS; i++)
#pragma unroll
        for (int j = 0; j < S_COUNT; j++)
            sum[i][j] = 0.f;
}

DEVICE void put_sums(const cu_bwd &p, const cu_elements &c, const element_line &e,
                     const query_tile &t, int key0, const float (&sum)[BLOCKS][S_COUNT],
                     char *memory)
{
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
        element_line block = e;
        block.first += i * PASS * e.by_key;
        if (i < c.blocks)
            put_terms(c.to, block, rows_left(p, t), p.f.N - key0 - i * PASS, sum[i],
                      c.is_adding, (float *)memory);
    }
}

DEVICE bool is_same(const element_line &a, const element_line &b)
{
    return a.first == b.first && a.by_row == b.by_row && a.by_key == b.by_key;
}

/* Sums go to their elements where the next visit reads others, and at the end. */
template <int READ>
DEVICE void sum_share(const cu_bwd &p, const mod_args &mod, const cu_elements &c, char *memory)
{
    share s = share_of(p, c, blockIdx.x);
    u32 shared = smem_address(memory), kept = shared + CFG_STAGES * STAGE_BYTES;
    int stage = 0, key0 = s.key_block * PASS;
    float sum[BLOCKS][S_COUNT];
    visit now, next;
    clear_sums(sum);
    visit_from(now, p, c, s, s.first);
    element_line e = elements_of(p, mod, c.to, READ, now.t, key0);
    e.first += s.part * (c.parts > 1 ? c.to.n : 0);
    if (now.live)
        copy_visit(p, now, s, shared);
    copy_commit();
#if CFG_KEPT
    for (int i = 0; i < c.blocks && now.live; i++)
        keep_block(p, mod, now.t, key0 + i * PASS, kept + i * KEPT_BLOCK);
#endif
    while (now.live) {
        visit_from(next, p, c, s, now.at + 1);
#if CFG_STAGES > 1
        if (next.live)
            copy_visit(p, next, s, shared + (stage ^ 1) * STAGE_BYTES);
        copy_commit();
#endif
        copy_wait<CFG_STAGES - 1>();
        __syncthreads();
        add_visit<READ>(sum, p, mod, now, s, shared + stage * STAGE_BYTES, kept);
        __syncthreads();
        if (c.may_move && next.live) {
            element_line other = elements_of(p, mod, c.to, READ, next.t, key0);
            if (!is_same(e, other)) {
                put_sums(p, c, e, now.t, key0, sum, memory + stage * STAGE_BYTES);
                clear_sums(sum);
                e = other;
            }
        }
#if CFG_STAGES > 1
        stage ^= 1;
#else
        if (next.live)
            copy_visit(p, next, s, shared);
        copy_commit();
#endif
        now = next;
    }
    copy_wait<0>();
    __syncthreads();
    put_sums(p, c, e, now.t, key0, sum, memory);
}

/* The launch's read. */
template <int READ>
DEVICE void choose_read(const cu_bwd &p, const mod_args &mod, const cu_elements &c,
                        char *memory)
{
    if constexpr (READ < MOD_READS) {
        if constexpr (read_kind(READ) == READ_ELEMENT) {
            if (c.read == READ)
                return sum_share<READ>(p, mod, c, memory);
        }
        choose_read<READ + 1>(p, mod, c, memory);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    bwd_elements(const __grid_constant__ cu_bwd p, const __grid_constant__ mod_args mod,
                 const __grid_constant__ cu_elements c)
{
    extern __shared__ __align__(1024) char memory[];
    choose_read<0>(p, mod, c, memory);
}
