/* How the rows of a small tile begin and end, and how those that came out not finite are made
 * again. A warp's tiles with such rows hang in a chain through p.flags. */
#pragma once

#include "careful.cuh"

DEVICE void begin_rows(consumer &c, const cu_fwd &p, const mod_args &mod, const tile &t,
                       float (&o)[O_COUNT])
{
    rows_begin(c.rows);
    rows_place(c.at, p, mod, t);
    c.unit = score_unit(p);
#if SCORE_TANH
    c.large = 0;
#endif
#pragma unroll
    for (int i = 0; i < O_COUNT; i++)
        o[i] = 0.f;
}

/* lost: the tile that the chain begins with; -1: none. */
DEVICE void end_rows(consumer &c, const cu_fwd &p, int id, float (&o)[O_COUNT], int &lost)
{
    float inv[2];
    /* The tile's place is computed again, for keeping it would cost the loop registers. */
    asm volatile("" : "+r"(id));
    tile t = tile_at(p, id, ROWS);
    int is_lost = rows_end(c.rows, p, t, o, inv);
    rows_store(p, t, o, inv);
    if (is_lost) {
        if ((threadIdx.x & 31) == 0)
            p.flags[id * 4 + group_of_thread()] = lost;
        lost = id;
    }
    __syncwarp(); /* else ptxas takes the warp for divergent, and waits for each product */
}

/* Rows of the chain, in plain f32 by the warp that made them. */
DEVICE void redo_rows(const cu_fwd &p, const mod_args &mod, int id)
{
    __syncwarp();
#pragma unroll 1
    while (id >= 0) {
        tile t = tile_at(p, id, ROWS);
        int first = t.row0 + group_of_thread() * 16;
#pragma unroll 1
        for (int m = first; m < min(first + 16, p.M); m++)
            redo_row(p, mod, t, m);
        id = *(volatile int *)&p.flags[id * 4 + group_of_thread()];
    }
}
