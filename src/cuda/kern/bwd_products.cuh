/* Products of transposed scores by wgmma: fragments of 64 keys by BWD_ROWS queries. Tiles of
 * keys and of queries lie in panels of KEY_PANEL and QUERY_PANEL bytes. */
#pragma once

/* S = K Q^T, or on top of what dp holds V dO^T */
template <int DIM>
DEVICE void product_scores(float (&s)[S_COUNT], u32 keys, u32 queries, int add)
{
    u64 a = operand(keys, 16), b = operand(queries, 16);
#pragma unroll
    for (int kk = 0; kk < DIM / 16; kk++)
        wgmma_scores(s, a + ((kk / 4) * KEY_PANEL + (kk % 4) * 32) / 16,
                     b + ((kk / 4) * QUERY_PANEL + (kk % 4) * 32) / 16, add || kk > 0);
}

DEVICE void product_dv(float (&dv)[CFG_E / 2], const u32 (&w)[S_COUNT / 2], u32 d_out, int add)
{
    u64 b = operand(d_out, QUERY_PANEL);
#pragma unroll
    for (int kk = 0; kk < BWD_ROWS / 16; kk++)
        wgmma_dv(dv, w[4 * kk], w[4 * kk + 1], w[4 * kk + 2], w[4 * kk + 3],
                 b + kk * 2048 / 16, add || kk > 0);
}

DEVICE void product_dk(float (&dk)[CFG_D / 2], const u32 (&ds)[S_COUNT / 2], u32 q, int add)
{
    u64 b = operand(q, QUERY_PANEL);
#pragma unroll
    for (int kk = 0; kk < BWD_ROWS / 16; kk++)
        wgmma_dk(dk, ds[4 * kk], ds[4 * kk + 1], ds[4 * kk + 2], ds[4 * kk + 3],
                 b + kk * 2048 / 16, add || kk > 0);
}
