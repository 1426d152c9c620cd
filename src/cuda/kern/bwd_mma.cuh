/* Products of tiles in shared memory by mma.sync: rows of 128 bytes, swizzled, panels of 64
 * columns. A warp makes 16 rows; its fragments lie as mma.cuh has them. */
#pragma once

enum {
    PANEL_COLUMNS = 64,
    WIDTH_D = (CFG_D / 16 + CFG_ROW_WARPS - 1) / CFG_ROW_WARPS * 16, /* columns of a warp */
    WIDTH_E = (CFG_E / 16 + CFG_ROW_WARPS - 1) / CFG_ROW_WARPS * 16,
    TILE_PANELS_D = (CFG_D + 63) / 64,
    TILE_PANELS_E = (CFG_E + 63) / 64,
    KEPT = CFG_TM / 4 /* words of weights of 16 rows */
};

typedef u32 kept_word;

/* Four weights of a fragment: two neighbours of a row, then of that row + 8. */
DEVICE void keep_four(kept_word (&w)[KEPT], int i, float a, float b, float c, float d)
{
    w[2 * i] = pack(a, b);
    w[2 * i + 1] = pack(c, d);
}

/* s = the warp's 16 rows of a (from row `first` on) times the 2 * COUNT rows of b, over DIM */
template <int ROWS_A, int DIM, int COUNT>
DEVICE void tile_scores(float (&s)[COUNT], u32 a, int first, u32 b)
{
    enum { ROWS_B = COUNT * 2 };
    int lane = threadIdx.x & 31, a_row = first + (lane & 15), a_chunk = lane >> 4;
    int b_row = (lane & 7) + (lane >> 4) * 8, b_chunk = lane >> 3 & 1;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        s[i] = 0.f;
#pragma unroll
    for (int kk = 0; kk < DIM / 16; kk++) {
        u32 x[4];
        load_matrices(x, swizzled(a, ROWS_A * 128, a_row, kk * 2 + a_chunk));
#pragma unroll
        for (int n = 0; n < ROWS_B / 16; n++) {
            u32 y[4];
            load_matrices(y, swizzled(b, ROWS_B * 128, n * 16 + b_row, kk * 2 + b_chunk));
            mma16(s + n * 8, x, y[0], y[1]);
            mma16(s + n * 8 + 4, x, y[2], y[3]);
        }
    }
}

/* o += w times columns from panel column `first` on of a tile of 4 * COUNT rows; w: packed */
template <int COUNT, int WIDTH>
DEVICE void tile_sums(float (&o)[WIDTH], const u32 (&w)[COUNT], u32 tile, int first)
{
    enum { ROWS = COUNT * 4 };
    int lane = threadIdx.x & 31, row = lane & 15, chunk = first / 8 + (lane >> 4);
#pragma unroll
    for (int kk = 0; kk < ROWS / 16; kk++) {
#pragma unroll
        for (int n = 0; n < WIDTH / 8; n++) {
            u32 y[4];
            load_matrices_transposed(y,
                                     swizzled(tile, ROWS * 128, kk * 16 + row, chunk + n * 2));
            mma16(o + n * 8, w + 4 * kk, y[0], y[1]);
            mma16(o + n * 8 + 4, w + 4 * kk, y[2], y[3]);
        }
    }
}

/* The column of element i of a result, from the warp's first on. */
DEVICE int sum_column(int i)
{
    return 8 * (i / 4) + 2 * (threadIdx.x & 3) + (i & 1);
}
