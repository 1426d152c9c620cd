/* The end of a span whose rows are shared by two warps, each with half of O's columns and half
 * of the sums: results leave from registers. */
#pragma once

DEVICE void put_sums(const reduce_memory &sh, const fragment &f, int row)
{
    float bad[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < O_COUNT; i++)
        bad[i / 2 & 1] = fmaf(f.o[i], 0.f, bad[i / 2 & 1]);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float4 x = make_float4(f.rows.m[r], quad_sum(f.rows.l[r]), quad_max(f.rows.peak[r]),
                               quad_sum(bad[r]));
        if ((threadIdx.x & 3) == 0)
            *(float4 *)(sh.ml + (column_part() * ROWS + row + 8 * r) * 4) = x;
    }
}

DEVICE row_sums get_sums(const reduce_memory &sh, int row)
{
    float4 a = *(const float4 *)(sh.ml + row * 4);
    float4 b = *(const float4 *)(sh.ml + (ROWS + row) * 4);
    row_sums s = {make_float3(a.x, a.y + b.y, fmaxf(a.z, b.z)), 0};
    s.is_bad = a.w != 0.f || b.w != 0.f || row_is_lost(s.x.x, s.x.y);
    return s;
}

#if CFG_CODES
/* The warp's columns of one of the thread's two rows, four at a time: of what a piece of V
 * widens to a thread has neighbouring ones. */
template <int R>
DEVICE void put_columns(const fragment &f, const cu_fwd &p, const span &s, int row, int slot,
                        int is_whole, float inv)
{
    enum { OF_PIECE = 128 / CODE_BITS, OWN = 2 * PAIRS };
    int first = column_part() * (CFG_E / PARTS) + OWN * (threadIdx.x & 3);
    float *part = p.part_o + ((long long)slot * ROWS + row) * CFG_E + first;
    out_elem *out = output_row(p, s, row) + first;
#pragma unroll
    for (int i = 0; i < CFG_E / PARTS / 4 / 4; i++) {
        int e = 4 * i / OWN, k = 4 * i % OWN, column = e * OF_PIECE + k;
        float x[4];
#pragma unroll
        for (int c = 0; c < 4; c++) /* code_column's, from the first of the thread on */
            x[c] = f.o[(PAIRS * e + (k + c) % PAIRS) * 4 + 2 * R + (k + c) / PAIRS];
        if (!is_whole)
            *(float4 *)(part + column) = make_float4(x[0], x[1], x[2], x[3]);
        else if (first + column < CFG_E_REAL)
            store_out4(out + column, x[0] * inv, x[1] * inv, x[2] * inv, x[3] * inv);
    }
}
#else
/* The warp's columns of one of the thread's two rows. */
template <int R>
DEVICE void put_columns(const fragment &f, const cu_fwd &p, const span &s, int row, int slot,
                        int is_whole, float inv)
{
    int first = column_part() * (CFG_E / PARTS) + 2 * (threadIdx.x & 3);
    float *part = p.part_o + ((long long)slot * ROWS + row) * CFG_E + first;
    out_elem *out = output_row(p, s, row) + first;
#pragma unroll
    for (int g = 0; g < CFG_E / PARTS / 8; g++) {
        float x = f.o[4 * g + 2 * R], y = f.o[4 * g + 2 * R + 1];
        if (!is_whole)
            *(float2 *)(part + 8 * g) = make_float2(x, y);
        else if (first + 8 * g < CFG_E_REAL)
            store_out2(out + 8 * g, x * inv, y * inv);
    }
}
#endif

template <int R>
DEVICE void write_one(const reduce_memory &sh, const fragment &f, const cu_fwd &p,
                      const span &s, int slot, int is_whole, int &lost)
{
    int lane = threadIdx.x & 31, row = warp_row() + lane / 4 + 8 * R;
    int is_first = column_part() == 0 && (lane & 3) == 0, is_there = row < span_rows(p, s);
    row_sums y = get_sums(sh, row);
    if (is_there) {
        put_columns<R>(f, p, s, row, slot, is_whole,
                       is_whole ? row_inverse(p, s, row, y.x) : 1.f);
        if (is_first)
            put_row(p, s, row, slot, is_whole, y);
    }
    u32 bad = __ballot_sync(~0u, is_there && is_first && y.is_bad && p.decode.cluster);
#pragma unroll 1
    for (; bad; bad &= bad - 1)
        chain_row(p, s, warp_row() + (__ffs(bad) - 1) / 4 + 8 * R, lost);
}

/* A span's result, or its part for decode_end. */
DEVICE void write_columns(const reduce_memory &sh, fragment &f, const cu_fwd &p, const span &s,
                          int slot, int is_whole, int &lost)
{
#if CFG_CODES && HALF_VALUES
    float by[2] = {power_of(f.unit), power_of(f.unit)};
    rows_scale(f.o, by);
#endif
    put_sums(sh, f, warp_row() + (threadIdx.x & 31) / 4);
    sync_rows();
    write_one<0>(sh, f, p, s, slot, is_whole, lost);
    write_one<1>(sh, f, p, s, slot, is_whole, lost);
}
