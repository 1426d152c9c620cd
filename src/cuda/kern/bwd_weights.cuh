/* Weights and dS of transposed scores: fragments of 64 keys by BWD_ROWS queries as wgmma leaves
 * them, S_COUNT floats of each thread, elementwise between the products. */
#pragma once

/* A slope of the head is applied to the sums of dQ and dK, or to dS of dK where a key head has
 * several query heads. */
#define HAS_SLOPES (MOD_SCORE && !SLOPE_ONE && !CFG_LATE_SLOPE)
/* Whether dS is made from other words than dV: times slopes, or before weights were dropped. */
#define HAS_OWN (HAS_SLOPES || CFG_DROP)
enum { G_COUNT = HAS_OWN ? S_COUNT / 2 : 1 };

/* What a thread holds: two keys, 8 apart, and of each the queries 8i + 2 (lane % 4) + {0,1}
 * of a block. Positions of the first key and query. */
struct places {
    int b, h, q, kv;
    int key, kv_len; /* index of the first key, and how many there are */
};

#define IS_LINE (SCORE_LINE && !HAS_SLOPES)

#if IS_LINE
/* The offset of a thread's first score in log2 units, what it gains with a query, and with
 * eight keys; the slope in these units. */
struct score_line {
    float offset, by_q, by_eight, unit;
};

DEVICE score_line line_at(const cu_bwd &p, const mod_args &mod, const places &at)
{
    float by_q, by_kv, offset = line_offset(mod, p.f, at.b, at.h, at.q, at.kv, by_q, by_kv);
#if CFG_LATE_SLOPE
    float unit = p.unit * row_slope(mod, p.f, at.b, at.h, at.q);
#else
    float unit = p.unit; /* an operand that takes no register */
#endif
    return {offset * 1.4426950408889634f, by_q * 1.4426950408889634f,
            by_kv * (8 * 1.4426950408889634f), unit};
}
#endif

#if SLOPE_CAP
/* Of four scores that are capped: weights, and weights times slopes. With u = 2 / (1 + e^2x)
 * tanh x = 1 - u, and 1 - tanh^2 x = u (2 - u); four share one reciprocal, and e^2x is cut
 * where tanh is 1, so that the product of four stays finite. lse: of two scores each. */
DEVICE void capped4(float (&x)[4], float (&g)[4], float lse0, float lse1)
{
    float d[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
        d[j] = 1.f + exp2_fast(fminf(x[j] * CAP_RATE, 30.f));
    float a = d[0] * d[1], b = d[2] * d[3], r = 2.f * rcp_fast(a * b);
    float ra = r * b, rb = r * a;
    float u[4] = {ra * d[1], ra * d[0], rb * d[3], rb * d[2]};
    float top0 = CAP_MOST - lse0, top1 = CAP_MOST - lse1;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        x[j] = exp2_fast(fmaf(u[j], -CAP_MOST, j < 2 ? top0 : top1));
        g[j] = x[j] * (u[j] * (2.f - u[j]) * CAP_SLOPE);
    }
}
#endif

/* Weights of the scores, packed. g: weights times slopes of the score function, which dS is
 * made from; where slopes are 1 the weights themselves. lse: address of this thread's
 * first query's, log2 units. */
