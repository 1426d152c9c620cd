/* Backward attention in f32 for Hopper, head dims to 128: the two kernels of bwd_wide.cu, by
 * products of operands in three bf16 numbers, as bwd_split leaves them, of whose nine products
 * the six largest are added. The tensor cores truncate their sums, so these are of a block
 * alone, small products apart, and then added in f32.
 *
 * bwd_f32_keys.cuh: a CTA has 64 keys of one key head and makes their dK and dV.
 * bwd_f32_queries.cuh: a CTA has 64 queries of one head and makes their dQ.
 *
 * Either way 64 rows stay and blocks of PASS rows pass, with two tensors each. A tile is three
 * parts in shared memory, the largest numbers first, each in panels of 64 columns, swizzled
 * rows of 128 bytes. Two consumer warpgroups, and a thread of a third that loads. */
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
#include "bwd_store.cuh"
#include "split.cuh"
#include "wgmma.cuh"
#include "bwd_ring.cuh"

enum {
    KEYS = CFG_KEYS,
    STAY = 64,
    PASS = CFG_TM,
    PANELS_D = (CFG_D + 63) / 64,
    PANELS_E = (CFG_E + 63) / 64,
    STAY_PANEL = STAY * 128,
    PASS_PANEL = PASS * 128, /* what a copy brings */
    STAY_D = 3 * PANELS_D * STAY_PANEL,
    STAY_E = 3 * PANELS_E * STAY_PANEL,
    PASS_D = 3 * PANELS_D * PASS_PANEL,
    PASS_E = 3 * PANELS_E * PASS_PANEL,
    S_COUNT = PASS / 2, /* words of a fragment of 64 rows by PASS columns */
    SUM_COUNT = 32,     /* of 64 rows by a panel's columns */
    CONSUMERS = 256
};

static_assert(CFG_KEYS == 64 && BWD_ROWS % PASS == 0, "64 rows stay, parts of a block pass");

/* A tile of so many rows to shared memory, its bytes counted already. */
template <int ROWS, int PANELS>
DEVICE void load_tile(u32 to, const tensor_map *map, int row, int h, int b, u32 full, u64 hint)
{
#pragma unroll
    for (int i = 0; i < 3 * PANELS; i++)
#pragma unroll
        for (int j = 0; j < ROWS / PASS; j++)
            copy_box(to + i * ROWS * 128 + j * PASS_PANEL, map, i * 64, row + j * PASS, h, b,
                     full, hint);
}

#include "bwd_keys.cuh"
#include "bwd_weights.cuh"
#include "bwd_key_weights.cuh"
#include "bwd_row_weights.cuh"
#include "bwd_f32_products.cuh"
#include "bwd_f32_keys.cuh"
#include "bwd_f32_queries.cuh"
