/* What bwd_mma.cuh has, for f32: an operand is the sum of three bf16 numbers, which have all
 * of its 24 bits, and of the nine products of two operands the six largest are added; those
 * left out are below 2^-25 of the whole. Tiles are split once, when they come: a tile has
 * three copies in shared memory, the largest numbers first, each in swizzled rows of 128
 * bytes. Blocks that pass by arrive as f32 elsewhere, each thread's pieces
 * of 8 columns where it alone reads them.
 *
 * The tensor cores truncate their sums, so these are short, small products apart, and then
 * added in f32. */
#pragma once

#include "shared.cuh"
#include "split.cuh"

enum {
    WIDTH_D = CFG_D, /* columns of a warp */
    WIDTH_E = CFG_E,
    TILE_PANELS_D = 1,
    TILE_PANELS_E = 1,
    THIRD = 4,        /* words of 16 rows by 16 columns, of a copy */
    KEPT = CFG_TM / 2 /* weights of 16 rows */
};

static_assert(CFG_D <= 64 && CFG_E <= 64 && CFG_ROW_WARPS == 1, "a warp has all columns");

typedef float kept_word;

/* This thread, in no register between the blocks: addresses are made anew. */
DEVICE int thread_now(void)
{
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    return thread;
}

/* Four weights of a fragment: two neighbours of a row, then of that row + 8. */
DEVICE void keep_four(kept_word (&w)[KEPT], int i, float a, float b, float c, float d)
{
    w[4 * i] = a, w[4 * i + 1] = b, w[4 * i + 2] = c, w[4 * i + 3] = d;
}

/* Weights of 16 rows by 16 columns as products take them. */
DEVICE void split_weights(u32 (&a)[3 * THIRD], const float *w)
{
#pragma unroll
    for (int i = 0; i < THIRD; i++) {
        u32 x[3];
        split_two(w[2 * i], w[2 * i + 1], x);
        a[i] = x[0], a[i + THIRD] = x[1], a[i + 2 * THIRD] = x[2];
    }
}

/* 16 rows by 16 times COUNT tiles of 8 columns; b: two words of each of them in each copy */
template <int COUNT>
DEVICE void mma_thirds(float (&large)[COUNT][4], float (&small)[COUNT][4], const u32 *a,
                       const u32 (&b)[3][COUNT][2])
{
    const int of_a[5] = {2, 0, 1, 1, 0}, of_b[5] = {0, 2, 1, 0, 1};
#pragma unroll
    for (int k = 0; k < 5; k++)
#pragma unroll
        for (int n = 0; n < COUNT; n++)
            mma16(small[n], a + of_a[k] * THIRD, b[of_b[k]][n][0], b[of_b[k]][n][1]);
#pragma unroll
    for (int n = 0; n < COUNT; n++)
        mma16(large[n], a, b[0][n][0], b[0][n][1]);
}

