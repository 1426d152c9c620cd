/* One block of keys on Hopper, as a warpgroup makes it: the scores of its 64 rows, their
 * softmax, and the product with V. Shared by the kernels of large and of small tiles. */
#pragma once

enum {
    ROWS = CFG_WGS * 64,
    PANELS_D = (CFG_D + 63) / 64,
    PANELS_E = (CFG_E + 63) / 64,
    PANEL_Q = ROWS * 128,
    PANEL_KV = CFG_TN * 128,
    Q_BYTES = PANELS_D * PANEL_Q,
    K_BYTES = PANELS_D * PANEL_KV,
    V_BYTES = PANELS_E * PANEL_KV,
    S_COUNT = CFG_TN / 2,
    O_COUNT = CFG_E / 2
};

/* CFG_TN neighbouring keys of a head to shared memory, all panels, counted on `full`. */
template <int PANELS>
DEVICE void load_block(u32 to, u32 full, const tensor_map *map, int first, head_box at)
{
    barrier_expect(full, PANELS * PANEL_KV);
#pragma unroll
    for (int i = 0; i < PANELS; i++)
        copy_box(to + i * PANEL_KV, map, i * 64, first, at.h, at.b, full, EVICT_LAST);
}

/* The two products. */
DEVICE void product_qk(float (&s)[S_COUNT], u32 q, u32 k)
{
    u64 a = operand(q, 16), b = operand(k, 16);
#pragma unroll
    for (int kk = 0; kk < CFG_D / 16; kk++) {
        u64 qa = a + ((kk / 4) * PANEL_Q + (kk % 4) * 32) / 16;
        u64 kb = b + ((kk / 4) * PANEL_KV + (kk % 4) * 32) / 16;
        wgmma_qk(s, qa, kb, kk > 0);
    }
}

DEVICE void product_pv(float (&o)[O_COUNT], const u32 (&p)[S_COUNT / 2], u32 v)
{
    u64 b = operand(v, PANEL_KV);
#pragma unroll
    for (int kk = 0; kk < CFG_TN / 16; kk++)
        wgmma_pv(o, p[4 * kk], p[4 * kk + 1], p[4 * kk + 2], p[4 * kk + 3], b + kk * 2048 / 16);
}

struct consumer {
    row_state rows;
    tile_rows at;
    float unit; /* factor from what s holds to exponents of 2 */
#if SCORE_TANH
    int large; /* so many blocks to come may have scores too large for the polynomial */
#endif
#if CFG_CHUNKS
    int live; /* keys of the block scored last that are there */
#endif
};

/* Whether dropout is part of the exponentials; three groups lack registers for that, and drop
 * packed weights. */
#define DROP_MIXED (CFG_DROP && CFG_WGS < 3)

#if DROP_MIXED
/* Weights that are dropped get a sign, which packing makes 0. */
template <int MOST>
DEVICE void drop_eight(float (&s)[S_COUNT], int first, const u32 (&w)[4],
                       const drop_bound<MOST> &t)
{
#pragma unroll
    for (int n = 0; n < 4; n++) {
        int at = first + (n & 1) * 2 + n / 2;
        drop_by_sign(s[at], s[at + 4], drop_signed(w[n], t));
    }
}

/* As rows_exp, with dropout. The warps of a multiprocessor tend to do the same at the same
 * time, and draws take other units than exponentials: so some exponentials stand behind each
 * round of a draw. kv: position of the block's first key. */
template <int MOST>
DEVICE void rows_exp_kept(consumer &c, const cu_drop &d, u32 kv, float (&s)[S_COUNT],
                          const float (&shift)[2])
{
    float x[2] = {shift[0] - c.rows.m[0], shift[1] - c.rows.m[1]};
    float sum[2][2] = {{c.rows.l[0], 0.f}, {c.rows.l[1], 0.f}};
    u32 row = dropout_row(c.at.q), column = kv / 16 * 4 + (threadIdx.x & 3);
    const unsigned(&head)[4] = c.at.drop.w;
    drop_bound<MOST> t = drop_bound_of<MOST>(d);
#pragma unroll
    for (int i = 0; i < S_COUNT; i += 8) {
        u32 w[4] = {row, (column + i / 2) & MOST_COLUMN, head[2], head[3]};
#pragma unroll
        for (int n = 0; n < DROPOUT_ROUNDS; n++) {
            drop_round(w, head[0] + n * DROPOUT_STEP_0, head[1] + n * DROPOUT_STEP_1);
#pragma unroll
            for (int j = n * 8 / DROPOUT_ROUNDS; j < (n + 1) * 8 / DROPOUT_ROUNDS; j++) {
                int r = j >> 1 & 1;
                s[i + j] = exp2_fast(fmaf(s[i + j], c.unit, x[r]));
                sum[r][j & 1] += s[i + j];
            }
        }
        drop_eight(s, i, w, t);
    }
    c.rows.l[0] = sum[0][0] + sum[0][1];
    c.rows.l[1] = sum[1][0] + sum[1][1];
}

