/* Keys that lie in chunks brought into one piece, [B][G][N][dim], by CTAs of PAGES_COPIERS
 * threads that take PAGES_ROWS keys of a head each. */
#pragma once

#include "kv.cuh"

enum {
    KEY_BYTES = CFG_D_REAL * (int)sizeof(elem),
    VALUE_BYTES = CFG_E_REAL * (int)sizeof(elem)
};

template <typename T>
DEVICE void copy_rows(const cu_fwd &p, const chunk_table &table, const char *from, cu_stride s,
                      char *to, int bytes, int b, int g, int j0, int live)
{
    int pieces = bytes / (int)sizeof(T), n = min(p.N - j0, (int)PAGES_ROWS) * pieces;
    T *target = (T *)(to + ((long long)(b * p.G + g) * p.N + j0) * bytes);
#pragma unroll 4
    for (int i = threadIdx.x; i < n; i += PAGES_COPIERS) {
        int j = j0 + i / pieces;
        T x = {};
        chunk_place at = {0, -1};
        if (j < live)
            at = chunk_place_of(table, b, j);
        if (at.row >= 0)
            x = __ldg((const T *)(from
                                  + (at.b * s.b + g * s.h + at.row * s.n)
                                        * (int)sizeof(elem))
                      + i % pieces);
        target[i] = x;
    }
}

template <typename T>
DEVICE void gather_rows(const cu_fwd &p, void *k, void *v, int b, int g, int j0, int live)
{
    chunk_table table = chunks_of(p, b);
    copy_rows<T>(p, table, (const char *)p.k, p.ks, (char *)k, KEY_BYTES, b, g, j0, live);
    copy_rows<T>(p, table, (const char *)p.v, p.vs, (char *)v, VALUE_BYTES, b, g, j0, live);
}

/* Keys of one block of one head; those that are absent or past the batch's last are 0. Blocks
 * that begin `spare` keys past the last one and further are left as they are. is_even: rows are
 * read by 16 bytes. */
DEVICE void gather_block(const cu_fwd &p, void *k, void *v, int is_even, int spare, int turn)
{
    int blocks = (p.N + PAGES_ROWS - 1) / PAGES_ROWS;
    int j0 = turn % blocks * PAGES_ROWS, g = turn / blocks % p.G, b = turn / blocks / p.G;
    int live = live_keys(p, b);
    if (j0 - live >= spare)
        return;
    if (is_even)
        gather_rows<uint4>(p, k, v, b, g, j0, live);
    else
        gather_rows<elem>(p, k, v, b, g, j0, live);
}

/* How many keys each batch has, by one CTA. */
DEVICE void count_keys(const cu_fwd &p, int *lens)
{
    for (int b = threadIdx.x; b < p.B; b += PAGES_COPIERS)
        lens[b] = live_keys(p, b);
}
