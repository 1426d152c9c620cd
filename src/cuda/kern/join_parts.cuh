/* The kernel that joins the parts of few rows (CFG_BY_PARTS), each row's in their order, and
 * gives it the bits that it would have among many. */
#pragma once

#include "careful.cuh"
#include "parts.cuh"

enum {
    JOIN_COLUMNS = (CFG_E + 127) / 128, /* fours of a lane */
    JOIN_AT_ONCE = 16 / JOIN_COLUMNS    /* parts that are on their way */
};

/* The results of a row: those of rows_end and rows_store. Returns whether it is to be made
 * again. */
DEVICE int end_row(const cu_fwd &p, int b, packed_row x, float m, float l, float peak,
                   const float4 (&o)[JOIN_COLUMNS])
{
    int lane = threadIdx.x & 31;
    float inv = l == 0.f ? 0.f : 1.f / l, zero = 0.f;
    float lse = l == 0.f ? NEG_INF : (m + log2f(l)) * 0.6931471805599453f;
#if CFG_SINKS
    add_sink(sink_of(p, b, x.h, x.m), m, l, inv, lse);
#endif
    out_elem *row = (out_elem *)p.o + b * p.os.b + x.h * p.os.h + x.m * p.os.n;
#pragma unroll
    for (int e = 0; e < JOIN_COLUMNS; e++) {
        int column = 128 * e + 4 * lane;
        zero = fmaf(o[e].x, 0.f, fmaf(o[e].y, 0.f, zero));
        zero = fmaf(o[e].z, 0.f, fmaf(o[e].w, 0.f, zero));
        if (column < CFG_E_REAL)
            store_out4(row + column, o[e].x * inv, o[e].y * inv, o[e].z * inv, o[e].w * inv);
    }
    if (lane == 0) {
        put_lse(p, b, x.h, x.m, lse);
        put_row_max(p, b, x.h, x.m, peak * 0.6931471805599453f);
    }
    return __any_sync(~0u, zero != 0.f || row_is_lost(m, l));
}

/* A warp joins a row. */
extern "C" __global__ void __launch_bounds__(128)
    join_parts(const __grid_constant__ cu_fwd p, const __grid_constant__ mod_args mod)
{
    int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x & 31;
    int pair = row / p.decode.rows, packed = row - pair * p.decode.rows;
    if (pair >= p.B * p.G)
        return;
    tile t = item_at(p, pair * p.n_split * p.decode.tiles);
    packed_row x = unpack_row(p, t, packed);
    int n = min(p.n_split, (t.kv_len + CFG_PART_KEYS - 1) / CFG_PART_KEYS);
    long long first = (long long)pair * p.n_split * p.decode.rows + packed;
    float m = M_START, l = 0.f, peak = NEG_INF;
    float4 o[JOIN_COLUMNS] = {};
    grid_wait_before();
    for (int i0 = 0; i0 < n; i0 += JOIN_AT_ONCE) {
        float4 state[JOIN_AT_ONCE], part[JOIN_AT_ONCE][JOIN_COLUMNS];
#pragma unroll
        for (int i = 0; i < JOIN_AT_ONCE; i++) {
            long long at = first + (long long)min(i0 + i, n - 1) * p.decode.rows;
            state[i] = load_new4(p.part_ml + at * 4);
#pragma unroll
            for (int e = 0; e < JOIN_COLUMNS; e++)
                part[i][e] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int e = 0; e < JOIN_COLUMNS; e++)
                if (128 * e + 4 * lane < CFG_E)
                    part[i][e] = load_new4(p.part_o + at * CFG_E + 128 * e + 4 * lane);
        }
#pragma unroll
        for (int i = 0; i < JOIN_AT_ONCE; i++) {
            if (i0 + i >= n)
                break;
            joining j = join_state(m, l, state[i].x, state[i].y);
            peak = fmaxf(peak, state[i].z);
#pragma unroll
            for (int e = 0; e < JOIN_COLUMNS; e++) {
                o[e].x = joined(o[e].x, part[i][e].x, j);
                o[e].y = joined(o[e].y, part[i][e].y, j);
                o[e].z = joined(o[e].z, part[i][e].z, j);
                o[e].w = joined(o[e].w, part[i][e].w, j);
            }
        }
    }
    if (!end_row(p, t.b, x, m, l, peak, o))
        return;
    __syncwarp(); /* the row is there, written by other lanes */
    t.h = x.h;
    redo_row(p, mod, t, x.m);
}
