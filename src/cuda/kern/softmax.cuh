/* Online softmax over the score fragments of tensor-core products: each thread holds two rows,
 * elements s[4g + {0,1}] of the first and s[4g + {2,3}] of the second, at columns 8g + 2 (lane
 * % 4) + {0,1}.
 *
 * Scheme: probabilities are taken against an offset m per row that is raised only when a new
 * score passes it by more than 2^8. In the common case a block costs thread-local maxima and
 * one warp vote; shuffles and the rescaling of O happen only behind that vote. Exact: the final
 * division removes whatever m was. Masked scores are -INF; m starts at a finite value, so -INF
 * - m never meets -INF and no guard is needed. */
#pragma once

#define M_START \
    -1.7014118e38f    /* -2^127: below every finite score, yet m_old - m_new stays finite */
#define HEADROOM 8.0f /* log2: p <= 256 keeps f16 and the row sum far from overflow */
#define SUM_LIMIT 1048576.f    /* 2^20 */
#define SUM_LOST 1.2676506e30f /* 2^100: rescaling would flush what must not be lost */
#define LOW -1.e37f            /* log2: weights against a lower offset mean nothing */
#define LOWEST -1.1e38f        /* in log2 units still above M_START */

struct row_state {
    float m[2];    /* offset, log2 units; equal over the four lanes of a row */
    float l[2];    /* this lane's part of the row sum */
    float peak[2]; /* this lane's largest score, log2 units; kept only with CFG_ROWMAX */
};

DEVICE void rows_begin(row_state &t)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        t.m[r] = M_START;
        t.l[r] = 0.f;
        t.peak[r] = NEG_INF;
    }
}

/* Whether a row must be done again for its sum l alone. A row that has seen a key sums to 1 at
 * least; where scores are so large that rounding m * log2 e lost powers of two it may not. */
DEVICE int row_is_lost(float m, float l)
{
    return !(l < 3e38f) || (m > M_START && (l < 0.5f || m < LOW));
}

DEVICE float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

DEVICE float quad_sum(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

/* Largest element of each row held by this thread. Two chains a row hide FMNMX's latency. */
template <int COUNT> DEVICE void rows_peak(const float (&s)[COUNT], float (&peak)[2])
{
    float a[2] = {s[0], s[2]}, b[2] = {s[1], s[3]};
#pragma unroll
    for (int g = 4; g < COUNT; g += 4) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            a[r] = fmaxf(a[r], s[g + 2 * r]);
            b[r] = fmaxf(b[r], s[g + 2 * r + 1]);
        }
    }
    peak[0] = fmaxf(a[0], b[0]);
    peak[1] = fmaxf(a[1], b[1]);
}

/* Raises m over this block's largest scores, in log2 units; returns whether O must be
 * multiplied by rescale[]. */
DEVICE int rows_raise_to(row_state &t, const float (&peak)[2], float (&rescale)[2])
{
#if CFG_ROWMAX
#pragma unroll
    for (int r = 0; r < 2; r++)
        t.peak[r] = fmaxf(t.peak[r], peak[r]);
#endif
    int passed = peak[0] > t.m[0] + HEADROOM || peak[1] > t.m[1] + HEADROOM;
#if CFG_LAZY
    passed |= t.l[0] > SUM_LIMIT || t.l[1] > SUM_LIMIT;
#endif
    if (!__any_sync(~0u, passed))
        return 0;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float m = fmaxf(t.m[r], quad_max(peak[r]));
#if CFG_INVARIANT
        m = m > t.m[r] + HEADROOM ? m : t.m[r]; /* whatever other rows of the warp have */
#endif
#if CFG_LAZY
        m = fmaxf(m, t.m[r] + log2_fast(fmaxf(quad_max(t.l[r]), 1.f)));
#endif
        rescale[r] = exp2_fast(t.m[r] - m);
        t.m[r] = m;
        t.l[r] = t.l[r] > SUM_LOST ? NOT_A_NUMBER : t.l[r] * rescale[r];
    }
    return 1;
}

