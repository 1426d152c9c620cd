/* The user's mask and score at one position, for kernels that are seldom run. */
#pragma once

/* Whether the mask lets position (b, h, q, kv) take part. */
DEVICE bool is_live(const mod_args &mod, const cu_fwd &p, int b, int h, int q, int kv)
{
#if MOD_MASK == MASK_INTERVAL
    int from, to;
    mask_interval(mod, p, b, h, q, from, to);
    return from <= kv && kv < to;
#elif MOD_MASK == MASK_GENERAL
    mask_row r;
    bool live[4];
    mask_column c;
    mask_row_begin(mod, p, b, h, q, r);
    mask_column_begin(mod, p, b, h, r, kv, c);
    mask4(mod, p, b, h, r, r, kv, kv, c, c, live);
    return live[0];
#else
    return true;
#endif
}

/* The score, in natural units, made of the bare dot product. */
DEVICE float score_of(const mod_args &mod, const cu_fwd &p, int b, int h, int q, int kv,
                      float dot)
{
#if MOD_SCORE == SCORE_NONE
    return dot * p.scale;
#else
    score_row r;
    score_row_begin(mod, p, b, h, q, r);
#if MOD_SCORE == SCORE_AFFINE
    return fmaf(dot, p.scale, score_offset(mod, p, b, h, r, kv));
#else
    float x[4] = {dot, dot, dot, dot};
    score4(mod, p, b, h, r, r, kv, kv, x);
    return x[0] * SCORE_UNIT;
#endif
#endif
}
