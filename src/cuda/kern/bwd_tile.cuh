/* Tiles of keys, and the blocks of queries that each of them meets: the runs of its row in the
 * transposed block mask, once for every query head of the group. Heads come one after the
 * other, or where the order says so, all of them at each block. */
#pragma once

#include "drop.cuh"
#include "masked.cuh"
#include "ragged.cuh"
#include "rows.cuh"

/* Whether some tiles may be walked by rows: not where a change of heads takes long. */
#define HAS_ROW_WALKS (CFG_GROUP > 1 && !CFG_TERMS && !CFG_DROP && !CFG_RAGGED)

/* CFG_KEYS keys of one (batch, key head) */
struct key_tile {
    int b, g, block, key0; /* block: index among the key tiles of (b, g) */
    int walk;              /* ORDER_BY_ROWS, ORDER_BACK */
    int q_offset, kv_offset, kv_len;
#if CFG_RAGGED
    sequence s;
#endif
};

/* Where rows and keys of a tile's batch lie; takes no register where there are no sequences. */
template <class TILE> DEVICE sequence tile_rows_of(const cu_fwd &p, const TILE &t)
{
#if CFG_RAGGED
    return t.s;
#else
    return sequence_at(p, t.b);
#endif
}

DEVICE int position_of(const cu_position &p, int b)
{
    return p.by_batch ? __ldg(p.by_batch + (long long)b * p.step) : p.value;
}

/* Live keys of a batch, and the position of its first row. */
DEVICE void place_rows(const cu_fwd &p, int b, const sequence &s, int &q_offset, int &kv_offset,
                       int &kv_len)
{
    kv_offset = position_of(p.kv_offset, b);
    kv_len = max(0, min(position_of(p.kv_len, b), s.keys));
    q_offset = position_of(p.q_offset, b);
#if CFG_RAGGED
    if (p.ragged.is_end)
        q_offset = kv_offset + kv_len - s.q_len;
#endif
}

DEVICE int row_blocks(const cu_bwd &p, const sequence &s)
{
#if CFG_RAGGED
    return (s.q_len + BWD_ROWS - 1) / BWD_ROWS;
#else
    return p.n_mblk;
#endif
}

/* Where a block of BWD_ROWS queries of a head lies among all that bwd_prepare leaves. Packed
 * sequences have blocks of their own, one after the other without a sum over them. */
DEVICE int row_block(const cu_bwd &p, const sequence &s, int b, int h, int block)
{
#if CFG_RAGGED
    if (p.packed_blocks)
        return h * p.packed_blocks + s.q_first / BWD_ROWS + b + block;
#endif
    return (b * p.f.H + h) * p.n_mblk + block;
}

#if CFG_RAGGED
/* Keys [from, past) that rows [first, last] may see, and those that all of them do: by limits
 * of the first and the last row, where no row between them has others. */
struct seen_keys {
    int from, past, all_from, all_past;
};

DEVICE seen_keys seen_by(const cu_fwd &p, const mod_args &mod, int b, int h, int first,
                         int last, int q_offset, int kv_offset, int kv_len)
{
    seen_keys k = {0, kv_len, 0, MOD_MASK == MASK_NONE ? kv_len : 0};
#if MOD_MASK == MASK_INTERVAL && CFG_MONOTONE
    int lo[2], hi[2], end = kv_offset + kv_len;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int from, to;
        mask_interval(mod, p, b, h, (i ? last : first) + q_offset, from, to);
        lo[i] = min(max(from, kv_offset), end) - kv_offset;
        hi[i] = min(max(to, kv_offset), end) - kv_offset;
    }
    k = {min(lo[0], lo[1]), max(hi[0], hi[1]), max(lo[0], lo[1]), min(hi[0], hi[1])};
#endif
    return k;
}
#endif

/* id: (b * G + g) * tiles of a head + block, as the order says it */
DEVICE key_tile key_tile_of(const cu_fwd &p, int id)
{
    key_tile t;
    t.walk = 0;
#if HAS_ROW_WALKS
    t.walk = id & ~ORDER_TILE;
    id &= ORDER_TILE;
#endif
    t.block = id % p.n_qblk;
    int bg = id / p.n_qblk;
    t.g = bg % p.G;
    t.b = bg / p.G;
    t.key0 = t.block * CFG_KEYS;
    sequence s = sequence_at(p, t.b);
    place_rows(p, t.b, s, t.q_offset, t.kv_offset, t.kv_len);
#if CFG_RAGGED
    t.s = s;
#endif
    return t;
}

DEVICE key_tile key_tile_at(const cu_fwd &p, int turn)
{
    return key_tile_of(p, p.order ? __ldg(p.order + turn) : turn);
}

DEVICE int id_of(const cu_fwd &p, const key_tile &t)
{
    return (t.b * p.G + t.g) * p.n_qblk + t.block;
}

