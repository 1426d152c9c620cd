/* Weights and dS of transposed scores: fragments of 64 keys by BWD_ROWS queries as wgmma leaves
 * them, S_COUNT floats of each thread, elementwise between the products. */
#pragma once

/* A slope of the head is applied to the sums of dQ and dK, or to dS of dK where a key head has
 * several query heads. */
#define HAS_SLOPES (MOD_SCORE && !SLOPE_ONE && !CFG_LATE_SLOPE)

/* What a thread holds: two keys, 8 apart, and of each the queries 8i + 2 (lane % 4) + {0,1}
 * of a block. Positions of the first key and query. */
struct places {
    int b, h, q, kv;
    int key, kv_len; /* index of the first key, and how many there are */
};

#define IS_LINE (SCORE_LINE && !HAS_SLOPES)

#include "bwd_dense.cuh"
#include "bwd_shares.cuh"

#if IS_LINE
/* The offset of a thread's first score in lse's units, what it gains with a query, and with
 * eight keys; the slope in these units. */
struct score_line {
    float offset, by_q, by_eight, unit;
};

DEVICE score_line line_at(const cu_bwd &p, const mod_args &mod, const places &at)
{
    float by_q, by_kv, offset = line_offset(mod, p.f, at.b, at.h, at.q, at.kv, by_q, by_kv);
#if CFG_LATE_SLOPE
    float unit = score_unit(p) * row_slope(mod, p.f, at.b, at.h, at.q);
#else
    float unit = score_unit(p);
#endif
    return {offset * OF_NATURAL, by_q * OF_NATURAL, by_kv * (8 * OF_NATURAL), unit};
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

/* What weights of a fragment are made with. lse: address of this thread's first query's. */
struct weigher {
    const cu_bwd &p;
    const mod_args &mod;
    const places &at;
    u32 lse;
#if IS_LINE
    score_line line;
#elif HAS_SHARES
    const lane_shares &shares;
    slope_shared shared; /* of the present scores */
#endif
#if HAS_DENSE_SCORE
    u32 pairs[SCORE_DENSE][2][4], dense[SCORE_DENSE][4]; /* dense_next */
#endif
};

#if HAS_DENSE_SCORE
#define DENSE_OF(y) , (y).dense
#else
#define DENSE_OF(y)
#endif

#if HAS_SHARES
#define SHARES_PARAMETER , const lane_shares &shares
#define SHARES_OF(x) , x
#else
#define SHARES_PARAMETER
#define SHARES_OF(x)
#endif

DEVICE weigher weigher_of(const cu_bwd &p, const mod_args &mod, const places &at,
                          u32 lse SHARES_PARAMETER)
{
#if IS_LINE
    return {p, mod, at, lse, line_at(p, mod, at)};
#elif HAS_SHARES
    return {p, mod, at, lse, shares};
#else
    return {p, mod, at, lse};
#endif
}

/* Four dot products become weights: of two queries and a key, then of the key 8 further, i
 * times 8 queries on. g: the weights times slopes of the score function, where these are
 * not 1. */
DEVICE void four_weights(float *x, float (&g)[4], weigher &y, int i)
{
    float2 l = load_two(y.lse + i * 32);
#if MOD_SCORE == SCORE_NONE
#pragma unroll
    for (int j = 0; j < 4; j++)
        x[j] = weight_of(fmaf(x[j], score_unit(y.p), j & 1 ? -l.y : -l.x));
#elif IS_LINE
    float offset = fmaf(y.line.by_q, 8 * i, y.line.offset);
    float from[2] = {offset - l.x, offset + y.line.by_q - l.y};
#pragma unroll
    for (int j = 0; j < 4; j++)
        x[j] = weight_of(
            fmaf(x[j], y.line.unit, j < 2 ? from[j] : from[j - 2] + y.line.by_eight));
#elif SLOPE_CAP && HAS_SLOPES && !CFG_F32 /* where an error of 2^-22 of the cap is much */
    float z[4] = {x[0], x[2], x[1], x[3]}, of_z[4];
    capped4(z, of_z, l.x, l.y);
    x[0] = z[0], x[1] = z[2], x[2] = z[1], x[3] = z[3];
    g[0] = of_z[0], g[1] = of_z[2], g[2] = of_z[1], g[3] = of_z[3];
#else
    const places &at = y.at;
    float z[4] = {x[0], x[2], x[1], x[3]}, slope[4];
#if HAS_SHARES
    share_next(y.shared, y.shares, i);
    scores4(y.p.f, y.mod, at.b, at.h, at.q + 8 * i, at.q + 8 * i + 1, at.kv, at.kv + 8, z,
            slope DENSE_OF(y), y.shared);
#else
    scores4(y.p.f, y.mod, at.b, at.h, at.q + 8 * i, at.q + 8 * i + 1, at.kv, at.kv + 8, z,
            slope DENSE_OF(y));
#endif
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int of = j / 2 + 2 * (j & 1);
        x[j] = weight_of(fmaf(z[of], OF_NATURAL, j & 1 ? -l.y : -l.x));
#if HAS_SLOPES
        /* -INF masks, whatever its slope */
        g[j] = !SLOPE_IS_FINITE && x[j] == 0.f ? 0.f : x[j] * slope[of];
#endif
    }
#endif
}

