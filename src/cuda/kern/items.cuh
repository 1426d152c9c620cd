/* Items (CFG_BY_PARTS): 64 packed rows of the query heads that share a KV head, head by head,
 * over one part of the keys. A part is CFG_PART_KEYS keys from a multiple of them on, whatever
 * the run, and starts from nothing, as tiles of many rows do at the same keys (parts.cuh). */
#pragma once

#include "shared.cuh"
#include "tile.cuh"

DEVICE tile item_at(const cu_fwd &p, int id)
{
    tile t;
    int rest = id / p.decode.tiles, pair = rest / p.n_split;
    t.id = id;
    t.block = id - rest * p.decode.tiles;
    t.part = rest - pair * p.n_split;
    t.b = pair / p.G;
    t.h = (pair - t.b * p.G) * p.decode.group;
    t.row0 = t.block * CFG_TILE_ROWS;
    t.q_offset = position(p.q_offset, t.b);
    t.kv_offset = position(p.kv_offset, t.b);
    t.kv_len = live_keys(p, t.b);
    return t;
}

/* A packed row of the item's heads; rows past the last one repeat it. */
DEVICE packed_row unpack_row(const cu_fwd &p, const tile &t, int packed)
{
    int at = min(packed, p.decode.rows - 1), h = at / p.M;
    packed_row x = {t.h + h, at - h * p.M};
    return x;
}

/* Keys of the item's part that some of its rows may see, and those that all see. */
DEVICE tile_keys item_keys(const cu_fwd &p, const mod_args &mod, const tile &t)
{
    int begin = t.part * CFG_PART_KEYS, end = max(begin, min(t.kv_len, begin + CFG_PART_KEYS));
    tile_keys k = {begin, end, begin, MOD_MASK == MASK_NONE ? end : begin};
#if MOD_MASK == MASK_INTERVAL
    int last = min(t.row0 + CFG_TILE_ROWS, p.decode.rows);
    k.from = end;
    k.past = begin;
    k.all_past = end;
#pragma unroll 1
    for (int i = t.row0; i < last; i++) {
        packed_row x = unpack_row(p, t, i);
        int from, to;
        mask_interval(mod, p, t.b, x.h, x.m + t.q_offset, from, to);
        from = min(max(from, begin + t.kv_offset), end + t.kv_offset) - t.kv_offset;
        to = min(max(to, begin + t.kv_offset), end + t.kv_offset) - t.kv_offset;
        if (from < to) {
            k.from = min(k.from, from);
            k.past = max(k.past, to);
        }
        k.all_from = max(k.all_from, from);
        k.all_past = min(k.all_past, to);
    }
#endif
    return k;
}

DEVICE void item_rows_place(tile_rows &r, const cu_fwd &p, const mod_args &mod, const tile &t)
{
    packed_row x = unpack_row(p, t, t.row0 + row_of_thread());
    packed_row y = unpack_row(p, t, t.row0 + row_of_thread() + 8);
    r.q = x.m + t.q_offset;
    r.q1 = y.m + t.q_offset;
    r.h = x.h;
    r.h1 = y.h;
    r.kv_len = t.kv_len;
    r.kv_offset = t.kv_offset;
    r.b = t.b;
#if MOD_SCORE
    score_row_begin(mod, p, t.b, x.h, r.q, r.score[0]);
    score_row_begin(mod, p, t.b, y.h, r.q1, r.score[1]);
#endif
}
