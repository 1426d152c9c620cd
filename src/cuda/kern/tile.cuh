/* A tile is the rows of one (batch, head) that a CTA works on. This file says which tile it is,
 * which of its rows a thread has, and what those rows need in the loop over keys. A thread has
 * two rows, 8 apart, as tensor-core products leave them. */
#pragma once

#include "pages.cuh"
#include "rows.cuh"

/* row0 is the first row of the tile, block its number among the query blocks of (b, h). */
struct tile {
    int id, b, h, row0, block;
    int q_offset; /* from the index of a row to its position */
    int kv_offset, kv_len;
};

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
    return t;
}

/* The tile that is number `turn` in the work order. */
DEVICE tile tile_of(const cu_fwd &p, int turn, int rows)
{
    return tile_at(p, p.order ? __ldg(p.order + turn) : turn, rows);
}

/* What a thread's two rows need in the loop over keys. */
struct tile_rows {
    int q;                 /* position of the first row */
    int kv_len, kv_offset; /* of the batch */
    int b, h;              /* take no register unless a mod reads them */
#if CFG_PACKED
    int q1, h1; /* position and head of the second row: heads of a group share the tile */
#endif
#if MOD_SCORE
    score_row score[2]; /* the part of the score function that no key changes */
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
    return ((int)threadIdx.x / 32 - CFG_FIRST_WARP) / CFG_PARTS;
}

/* The part of O's columns that this thread's warp owns. */
DEVICE int part_of_thread(void)
{
    return (int)threadIdx.x / 32 % CFG_PARTS;
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
#if MOD_SCORE
    score_row_begin(mod, p, t.b, t.h, r.q, r.score[0]);
    score_row_begin(mod, p, t.b, t.h, r.q + 8, r.score[1]);
#endif
}