DEVICE void rows_exp_dropped(consumer &c, const cu_fwd &p, int first, float (&s)[S_COUNT],
                             const float (&shift)[2])
{
    u32 kv = first + c.at.kv_offset;
    if (!drop_is_aligned(c.at.q - (threadIdx.x >> 2 & 7), kv)) {
        rows_exp(c.rows, s, c.unit, shift);
        rows_drop(c.at, p, first + 2 * (threadIdx.x & 3), s);
    } else if (p.drop.threshold <= 0x8000) {
        rows_exp_kept<0>(c, p.drop, kv, s, shift);
    } else {
        rows_exp_kept<1>(c, p.drop, kv, s, shift);
    }
}
#endif

/* The softmax of the block of keys from `first` on: scores in s become probabilities. The
 * result tells whether O has to be rescaled. masked: why scores may be (masked.cuh). columns:
 * room of this group's own for what a general mask needs of each key; threads of group wg meet
 * at a barrier of theirs. */
template <int FIRST>
DEVICE int softmax_step(consumer &c, const cu_fwd &p, const mod_args &mod, int first,
                        int masked, mask_column *columns, int wg, float (&s)[S_COUNT],
                        float (&rescale)[2])
{
    float shift[2];
    int column = first + 2 * (threadIdx.x & 3), raised = 0;
#if CFG_CHUNKS
    c.live = c.at.kv_len - first;
#endif
#if SCORE_TANH
    if (!FIRST && c.large == 0 && !masked) {
        if (!CFG_LAZY || rows_are_late(c.rows))
            raised = rows_raise_tanh(c.rows, c.at, p, mod, column, s, c.unit, rescale);
        if (rows_exp_tanh(c.rows, c.at, p, mod, column, s, c.unit))
            c.large = 15;
#if DROP_MIXED
        rows_drop(c.at, p, column, s);
#endif
        return raised;
    }
    c.large = max(c.large - 1, 0);
#endif
    /* The warps vote before the scores are made, not after the mask: that is 4 % faster for a
     * relative bias at D64 and 1 % faster for full attention at D64. */
    int looks = FIRST || !CFG_LAZY || rows_are_late(c.rows);
#if CFG_SHARES
    named_sync(8 + wg, 128); /* all of the block's shared values have been made */
#endif
    apply_score(c.at, p, mod, column, s, shift);
    if (masked) {
#if MOD_MASK == MASK_GENERAL
        /* The first barrier waits until no warp reads what the block before left there, the
         * second until all has been written. */
        if (masked & MASKED_BY_MOD && !has_limits(p)) {
            named_sync(8 + wg, 128);
            share_columns(c.at, p, mod, first, columns, 128);
            named_sync(8 + wg, 128);
        }
#endif
        apply_mask(c.at, p, mod, column, masked, columns, s);
    }
    if (looks)
        raised = rows_raise(c.rows, s, c.unit, shift, rescale);
#if DROP_MIXED
    rows_exp_dropped(c, p, first, s, shift);
#else
    rows_exp(c.rows, s, c.unit, shift);
#endif
    return raised;
}

DEVICE void pack_p(u32 (&p)[S_COUNT / 2], const float (&s)[S_COUNT])
{
#pragma unroll
    for (int i = 0; i < S_COUNT / 2; i++)
        p[i] = DROP_MIXED ? pack_positive(s[2 * i], s[2 * i + 1])
                          : pack(s[2 * i], s[2 * i + 1]);
}
