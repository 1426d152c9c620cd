/* Shared memory of the backward kernel for Hopper, its barriers and rings. Tiles lie in
 * swizzled rows of 128 bytes, in panels of 64 columns: K, V [panels][KEYS][64], Q, dO
 * [CFG_STAGES][panels][64][64], dS [2][KEYS][64], staging of dQ; then dense reads, lse and
 * delta of the stages, what the last steps are about, three columns of terms, and barriers. */
#pragma once

/* Two stages are loaded in time only if consumers say when they are done with one; with more,
 * dS of the step after says so. */
#define FREES_EARLY (CFG_HELPERS && CFG_STAGES == 2)

enum {
    KEYS = CFG_KEYS,
    PANELS_D = (CFG_D + 63) / 64,
    PANELS_E = (CFG_E + 63) / 64,
    KEY_PANEL = KEYS * 128,
    QUERY_PANEL = BWD_ROWS * 128,
    K_BYTES = PANELS_D * KEY_PANEL,
    V_BYTES = PANELS_E * KEY_PANEL,
    Q_BYTES = PANELS_D * QUERY_PANEL,
    O_BYTES = PANELS_E * QUERY_PANEL,
    DS_BYTES = KEYS * 128,
    PART_BYTES = BWD_ROWS * 64 * 4, /* of dQ: 64 columns */
    LAST_COLUMNS = CFG_D - (PANELS_D - 1) * 64,
    LAST_BYTES = BWD_ROWS * LAST_COLUMNS * 4, /* of its last part */
    STAT_BYTES = BWD_ROWS * 4,
    DENSE_BYTES = dense_stage_bytes(),
    STEPS = 8,                  /* how long what a step is about is kept */
    LINE_BYTES = KEYS * 4 + 96, /* bwd_lines.cuh */
    ONES_BYTES = 160,           /* bwd_key_sums.cuh: eight rows of a column, and 16 bytes on */
    S_COUNT = BWD_ROWS / 2,     /* words of a fragment of 64 rows by BWD_ROWS columns */
    DQ_GROUP = CFG_WGS,
    THREADS = (CFG_WGS + 1 + CFG_HELPERS) * 128
};

/* addresses of this CTA's shared memory */
struct arena {
    u32 k, v, q, d_out, ds, staging;
    u32 dense;      /* [CU_DENSE_STAGES] */
    u32 lse, delta; /* [CFG_STAGES][64] */
    u32 steps;      /* [STEPS] */
    u32 tile;       /* batch, parity of K and V, id; first key, q_offset, kv_offset, kv_len */
    u32 lines, ones;
    u32 kv_full, q_full, o_full, ds_full, ds_empty, staging_full, staging_empty; /* barriers */
    u32 used; /* [CFG_STAGES] with FREES_EARLY: a step's products of Q and dO are done */
};

DEVICE arena carve(char *shared)
{
    arena s;
    s.k = smem_address(shared);
    s.v = s.k + K_BYTES;
    s.q = s.v + V_BYTES;
    s.d_out = s.q + CFG_STAGES * Q_BYTES;
    s.ds = s.d_out + CFG_STAGES * O_BYTES;
    s.staging = s.ds + 2 * DS_BYTES;
    s.dense = s.staging + 2 * PART_BYTES;
    s.lse = s.dense + CU_DENSE_STAGES * DENSE_BYTES;
    s.delta = s.lse + CFG_STAGES * STAT_BYTES;
    s.steps = s.delta + CFG_STAGES * STAT_BYTES;
    s.tile = s.steps + STEPS * 16;
    s.lines = s.tile + 32;
    s.ones = s.lines + LINE_BYTES;
    s.kv_full = s.ones + ONES_BYTES;
    s.q_full = s.kv_full + 8;
    s.o_full = s.q_full + CFG_STAGES * 8;
    s.ds_full = s.o_full + CFG_STAGES * 8;
    s.ds_empty = s.ds_full + 16;
    s.staging_full = s.ds_empty + 16;
    s.staging_empty = s.staging_full + 16;
    s.used = s.staging_empty + 16;
    return s;
}

DEVICE void init_barriers(const arena &s)
{
    store_four(s.tile, 0, 1, 0, 0); /* the first tile's parity is 0 */
    barrier_init(s.kv_full, 1);
    for (int i = 0; i < CFG_STAGES; i++) {
        barrier_init(s.q_full + i * 8, 1);
        barrier_init(s.o_full + i * 8, 1);
        if (FREES_EARLY)
            barrier_init(s.used + i * 8, CFG_WGS * 4);
    }
    for (int i = 0; i < 2; i++) {
        barrier_init(s.ds_full + i * 8, CFG_WGS * 4);
        barrier_init(s.ds_empty + i * 8, 4);
        barrier_init(s.staging_full + i * 8, 4);
        barrier_init(s.staging_empty + i * 8, 1);
    }
    fence_barrier_init();
}
