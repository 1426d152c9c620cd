/* Backward attention for Hopper without sums across CTAs: two kernels make the scores, seven
 * products in place of five, so that no result depends on an order and no score function needs
 * a bound of its slope. For head dims above 128, where dK and dV of 64 keys take half the
 * register file and sums of dQ for so few keys more of L2 than it has; for slopes without a
 * bound; and where rows see few keys.
 *
 * bwd_wide_keys.cuh: a CTA has 64 keys of one key head and makes their dK and dV.
 * bwd_wide_queries.cuh: a CTA has 128 queries of one head and makes their dQ.
 *
 * Tiles of 64 rows lie in shared memory in panels of 64 columns, swizzled rows of 128 bytes.
 * Two consumer warpgroups, and a thread of a third that loads. */
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
#include "wgmma.cuh"
#include "bwd_ring.cuh"

enum {
    KEYS = CFG_KEYS,
    STAY = CFG_STAY,
    PASS = CFG_KEYS,
    PANELS_D = (CFG_D + 63) / 64,
    PANELS_E = (CFG_E + 63) / 64,
    PANEL = 64 * 128,
    KEY_PANEL = PANEL,
    QUERY_PANEL = PANEL,
    D_BYTES = PANELS_D * PANEL, /* of a tile of Q or K, and of dO or V */
    E_BYTES = PANELS_E * PANEL,
    S_COUNT = BWD_ROWS / 2,                /* words of a fragment of 64 rows by 64 columns */
    CONSUMERS = 2 * STAY,                  /* threads that make dQ */
    LOADERS = CFG_REGS_CONSUMER ? 128 : 32 /* of which one works */
};

static_assert(CFG_KEYS == 64 && BWD_ROWS == 64, "a warpgroup has 64 rows");

/* a tile of 64 rows to shared memory, its bytes counted already */
template <int PANELS>
DEVICE void load_tile(u32 to, const tensor_map *map, int row, head_box at, u32 full, u64 hint)
{
#pragma unroll
    for (int i = 0; i < PANELS; i++)
        copy_box(to + i * PANEL, map, i * 64, row, at.h, at.b, full, hint);
}

DEVICE void be_consumer(void)
{
#if CFG_REGS_CONSUMER
    registers_grow<CFG_REGS_CONSUMER>();
#endif
}

DEVICE void be_loader(void)
{
#if CFG_REGS_CONSUMER
    registers_shrink<CFG_REGS_DQ>();
#endif
}

#include "bwd_keys.cuh"
#include "bwd_products.cuh"
#include "bwd_weights.cuh"
#include "bwd_key_weights.cuh"
#include "bwd_row_weights.cuh"
#include "bwd_wide_keys.cuh"
#include "bwd_wide_queries.cuh"
