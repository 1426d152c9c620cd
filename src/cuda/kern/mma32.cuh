/* Products of 16 rows in f32 by mma.sync on tf32 (11 bits): every operand is split into hi +
 * lo and three of the four products are added, a.lo b.hi + a.hi b.lo + a.hi b.hi; what is left
 * out is below 2^-21 of a product. hi is rounded to nearest, so that lo has 12 bits, of which
 * the tensor cores read 11, and the error has no sign. Beside heads wider than 64, where K and
 * V so split spill registers, their hi is cut off and lo loses two bits. The tensor cores
 * truncate their sums, so these are short, small products first: 32 dims or 16 keys, then added
 * in f32.
 *
 * Q, K and V lie in shared memory in 128-byte swizzled rows, panels of 32 columns. Accumulators
 * of scores lie as in mma.cuh. Those of O: element 16c + 4j + i is of row lane / 4 (i < 2) or
 * that row + 8, column 32c + 8 (lane % 4) + 4 (i & 1) + j: a thread owns 8 neighbours. */
#pragma once

#include "shared.cuh"

#define TF32_BITS 0xffffe000u

DEVICE u32 tf32_nearest(float x)
{
    u32 y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}

DEVICE void split_nearest(u32 x, u32 &hi, u32 &lo)
{
    hi = tf32_nearest(__uint_as_float(x));
    lo = __float_as_uint(__uint_as_float(x) - __uint_as_float(hi));
}

enum { KV_HALF = CFG_D <= 64 && CFG_E <= 64 ? 0x1000 : 0 }; /* of hi's last bit */

/* hi of an element of K or V, in integers, which is cheaper; bits: TF32_BITS. What becomes
 * infinite here has a lo that is not finite either. */
DEVICE u32 head_of(u32 x, u32 bits)
{
    return (x + KV_HALF) & bits;
}

DEVICE void split_kv(u32 x, u32 bits, u32 &hi, u32 &lo)
{
    hi = head_of(x, bits);
    lo = __float_as_uint(__uint_as_float(x) - __uint_as_float(hi));
}

DEVICE void mma8(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2])
{
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* a.lo b.hi + a.hi b.lo, the small products of 16 x 8 elements with 8 x 8 */
DEVICE void mma_small(float (&d)[4], const u32 (&hi)[4], const u32 (&lo)[4], u32 b0, u32 b1,
                      u32 bits)
{
    u32 bh[2], bl[2];
    split_kv(b0, bits, bh[0], bl[0]);
    split_kv(b1, bits, bh[1], bl[1]);
    mma8(d, lo, bh);
    mma8(d, hi, bl);
}

DEVICE void mma_large(float (&d)[4], const u32 (&hi)[4], u32 b0, u32 b1, u32 bits)
{
    u32 bh[2] = {head_of(b0, bits), head_of(b1, bits)};
    mma8(d, hi, bh);
}

/* s += Q K^T over STEPS * 8 dims from c on, TILES * 8 keys at a time */
template <int ROWS, int STEPS, int TILES, int COUNT>
DEVICE void mma_qk_part(float (&s)[COUNT], u32 q, u32 k, int c)
{
    enum { PANEL = CFG_TN * 128, CHAINS = TILES < 4 ? 2 : 1 }; /* four hide their latency */
    int lane = threadIdx.x & 31;
    u32 at_q = (swizzled(q, 0, lane & 15, lane >> 4) ^ (c & 16) * 4) + c / 32 * ROWS * 128;
    u32 at_k = (swizzled(k, 0, lane & 7, lane >> 3) ^ (c & 16) * 4) + c / 32 * PANEL;
    u32 hi[STEPS][4], lo[STEPS][4];
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        u32 a[4];
        load_matrices(a, at_q ^ i * 32);
#pragma unroll
        for (int j = 0; j < 4; j++)
            split_nearest(a[j], hi[i][j], lo[i][j]);
    }
#pragma unroll
    for (int n = 0; n < COUNT / 4; n += TILES) {
        float x[CHAINS][TILES][4] = {};
        u32 b[TILES][STEPS / 2][4]; /* two steps each */
#pragma unroll
        for (int i = 0; i < STEPS / 2; i++)
#pragma unroll
            for (int j = 0; j < TILES; j++)
                load_matrices(b[j][i], (at_k ^ i * 64) + (n + j) * 1024);
#pragma unroll
        for (int i = 0; i < STEPS; i++)
#pragma unroll
            for (int j = 0; j < TILES; j++)
                mma_small(x[0][j], hi[i], lo[i], b[j][i / 2][i % 2 * 2],
                          b[j][i / 2][i % 2 * 2 + 1], TF32_BITS);
#pragma unroll
        for (int i = 0; i < STEPS; i++)
#pragma unroll
            for (int j = 0; j < TILES; j++)
                mma_large(x[CHAINS - 1][j], hi[i], b[j][i / 2][i % 2 * 2],
                          b[j][i / 2][i % 2 * 2 + 1], TF32_BITS);
#pragma unroll
        for (int j = 0; j < TILES * 4; j++)
            s[4 * n + j] += CHAINS > 1 ? x[0][j / 4][j % 4] + x[CHAINS - 1][j / 4][j % 4]
                                       : x[0][j / 4][j % 4];
    }
}

