/* Where rows lie in global memory. This is the only file that turns a batch, a head and a
 * logical row into an address or into the coordinates of a tensor copy, and that knows which KV
 * head a query head reads. With CFG_CHUNKS, rows of K and V are looked up in a chunk table; the
 * row of an absent chunk has no address, and holds no live key. */
#pragma once

#include "pages.cuh"

/* H / G neighbouring query heads read one KV head. */
DEVICE int kv_head(const cu_fwd &p, int h)
{
    return h / (p.H / p.G);
}

/* The address of row 0 of a head; h is a query head, g a KV head. */
DEVICE const elem *query_head(const cu_fwd &p, int b, int h)
{
    return (const elem *)p.q + b * p.qs.b + h * p.qs.h;
}

DEVICE const elem *key_head(const cu_fwd &p, int b, int g)
{
    return (const elem *)p.k + b * p.ks.b + g * p.ks.h;
}

DEVICE const elem *value_head(const cu_fwd &p, int b, int g)
{
    return (const elem *)p.v + b * p.vs.b + g * p.vs.h;
}

/* The address of one row, in one expression: ptxas keeps the order of its terms. */
DEVICE const elem *query_row(const cu_fwd &p, int b, int h, int m)
{
    return (const elem *)p.q + b * p.qs.b + h * p.qs.h + m * p.qs.n;
}

#if CFG_CHUNKS
/* Null for the key of an absent chunk. */
DEVICE const elem *key_row(const cu_fwd &p, int b, int g, int j)
{
    chunk_place at = chunk_place_of(chunks_of(p, b), b, j);
    return at.row < 0 ? 0 : key_head(p, at.b, g) + at.row * p.ks.n;
}

/* Elements from row 0 of batch b's head to key j's row of V; the key must be there. */
DEVICE long long value_offset(const cu_fwd &p, int b, int j)
{
    chunk_place at = chunk_place_of(chunks_of(p, b), b, j);
    return (at.b - b) * p.vs.b + at.row * p.vs.n;
}
#else
DEVICE const elem *key_row(const cu_fwd &p, int b, int g, int j)
{
    return (const elem *)p.k + b * p.ks.b + g * p.ks.h + j * p.ks.n;
}

DEVICE long long value_offset(const cu_fwd &p, int b, int j)
{
    return j * p.vs.n;
}
#endif

/* The rows of one head, for copies of many. */
struct row_source {
    const elem *head;
    long long stride;
#if CFG_CHUNKS
    chunk_table chunks;
    long long step; /* elements from one batch, or page, to the next */
    int b;
#endif
};

DEVICE row_source query_rows(const cu_fwd &p, int b, int h)
{
    row_source x = {query_head(p, b, h), p.qs.n};
    return x;
}

DEVICE row_source key_rows(const cu_fwd &p, int b, int g)
{
    row_source x = {key_head(p, b, g), p.ks.n};
#if CFG_CHUNKS
    x.chunks = chunks_of(p, b);
    x.step = p.ks.b;
    x.b = b;
#endif
    return x;
}

DEVICE row_source value_rows(const cu_fwd &p, int b, int g)
{
    row_source x = {value_head(p, b, g), p.vs.n};
#if CFG_CHUNKS
    x.chunks = chunks_of(p, b);
    x.step = p.vs.b;
    x.b = b;
#endif
    return x;
}

/* The rows of x counted from row `first` on. */
DEVICE row_source rows_from(row_source x, int first)
{
    x.head += first * x.stride;
    return x;
}

DEVICE const elem *row_address(const row_source &x, int row)
{
    return x.head + row * x.stride;
}

/* The address of a row before row n that is there; else some address of the head. */
DEVICE const elem *row_if(const row_source &x, int row, int n, bool &is_there)
{
    is_there = row < n;
#if CFG_CHUNKS
    if (is_there && x.chunks.all) {
        chunk_place at = chunk_place_of(x.chunks, x.b, row);
        is_there = at.row >= 0;
        return row_address(x, max(0, at.row)) + (is_there ? (at.b - x.b) * x.step : 0);
    }
#endif
    return row_address(x, is_there ? row : 0);
}

/* Coordinates of a head in a tensor map, in which a broadcast dimension has size 1. */
struct head_box {
    int h, b;
};

DEVICE head_box box_at(const cu_stride &s, int b, int h)
{
    head_box x = {s.h ? h : 0, s.b ? b : 0};
    return x;
}

DEVICE head_box query_box(const cu_fwd &p, int b, int h)
{
    return box_at(p.qs, b, h);
}

DEVICE head_box key_box(const cu_fwd &p, int b, int g)
{
    return box_at(p.ks, b, g);
}

DEVICE head_box value_box(const cu_fwd &p, int b, int g)
{
    return box_at(p.vs, b, g);
}

#if CFG_CHUNKS
/* Where the copy of keys from j on begins, for the first `n` keys of batch b; what is not there
 * lies before the first batch or page, where copies find zeros. has_b: whether the tensor map
 * tells batches, or pages, apart. */
DEVICE chunk_place chunk_box(const chunk_table &x, int has_b, int b, int j, int n)
{
    chunk_place at = {-1, 0};
    if (j < n)
        at = chunk_place_of(x, b, j);
    at.b = at.row < 0 || at.b < 0 ? -1 : has_b ? at.b : 0;
    at.row = max(0, at.row);
    return at;
}
#endif

#if CFG_CODES
#include "codes.cuh"
#endif
