/* The user's score function on a thread's fragment of a tile of scores. */
#pragma once

#include "dense.cuh"
#include "shares.cuh"
#include "softmax.cuh"
#include "tile.cuh"

/* The factor that takes a score register to log2 units. */
DEVICE float score_unit(const cu_fwd &p)
{
#if MOD_SCORE == SCORE_GENERAL
    return SCORE_UNIT * 1.4426950408889634f;
#elif CFG_SCALE_FIRST
    return 1.4426950408889634f;
#else
    return p.scale * 1.4426950408889634f;
#endif
}

#if CFG_SHARES
#define SHARES_ARGUMENT , shared
#else
#define SHARES_ARGUMENT
#endif

#if CFG_DENSE && SCORE_DENSE
/* apply_score with dense reads from tiles. */
template <int TURNED, int COUNT>
DEVICE void apply_dense(const tile_rows &r, const cu_fwd &p, const mod_args &mod, int column,
                        float (&s)[COUNT])
{
    u32 pairs[SCORE_DENSE][2][4];
#if CFG_SHARES
    score_shared shared;
    share_first(r.shares, shared);
#endif
#pragma unroll
    for (int g = 0; g < COUNT / 4; g++) {
        u32 dense[SCORE_DENSE][4];
        if (g % 2 == 0)
            dense_pairs<0, SCORE_DENSE, TURNED>(r.dense, 8 * g, pairs);
        dense_half(pairs, g % 2, dense);
#if CFG_SHARES
        share_next(r.shares, g, shared);
#endif
        int kv = column + 8 * g + r.kv_offset;
        float x[4] = {s[4 * g], s[4 * g + 1], s[4 * g + 2], s[4 * g + 3]};
        score4(mod, p, r.b, r.h, r.score[0], r.score[1], kv, kv + 1, x, dense SHARES_ARGUMENT);
#pragma unroll
        for (int i = 0; i < 4; i++)
            s[4 * g + i] = x[i];
    }
}
#endif

/* Applies the score function to a fragment whose first column is `column`. shift is, for each
 * row, what is to be added to all scores of this block, in log2 units: an affine score alpha *
 * kv + beta costs one FMA because what all keys of the block have in common goes there. */
template <int COUNT>
DEVICE void apply_score(const tile_rows &r, const cu_fwd &p, const mod_args &mod, int column,
                        float (&s)[COUNT], float (&shift)[2])
{
    shift[0] = shift[1] = 0.f;
#if CFG_SCALE_FIRST
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        s[i] *= p.scale;
#endif
#if MOD_SCORE == SCORE_AFFINE
#pragma unroll
    for (int i = 0; i < 2; i++)
        shift[i] = score_offset(mod, p, r.b, row_h(r, i), r.score[i], column + r.kv_offset)
                   * 1.4426950408889634f;
#pragma unroll
    for (int g = 0; g < COUNT / 4; g++) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            s[4 * g + i] =
                fmaf(r.score[i / 2].alpha_raw, (float)(8 * g + (i & 1)), s[4 * g + i]);
    }
#elif CFG_DENSE && SCORE_DENSE
    with_ways<0, SCORE_DENSE>(p, [&](auto ways) {
        apply_dense<decltype(ways)::TURNED>(r, p, mod, column, s);
    });
#elif MOD_SCORE == SCORE_GENERAL
#if CFG_SHARES
    score_shared shared;
    share_first(r.shares, shared);
#endif
#pragma unroll
    for (int g = 0; g < COUNT / 4; g++) {
        int kv = column + 8 * g + r.kv_offset;
        float x[4] = {s[4 * g], s[4 * g + 1], s[4 * g + 2], s[4 * g + 3]};
#if CFG_SHARES
        share_next(r.shares, g, shared);
#endif
        score4(mod, p, r.b, r.h, r.score[0], r.score[1], kv, kv + 1, x SHARES_ARGUMENT);
#pragma unroll
        for (int i = 0; i < 4; i++)
            s[4 * g + i] = x[i];
    }
#endif
}

#if SCORE_TANH
/* Scores are unit * tanh(k s) with constant k and unit. Where |k s| < 1/2, a score in log2
 * units is s times a polynomial in v = s^2 - TANH_EDGE, which takes multiply-adds only; the
 * product with s is part of the exponent's own multiply-add. v is negative exactly where the
 * polynomial holds. If it does not hold for all of a warp's scores (a NaN counts), the score
 * function is evaluated for a few fours at a time. */
DEVICE float tanh_factor(float s, u32 &small)
{
    float v = fmaf(s, s, -TANH_EDGE);
    float y = fmaf(TANH_C4, v, TANH_C3);
    y = fmaf(y, v, TANH_C2);
    y = fmaf(y, v, TANH_C1);
    small &= __float_as_uint(v);
    return fmaf(y, v, TANH_C0);
}

/* Turns s into 2^(score - m) and adds it to the row sums; no key of the block may be masked.
 * Returns whether most scores needed the score function. The sums so far are never negative, so
 * they change nothing in `small`; without them ptxas would put all exponentials behind the last
 * vote, and spill. */
template <int COUNT>
DEVICE int rows_exp_tanh(row_state &t, const tile_rows &r, const cu_fwd &p, const mod_args &mod,
                         int column, float (&s)[COUNT], float unit)
{
    enum { N = 8 };
    float a[2] = {t.l[0], t.l[1]}, b[2] = {0.f, 0.f};
    int asked = 0;
#pragma unroll
    for (int from = 0; from < COUNT; from += N) {
        float e[N];
        u32 small = ~(__float_as_uint(a[0]) | __float_as_uint(a[1]) | __float_as_uint(b[0])
                      | __float_as_uint(b[1]));
#pragma unroll
        for (int i = 0; i < N; i++)
            e[i] = fmaf(s[from + i], tanh_factor(s[from + i], small), -t.m[i / 2 & 1]);
        if (!__all_sync(~0u, (int)small < 0)) {
            asked += N;
#pragma unroll
            for (int g = 0; g < N; g += 4) {
                int kv = column + 2 * (from + g) + r.kv_offset;
                float x[4] = {s[from + g], s[from + g + 1], s[from + g + 2], s[from + g + 3]};
                score4(mod, p, r.b, r.h, r.score[0], r.score[1], kv, kv + 1, x);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    e[g + i] = fmaf(x[i], unit, -t.m[i / 2]);
            }
        }
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            s[from + i] = exp2_fast(e[i]);
            s[from + i + 1] = exp2_fast(e[i + 1]);
            a[i / 2 & 1] += s[from + i];
            b[i / 2 & 1] += s[from + i + 1];
        }
    }
    t.l[0] = a[0] + b[0];
    t.l[1] = a[1] + b[1];
    return asked > COUNT / 2;
}

/* Raises the offsets; tanh is monotone, so the largest score comes of the largest s. */
template <int COUNT>
DEVICE int rows_raise_tanh(row_state &t, const tile_rows &r, const cu_fwd &p,
                           const mod_args &mod, int column, const float (&s)[COUNT], float unit,
                           float (&rescale)[2])
{
    float peak[2];
    rows_peak(s, peak);
    float x[4] = {peak[0], peak[0], peak[1], peak[1]};
    score4(mod, p, r.b, r.h, r.score[0], r.score[1], column, column, x);
    peak[0] = x[0] * unit;
    peak[1] = x[2] * unit;
    return rows_raise_to(t, peak, rescale);
}
#endif
