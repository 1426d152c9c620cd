/* One row in plain f32 by one warp, reading V at live keys only: see careful.cu. */
#pragma once

#include "epilogue.cuh"
#include "kv.cuh"
#include "mod_point.cuh"

enum { LANES = 32, O_PER_LANE = (CFG_E + LANES - 1) / LANES };

/* score of key j, -INF where masked */
DEVICE float score_at(const cu_fwd &p, const mod_args &mod, const tile &t, int m, int j,
                      int is_partial)
{
    int q = m + t.q_offset, kv = j + t.kv_offset;
    if (is_partial && !is_live(mod, p, t.b, t.h, q, kv))
        return NEG_INF;
    const elem *x = query_row(p, t.b, t.h, row_place(t, m));
#if CFG_CODES
    code_rows rows = key_codes(p, t.b, kv_head(p, t.h));
    code_place y = code_place_of(rows, key_place(t, j));
    if (y.row < 0)
        return NEG_INF;
#else
    const elem *y = key_row(p, t.b, kv_head(p, t.h), key_place(t, j));
#endif
#if CFG_CHUNKS && !CFG_CODES
    if (!y)
        return NEG_INF;
#endif
    float s = 0.f;
#if CFG_CODES
#pragma unroll 1
    for (int d = 0; d < CFG_D_REAL; d++)
        s = fmaf(to_float(x[d]), code_at(rows, y, d), s);
#else
    for (int d = 0; d < CFG_D_REAL; d++)
        s = fmaf(to_float(x[d]), to_float(y[d]), s);
#endif
    return score_of(mod, p, t.b, t.h, q, kv, s);
}

struct careful_row {
    float m, l; /* natural units */
    float o[O_PER_LANE];
#if CFG_DROP
    dropout_words drop; /* of the head */
#endif
};

/* Online softmax over 32 keys at once; lane i owns columns i, i + 32, ... of O. */
DEVICE void add_keys(careful_row &r, const cu_fwd &p, const tile &t, int row, int first,
                     float s)
{
    float peak = s;
    for (int i = 16; i; i /= 2) {
        float other = __shfl_xor_sync(~0u, peak, i);
        peak = other > peak || other != other ? other : peak; /* keeps a NaN */
    }
    if (peak == NEG_INF)
        return;
    float m = r.m > peak ? r.m : peak;
    float rescale = r.m == NEG_INF ? 0.f : expf(r.m - m),
          prob = s == NEG_INF ? 0.f : expf(s - m);
    r.l = r.l * rescale;
    for (int e = 0; e < O_PER_LANE; e++)
        r.o[e] *= rescale;
#if CFG_CODES
    code_rows v = value_codes(p, t.b, kv_head(p, t.h));
#else
    const elem *v = value_head(p, t.b, kv_head(p, t.h));
#endif
    for (int i = 0; i < LANES; i++) {
        float w = __shfl_sync(~0u, prob, i);
        if (__shfl_sync(~0u, s, i) == NEG_INF)
            continue;
        r.l += w;
#if CFG_DROP
        if (dropout_bits(r.drop, row + t.q_offset, first + i + t.kv_offset) < p.drop.threshold)
            w = 0.f;
#endif
#if CFG_CODES
        code_place at = code_place_of(v, key_place(t, first + i));
#else
        long long from = value_offset(p, t.b, key_place(t, first + i));
#endif
        for (int e = 0; e < O_PER_LANE; e++) {
            int c = e * LANES + (threadIdx.x & 31);
#if CFG_CODES
            if (c < CFG_E_REAL)
                r.o[e] = fmaf(w, code_at(v, at, c), r.o[e]);
#else
            if (c < CFG_E_REAL)
                r.o[e] = fmaf(w, to_float(v[from + c]), r.o[e]);
#endif
        }
    }
    r.m = m;
}

/* keys from .. to - 1; once the sum is NaN, so is all that the row has */
DEVICE void redo_keys(careful_row &r, const cu_fwd &p, const mod_args &mod, const tile &t,
                      int m, int from, int to, int is_partial)
{
    int lane = threadIdx.x & 31;
    for (int first = from; first < to && r.l == r.l; first += LANES) {
        int j = first + lane;
        add_keys(r, p, t, m, first, j < to ? score_at(p, mod, t, m, j, is_partial) : NEG_INF);
    }
}

/* Lists of an imported block mask may say more than its mod: runs are kept to here too. */
DEVICE void redo_row(const cu_fwd &p, const mod_args &mod, const tile &t, int m)
{
    int lane = threadIdx.x & 31;
    careful_row r = {NEG_INF, 0.f};
#if CFG_DROP
    r.drop = drop_head(p.drop, t.b, t.h);
#endif
    if (p.runs) {
        int head = CFG_PACKED ? t.h / (p.H / p.G) : t.h;
        int row = t.b * p.mask_b + head * p.mask_h + t.block;
        for (int i = p.run_start[row]; i < p.run_start[row + 1]; i++) {
            cu_run run = p.runs[i];
            int from = run.first * p.block_keys, to = from + run.count * p.block_keys;
            redo_keys(r, p, mod, t, m, from, min(to, t.kv_len), run.is_partial);
        }
    } else {
        redo_keys(r, p, mod, t, m, 0, t.kv_len, 1);
    }
    out_elem *out = (out_elem *)p.o + t.b * p.os.b + t.h * p.os.h + row_place(t, m) * p.os.n;
    float inv = r.l == 0.f ? 0.f : rcp_fast(r.l);
#if CFG_SINKS
    float lse = r.l == 0.f ? NEG_INF : r.m + logf(r.l);
    add_sink_exact(sink_of(p, t.b, t.h, m), r.m, r.l, inv, lse);
#endif
#if CFG_DROP
    inv *= p.drop.factor;
#endif
    for (int e = 0; e < O_PER_LANE; e++)
        if (e * LANES + lane < CFG_E_REAL)
            out[e * LANES + lane] = out_from_float(r.o[e] * inv);
    if (lane == 0) {
#if CFG_SINKS
        put_lse(p, t.b, t.h, row_place(t, m), lse);
#else
        put_lse(p, t.b, t.h, row_place(t, m), r.l == 0.f ? NEG_INF : r.m + logf(r.l));
#endif
        /* of a live NaN or +INF, which the maximum of later keys hides, the sum is NaN */
        put_row_max(p, t.b, t.h, row_place(t, m), r.l != r.l ? NOT_A_NUMBER : r.m);
    }
}