#if MOD_SCORE == SCORE_GENERAL
/* A score near the lowest float would be -INF in log2 units, which means masked; it is raised
 * to stay finite. Biases that stand for masks hold such values. */
DEVICE float not_lowest(float x)
{
    return SCORE_IS_LOW && x > NEG_INF ? fmaxf(x, LOWEST / SCORE_UNIT) : x;
}

/* Where a row has a larger score, such ones weigh nothing either way. */
template <int COUNT> DEVICE void rows_not_lowest(float (&s)[COUNT], float (&peak)[2])
{
    if (!SCORE_IS_LOW
        || (not_lowest(peak[0]) == peak[0] && not_lowest(peak[1]) == peak[1]))
        return;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        s[i] = not_lowest(s[i]);
    rows_peak(s, peak);
}
#else
template <int COUNT> DEVICE void rows_not_lowest(float (&)[COUNT], float (&)[2])
{
}
#endif

/* Peaks of the block's scores in log2 units, in which a score s means s * unit + shift[row]. */
template <int COUNT>
DEVICE void rows_peak_of(float (&s)[COUNT], float unit, const float (&shift)[2],
                         float (&peak)[2])
{
    rows_peak(s, peak);
    rows_not_lowest(s, peak);
#pragma unroll
    for (int r = 0; r < 2; r++)
        peak[r] = fmaf(peak[r], unit, shift[r]);
}

/* rows_raise_to these. */
template <int COUNT>
DEVICE int rows_raise(row_state &t, float (&s)[COUNT], float unit, const float (&shift)[2],
                      float (&rescale)[2])
{
    float peak[2];
    rows_peak_of(s, unit, shift, peak);
    return rows_raise_to(t, peak, rescale);
}

/* Whether offsets tell nothing of what is to come: no live key was seen, or of a general score
 * the largest is far from 0, as where a bias stands for padding or grows with the key. */
DEVICE int rows_are_odd(const row_state &t)
{
#if MOD_SCORE == SCORE_GENERAL && !SCORE_TANH
    return fmaxf(fabsf(t.m[0]), fabsf(t.m[1])) > 64.f;
#else
    return fminf(t.m[0], t.m[1]) == M_START;
#endif
}

/* With CFG_LAZY the scores are not even looked at: m is raised after the fact, once a row sum
 * has passed 2^20 (or while a row has seen no live key). Between two looks a sum may overflow;
 * then it is inf or NaN for good, the row is flagged at its end and done again by the careful
 * kernel. */
DEVICE int rows_are_late(const row_state &t)
{
    int late = t.l[0] > SUM_LIMIT || t.l[1] > SUM_LIMIT || rows_are_odd(t);
    return __any_sync(~0u, late);
}

/* s becomes 2^(score - m); row sums grow. Order: ascending columns, two chains a row. */
template <int COUNT>
DEVICE void rows_exp(row_state &t, float (&s)[COUNT], float unit, const float (&shift)[2])
{
    float x[2] = {shift[0] - t.m[0], shift[1] - t.m[1]};
    float a[2] = {t.l[0], t.l[1]}, b[2] = {0.f, 0.f};
#pragma unroll
    for (int g = 0; g < COUNT; g += 4) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float p0 = exp2_fast(fmaf(s[g + 2 * r], unit, x[r]));
            float p1 = exp2_fast(fmaf(s[g + 2 * r + 1], unit, x[r]));
            s[g + 2 * r] = p0;
            s[g + 2 * r + 1] = p1;
            a[r] += p0;
            b[r] += p1;
        }
    }
    t.l[0] = a[0] + b[0];
    t.l[1] = a[1] + b[1];
}

template <int COUNT> DEVICE void rows_scale(float (&o)[COUNT], const float (&by)[2])
{
#pragma unroll
    for (int g = 0; g < COUNT; g += 4) {
        o[g] *= by[0];
        o[g + 1] *= by[0];
        o[g + 2] *= by[1];
        o[g + 3] *= by[1];
    }
}
