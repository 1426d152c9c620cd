/* The user's mask and score on four positions: two queries, two keys, in the order (query 0,
 * key 0), (query 0, key 1), (query 1, key 0), (query 1, key 1). What a query or a key brings
 * lies apart, so that a kernel makes it once for what it keeps. */
#pragma once

struct query_side {
    int q; /* position */
#if MOD_MASK == MASK_INTERVAL
    int from, to; /* live: from <= kv < to */
#elif MOD_MASK == MASK_GENERAL
    mask_row mask;
#endif
};

struct key_side {
    int kv; /* position */
    int has;
};

DEVICE query_side query_side_of(const cu_fwd &p, const mod_args &mod, int b, int h, int q)
{
    query_side s;
    s.q = q;
#if MOD_MASK == MASK_INTERVAL
    mask_interval(mod, p, b, h, q, s.from, s.to);
#elif MOD_MASK == MASK_GENERAL
    mask_row_begin(mod, p, b, h, q, s.mask);
#endif
    return s;
}

/* Names of what generated functions take of tiles of dense reads, behind their parameters
 * SCORE_TILES and MASK_TILES. */
#if CFG_DENSE && SCORE_DENSE
#define SCORE_WORDS , dense
#else
#define SCORE_WORDS
#endif
#if CFG_DENSE && DENSE_READS > SCORE_DENSE
#define MASK_WORDS , dense
#else
#define MASK_WORDS
#endif

/* Which of four positions the mask, if it is asked, and the length of the keys leave. */
DEVICE void live4(const cu_fwd &p, const mod_args &mod, int b, int h, const query_side &q0,
                  const query_side &q1, const key_side &k0, const key_side &k1, int asks_mod,
                  bool (&live)[4] MASK_TILES)
{
#if MOD_MASK == MASK_INTERVAL
    live[0] = q0.from <= k0.kv && k0.kv < q0.to;
    live[1] = q0.from <= k1.kv && k1.kv < q0.to;
    live[2] = q1.from <= k0.kv && k0.kv < q1.to;
    live[3] = q1.from <= k1.kv && k1.kv < q1.to;
#elif MOD_MASK == MASK_GENERAL
    mask_column c0, c1;
    mask_column_begin(mod, p, b, h, q0.mask, k0.kv, c0);
    mask_column_begin(mod, p, b, h, q0.mask, k1.kv, c1);
    mask4(mod, p, b, h, q0.mask, q1.mask, k0.kv, k1.kv, c0, c1, live MASK_WORDS);
#else
    live[0] = live[1] = live[2] = live[3] = true;
#endif
#pragma unroll
    for (int i = 0; i < 4; i++)
        live[i] |= !asks_mod;
    live[0] &= k0.has;
    live[1] &= k1.has;
    live[2] &= k0.has;
    live[3] &= k1.has;
}

/* Bare dot products become scores in natural units; slope: derivatives by scale * dot. */
DEVICE void scores4(const cu_fwd &p, const mod_args &mod, int b, int h, int q0, int q1, int k0,
                    int k1, float (&x)[4], float (&slope)[4] SCORE_TILES)
{
#if MOD_SCORE == SCORE_NONE
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[i] *= p.scale;
        slope[i] = 1.f;
    }
#else
    slope_row r0, r1;
    slope_row_begin(mod, p, b, h, q0, r0);
    slope_row_begin(mod, p, b, h, q1, r1);
    slope4(mod, p, b, h, r0, r1, k0, k1, x, slope SCORE_WORDS);
#endif
}

#if CFG_SHARES
/* scores4 with what scores share. */
DEVICE void scores4(const cu_fwd &p, const mod_args &mod, int b, int h, int q0, int q1, int k0,
                    int k1, float (&x)[4], float (&slope)[4] SCORE_TILES,
                    const slope_shared &shared)
{
    slope_row r0, r1;
    slope_row_begin(mod, p, b, h, q0, r0);
    slope_row_begin(mod, p, b, h, q1, r1);
    slope_share_rows(r0, r1, shared);
    slope4(mod, p, b, h, r0, r1, k0, k1, x, slope SCORE_WORDS, shared);
}
#endif
