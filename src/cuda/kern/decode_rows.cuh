/* What a warp of decode has of the rows of a span: their places, and which keys all of them are
 * sure to see. */
#pragma once

DEVICE void place_packed(tile_rows &r, const cu_fwd &p, const mod_args &mod, const span &s)
{
    int last = packed_rows(p, s) - 1, lane = threadIdx.x & 31;
    int row = s.row0 + warp_row() + lane / 4;
    packed_row x = unpack_row(p, s, min(row, last));
    packed_row y = unpack_row(p, s, min(row + 8, last));
    tile t = batch_of(p, s.b);
    int q_offset = t.q_offset;
    r.b = s.b;
    r.h = x.h;
    r.h1 = y.h;
    r.q = x.m + q_offset;
    r.q1 = y.m + q_offset;
    r.kv_offset = t.kv_offset;
    r.kv_len = t.kv_len;
#if MOD_SCORE
    score_row_begin(mod, p, r.b, r.h, r.q, r.score[0]);
    score_row_begin(mod, p, r.b, r.h1, r.q1, r.score[1]);
#endif
}

#if MOD_MASK == MASK_INTERVAL || MOD_SURE
/* Keys from <= j < to are live in all rows of the warp. */
struct sure_keys {
    int from, to;
};

DEVICE sure_keys sure_keys_of(const tile_rows &at, const cu_fwd &p, const mod_args &mod)
{
    int from, to, other, end;
#if MOD_SURE
    from = other = -0x7fffffff;
    to = mask_sure(mod, p, at.b, at.h, at.q);
    end = mask_sure(mod, p, at.b, at.h1, at.q1);
#else
    mask_interval(mod, p, at.b, at.h, at.q, from, to);
    mask_interval(mod, p, at.b, at.h1, at.q1, other, end);
#endif
    from = max(from, other);
    to = min(to, end);
    for (int i = 4; i < 32; i *= 2) {
        from = max(from, __shfl_xor_sync(~0u, from, i));
        to = min(to, __shfl_xor_sync(~0u, to, i));
    }
    sure_keys x = {(int)max(0ll, (long long)from - at.kv_offset),
                   (int)max(0ll, min((long long)to - at.kv_offset, 0x7fffffffll))};
    return x;
}
#endif
