/* Forward attention in f32 for any GPU from sm_80 on: as fwd_sm80.cu, a tile of CFG_WGS * 16
 * rows of one head a CTA, 16 of them a warp, but with products of split operands (mma32.cuh). Q
 * stays in shared memory; blocks of K and V come through two stages by cp.async. Where O of 16
 * rows is too wide for one warp, two share them (CFG_ROW_WARPS): each makes the scores of half
 * the keys, reads the other's from shared memory, and owns half of O's columns.
 *
 * Shared memory: Q [panels][ROWS][32], then K, then V, [CFG_STAGES][panels][CFG_TN][32] in
 * 128-byte swizzled rows, scores that are exchanged, then what a general mask needs of the
 * keys. */
#include "cfg.cuh"
#include "ptx.cuh"
#include "launch.h"
#include "arith.cuh"
#include "mod.cuh"
#include "mod_mask.cuh"
#include "mod_score.cuh"
#include "walk.cuh"
#include "epilogue.cuh"
#include "mma32.cuh"
#include "copy.cuh"

enum {
    THREADS = CFG_WGS * CFG_ROW_WARPS * 32,
    ROWS = CFG_WGS * 16,
    KEYS = CFG_TN,
    Q_BYTES = (CFG_D + 31) / 32 * ROWS * 128,
    K_BYTES = (CFG_D + 31) / 32 * KEYS * 128,
    V_BYTES = CFG_E / 32 * KEYS * 128,
    S_COUNT = KEYS / 2,
    S_OWN = S_COUNT / CFG_ROW_WARPS,
    O_COUNT = CFG_E / CFG_ROW_WARPS / 2,
    EXCHANGE_BYTES = CFG_ROW_WARPS > 1 ? CFG_WGS * 16 * KEYS * 4 : 0
};

struct source {
    int b, g;
    int first;                     /* key of the tensors, of the sequence's keys */
    u32 q, keys, values, exchange; /* shared */
};

DEVICE void copy_keys(const source &x, const cu_fwd &p, int slot, int block, int kv_len)
{
    int thread = threadIdx.x + (block >> 31); /* keeps addresses out of registers meanwhile */
#if CFG_CODES
    code_rows k = rows_from(key_codes(p, x.b, x.g), x.first);
    code_rows v = rows_from(value_codes(p, x.b, x.g), x.first);
#else
    row_source k = rows_from(key_rows(p, x.b, x.g), x.first);
    row_source v = rows_from(value_rows(p, x.b, x.g), x.first);
#endif
    u32 to_k = x.keys + slot * K_BYTES, to_v = x.values + slot * V_BYTES;
    copy_rows<KEYS, CFG_D, CFG_D_REAL, THREADS>(to_k, k, block * KEYS, kv_len, p.is_plain,
                                                thread);
    copy_rows<KEYS, CFG_E, CFG_E_REAL, THREADS>(to_v, v, block * KEYS, kv_len, p.is_plain,
                                                thread);
}

struct fragment {
    row_state rows;
    tile_rows at;
    float o[O_COUNT];
};

#if CFG_ROW_WARPS > 1
/* The scores of 16 rows, half of which each of two warps has made. */
DEVICE void exchange(float (&s)[S_COUNT], const float (&own)[S_OWN], u32 at)
{
    int group = threadIdx.x / 64, part = part_of_thread();
    u32 mine = at + group * 16 * KEYS * 4 + (threadIdx.x & 31) * 16;
#pragma unroll
    for (int i = 0; i < S_OWN / 4; i++)
        store_words(mine + (part * (S_OWN / 4) + i) * 512, own + 4 * i);
    asm volatile("bar.sync %0, 64;" ::"r"(group + 1) : "memory");
#pragma unroll
    for (int i = 0; i < S_COUNT / 4; i++) {
        u32 x[4];
        load_words(x, mine + i * 512);
#pragma unroll
        for (int j = 0; j < 4; j++)
            s[4 * i + j] = __uint_as_float(x[j]);
    }
}
#endif

