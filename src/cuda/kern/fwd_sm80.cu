/* Forward attention for any GPU from sm_80 on: one CTA makes a tile of CFG_WGS * 16 rows of one
 * head, a warp 16 of them, with mma.sync (FlashAttention-2, arXiv 2307.08691). Blocks of K and
 * V come through two stages of shared memory by cp.async; where rows do not lie on 16 bytes
 * (p.is_plain), element by element. Keys past the end are stored as zeros, so that what memory
 * holds there is never multiplied.
 *
 * Shared memory: K, then V, [CFG_STAGES][panels][CFG_TN][64] each in 128-byte swizzled rows,
 * then what a general mask needs of the keys. */
#include "cfg.cuh"
#include "ptx.cuh"
#include "launch.h"
#include "arith.cuh"
#include "mod.cuh"
#include "mod_mask.cuh"
#include "mod_score.cuh"
#include "walk.cuh"
#include "epilogue.cuh"
#include "mma.cuh"
#include "copy.cuh"

enum {
    THREADS = CFG_WGS * 32,
    ROWS = CFG_WGS * 16,
    KEYS = CFG_TN,
    PANEL = KEYS * 128,
    K_BYTES = (CFG_D + 63) / 64 * PANEL,
    V_BYTES = (CFG_E + 63) / 64 * PANEL,
    S_COUNT = KEYS / 2,
    O_COUNT = CFG_E / 2,
    COLUMN_BYTES = MOD_MASK == MASK_GENERAL ? KEYS * MASK_COLUMN_WORDS * 4 : 0
};

#if CFG_CODES
typedef code_rows kv_source;
#else
typedef row_source kv_source;
#endif

struct source {
    kv_source k, v;
    u32 shared;
};

DEVICE source source_of(const cu_fwd &p, int b, int g, u32 shared)
{
#if CFG_CODES
    source x = {key_codes(p, b, g), value_codes(p, b, g), shared};
#else
    source x = {key_rows(p, b, g), value_rows(p, b, g), shared};
#endif
    return x;
}

DEVICE void copy_keys(const source &x, const cu_fwd &p, int slot, int block, int kv_len)
{
    u32 k = x.shared + slot * K_BYTES, v = x.shared + CFG_STAGES * K_BYTES + slot * V_BYTES;
    copy_rows<KEYS, CFG_D, CFG_D_REAL, THREADS>(k, x.k, block * KEYS, kv_len, p.is_plain,
                                                threadIdx.x);
    copy_rows<KEYS, CFG_E, CFG_E_REAL, THREADS>(v, x.v, block * KEYS, kv_len, p.is_plain,
                                                threadIdx.x);
}

/* ---- the tile ---- */

struct fragment {
    row_state rows;
    tile_rows at;
    float unit;
    q_fragments q;
    float o[O_COUNT];
};

DEVICE void begin(fragment &f, const cu_fwd &p, const mod_args &mod, const tile &t)
{
    row_source q = rows_from(query_rows(p, t.b, t.h), row_place(t, 0));
    int m = t.row0 + row_of_thread(), n = rows_of(p, t);
    rows_begin(f.rows);
    rows_place(f.at, p, mod, t);
    f.unit = score_unit(p);
    load_q(f.q, row_address(q, min(m, n - 1)), m < n, row_address(q, min(m + 8, n - 1)),
           m + 8 < n, p.is_plain);
#pragma unroll
    for (int i = 0; i < O_COUNT; i++)
        f.o[i] = 0.f;
}

/* One block whose K and V are there. `masked`, why scores may be, is the same for all threads
 * of the CTA. */
DEVICE void use_block(fragment &f, const cu_fwd &p, const mod_args &mod, int block, int masked,
                      u32 k, u32 v, mask_column *columns)
{
    float s[S_COUNT], shift[2], rescale[2];
    int column = block * KEYS + 2 * (threadIdx.x & 3);
    mma_qk(s, f.q, k);
    apply_score(f.at, p, mod, column, s, shift);
    if (masked)
        apply_mask_together<THREADS>(f.at, p, mod, block, column, masked, columns, s);
    int raised = rows_raise(f.rows, s, f.unit, shift, rescale);
    rows_exp(f.rows, s, f.unit, shift);
    rows_drop(f.at, p, column, s);
    if (raised)
        rows_scale(f.o, rescale);
    mma_pv(f.o, s, v);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    fwd_sm80(const __grid_constant__ cu_fwd p, const __grid_constant__ mod_args mod)
{
    extern __shared__ __align__(1024) char shared[];
    tile t = tile_of(p, blockIdx.x, ROWS);
    int g = kv_head(p, t.h), slot = 0;
    source x = source_of(p, t.b, g, smem_address(shared));
#if CFG_RAGGED
    x.k = rows_from(x.k, key_place(t, 0));
    x.v = rows_from(x.v, key_place(t, 0));
#endif
    mask_column *columns = (mask_column *)(shared + CFG_STAGES * (K_BYTES + V_BYTES));
    fragment f;
#if CFG_RAGGED
    if (tile_is_empty(p, t))
        return;
#endif
#if CFG_Q_SHARED
    f.q = smem_address(shared) + CFG_STAGES * (K_BYTES + V_BYTES) + COLUMN_BYTES
          + threadIdx.x * 16;
#endif
    begin(f, p, mod, t);
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
        use_block(f, p, mod, block, masked, x.shared + slot * K_BYTES,
                  x.shared + CFG_STAGES * K_BYTES + slot * V_BYTES, columns);
        __syncthreads();
        slot ^= 1;
    }
    float inv[2];
    rows_finish(f.rows, p, t, f.o, inv);
    rows_store(p, t, f.o, inv);
}
