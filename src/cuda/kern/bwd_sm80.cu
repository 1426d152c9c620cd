/* Backward attention for any GPU from sm_80 on, any alignment, any score function, f32 as well
 * as 16-bit problems: two kernels that make the scores twice and add nothing up across CTAs,
 * so that results never depend on an order. bwd_keys: a CTA has 64 keys of one key head and
 * makes dK and dV of them, passing by the queries of every head of the group. bwd_queries: a
 * CTA has 64 queries of one head and makes dQ of them, passing by the keys.
 *
 * Either way 64 rows stay and blocks of CFG_TM rows pass, with two tensors each: K and V, Q and
 * dO. A warp holds 16 of the rows that stay, with scores in registers (mma.cuh); with
 * CFG_ROW_WARPS 2 two warps share 16 rows, and each owns half of the results' columns.
 *
 * Shared memory: the tiles that stay, then [CFG_STAGES] of those that pass, then lse and delta
 * of 64 rows and of CFG_STAGES blocks. */
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
#if CFG_THIRDS
#include "bwd_thirds.cuh"
#elif CFG_F32
#include "bwd_mma32.cuh"
#else
#include "bwd_mma.cuh"
#endif
#include "bwd_pass.cuh"
#include "bwd_keys.cuh"

/* ---- what is not finite ---- */

/* Whether scores are infinite or NaN: so are all scores of a row of K or Q that has such an
 * element. Where a mask keeps keys from queries, their weights of 0 must not meet it. */
DEVICE int any_special(const float (&s)[S_COUNT], int masked)
{
    int any = 0;
    if (MOD_MASK == MASK_NONE || !masked)
        return 0;
#pragma unroll
    for (int i = 0; i < S_COUNT; i++)
        any |= !(fabsf(s[i]) < -NEG_INF);
    return any;
}

/* If some thread has found any: 0 for such elements of the first tensor of the rows that pass.
 * Live pairs have weights that are not numbers already. */
DEVICE void clear_special(u32 pass, int masked, int any)
{
    if (MOD_MASK == MASK_NONE || !masked || !__syncthreads_or(any))
        return;
    for (u32 at = pass + threadIdx.x * 16; at < pass + PASS_D; at += THREADS * 16) {
        int4 x = load_four(at);
        store_four(at, without_special(x.x), without_special(x.y), without_special(x.z),
                   without_special(x.w));
    }
    __syncthreads();
}

/* ---- keys stay ---- */

/* P and dS of this warp's 16 keys by PASS queries, as products take them. stats: of the
 * queries, in shared memory. Result: any_special(). */
