/* The user's mask on a thread's fragment of a tile of scores: masked scores become -INF. */
#pragma once

#include "dense.cuh"
#include "tile.cuh"

#if MOD_MASK == MASK_GENERAL
/* Makes what the mask needs of each key of a block, CFG_TN entries of shared memory, by the
 * threads that will read it (128, or 32 in decode). */
DEVICE void share_columns(const tile_rows &r, const cu_fwd &p, const mod_args &mod, int first,
                          mask_column *shared, int threads)
{
#if MASK_COLUMN_WORDS
    mask_row row;
    mask_row_begin(mod, p, r.b, r.h, r.q, row); /* columns read only what all rows share */
    for (int c = threadIdx.x % threads; c < CFG_TN; c += threads)
        mask_column_begin(mod, p, r.b, r.h, row, first + c + r.kv_offset, shared[c]);
#endif
}
#else
#define MASK_COLUMN_WORDS 0
struct mask_column {
};
#endif

/* cut_right masks the columns from hi on, cut_left those before lo; limits are per row. */
template <int COUNT> DEVICE void cut_right(float (&s)[COUNT], const int (&hi)[2])
{
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        s[i] = 8 * (i / 4) + (i & 1) < hi[i / 2 & 1] ? s[i] : NEG_INF;
}

template <int COUNT> DEVICE void cut_left(float (&s)[COUNT], const int (&lo)[2])
{
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        s[i] = 8 * (i / 4) + (i & 1) >= lo[i / 2 & 1] ? s[i] : NEG_INF;
}

#if MOD_MASK == MASK_GENERAL
template <int TURNED, int COUNT>
DEVICE void cut_by(const tile_rows &r, const cu_fwd &p, const mod_args &mod, int column,
                   const mask_column *columns, float (&s)[COUNT])
{
#if CFG_DENSE && MASK_DENSE
    u32 pairs[MASK_DENSE][2][4];
#endif
    mask_row row[2];
    mask_row_begin(mod, p, r.b, row_h(r, 0), row_q(r, 0), row[0]);
    mask_row_begin(mod, p, r.b, row_h(r, 1), row_q(r, 1), row[1]);
#pragma unroll
    for (int g = 0; g < COUNT / 4; g++) {
        bool live[4];
        int at = 8 * g + 2 * (threadIdx.x & 3), kv = column + 8 * g + r.kv_offset;
#if CFG_DENSE && MASK_DENSE
        u32 dense[MASK_DENSE][4];
        if (g % 2 == 0)
            dense_pairs<SCORE_DENSE, MASK_DENSE, TURNED>(r.dense, 8 * g, pairs);
        dense_half(pairs, g % 2, dense);
        mask4(mod, p, r.b, r.h, row[0], row[1], kv, kv + 1, columns[at], columns[at + 1], live,
              dense);
#else
        mask4(mod, p, r.b, r.h, row[0], row[1], kv, kv + 1, columns[at], columns[at + 1], live);
#endif
#pragma unroll
        for (int i = 0; i < 4; i++)
            s[4 * g + i] = live[i] ? s[4 * g + i] : NEG_INF;
    }
}

template <int COUNT>
DEVICE void cut_general(const tile_rows &r, const cu_fwd &p, const mod_args &mod, int column,
                        const mask_column *columns, float (&s)[COUNT])
{
    with_ways<SCORE_DENSE, DENSE_READS>(p, [&](auto ways) {
        cut_by<decltype(ways)::TURNED>(r, p, mod, column, columns, s);
    });
}
#endif

/* Whether some row of the warp may not see all keys before `end`. */
DEVICE int is_unsure(const tile_rows &r, const cu_fwd &p, const mod_args &mod, int end)
{
#if MOD_SURE
    int sure = min(mask_sure(mod, p, r.b, row_h(r, 0), row_q(r, 0)),
                   mask_sure(mod, p, r.b, row_h(r, 1), row_q(r, 1)));
    return __any_sync(~0u, end + r.kv_offset > sure);
#else
    return 1;
#endif
}

/* Whether the host has found that the live keys of each row are one interval: then a table of
 * these stands for the mask. */
DEVICE int has_limits(const cu_fwd &p)
{
#if CFG_LIMITS && MOD_MASK == MASK_GENERAL
    return p.limits.of_row != 0;
#else
    return 0;
#endif
}

#if MOD_MASK == MASK_GENERAL && CFG_LIMITS
/* Row i of this thread: its first live key and the one past its last. */
DEVICE int2 limits_of(const tile_rows &r, const cu_fwd &p, int i)
{
#if CFG_SMALL
    return r.limit[i];
#else
    return read_limit(p, r.b, r.h, r.m + 8 * i);
#endif
}
#endif

/* Scores that the mask or the end of the keys excludes become -INF; masked: which of the two
 * may. lo and hi count from `column`, the fragment's first. The votes pay: often no row of a
 * warp is cut in a block that is partial for the tile. `columns` holds what a general mask
 * needs of the keys. */
template <int COUNT>
DEVICE void apply_mask(const tile_rows &r, const cu_fwd &p, const mod_args &mod, int column,
                       int masked, const mask_column *columns, float (&s)[COUNT])
{
    int hi[2], lo[2] = {0, 0};
    hi[0] = hi[1] = r.kv_len - column;
#if MOD_MASK == MASK_GENERAL && CFG_LIMITS
    if (!(masked & MASKED_BY_MOD)) {
    } else if (has_limits(p)) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int2 x = limits_of(r, p, i);
            lo[i] = x.x - column;
            hi[i] = min(hi[i], x.y - column);
        }
    } else if (is_unsure(r, p, mod, column + COUNT * 2))
        cut_general(r, p, mod, column, columns, s);
#elif MOD_MASK == MASK_GENERAL
    if (masked & MASKED_BY_MOD && is_unsure(r, p, mod, column + COUNT * 2))
        cut_general(r, p, mod, column, columns, s);
#elif MOD_MASK == MASK_INTERVAL
    int base = column + r.kv_offset, end = base + COUNT * 2;
#pragma unroll
    for (int i = 0; i < 2 && masked & MASKED_BY_MOD; i++) {
        int from, to; /* live: from <= kv < to */
        mask_interval(mod, p, r.b, row_h(r, i), row_q(r, i), from, to);
        lo[i] = min(max(from, base), end) - base;
        hi[i] = min(hi[i], max(min(to, end), base) - base);
    }
#endif
#if MOD_MASK == MASK_INTERVAL || CFG_LIMITS && MOD_MASK == MASK_GENERAL
    if (__any_sync(~0u, max(lo[0], lo[1]) > 0))
        cut_left(s, lo);
#endif
    if (__any_sync(~0u, min(hi[0], hi[1]) < CFG_TN))
        cut_right(s, hi);
}

/* apply_mask for a block on which all THREADS threads of the CTA work: they share columns. */
template <int THREADS, int COUNT>
DEVICE void apply_mask_together(const tile_rows &r, const cu_fwd &p, const mod_args &mod,
                                int block, int column, int masked, mask_column *columns,
                                float (&s)[COUNT])
{
#if MOD_MASK == MASK_GENERAL
    if (masked & MASKED_BY_MOD) {
        __syncthreads();
        share_columns(r, p, mod, block * CFG_TN, columns, THREADS);
        __syncthreads();
    }
#endif
    apply_mask(r, p, mod, column, masked, columns, s);
}
