/* Fragments of products, from nothing to rows of global memory, in the problem's dtype or in
 * f32, over what lies there or added to it. */
#pragma once

template <int COUNT> DEVICE void clear(float (&x)[COUNT])
{
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        x[i] = 0.f;
}

/* The rows of one head of a gradient, from some column on. */
struct result {
    char *rows;
    long long step; /* elements from one row to the next */
    int is_wide, is_added;
};

DEVICE result result_of(const cu_bwd &p, void *data, const cu_stride &s, int b, int h,
                        int column, int which)
{
    int is_wide = p.wide & which;
    long long at = b * s.b + h * s.h + column;
    return {(char *)data + at * (is_wide ? 4 : 2), s.n, is_wide, p.added & which};
}

/* The rows of `to` from row `first` on. */
DEVICE result result_from(result to, int first)
{
    to.rows += first * to.step * (to.is_wide ? 4 : 2);
    return to;
}

DEVICE void put_float(const result &to, long long at, float x)
{
    if (to.is_wide) {
        float *p = (float *)to.rows + at;
        *p = to.is_added ? *p + x : x;
    } else {
        u16 *p = (u16 *)to.rows + at;
        *p = from_float(to.is_added ? to_float(*p) + x : x);
    }
}

/* two neighbours, the first at an even column of an aligned row */
DEVICE void put_two(const result &to, long long at, float x, float y)
{
    if (to.is_wide) {
        float2 *p = (float2 *)((float *)to.rows + at), old = make_float2(0.f, 0.f);
        if (to.is_added)
            old = *p;
        *p = make_float2(old.x + x, old.y + y);
    } else {
        u32 *p = (u32 *)((u16 *)to.rows + at);
        if (to.is_added) {
            u32 old = *p;
            x += to_float((u16)old);
            y += to_float((u16)(old >> 16));
        }
        *p = pack(x, y);
    }
}

/* Two rows of a fragment, 8 apart, two neighbours at a time. */
template <int COUNT>
DEVICE void put_rows(const result &to, int row0, int n, int real, float factor, int has,
                     const float (&x)[COUNT])
{
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) {
        int row = row0 + 8 * (i / 2 & 1), column = i / 4 * 8 + 2 * (threadIdx.x & 3);
        if (row < n && column < real)
            put_two(to, row * to.step + column, has ? x[i] * factor : 0.f,
                    has ? x[i + 1] * factor : 0.f);
    }
}

/* put_rows by 16 bytes a lane where nothing is widened or added. has 0: rows of zeros. */
template <int COUNT>
DEVICE void store_rows(const result &to, int row0, int n, int real, float factor, int has,
                       const float (&x)[COUNT])
{
    enum { CHUNKS = COUNT / 4 }; /* of 8 columns */
    int j = threadIdx.x & 3;
    if (CFG_F32 || (to.is_wide | to.is_added)) {
        put_rows(to, row0, n, real, factor, has, x);
        return;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = row0 + 8 * i;
#pragma unroll
        for (int c = 0; c < CHUNKS; c += 4) {
            u32 w[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                int at = c + k < CHUNKS ? 4 * (c + k) + 2 * i : 0;
                w[k] = has ? pack(x[at] * factor, x[at + 1] * factor) : 0;
            }
            quad_transpose(w);
            if (row < n && (c + j) * 8 < real)
                *(uint4 *)((u16 *)to.rows + row * to.step + (c + j) * 8) =
                    make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
}

#define HAS_OWN_PLACES (CFG_PAGES || CFG_ROWS)
#if HAS_OWN_PLACES
#include "bwd_own.cuh"
#endif

/* This warp's part of a tile is stored: whoever waits for the first tiles counts. */
DEVICE void tell_stored(const cu_bwd &p, int turn)
{
#if CFG_ROWS
    if (turn >= p.n_told)
        return;
    __threadfence();
    __syncwarp();
    if ((threadIdx.x & 31) == 0)
        atomicAdd(p.told, 1u);
#endif
}

/* dK or dV of keys of head g, two rows of a fragment. */
template <int COUNT>
DEVICE void store_keys(const cu_bwd &p, int is_value, int b, int g, int kv_first, int row0,
                       int n, int real, float factor, int has, const float (&x)[COUNT])
{
#if HAS_OWN_PLACES
    (void)kv_first;
    store_owned(p, is_value, b, g, row0, n, real, factor, has, x);
#else
    result to = is_value ? result_of(p, p.dv, p.dvs, b, g, 0, BWD_OF_V)
                         : result_of(p, p.dk, p.dks, b, g, 0, BWD_OF_K);
    store_rows(result_from(to, kv_first), row0, n, real, factor, has, x);
#endif
}