DEVICE void weights(u32 (&w)[S_COUNT / 2], u32 (&g)[G_COUNT], const float (&s)[S_COUNT],
                    u32 lse, const cu_bwd &p, const mod_args &mod, const places &at)
{
#if IS_LINE
    score_line line = line_at(p, mod, at);
#endif
#pragma unroll
    for (int i = 0; i < S_COUNT / 4; i++) {
        float2 l = load_two(lse + i * 32);
#if MOD_SCORE == SCORE_NONE
        w[2 * i] = pack(exp2_fast(fmaf(s[4 * i], p.unit, -l.x)),
                        exp2_fast(fmaf(s[4 * i + 1], p.unit, -l.y)));
        w[2 * i + 1] = pack(exp2_fast(fmaf(s[4 * i + 2], p.unit, -l.x)),
                            exp2_fast(fmaf(s[4 * i + 3], p.unit, -l.y)));
#elif IS_LINE
        float offset = fmaf(line.by_q, 8 * i, line.offset);
        float x = offset - l.x, y = offset + line.by_q - l.y;
        w[2 * i] = pack(exp2_fast(fmaf(s[4 * i], line.unit, x)),
                        exp2_fast(fmaf(s[4 * i + 1], line.unit, y)));
        x += line.by_eight;
        y += line.by_eight;
        w[2 * i + 1] = pack(exp2_fast(fmaf(s[4 * i + 2], line.unit, x)),
                            exp2_fast(fmaf(s[4 * i + 3], line.unit, y)));
#elif SLOPE_CAP && HAS_SLOPES
        float x[4] = {s[4 * i], s[4 * i + 2], s[4 * i + 1], s[4 * i + 3]}, y[4];
        capped4(x, y, l.x, l.y);
        w[2 * i] = pack(x[0], x[2]);
        w[2 * i + 1] = pack(x[1], x[3]);
        g[2 * i] = pack(y[0], y[2]);
        g[2 * i + 1] = pack(y[1], y[3]);
#else
        float x[4] = {s[4 * i], s[4 * i + 2], s[4 * i + 1], s[4 * i + 3]}, slope[4];
        scores4(p.f, mod, at.b, at.h, at.q + 8 * i, at.q + 8 * i + 1, at.kv, at.kv + 8, x,
                slope);
#pragma unroll
        for (int j = 0; j < 4; j++)
            x[j] = exp2_fast(fmaf(x[j], 1.4426950408889634f, -(j < 2 ? l.x : l.y)));
        w[2 * i] = pack(x[0], x[2]);
        w[2 * i + 1] = pack(x[1], x[3]);
#if HAS_SLOPES
#pragma unroll
        for (int j = 0; j < 4; j++)
            /* -INF masks, whatever its slope */
            x[j] = !SLOPE_IS_FINITE && x[j] == 0.f ? 0.f : x[j] * slope[j];
        g[2 * i] = pack(x[0], x[2]);
        g[2 * i + 1] = pack(x[1], x[3]);
#endif
#endif
    }
}

/* Weights of positions that are not live become 0. */
DEVICE void cut_weights(u32 (&w)[S_COUNT / 2], u32 (&g)[G_COUNT], const cu_fwd &p,
                        const mod_args &mod, const places &at)
{
    key_side k0 = {at.kv, at.key < at.kv_len}, k1 = {at.kv + 8, at.key + 8 < at.kv_len};
#pragma unroll
    for (int i = 0; i < S_COUNT / 4; i++) {
        bool live[4];
        query_side q0 = query_side_of(p, mod, at.b, at.h, at.q + 8 * i);
        query_side q1 = query_side_of(p, mod, at.b, at.h, at.q + 8 * i + 1);
        live4(p, mod, at.b, at.h, q0, q1, k0, k1, live);
        u32 keep0 = (live[0] ? 0xffffu : 0) | (live[2] ? 0xffff0000u : 0);
        u32 keep1 = (live[1] ? 0xffffu : 0) | (live[3] ? 0xffff0000u : 0);
        w[2 * i] &= keep0;
        w[2 * i + 1] &= keep1;
#if HAS_SLOPES
        g[2 * i] &= keep0;
        g[2 * i + 1] &= keep1;
#endif
    }
}

/* Weights of queries past the last, of which a block has none from `rows` on, become 0. */
DEVICE void cut_rows(u32 (&w)[S_COUNT / 2], u32 (&g)[G_COUNT], int rows)
{
    int left = rows - 2 * (threadIdx.x & 3);
#pragma unroll
    for (int i = 0; i < S_COUNT / 4; i++) {
        u32 keep = (8 * i < left ? 0xffffu : 0) | (8 * i + 1 < left ? 0xffff0000u : 0);
        w[2 * i] &= keep;
        w[2 * i + 1] &= keep;
#if HAS_SLOPES
        g[2 * i] &= keep;
        g[2 * i + 1] &= keep;
#endif
    }
}

