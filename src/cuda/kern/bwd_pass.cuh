/* What kernels by mma.sync share: 64 rows stay and blocks of CFG_TM rows pass, two tensors each
 * (bwd_sm80.cu); weights and dS of four scores. */
#pragma once

enum {
    STAY = 64,
    PASS = CFG_TM,
    WARPS = 4 * CFG_ROW_WARPS,
    THREADS = WARPS * 32,
    PANELS_D = TILE_PANELS_D,
    PANELS_E = TILE_PANELS_E,
    COPIES = CFG_THIRDS ? 3 : 1,
    STAY_D = COPIES * PANELS_D * STAY * 128,
    STAY_BYTES = STAY_D + COPIES * PANELS_E * STAY * 128,
    PASS_D = COPIES * PANELS_D * PASS * 128,
    PASS_BYTES = PASS_D + COPIES * PANELS_E * PASS * 128,
#if CFG_THIRDS /* one block in thirds, then the next as it comes */
    RAW_D = (PASS * CFG_D / 8 + THREADS - 1) / THREADS * THREADS * 32,
    RAW_E = (PASS * CFG_E / 8 + THREADS - 1) / THREADS * THREADS * 32,
    RAW = STAY_BYTES + PASS_BYTES,
    STATS = RAW + RAW_D + RAW_E,
#else
    STATS = STAY_BYTES + CFG_STAGES * PASS_BYTES, /* offset of lse and delta */
#endif
    S_COUNT = PASS / 2
};

/* the 16 rows of this warp among those that stay, and its part of the columns */
DEVICE int warp_row(void)
{
    return (int)threadIdx.x / 32 / CFG_ROW_WARPS * 16;
}

DEVICE int warp_part(void)
{
    return (int)threadIdx.x / 32 % CFG_ROW_WARPS;
}

/* rows of two tensors of one head */
struct rows {
    row_source x, y;
    int n; /* rows there are */
};

DEVICE rows rows_of_keys(const cu_bwd &p, const sequence &s, int b, int g, int n)
{
    return {rows_from(key_rows(p.f, b, g), s.kv_first),
            rows_from(value_rows(p.f, b, g), s.kv_first), n};
}

DEVICE rows rows_of_queries(const cu_bwd &p, const sequence &s, int b, int h)
{
    row_source d_out = {(const elem *)p.d_out + b * p.dos.b + h * p.dos.h, p.dos.n};
    return {rows_from(query_rows(p.f, b, h), s.q_first), rows_from(d_out, s.q_first), s.q_len};
}

#if CFG_THIRDS
/* COUNT rows from `first` on; rows past the end as zeros. A block that passes is on its way. */
template <int COUNT> DEVICE void copy_both(u32 to, const rows &from, int first, int is_plain)
{
    if (COUNT == STAY) {
        split_rows<COUNT, CFG_D, CFG_D_REAL, THREADS>(to, from.x, first, from.n, is_plain);
        split_rows<COUNT, CFG_E, CFG_E_REAL, THREADS>(to + STAY_D, from.y, first, from.n,
                                                      is_plain);
        return;
    }
    int thread = thread_now();
    copy_pieces<COUNT, CFG_D, CFG_D_REAL, THREADS>(to, from.x, first, from.n, is_plain, thread);
    copy_pieces<COUNT, CFG_E, CFG_E_REAL, THREADS>(to + RAW_D, from.y, first, from.n, is_plain,
                                                   thread);
}

/* where the block of a stage comes, and where products read it */
DEVICE u32 arrival(u32 shared, int)
{
    return shared + RAW;
}

DEVICE u32 pass_tile(u32 shared, int)
{
    return shared + STAY_BYTES;
}

/* Splits the block that has come; all warps are done with the one before. */
DEVICE void take_block(u32 shared)
{
    copy_wait<0>();
    split_pieces<PASS, CFG_D, THREADS>(shared + STAY_BYTES, shared + RAW);
    split_pieces<PASS, CFG_E, THREADS>(shared + STAY_BYTES + PASS_D, shared + RAW + RAW_D);
}
#else
DEVICE u32 arrival(u32 shared, int stage)
{
    return shared + STAY_BYTES + stage * PASS_BYTES;
}