/* The head whose keys a tile has: its own number is one of parts. */
DEVICE int keys_head(const cu_bwd &p, const key_tile &t)
{
    return CFG_CUTS_QUERIES ? t.g / p.parts : t.g;
}

/* Parts of the rows of a query head. */
DEVICE int row_parts(const cu_bwd &p)
{
    return CFG_CUTS_QUERIES ? p.row_parts : 1;
}

struct query_walk {
    int h, h_end;    /* present head, and the one past the group's last */
    int run, end;    /* indices: next run, and the one past the head's last */
    int block, last; /* present query block, last one of the present run */
    int masked;      /* the mask must be looked at */
};

/* Query heads of a tile. */
DEVICE int heads_of_tile(const cu_bwd &p)
{
    return p.f.H * row_parts(p) / p.f.G;
}

/* first run of the present head, or of the tile's part of its rows */
DEVICE void walk_head(query_walk &w, const cu_bwd &p, const key_tile &t)
{
    int blocks = row_blocks(p, tile_rows_of(p.f, t)), part = t.g % row_parts(p);
    w.run = w.end = 0;
    w.block = blocks * part / row_parts(p) - 1;
    w.last = blocks * (part + 1) / row_parts(p) - 1;
    if (p.f.runs) {
        int row = t.b * p.f.mask_b + w.h * p.f.mask_h + t.block;
        w.run = __ldg(p.f.run_start + row);
        w.end = __ldg(p.f.run_start + row + 1);
        w.block = w.last = -1;
    }
}

DEVICE query_walk query_begin(const cu_bwd &p, const key_tile &t)
{
    query_walk w;
    int group = heads_of_tile(p);
    w.h = t.g / row_parts(p) * group;
    w.h_end = t.key0 < t.kv_len ? w.h + group : w.h;
    w.masked = MOD_MASK != MASK_NONE;
    if (w.h < w.h_end)
        walk_head(w, p, t);
    else
        w.block = w.last = w.run = w.end = 0;
#if HAS_ROW_WALKS
    if (t.walk & ORDER_BY_ROWS)
        w.h = w.h_end - 1; /* the first block begins with the first head */
    if (t.walk & ORDER_BACK) {
        int first = w.run;
        w.run = w.end;
        w.end = first;
    }
#endif
    return w;
}

#if HAS_ROW_WALKS
/* query_next by rows. Block masks of several heads are not walked so: runs are of all heads. */
DEVICE int query_next_by_rows(query_walk &w, const cu_bwd &p, const key_tile &t)
{
    int step = t.walk & ORDER_BACK ? -1 : 1;
    if (w.h + 1 < w.h_end) {
        w.h++;
        return 1;
    }
    while (w.block == w.last) {
        if (w.run == w.end)
            return 0;
        int4 run = __ldg((const int4 *)p.f.runs + (step > 0 ? w.run : w.run - 1));
        int past = min(run.x + run.y, row_blocks(p, tile_rows_of(p.f, t)));
        w.run += step;
        w.block = step > 0 ? run.x - 1 : past;
        w.last = step > 0 ? past - 1 : run.x;
        w.masked = run.z;
        if (run.x >= past)
            w.block = w.last;
    }
    w.block += step;
    w.h = w.h_end - heads_of_tile(p);
    return 1;
}
#endif

/* Whether the present block sees keys of the tile, as far as limits of its rows say; there is
 * no block mask of sequences. */
DEVICE int is_met(query_walk &w, const cu_bwd &p, const mod_args &mod, const key_tile &t)
{
#if CFG_RAGGED
    int first = w.block * BWD_ROWS,
        last = min(first + BWD_ROWS, tile_rows_of(p.f, t).q_len) - 1;
    int key_end = min(t.key0 + CFG_KEYS, t.kv_len);
    seen_keys k = seen_by(p.f, mod, t.b, w.h, first, last, t.q_offset, t.kv_offset, t.kv_len);
    w.masked = MOD_MASK != MASK_NONE && (k.all_from > t.key0 || k.all_past < key_end);
    return k.from < key_end && k.past > t.key0 && k.from < k.past;
#else
    return 1;
#endif
}

/* Whether there is a next block. */
DEVICE int query_next(query_walk &w, const cu_bwd &p, const mod_args &mod, const key_tile &t)
{
#if HAS_ROW_WALKS
    if (t.walk & ORDER_BY_ROWS)
        return query_next_by_rows(w, p, t);
#endif
    for (;;) {
        if (w.block != w.last) {
            w.block++;
            if (!is_met(w, p, mod, t))
                continue;
            return 1;
        }
        if (w.run != w.end) {
            int4 run = __ldg((const int4 *)p.f.runs + w.run++);
            w.block = run.x - 1;
            w.last = min(run.x + run.y, row_blocks(p, tile_rows_of(p.f, t))) - 1;
            w.masked = run.z;
            if (w.block >= w.last)
                w.block = w.last;
            continue;
        }
        if (w.h + 1 >= w.h_end)
            return 0;
        w.h++;
        walk_head(w, p, t);
    }
}