/* s = the warp's 16 rows of a (from row `first` on) times the CFG_TM rows of b */
template <int ROWS_A, int DIM, int COUNT>
DEVICE void tile_scores(float (&s)[COUNT], u32 a, int first, u32 b)
{
    enum { TILES = COUNT / 4, ROWS_B = CFG_TM };
    int lane = thread_now() & 31, a_row = first + (lane & 15), a_chunk = lane >> 4;
    int b_row = (lane & 7) + (lane >> 4) * 8, b_chunk = lane >> 3 & 1;
    float large[TILES][4] = {}, small[TILES][4] = {};
#pragma unroll 2
    for (int kk = 0; kk < DIM / 16; kk++) {
        u32 x[3][4], y[3][TILES][2];
#pragma unroll
        for (int k = 0; k < 3; k++) {
            load_matrices(x[k], swizzled(a + k * ROWS_A * 128, 0, a_row, kk * 2 + a_chunk));
#pragma unroll
            for (int n = 0; n < TILES; n += 2) {
                u32 z[4];
                load_matrices(
                    z, swizzled(b + k * ROWS_B * 128, 0, n * 8 + b_row, kk * 2 + b_chunk));
                y[k][n][0] = z[0], y[k][n][1] = z[1];
                y[k][n + 1][0] = z[2], y[k][n + 1][1] = z[3];
            }
        }
        mma_thirds(large, small, &x[0][0], y);
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        s[i] = large[i / 4][i % 4] + small[i / 4][i % 4];
}

/* o += w times columns from n tiles of 8 on */
template <int COUNT>
DEVICE void sum_columns(float (&o)[COUNT], const u32 (&a)[CFG_TM / 16][3 * THIRD], u32 tile,
                        int lane, int n)
{
    enum { TILES = COUNT % 16 ? 2 : 4, ROWS = CFG_TM };
    int row = lane & 15, chunk = lane >> 4;
    float large[TILES][4] = {}, small[TILES][4] = {};
#pragma unroll
    for (int kk = 0; kk < ROWS / 16; kk++) {
        u32 y[3][TILES][2];
#pragma unroll
        for (int k = 0; k < 3; k++)
#pragma unroll
            for (int i = 0; i < TILES; i += 2) {
                u32 z[4];
                load_matrices_transposed(
                    z, swizzled(tile + k * ROWS * 128, 0, kk * 16 + row, chunk + n + i));
                y[k][i][0] = z[0], y[k][i][1] = z[1];
                y[k][i + 1][0] = z[2], y[k][i + 1][1] = z[3];
            }
        mma_thirds(large, small, a[kk], y);
    }
#pragma unroll
    for (int i = 0; i < TILES * 4; i++)
        o[4 * n + i] += large[i / 4][i % 4] + small[i / 4][i % 4];
}

/* o += w times a tile of CFG_TM rows, in a loop of one turn, past which ptxas moves nothing: it
 * would ask for loads of this product beside the elementwise work before it, and spill. */
template <int COUNT>
DEVICE void tile_sums(float (&o)[COUNT], const kept_word (&w)[KEPT], u32 tile, int)
{
    enum { TILES = COUNT % 16 ? 2 : 4 };
    int turns = 1;
    asm volatile("" : "+r"(turns));
#pragma unroll 1
    for (; turns; turns--) {
        int lane = thread_now() & 31;
        u32 a[CFG_TM / 16][3 * THIRD];
#pragma unroll
        for (int kk = 0; kk < CFG_TM / 16; kk++)
            split_weights(a[kk], w + 8 * kk);
#pragma unroll
        for (int n = 0; n < COUNT / 4; n += TILES)
            sum_columns(o, a, tile, lane, n);
    }
}

/* The column of element i of a result, from the warp's first on. */
DEVICE int sum_column(int i)
{
    return 8 * (i / 4) + 2 * (threadIdx.x & 3) + (i & 1);
}

/* Eight columns of a row to the three copies of a tile of ROWS rows */
template <int ROWS> DEVICE void put_thirds(u32 tile, int row, int piece, const float (&x)[8])
{
    u32 w[4][3];
#pragma unroll
    for (int i = 0; i < 4; i++)
        split_two(x[2 * i], x[2 * i + 1], w[i]);
#pragma unroll
    for (int k = 0; k < 3; k++)
        store_four(swizzled(tile + k * ROWS * 128, ROWS * 128, row, piece), w[0][k], w[1][k],
                   w[2][k], w[3][k]);
}

/* A tile that stays: from global memory, by way of registers. */
template <int ROWS, int DIM, int REAL, int THREADS>
DEVICE void split_rows(u32 tile, const row_source &rows, int first, int n, int is_plain)
{
    enum { PIECES = DIM / 8 };
#pragma unroll 1
    for (int i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
        int row = i / PIECES, piece = i % PIECES;
        bool is_row;
        const elem *from = row_if(rows, first + row, n, is_row);
        float x[8];
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
            int column = piece * 8 + j;
            float4 y = make_float4(0.f, 0.f, 0.f, 0.f);
            if (!is_plain && is_row && column < REAL)
                y = __ldg((const float4 *)(from + column));
            x[j] = y.x, x[j + 1] = y.y, x[j + 2] = y.z, x[j + 3] = y.w;
        }
        if (is_plain && is_row) {
#pragma unroll
            for (int j = 0; j < 8; j++)
                x[j] = piece * 8 + j < REAL ? __ldg(from + piece * 8 + j) : 0.f;
        }
        put_thirds<ROWS>(tile, row, piece, x);
    }
}

/* A tile that passes: on its way as it is, 32 bytes of a thread's each piece */
template <int ROWS, int DIM, int REAL, int THREADS>
DEVICE void copy_pieces(u32 to, const row_source &rows, int first, int n, int is_plain,
                        int thread)
{
    enum { PIECES = DIM / 8 };
#pragma unroll 1
    for (int i = thread; i < ROWS * PIECES; i += THREADS) {
        int row = i / PIECES, piece = i % PIECES;
        u32 place = to + (i - thread) * 32 + thread * 16;
        bool is_row;
        const elem *from = row_if(rows, first + row, n, is_row);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            int column = piece * 8 + j * 4;
            if (is_plain)
                copy_plain(place + j * THREADS * 16, from + (column < REAL ? column : 0),
                           is_row ? REAL - column : 0);
            else
                copy16(place + j * THREADS * 16, from + (column < REAL ? column : 0),
                       is_row && column < REAL);
        }
    }
}

/* ... and, once its own pieces are there, where products read them. */
template <int ROWS, int DIM, int THREADS> DEVICE void split_pieces(u32 tile, u32 from)
{
    enum { PIECES = DIM / 8 };
    int thread = thread_now();
#pragma unroll 2
    for (int i = thread; i < ROWS * PIECES; i += THREADS) {
        u32 place = from + (i - thread) * 32 + thread * 16, w[4], v[4];
        load_words(w, place);
        load_words(v, place + THREADS * 16);
        float x[8];
#pragma unroll
        for (int j = 0; j < 4; j++)
            x[j] = __uint_as_float(w[j]), x[j + 4] = __uint_as_float(v[j]);
        put_thirds<ROWS>(tile, i / PIECES, i % PIECES, x);
    }
}