DEVICE u32 pass_tile(u32 shared, int stage)
{
    return arrival(shared, stage);
}

DEVICE void take_block(u32)
{
}

/* COUNT rows from `first` on to shared memory; rows past the end as zeros */
template <int COUNT> DEVICE void copy_both(u32 to, const rows &from, int first, int is_plain)
{
    enum { SECOND = PANELS_D * COUNT * 128 };
    /* f32: keeps what follows from the thread out of registers between copies */
    int thread = threadIdx.x + (CFG_F32 ? first >> 31 : 0);
    copy_rows<COUNT, CFG_D, CFG_D_REAL, THREADS>(to, from.x, first, from.n, is_plain, thread);
    copy_rows<COUNT, CFG_E, CFG_E_REAL, THREADS>(to + SECOND, from.y, first, from.n, is_plain,
                                                 thread);
}
#endif

/* lse (natural) and -delta of queries, +INF and 0 for what weighs nothing or is not there */
DEVICE float2 stats_of(const cu_bwd &p, const sequence &s, int b, int h, int m)
{
    if (m >= s.q_len)
        return make_float2(-NEG_INF, 0.f);
    float lse = p.f.lse[b * p.f.lse_s.b + h * p.f.lse_s.h + (s.q_first + m) * p.f.lse_s.n];
    float delta = p.minus_delta[(long long)row_block(p, s, b, h, 0) * BWD_ROWS + m];
    return make_float2(row_lse(lse), delta);
}

/* Which weights of a fragment are kept, a bit each: of queries as rows, of keys as rows. */
DEVICE u32 kept_of_queries(const dropper &drop, const cu_fwd &p, int q, int kv)
{
#if CFG_DROP
    return drop_mask<S_COUNT>(drop.head, p.drop, q, kv);
#else
    return 0;
#endif
}

DEVICE u32 kept_of_keys(const dropper &drop, const cu_fwd &p, int q, int kv)
{
#if CFG_DROP
    return drop_turned_mask<S_COUNT>(drop.head, p.drop, q, kv);
#else
    return 0;
#endif
}

/* A thread's four scores and what it takes to make weights of them. */
struct four {
    float x[4], dp[4]; /* dot products of both kinds, in the order of bwd_mod.cuh */
    int q0, q1, k0, k1;
    float2 stat0, stat1;
};

/* dP of a position: of dropped weights 0. keep: not 0 where the weight is kept. */
DEVICE float dropped_dp(const cu_fwd &p, float dp, u32 keep)
{
#if CFG_DROP
    return keep ? dp * p.drop.factor : 0.f;
#else
    return dp;
#endif
}

/* Whether a row has no key, or is past the last, where its scores may be NaN. */
DEVICE bool is_dead_row(float lse)
{
    return SCORE_MAY_BE_NAN && lse == -NEG_INF;
}

/* Weights, those that are kept, and dS of four positions; 0 where they are not live. keep: a
 * bit for each of them. */
DEVICE void weigh(four &f, const cu_bwd &p, const mod_args &mod, int b, int h,
                  const bool (&live)[4], u32 keep, float (&w)[4], float (&ds)[4])
{
    float slope[4];
    scores4(p.f, mod, b, h, f.q0, f.q1, f.k0, f.k1, f.x, slope);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 stat = i < 2 ? f.stat0 : f.stat1;
        float weight = exp2_fast((f.x[i] - stat.x) * 1.4426950408889634f);
        weight = f.x[i] == NEG_INF || is_dead_row(stat.x) ? 0.f : weight;
        w[i] = live[i] ? weight : 0.f;
        float dp = dropped_dp(p.f, f.dp[i], keep >> i & 1);
        ds[i] = w[i] == 0.f ? 0.f : w[i] * slope[i] * (dp + stat.y);
#if CFG_DROP
        w[i] = keep >> i & 1 ? w[i] : 0.f;
#endif
    }
}