/* s = Q K^T over DIM for 16 rows at q (of ROWS) and 2 * COUNT keys at k (of CFG_TN),
 * STEPS * 8 dims at a time. */
template <int ROWS, int DIM = CFG_D, int STEPS = 4, int COUNT>
DEVICE void mma_qk(float (&s)[COUNT], u32 q, u32 k)
{
    enum { TILES = COUNT % 16 == 0 ? 4 : COUNT % 8 == 0 ? 2 : 1 };
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        s[i] = 0.f;
#pragma unroll 1
    for (int c = 0; c + STEPS * 8 <= DIM; c += STEPS * 8)
        mma_qk_part<ROWS, STEPS, TILES>(s, q, k, c);
    if (DIM % (STEPS * 8))
        mma_qk_part<ROWS, 2, TILES>(s, q, k, DIM / 32 * 32);
}

/* o += P V; s holds probabilities. Place t of a step of 8 keys is key 2t, place t + 4 key
 * 2t + 1, which is how the accumulators of scores lie. Sums run over UNIT steps. */
template <int COUNT, int O_COUNT>
DEVICE void mma_pv(float (&o)[O_COUNT], const float (&s)[COUNT], u32 v, u32 bits)
{
    enum { PANEL = CFG_TN * 128, UNIT = 2 };
    int t = threadIdx.x & 3, column = threadIdx.x >> 2 & 7;
    u32 at[2] = {swizzled(v, 0, 2 * t, column), swizzled(v, 0, 2 * t + 1, column)};
#pragma unroll
    for (int n = 0; n < COUNT / 4; n += UNIT) {
        u32 hi[UNIT][4], lo[UNIT][4];
#pragma unroll
        for (int i = 0; i < UNIT * 4; i++) { /* a: (row, t), (row + 8, t), (row, t + 4), ... */
            const int to = (i & 1) * 2 + (i >> 1 & 1);
            split_nearest(__float_as_uint(s[4 * n + i]), hi[i / 4][to], lo[i / 4][to]);
        }
#pragma unroll
        for (int c = 0; c < O_COUNT / 16; c++) {
            float x[4][4] = {};
            u32 b[UNIT][2][4];
#pragma unroll
            for (int i = 0; i < UNIT * 2; i++)
                load_words(b[i / 2][i % 2], at[i % 2] + (n + i / 2) * 1024 + c * PANEL);
#pragma unroll
            for (int i = 0; i < UNIT * 4; i++)
                mma_small(x[i % 4], hi[i / 4], lo[i / 4], b[i / 4][0][i % 4],
                          b[i / 4][1][i % 4], bits);
#pragma unroll
            for (int i = 0; i < UNIT * 4; i++)
                mma_large(x[i % 4], hi[i / 4], b[i / 4][0][i % 4], b[i / 4][1][i % 4], bits);
#pragma unroll
            for (int j = 0; j < 16; j++)
                o[16 * c + j] += x[j / 4][j % 4];
        }
    }
}
