/* Latent decode: the two warpgroups that add up O, each half of its columns. */
#pragma once

#include "latent_place.cuh"

enum { COLUMNS = AT_ONCE * 64 }; /* of a product */

struct half_row {
    float o[PRODUCTS][COLUMNS / 2];
};

/* Products are done in the order in which they began; each makes room for its panels. */
template <int DONE> DEVICE void release_units(const arena &a, u32 n)
{
    if constexpr (DONE < PRODUCTS) {
        wgmma_wait<PRODUCTS - 1 - DONE>();
        barrier_arrive_if(barrier_of(a.empty, n, HAS_REST + DONE), (threadIdx.x & 31) == 0);
        release_units<DONE + 1>(a, n);
    }
}

/* o += P V for block n of the CTA. */
DEVICE void add_block(half_row &f, const arena &a, u32 n)
{
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32 & 3;
    u32 w[4][4];
    barrier_wait(a.weights_full, n & 1);
#pragma unroll
    for (int i = 0; i < 4; i++)
        load_words(w[i], a.weights + ((warp * 4 + i) * 32 + lane) * 16);
    if (load_word(a.raised + warp * 4)) {
        u32 at = a.factors + (warp_row() + lane / 4) * 4;
        float by[2] = {__uint_as_float(load_word(at)), __uint_as_float(load_word(at + 32))};
#pragma unroll
        for (int i = 0; i < PRODUCTS; i++)
            rows_scale(f.o[i], by);
    }
    __syncwarp();
    barrier_arrive_if(a.weights_empty, lane == 0);
    u64 v = operand(stage_of(a, n) + (role_of_thread() - LEFT) * SIDE_PANELS * PANEL, PANEL);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < PRODUCTS; i++) {
        await_unit(a, n, HAS_REST + i);
#pragma unroll
        for (int kk = 0; kk < 4; kk++)
            wgmma_pv(f.o[i], w[kk][0], w[kk][1], w[kk][2], w[kk][3],
                     v + (i * AT_ONCE * PANEL + kk * 2048) / 16);
        wgmma_commit();
    }
    release_units<0>(a, n);
}

/* The thread's columns of one of its two rows, and whether they are finite. */
template <int R>
DEVICE void put_columns(const half_row &f, const arena &a, const cu_fwd &p, const piece &x)
{
    int lane = threadIdx.x & 31, row = warp_row() + lane / 4 + 8 * R;
    int side = role_of_thread() - LEFT, first = side * (CFG_E / 2) + 2 * (lane & 3);
    float bad = 0.f, inv = a.sums[row].w;
#pragma unroll
    for (int i = 0; i < PRODUCTS; i++)
#pragma unroll
        for (int g = 0; g < COLUMNS / 8; g++)
            bad = fmaf(f.o[i][4 * g + 2 * R] + f.o[i][4 * g + 2 * R + 1], 0.f, bad);
    bad = quad_sum(bad);
    if ((lane & 3) == 0)
        a.bad[side * ROWS + row] = bad;
    if (row >= span_rows(p, x.s))
        return;
    float *part = p.part_o + ((long long)x.slot * ROWS + row) * CFG_E + first;
    out_elem *out = output_row(p, x.s, row) + first;
#pragma unroll
    for (int i = 0; i < PRODUCTS; i++)
#pragma unroll
        for (int g = 0; g < COLUMNS / 8; g++) {
            float y = f.o[i][4 * g + 2 * R], z = f.o[i][4 * g + 2 * R + 1];
            if (x.is_whole)
                store_out2(out + i * COLUMNS + 8 * g, y * inv, z * inv);
            else
                *(float2 *)(part + i * COLUMNS + 8 * g) = make_float2(y, z);
        }
}

DEVICE void add_values(const arena &a, const cu_fwd &p, const mod_args &mod, const line &l)
{
    half_row f;
    cursor at;
    int end = share_of_cta(p, mod, l, at);
    u32 n = 0;
#pragma unroll 1
    while (at.t < end) {
        piece x = next_piece(p, mod, l, at, end);
#pragma unroll
        for (int i = 0; i < PRODUCTS; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS / 2; j++)
                f.o[i][j] = 0.f;
#pragma unroll 1
        for (int i = x.first; i < x.last; i++)
            add_block(f, a, n++);
        sync_rows();
        put_columns<0>(f, a, p, x);
        put_columns<1>(f, a, p, x);
        sync_rows();
    }
}