/* Pairs become 0 where others are. */
DEVICE void cut_as(u32 (&x)[S_COUNT / 2], const u32 (&others)[S_COUNT / 2])
{
#pragma unroll
    for (int i = 0; i < S_COUNT / 2; i++)
        x[i] &= (others[i] & 0xffffu ? 0xffffu : 0) | (others[i] >> 16 ? 0xffff0000u : 0);
}

/* Which weights of a fragment are kept (drop_turned) */
DEVICE u32 draw_kept(dropper &drop, const cu_fwd &p, const places &at)
{
#if CFG_DROP
    dropper_enter(drop, p, at.b, at.h);
    return drop_turned(drop.head, p.drop, at.q, at.kv);
#else
    return 0;
#endif
}

DEVICE bool is_kept(u32 kept, int i, int j)
{
    return kept >> (2 * i + j / 2 + 16 * (j & 1)) & 1;
}

/* Four weights, packed for dV; those that are dropped are 0. */
DEVICE void pack_four(u32 (&w)[S_COUNT / 2], const float *x, u32 drawn, int i)
{
    float y[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
        y[j] = !CFG_DROP || is_kept(drawn, i, j) ? x[j] : 0.f;
    w[2 * i] = pack(y[0], y[1]);
    w[2 * i + 1] = pack(y[2], y[3]);
}

/* Weights that dS is made of, times slopes, while dP is on its way: whole ones take registers
 * and shared memory that are not there, and rounded to the dtype they would add half of its own
 * to the error of dS. Where they are not above 1, in bf16 they are rounded to f16, which has
 * three bits more (BWD_WEIGHT_BITS); else there are the upper 24 bits of each, of pairs the
 * upper halves and of fours the bytes that follow. Tiles have no room for these beside weights
 * of dV, which slopes are not part of: there they are rounded. */
#define KEEPS_ROUNDED (HAS_SLOPES && !CFG_VALUE_STAGES)
#define KEEPS_BYTES (!KEEPS_ROUNDED && (CFG_F16 || HAS_SLOPES))

struct kept {
    u32 pairs[S_COUNT / 2];
#if KEEPS_BYTES
    u32 bytes[S_COUNT / 4];
#endif
};

DEVICE u32 pack_f16(float lo, float hi)
{
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

DEVICE void unpack_f16(u32 x, float &lo, float &hi)
{
    asm("{.reg .b16 x, y;\n"
        "mov.b32 {x, y}, %2;\n"
        "cvt.f32.f16 %0, x;\n"
        "cvt.f32.f16 %1, y;}"
        : "=f"(lo), "=f"(hi)
        : "r"(x));
}

DEVICE void keep_four(kept &to, int i, const float *x)
{
    u32 *pairs = to.pairs + 2 * i;
#if KEEPS_BYTES
    u32 a = __float_as_uint(x[0]), b = __float_as_uint(x[1]);
    u32 c = __float_as_uint(x[2]), d = __float_as_uint(x[3]);
    pairs[0] = __byte_perm(a, b, 0x7632);
    pairs[1] = __byte_perm(c, d, 0x7632);
    to.bytes[i] =
        __byte_perm(__byte_perm(a, b, 0x0051), __byte_perm(c, d, 0x0051), 0x5410);
#elif KEEPS_ROUNDED
    pairs[0] = pack(x[0], x[1]);
    pairs[1] = pack(x[2], x[3]);
#else
    pairs[0] = pack_f16(x[0], x[1]);
    pairs[1] = pack_f16(x[2], x[3]);
#endif
}

DEVICE void take_four(float (&x)[4], const kept &from, int i)
{
    const u32 *pairs = from.pairs + 2 * i;
#if KEEPS_BYTES
    u32 bytes = from.bytes[i];
    x[0] = __uint_as_float(__byte_perm(pairs[0], bytes, 0x1044));
    x[1] = __uint_as_float(__byte_perm(pairs[0], bytes, 0x3255));
    x[2] = __uint_as_float(__byte_perm(pairs[1], bytes, 0x1066));
    x[3] = __uint_as_float(__byte_perm(pairs[1], bytes, 0x3277));
#elif KEEPS_ROUNDED
    unpack(pairs[0], x[0], x[1]);
    unpack(pairs[1], x[2], x[3]);
#else
    unpack_f16(pairs[0], x[0], x[1]);
    unpack_f16(pairs[1], x[2], x[3]);
#endif
}

/* Of two fragments' pairs what belongs to positions that are not live becomes 0. */
template <int TURNED>
DEVICE void cut_masked(u32 (&w)[S_COUNT / 2], u32 (&ds)[S_COUNT / 2], const cu_fwd &p,
                       const mod_args &mod, const places &at, const dense_lanes &lanes,
                       int asks_mod)
{
#if HAS_DENSE_MASK
    u32 pairs[MASK_DENSE][2][4], dense[MASK_DENSE][4];
#endif
    key_side k0 = {at.kv, at.key < at.kv_len}, k1 = {at.kv + 8, at.key + 8 < at.kv_len};
#pragma unroll
    for (int i = 0; i < S_COUNT / 4; i++) {
        bool live[4];
        query_side q0 = query_side_of(p, mod, at.b, at.h, at.q + 8 * i);
        query_side q1 = query_side_of(p, mod, at.b, at.h, at.q + 8 * i + 1);
#if HAS_DENSE_MASK
        dense_next<SCORE_DENSE, MASK_DENSE, TURNED>(dense, pairs, lanes, i);
#endif
        live4(p, mod, at.b, at.h, q0, q1, k0, k1, asks_mod, live MASK_WORDS);
        u32 keep0 = (live[0] ? 0xffffu : 0) | (live[2] ? 0xffff0000u : 0);
        u32 keep1 = (live[1] ? 0xffffu : 0) | (live[3] ? 0xffff0000u : 0);
        w[2 * i] &= keep0;
        w[2 * i + 1] &= keep1;
        ds[2 * i] &= keep0;
        ds[2 * i + 1] &= keep1;
    }
}

/* Two fragments' pairs become 0 at queries past the last: a block has none from `rows` on. */
DEVICE void cut_rows(u32 (&w)[S_COUNT / 2], u32 (&ds)[S_COUNT / 2], int rows)
{
    int left = rows - 2 * (threadIdx.x & 3);
#pragma unroll
    for (int i = 0; i < S_COUNT / 4; i++) {
        u32 keep = (8 * i < left ? 0xffffu : 0) | (8 * i + 1 < left ? 0xffff0000u : 0);
        w[2 * i] &= keep;
        w[2 * i + 1] &= keep;
        ds[2 * i] &= keep;
        ds[2 * i + 1] &= keep;
    }
}

/* Weights and dS, or what that is made of, become 0 at a step's positions that are not live, or
 * not there, whatever K and V hold. */
DEVICE void cut_step(u32 (&w)[S_COUNT / 2], u32 (&ds)[S_COUNT / 2], const cu_fwd &p,
                     const mod_args &mod, const places &at, const dense_lanes &lanes, int flags)
{
    if (!flags)
        return;
    if (!CUTS_ROWS || (flags & STEP_MASKED))
        with_ways<SCORE_DENSE, DENSE_READS>(p, [&](auto ways) {
            cut_masked<decltype(ways)::TURNED>(w, ds, p, mod, at, lanes,
                                               !(flags & STEP_BY_END));
        });
    if ((MOD_MASK != MASK_NONE || CUTS_ROWS) && flags >> STEP_ROWS)
        cut_rows(w, ds, flags >> STEP_ROWS);
}

/* The accumulator of dP starts at -delta: no subtraction later. Not with dropout, where dP is
 * multiplied before. */
DEVICE void start_dp(float (&dp)[S_COUNT], u32 minus_delta)
{
    if (CFG_DROP)
        return;
#pragma unroll
    for (int i = 0; i < S_COUNT / 4; i++) {
        float2 d = load_two(minus_delta + i * 32);
        dp[4 * i] = dp[4 * i + 2] = d.x;
        dp[4 * i + 1] = dp[4 * i + 3] = d.y;
    }
}

/* dS = P (dP - delta) times slopes, of weights in f32: of rounded ones its error would be 1.4
 * times as large. g: weights times slopes. dp: dP - delta, or with dropout dP; becomes dS. */
DEVICE void four_gradients(u32 (&ds)[S_COUNT / 2], const float (&g)[4], float *dp,
                           const cu_fwd &p, u32 drawn, u32 minus_delta, int i)
{
#if CFG_DROP
    float2 d = load_two(minus_delta + i * 32);
#endif
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float x = dp[j];
#if CFG_DROP
        x = fmaf(is_kept(drawn, i, j) ? x : 0.f, p.drop.factor, j & 1 ? d.y : d.x);
#endif
        /* where a score is -INF, V may hold anything */
        dp[j] = MOD_SCORE && SCORE_MAY_MASK && g[j] == 0.f ? 0.f : g[j] * x;
    }
    ds[2 * i] = pack(dp[0], dp[1]);
    ds[2 * i + 1] = pack(dp[2], dp[3]);
}
