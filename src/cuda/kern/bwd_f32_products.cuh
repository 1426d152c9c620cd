/* Products of operands in three parts by wgmma: 64 rows by PASS columns of scores, 64 rows by a
 * panel of 64 columns of sums. Each has two accumulators, of large and of small products. */
#pragma once

/* Parts of both operands, by the order of magnitude of their products, the last one large. */
enum { SMALL_PRODUCTS = 5 };

DEVICE int left_part(int product)
{
    return product == 0 ? 2 : product == 2 || product == 3 ? 1 : 0;
}

DEVICE int right_part(int product)
{
    return product == 1 ? 2 : product == 2 || product == 4 ? 1 : 0;
}

struct scores {
    float large[S_COUNT], small[S_COUNT];
};

struct column_sums {
    float large[SUM_COUNT], small[SUM_COUNT];
};

/* Rows that stay times rows that pass, over DIM. */
template <int DIM> DEVICE void start_product(scores &s, u32 stay, u32 pass)
{
    enum { PANELS = (DIM + 63) / 64 };
    u64 a = operand(stay, 16), b = operand(pass, 16);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k <= SMALL_PRODUCTS; k++)
#pragma unroll
        for (int kk = 0; kk < DIM / 16; kk++) {
            u64 x = a + ((left_part(k) * PANELS + kk / 4) * STAY_PANEL + kk % 4 * 32) / 16;
            u64 y = b + ((right_part(k) * PANELS + kk / 4) * PASS_PANEL + kk % 4 * 32) / 16;
            if (k < SMALL_PRODUCTS)
                wgmma_scores(s.small, x, y, k + kk > 0);
            else
                wgmma_scores(s.large, x, y, kk > 0);
        }
    wgmma_commit();
}

DEVICE void end_product(scores &s)
{
#pragma unroll
    for (int i = 0; i < S_COUNT; i++)
        s.large[i] += s.small[i];
}

/* Weights as operands: parts of pairs. */
struct split_weights {
    u32 part[3][S_COUNT / 2];
};

DEVICE void split_all(split_weights &w, const float (&x)[S_COUNT])
{
#pragma unroll
    for (int i = 0; i < S_COUNT / 2; i++) {
        u32 y[3];
        split_two(x[2 * i], x[2 * i + 1], y);
        w.part[0][i] = y[0], w.part[1][i] = y[1], w.part[2][i] = y[2];
    }
}

/* Weights times a panel's columns of the rows that pass. */
template <int PANELS>
DEVICE void start_sum(column_sums &s, const split_weights &w, u32 pass, int panel)
{
    u64 b = operand(pass + panel * PASS_PANEL, PASS_PANEL);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k <= SMALL_PRODUCTS; k++)
#pragma unroll
        for (int kk = 0; kk < PASS / 16; kk++) {
            const u32 *a = w.part[left_part(k)] + 4 * kk;
            u64 y = b + (right_part(k) * PANELS * PASS_PANEL + kk * 2048) / 16;
            if (k < SMALL_PRODUCTS)
                wgmma_sum(s.small, a[0], a[1], a[2], a[3], y, k + kk > 0);
            else
                wgmma_sum(s.large, a[0], a[1], a[2], a[3], y, kk > 0);
        }
    wgmma_commit();
}

/* Added here and not later: products that follow have the same accumulators. */
template <int COUNT> DEVICE void end_sum(float (&to)[COUNT], const column_sums &s, int panel)
{
#pragma unroll
    for (int i = 0; i < SUM_COUNT; i++) {
        to[panel * SUM_COUNT + i] += s.large[i] + s.small[i];
        asm volatile("" : "+f"(to[panel * SUM_COUNT + i]));
    }
}

/* All of them but the last, which is begun. */
template <int PANELS, int COUNT>
DEVICE void sum_panels(float (&to)[COUNT], column_sums &s, const split_weights &w, u32 pass)
{
#pragma unroll
    for (int i = 0; i < PANELS; i++) {
        start_sum<PANELS>(s, w, pass, i);
        if (i + 1 < PANELS) {
            wgmma_wait<0>();
            end_sum(to, s, i);
        }
    }
}
