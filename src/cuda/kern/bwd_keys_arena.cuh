/* Shared memory of the kernels in which one warpgroup makes dV of 64 keys and another dK
 * (bwd_wide_keys.cuh, bwd_f32_keys.cuh): K, V, [CFG_STAGES] of Q and dO, two blocks of weights,
 * lse and delta of the stages, what their steps are about, barriers. */
#pragma once

struct keys_arena {
    u32 k, v, q, d_out, weights;
    u32 lse, delta, steps; /* of each stage */
    u32 k_full, v_full, weights_full, weights_empty;
    u32 q_full, q_empty, o_full, o_empty;
};

/* Bytes of what lies one behind the other. */
struct keys_bytes {
    u32 k, v;                /* of the tile's keys */
    u32 q, d_out, statistic; /* of a stage */
    u32 weights;             /* of a block */
};

DEVICE keys_arena keys_carve(u32 shared, const keys_bytes &of)
{
    keys_arena s;
    s.k = shared;
    s.v = s.k + of.k;
    s.q = s.v + of.v;
    s.d_out = s.q + CFG_STAGES * of.q;
    s.weights = s.d_out + CFG_STAGES * of.d_out;
    s.lse = s.weights + 2 * of.weights;
    s.delta = s.lse + CFG_STAGES * of.statistic;
    s.steps = s.delta + CFG_STAGES * of.statistic;
    s.k_full = s.steps + CFG_STAGES * 16;
    s.v_full = s.k_full + 8;
    s.weights_full = s.v_full + 8;
    s.weights_empty = s.weights_full + 16;
    s.q_full = s.weights_empty + 16;
    s.q_empty = s.q_full + CFG_STAGES * 8;
    s.o_full = s.q_empty + CFG_STAGES * 8;
    s.o_empty = s.o_full + CFG_STAGES * 8;
    return s;
}

static_assert(CFG_STAGES >= 2, "a step is loaded while the one before it is used");

DEVICE void keys_init(const keys_arena &s)
{
    barrier_init(s.k_full, 1);
    barrier_init(s.v_full, 1);
    for (int i = 0; i < 2; i++) {
        barrier_init(s.weights_full + i * 8, 4);
        barrier_init(s.weights_empty + i * 8, 4);
    }
    for (int i = 0; i < CFG_STAGES; i++) {
        barrier_init(s.q_full + i * 8, 1);
        barrier_init(s.q_empty + i * 8, 8); /* both groups read both tiles */
        barrier_init(s.o_full + i * 8, 1);
        barrier_init(s.o_empty + i * 8, 8);
    }
    fence_barrier_init();
}
