/* What bwd_mma.cuh has, for f32: products of split operands (mma32.cuh), tiles in panels of 32
 * columns. A warp's part of a result is whole panels. */
#pragma once

#include "mma32.cuh"

enum {
    PANEL_COLUMNS = 32,
    WIDTH_D =
        (CFG_D + 32 * CFG_ROW_WARPS - 1) / (32 * CFG_ROW_WARPS) * 32, /* columns of a warp */
    WIDTH_E = (CFG_E + 32 * CFG_ROW_WARPS - 1) / (32 * CFG_ROW_WARPS) * 32,
    TILE_PANELS_D = WIDTH_D * CFG_ROW_WARPS / 32,
    TILE_PANELS_E = WIDTH_E * CFG_ROW_WARPS / 32,
    KEPT = CFG_TM / 2 /* words of weights of 16 rows */
};

typedef float kept_word;

/* Four weights of a fragment: two neighbours of a row, then of that row + 8. */
DEVICE void keep_four(kept_word (&w)[KEPT], int i, float a, float b, float c, float d)
{
    w[4 * i] = a, w[4 * i + 1] = b, w[4 * i + 2] = c, w[4 * i + 3] = d;
}

/* s = the warp's 16 rows of a (from row `first` on) times the 2 * COUNT rows of b, over DIM */
template <int ROWS_A, int DIM, int COUNT>
DEVICE void tile_scores(float (&s)[COUNT], u32 a, int first, u32 b)
{
    mma_qk<ROWS_A, DIM, 2>(s, a + first * 128, b);
}

/* o += w times columns from `first` on of a tile of CFG_TM rows */
template <int WIDTH>
DEVICE void tile_sums(float (&o)[WIDTH], const kept_word (&w)[KEPT], u32 tile, int first)
{
    mma_pv(o, w, tile + first / 32 * CFG_TM * 128, TF32_BITS);
}

/* The column of element i of a result, from the warp's first on. */
DEVICE int sum_column(int i)
{
    return i / 16 * 32 + 8 * (threadIdx.x & 3) + 4 * (i & 1) + (i >> 2 & 3);
}
