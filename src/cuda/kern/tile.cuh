/* A tile is the rows of one (batch, head) that a CTA works on. This file says which tile it is,
 * which of its rows a thread has, and what those rows need in the loop over keys. A thread has
 * two rows, 8 apart, as tensor-core products leave them. */
#pragma once

#include "drop.cuh"
#include "masked.cuh"
#include "pages.cuh"
#include "ragged.cuh"
#include "rows.cuh"

/* row0 is the first row of the tile, block its number among the query blocks of (b, h). */
struct tile {
    int id, b, h, row0, block;
    int q_offset; /* from the index of a row to its position */
    int kv_offset, kv_len;
#if CFG_RAGGED
    int q_first, q_len, kv_first; /* of the sequence: where it lies, and its rows */
#endif
#if CFG_BY_PARTS
    int part; /* of the keys: items.cuh */
#endif
};

/* Head and query of a packed row: rows of the query heads that share a KV head are numbered
 * head by head. */
struct packed_row {
    int h, m;
};

/* How many rows the tile's head has. */
DEVICE int rows_of(const cu_fwd &p, const tile &t)
{
#if CFG_RAGGED
    return t.q_len;
#else
    return p.M;
#endif
}

/* Where row m, or key j, of the tile's head lies among those of the tensors. */
DEVICE int row_place(const tile &t, int m)
{
#if CFG_RAGGED
    return t.q_first + m;
#else
    return m;
#endif
}

DEVICE int key_place(const tile &t, int j)
{
#if CFG_RAGGED
    return t.kv_first + j;
#else
    return j;
#endif
}

#if CFG_RAGGED
DEVICE void place_sequence(const cu_fwd &p, tile &t)
{
    sequence s = sequence_at(p, t.b);
    t.q_first = s.q_first;
    t.q_len = s.q_len;
    t.kv_first = s.kv_first;
    t.kv_len = min(t.kv_len, s.keys);
    if (p.ragged.is_end)
        t.q_offset = t.kv_offset + t.kv_len - t.q_len;
}
#endif

DEVICE tile tile_at(const cu_fwd &p, int id, int rows)
{
    tile t;
    t.id = id;
    t.block = t.id % p.n_qblk;
    int bh = t.id / p.n_qblk;
    t.h = bh % p.H;
    t.b = bh / p.H;
    t.row0 = t.block * rows;
    t.q_offset = position(p.q_offset, t.b) + row_shift(p, t.row0);
    t.kv_offset = position(p.kv_offset, t.b);
    t.kv_len = live_keys(p, t.b);
#if CFG_RAGGED
    place_sequence(p, t);
#endif
    return t;
}

/* The tile that is number `turn` in the work order. */
DEVICE tile tile_of(const cu_fwd &p, int turn, int rows)
{
    return tile_at(p, p.order ? __ldg(p.order + turn) : turn, rows);
}

#if CFG_RAGGED || CFG_SMALL || CFG_BY_PARTS
/* Keys [from, past) of a tile may be live, those of [all_from, all_past) are so in every row:
 * by the limits of the first and the last row, where no row between them has others. */
struct tile_keys {
    int from, past, all_from, all_past;
};

DEVICE tile_keys keys_of(const cu_fwd &p, const mod_args &mod, const tile &t, int rows)
{
#if MOD_MASK == MASK_INTERVAL && CFG_MONOTONE
    tile_keys k;
    int lo[2], hi[2], begin = t.kv_offset, end = t.kv_offset + t.kv_len;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int m = i ? min(t.row0 + rows, rows_of(p, t)) - 1 : t.row0, from, to;
        mask_interval(mod, p, t.b, t.h, m + t.q_offset, from, to);
        lo[i] = min(max(from, begin), end) - begin;
        hi[i] = min(max(to, begin), end) - begin;
    }
    k.from = min(lo[0], lo[1]);
    k.past = max(hi[0], hi[1]);
    k.all_from = max(lo[0], lo[1]);
    k.all_past = min(hi[0], hi[1]);
    return k;
#else
    tile_keys k = {0, t.kv_len, 0, MOD_MASK == MASK_NONE ? t.kv_len : 0};
    return k;
#endif
}
#endif

#if CFG_LIMITS
/* Live keys of row m: the first and the one past the last. The table has all rows of the
 * sequence. */