DEVICE int weights_of_keys(kept_word (&w)[KEPT], kept_word (&ds)[KEPT], const cu_bwd &p,
                           const mod_args &mod, const key_tile &t, int h, int q0, int masked,
                           const dropper &drop, u32 stay, u32 pass, u32 stats)
{
    float s[S_COUNT], dp[S_COUNT];
    int lane = threadIdx.x & 31, key = t.key0 + warp_row() + lane / 4;
    key_side k0 = {key + t.kv_offset, key < t.kv_len};
    key_side k1 = {key + 8 + t.kv_offset, key + 8 < t.kv_len};
    tile_scores<STAY, CFG_D>(s, stay, warp_row(), pass);
    int any = any_special(s, masked);
    if (CFG_DK)
        tile_scores<STAY, CFG_E>(dp, stay + STAY_D, warp_row(), pass + PASS_D);
    u32 keep = kept_of_keys(drop, p.f, q0 + 2 * (lane & 3) + t.q_offset, k0.kv);
#pragma unroll
    for (int i = 0; i < S_COUNT / 4; i++) {
        int at = 8 * i + 2 * (lane & 3);
        bool live[4] = {true, true, true, true};
        float a[4], b[4];
        four f;
        float4 stat = load_stats(stats + at * 8);
        f.q0 = q0 + at + t.q_offset;
        f.q1 = f.q0 + 1;
        f.k0 = k0.kv;
        f.k1 = k1.kv;
        f.stat0 = make_float2(stat.x, stat.y);
        f.stat1 = make_float2(stat.z, stat.w);
        f.x[0] = s[4 * i], f.x[1] = s[4 * i + 2], f.x[2] = s[4 * i + 1], f.x[3] = s[4 * i + 3];
#pragma unroll
        for (int j = 0; j < 4; j++) /* without dK dS is not used */
            f.dp[j] = CFG_DK ? dp[4 * i + j / 2 + j % 2 * 2] : 0.f;
        if (masked) {
            live4(p.f, mod, t.b, h, query_side_of(p.f, mod, t.b, h, f.q0),
                  query_side_of(p.f, mod, t.b, h, f.q1), k0, k1, masked & MASKED_BY_MOD, live);
            /* queries past the last meet keys that the mask may hide from all others */
            live[0] &= stat.x != -NEG_INF, live[1] &= stat.x != -NEG_INF;
            live[2] &= stat.z != -NEG_INF, live[3] &= stat.z != -NEG_INF;
        }
        u32 four = keep >> 4 * i; /* whose keys lie 8 apart: the middle ones change places */
        weigh(f, p, mod, t.b, h, live, (four & 9) | (four & 2) << 1 | (four & 4) >> 1, a, b);
        keep_four(w, i, a[0], a[2], a[1], a[3]);
        keep_four(ds, i, b[0], b[2], b[1], b[3]);
    }
    return any;
}

/* One element at a time: rows lie anywhere. */
template <int COUNT>
DEVICE void store_result(const result &to, int row0, int n, int first, int real, float factor,
                         const float (&x)[COUNT])
{
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        int row = row0 + lane / 4 + 8 * (i / 2 & 1);
        int column = first + sum_column(i);
        if (row < n && column < real)
            put_float(to, row * to.step + column, x[i] * factor);
    }
}

/* dK or dV of keys of a tile. */
template <int COUNT>
DEVICE void store_tile(const cu_bwd &p, int is_value, const key_tile &t, int first, int real,
                       float factor, const float (&x)[COUNT])
{
    int row0 = t.key0 + warp_row(), n = tile_rows_of(p.f, t).keys;
#if HAS_OWN_PLACES
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = row0 + lane / 4 + 8 * half;
        result to = owned_row(p, is_value, t.b, t.g, min(row, n - 1), real);
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            int column = first + sum_column(i);
            if ((i / 2 & 1) == half && row < n && column < real)
                put_float(to, column, x[i] * factor);
        }
    }
#else
    result to = is_value ? result_of(p, p.dv, p.dvs, t.b, t.g, 0, BWD_OF_V)
                         : result_of(p, p.dk, p.dks, t.b, t.g, 0, BWD_OF_K);
    store_result(result_from(to, tile_rows_of(p.f, t).kv_first), row0, n, first, real, factor,
                 x);
#endif
}

/* a block of queries on its way to a stage */
DEVICE void pass_queries(const cu_bwd &p, const key_tile &t, int h, int q0, u32 shared,
                         int stage)
{
    u32 stats = shared + STATS + (STAY + stage * PASS) * 8;
    int b = t.b;
    if (CFG_THIRDS) /* keeps the batch's addresses out of registers between copies */
        asm volatile("" : "+r"(b));
    copy_both<PASS>(arrival(shared, stage), rows_of_queries(p, tile_rows_of(p.f, t), b, h), q0,
                    p.f.is_plain);
    for (int i = threadIdx.x; i < PASS; i += THREADS)
        store_stats(stats + i * 8, stats_of(p, tile_rows_of(p.f, t), b, h, q0 + i));
}

/* Blocks of the walk are of BWD_ROWS queries: PASS of them at a time. */
struct passing {
    query_walk walk;
    int at; /* rows of the present block that have passed */
    int more;
};

