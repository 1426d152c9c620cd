/* Products of codes for heads wider than 256, whose rows two warps share (decode_columns.cuh).
 * Each widens what it multiplies: the codes of half of the keys of K, and of half of V's
 * columns. */
#pragma once

/* s = Q K^T in natural units, for OWN_KEYS keys: two pieces of 16 bytes of each at a time, by
 * two chains. */
DEVICE void score_own(float (&s)[S_COUNT], const q_fragments &q, const cu_fwd &p, u32 stage,
                      const float (&back)[2])
{
    enum { PIECES = K_ROW / 16, TILES = OWN_KEYS / 8 };
    static_assert(TILES == 2, "a load of matrices has two pieces of 16 keys");
    int lane = threadIdx.x & 31, own = column_part() * OWN_KEYS;
    u32 scales = stage + SCALES_AT;
    float other[S_COUNT];
#pragma unroll
    for (int i = 0; i < S_COUNT; i++)
        s[i] = other[i] = 0.f;
#pragma unroll 2
    for (int e = 0; e < PIECES; e += 2) {
        u32 w[4];
        int piece = PIECES % 2 ? min(e + lane / 16, PIECES - 1) : e + lane / 16;
        load_matrices(w, piece_of(stage, K_STEP, own + (lane & 15), piece));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (PIECES % 2 && e + i >= PIECES)
                break;
            u32 h[TILES][PAIRS];
            int d = (e + i) * 128 / CODE_BITS + (lane & 3) * (32 / CODE_BITS);
#pragma unroll
            for (int n = 0; n < TILES; n++)
                widen_key(w[2 * i + n], p, scales, own + 8 * n + lane / 4, d, h[n]);
#pragma unroll
            for (int j = 0; j < PAIRS / 2; j++) {
                u32 a[4];
                q_step(a, q, (e + i) * (PAIRS / 2) + j);
#pragma unroll
                for (int n = 0; n < TILES; n++)
                    mma_key((i ? other : s) + 4 * n, a, h[n][2 * j], h[n][2 * j + 1]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < S_COUNT; i++)
        s[i] += other[i];
    scale_scores(s, scales, back);
}

/* o += P V for the warp's columns, in f16 or in Q's dtype. */
template <int IN_HALVES>
DEVICE void add_values(float (&o)[O_COUNT], const pair_memory &m, const float (&s)[S_COUNT],
                       const cu_fwd &p, u32 stage, u32 scales)
{
    enum { PIECES = V_ROW / 16 / PARTS };
    static_assert(PIECES * PARTS * 16 == V_ROW, "each warp has whole pieces");
    int lane = threadIdx.x & 31, first = column_part() * PIECES;
    u32 own[4], a[2][4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        own[i] = IN_HALVES ? pack_halves(s[2 * i], s[2 * i + 1]) : pack(s[2 * i], s[2 * i + 1]);
    share_weights(m, own, a);
#pragma unroll
    for (int e = 0; e < PIECES; e++) {
        u32 w[4];
        int d = (first + e) * 128 / CODE_BITS + lane / 4 * PAIRS;
        if (CFG_E > CFG_E_REAL) /* columns that pad V have no scales */
            d = min(d, CFG_E_REAL - PAIRS);
        if (e % 2 == 0)
            __syncwarp();
        load_matrices_transposed(w, piece_of(stage + V_AT, V_STEP, lane, first + e));
        add_piece<IN_HALVES>(o + e * PAIRS * 4, a, w, p, scales, d);
    }
}

/* o += P V; s holds probabilities. */
DEVICE void block_values(float (&o)[O_COUNT], int &unit, const pair_memory &m,
                         float (&s)[S_COUNT], const cu_fwd &p, u32 stage)
{
    u32 scales = stage + SCALES_AT + 8 * KEYS;
    if (scale_weights(s, o, unit, scales))
        add_values<1>(o, m, s, p, stage, scales);
    else
        add_values<0>(o, m, s, p, stage, scales);
}