/* Weights of a step's positions that are not live, or not there, become 0. */
DEVICE void cut_step(u32 (&w)[S_COUNT / 2], u32 (&g)[G_COUNT], const cu_fwd &p,
                     const mod_args &mod, const places &at, int flags)
{
    if (!flags)
        return;
    if (!CFG_TERMS || (flags & STEP_MASKED))
        cut_weights(w, g, p, mod, at);
    if ((MOD_MASK != MASK_NONE || CFG_TERMS) && flags >> STEP_ROWS)
        cut_rows(w, g, flags >> STEP_ROWS);
}

#if CFG_DROP
/* Weights that are dropped become 0 in w, and stay in g. */
DEVICE void drop_kept(u32 (&w)[S_COUNT / 2], u32 (&g)[G_COUNT], const dropper &drop,
                      const cu_fwd &p, const places &at)
{
#if !HAS_SLOPES
#pragma unroll
    for (int i = 0; i < S_COUNT / 2; i++)
        g[i] = w[i];
#endif
    drop_turned(w, drop.head, p.drop, at.q, at.kv);
}

/* dP of kept weights times their factor, of others 0; then less delta. A kept weight of 0 has
 * no gradient whatever its dP. */
DEVICE void drop_dp(float (&dp)[S_COUNT], const u32 (&w)[S_COUNT / 2], const cu_fwd &p,
                    u32 minus_delta)
{
#pragma unroll
    for (int i = 0; i < S_COUNT / 4; i++) {
        float2 d = load_two(minus_delta + i * 32);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 is_kept = w[2 * i + j / 2] & (j & 1 ? 0xffff0000u : 0xffffu);
            dp[4 * i + j] =
                fmaf(is_kept ? dp[4 * i + j] : 0.f, p.drop.factor, j & 1 ? d.y : d.x);
        }
    }
}
#endif

/* The accumulator of dP starts at -delta: no subtraction later. */
DEVICE void start_dp(float (&dp)[S_COUNT], u32 minus_delta)
{
#pragma unroll
    for (int i = 0; i < S_COUNT / 4; i++) {
        float2 d = load_two(minus_delta + i * 32);
        dp[4 * i] = dp[4 * i + 2] = d.x;
        dp[4 * i + 1] = dp[4 * i + 3] = d.y;
    }
}

/* Where a weight is 0 for its mask, V may hold anything. */
DEVICE void cut_dp(float (&dp)[S_COUNT], const u32 (&w)[S_COUNT / 2])
{
#pragma unroll
    for (int i = 0; i < S_COUNT / 2; i++) {
        dp[2 * i] = w[i] & 0xffffu ? dp[2 * i] : 0.f;
        dp[2 * i + 1] = w[i] >> 16 ? dp[2 * i + 1] : 0.f;
    }
}

/* dS = P (dP - delta) from the rounded weights, which saves the registers of exact ones */
DEVICE void gradients(u32 (&ds)[S_COUNT / 2], const u32 (&w)[S_COUNT / 2],
                      const float (&dp)[S_COUNT])
{
#pragma unroll
    for (int i = 0; i < S_COUNT / 2; i++) {
        float lo, hi;
        unpack(w[i], lo, hi);
        ds[i] = pack(lo * dp[2 * i], hi * dp[2 * i + 1]);
    }
}

#if CFG_LATE_SLOPE
/* The same times a slope */
DEVICE void sloped_gradients(u32 (&ds)[S_COUNT / 2], const u32 (&w)[S_COUNT / 2],
                             const float (&dp)[S_COUNT], float slope)
{
#pragma unroll
    for (int i = 0; i < S_COUNT / 2; i++) {
        float lo, hi;
        unpack(w[i], lo, hi);
        ds[i] = pack(lo * dp[2 * i] * slope, hi * dp[2 * i + 1] * slope);
    }
}
#endif
