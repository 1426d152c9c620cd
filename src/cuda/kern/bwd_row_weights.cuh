/* Weights of 64 queries that stay by blocks of keys that pass, S_COUNT floats a thread. */
#pragma once

/* What a thread holds: two queries, 8 apart. */
struct own_rows {
    int row, q0, q1;    /* index of the first; positions */
    float lse0, lse1;   /* as bwd_prepare leaves them */
    float less0, less1; /* -delta */
};

DEVICE own_rows rows_of(const cu_bwd &p, const query_tile &t, int wg)
{
    own_rows r;
    int first = t.row0 + wg * 64, n = p.n_mblk * BWD_ROWS;
    r.row = first + (threadIdx.x / 32 & 3) * 16 + (threadIdx.x & 31) / 4;
    r.q0 = r.row + t.q_offset - row_shift(p.f, t.row0)
           + row_shift(p.f, first < n ? first : t.row0);
    r.q1 = r.q0 + 8;
    long long at = (long long)(t.b * p.f.H + t.h) * n + r.row;
    int is_there = first < n; /* rows are padded to blocks of 64 */
    r.lse0 = is_there ? load_float(p.lse2 + at) : -NEG_INF;
    r.lse1 = is_there ? load_float(p.lse2 + at + 8) : -NEG_INF;
    r.less0 = is_there ? load_float(p.minus_delta + at) : 0.f;
    r.less1 = is_there ? load_float(p.minus_delta + at + 8) : 0.f;
    return r;
}

/* Dot products become weights times slopes. key: position of this thread's first key. */
DEVICE void row_weights(float (&s)[S_COUNT], const cu_bwd &p, const mod_args &mod,
                        const query_tile &t, const own_rows &r, int key)
{
#if SCORE_LINE && SLOPE_ONE
    float by_q, by_kv, first = line_offset(mod, p.f, t.b, t.h, r.q0, key, by_q, by_kv);
    first *= OF_NATURAL;
    float x0 = first - r.lse0, x1 = fmaf(by_q, 8 * OF_NATURAL, first) - r.lse1;
    by_kv *= OF_NATURAL;
#endif
#pragma unroll
    for (int i = 0; i < S_COUNT / 4; i++) {
        float *x = s + 4 * i;
#if MOD_SCORE == SCORE_NONE
#pragma unroll
        for (int j = 0; j < 4; j++)
            x[j] = weight_of(fmaf(x[j], score_unit(p), j < 2 ? -r.lse0 : -r.lse1));
#elif SCORE_LINE && SLOPE_ONE
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float offset = fmaf(by_kv, 8 * i + (j & 1), j < 2 ? x0 : x1);
            x[j] = weight_of(fmaf(x[j], score_unit(p), offset));
        }
#else
        float y[4] = {x[0], x[1], x[2], x[3]}, slope[4];
        scores4(p.f, mod, t.b, t.h, r.q0, r.q1, key + 8 * i, key + 8 * i + 1, y, slope);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float w = weight_of(fmaf(y[j], OF_NATURAL, j < 2 ? -r.lse0 : -r.lse1));
            x[j] = SLOPE_ONE ? w : w == 0.f ? 0.f : w * slope[j];
        }
#endif
    }
}

/* Weights of positions that are not live become 0. key: index of this thread's first key;
 * asks_mod: whether the mask is asked. */
DEVICE void cut_row_weights(float (&s)[S_COUNT], const cu_bwd &p, const mod_args &mod,
                            const query_tile &t, const own_rows &r, int key, int asks_mod)
{
    query_side q0 = query_side_of(p.f, mod, t.b, t.h, r.q0);
    query_side q1 = query_side_of(p.f, mod, t.b, t.h, r.q1);
#pragma unroll
    for (int i = 0; i < S_COUNT / 4; i++) {
        int n = key + 8 * i;
        key_side k0 = {n + t.kv_offset, n < t.kv_len};
        key_side k1 = {n + 1 + t.kv_offset, n + 1 < t.kv_len};
        bool live[4];
        live4(p.f, mod, t.b, t.h, q0, q1, k0, k1, asks_mod, live);
#pragma unroll
        for (int j = 0; j < 4; j++)
            s[4 * i + j] = live[j] ? s[4 * i + j] : 0.f;
    }
}
