/* Heads wider than 256: two warps share 16 rows, each with half of O's columns. Of a block each
 * makes the scores of half of the keys; they tell each other their largest, and then the
 * weights, as fragments of the product with V. */
#pragma once

enum { COUPLES = WARPS / 2, PAIR_WEIGHTS = 2 * 32 * 16, PAIR_PEAKS = 2 * 16 * 4 };
static_assert(PAIR_WEIGHTS + PAIR_PEAKS == DECODE_PAIR_BYTES, "as the host has it");

DEVICE void sync_pair()
{
    asm volatile("bar.sync %0, 64;" ::"r"(2 + (int)threadIdx.x / 64) : "memory");
}

DEVICE pair_memory pair_at(u32 base)
{
    int pair = threadIdx.x / 64;
    pair_memory x = {base + pair * PAIR_WEIGHTS,
                     base + COUPLES * PAIR_WEIGHTS + pair * PAIR_PEAKS};
    return x;
}

/* The larger of the pair's largest scores of each row. */
DEVICE void share_peaks(const pair_memory &m, float (&peak)[2])
{
    int row = (threadIdx.x & 31) / 4;
    u32 own = m.peaks + column_part() * 64, other = m.peaks + (1 - column_part()) * 64;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        peak[r] = quad_max(peak[r]);
        if ((threadIdx.x & 3) == 0)
            store_word(own + (row + 8 * r) * 4, __float_as_uint(peak[r]));
    }
    sync_pair();
#pragma unroll
    for (int r = 0; r < 2; r++)
        peak[r] = fmaxf(peak[r], __uint_as_float(load_word(other + (row + 8 * r) * 4)));
}

/* Weights of 16 keys by each warp, as fragments of the products with V: a has those of all. */
DEVICE void share_weights(const pair_memory &m, const u32 (&own)[4], u32 (&a)[2][4])
{
    int lane = threadIdx.x & 31, part = column_part();
    u32 other[4];
    asm volatile(
        "st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(m.weights + (part * 32 + lane) * 16),
        "r"(own[0]), "r"(own[1]), "r"(own[2]), "r"(own[3])
        : "memory");
    sync_pair();
    load_words(other, m.weights + ((1 - part) * 32 + lane) * 16);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        a[0][i] = part ? other[i] : own[i];
        a[1][i] = part ? own[i] : other[i];
    }
}

#if CFG_CODES
#include "decode_code_columns.cuh"
#else
/* s = Q K^T for 16 rows and OWN_KEYS keys from k on, by two chains. */
DEVICE void score_own(float (&s)[S_COUNT], const q_fragments &q, u32 k)
{
    int lane = threadIdx.x & 31;
    int row = (lane & 7) + (lane >> 4) * 8, chunk = lane >> 3 & 1;
    float other[S_COUNT];
#pragma unroll
    for (int i = 0; i < S_COUNT; i++)
        s[i] = other[i] = 0.f;
#pragma unroll
    for (int kk = 0; kk < CFG_D / 16; kk++) {
        u32 a[4], b[4];
        q_step(a, q, kk);
        load_matrices(b, swizzled(k, PANEL, row, kk * 2 + chunk));
        mma16(kk & 1 ? other : s, a, b[0], b[1]);
        mma16((kk & 1 ? other : s) + 4, a, b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < S_COUNT; i++)
        s[i] += other[i];
}

/* o += P V for the warp's columns: weights of 16 keys by each warp. */
DEVICE void add_values(float (&o)[O_COUNT], const pair_memory &m, const float (&s)[S_COUNT],
                       u32 v)
{
    int lane = threadIdx.x & 31, part = column_part();
    u32 own[4], a[2][4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        own[i] = pack(s[2 * i], s[2 * i + 1]);
    share_weights(m, own, a);
    int row = lane & 15, chunk = lane >> 4;
#pragma unroll
    for (int kk = 0; kk < 2; kk++) {
        u32 from = v + part * (CFG_E / 128) * PANEL;
#pragma unroll
        for (int n = 0; n < CFG_E / 32; n++) {
            u32 b[4];
            int c = n * 2 + chunk + (CFG_E / 2 % 64) / 8 * part;
            load_matrices_transposed(b, swizzled(from, PANEL, kk * 16 + row, c));
            mma16(o + n * 8, a[kk], b[0], b[1]);
            mma16(o + n * 8 + 4, a[kk], b[2], b[3]);
        }
    }
}
#endif
