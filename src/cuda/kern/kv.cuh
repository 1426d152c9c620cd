/* Where rows lie in global memory. This is the only file that turns a batch, a head and a
 * logical row into an address or into the coordinates of a tensor copy, and that knows which KV
 * head a query head reads. With CFG_CHUNKS, rows of K and V are looked up in a chunk table; the
 * row of an absent chunk has no address, and holds no live key. */
#pragma once

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
/* The chunk table of one batch; first is null for rows in one piece. */
struct chunk_table {
    const int *first;
    int count, size, rows;
};

DEVICE chunk_table chunks_of(const cu_fwd &p, int b)
{
    chunk_table x = {p.chunks.first + b * p.chunks.step, p.chunks.count, p.chunks.size,
                     p.chunks.rows};
    return x;
}

/* The row of K and V that holds key j, or -1. */
DEVICE int chunk_row(const chunk_table &x, int j)
{
    int chunk = j / x.size;
    int first = chunk < x.count ? __ldg(x.first + chunk) : -1;
    return first < 0 ? -1 : min(min(first, x.rows - 1) + j - chunk * x.size, x.rows - 1);
}

/* Null for the key of an absent chunk. */
DEVICE const elem *key_row(const cu_fwd &p, int b, int g, int j)
{
    int row = chunk_row(chunks_of(p, b), j);
    return row < 0 ? 0 : key_head(p, b, g) + row * p.ks.n;
}

/* Elements from row 0 of a head to key j's row of V; the key must be there. */
DEVICE long long value_offset(const cu_fwd &p, int b, int j)
{
    return chunk_row(chunks_of(p, b), j) * p.vs.n;
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
#endif
    return x;
}

DEVICE row_source value_rows(const cu_fwd &p, int b, int g)
{
    row_source x = {value_head(p, b, g), p.vs.n};
#if CFG_CHUNKS
    x.chunks = chunks_of(p, b);
#endif
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
    if (is_there && x.chunks.first) {
        row = chunk_row(x.chunks, row);
        is_there = row >= 0;
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