/* the block's scores of this warp's rows */
DEVICE void make_scores(float (&s)[S_COUNT], const source &x, u32 k)
{
    u32 q = x.q + threadIdx.x / (32 * CFG_ROW_WARPS) * 16 * 128;
#if CFG_ROW_WARPS > 1
    float own[S_OWN];
    mma_qk<ROWS>(own, q, k + part_of_thread() * (KEYS / 2) * 128);
    exchange(s, own, x.exchange);
#else
    mma_qk<ROWS>(s, q, k);
#endif
}

/* One block whose K and V are there. `masked`, why scores may be, is the same for all threads
 * of the CTA. */
DEVICE void use_block(fragment &f, const cu_fwd &p, const mod_args &mod, const source &x,
                      int slot, int block, int masked, mask_column *columns)
{
    float s[S_COUNT], shift[2], rescale[2], unit = score_unit(p);
    int column = block * KEYS + 2 * (threadIdx.x & 3);
    make_scores(s, x, x.keys + slot * K_BYTES);
    apply_score(f.at, p, mod, column, s, shift);
    if (masked)
        apply_mask_together<THREADS>(f.at, p, mod, block, column, masked, columns, s);
    int raised = rows_raise(f.rows, s, unit, shift, rescale);
    rows_exp(f.rows, s, unit, shift);
    rows_drop(f.at, p, column, s);
    if (raised)
        rows_scale(f.o, rescale);
    /* A mask that ptxas cannot know: tensor cores ignore those bits anyway, and it would
     * multiply copies of the whole words, four moves each. Elsewhere registers are short. */
    const int is_opaque = __CUDA_ARCH__ >= 900 && O_COUNT <= 32 && !CFG_ROWMAX;
    u32 bits = is_opaque ? TF32_BITS | (u32)p.M >> 31 : TF32_BITS;
    mma_pv(f.o, s, x.values + slot * V_BYTES + part_of_thread() * (O_COUNT / 16) * KEYS * 128,
           bits);
}

/* The tile is asked for again: kept through the loop it would cost registers that O needs. */
DEVICE void finish(fragment &f, const cu_fwd &p)
{
    int turn = blockIdx.x;
    float inv[2];
    asm volatile("" : "+r"(turn));
    tile t = tile_of(p, turn, ROWS);
    rows_finish(f.rows, p, t, f.o, inv);
    rows_store(p, t, f.o, inv);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    fwd_f32(const __grid_constant__ cu_fwd p, const __grid_constant__ mod_args mod)
{
    extern __shared__ __align__(1024) char shared[];
    tile t = tile_of(p, blockIdx.x, ROWS);
    int slot = 0;
    source x = {t.b, kv_head(p, t.h), key_place(t, 0), smem_address(shared)};
    x.keys = x.q + Q_BYTES;
    x.values = x.keys + CFG_STAGES * K_BYTES;
    x.exchange = x.values + CFG_STAGES * V_BYTES;
    mask_column *columns =
        (mask_column *)(shared + Q_BYTES + CFG_STAGES * (K_BYTES + V_BYTES) + EXCHANGE_BYTES);
    fragment f;
#if CFG_RAGGED
    if (tile_is_empty(p, t))
        return;
#endif
    rows_begin(f.rows);
    rows_place(f.at, p, mod, t);
#pragma unroll
    for (int i = 0; i < O_COUNT; i++)
        f.o[i] = 0.f;
    copy_rows<ROWS, CFG_D, CFG_D_REAL, THREADS>(
        x.q, rows_from(query_rows(p, t.b, t.h), row_place(t, 0)), t.row0, rows_of(p, t),
        p.is_plain, threadIdx.x);
    block_walk walk = walk_begin(p, mod, t);
    int more = walk_next(walk, p, t.kv_len);
    if (more)
        copy_keys(x, p, 0, walk.block, t.kv_len);
    copy_commit();
    while (more) {
        int block = walk.block, masked = walk_masked(walk, t.kv_len);
        more = walk_next(walk, p, t.kv_len);
        if (more)
            copy_keys(x, p, slot ^ 1, walk.block, t.kv_len);
        copy_commit();
        copy_wait<1>();
        __syncthreads();
        use_block(f, p, mod, x, slot, block, masked, columns);
        __syncthreads();
        slot ^= 1;
    }
    finish(f, p);
}