DEVICE void passing_next(passing &w, const cu_bwd &p, const mod_args &mod, const key_tile &t)
{
    w.at += PASS;
    if (w.at >= BWD_ROWS) {
        w.at = 0;
        w.more = query_next(w.walk, p, mod, t);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    bwd_keys(const __grid_constant__ cu_bwd p, const __grid_constant__ mod_args mod)
{
    extern __shared__ __align__(1024) char memory[];
    u32 shared = smem_address(memory);
    kept_word w[KEPT], ds[KEPT];
    key_tile t = key_tile_at(p.f, blockIdx.x);
#if CFG_RAGGED
    if (t.key0 >= tile_rows_of(p.f, t).keys)
        return;
#endif
    float dk[WIDTH_D / 2], dv[WIDTH_E / 2];
    passing next = {query_begin(p, t), BWD_ROWS, 0};
    dropper drop = no_dropper();
    int stage = 0;
    clear(dk);
    clear(dv);
    copy_both<STAY>(shared,
                    rows_of_keys(p, tile_rows_of(p.f, t), t.b, keys_head(p, t), t.kv_len),
                    t.key0, p.f.is_plain);
    passing_next(next, p, mod, t);
    if (next.more)
        pass_queries(p, t, next.walk.h, next.walk.block * BWD_ROWS, shared, 0);
    copy_commit();
    while (next.more) {
        int h = next.walk.h, q0 = next.walk.block * BWD_ROWS + next.at;
        int masked = masked_by(next.walk.masked, t.key0 + STAY > t.kv_len);
        u32 pass = pass_tile(shared, stage);
        u32 stats = shared + STATS + (STAY + stage * PASS) * 8;
        take_block(shared);
        passing_next(next, p, mod, t);
#if CFG_STAGES > 1
        if (next.more)
            pass_queries(p, t, next.walk.h, next.walk.block * BWD_ROWS + next.at, shared,
                         stage ^ 1);
        copy_commit();
#endif
        copy_wait<CFG_STAGES - 1>();
        __syncthreads();
        dropper_enter(drop, p.f, t.b, h);
        int any = weights_of_keys(w, ds, p, mod, t, h, q0 + row_shift(p.f, q0), masked, drop,
                                  shared, pass, stats);
        clear_special(pass, masked, any);
        if (CFG_DV)
            tile_sums(dv, w, pass + PASS_D, warp_part() * WIDTH_E);
        if (CFG_DK)
            tile_sums(dk, ds, pass, warp_part() * WIDTH_D);
        __syncthreads();
#if CFG_STAGES > 1
        stage ^= 1;
#else
        if (next.more)
            pass_queries(p, t, next.walk.h, next.walk.block * BWD_ROWS + next.at, shared, 0);
        copy_commit();
#endif
    }
    if (CFG_DK)
        store_tile(p, 0, t, warp_part() * WIDTH_D, CFG_D_REAL, p.f.scale, dk);
    if (CFG_DV)
        store_tile(p, 1, t, warp_part() * WIDTH_E, CFG_E_REAL, value_factor(p.f), dv);
}

/* ---- queries stay ---- */

/* dS of this warp's 16 queries by PASS keys. Result: any_special(). */
DEVICE int ds_of_queries(kept_word (&ds)[KEPT], const cu_bwd &p, const mod_args &mod,
                         const query_tile &t, int key0, int masked, const dropper &drop,
                         u32 stay, u32 pass, const float2 (&stat)[2])
{
    float s[S_COUNT], dp[S_COUNT];
    int lane = threadIdx.x & 31, q = t.row0 + warp_row() + lane / 4 + t.q_offset;
    tile_scores<STAY, CFG_D>(s, stay, warp_row(), pass);
    int any = any_special(s, masked);
    tile_scores<STAY, CFG_E>(dp, stay + STAY_D, warp_row(), pass + PASS_D);
    query_side q0 = query_side_of(p.f, mod, t.b, t.h, q);
    query_side q1 = query_side_of(p.f, mod, t.b, t.h, q + 8);
    u32 keep = kept_of_queries(drop, p.f, q, key0 + 2 * (lane & 3) + t.kv_offset);
#pragma unroll
    for (int i = 0; i < S_COUNT / 4; i++) {
        int key = key0 + 8 * i + 2 * (lane & 3);
        bool live[4] = {true, true, true, true};
        float a[4], b[4];
        four f;
        f.q0 = q, f.q1 = q + 8, f.k0 = key + t.kv_offset, f.k1 = f.k0 + 1;
        f.stat0 = stat[0], f.stat1 = stat[1];
#pragma unroll
        for (int j = 0; j < 4; j++)
            f.x[j] = s[4 * i + j], f.dp[j] = dp[4 * i + j];
        if (masked) {
            key_side k0 = {f.k0, key < t.kv_len}, k1 = {f.k1, key + 1 < t.kv_len};
            live4(p.f, mod, t.b, t.h, q0, q1, k0, k1, masked & MASKED_BY_MOD, live);
        }
        weigh(f, p, mod, t.b, t.h, live, keep >> 4 * i, a, b);
        keep_four(ds, i, b[0], b[1], b[2], b[3]);
    }
    return any;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    bwd_queries(const __grid_constant__ cu_bwd p, const __grid_constant__ mod_args mod)
{
    extern __shared__ __align__(1024) char memory[];
    u32 shared = smem_address(memory);
    kept_word ds[KEPT];
    query_tile t = query_tile_at(p, blockIdx.x);
#if CFG_RAGGED
    if (t.row0 >= tile_rows_of(p.f, t).q_len)
        return;
#endif
    rows keys = rows_of_keys(p, tile_rows_of(p.f, t), t.b, t.g, t.kv_len);
    float dq[WIDTH_D / 2];
    int stage = 0, row = t.row0 + warp_row() + (threadIdx.x & 31) / 4;
    float2 stat[2] = {stats_of(p, tile_rows_of(p.f, t), t.b, t.h, row),
                      stats_of(p, tile_rows_of(p.f, t), t.b, t.h, row + 8)};
    key_walk walk = key_begin(p, mod, t);
    dropper drop = no_dropper();
    dropper_enter(drop, p.f, t.b, t.h);
#pragma unroll
    for (int i = 0; i < WIDTH_D / 2; i++)
        dq[i] = 0.f;
    copy_both<STAY>(shared, rows_of_queries(p, tile_rows_of(p.f, t), t.b, t.h), t.row0,
                    p.f.is_plain);
    int more = key_next(walk, p, t);
    if (more)
        copy_both<PASS>(arrival(shared, 0), keys, walk.block * PASS, p.f.is_plain);
    copy_commit();
    while (more) {
        int key0 = walk.block * PASS;
        int masked = masked_by(walk.masked, key0 + PASS > t.kv_len);
        u32 pass = pass_tile(shared, stage);
        take_block(shared);
        more = key_next(walk, p, t);
#if CFG_STAGES > 1
        if (more)
            copy_both<PASS>(arrival(shared, stage ^ 1), keys, walk.block * PASS, p.f.is_plain);
        copy_commit();
#endif
        copy_wait<CFG_STAGES - 1>();
        __syncthreads();
        int any = ds_of_queries(ds, p, mod, t, key0, masked, drop, shared, pass, stat);
        clear_special(pass, masked, any);
        tile_sums(dq, ds, pass, warp_part() * WIDTH_D);
        __syncthreads();
#if CFG_STAGES > 1
        stage ^= 1;
#else
        if (more)
            copy_both<PASS>(arrival(shared, 0), keys, walk.block * PASS, p.f.is_plain);
        copy_commit();
#endif
    }
    store_result(result_from(result_of(p, p.dq, p.dqs, t.b, t.h, 0, BWD_OF_Q),
                             tile_rows_of(p.f, t).q_first),
                 t.row0 + warp_row(), tile_rows_of(p.f, t).q_len, warp_part() * WIDTH_D,
                 CFG_D_REAL, p.f.scale, dq);
}