DEVICE int2 read_limit(const cu_fwd &p, int b, int h, int m)
{
    int here = min(m, p.M - 1), row = here + row_shift(p, here);
    return __ldg((const int2 *)p.limits.of_row + b * p.limits.b + h * p.limits.h + row);
}
#endif

#if CFG_SHARES
/* A thread's part of shared values of a block to come: shares.cuh. */
struct share_ahead {
#if SCORE_KEYS
    u32 key[SCORE_KEYS];
#endif
#if SCORE_DIAGONALS
    u32 diagonal[SCORE_DIAGONALS];
#endif
};

/* Where a thread reads those of the block that was made last. */
struct share_reads {
    u32 key, diagonal;
    int past;          /* the key after its last; -1: the tile has none yet */
    share_ahead ahead; /* of the block that begins there */
};
#endif

/* What a thread's two rows need in the loop over keys. */
struct tile_rows {
    int q;                 /* position of the first row */
    int kv_len, kv_offset; /* of the batch */
    int b, h;              /* take no register unless a mod reads them */
#if CFG_LIMITS
    int m; /* index of the first row */
#endif
#if CFG_SMALL && CFG_LIMITS && MOD_MASK == MASK_GENERAL
    int2 limit[2]; /* first live key and the one past the last, where the host has found them */
#endif
#if CFG_PACKED
    int q1, h1; /* position and head of the second row: heads of a group share the tile */
#endif
#if MOD_SCORE
    score_row score[2]; /* the part of the score function that no key changes */
#endif
#if CFG_DROP
    dropout_words drop; /* of the head */
#endif
#if CFG_DENSE
    u32 dense[DENSE_READS]; /* where this thread reads them for the block: dense.cuh */
#endif
#if CFG_SHARES
    share_reads shares;
#endif
};

DEVICE int row_q(const tile_rows &r, int i)
{
#if CFG_PACKED
    return i ? r.q1 : r.q;
#else
    return r.q + 8 * i;
#endif
}

DEVICE int row_h(const tile_rows &r, int i)
{
#if CFG_PACKED
    return i ? r.h1 : r.h;
#else
    return r.h;
#endif
}

/* The group of 16 rows that this thread's warp, or pair of warps, works on. */
DEVICE int group_of_thread(void)
{
#if CFG_SMALL
    return threadIdx.x / 32 & 3;
#else
    return ((int)threadIdx.x / 32 - CFG_FIRST_WARP) / CFG_ROW_WARPS;
#endif
}

/* The part of O's columns that this thread's warp owns. */
DEVICE int part_of_thread(void)
{
    return (int)threadIdx.x / 32 % CFG_ROW_WARPS;
}

/* The first of this thread's two rows, counted from the tile's first. */
DEVICE int row_of_thread(void)
{
    return group_of_thread() * 16 + (threadIdx.x & 31) / 4;
}

DEVICE void rows_place(tile_rows &r, const cu_fwd &p, const mod_args &mod, const tile &t)
{
    r.q = t.row0 + row_of_thread() + t.q_offset;
    r.kv_len = t.kv_len;
    r.kv_offset = t.kv_offset;
    r.b = t.b;
    r.h = t.h;
#if CFG_LIMITS
    r.m = t.row0 + row_of_thread();
#endif
#if CFG_SMALL && CFG_LIMITS && MOD_MASK == MASK_GENERAL
#pragma unroll
    for (int i = 0; i < 2; i++)
        r.limit[i] = p.limits.of_row ? read_limit(p, t.b, t.h, r.m + 8 * i) : make_int2(0, 0);
#endif
#if MOD_SCORE
    score_row_begin(mod, p, t.b, t.h, r.q, r.score[0]);
    score_row_begin(mod, p, t.b, t.h, r.q + 8, r.score[1]);
#endif
#if CFG_DROP
    r.drop = drop_head(p.drop, t.b, t.h);
#endif
#if CFG_SHARES
    r.shares.past = -1;
#endif
}

/* Weights of a fragment that dropout drops become 0. column: index of the first key. */
template <int COUNT>
DEVICE void rows_drop(const tile_rows &r, const cu_fwd &p, int column, float (&s)[COUNT])
{
#if CFG_DROP
    drop_weights(s, r.drop, p.drop, r.q, column + r.kv_offset);
#endif
}
