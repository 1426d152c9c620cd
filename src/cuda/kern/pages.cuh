/* Chunk tables: which row, or which key of which page, holds a logical key; and how many keys a
 * batch has. Whatever tables say, no place outside of K and V comes of them. */
#pragma once

#if CFG_CHUNKS
/* The chunk table of one batch; all is null for rows in one piece. What no batch changes
 * stays in the kernel's parameters, where it takes no registers. */
struct chunk_table {
    const int *first;
    int count;
    const cu_chunks *all;
};

DEVICE chunk_table chunks_of(const cu_fwd &p, int b)
{
    const cu_chunks &c = p.chunks;
    chunk_table x = {c.first, c.count, &c};
    if (c.start) {
        int from = max(0, __ldg(c.start + b)), past = min(__ldg(c.start + b + 1), c.entries);
        x.count = from < past ? past - from : 0;
        x.first += from < past ? from : 0;
    } else {
        x.first += b * c.step;
    }
    return x;
}

/* Where a key lies: b is what the first dimension of K and V counts, batches or pages; row is
 * -1 in an absent chunk. */
struct chunk_place {
    int b, row;
};

DEVICE chunk_place chunk_place_of(const chunk_table &x, int b, int j)
{
    const cu_chunks &c = *x.all;
    int chunk = c.shift >= 0 ? j >> c.shift : j / c.size, at = j - chunk * c.size;
    int first = chunk < x.count ? __ldg(x.first + chunk) : -1;
    int row = c.is_paged ? at : min(min(first, c.last) + at, c.last);
    chunk_place place = {c.is_paged ? max(0, min(first, c.last)) : b, first < 0 ? -1 : row};
    return place;
}

/* chunk_place_of in two steps: the entry that names the chunk of key j, which is read ahead of
 * its use, and chunk_place_by, the place by that entry. */
DEVICE int chunk_entry(const chunk_table &x, int j)
{
    const cu_chunks &c = *x.all;
    int chunk = c.shift >= 0 ? j >> c.shift : j / c.size;
    return chunk < x.count ? __ldg(x.first + chunk) : -1;
}

DEVICE chunk_place chunk_place_by(const chunk_table &x, int b, int j, int first)
{
    const cu_chunks &c = *x.all;
    int chunk = c.shift >= 0 ? j >> c.shift : j / c.size, at = j - chunk * c.size;
    int row = c.is_paged ? at : min(min(first, c.last) + at, c.last);
    chunk_place place = {c.is_paged ? max(0, min(first, c.last)) : b, first < 0 ? -1 : row};
    return place;
}
#endif

DEVICE int position(const cu_position &p, int b)
{
    return p.by_batch ? __ldg(p.by_batch + (long long)b * p.step) : p.value;
}

/* Keys of a batch; with last pages, kv_len counts those of the last one. */
DEVICE int live_keys(const cu_fwd &p, int b)
{
    int n = position(p.kv_len, b);
#if CFG_CHUNKS
    if (p.chunks.has_last) {
        int pages = chunks_of(p, b).count;
        long long all = (long long)(pages - 1) * p.chunks.size + n;
        n = pages ? (int)min(all, (long long)p.N) : 0;
    }
#endif
    return max(0, min(n, p.N));
}
